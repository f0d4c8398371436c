"""Searches around a plan: caps, parallel sizes, levels, and changes to make a job fit."""
