"""Sizes and time limits of a proof's jobs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Jobs of all parts. Limits are in seconds."""

    limits_s: Mapping[str, float]
    tests: tuple[str, ...]
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
    """Stages, most informative first: first vision stage, stage with the head, middle stages."""
    trained_samples: int
    trained_steps: int


REAL = Settings(
    limits_s={"tests": 120, "profile": 80, "replay": 170, "train": 95, "providers": 65},
    tests=("tests/training/test_cuda.py",),
    model="internvl-chat-1.5-6b-20b",
    sizes=("--tp", "2", "--pp", "4", "--dp", "4"),
    max_tiles=9,
    max_tokens=4096,
    tokens_per_sample=1000,
    samples=4000,
    micro_batches=8,
    replayed=(0, 3, 1, 2),
    trained_samples=600,
    trained_steps=30,
)
"""InternViT-6B with InternLM2-20B, on the first of two tensor-parallel ranks."""

_ON_A_CPU = ("tests/training/test_fused_compiled.py", "tests/training/test_fake_device.py")

FAKE_DEVICE = replace(
    REAL,
    limits_s={"tests": 300, "profile": 300, "replay": 600, "train": 300, "providers": 300},
    tests=_ON_A_CPU,
    replayed=(0, 3),
    trained_steps=10,
)
"""This plan on fake devices. Parts that need computation use a small model."""

TINY = replace(
    FAKE_DEVICE,
    tests=("tests/training/test_fake_device.py", "-k", "single_operations"),
    model="internvl-digits",
    sizes=("--tp", "2", "--pp", "2", "--dp", "2"),
    max_tiles=8,
    max_tokens=256,
    tokens_per_sample=60,
    samples=0,
    micro_batches=2,
    replayed=(0,),
    trained_samples=60,
    trained_steps=2,
)
"""Minimal sizes, to test the proof itself."""
