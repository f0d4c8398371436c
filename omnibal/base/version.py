"""Version of the planner, also `omnibal.__version__`."""

VERSION = "0.1.0"
