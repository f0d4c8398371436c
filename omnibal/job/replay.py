"""Replay of a plan: stages measured one by one on one device, combined into whole steps.

Links and reductions come from the cost model. A replay's directory has its identity, and a file of
results per stage.
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
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.lost_time import CauseTimes, causes_of, lost_time_of
from omnibal.pipeline.prediction import LostTime, StageMemory
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import per_step_costs
from omnibal.pipeline.stage_memory import bytes_of_passes
from omnibal.pipeline.workload import Workload

INFO_FILE = "replay.json"
_REPLAY_REMEDY = "replay the plan anew with tools/replay.py, into another directory"


class ReplayIdentity(Frozen):
    """Identity of a replay, written before the first stage."""

    plan_sha256: str


class StageResult(Frozen):
    """Results of one stage."""

    stage: NonNegativeInt


AnyIdentity = TypeVar("AnyIdentity", bound=ReplayIdentity)
AnyStageResult = TypeVar("AnyStageResult", bound=StageResult)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFiles(Generic[AnyIdentity, AnyStageResult]):
    """Files of a replay, in the directory that all methods take."""

    what: str
    identity: type[AnyIdentity]
    result: type[AnyStageResult]
    info_file: str
    prefix: str  # name of stages' files, before the stage's number
    remedy: str  # end of the error message about a bad file

    def file_of(self, directory: Path, stage: int) -> Path:
        return directory / f"{self.prefix}_{stage}.json"

    def all_files(self, directory: Path) -> list[Path]:
        """List a replay's files, the first even if absent."""
        return [directory / self.info_file, *sorted(directory.glob(f"{self.prefix}_*.json"))]

    def open(self, directory: Path, identity: AnyIdentity) -> None:
        """Begin a replay, or continue an identical one."""
        if not (directory / self.info_file).exists():
            directory.mkdir(parents=True, exist_ok=True)
            write_json_model(identity, directory / self.info_file)
            return
        kept = self.identity_of(directory, identity.plan_sha256)
        if kept != identity:
            differs = [name for name, value in identity if value != dict(kept)[name]]
            raise UserError(
                f"{directory}: holds a {self.what} with another {differs[0]}; only the "
                f"same one can be gone on with: {self.remedy}"
            )

    def identity_of(self, directory: Path, plan_sha256: str) -> AnyIdentity:
        kept = read_json_model(self.identity, directory / self.info_file, self.remedy)
        if kept.plan_sha256 != plan_sha256:
            raise UserError(
                f"{directory}: is the {self.what} of another plan (sha256 "
                f"{kept.plan_sha256[:12]}, not {plan_sha256[:12]}); give the one of this plan, or "
                f"{self.remedy}"
            )
        return kept

    def write(self, result: AnyStageResult, directory: Path) -> None:
        write_json_model(result, self.file_of(directory, result.stage))

    def read_stages(self, directory: Path, stages: int) -> tuple[AnyStageResult, ...]:
        """Read the existing stage files, in order."""
        results = []
        for stage in range(stages):
            path = self.file_of(directory, stage)
            if not path.exists():
                continue
            result = read_json_model(self.result, path, self.remedy)
            if result.stage != stage:
                raise UserError(
                    f"{path}: holds stage {result.stage}, and by its name stage {stage}; "
                    f"{self.remedy}"
                )
            results.append(result)
        return tuple(results)


class ReplayInfo(ReplayIdentity):
    steps: tuple[NonNegativeInt, ...]
    repetitions: PositiveInt
    content: Literal["data", "random"]  # content of micro-batches with the plan's sizes
    device: str
    processes: PositiveInt
    provider: Provider = "local"


class StageReplay(StageResult):
    """Measurements of one stage on one device; times are medians of the repetitions."""

    rows: tuple[NonNegativeInt, ...]
    """Rows of the packs, ascending. Times are per row, and within a row per chunk of the stage."""
    forward_ms: tuple[NonNegativeFloat, ...]
    backward_ms: tuple[NonNegativeFloat, ...]
    """Backward time, including recomputation and weight gradients."""
    weight_ms: tuple[NonNegativeFloat, ...] = ()
    """Time of weight gradients, or empty if backwards are not split."""
    recompute_ms: tuple[NonNegativeFloat, ...]
    update_ms: NonNegativeFloat  # zeroing, norm, clipping and weight update, once a step
    state_gib: NonNegativeFloat  # weights, gradients and optimizer state
    activations_gib: NonNegativeFloat  # peak activation memory of the predicted heaviest steps
    with_working_memory: bool
    """Whether `activations_gib` includes working memory (CUDA), not only kept activations (CPU)."""

    @model_validator(mode="after")
    def _as_many(self) -> "StageReplay":
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
        """Prediction of `peak_gib`, without working memory if not measured."""
        left_out = 0.0 if self.with_working_memory else memory.transient_gib
        return memory.peak_gib - left_out


