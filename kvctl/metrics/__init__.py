"""Floor 0: one table of metric definitions, and the arithmetic of latencies. No I/O."""
