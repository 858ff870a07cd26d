"""A call of a step, recorded as one flat graph."""
