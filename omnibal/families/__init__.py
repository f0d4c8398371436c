"""Families of released models: their `config.json` read as a ModelConfig."""
