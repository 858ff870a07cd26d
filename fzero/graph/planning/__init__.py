"""Plans: the bytes that a scheduled graph will hold and send, and its time, counted before it runs."""
