"""Floor 0: what a model weighs - layers, KV bytes, parameters, hardware. No torch, no numpy."""
