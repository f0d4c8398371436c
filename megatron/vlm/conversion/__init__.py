"""Conversion of released InternVL checkpoints to this project's and back, a tensor at a time."""
