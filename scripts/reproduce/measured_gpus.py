"""Training steps that others measured on GPUs, beside what `omnibal lint` predicts of them.

Rows, with their sources, are in `measured_steps.json`. Each becomes a launch line of Megatron-LM
with the switches that its source says, and is predicted on a preset as any line is. A row that
calibrates a preset says what it calibrates; all others were only predicted.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from paper import print_table

from omnibal.families.named import named_model
from omnibal.lint.command_line import read_launch
from omnibal.lint.launched import Launched, launched
from omnibal.lint.line import line_of
from omnibal.lint.predicted import Costed, predicted_line
from omnibal.model.config import load_cluster
from omnibal.report.drawing import COLOURS, make_logarithmic, new_figure, style, svg_file
from omnibal.report.formatting import write_ascii

ROWS = Path(__file__).with_name("measured_steps.json")
CLUSTERS = {"b200": "b200-180g", "h100": "h100-80g"}
_SWITCHES = {
    "b200": "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    "h100": "--cross-entropy-loss-fusion --ddp-average-in-collective --overlap-grad-reduce "
    "--overlap-param-gather",
}
"""SimuMax overlaps nothing, NeMo's recipes the maximum."""


def launch_line(row: dict[str, Any]) -> str:
    """Return a row as a Megatron-LM launch line."""
    line = (
        f"torchrun --nnodes {row['gpus'] // 8} --nproc-per-node 8 pretrain_gpt.py "
        f"--use-distributed-optimizer --bf16 --seq-length {row['sequence']} "
        f"--micro-batch-size {row['micro_batch']} --global-batch-size {row['global_batch']} "
        f"--tensor-model-parallel-size {row['tp']} --pipeline-model-parallel-size {row['pp']} "
        f"--context-parallel-size {row['cp']} {_SWITCHES[row['device']]}"
    )
    if row["tp"] > 1:
        line += " --sequence-parallel"
    if row["tp"] > 1 and row["device"] == "h100":
        line += " --tp-comm-overlap"
    if row["ep"] > 1:
        line += (
            f" --expert-model-parallel-size {row['ep']} --expert-tensor-parallel-size 1 "
            "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permute-fusion "
            "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
        )
    if row["chunks"] > 1:
        line += f" --num-virtual-stages-per-pipeline-rank {row['chunks']}"
    return line + (" --fp8-format hybrid" if row["precision"] == "fp8" else "")


def job_of(row: dict[str, Any]) -> Launched:
    """Return a row's job, on samples of its sequence length."""
    model = named_model(row["model"]).with_layers(language=row["layers"])
    cluster = load_cluster(CLUSTERS[row["device"]])
    line = line_of(read_launch(launch_line(row), {}), model)
    return launched(line, model, cluster, None, image_share=0.0)


