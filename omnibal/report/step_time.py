"""A step's time by cause: predicted, replayed and measured, with options that reduce each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from omnibal.job.plan import Plan
from omnibal.job.plan_files import PlanFiles
from omnibal.job.replay import ReplaySummary
from omnibal.job.runlog import StepRecord
from omnibal.pipeline.encoder_loads import EncoderWaits
from omnibal.pipeline.lost_time import CauseTimes, causes_of, lost_time_of
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import StageTimes, per_step_costs
from omnibal.report.formatting import change_ms, milliseconds, percent
from omnibal.report.summary import RunSummary, StageTime, micro_batches_per_step

_SIMULATED_STEPS = 200  # max measured steps to simulate, spread evenly over the run
_IDEAL, _READING, _OTHER = "ideal", "reading", "other waits"
# Min share of the step for a loss, or a difference to the prediction, to be named.
_MIN_NAMED_SHARE = 0.02
_MIN_REMEDY_SHARE, _MIN_SHOWN_SHARE = 0.01, 0.001  # of the step, to explain and to show a cause


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """A cause's time in a step, with its reason and the options that reduce it."""

    name: str
    ms: Mapping[str, float]  # by source, in the order predicted, replayed, measured
    why: str = ""
    remedy: str = ""  # Options in backticks. Empty, as `why`, for a cause of little time.

    @property
    def advice(self) -> str:
        return f"To lessen it: {self.remedy}."

    @property
    def latest_ms(self) -> float:
        """Time by the last source: measured, else replayed, else predicted."""
        return [*self.ms.values()][-1]

    @property
    def excess_ms(self) -> float:
        """Last source's time above the first's: above the predicted, if there is a prediction."""
        return self.latest_ms - next(iter(self.ms.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A step's time by source, and its causes: needed work first, then by falling time."""

    step_ms: Mapping[str, float]
    expected_ms: float | None  # predicted for the replayed or measured steps, or None
    causes: tuple[Cause, ...]

    @property
    def longest_ms(self) -> float:
        """Longest time of any cause by any source, the scale of the page's bars."""
        return max(ms for cause in self.causes for ms in cause.ms.values())

    @property
    def rows(self) -> list[Cause]:
        """Return causes that take at least `_MIN_SHOWN_SHARE` of the step by some source."""
        min_ms = _MIN_SHOWN_SHARE * min(self.step_ms.values())
        return [cause for cause in self.causes if max(map(abs, cause.ms.values())) >= min_ms]

    @property
    def sentences(self) -> list[str]:
        """Return sentences on the step time, the largest loss and the largest misprediction."""
        source, step_ms = [*self.step_ms.items()][-1]
        needed, *losses = self.causes
        base_ms = self.expected_ms
        excess = 0.0 if base_ms is None else step_ms / base_ms - 1
        summary = f"A step takes {milliseconds(step_ms)} ({source})"
        if source == "predicted":
            summary += f": {percent(needed.latest_ms / step_ms)} is needed work."
        elif base_ms is None:
            summary += "; the plan has no prediction."
        else:
            longer = "longer" if excess > 0 else "shorter"
            base = milliseconds(base_ms)
            summary += f", {percent(abs(excess))} {longer} than predicted ({base})."
        largest = max(losses, key=lambda cause: cause.latest_ms)
        share = largest.latest_ms / step_ms
        if share < _MIN_NAMED_SHARE:
            loss = f"Little is lost: no cause takes more than {percent(share)} of the step."
        else:
            took = f"{milliseconds(largest.latest_ms)}, {percent(share)} of the step"
            loss = f"Largest loss: {largest.name}, {took}, as {largest.why}. {largest.advice}"
        if len(self.step_ms) < 2 or abs(excess) < _MIN_NAMED_SHARE:
            return [summary, loss]
        worst = max(self.causes, key=lambda cause: cause.excess_ms * np.sign(excess))
        difference = f"Most of the difference: {worst.name}, {change_ms(worst.excess_ms)}"
        if worst is largest or excess < 0:
            return [summary, loss, f"{difference}."]
        return [summary, loss, f"{difference}, as {worst.why}. {worst.advice}"]


def step_time(
    plan: Plan, run: RunSummary | None, replay: ReplaySummary | None, measured: Mapping[str, float]
) -> StepTime | None:
    """Return a step's time by cause and source (`measured`: ms by cause), or None if none."""
    sources: dict[str, tuple[dict[str, float], float]] = {}
    if plan.prediction is not None:
        sources["predicted"] = plan.prediction.lost.causes(), plan.prediction.step_ms
    if replay is not None:
        sources["replayed"] = replay.lost.causes(), replay.step_ms
    if run is not None and measured:
        sources["measured"] = {**measured}, run.step_ms
    if not sources:
        return None
    names = dict.fromkeys(name for lost, _ in sources.values() for name in lost)
    step_ms = {source: ms for source, (_, ms) in sources.items()}
    # Causes of little time need no explanation.
    texts, causes = explain_causes(plan, run), []
    for name in names:
        ms = {source: lost.get(name, 0.0) for source, (lost, _) in sources.items()}
        cause = Cause(name=name, ms=ms)
        # The ideal is needed work: only time above its prediction has a remedy.
        losses_ms = [cause.excess_ms] if name == _IDEAL else ms.values()
        if max(losses_ms) >= _MIN_REMEDY_SHARE * max(step_ms.values()):
            cause = replace(cause, why=texts[name][0], remedy=texts[name][1])
        causes.append(cause)
    causes.sort(key=lambda cause: (cause.name != _IDEAL, -cause.latest_ms))
    expected_ms = None if plan.prediction is None else plan.prediction.step_ms
    if replay is not None and "measured" not in sources:
        expected_ms = replay.predicted_step_ms
    return StepTime(step_ms=step_ms, expected_ms=expected_ms, causes=tuple(causes))


def explain_causes(plan: Plan, run: RunSummary | None) -> dict[str, tuple[str, str]]:
    """Return (reason, remedy) by cause, for all causes, with remedies that this plan allows."""
    sizes, count = plan.parallel, round(micro_batches_per_step(plan) or 1)
    batches = f"{count} micro-batch{'es' * (count > 1)}"
    more, smaller = "a larger `--samples-per-step`", "a smaller `--max-tokens`"
    auto = ", or `--schedule auto`" * (plan.schedule == ONE_FORWARD_ONE_BACKWARD)
    for_this_trainer = plan.made_for is None
    can_shard = for_this_trainer and sizes.data > 1 and sizes.sharded == 1
    can_move_encoders = bool(for_this_trainer and plan.pipeline_model.encoders)
    sharding = ", `--sharding full`" * can_shard
    encoders = " or `--encoder data-parallel`" * can_move_encoders
    replan = "a plan by measured times (`omnibal replan PLAN --run RUN`)"
    messages, padded = ("activations sent between stages", "a smaller `--pp`"), smaller
    if sizes.tensor > 1:
        messages = "tensor-parallel ranks exchange activations in every layer", "a smaller `--tp`"
        padded = "a `--tp` that divides the attention heads"
    elif sizes.sharded > 1:
        hybrid = "`--sharding replicated` or hybrid, or a larger `--max-tokens`"
        messages = "sharded weights are gathered for every micro-batch", hybrid
    elif sizes.data > 1:
        messages = "gradients and weights are exchanged once a step", more
    slow = ", ".join(map(str, run.slow_ranks)) if run else ""
    return {
        _IDEAL: ("passes take longer than predicted", replan),
        "bubble": (
            f"{sizes.pipeline} stages fill and drain around {batches}",
            f"{more}, a smaller `--pp`{auto}",
        ),
        "stage imbalance": ("stages take unequal time", f"another `--pp`{encoders}"),
        "padding": ("heads or tokens are padded", padded),
        "recompute": ("memory is short", f"a larger `--pp`{sharding} or {smaller}"),
        "weight update": ("every step ends with one", more),
        "communication": messages,
        "context exchange": ("ranks share long packs", "a smaller `--packing-levels`"),
        "wait in lockstep": (
            "ranks that share experts or weights wait for the slowest",
            "a smaller `--ep`" if sizes.expert > 1 else more,
        ),
        "rank imbalance": (f"{slow or 'the slowest rank'} ends the step", replan if slow else more),
        _READING: (
            "samples are read more slowly than trained",
            "a larger `--num-workers` in training, more cores, or smaller images",
        ),
        _OTHER: (
            "passes vary, or messages are late",
            "fewer other programs; `--profile-steps` in training traces a step",
        ),
    }


def split_measured_step(
    files: PlanFiles, run: RunSummary, records: Sequence[StepRecord]
) -> dict[str, float]:
    """Return ms by cause of a run's median step, or {} if the plan's data lack its steps.

    Steps between the quartiles of time are simulated with predicted passes scaled to each stage's
    measured times. Weight updates and waits for data are medians; other waits are the remainder.
    """
    if files.data is None:
        return {}
    plan, cost = files.plan, files.cost
    step_ms = np.array([record.step_ms for record in records])
    low, high = np.percentile(step_ms, [25, 75])  # without checkpoints, warm-up and stragglers
    usual = {record.step: record for record in records if low <= record.step_ms <= high}
    workload = files.workload.of_steps([*usual])
    workload = workload.some_steps(_SIMULATED_STEPS)
    number, step = np.unique(workload.step, return_inverse=True)
    if not len(number):
        return {}
    # Measured times by field, [steps, stages].
    logged = {
        name: np.array([[vars(stage)[name] for stage in usual[n].stages] for n in number])
        for name in StageTime._fields
    }
    parts_of = plan.schedule.parts_of(len(plan.stages))
    causes = causes_of(cost, plan.stages_at_levels, workload)

    def factor(name: str, predicted_ms: np.ndarray) -> np.ndarray:
        """Measured over predicted time of each row's stages, [rows, parts]."""
        sums = np.zeros_like(logged[name])  # by step, mean over data-parallel ranks
        np.add.at(sums, step, predicted_ms[:, parts_of].sum(axis=2) / plan.parallel.data)
        ratio = np.divide(logged[name], sums, out=np.ones_like(sums), where=sums > 0)
        return ratio[step][:, list(plan.stage_of_parts)]

    forward = factor("forward_ms", causes.all.forward_ms)
    backward = factor("backward_ms", causes.all.backward_ms)
    encoding, encoders = workload.encoding, 1.0
    if encoding is not None:
        phase = encoding.predicted
        taken_ms = (logged["encoder_ms"] + logged["exchange_ms"]).mean()
        encoders = float(taken_ms) / (phase.forward_ms + phase.backward_ms + phase.exchange_ms)
        waits = {field.name: getattr(encoding.waits, field.name) for field in fields(EncoderWaits)}
        scaled = EncoderWaits(**{name: encoders * ms for name, ms in waits.items()})
        workload = replace(workload, encoding=replace(encoding, waits=scaled))

    def as_measured(times: StageTimes) -> StageTimes:
        return replace(
            times,
            forward_ms=times.forward_ms * forward,
            backward_ms=times.backward_ms * backward,
            weight_ms=times.weight_ms * backward,
            recompute_ms=times.recompute_ms * backward,
            waits_ms=None if times.waits_ms is None else encoders * times.waits_ms,
        )

    causes = CauseTimes(
        **{field.name: as_measured(getattr(causes, field.name)) for field in fields(causes)}
    )
    once = per_step_costs(cost, plan.stages_at_levels[0], plan.schedule)
    # The optimizer's logged time includes waiting for gradients, which the simulation adds itself.
    exposed_ms = plan.prediction.exchange.exposed_ms if plan.prediction else 0.0
    update_ms = np.median(logged["optimizer_ms"], axis=0) - exposed_ms
    once = replace(once, update_ms=np.maximum(update_ms, 0))
    simulated_ms = float(predict_steps(causes.all, workload, once, plan.schedule).step_ms.mean())
    lost = lost_time_of(causes, workload, once, simulated_ms, plan.schedule).causes()
    lost |= {_READING: float(np.median(logged["data_ms"], axis=0).max())}
    return lost | {_OTHER: run.step_ms - sum(lost.values())}
