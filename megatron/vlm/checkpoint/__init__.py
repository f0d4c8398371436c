"""Saving and loading of checkpoints, their identity and their files."""
