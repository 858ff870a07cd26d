"""The planner beside runs that others published. README.md tells where the numbers come from."""
