"""Conversion of released checkpoints to this project's and back, a tensor at a time."""
