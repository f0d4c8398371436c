"""Predictions of `omnibal lint` against published training steps on GPUs.

Rows, with their sources, are in `measured/*.json`. Each becomes a launch line of its trainer
(`measured_rows.py`), predicted on a preset. `calibrates` of a row names constants fitted to it;
other rows were only predicted.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from measured_rows import TUNED, Measured, is_layout, measured_row
from paper import print_table

from omnibal.base.errors import UserError
from omnibal.job.published_errors import (
    ERRORS_FILE,
    SMALL_TOKENS,
    JobKind,
    PublishedErrors,
    device_name,
)
from omnibal.report.drawing import COLOURS, make_logarithmic, new_figure, style, svg_file
from omnibal.report.formatting import write_ascii
from omnibal.trainers.lint.command_line import read_launch
from omnibal.trainers.lint.line import line_of
from omnibal.trainers.lint.line_job import make_line_job
from omnibal.trainers.lint.predict_line import predict_line

FOLDER = Path(__file__).with_name("measured")
LAYOUTS = "layouts"  # kind of rows that compare layouts of a job: ranking and memory count


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A row of a file with its prediction, or the reason for none."""

    file: str
    place: int
    kind: str = ""
    measured: Measured | None = None  # None if the row could not be read
    predicted_ms: float | None = None
    peak_gib: float | None = None  # of the memory that the row measured
    error: float | None = None  # predicted over measured step time, minus 1
    memory_error: float | None = None  # predicted over measured allocated memory, minus 1
    fits: bool | None = None
    micro_batch_tokens: int = 0
    refused: str | None = None

    @property
    def calibrates(self) -> str:
        """Constants calibrated on the row."""
        return "" if self.measured is None else self.measured.calibrates

    @property
    def device(self) -> str:
        return "" if self.measured is None else device_name(self.measured.cluster)

    def record(self) -> dict[str, Any]:
        """Return the row as JSON."""
        record = {"file": self.file, "row": self.place, "kind": self.kind}
        if (job := self.measured) is not None:
            record |= {"name": job.name, "group": job.group, "line": job.line}
            record |= {"options": job.options, "measured_ms": job.step_ms}
            record |= {"measured_gib": job.allocated_gib, "out_of_memory": job.out_of_memory}
            record |= {"calibrates": job.calibrates}
        if self.refused is not None:
            return record | {"refused": self.refused}
        predicted = {"predicted_ms": self.predicted_ms, "peak_gib": self.peak_gib}
        return record | predicted | {"fits": self.fits}


def compare_row(path: Path, place: int) -> Compared:
    """Return a row of a file with its prediction by a launch line."""
    row, measured = json.loads(path.read_text())["rows"][place], None
    make_result = partial(Compared, file=path.stem, place=place)
    try:
        measured = measured_row(row)
        launch = read_launch(measured.line, {}, measured.launcher, measured.gpus)
        line = line_of(launch, measured.model)
        samples = None, measured.image_share, measured.sample_tokens
        job = make_line_job(line, measured.model, measured.cluster, *samples)
        costed = predict_line(job)
    except (UserError, ValueError) as error:
        reason = " ".join(str(error).split())
        return make_result(kind=_kind_by_name(row), measured=measured, refused=reason)
    tokens = (line.launch.micro_batch or 1) * (line.launch.sequence_length or 0)
    if measured.step_ms is None and measured.rate is not None:  # tokens per second and GPU
        step_tokens = (line.micro_batches or 0) * (line.data or 0) * tokens
        step_ms = 1e3 * step_tokens / measured.rate / (launch.gpus or 1)
        measured = replace(measured, step_ms=step_ms)
    kind = JobKind.ADAPTERS if measured.is_tuned else job.kind
    peaks = {"mean": float(np.mean(costed.peaks_gib)), "device": costed.max_device_gib}
    peak_gib = peaks.get(measured.memory, max(costed.peaks_gib))
    return make_result(
        kind=LAYOUTS if is_layout(row) else str(kind),
        measured=measured,
        predicted_ms=costed.step_ms,
        peak_gib=peak_gib,
        error=measured.step_ms and costed.step_ms / measured.step_ms - 1,
        memory_error=measured.allocated_gib and peak_gib / measured.allocated_gib - 1,
        fits=bool(costed.max_device_gib <= measured.cluster.memory_gib),
        micro_batch_tokens=tokens,
    )


_KIND_WORDS = {
    TUNED: JobKind.ADAPTERS,
    "fsdp": JobKind.SHARDED,
    "long context": JobKind.LONG_CONTEXT,
    r"\bmoe\b|-a\d+b": JobKind.EXPERTS,
}


def _kind_by_name(row: object) -> str:
    """Return the kind of a row without a prediction."""
    if is_layout(row):
        return LAYOUTS
    fields = row if isinstance(row, dict) else {}
    text = f"{fields.get('group')} {fields.get('name')}".lower()
    default = JobKind.VISION_LANGUAGE if "measured" in fields else JobKind.DENSE
    return str(next((kind for word, kind in _KIND_WORDS.items() if re.search(word, text)), default))


