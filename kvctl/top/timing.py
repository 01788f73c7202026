"""The times that options and keys choose from. Numbers only, so that reading the options imports nothing. Floor 3."""

WINDOWS_S = (5.0, 15.0, 60.0)  # of rates and quantiles on the screen
INTERVALS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # that `+` and `-` go through
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 600.0
