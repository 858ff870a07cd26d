"""Executors: a scheduled graph is split at its collectives into segments, which are compiled and run."""
