"""Headline cards: fit into memory, time, waste and training result."""

from collections.abc import Sequence

from omnibal.limits import memory_cap_gib
from omnibal.pipeline.prediction import Prediction
from omnibal.plan import Plan
from omnibal.replay import ReplaySummary
from omnibal.report.summary import RunSummary, replayed_peaks_as_predicted
from omnibal.report.text import ARROW, deviation, duration, escape, milliseconds, number, percent
from omnibal.runlog import Evaluation, StepRecord

_KINDS_SHOWN = 5


def headline_cards(
    plan: Plan,
    run: RunSummary | None,
    replay: ReplaySummary | None,
    records: Sequence[StepRecord],
    evaluation: Evaluation | None,
) -> str:
    """Cards in the order in which the questions are asked."""
    prediction = plan.prediction
    cards = [_fit(plan, prediction, run, replay)] if prediction else []
    if run or replay or prediction:
        cards += [_step(prediction, run, replay), _idle(prediction, run, replay)]
        cards += [_rate(prediction, run)]
    cards += [_length(plan, prediction)] if prediction else []
    cards += [_loss(run, records)] if run else []
    cards += [_accuracy(evaluation)] if evaluation and evaluation.kinds else []
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _card(title: str, value: str, note: str) -> str:
    return (
        f'<div class="card"><h3>{escape(title)}</h3><div class="value">{value}</div>'
        f"<p>{escape(note)}</p></div>"
    )


def _beside(
    predicted: str | None, replayed: str | None, measured: str | None
) -> tuple[str, list[str]]:
    """Last value that is given, and notes of those before it; at least one is not None."""
    values = {"predicted": predicted, "replayed": replayed, "measured": measured}
    *others, (name, value) = [(k, v) for k, v in values.items() if v is not None]
    missing = ["no prediction"] * (predicted is None)
    return f"{value} <small>{name}</small>", missing + [f"{k} {v}" for k, v in others]


def _fit(
    plan: Plan, prediction: Prediction, run: RunSummary | None, replay: ReplaySummary | None
) -> str:
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
    return _card("Memory", f'<span class="{css}">{verdict}</span>', note)


def _step(
    prediction: Prediction | None, run: RunSummary | None, replay: ReplaySummary | None
) -> str:
    predicted = milliseconds(prediction.step_ms) if prediction else None
    if prediction and run:
        predicted = f"{predicted}, {deviation(prediction.step_ms, run.step_ms)}"
    value, notes = _beside(
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
    return _card("Time per step", value, "; ".join(notes))


def _idle(
    prediction: Prediction | None, run: RunSummary | None, replay: ReplaySummary | None
) -> str:
    value, notes = _beside(
        percent(prediction.bubble_fraction) if prediction else None,
        percent(replay.idle_fraction) if replay else None,
        percent(run.bubble_fraction) if run else None,
    )
    return _card("Idle", value, "; ".join(notes) or "share of device time spent waiting")


def _rate(prediction: Prediction | None, run: RunSummary | None) -> str:
    rate = prediction.samples_per_second_per_gpu if prediction else None
    if rate is None and run is None:
        return ""
    predicted = None if rate is None else number(rate)
    measured = number(run.samples_per_second_per_gpu) if run else None
    value, notes = _beside(predicted, None, measured)
    return _card("Samples per second per device", value, "; ".join(notes))


def _length(plan: Plan, prediction: Prediction) -> str:
    if plan.data is None or prediction.gpu_days is None:
        return ""
    value = duration(prediction.step_ms * plan.data.steps / 1000)
    epochs = f"{plan.data.epochs} epoch{'s' * (plan.data.epochs > 1)}"
    return _card(
        "Whole training",
        f"{value} <small>predicted</small>",
        f"{plan.data.steps:,} steps, {epochs}, {number(prediction.gpu_days)} device-days",
    )


def _loss(run: RunSummary, records: Sequence[StepRecord]) -> str:
    return _card(
        "Loss",
        f"{number(run.first_loss)} {ARROW} {number(run.last_loss)}",
        f"at step {records[0].step:,} and at step {records[-1].step:,}",
    )


def _accuracy(evaluation: Evaluation) -> str:
    rows = "".join(
        f"<dt>{escape(kind.kind)}</dt>"
        f'<dd class="value">{percent(kind.accuracy)}</dd>'
        f'<dd class="soft">chance {percent(kind.chance)}</dd>'
        for kind in evaluation.kinds[:_KINDS_SHOWN]
    )
    more = len(evaluation.kinds) - _KINDS_SHOWN
    note = f"<p>and {more} kinds more below</p>" if more > 0 else ""
    return f'<div class="card double"><h3>Held-out accuracy</h3><dl>{rows}</dl>{note}</div>'
