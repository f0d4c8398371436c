"""Samples into packs under several limits, and bounds on how few can do."""
