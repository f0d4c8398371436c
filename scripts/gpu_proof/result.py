"""What a proof finds: types of proof.json."""

import importlib.metadata
import json
import subprocess
import sys
from contextlib import suppress
from typing import Literal

from pydantic import JsonValue

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
    """What the parts run on."""

    device: str | None
    """Name of the first CUDA device; None without one, or where it is a fake one."""
    memory_gib: float | None
    cuda: str | None
    """CUDA version of torch's build."""
    python: str
    versions: dict[str, str]
    """Installed packages."""


class PartResult(Frozen):
    """One part: what came of it, and what it measured."""

    name: str
    status: Status
    reason: str = ""
    """Why it failed or was skipped."""
    seconds: float
    figures: dict[str, JsonValue]
    """Also of a part that did not end: what it had found until then."""


class Proof(Frozen):
    """Content of proof.json."""

    machine: Machine
    pretended: bool
    """Whether no GPU was asked: nothing in it is a figure of one."""
    parts: tuple[PartResult, ...]

    def with_part(self, part: PartResult) -> "Proof":
        """Return the proof with one part more."""
        return self.model_copy(update={"parts": (*self.parts, part)})


def describe_machine(pretended: bool) -> Machine:
    """Ask torch in a process of its own, so that this one holds no device memory."""
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