def compare_rows(paths: Iterable[Path]) -> list[Compared]:
    """Return all rows of files with predictions; raise UserError for unreadable files."""
    places = []
    for path in paths:
        try:
            rows = json.loads(path.read_text())["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"{path} is no file of measured rows ({error}); give another"
            raise UserError(message) from error
        places += [(path, place) for place in range(len(rows))]
    if not places:
        return []
    with ProcessPoolExecutor() as pool:
        return list(pool.map(compare_row, *zip(*places, strict=True), chunksize=8))


def _group_rows(
    rows: Iterable[Compared], key: Callable[[Compared], Any]
) -> list[tuple[Any, list[Compared]]]:
    """Return rows by key, in ascending order."""
    return [(name, list(group)) for name, group in groupby(sorted(rows, key=key), key)]


def errors_by_kind(rows: Sequence[Compared]) -> list[PublishedErrors]:
    """Return errors of uncalibrated rows by kind, device and size of micro-batches."""
    tested = (
        row for row in rows if row.error is not None and not row.calibrates and row.kind != LAYOUTS
    )
    table = []
    for (kind, device, small), group in _group_rows(
        tested, lambda row: (row.kind, row.device, row.micro_batch_tokens <= SMALL_TOKENS)
    ):
        errors = np.array([row.error for row in group], float)
        figures = np.median(np.abs(errors)), errors.min(), errors.max()
        names = ("median", "least", "most")
        spread = {name: round(float(x), 3) for name, x in zip(names, figures, strict=True)}
        spread["steps"] = len(group)
        table.append(PublishedErrors(kind=JobKind(kind), device=device, small=small, **spread))
    return table


KINDS_COLUMNS = (
    "kind", "device", "rows", "calibrate", "refused", "median absolute error|.1%", "of error|+.1%",
    "range", "memory: median, most",
)  # fmt: skip


def kinds_table(rows: Sequence[Compared]) -> list[tuple[Any, ...]]:
    """Return a line per kind and device: errors of time and memory, and refusals."""
    table = []
    for names, group in _group_rows(rows, lambda row: (row.kind, row.device)):
        tested = [row for row in group if not row.calibrates]
        errors = [row.error for row in tested if row.error is not None]
        memory = [abs(row.memory_error) for row in tested if row.memory_error is not None]
        refused = sum(row.refused is not None for row in group)
        spread: tuple[object, ...] = (None, None, None)
        if errors:
            spread_text = f"{min(errors):+.0%} to {max(errors):+.0%}"
            spread = np.median(np.abs(errors)), np.median(errors), spread_text
        memory_spread = f"{np.median(memory):.1%}, {max(memory):.1%}" if memory else None
        counts = len(group), len(group) - len(tested), refused
        table.append((*names, *counts, *spread, memory_spread))
    return table


RANKING_COLUMNS = ("set", "ran", "out of memory", "behind|.1%", "memory judged right|.0%")


def ranking_table(rows: Sequence[Compared]) -> list[tuple[Any, ...]]:
    """Return a line per set of layouts: how much slower the best predicted is than the best."""
    layouts = [
        (row.measured.group, not row.fits, row.predicted_ms, row.measured.step_ms or np.inf)
        for row in rows
        if row.measured is not None and row.measured.group and row.predicted_ms is not None
    ]
    table = []
    for name, group in groupby(sorted(layouts, key=itemgetter(0)), itemgetter(0)):
        too_large, predicted_ms, step_ms = np.array([layout[1:] for layout in group]).T
        ran = np.isfinite(step_ms)  # infinite: out of memory
        if not ran.any():
            continue
        # The fastest that is predicted to fit, or to run at all.
        chosen = np.lexsort((predicted_ms[ran], too_large[ran]))[0]
        behind = step_ms[ran][chosen] / step_ms.min() - 1
        right = np.mean(ran == (too_large == 0))
        table.append((name, ran.sum(), (~ran).sum(), behind, right))
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
def draw_errors(rows: Sequence[Compared]) -> Figure:
    """Return a figure of predicted over measured step times; calibrated rows are hollow."""
    figure = new_figure(760, 380)
    axes = figure.subplots()
    for kind, name in _KIND_COLOURS.items():
        colour = COLOURS[name]
        for calibrates in (True, False):
            points = [
                (row.predicted_ms / (1 + row.error) / 1000, 100 * row.error)
                for row in rows
                if (row.kind, bool(row.calibrates)) == (kind, calibrates)
                and row.predicted_ms is not None
                and row.error is not None
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
    """Write the table of errors that predictions print."""
    text = "# Written by `scripts/reproduce/measured_gpus.py --write-errors`.\n"
    for errors in errors_by_kind(rows):
        fields = errors.model_dump(mode="json")
        text += "\n[[errors]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in fields.items())
    ERRORS_FILE.write_text(text)


def main() -> None:
    """Print errors by kind of job, and the ranking of layouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", help="files of rows (default: measured/)")
    parser.add_argument("--json", action="store_true", help="print an object per row instead")
    parser.add_argument("--picture", type=Path, help="also write an SVG file of all steps")
    parser.add_argument("--write-errors", action="store_true", help="write the table of errors")
    arguments = parser.parse_args()
    try:
        rows = compare_rows(arguments.rows or sorted(FOLDER.glob("*.json")))
    except UserError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        print(json.dumps([row.record() for row in rows], indent=1))
        return
    print_table(
        "steps measured on GPUs, by kind of job (errors of rows that calibrated nothing)",
        KINDS_COLUMNS,
        kinds_table(rows),
    )
    print_table(
        "layouts of one job: the best predicted behind the best measured",
        RANKING_COLUMNS,
        ranking_table(rows),
    )
    if arguments.write_errors:
        write_errors(rows)
    if arguments.picture is not None:
        title = "Predicted over measured step time, one point a measured job"
        write_ascii(svg_file(draw_errors(rows), title), arguments.picture)


if __name__ == "__main__":
    main()
