"""Input and output of a trainer's export: `export(given: ExportInput) -> Exported`."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths
from omnibal.job.plan import Plan
from omnibal.job.plan_files import PlanFiles
from omnibal.model.targets import TrainerConstraints
from omnibal.packing.packs import ScheduledPacks
from omnibal.trainers.export.reading_order import packs_per_step

Writer = Callable[[Path], object]  # writes a file at the path


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExportInput:
    """A plan to export, with its data and folder."""

    files: PlanFiles
    target: TrainerConstraints  # trainer to export for, not always the plan's
    order: ScheduledPacks | None  # in reading order, or None for a plan of shapes only
    annotations: Annotations | None  # or None without --data: only the reading order is written
    folder: Path  # folder of the export, for paths in commands
    workers: int = 0  # loader processes per rank
    checkpoint: str = ""  # released checkpoint: a folder, or a name on a hub

    @property
    def plan(self) -> Plan:
        return self.files.plan

    @property
    def lengths(self) -> Lengths:
        """Lengths of the data, whose rows `order` refers to."""
        return self.files.steps[1]

    @property
    def packs_per_step(self) -> int:
        """Packs of a full step over all ranks."""
        return packs_per_step(self.plan)

    @property
    def full_steps(self) -> int | None:
        """Number of full steps, or None for a plan of shapes only."""
        return None if self.order is None else len(self.order) // self.packs_per_step

    @property
    def longest_pack(self) -> int:
        """Tokens of the longest pack, or the cap for a plan of shapes only."""
        if self.order is None:
            assert self.plan.shapes is not None  # a plan has samples or shapes
            return self.plan.shapes.caps["tokens"]
        return int(self.order.tokens.max())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exported:
    """Files and texts of an export."""

    files: Mapping[str, Writer]  # by path within the folder, such as `packs/boundaries.npy`
    command: str  # training command in shell, with all flags set by the plan
    # Shell variables that commands may use, with default values as shell words.
    variables: Mapping[str, str] = field(default_factory=dict)
    settings: str = ""  # settings outside the command line, such as Python or JSON for a config
    deviations: tuple[str, ...] = ()  # sentences: parts of plan or data the trainer cannot follow
    notes: tuple[str, ...] = ()  # sentences: advice for the run

    @property
    def script(self) -> str:
        """The command, below assignments of the variables that it needs."""
        text = self.command
        # Backwards: a value may use an earlier variable, such as $EXPORT.
        for name, value in list(self.variables.items())[::-1]:
            if f"${name}" in text:
                text = f"{name}={value}\n{text}"
        return text


def shell_word(value: str) -> str:
    """Return a value quoted for shell. Variables expand in a value that begins with `$`."""
    return f'"{value}"' if value.startswith("$") else shlex.quote(value)


def text_file(text: str) -> Writer:
    return lambda path: path.write_text(text, encoding="utf-8")


def json_file(value: Any) -> Writer:
    return text_file(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def array_file(array: np.ndarray) -> Writer:
    return lambda path: np.save(path, array, allow_pickle=False)


def script_file(name: str) -> Writer:
    """Return a writer of a script that runs with the trainer, without importing omnibal."""
    script = files("omnibal.trainers.export").joinpath("scripts", name)
    return text_file(script.read_text(encoding="utf-8"))


def fill_template(name: str, **values: Any) -> str:
    """Return the text of a template of this folder."""
    templates = Environment(
        loader=PackageLoader("omnibal.trainers", "export"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return templates.get_template(name).render(values)
