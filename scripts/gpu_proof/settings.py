"""Sizes and time limits of a proof's jobs."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Jobs of all parts: stages of InternViT-6B with InternLM2-20B; training of a small model."""

    limits_s: Mapping[str, float]
    trained_steps: int
    checkpoint_gib: float
    model: str = "internvl-chat-1.5-6b-20b"
    """Model whose stages are replayed and whose layers are profiled."""
    sizes: tuple[str, ...] = ("--tp", "2", "--pp", "4", "--dp", "4")
    max_tiles: int = 9
    max_tokens: int = 4096
    tokens_per_sample: int = 1000
    samples: int = 4000
    """Synthetic samples of the replayed plan. 0 fills every micro-batch to the caps."""
    micro_batches: int = 8
    replayed: tuple[int, ...] = (0, 3)
    """Stages, most informative first."""


_LIMITS_S = {"tests": 90, "train": 120, "replay": 120, "checkpoint": 60, "profile": 80}
REAL = Settings(limits_s=_LIMITS_S | {"providers": 60}, trained_steps=200, checkpoint_gib=8.0)
FAKE_DEVICE = Settings(
    limits_s=dict.fromkeys(REAL.limits_s, 300), trained_steps=12, checkpoint_gib=0.25
)
