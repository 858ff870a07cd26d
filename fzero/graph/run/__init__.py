"""A scheduled graph, cut at its collectives, compiled and run."""
