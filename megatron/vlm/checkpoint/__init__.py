"""Saving and loading; what a checkpoint is of; which folder is whole."""
