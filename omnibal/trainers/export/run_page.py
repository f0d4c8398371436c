"""`RUN.md`: an export's training command and expected run."""

from collections.abc import Iterable, Sequence

from omnibal.job.plan import Plan
from omnibal.job.published_errors import errors_of_plan
from omnibal.trainers.export.expected import Expected
from omnibal.trainers.export.exported import Exported, ExportInput
from omnibal.trainers.export.order_file import COLUMNS, ORDER_FILE

RUN_PAGE = "RUN.md"


def run_page(given: ExportInput, exported: Exported, expected: Expected) -> str:
    sections = [
        _opening(given),
        _section("Command", f"```bash\n{exported.script}\n```"),
        _section("Settings", exported.settings and f"```\n{exported.settings.rstrip()}\n```"),
        _section("What to expect", _expectation(given.files.plan, expected)),
        _section("Stages", _stages(given.files.plan, expected)),
        _section("What is not as planned", _listed(exported.given_up)),
        _section("Notes", _listed(exported.notes)),
        _section("Files", _listed(_files(given, exported))),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""


def _listed(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _opening(given: ExportInput) -> str:
    plan, target = given.files.plan, given.target
    return (
        f"# {plan.model.name} on {plan.parallel.world_size:,} GPUs with {target.title}\n\n"
        f"A plan of `omnibal plan` as the files and flags of {target.title}, written by `omnibal "
        f"export`. Files and flags are those of its version {target.version}. Parallel sizes: "
        f"{plan.parallel.text}."
    )


def _expectation(plan: Plan, expected: Expected) -> str:
    rows = [("packs a step", f"{expected.packs_per_step:,}, {expected.micro_batches:,} a rank")]
    if expected.steps is not None:
        rows.insert(0, ("steps", f"{expected.steps:,}"))
        rows.append(("samples", f"{expected.samples:,}"))
    if expected.samples_per_step is not None:
        rows.append(("samples a step, mean", f"{expected.samples_per_step:,.1f}"))
    rows.append(("step time, mean", f"{expected.step_ms:,.1f} ms"))
    if expected.samples_per_second is not None and expected.samples_per_second_per_gpu is not None:
        rows.append(("samples a second", f"{expected.samples_per_second:,.2f}"))
        rows.append(("samples a second and GPU", f"{expected.samples_per_second_per_gpu:,.3f}"))
    if plan.schedule.chunks > 1:
        rows.append(("schedule", f"{plan.schedule.name}, {plan.schedule.chunks} chunks a stage"))
    rows.append(("idle share of device time", f"{100 * expected.bubble:.1f} %"))
    peak = f"{max(expected.peak_gib):.1f} GiB of {expected.device_gib:g} GiB"
    planned = f"{expected.usable_gib:.1f} GiB were planned with"
    rows.append(("memory of the fullest device, peak", f"{peak} ({planned})"))
    table = _table(("", "expected"), rows)
    how = "measured" if expected.cost_source.startswith("profile:") else "counted"
    source = f"{how} ({expected.cost_source})"
    return (
        f"{table}\n\nAll of this is simulated, with costs that were {source}. Error of such "
        f"predictions: {errors_of_plan(plan)}."
    )


def _stages(plan: Plan, expected: Expected) -> str:
    parts, rows = plan.stages_at(0), []
    for number, peak in enumerate(expected.peak_gib):
        chunks = [parts[part] for part in plan.parts_of(number)]
        units = " / ".join(", ".join(map(str, chunk.units)) for chunk in chunks)
        again = " / ".join(", ".join(map(str, chunk.recompute)) or "nothing" for chunk in chunks)
        rows.append((str(number), units, again, f"{peak:.1f}"))
    return _table(("stage", "holds", "recomputes", "peak, GiB"), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _files(given: ExportInput, exported: Exported) -> list[str]:
    names = [f"`{name}`" for name in sorted(exported.files)]
    if given.order is None:
        return names or ["none: the plan is of shapes only, so that it has no samples to order"]
    columns = [f"  - `{name}`: {what}" for name, what in COLUMNS.items()]
    about = f"`{ORDER_FILE}`: every sample, a row each, in the order of reading, with the columns"
    return [*names, "\n".join([about, *columns])]
