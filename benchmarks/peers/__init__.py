"""The comparison with DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed: one file a question, run by `make bench`."""
