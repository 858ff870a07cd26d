"""What a scheduled graph will hold and send, counted before it runs."""
