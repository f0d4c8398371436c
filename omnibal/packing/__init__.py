"""Samples into packs, packs into optimizer steps, and steps over data-parallel ranks."""
