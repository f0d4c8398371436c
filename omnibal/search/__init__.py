"""Choices around a plan: caps, parallel sizes, and what would make a job fit."""
