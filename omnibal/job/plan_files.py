"""Read and write a plan's directory: plan, packs and lengths (by portion), and costs."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnibal.base.errors import UserError
from omnibal.cost.model import CostModel
from omnibal.cost.profile import read_profile
from omnibal.cost.refitted import read_refit
from omnibal.cost.source import CostSource
from omnibal.data.lengths import Lengths, read_lengths, write_lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import (
    LENGTHS_FILE,
    PACKS_FILE,
    PLAN_FILE,
    PLAN_FILES,
    PORTIONS_FOLDER,
    PROFILE_FILE,
    REFIT_FILE,
    DataPlan,
    MixtureSeen,
    Plan,
    SettingsHashes,
    SourceSeen,
    read_plan,
    write_plan,
)
from omnibal.job.plan_data import SampleData, data_at_caps
from omnibal.job.plan_portions import (
    AllPortions,
    EarlierPortions,
    bound_packs,
    check_hash,
    count_through_run,
    join_portions,
    read_portion,
    write_portions,
)
from omnibal.job.planner import PlanResult, check_memory, order_micro_batches, predict_memories
from omnibal.model.levels import are_plain
from omnibal.packing.balance_metrics import milestones, seen_by_step
from omnibal.packing.packs import ScheduledPacks, read_packs, write_packs
from omnibal.packing.portions import FIRST_PORTION, PortionedSamples, PortionPlace
from omnibal.packing.steps import steps_of
from omnibal.pipeline.workload import Workload

# Search effort for micro-batch order in later portions: half the changes find 90 % of the gain.
_LATER_EFFORT = 0.5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanFiles:
    """A plan with the contents of its directory: its job with costs, packs and lengths."""

    plan: Plan
    job: JobSpec
    data: tuple[ScheduledPacks, Lengths] | None
    """Packs and lengths (mock for shapes only, all portions or the first to train), or None."""
    directory: Path | None = None  # source directory, or None if made in memory

    @property
    def steps(self) -> tuple[ScheduledPacks, Lengths]:
        """Return the plan's packs and lengths. Raise UserError if `data` is None."""
        if self.data is None:
            raise UserError(
                "the plan has neither data nor shapes, so no steps; give a plan of `omnibal plan`"
            )
        return self.data

    @property
    def workload(self) -> Workload:
        """Return the features of all micro-batches. Raise UserError if `data` is None."""
        return self.job.workload(*self.steps, self.plan.pack_levels)

    @property
    def cost(self) -> CostModel:
        """Unit costs of all levels side by side."""
        return self.job.cost_of_all(self.plan.pack_levels)


def hash_steps(directory: Path, steps: int) -> str | None:
    """Return the hash of a plan's first `steps` steps, or None past its end or within a portion."""
    data = read_plan(directory).data
    if data is None or steps > data.steps:
        return None
    if data.portions:
        ends = data.first_steps
        complete = data.portions[: ends.index(steps) if steps in ends else 0]
        return DataPlan.join(data, complete, 1).steps_sha256 if complete else None
    packs = read_packs(directory / PACKS_FILE)
    first = steps_of(packs.take(np.flatnonzero(packs.step < steps)))
    return first.sha256 if data.window is None else first.window_sha256


def make_job(plan: Plan, directory: Path) -> JobSpec:
    """Return a plan's job with costs: profiled or analytic, refitted if made from a run's log."""
    profile, refit = directory / PROFILE_FILE, directory / REFIT_FILE
    source = CostSource(
        read_profile(profile) if profile.exists() else None,
        refit=read_refit(refit) if refit.exists() else None,
    )
    return JobSpec.of_plan(plan, source)


def read_plan_data(plan: Plan, directory: Path) -> tuple[ScheduledPacks, Lengths] | None:
    """Return a plan's packs and lengths (all portions), mock data for shapes, or None."""
    if plan.data is None:
        return None if plan.shapes is None else data_at_caps(plan.shapes, plan.parallel.data)
    if plan.data.portions:
        return join_portions(plan.data, directory)
    return _read_data(plan.data, directory)


def _read_data(data: DataPlan, directory: Path) -> tuple[ScheduledPacks, Lengths]:
    packs, lengths = read_packs(directory / PACKS_FILE), read_lengths([directory / LENGTHS_FILE])
    check_hash(LENGTHS_FILE, lengths.sha256, data.lengths_sha256)
    check_hash(PACKS_FILE, packs.sha256, data.packs_sha256)
    return packs, lengths


