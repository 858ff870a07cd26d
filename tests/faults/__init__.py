"""The fault harness: training on real processes that are killed, starved and damaged, and must go on. `make faults`."""
