"""Sizes and time limits of a proof's jobs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Jobs of all parts. Limits are in seconds."""

    limits_s: Mapping[str, float]
    model: str
    """Model whose stages are replayed and whose layers are profiled."""
    sizes: tuple[str, ...]
    max_tiles: int
    max_tokens: int
    tokens_per_sample: int
    samples: int
    """Synthetic samples of the replayed plan. 0 fills every micro-batch to the caps."""
    micro_batches: int
    replayed: tuple[int, ...]
    """Stages, most informative first."""
    trained_samples: int
    trained_steps: int
    checkpoint_gib: float


REAL = Settings(
    limits_s={
        "tests": 90, "train": 100, "replay": 120, "checkpoint": 60, "profile": 80, "providers": 80
    },
    model="internvl-chat-1.5-6b-20b",
    sizes=("--tp", "2", "--pp", "4", "--dp", "4"),
    max_tiles=9,
    max_tokens=4096,
    tokens_per_sample=1000,
    samples=4000,
    micro_batches=8,
    replayed=(0, 3),
    trained_samples=600,
    trained_steps=200,
    checkpoint_gib=8.0,
)  # fmt: skip
"""InternViT-6B with InternLM2-20B, on the first of two tensor-parallel ranks."""

FAKE_DEVICE = replace(
    REAL,
    limits_s=dict.fromkeys(REAL.limits_s, 300),
    trained_samples=200,
    trained_steps=12,
    checkpoint_gib=0.25,
)
"""This plan on fake devices. Parts that need computation use a small model."""
