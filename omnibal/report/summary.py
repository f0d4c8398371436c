"""Summaries of a run log and a replay. Times are medians: rare slow steps do not count."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from omnibal.job.plan import Plan
from omnibal.job.refit import MIN_SLOWNESS
from omnibal.job.replay import ReplaySummary
from omnibal.job.runlog import EvaluatedAnswer, Evaluation, KindAccuracy, StepRecord
from omnibal.model.config import Provider


class StageTime(NamedTuple):
    """A stage's times in a step. Waits, data and optimizer are 0 unless measured."""

    forward_ms: float
    backward_ms: float  # includes recomputation
    encoder_ms: float = 0.0  # forward and backward of data-parallel encoders
    exchange_ms: float = 0.0  # exchange of their features and gradients, if measured with waits
    wait_ms: float = 0.0  # idle: P2P waits, and waiting at the step's end
    data_ms: float = 0.0  # wait for the data loader
    optimizer_ms: float = 0.0  # gradient reduction, norm, clipping and weight update


class SlowRank(NamedTuple):
    """A slow data-parallel rank of a stage."""

    stage: int
    rank: int
    factor: float  # time of its passes relative to the stage's median rank

    def __str__(self) -> str:
        return f"stage {self.stage}, data-parallel rank {self.rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """A step of one source: a prediction, a replay or a run."""

    bubble_fraction: float  # idle share of the step, mean over stages
    samples_per_second_per_gpu: float | None  # of a run with slow steps and gaps; None if unknown
    stages: tuple[StageTime, ...]  # of every stage; empty for a prediction without steps
    wait_fractions: tuple[float, ...]  # idle share of the step, of every stage


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary(StepFigures):
    step_ms: float  # median
    peak_gib: tuple[float, ...]  # max over steps, of every stage
    provider: Provider | None
    mfu: float  # median
    first_loss: float
    last_loss: float
    skipped_steps: int
    spikes: int  # steps with a spike of the loss
    replaced_samples: int  # unreadable samples
    allocation_retries: int  # on CUDA, max over ranks, summed over steps
    is_on_cpu: bool  # whether `peak_gib` is of processes, with Python and torch, not of devices
    slow_ranks: tuple[SlowRank, ...] = ()  # at least `MIN_SLOWNESS` times their stage's median

    def incidents(self) -> dict[str, int]:
        """Return counts of incidents that happened, by name."""
        counts = {
            "skipped steps": self.skipped_steps,
            "spikes of the loss": self.spikes,
            "unreadable samples replaced": self.replaced_samples,
            "allocation retries": self.allocation_retries,
        }
        return {name: count for name, count in counts.items() if count}


def summarise_run(
    records: Sequence[StepRecord], world_size: int, provider: Provider | None
) -> RunSummary:
    """Return a run's figures: median times, mean throughput, max memory. Needs a record."""
    step_ms = np.array([record.step_ms for record in records])
    stages = range(len(records[0].stages))
    wait_ms = np.array([[stage.wait_ms for stage in record.stages] for record in records])
    waits = wait_ms / np.maximum(step_ms, 1e-9)[:, None]
    # Throughput is a mean: slow steps and gaps (checkpoints, validation) cost time too.
    seconds = (step_ms.sum() + sum(record.between_ms for record in records)) / 1000
    samples = sum(record.samples for record in records)
    # [stages, steps, fields]
    times = [
        [[vars(record.stages[stage])[name] for name in StageTime._fields] for record in records]
        for stage in stages
    ]
    return RunSummary(
        provider=provider,
        step_ms=float(np.median(step_ms)),
        bubble_fraction=float(np.median(waits.mean(axis=1))),
        samples_per_second_per_gpu=samples / seconds / world_size if seconds else 0.0,
        mfu=float(np.median([record.mfu for record in records])),
        first_loss=records[0].loss,
        last_loss=records[-1].loss,
        skipped_steps=sum(record.skipped for record in records),
        spikes=sum(record.spike for record in records),
        replaced_samples=sum(record.replaced_samples for record in records),
        allocation_retries=sum(
            max(stage.allocation_retries for stage in record.stages) for record in records
        ),
        # Only CUDA's allocator reserves memory.
        is_on_cpu=not any(stage.reserved_gib for record in records for stage in record.stages),
        slow_ranks=tuple(rank for stage in stages for rank in _find_slow_ranks(records, stage)),
        stages=tuple(StageTime(*map(float, np.median(stage, axis=0))) for stage in times),
        wait_fractions=tuple(map(float, np.median(waits, axis=0))),
        peak_gib=tuple(max(record.stages[s].peak_gib for record in records) for s in stages),
    )


