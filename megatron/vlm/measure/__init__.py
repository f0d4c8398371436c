"""Timing of the trainer's parts: `omnibal profile`, and replays of single stages."""
