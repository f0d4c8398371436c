"""Packs of the plan to micro-batches."""
