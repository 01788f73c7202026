"""The parts of scripts/gpu_check.py: each is a function of a `Bench` that yields rows as it finds them."""
