"""`RUN.md`: an export's training command, and its simulated time, memory and samples."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from omnibal.base.frozen import Frozen
from omnibal.job.plan import Plan
from omnibal.job.planner import predict_plan
from omnibal.job.published_errors import errors_of_plan
from omnibal.model.limits import memory_cap_gib
from omnibal.trainers.export.exported import Exported, ExportInput
from omnibal.trainers.export.reading_order import COLUMNS, ORDER_FILE

RUN_PAGE = "RUN.md"


class Expected(Frozen):
    """Simulated figures of a plan's run by another trainer; sample counts may be None."""

    steps: int | None = None  # full steps
    packs_per_step: int  # of all ranks
    micro_batches: int  # per data-parallel rank and step
    packs: int | None = None  # in full steps
    samples: int | None = None  # in full steps, counted once per epoch
    samples_per_step: float | None = None
    dropped_packs: int = 0  # packs of a dropped incomplete last step
    dropped_samples: int = 0  # samples of dropped packs, and samples in no pack of the plan
    step_ms: float  # mean
    samples_per_second: float | None
    samples_per_second_per_gpu: float | None
    bubble: float  # idle share of device time
    peak_gib: tuple[float, ...]  # by pipeline stage
    usable_gib: float  # memory cap of a device that plans keep
    device_gib: float  # whole memory of a device
    cost_source: str  # "profile:..." if costs are measured

    @classmethod
    def count(cls, given: ExportInput) -> Self:
        """Return counts of full steps with the plan's predicted time and memory."""
        plan, job, prediction = given.plan, given.files.job, given.plan.prediction
        if prediction is None:  # removed, or of a later portion
            packs, lengths = given.files.steps
            workload = job.workload(packs, lengths, plan.pack_levels)
            prediction = predict_plan(plan, job, packs, workload)
        per_gpu = prediction.samples_per_second_per_gpu
        return cls(
            **_count_trained(given),
            packs_per_step=given.packs_per_step,
            micro_batches=given.packs_per_step // plan.parallel.data,
            step_ms=prediction.step_ms,
            samples_per_second=None if per_gpu is None else per_gpu * plan.parallel.world_size,
            samples_per_second_per_gpu=per_gpu,
            bubble=prediction.bubble_fraction,
            peak_gib=tuple(stage.memory.peak_gib for stage in prediction.stages),
            usable_gib=memory_cap_gib(plan.cluster),
            device_gib=plan.cluster.memory_gib,
            cost_source=prediction.cost_source,
        )


def _count_trained(given: ExportInput) -> dict[str, Any]:
    """Return the fields of `Expected` that count packs and samples; none without samples."""
    order, data, steps = given.order, given.plan.data, given.full_steps
    if order is None or data is None or steps is None:
        return {}
    packs, sizes = steps * given.packs_per_step, np.diff(order.packs.offsets)  # samples by pack
    trained = int(sizes[:packs].sum())
    return {
        "steps": steps,
        "packs": packs,
        "samples": trained,
        "samples_per_step": trained / steps if steps else None,
        "dropped_packs": len(order) - packs,
        "dropped_samples": int(sizes.sum()) - trained + data.left_out,
    }


def run_page(given: ExportInput, exported: Exported, expected: Expected) -> str:
    """Return `RUN.md` in Markdown; empty sections are left out."""
    plan, target = given.plan, given.target
    sections = {
        "Command": f"```bash\n{exported.script}\n```",
        "Settings": exported.settings and f"```\n{exported.settings.rstrip()}\n```",
        "What to expect": _expectation(plan, expected),
        "Stages": _stage_table(plan, expected),
        "What is not as planned": _bullet_list(exported.deviations),
        "Notes": _bullet_list(exported.notes),
        "Files": _bullet_list(_list_files(given, exported)),
    }
    opening = (
        f"# {plan.model.name} on {plan.parallel.world_size:,} GPUs with {target.title}\n\n"
        f"A plan of `omnibal plan` as the files and flags of {target.title} {target.version}, "
        f"written by `omnibal export`. Parallel sizes: {plan.parallel.text}."
    )
    parts = (f"## {title}\n\n{text}" for title, text in sections.items() if text)
    return "\n\n".join([opening, *parts]) + "\n"


def _bullet_list(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _expectation(plan: Plan, expected: Expected) -> str:
    rows = [("packs a step", f"{expected.packs_per_step:,}, {expected.micro_batches:,} a rank")]
    if expected.steps is not None:
        rows.insert(0, ("steps", f"{expected.steps:,}"))
        rows.append(("samples", f"{expected.samples:,}"))
    if expected.samples_per_step is not None:
        rows.append(("samples a step, mean", f"{expected.samples_per_step:,.1f}"))
    rows.append(("step time, mean", f"{expected.step_ms:,.1f} ms"))
    if expected.samples_per_second is not None:
        rows.append(("samples a second", f"{expected.samples_per_second:,.2f}"))
        rows.append(("samples a second and GPU", f"{expected.samples_per_second_per_gpu:,.3f}"))
    if plan.schedule.chunks > 1:
        rows.append(("schedule", f"{plan.schedule.name}, {plan.schedule.chunks} chunks a stage"))
    rows.append(("idle share of device time", f"{100 * expected.bubble:.1f} %"))
    peak = f"{max(expected.peak_gib):.1f} GiB of {expected.device_gib:g} GiB"
    planned = f"{expected.usable_gib:.1f} GiB were planned with"
    rows.append(("memory of the fullest device, peak", f"{peak} ({planned})"))
    source = "measured" if expected.cost_source.startswith("profile:") else "counted"
    return (
        f"{_markdown_table(('', 'expected'), rows)}\n\nSimulated; costs are {source} "
        f"({expected.cost_source}). Error of such predictions: {errors_of_plan(plan)}."
    )


def _stage_table(plan: Plan, expected: Expected) -> str:
    parts, rows = plan.stages_at(0), []
    for number, peak in enumerate(expected.peak_gib):
        chunks = [parts[part] for part in plan.parts_of(number)]
        units = " / ".join(", ".join(map(str, chunk.units)) for chunk in chunks)
        recomputed = (", ".join(map(str, chunk.recompute)) or "nothing" for chunk in chunks)
        rows.append((str(number), units, " / ".join(recomputed), f"{peak:.1f}"))
    return _markdown_table(("stage", "holds", "recomputes", "peak, GiB"), rows)


def _markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _list_files(given: ExportInput, exported: Exported) -> list[str]:
    names = [f"`{name}`" for name in sorted(exported.files)]
    if given.order is None:
        return names or ["none: the plan is of shapes only, without samples"]
    about = f"`{ORDER_FILE}`: a row per sample in reading order, with the columns"
    columns = (f"  - `{name}`: {meaning}" for name, meaning in COLUMNS.items())
    return [*names, "\n".join([about, *columns])]