def _find_slow_ranks(records: Sequence[StepRecord], stage: int) -> Iterator[SlowRank]:
    """Yield slow ranks of a stage, from steps with times of all ranks."""
    timed = [record.stages[stage].ranks_ms for record in records if record.stages[stage].ranks_ms]
    if not timed:
        return
    ranks_ms = np.median(timed, axis=0)
    factors = ranks_ms / max(float(np.median(ranks_ms)), 1e-9)
    for rank in np.flatnonzero(factors >= MIN_SLOWNESS).tolist():
        yield SlowRank(stage, rank, float(factors[rank]))


def micro_batches_per_step(plan: Plan) -> float | None:
    """Return the mean packs per data-parallel rank and step, or None without packs."""
    if plan.data is not None:
        return plan.data.packs / (plan.data.steps * plan.parallel.data)
    return plan.shapes.micro_batches_per_step if plan.shapes else None


def figures_by_source(
    plan: Plan, run: RunSummary | None, replay: ReplaySummary | None
) -> dict[str, StepFigures]:
    """Return the step's figures by source (predicted, replayed, measured), if given."""
    sources: dict[str, StepFigures] = {}
    if plan.prediction is not None:
        encoders, count = plan.prediction.data_parallel_encoders, micro_batches_per_step(plan)
        encoder_ms = encoders.forward_ms + encoders.backward_ms if encoders else 0.0
        exchange_ms = encoders.exchange_ms if encoders else 0.0
        stages = plan.prediction.stages  # times are per micro-batch
        sources["predicted"] = StepFigures(
            bubble_fraction=plan.prediction.bubble_fraction,
            samples_per_second_per_gpu=plan.prediction.samples_per_second_per_gpu,
            stages=tuple(
                StageTime(s.forward_ms * count, s.backward_ms * count, encoder_ms, exchange_ms)
                for s in stages
                if count is not None
            ),
            wait_fractions=tuple(stage.wait_fraction for stage in stages),
        )
    if replay is not None:
        times_ms = zip(replay.forward_ms.tolist(), replay.backward_ms.tolist(), strict=True)
        sources["replayed"] = StepFigures(
            bubble_fraction=replay.idle_fraction,
            samples_per_second_per_gpu=None,
            stages=tuple(StageTime(*ms) for ms in times_ms),
            wait_fractions=tuple(replay.wait_fractions.tolist()),
        )
    return sources if run is None else sources | {"measured": run}


def replayed_peaks_as_predicted(plan: Plan, replay: ReplaySummary) -> list[float]:
    """Return predicted peaks in GiB of the stages as replayed. Empty without a prediction."""
    if plan.prediction is None:
        return []
    stages = zip(replay.stages, plan.prediction.stages, strict=True)
    return [replayed.predicted_gib(stage.memory) for replayed, stage in stages]


def replay_figures(plan: Plan, replay: ReplaySummary) -> dict[str, Any]:
    return replay.info.model_dump(mode="json", exclude={"plan_sha256"}) | {
        "step_ms": replay.step_ms,
        "predicted_step_ms": replay.predicted_step_ms,
        "bubble_fraction": replay.idle_fraction,
        "recompute_fraction": replay.recompute_fraction,
        "lost_ms": replay.lost,
        "forward_ms": replay.forward_ms.tolist(),
        "backward_ms": replay.backward_ms.tolist(),
        "recompute_ms": replay.recompute_ms.tolist(),
        "wait_fractions": replay.wait_fractions.tolist(),
        "peak_gib": [stage.peak_gib for stage in replay.stages],
        "predicted_peak_gib": replayed_peaks_as_predicted(plan, replay),
    }


def accuracy_interval(kind: KindAccuracy) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of the accuracy, (0, 1) without questions."""
    if not kind.questions:
        return 0.0, 1.0
    share, z = kind.correct / kind.questions, NormalDist().inv_cdf(0.975)
    z2 = z**2 / kind.questions
    half = (z2 * share * (1 - share) + z2**2 / 4) ** 0.5
    return max(share + z2 / 2 - half, 0.0) / (1 + z2), min((share + z2 / 2 + half) / (1 + z2), 1.0)


def is_right(answer: EvaluatedAnswer) -> bool:
    """Return whether an answer is the expected one, ignoring surrounding spaces."""
    return answer.answered.strip() == answer.expected.strip()


def telling_examples(evaluation: Evaluation, limit: int) -> list[EvaluatedAnswer]:
    """Return up to `limit` answers, spread evenly over kinds, and over right and wrong."""
    # Rank within its (kind, is wrong) group: sorting by it takes from all groups in turn.
    earlier, ranked = Counter[tuple[str, bool]](), []
    for answer in evaluation.examples:
        group = answer.kind, not is_right(answer)
        ranked.append((earlier[group], group, answer))
        earlier[group] += 1
    ranked.sort(key=lambda entry: entry[:2])
    return [answer for *_, answer in sorted(ranked[:limit], key=lambda entry: entry[1])]
