"""The card of a device: predicted and measured figures, and results of all parts."""

import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import JsonValue

from omnibal.base.files import atomic, write_json_model
from scripts.gpu_proof.result import Proof

FAKE = "Stages ran on a fake device, which only counts, the rest on the CPU. No figure is of a GPU."


def card_name(proof: Proof) -> str:
    """Name of a device's files in docs/cards."""
    return re.sub(r"[^\w.-]+", "-", str(proof.machine.device))


def write_card(proof: Proof, folder: Path, name: str) -> None:
    """Write the card as text and as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json_model(proof, folder / f"{name}.json")
    with atomic(folder / f"{name}.md") as written:
        written.write_text(card_text(proof), encoding="utf-8")


def card_text(proof: Proof) -> str:
    """The card in Markdown."""
    machine, parts = proof.machine, {part.name: part for part in proof.parts}.values()
    facts = [("Python", machine.python), *machine.versions.items()]
    if machine.memory_gib is not None:
        facts.insert(0, ("Device memory", f"{machine.memory_gib:.1f} GiB"))
    if machine.cuda is not None:
        facts.append(("CUDA of torch", machine.cuda))
    title = f"Fake device\n\n{FAKE}" if proof.pretended else machine.device
    blocks = [f"# {title}", _table(["", ""], facts)]
    compared = [
        (part.name, one.of, one.unit, one.predicted, one.measured, one.measured / one.predicted)
        for part in parts
        for one in part.comparisons
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
