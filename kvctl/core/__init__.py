"""Floor 0: the scheduler world in plain ints. Knows no tensors, no clock, no network."""
