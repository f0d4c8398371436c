"""Plans to export, made without a search, and their data."""

import heapq
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from length_cases import lengths_of
from plan_cases import MODEL, job_spec

from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.job.plan_data import describe_data
from omnibal.job.plan_files import PlanFiles
from omnibal.model.config import ModelConfig
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TARGETS, TargetName, TrainerConstraints
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.pipeline.stage_units import Stage
from omnibal.trainers.export.directory import EXPORTS, Export, export_input, make_export
from omnibal.trainers.export.exported import ExportInput
from omnibal.trainers.export.expressible import PackedData, obstacles

MICRO_BATCHES = 4
SAMPLES = 10_000


@dataclass(frozen=True)
class ExportCase:
    """A plan in memory. Its sample k is line k of the file from `write_data`."""

    files: PlanFiles
    target: TargetName

    @property
    def lengths(self) -> Lengths:
        return self.files.steps[1]

    @property
    def packs(self) -> ScheduledPacks:
        return self.files.steps[0]

    def export(self, data: Path | None, folder: Path) -> Export:
        """Write the export, and the data if missing."""
        if data is not None and not data.exists():
            write_data(len(self.lengths), data)
        given = export_input(self.files, TARGETS[self.target], data, folder)
        made = make_export(given, EXPORTS[self.target])
        made.write()
        return made


def write_data(samples: int, path: Path) -> None:
    """Write `samples` short texts that state their line numbers."""
    with path.open("w") as file:
        for number in range(samples):
            messages = [
                {"role": "user", "content": f"What is sample {number}?"},
                {"role": "assistant", "content": str(number)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


@cache
def export_case(
    target: TargetName, *, seed: int, ranks: int, samples: int = SAMPLES, full: bool = False
) -> ExportCase:
    """Return a plan on one stage, packs of nearly equal tokens; the last step is full if `full`."""
    lengths = drawn_lengths(seed, samples)
    per_step = ranks * MICRO_BATCHES
    count = -(-int(lengths.tokens.sum()) // 4_096)
    count = -(-count // per_step) * per_step if full else count // per_step * per_step + ranks // 2
    packs = shuffle(token_balanced(lengths.tokens, count), lengths, ranks, seed)
    return ExportCase(files=files_for(target, packs, lengths, ranks), target=target)


def drawn_lengths(seed: int, samples: int) -> Lengths:
    rng = np.random.default_rng(seed)
    tokens = np.clip(rng.lognormal(6, 1, samples), 16, 4_000).astype(np.int32)
    return lengths_of(tiles=0 * tokens, tokens=tokens, loss_tokens=tokens // 2)


def token_balanced(tokens: np.ndarray, count: int) -> list[list[int]]:
    """Assign samples to packs: longest first, to the pack with the fewest tokens."""
    held = [(0, pack) for pack in range(count)]
    packs: list[list[int]] = [[] for _ in range(count)]
    for sample in np.argsort(-tokens, kind="stable").tolist():
        total, pack = heapq.heappop(held)
        packs[pack].append(sample)
        heapq.heappush(held, (total + int(tokens[sample]), pack))
    return packs


def shuffle(packs: list[list[int]], lengths: Lengths, ranks: int, seed: int) -> ScheduledPacks:
    """Return packs in random order as full steps; the last step has the remainder."""
    order = np.random.default_rng(seed).permutation(len(packs)).tolist()
    listed = Packs.from_lists([packs[number] for number in order])
    return in_order(listed, lengths, ranks)


def files_for(target: TargetName, packs: ScheduledPacks, lengths: Lengths, ranks: int) -> PlanFiles:
    """Return a plan of one stage that trains these packs."""
    parallel = TARGETS[target].with_default_sharding(Parallel(pipeline=1, data=ranks))
    stages = stages_of(MODEL, MODEL.language.layers)
    files = plan_files(packs, lengths, stages, parallel=parallel, precision="bf16")
    plan = files.plan.model_copy(update={"made_for": target})
    return replace(files, plan=plan, job=JobSpec.of_plan(plan))


def stages_of(
    model: ModelConfig, *language: int, recompute: dict[int, tuple[str, ...]] | None = None
) -> tuple[Stage, ...]:
    """Return stages with `language` layers each, and all encoders on the first stage."""
    units: list[list[str]] = []
    first = 0
    for count in language:
        units.append([f"language {first}..{first + count - 1}"] if count else [])
        first += count
    encoders = [
        [f"{name} embed", f"{name} 0..{tower.layers - 1}", "projector"]
        for name, tower in model.encoders.items()
    ]
    units[0] = [*(unit for each in encoders for unit in each), "language embed", *units[0]]
    units[-1].append("head")
    again = recompute or {}
    return tuple(
        Stage.parse(*each, recompute=again.get(number, ())) for number, each in enumerate(units)
    )


def random_packs(samples: int, most: int, rng: np.random.Generator) -> Packs:
    """Return all samples in random packs of 1 to `most`."""
    cuts = np.cumsum(rng.integers(1, most + 1, samples))
    offsets = np.concatenate([[0], cuts[cuts < samples], [samples]])
    return Packs(samples=rng.permutation(samples), offsets=offsets.astype(np.int64))


def in_order(packs: Packs, lengths: Lengths, ranks: int) -> ScheduledPacks:
    """Return packs in reading order, with `MICRO_BATCHES` per rank and step."""
    step, within = np.divmod(np.arange(len(packs)), MICRO_BATCHES * ranks)
    slot, rank = np.divmod(within, ranks)
    return ScheduledPacks.from_packs(packs, lengths, step, rank, slot)


def places_of(packs: ScheduledPacks) -> dict[tuple[int, int, int], list[int]]:
    """Return samples by step, rank and slot."""
    columns = (packs.step.tolist(), packs.dp_rank.tolist(), packs.slot.tolist())
    return {
        place: packs.packs[row].tolist() for row, place in enumerate(zip(*columns, strict=True))
    }


def plan_files(
    packs: Packs | ScheduledPacks,
    lengths: Lengths,
    stages: tuple[Stage, ...],
    *,
    parallel: Parallel | None = None,
    model: ModelConfig = MODEL,
    **changes,
) -> PlanFiles:
    """Return a plan of these packs in this order, on `parallel.data` ranks."""
    parallel = parallel or Parallel(pipeline=len(stages))
    job, run = job_spec(model=model, parallel=parallel, **changes), packs
    if isinstance(run, Packs):
        run = in_order(run, lengths, parallel.data)
    caps = Caps.of(tiles=max(int(run.items["tiles"].max()), 1), tokens=int(run.tokens.max()))
    per_step = {"packs_per_step": MICRO_BATCHES * parallel.data}
    per_step["micro_batches_per_step"] = MICRO_BATCHES
    data = describe_data(run, lengths, caps=caps, method="other", seed=0, epochs=1, **per_step)
    of_job = {"precision": job.precision, "frozen": job.frozen, "cluster": job.cluster}
    plan = Plan(model=model, parallel=parallel, stages=stages, data=data, **of_job)
    return PlanFiles(plan=plan, job=job, data=(run, lengths))


def given_of(
    files: PlanFiles,
    name: TargetName,
    data: Path | None = None,
    workers: int = 0,
    folder: Path = Path("/export"),
) -> ExportInput:
    return export_input(files, TARGETS[name], data, folder, workers)


def first_obstacle(plan: Plan, data: PackedData | None, target: TrainerConstraints) -> str | None:
    """Return the first plan feature that the trainer cannot express, or None."""
    return next(obstacles(plan, data, target), None)
