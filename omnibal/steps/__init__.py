"""Packs into optimizer steps, and steps over data-parallel ranks."""