@dataclass(frozen=True)
class Compared:
    """A row with its prediction."""

    row: dict[str, Any]
    costed: Costed

    @property
    def kind(self) -> tuple[str, str]:
        """Device and precision."""
        return self.row["device"], self.row["precision"]

    @property
    def error(self) -> float:
        """Predicted over measured step, minus 1."""
        return self.costed.step_ms / float(self.row["step_ms"]) - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak allocated memory, minus 1. None if not measured."""
        measured = self.row.get("allocated_gib")
        return max(self.costed.peaks_gib) / measured - 1 if measured else None

    @property
    def calibrates(self) -> str:
        """Constants of the preset calibrated on the row. Empty if only predicted."""
        return str(self.row.get("calibrates", ""))

    def cells(self) -> Iterator[str]:
        row, lost = self.row, self.costed.prediction.lost
        sizes = "x".join(str(row[name]) for name in ("tp", "pp", "cp", "ep"))
        batches = row["global_batch"] * row["tp"] * row["pp"] * row["cp"] // row["gpus"]
        yield f"{row['device']} {row['model']}, {row['layers']} layers"
        yield f"{row['gpus']:,}"
        yield sizes + (f", {row['chunks']} chunks" if row["chunks"] > 1 else "")
        yield f"{batches}"
        yield row["precision"]
        yield f"{row['step_ms']:,.0f}"
        yield f"{self.costed.step_ms:,.0f}"
        yield f"{self.error:+.1%}"
        # With one chunk per stage; with several, the rest is the bubble.
        other = lost.communication_ms + lost.context_exchange_ms + lost.expert_wait_ms
        idle = self.costed.step_ms - lost.ideal_ms - other - lost.weight_update_ms
        for part_ms in (lost.ideal_ms, other, lost.weight_update_ms, idle):
            yield f"{part_ms / self.costed.step_ms:.0%}"
        memory = self.memory_error
        yield "" if memory is None else f"{memory:+.1%}"
        yield self.calibrates


COLUMNS = (
    "job", "GPUs", "TPxPPxCPxEP", "micro-batches", "in", "measured ms", "predicted ms", "error",
    "computes", "exchanges", "updates", "idles", "allocated", "calibrates",
)  # fmt: skip


def compared() -> list[Compared]:
    """All rows with predictions; jobs that differ only in tag are predicted once."""
    known: dict[str, Costed] = {}
    found = []
    for row in json.loads(ROWS.read_text())["rows"]:
        key = f"{row['device']} {row['model']} {launch_line(row)}"
        if key not in known:
            known[key] = predicted_line(job_of(row))
        found.append(Compared(row, known[key]))
    return found


def summary(rows: Sequence[Compared]) -> list[str]:
    """Errors of rows not used for calibration, by device and precision."""
    lines = []
    for kind in sorted({one.kind for one in rows}):
        chosen = [one for one in rows if one.kind == kind and not one.calibrates]
        errors = np.abs([one.error for one in chosen])
        memory = [abs(one.memory_error) for one in chosen if one.memory_error is not None]
        said = (
            f"{kind[0]} {kind[1]}: {len(chosen)} rows that calibrated nothing, error of time "
            f"{np.median(errors):.1%} median, {errors.max():.1%} largest"
        )
        lines.append(said + (f"; of allocated memory {max(memory):.1%} largest" if memory else ""))
    return [*lines, *chunks_summary(rows)]


def chunks_summary(rows: Sequence[Compared]) -> Iterator[str]:
    """Errors of rows with several chunks per stage and with one, by precision."""
    chosen = [one for one in rows if one.row["device"] == "h100" and not one.calibrates]
    for precision in sorted({one.row["precision"] for one in chosen}):
        of_precision = [one for one in chosen if one.row["precision"] == precision]
        for has_chunks, words in ((True, "several chunks"), (False, "one chunk")):
            errors = [one.error for one in of_precision if (one.row["chunks"] > 1) == has_chunks]
            yield (
                f"h100 {precision}, {words} a stage: {len(errors)} rows, error of time from "
                f"{min(errors):+.1%} to {max(errors):+.1%}, {np.median(np.abs(errors)):.1%} median"
            )


_KINDS = {
    ("b200", "bf16"): ("B200, bf16", "teal"),
    ("h100", "bf16"): ("H100, bf16", "rose"),
    ("h100", "fp8"): ("H100, fp8", "yellow"),
}
"""Label and colour of every device and precision."""


@style()
def picture(rows: Sequence[Compared]) -> Figure:
    """Draw predicted over measured step time of every row, hollow if calibrated on."""
    figure = new_figure(760, 330)
    axes = figure.subplots()
    for kind, (words, colour) in _KINDS.items():
        for calibrates in (False, True):
            of_kind = [one for one in rows if one.kind == kind]
            chosen = [one for one in of_kind if bool(one.calibrates) == calibrates]
            axes.scatter(
                [one.row["step_ms"] / 1000 for one in chosen],
                [100 * one.error for one in chosen],
                30,
                facecolor="none" if calibrates else COLOURS[colour],
                edgecolor=COLOURS[colour],
                label=f"{words}, fitted on it" if calibrates else words,
            )
    axes.axhline(0, color=COLOURS["ink"], linestyle="--", linewidth=1)
    make_logarithmic(axes)
    axes.set(xlabel="measured step, s", ylabel="predicted over measured step time, %")
    axes.yaxis.set_major_formatter("{x:+g}")
    figure.legend(loc="outside upper left", ncols=3)
    return figure


def main() -> None:
    """Print every row, and the errors of rows not used for calibration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, help="also write an SVG file of all rows")
    arguments = parser.parse_args()
    rows = compared()
    print_table("steps measured on GPUs", COLUMNS, [[*one.cells()] for one in rows])
    print("\n".join(summary(rows)))
    if arguments.picture is not None:
        title = "Predicted over measured step time, one point a measured job"
        write_ascii(svg_file(picture(rows), title), arguments.picture)


if __name__ == "__main__":
    main()
