"""A training run: command line, process launch, training loop, logs and joint shutdown."""