REPLAY_FILES = StageFiles(
    what="replay",
    identity=ReplayInfo,
    result=StageReplay,
    info_file=INFO_FILE,
    prefix="stage",
    remedy=_REPLAY_REMEDY,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplaySummary:
    """Whole steps of a replayed plan; times are means over the replayed steps."""

    info: ReplayInfo
    stages: tuple[StageReplay, ...]
    each_step_ms: np.ndarray  # [steps]
    predicted_each_step_ms: np.ndarray
    forward_ms: np.ndarray
    """Forward time per step over all chunks, [stages]; likewise the next two fields."""
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
    """Choose up to `most` steps of the most frequent size, evenly over the run."""
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
    """Return rows of the rank step with the stage's peak memory, and of that with most kept
    activations if different. `cost` is of all levels, `workload` of all the plan's packs.
    """
    features = features_of(workload, cost)
    passes = bytes_of_passes(cost, plan.stages_at_levels, workload, plan.schedule, stage, features)
    worst = {int(passes.row[memory.argmax()]) for memory in (passes.needed, passes.held)}
    places = {(int(workload.step[row]), int(workload.dp_rank[row])) for row in worst}
    return tuple(
        np.flatnonzero((workload.step == step) & (workload.dp_rank == rank))
        for step, rank in sorted(places)
    )


def read_replay(directory: Path, plan: Plan, cost: CostModel, workload: Workload) -> ReplaySummary:
    """Read a finished replay of the plan and combine its stages into steps."""
    info = REPLAY_FILES.identity_of(directory, plan_sha256(plan))
    stages = REPLAY_FILES.read_stages(directory, plan.parallel.pipeline)
    size = plan.parallel.pipeline
    missing = sorted(set(range(size)) - {replay.stage for replay in stages})
    if missing:
        raise UserError(
            f"{directory}: stage {missing[0]} is not replayed yet ({len(missing)} of "
            f"{size} are not), and a step needs them all: give the same command of "
            "tools/replay.py again, with --stages all"
        )
    return summarise_replay(info, stages, plan, cost, workload)


def summarise_replay(
    info: ReplayInfo,
    replays: Sequence[StageReplay],
    plan: Plan,
    cost: CostModel,
    workload: Workload,
) -> ReplaySummary:
    """Combine all stages' measured times into steps of the plan's schedule.

    `cost` is of all levels, `workload` of all the plan's packs.
    """
    rows = np.flatnonzero(np.isin(workload.step, info.steps))
    for replay in replays:
        if not np.array_equal(replay.rows, rows):
            raise UserError(
                f"the replay of stage {replay.stage} is not of the packs of its steps; "
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

    def of_stages(each_ms: np.ndarray) -> np.ndarray:
        return each_ms.sum(axis=0)[parts_of].sum(axis=1) / ranks

    return ReplaySummary(
        info=info,
        stages=tuple(replays),
        each_step_ms=steps.step_ms,
        predicted_each_step_ms=predicted_steps.step_ms,
        forward_ms=of_stages(causes.all.forward_ms),
        backward_ms=of_stages(causes.all.backward_ms),
        recompute_ms=of_stages(causes.all.recompute_ms),
        wait_fractions=steps.wait_fractions,
        lost=lost_time_of(causes, workload, once, float(steps.step_ms.mean()), schedule),
    )


def replace_measured_times(
    replays: Sequence[StageReplay], predicted: CauseTimes, schedule: PipelineSchedule
) -> CauseTimes:
    """Replace predicted times by measured ones, except tensor-parallel communication."""
    all_, silent, needed = predicted.all, predicted.silent, predicted.needed
    measured = {name: _measured_ms(replays, name, schedule) for name in _MEASURED_FIELDS}
    exchanged = {name: getattr(all_, name) - getattr(silent, name) for name in _MEASURED_FIELDS}
    shares = {}
    for name in _MEASURED_FIELDS:
        part, of_all = getattr(needed, name), getattr(silent, name)
        shares[name] = np.divide(part, of_all, out=np.ones_like(of_all), where=of_all > 0)
    whole = replace(all_, **{name: ms + exchanged[name] for name, ms in measured.items()})
    return CauseTimes(
        all=whole,
        local=whole,  # nothing is shared in plans that are replayed
        silent=replace(silent, **measured),
        needed=replace(needed, **{name: ms * shares[name] for name, ms in measured.items()}),
    )


_MEASURED_FIELDS = ("forward_ms", "backward_ms", "weight_ms", "recompute_ms")


def _measured_ms(
    replays: Sequence[StageReplay], name: str, schedule: PipelineSchedule
) -> np.ndarray:
    """Return measured times, [packs, parts]."""
    packs, parts = len(replays[0].rows), len(replays) * schedule.chunks
    times_ms = np.zeros((packs, parts))
    for replay, held in zip(replays, schedule.parts_of(parts), strict=True):
        if getattr(replay, name):
            times_ms[:, held] = np.reshape(getattr(replay, name), (packs, schedule.chunks))
    return times_ms
