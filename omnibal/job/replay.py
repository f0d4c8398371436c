"""Replay of a plan: stages measured one by one on one device, combined into steps.

Links and reductions come from the cost model. A replay's directory holds its identity and one file
of results per stage. In functions, `cost` is of all levels and `workload` of all the plan's packs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal, TypeVar

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from omnibal.base.errors import UserError
from omnibal.base.files import read_json_model, write_json_model
from omnibal.base.frozen import Frozen
from omnibal.cost.model import CostModel
from omnibal.job.plan import Plan, plan_sha256
from omnibal.model.config import Provider
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.lost_time import CauseTimes, causes_of, lost_time_of
from omnibal.pipeline.prediction import LostTime, StageMemory
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import per_step_costs
from omnibal.pipeline.stage_memory import bytes_of_passes
from omnibal.pipeline.workload import Workload

INFO_FILE = "replay.json"
_REPLAY_REMEDY = "replay the plan again with tools/replay.py, into another directory"


class ReplayIdentity(Frozen):
    """Plan of a replay, written before the first stage."""

    plan_sha256: str


class StageResult(Frozen):
    """Results of one stage."""

    stage: NonNegativeInt


AnyIdentity = TypeVar("AnyIdentity", bound=ReplayIdentity)
AnyStageResult = TypeVar("AnyStageResult", bound=StageResult)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFiles(Generic[AnyIdentity, AnyStageResult]):
    """Names and formats of one kind of replay's files in a directory."""

    identity: type[AnyIdentity]
    result: type[AnyStageResult]
    info_file: str
    prefix: str  # of file names, before the stage's number

    def file_of(self, directory: Path, stage: int) -> Path:
        return directory / f"{self.prefix}_{stage}.json"

    def all_files(self, directory: Path) -> list[Path]:
        """Return paths of the identity's file, which may be absent, and the stage files."""
        return [directory / self.info_file, *sorted(directory.glob(f"{self.prefix}_*.json"))]

    def open(self, directory: Path, identity: AnyIdentity) -> None:
        """Write the identity, or raise UserError if the directory holds another."""
        if not (directory / self.info_file).exists():
            directory.mkdir(parents=True, exist_ok=True)
            write_json_model(identity, directory / self.info_file)
            return
        kept = self.identity_of(directory, identity.plan_sha256)
        if kept != identity:
            differs = [name for name, value in identity if value != dict(kept)[name]]
            raise UserError(
                f"{directory}: holds a replay with another {differs[0]}, which cannot be "
                f"continued: {_REPLAY_REMEDY}"
            )

    def identity_of(self, directory: Path, plan_sha256: str) -> AnyIdentity:
        kept = read_json_model(self.identity, directory / self.info_file, _REPLAY_REMEDY)
        if kept.plan_sha256 != plan_sha256:
            raise UserError(
                f"{directory}: is the replay of another plan (sha256 {kept.plan_sha256[:12]}, not "
                f"{plan_sha256[:12]}): give this plan's, or {_REPLAY_REMEDY}"
            )
        return kept

    def write(self, result: AnyStageResult, directory: Path) -> None:
        write_json_model(result, self.file_of(directory, result.stage))

    def read_stages(self, directory: Path, stages: int) -> tuple[AnyStageResult, ...]:
        """Return results of stages 0 to `stages` - 1, ascending, without absent files."""
        results = []
        for stage in range(stages):
            path = self.file_of(directory, stage)
            if not path.exists():
                continue
            result = read_json_model(self.result, path, _REPLAY_REMEDY)
            if result.stage != stage:
                raise UserError(f"{path}: holds stage {result.stage}: {_REPLAY_REMEDY}")
            results.append(result)
        return tuple(results)


class ReplayInfo(ReplayIdentity):
    steps: tuple[NonNegativeInt, ...]
    repetitions: PositiveInt
    content: Literal["data", "random"]  # real samples, or random ones of the plan's sizes
    device: str
    processes: PositiveInt
    provider: Provider = "local"


