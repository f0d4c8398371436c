"""Training steps that others measured on GPUs, beside what `omnibal lint` predicts of them.

Rows, with their sources, are in `measured/*.json`. Each becomes a launch line of its trainer
(`measured_rows.py`) and is predicted on a preset as any line is. A row that calibrates a constant
says so; all others were only predicted.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from measured_rows import TUNED, Measured, measured_row
from paper import print_table

from omnibal.base.errors import UserError
from omnibal.job.published_errors import FILE, SMALL_TOKENS, JobKind, PublishedErrors, device_of
from omnibal.report.drawing import COLOURS, make_logarithmic, new_figure, style, svg_file
from omnibal.report.formatting import write_ascii
from omnibal.trainers.lint.command_line import read_launch
from omnibal.trainers.lint.launched import launched
from omnibal.trainers.lint.line import line_of
from omnibal.trainers.lint.predicted import Costed, predicted_line

FOLDER = Path(__file__).with_name("measured")
LAYOUTS = "layouts"
"""Kind of the rows that compare layouts of one job; its misses are of ranking and memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A row of a file with its prediction, or why it has none."""

    file: str
    place: int
    kind: str = ""
    measured: Measured | None = None
    predicted_ms: float | None = None
    peak_gib: float | None = None
    """Memory as the row has it."""
    fits: bool | None = None
    micro_batch_tokens: int = 0
    refused: str | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured step, minus 1. None without either."""
        if self.measured is None or self.measured.step_ms is None or self.predicted_ms is None:
            return None
        return self.predicted_ms / self.measured.step_ms - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured allocated memory, minus 1. None without either."""
        if self.measured is None or self.measured.allocated_gib is None or self.peak_gib is None:
            return None
        return self.peak_gib / self.measured.allocated_gib - 1

    @property
    def calibrates(self) -> str:
        """Constants calibrated on the row. Empty if it was only predicted."""
        return "" if self.measured is None else self.measured.calibrates

    def record(self) -> dict[str, Any]:
        """The row as JSON."""
        found = {"file": self.file, "row": self.place, "kind": self.kind}
        if self.measured is not None:
            row = self.measured
            found |= {
                "name": row.name,
                "group": row.group,
                "line": row.line,
                "options": row.options,
                "measured_ms": row.step_ms,
                "measured_gib": row.allocated_gib,
                "out_of_memory": row.out_of_memory,
                "calibrates": row.calibrates,
            }
        if self.refused is not None:
            return found | {"refused": self.refused}
        predicted = {"predicted_ms": self.predicted_ms, "peak_gib": self.peak_gib}
        return found | predicted | {"fits": self.fits}


def compared(path: Path, place: int) -> Compared:
    """The row of a file at a place, predicted through its launch line."""
    row, measured = json.loads(path.read_text())["rows"][place], None
    at = partial(Compared, file=path.stem, place=place)
    try:
        measured = measured_row(row)
        launch = read_launch(measured.line, {}, measured.launcher, measured.gpus)
        line = line_of(launch, measured.model)
        samples = None, measured.image_share, measured.sample_tokens
        costed = predicted_line(job := launched(line, measured.model, measured.cluster, *samples))
    except (UserError, ValueError) as error:
        reason = " ".join(str(error).split())
        return at(kind=_kind_by_name(row), measured=measured, refused=reason)
    tokens = (line.launch.micro_batch or 1) * (line.launch.sequence_length or 0)
    if measured.step_ms is None and measured.rate is not None:
        samples_of_step = (line.micro_batches or 0) * (line.data or 0)
        taken_ms = 1e3 * samples_of_step * tokens / measured.rate / (launch.gpus or 1)
        measured = replace(measured, step_ms=taken_ms)
    is_layout = "zero" in row or "kernel" in row
    return at(
        kind=LAYOUTS if is_layout else str(JobKind.ADAPTERS if measured.is_tuned else job.kind),
        measured=measured,
        predicted_ms=costed.step_ms,
        peak_gib=_peak_gib(costed, measured),
        fits=bool(costed.most_gib <= measured.cluster.memory_gib),
        micro_batch_tokens=tokens,
    )


def _peak_gib(costed: Costed, measured: Measured) -> float:
    peaks = {"mean": float(np.mean(costed.peaks_gib)), "device": costed.most_gib}
    return peaks.get(measured.memory, max(costed.peaks_gib))


def _kind_by_name(row: object) -> str:
    """Kind of a row that is not predicted."""
    given = row if isinstance(row, dict) else {}
    if "zero" in given or "kernel" in given:
        return LAYOUTS
    text = f"{given.get('group')} {given.get('name')}".lower()
    kinds = {
        TUNED: JobKind.ADAPTERS,
        "fsdp": JobKind.SHARDED,
        "long context": JobKind.LONG_CONTEXT,
        r"\bmoe\b|-a\d+b": JobKind.EXPERTS,
    }
    usual = JobKind.VISION_LANGUAGE if "measured" in given else JobKind.DENSE
    return next((str(kind) for word, kind in kinds.items() if re.search(word, text)), str(usual))


def all_compared(paths: Iterable[Path]) -> list[Compared]:
    """All rows of files, with predictions; unreadable files raise UserError."""
    places = []
    for path in paths:
        try:
            rows = json.loads(path.read_text())["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{path} is no file of measured rows ({error}); give another"
            raise UserError(what) from error
        places += [(path, place) for place in range(len(rows))]
    with ProcessPoolExecutor() as pool:
        return list(pool.map(compared, *zip(*places, strict=True), chunksize=8)) if places else []


def errors_by_kind(rows: Sequence[Compared]) -> list[PublishedErrors]:
    """Errors of rows that calibrated nothing, by kind, device and size of micro-batches."""
    groups = defaultdict(list)
    for one in rows:
        if one.error is not None and one.measured and not one.calibrates and one.kind != LAYOUTS:
            device, small = device_of(one.measured.cluster), one.micro_batch_tokens <= SMALL_TOKENS
            groups[one.kind, device, small].append(one.error)
    return [
        PublishedErrors(
            kind=JobKind(kind),
            device=device,
            small=small,
            steps=len(errors),
            median=round(float(np.median(np.abs(errors))), 3),
            least=round(min(errors), 3),
            most=round(max(errors), 3),
        )
        for (kind, device, small), errors in sorted(groups.items())
    ]


KINDS_COLUMNS = (
    *("kind", "device", "rows", "calibrate", "refused", "median of |error|", "of error", "range"),
    "memory: median, most",
)


def kinds_table(rows: Sequence[Compared]) -> list[list[str]]:
    """A line for every kind and device: errors of time and memory, and refusals."""
    groups = defaultdict(list)
    for one in rows:
        device = device_of(one.measured.cluster) if one.measured else ""
        groups[one.kind, device].append(one)
    table = []
    for (kind, device), alike in sorted(groups.items()):
        seen = [one for one in alike if not one.calibrates]
        errors = [one.error for one in seen if one.error is not None]
        memory = [abs(one.memory_error) for one in seen if one.memory_error is not None]
        refused = sum(one.refused is not None for one in alike)
        table.append([kind, device, str(len(alike)), str(len(alike) - len(seen)), str(refused)])
        table[-1] += _spread(errors) if errors else ["", "", ""]
        table[-1] += [f"{np.median(memory):.1%}, {max(memory):.1%}" if memory else ""]
    return table


def _spread(errors: Sequence[float]) -> list[str]:
    middle = f"{np.median(np.abs(errors)):.1%}"
    return [middle, f"{np.median(errors):+.1%}", f"{min(errors):+.0%} to {max(errors):+.0%}"]


def ranking_table(rows: Sequence[Compared]) -> list[list[str]]:
    """A line for every set of layouts: the best predicted beside the best measured."""
    sets = defaultdict(list)
    for one in rows:
        if one.measured is not None and one.measured.group and one.predicted_ms is not None:
            taken_ms = one.measured.step_ms or np.inf  # out of memory
            sets[one.measured.group].append((not one.fits, one.predicted_ms, taken_ms))
    table = []
    for name, alike in sorted(sets.items()):
        too_large, predicted_ms, taken_ms = np.array(alike).T
        ran = np.isfinite(taken_ms)
        if not ran.any():
            continue
        chosen = np.lexsort((predicted_ms[ran], too_large[ran]))[0]
        behind = taken_ms[ran][chosen] / taken_ms.min() - 1
        judged = np.mean(ran == (too_large == 0))
        table.append([name, f"{ran.sum()}", f"{(~ran).sum()}", f"{behind:.1%}", f"{judged:.0%}"])
    return table


_KIND_COLOURS = {
    JobKind.DENSE: "teal",
    JobKind.EXPERTS: "rose",
    JobKind.SHARDED: "blue",
    JobKind.VISION_LANGUAGE: "yellow",
    JobKind.ADAPTERS: "ink",
    JobKind.LONG_CONTEXT: "purple",
}


@style()
def picture(rows: Sequence[Compared]) -> Figure:
    """Draw predicted over measured step time of every row, hollow if calibrated on."""
    figure = new_figure(760, 380)
    axes = figure.subplots()
    for kind, name in _KIND_COLOURS.items():
        colour = COLOURS[name]
        for calibrates in (True, False):
            points = [
                (one.measured.step_ms / 1000, 100 * one.error)
                for one in rows
                if (one.kind, bool(one.calibrates)) == (kind, calibrates)
                and one.error is not None
                and one.measured is not None
                and one.measured.step_ms is not None
            ]
            seconds, errors = np.array(points).reshape(-1, 2).T
            axes.scatter(
                seconds,
                errors,
                24,
                facecolor="none" if calibrates else colour,
                edgecolor=colour,
                label=None if calibrates else kind,
            )
    axes.axhline(0, color=COLOURS["ink"], linestyle="--", linewidth=1)
    make_logarithmic(axes)
    axes.set(xlabel="measured step, s", ylabel="predicted over measured step time, %")
    axes.yaxis.set_major_formatter("{x:+g}")
    figure.legend(loc="outside upper left", ncols=3)
    return figure


def write_errors(rows: Sequence[Compared]) -> None:
    """Write the table that predictions show."""
    text = "# Written by `scripts/reproduce/measured_gpus.py --write-errors`.\n"
    for one in errors_by_kind(rows):
        fields = one.model_dump(mode="json")
        text += "\n[[errors]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in fields.items())
    FILE.write_text(text)


def main() -> None:
    """Print errors by kind of job, and how layouts are ranked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", help="files of rows (default: measured/)")
    parser.add_argument("--json", action="store_true", help="print an object a row instead")
    parser.add_argument("--picture", type=Path, help="also write an SVG file of all steps")
    parser.add_argument("--write-errors", action="store_true", help="write the table of errors")
    arguments = parser.parse_args()
    try:
        rows = all_compared(arguments.rows or sorted(FOLDER.glob("*.json")))
    except UserError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        print(json.dumps([one.record() for one in rows], indent=1))
        return
    print_table(
        "steps measured on GPUs, by kind of job (errors of rows that calibrated nothing)",
        KINDS_COLUMNS,
        kinds_table(rows),
    )
    print_table(
        "layouts of one job: the best predicted behind the best measured",
        ("set", "ran", "out of memory", "behind", "memory judged right"),
        ranking_table(rows),
    )
    if arguments.write_errors:
        write_errors(rows)
    if arguments.picture is not None:
        title = "Predicted over measured step time, one point a measured job"
        write_ascii(svg_file(picture(rows), title), arguments.picture)


if __name__ == "__main__":
    main()
