"""Types of a card's JSON file."""

import importlib.metadata
import json
import subprocess
import sys
from contextlib import suppress
from typing import Literal

from pydantic import JsonValue, PositiveFloat

from omnibal.base.frozen import Frozen

Status = Literal["ok", "failed", "skipped", "timed-out"]

_ASK_TORCH = """
import json, torch
on = torch.cuda.is_available()
about = torch.cuda.get_device_properties(0) if on else None
print(json.dumps({
    "device": about.name if on else None,
    "memory_gib": about.total_memory / 2**30 if on else None,
    "cuda": torch.version.cuda,
}))
"""
_VERSIONS = ("torch", "megatron-core", "triton", "transformer-engine", "numpy", "pydantic")


class Machine(Frozen):
    device: str | None
    """Name of the first CUDA device. None if absent or fake."""
    memory_gib: float | None
    cuda: str | None
    python: str
    versions: dict[str, str]


class Comparison(Frozen):
    """A predicted quantity, and the same as measured."""

    of: str
    unit: str
    predicted: PositiveFloat
    measured: float


class PartResult(Frozen):
    """Outcome and measurements of one part."""

    name: str
    status: Status
    reason: str = ""
    seconds: float
    limit_s: float
    comparisons: tuple[Comparison, ...] = ()
    figures: dict[str, JsonValue]
    """Figures, partial if the part did not finish."""


class Proof(Frozen):
    machine: Machine
    pretended: bool
    """Whether it ran without a GPU."""
    parts: tuple[PartResult, ...]


def describe_machine(pretended: bool) -> Machine:
    """Ask torch in a separate process, so that this one holds no device memory."""
    about = {"device": None, "memory_gib": None, "cuda": None}
    if not pretended:
        asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True)
        if asked.returncode == 0:
            about = json.loads(asked.stdout)
    versions = {}
    for package in _VERSIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return Machine(**about, python=sys.version.split()[0], versions=versions)
