"""Runs: the steps of `omnibal run`, costs fitted to a run log, and the plan of what is left."""
