"""A tree of parameters, made leaf by leaf."""