class StageReplay(StageResult):
    """Measurements of one stage on one device; times are medians of several runs."""

    rows: tuple[NonNegativeInt, ...]  # workload rows, ascending; times are [rows, chunks], flat
    forward_ms: tuple[NonNegativeFloat, ...]
    backward_ms: tuple[NonNegativeFloat, ...]  # including recomputation and weight gradients
    weight_ms: tuple[NonNegativeFloat, ...] = ()  # of weight gradients, empty if not split
    recompute_ms: tuple[NonNegativeFloat, ...]
    update_ms: NonNegativeFloat  # zeroing, norm, clipping and weight update, once a step
    state_gib: NonNegativeFloat  # weights, gradients and optimizer state
    activations_gib: NonNegativeFloat  # peak activation memory of the predicted heaviest steps
    with_working_memory: bool  # whether `activations_gib` includes it (CUDA) or not (CPU)

    @model_validator(mode="after")
    def _check_counts_of_times(self) -> "StageReplay":
        counts = {len(self.forward_ms), len(self.backward_ms), len(self.recompute_ms)}
        counts |= {len(self.weight_ms) or len(self.forward_ms)}
        if len(counts) > 1 or len(self.forward_ms) % max(len(self.rows), 1):
            raise ValueError(
                "rows, forward_ms, backward_ms, weight_ms and recompute_ms differ in length"
            )
        return self

    @property
    def peak_gib(self) -> float:
        return self.state_gib + self.activations_gib

    def predicted_gib(self, memory: StageMemory) -> float:
        """Return the prediction of `peak_gib`, without working memory if not measured."""
        return memory.peak_gib - (0.0 if self.with_working_memory else memory.transient_gib)


