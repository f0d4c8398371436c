"""Steps of `omnibal run`, costs fitted to a run log, and plans for the remaining steps."""
