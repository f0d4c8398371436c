"""What an export consists of: files, the command that trains with them, and what was given up.

A trainer's module has one function, `export(given: ExportInput) -> Exported`. It writes nothing
itself: `omnibal.export.directory` writes all files of an export or none.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from omnibal.data.annotations import Annotations
from omnibal.export.reading_order import ReadingOrder, packs_per_step
from omnibal.job.plan_files import PlanFiles
from omnibal.model.targets import TrainerConstraints

Writer = Callable[[Path], object]
"""Writes one file at a path that it is given."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExportInput:
    """A plan to export, and what is known besides."""

    files: PlanFiles
    target: TrainerConstraints
    order: ReadingOrder | None
    """None for a plan of shapes only, of which only flags and layers are exported."""
    annotations: Annotations | None
    """The samples themselves; None where no data was named, so that files that hold samples are
    left out and the order in which to write them is given instead."""
    folder: Path
    """Where the export will stand, for paths in commands."""
    workers: int = 0

    @property
    def packs_per_step(self) -> int:
        """Packs of all data-parallel ranks in a full step."""
        plan = self.files.plan
        if plan.data is not None:
            return packs_per_step(plan.data, plan.parallel.data)
        assert plan.shapes is not None  # as an export is of a plan with either
        return plan.shapes.micro_batches_per_step * plan.parallel.data

    @property
    def longest_pack(self) -> int:
        """Tokens of the longest pack; of a plan of shapes only, of every one."""
        if self.order is None:
            assert self.files.plan.shapes is not None  # as an export is of a plan with either
            return self.files.plan.shapes.caps["tokens"]
        return int(self.order.packs.sums(self.files.steps[1].tokens).max())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exported:
    """The files and words of one export."""

    files: Mapping[str, Writer]
    """By their paths within the folder, such as `packs/boundaries.npy`."""
    command: str
    """What trains: one or several lines of shell, with every flag that the plan decides."""
    settings: str = ""
    """Settings that are no command line, such as Python or JSON to put into a config."""
    given_up: tuple[str, ...] = ()
    """Sentences on what the trainer cannot do of the plan or the data, or does otherwise."""
    notes: tuple[str, ...] = ()


def text_file(text: str) -> Writer:
    """Writes text as UTF-8."""
    return lambda path: path.write_text(text, encoding="utf-8")


def json_file(value: Any) -> Writer:
    """Writes a value as JSON."""
    return text_file(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def array_file(array: np.ndarray) -> Writer:
    """Writes an array as NumPy's `.npy`."""
    return lambda path: np.save(path, array, allow_pickle=False)


def script_file(name: str) -> Writer:
    """Copies a script of this package, which runs beside the trainer and imports nothing of it."""
    return text_file(files("omnibal.export").joinpath("scripts", name).read_text(encoding="utf-8"))
