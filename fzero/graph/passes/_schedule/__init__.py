"""schedule: the order in which a graph runs, so that little is alive at any time."""
