"""Headline cards of the page: memory, idle time, throughput, duration, loss and experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.job.plan import Plan
from omnibal.job.replay import ReplaySummary
from omnibal.job.runlog import StepRecord
from omnibal.model.limits import memory_cap_gib
from omnibal.pipeline.prediction import Prediction
from omnibal.report.formatting import ARROW, duration, number, percent
from omnibal.report.summary import RunSummary, figures_by_source, replayed_peaks_as_predicted
from omnibal.report.table import Facts, Marked


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A headline value at the top of the page, with its explanation `note`."""

    title: str
    value: str | Marked
    source: str = ""  # predicted, replayed or measured; empty if several or obvious
    note: str


def headline_cards(
    plan: Plan, run: RunSummary | None, replay: ReplaySummary | None, records: Sequence[StepRecord]
) -> list[Card]:
    """Return a card for every known headline value."""
    prediction, sources = plan.prediction, figures_by_source(plan, run, replay)
    idle = {name: percent(figures.bubble_fraction) for name, figures in sources.items()}
    rates = {name: figures.samples_per_second_per_gpu for name, figures in sources.items()}
    known = {name: number(rate) for name, rate in rates.items() if rate is not None}
    loss = []
    if run:
        value = f"{number(run.first_loss)} {ARROW} {number(run.last_loss)}"
        note = f"at step {records[0].step:,} and at step {records[-1].step:,}"
        loss.append(Card(title="Loss", value=value, note=note))
    duration_cards = []
    if prediction and plan.data and prediction.gpu_days is not None:
        epochs = f"{plan.data.epochs} epoch{'s' * (plan.data.epochs > 1)}"
        note = f"{plan.data.steps:,} steps, {epochs}, {number(prediction.gpu_days)} device-days"
        value, title = duration(prediction.step_ms * plan.data.steps / 1000), "Whole training"
        duration_cards.append(Card(title=title, value=value, source="predicted", note=note))
    return [
        *([_memory_card(plan, prediction, run, replay)] if prediction else []),
        *_latest_card("Idle", idle, ["share of device time spent waiting"]),
        *_latest_card("Samples/s per device", known, [f"MFU {percent(run.mfu)}"] if run else []),
        *duration_cards,
        *loss,
        *_expert_card(plan, records),
    ]


def card_facts(cards: Sequence[Card]) -> Facts:
    """Return the cards' values without notes."""
    entries = [(f"{card.title} {card.source}".strip(), card.value) for card in cards]
    return Facts("Summary", entries)


def _latest_card(title: str, values: Mapping[str, str], notes: Sequence[str] = ()) -> list[Card]:
    """Return the last source's value, with earlier sources in the note. Empty without sources."""
    if not values:
        return []
    *earlier, (source, value) = values.items()
    before = [f"{name} {text}" for name, text in earlier]
    return [Card(title=title, value=value, source=source, note="; ".join([*before, *notes]))]


def _memory_card(
    plan: Plan, prediction: Prediction, run: RunSummary | None, replay: ReplaySummary | None
) -> Card:
    """Return whether the largest peak fits usable memory, with peaks by source in the note."""
    peaks = [stage.memory.peak_gib for stage in prediction.stages]
    cap, worst = memory_cap_gib(plan.cluster), max(peaks)
    note = f"{number(worst)} of {number(cap)} usable GiB predicted, on stage {peaks.index(worst)}"
    if replay:
        replayed = [stage.peak_gib for stage in replay.stages]
        pairs = zip(replayed, replayed_peaks_as_predicted(plan, replay), strict=True)
        peak, predicted = max(pairs)
        note += f"; {number(peak)} GiB replayed where {number(predicted)} were predicted"
    if run:
        measured = max(run.peak_gib)
        worst = max(worst, measured)
        note += f"; {number(measured)} GiB measured"
        if run.is_on_cpu:
            note += " with Python and torch, so not compared with the prediction"
    verdict, css = ("fits", "good") if worst <= cap else ("does not fit", "bad")
    return Card(title="Memory", value=Marked(verdict, css), note=note)


def _expert_card(plan: Plan, records: Sequence[StepRecord]) -> list[Card]:
    """Return the measured load of the fullest expert rank. Empty unless measured."""
    balances = [record.experts for record in records if record.experts is not None]
    planned = [kind.experts.imbalance for kind in plan.model.language.kinds if kind.experts]
    if not balances or not planned:
        return []
    expert, rank = np.median(
        [(balance.fullest_expert, balance.fullest_rank) for balance in balances], axis=0
    )
    note = f"tokens over the mean of a step; the fullest expert {number(float(expert))}"
    if plan.parallel.expert > 1:
        note += f"; planned for {number(max(planned))} in every micro-batch"
    value = number(float(rank))
    return [Card(title="Fullest expert rank", value=value, source="measured", note=note)]