REPLAY_FILES = StageFiles(
    identity=ReplayInfo, result=StageReplay, info_file=INFO_FILE, prefix="stage"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplaySummary:
    """Replayed steps of a plan; times by stage are their means."""

    info: ReplayInfo
    stages: tuple[StageReplay, ...]
    each_step_ms: np.ndarray  # [steps]
    predicted_each_step_ms: np.ndarray
    forward_ms: np.ndarray  # per step and rank over all chunks, [stages]; the next two too
    backward_ms: np.ndarray
    recompute_ms: np.ndarray
    wait_fractions: np.ndarray  # idle share of the step, [stages]
    lost: LostTime

    @property
    def step_ms(self) -> float:
        return float(self.each_step_ms.mean())

    @property
    def predicted_step_ms(self) -> float:
        """Mean predicted time of the replayed steps."""
        return float(self.predicted_each_step_ms.mean())

    @property
    def idle_fraction(self) -> float:
        """Idle share of the step, mean over stages."""
        return float(self.wait_fractions.mean())

    @property
    def recompute_fraction(self) -> float:
        """Recomputation's share of compute time."""
        return float(self.recompute_ms.sum() / (self.forward_ms + self.backward_ms).sum())


def choose_steps(packs: ScheduledPacks, most: int) -> tuple[int, ...]:
    """Return up to `most` numbers of steps of the most frequent size, evenly over the run."""
    # The size is in packs or in samples: the count with the more frequent mode.
    sizes = np.diff(packs.packs.offsets)
    in_step = np.bincount(packs.step), np.bincount(packs.step, weights=sizes).astype(np.int64)
    usual = np.flatnonzero(
        max((counts == np.bincount(counts).argmax() for counts in in_step), key=np.sum)
    )
    count = min(most, len(usual))
    return tuple(usual[(2 * np.arange(count) + 1) * len(usual) // (2 * count)].tolist())


def heaviest_rows(
    cost: CostModel, plan: Plan, stage: int, workload: Workload
) -> tuple[np.ndarray, ...]:
    """Return workload rows of the (step, rank) at peak memory, and of max activations if other."""
    features = workload.features_of(cost)
    passes = bytes_of_passes(cost, plan.stages_at_levels, workload, plan.schedule, stage, features)
    worst = {int(passes.row[memory.argmax()]) for memory in (passes.needed, passes.held)}
    places = {(int(workload.step[row]), int(workload.dp_rank[row])) for row in worst}
    return tuple(
        np.flatnonzero((workload.step == step) & (workload.dp_rank == rank))
        for step, rank in sorted(places)
    )


def read_replay(directory: Path, plan: Plan, cost: CostModel, workload: Workload) -> ReplaySummary:
    """Return the summary of a plan's replay. Raise UserError if stages are missing."""
    info = REPLAY_FILES.identity_of(directory, plan_sha256(plan))
    stages = REPLAY_FILES.read_stages(directory, plan.parallel.pipeline)
    size = plan.parallel.pipeline
    missing = sorted(set(range(size)) - {replay.stage for replay in stages})
    if missing:
        raise UserError(
            f"{directory}: stage {missing[0]} is not replayed yet ({len(missing)} of "
            f"{size} are missing): run tools/replay.py again with --stages all"
        )
    return summarise_replay(info, stages, plan, cost, workload)


def summarise_replay(
    info: ReplayInfo,
    replays: Sequence[StageReplay],
    plan: Plan,
    cost: CostModel,
    workload: Workload,
) -> ReplaySummary:
    """Return step times of the plan's schedule with measured stages; raise if rows differ."""
    rows = np.flatnonzero(np.isin(workload.step, info.steps))
    for replay in replays:
        if not np.array_equal(replay.rows, rows):
            raise UserError(
                f"the replay of stage {replay.stage} has other packs than its steps: "
                f"{_REPLAY_REMEDY}"
            )
    workload, schedule = workload.rows(rows), plan.schedule
    predicted_once = per_step_costs(cost, plan.stages, schedule)
    update_ms = np.array([replay.update_ms for replay in replays])
    once = replace(predicted_once, update_ms=update_ms)
    predicted = causes_of(cost, plan.stages_at_levels, workload)
    predicted_steps = predict_steps(predicted.all, workload, predicted_once, schedule)
    causes = replace_measured_times(replays, predicted, schedule)
    steps = predict_steps(causes.all, workload, once, schedule)
    ranks, parts_of = len(steps.step_ms) * plan.parallel.data, schedule.parts_of(len(plan.stages))

    def sum_by_stage(times_ms: np.ndarray) -> np.ndarray:
        # [packs, parts] to [stages], mean over steps and ranks.
        return times_ms.sum(axis=0)[parts_of].sum(axis=1) / ranks

    return ReplaySummary(
        info=info,
        stages=tuple(replays),
        each_step_ms=steps.step_ms,
        predicted_each_step_ms=predicted_steps.step_ms,
        forward_ms=sum_by_stage(causes.all.forward_ms),
        backward_ms=sum_by_stage(causes.all.backward_ms),
        recompute_ms=sum_by_stage(causes.all.recompute_ms),
        wait_fractions=steps.wait_fractions,
        lost=lost_time_of(causes, workload, once, float(steps.step_ms.mean()), schedule),
    )


def replace_measured_times(
    replays: Sequence[StageReplay], predicted: CauseTimes, schedule: PipelineSchedule
) -> CauseTimes:
    """Return measured times by cause; those with communication add the predicted."""
    all_, silent, needed = predicted.all, predicted.silent, predicted.needed
    packs, parts = len(replays[0].rows), len(replays) * schedule.chunks
    measured = {name: np.zeros((packs, parts)) for name in _MEASURED_FIELDS}
    for replay, parts_of_stage in zip(replays, schedule.parts_of(parts), strict=True):
        for name, times_ms in measured.items():
            if getattr(replay, name):  # weight_ms is empty if backwards are not split
                stage_ms = np.reshape(getattr(replay, name), (packs, schedule.chunks))
                times_ms[:, parts_of_stage] = stage_ms
    # A single device cannot measure communication, so its predicted time is added.
    exchanged = {name: getattr(all_, name) - getattr(silent, name) for name in _MEASURED_FIELDS}
    shares = {}
    for name in _MEASURED_FIELDS:
        # Necessary work keeps its predicted share of the measured time.
        part, base = getattr(needed, name), getattr(silent, name)
        shares[name] = np.divide(part, base, out=np.ones_like(base), where=base > 0)
    total = replace(all_, **{name: ms + exchanged[name] for name, ms in measured.items()})
    return CauseTimes(
        all=total,
        local=total,  # replayed plans have no context-parallel packs
        silent=replace(silent, **measured),
        needed=replace(needed, **{name: ms * shares[name] for name, ms in measured.items()}),
    )


_MEASURED_FIELDS = ("forward_ms", "backward_ms", "weight_ms", "recompute_ms")
