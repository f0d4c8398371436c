"""Headline cards: fit into memory, time, waste and loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.limits import memory_cap_gib
from omnibal.pipeline.prediction import Prediction
from omnibal.plan import Plan
from omnibal.replay import ReplaySummary
from omnibal.report.summary import RunSummary, replayed_peaks_as_predicted
from omnibal.report.table import Marked
from omnibal.report.text import ARROW, deviation, duration, milliseconds, number, percent
from omnibal.runlog import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One figure that stands at the top of the page."""

    title: str
    value: str | Marked
    source: str = ""
    """Where the value is from: predicted, replayed or measured."""
    note: str


def headline_cards(
    plan: Plan,
    run: RunSummary | None,
    replay: ReplaySummary | None,
    records: Sequence[StepRecord],
) -> list[Card]:
    """Cards in the order in which the questions are asked."""
    prediction = plan.prediction
    cards = [_fit(plan, prediction, run, replay)] if prediction else []
    if run or replay or prediction:
        cards += [_step(prediction, run, replay), _idle(prediction, run, replay)]
        cards += _rate(prediction, run)
    cards += _length(plan, prediction) if prediction else []
    cards += [_loss(run, records)] if run else []
    return cards + _experts(plan, records)


def _beside(
    predicted: str | None, replayed: str | None, measured: str | None
) -> tuple[str, str, list[str]]:
    """Last value that is given, its source, and notes of those before it; one at least is given."""
    values = {"predicted": predicted, "replayed": replayed, "measured": measured}
    *others, (name, value) = [(k, v) for k, v in values.items() if v is not None]
    missing = ["no prediction"] * (predicted is None)
    return value, name, missing + [f"{k} {v}" for k, v in others]


def _fit(
    plan: Plan, prediction: Prediction, run: RunSummary | None, replay: ReplaySummary | None
) -> Card:
    peaks = [stage.memory.peak_gib for stage in prediction.stages]
    cap, worst = memory_cap_gib(plan.cluster), max(peaks)
    verdict, css = ("fits", "good") if worst <= cap else ("does not fit", "bad")
    note = f"{number(worst)} of {number(cap)} usable GiB predicted, on stage {peaks.index(worst)}"
    if replay:
        most, expected = max(
            zip(
                (stage.peak_gib for stage in replay.stages),
                replayed_peaks_as_predicted(plan, replay),
                strict=True,
            )
        )
        note += f"; {number(most)} GiB replayed where {number(expected)} were predicted"
    if run:
        note += f"; {number(max(run.peak_gib))} GiB measured"
    return Card(title="Memory", value=Marked(verdict, css), note=note)


def _step(
    prediction: Prediction | None, run: RunSummary | None, replay: ReplaySummary | None
) -> Card:
    predicted = milliseconds(prediction.step_ms) if prediction else None
    if prediction and run:
        predicted = f"{predicted}, {deviation(prediction.step_ms, run.step_ms)}"
    value, source, notes = _beside(
        predicted,
        milliseconds(replay.step_ms) if replay else None,
        milliseconds(run.step_ms) if run else None,
    )
    if replay:
        of_these = milliseconds(replay.predicted_step_ms)
        error = deviation(replay.predicted_step_ms, replay.step_ms)
        notes.append(f"for the replayed steps the cost model says {of_these}, {error}")
    elif prediction and not run:
        ideal = milliseconds(prediction.ideal_step_ms)
        notes.append(f"at best {ideal}, without waiting or recomputing")
    return Card(title="Time per step", value=value, source=source, note="; ".join(notes))


def _idle(
    prediction: Prediction | None, run: RunSummary | None, replay: ReplaySummary | None
) -> Card:
    value, source, notes = _beside(
        percent(prediction.bubble_fraction) if prediction else None,
        percent(replay.idle_fraction) if replay else None,
        percent(run.bubble_fraction) if run else None,
    )
    note = "; ".join(notes) or "share of device time spent waiting"
    return Card(title="Idle", value=value, source=source, note=note)


def _rate(prediction: Prediction | None, run: RunSummary | None) -> list[Card]:
    rate = prediction.samples_per_second_per_gpu if prediction else None
    if rate is None and run is None:
        return []
    predicted = None if rate is None else number(rate)
    measured = number(run.samples_per_second_per_gpu) if run else None
    value, source, notes = _beside(predicted, None, measured)
    title = "Samples per second per device"
    return [Card(title=title, value=value, source=source, note="; ".join(notes))]


def _length(plan: Plan, prediction: Prediction) -> list[Card]:
    if plan.data is None or prediction.gpu_days is None:
        return []
    value = duration(prediction.step_ms * plan.data.steps / 1000)
    epochs = f"{plan.data.epochs} epoch{'s' * (plan.data.epochs > 1)}"
    note = f"{plan.data.steps:,} steps, {epochs}, {number(prediction.gpu_days)} device-days"
    return [Card(title="Whole training", value=value, source="predicted", note=note)]


def _loss(run: RunSummary, records: Sequence[StepRecord]) -> Card:
    return Card(
        title="Loss",
        value=f"{number(run.first_loss)} {ARROW} {number(run.last_loss)}",
        note=f"at step {records[0].step:,} and at step {records[-1].step:,}",
    )


def _experts(plan: Plan, records: Sequence[StepRecord]) -> list[Card]:
    """How full experts were beside what was planned for; nothing where no layer has any."""
    balances = [record.experts for record in records if record.experts is not None]
    planned = [kind.experts.imbalance for kind in plan.model.language.kinds if kind.experts]
    if not balances or not planned:
        return []
    experts = np.median([balance.fullest_expert for balance in balances])
    note = f"tokens over the mean of a step; the fullest expert {number(float(experts))}"
    value = f"{number(float(np.median([balance.fullest_rank for balance in balances])))}"
    if plan.parallel.expert > 1:
        note += f"; planned for {number(max(planned))} in every micro-batch"
    return [Card(title="Fullest expert rank", value=value, source="measured", note=note)]
