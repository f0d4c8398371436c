"""Files, errors and typed settings: what every other package uses."""
