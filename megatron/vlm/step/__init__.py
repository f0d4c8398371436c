"""One training step of a pipeline; loss and answers on held-out data."""
