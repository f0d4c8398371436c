"""Files, errors and typed settings."""
