"""Card of a device: predicted and measured figures, and results of all parts."""

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, PositiveFloat

from omnibal.base.files import atomic, write_json_model
from omnibal.base.frozen import Frozen

FAKE = "Stages ran on a fake device, which only counts, the rest on the CPU. No figure is of a GPU."


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
    device: str | None  # name of the first CUDA device, or None if absent or fake
    memory_gib: float | None
    cuda: str | None
    python: str
    versions: dict[str, str]


class Comparison(Frozen):
    """A predicted and measured quantity."""

    of: str
    unit: str
    predicted: PositiveFloat
    measured: float


class PartResult(Frozen):
    """Outcome and figures of a part."""

    name: str
    status: Status
    reason: str = ""
    seconds: float
    limit_s: float
    comparisons: tuple[Comparison, ...] = ()
    figures: dict[str, JsonValue]  # some, if the part did not finish


class Proof(Frozen):
    machine: Machine
    on_fake_device: bool  # whether it ran without a GPU
    parts: tuple[PartResult, ...]


def describe_machine(on_fake_device: bool) -> Machine:
    """Return the device and versions of packages."""
    # In a separate process, so that this one holds no device memory.
    about = {"device": None, "memory_gib": None, "cuda": None}
    if not on_fake_device:
        answer = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True)
        if answer.returncode == 0:
            about = json.loads(answer.stdout)
    versions = {}
    for package in _VERSIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return Machine(**about, python=sys.version.split()[0], versions=versions)


def card_name(proof: Proof) -> str:
    """Return the name of a device's files in docs/cards."""
    return re.sub(r"[^\w.-]+", "-", str(proof.machine.device))


def write_card(proof: Proof, folder: Path, name: str) -> None:
    """Write the card as Markdown and as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json_model(proof, folder / f"{name}.json")
    with atomic(folder / f"{name}.md") as temporary:
        temporary.write_text(card_text(proof), encoding="utf-8")


def card_text(proof: Proof) -> str:
    """Return the card in Markdown; a part that ran twice has its last result."""
    machine, parts = proof.machine, {part.name: part for part in proof.parts}.values()
    facts = [("Python", machine.python), *machine.versions.items()]
    if machine.memory_gib is not None:
        facts.insert(0, ("Device memory", f"{machine.memory_gib:.1f} GiB"))
    if machine.cuda is not None:
        facts.append(("CUDA of torch", machine.cuda))
    title = f"Fake device\n\n{FAKE}" if proof.on_fake_device else machine.device
    blocks = [f"# {title}", _table(["", ""], facts)]
    compared = [
        (part.name, row.of, row.unit, row.predicted, row.measured, row.measured / row.predicted)
        for part in parts
        for row in part.comparisons
    ]
    if compared:
        heads: list[JsonValue] = ["part", "of", "unit", "predicted", "measured", "ratio"]
        blocks += ["## Predicted and measured", _table(heads, compared)]
    heads = ["part", "status", "seconds", "limit", "reason"]
    ended = [(part.name, part.status, part.seconds, part.limit_s, part.reason) for part in parts]
    blocks += ["## Parts", _table(heads, ended)]
    figures = [(part.name, *figure) for part in parts for figure in part.figures.items()]
    blocks += ["## Other figures", _table(["part", "figure", "value"], figures)]
    return "\n\n".join(blocks) + "\n"


def _table(heads: list[JsonValue], rows: Iterable[Iterable[JsonValue]]) -> str:
    lines: list[Iterable[JsonValue]] = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: JsonValue) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    text = "" if value is None else str(value)
    return re.sub(r"([|<>&\\\[\]])", r"\\\1", " ".join(text.split()))
