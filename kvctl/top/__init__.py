"""Floor 3: the dashboard over /metrics."""
