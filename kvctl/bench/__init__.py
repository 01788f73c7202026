"""Floor 3: the load generator."""
