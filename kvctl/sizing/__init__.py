"""Floor 1: what fits and how fast, from a model and a machine."""