def save_plan(result: PlanResult, directory: Path) -> Plan:
    """Write a directory, replacing an earlier plan by renames; return the plan as written."""
    check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        # On the same file system, so that renaming is atomic.
        made, replaced = Path(scratch) / "new", Path(scratch) / "old"
        made.mkdir()
        plan = result.plan
        if result.portions is not None:
            plan = _write_all_portions(result, result.portions, made)
        elif result.data is not None:
            packs, lengths = result.data
            write_packs(packs, made / PACKS_FILE)
            write_lengths(lengths, made / LENGTHS_FILE)
        if result.available and plan.data is not None:
            plan = _with_mixture(plan, plan.data, made, result.available)
        result.cost_source.save(made / PROFILE_FILE, made / REFIT_FILE)
        write_plan(plan, made)
        if directory.exists():
            directory.rename(replaced)
        try:
            made.rename(directory)
        except OSError:
            if replaced.exists():
                replaced.rename(directory)
            raise
    return plan


def _with_mixture(plan: Plan, data: DataPlan, directory: Path, available: Sequence[int]) -> Plan:
    """Return the plan with samples seen by source and step, from its written files."""
    by_step, names = milestones(data.steps), tuple[str, ...]()
    seen = np.zeros((len(by_step), len(available)), np.int64)
    for packs, lengths in iterate_portions(data, directory):
        seen += seen_by_step(packs, lengths, by_step)
        names = lengths.source_names
    sources = tuple(
        SourceSeen(name=name, samples=samples, seen=tuple(counts))
        for name, samples, counts in zip(names, available, seen.T.tolist(), strict=True)
    )
    mixture = MixtureSeen(by_step=by_step, sources=sources)
    return plan.model_copy(update={"data": data.model_copy(update={"mixture": mixture})})


def iterate_portions(data: DataPlan, directory: Path) -> Iterator[tuple[ScheduledPacks, Lengths]]:
    """Yield packs (steps counted through the run) and lengths of every portion."""
    if not data.portions:
        yield _read_data(data, directory)
    for index in range(len(data.portions)):
        packs, lengths = read_portion(data, index, directory)
        yield count_through_run(packs, data, index), lengths


def _write_all_portions(result: PlanResult, samples: AllPortions, directory: Path) -> Plan:
    """Pack and write all portions for the first's stages; return the plan of all."""
    plan, job = result.plan, result.job
    assert plan.data is not None and result.data is not None
    first, planned, levels = result.data[0], plan.data, plan.pack_levels
    is_ordered = result.search is not None and plan.made_for is None

    def schedule(lengths: Lengths, place: PortionPlace) -> ScheduledPacks:
        if place == FIRST_PORTION:
            return first
        steps = None
        if isinstance(samples, EarlierPortions):
            earlier = samples.packs(place)
            if samples.are_kept:  # stages are unchanged, so the order within ranks is too
                return earlier
            steps = steps_of(earlier)
        data = SampleData(
            lengths=lengths,
            settings=samples.settings_of(place),
            levels=levels,
            packs_per_step=planned.packs_per_step,
            rules=job.trainer.packs,
            steps=steps,
        )
        packs, _ = data.schedule(job)
        if is_ordered:
            packs = order_micro_batches(plan, job, packs, lengths, effort=_LATER_EFFORT)
        workload = job.workload(packs, lengths, levels)
        try:
            check_memory(predict_memories(plan, job, workload), job)
        except UserError as error:
            raise UserError(f"portion {place.number} of epoch {place.epoch}: {error}") from error
        return packs

    portions = write_portions(samples, schedule, directory)
    data = DataPlan.join(plan.data, portions, samples.epochs)
    if isinstance(samples, PortionedSamples) and are_plain(levels):
        packs_of_epoch = sum(portion.packs for portion in portions[: samples.count])
        least = bound_packs(samples, plan.data.caps, packs_of_epoch)
        data = data.model_copy(update={"fewest_packs": least})
    hashes = SettingsHashes.compute(plan.model, data)
    return plan.model_copy(update={"data": data, "settings_sha256": hashes})


def check_replaceable(directory: Path) -> None:
    """Raise UserError if the directory is neither absent, empty nor a plan, or contains the cwd."""
    if Path.cwd().is_relative_to(directory.resolve()):
        raise UserError(
            f"{directory}: contains the current directory, and writing a plan deletes earlier "
            f"content: give an empty directory, such as -o {directory / 'plan'}"
        )
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(f"{directory}: is a file; a plan is a directory: choose another -o")
    names = {path.name for path in directory.iterdir()}
    foreign = sorted(names - {*PLAN_FILES, PORTIONS_FOLDER})
    if foreign or (names and PLAN_FILE not in names):
        raise UserError(
            f"{directory}: holds {(foreign or sorted(names))[0]}, which is not part of a plan and "
            "would be deleted: move it away or choose another -o"
        )
