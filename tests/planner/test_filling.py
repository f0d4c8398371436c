"""Filling long packs with short samples, only if that takes less device time."""

from collections.abc import Sequence

import pytest
from length_cases import texts

from omnibal.job.filling import worth_filling
from omnibal.job.job import JobSpec
from omnibal.model.config import load_cluster, load_model
from omnibal.model.levels import CutRule, Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.features import part_features
from omnibal.packing.packs import Packs
from omnibal.pipeline.stage_cost import model_ms

pytestmark = pytest.mark.quick

JOB = JobSpec(
    model=load_model("llama3.1-8b"),
    cluster=load_cluster("a100-80g").model_copy(update={"rates": {}}),
    parallel=Parallel(pipeline=1, data=8),
    precision="bf16",
)


def device_ms(tokens: Sequence[int], level: Level) -> float:
    """Return the device time of a pack of these samples, summed over its ranks."""
    (cost,) = JOB.costs_at([level])
    packs = Packs.from_lists([list(range(len(tokens)))])
    parts = part_features(packs, texts(tokens), level, cost.features)
    return float(model_ms(cost, JOB.model, parts).sum())


@pytest.mark.parametrize(
    ("context", "cap", "fills"), [(2, 32, True), (8, 32, True), (2, 2_048, True), (8, 2_048, False)]
)
def test_samples_fill_where_that_takes_less_time(context, cap, fills):
    """Prevents filling shared packs with samples that are cheaper in packs of their own."""
    short = Level(caps=Caps.of(tokens=cap))
    long = Level(caps=Caps.of(tokens=65_536), context=context)
    tokens = [2, cap // 4, cap, 40_000]
    levels = short, long
    worth = worth_filling(JOB.costs_at(levels), JOB.model, texts(tokens), levels)
    rest = [40_000, 20_000]
    for size in tokens[:-1]:
        added = device_ms([*rest, size], long) - device_ms(rest, long)
        count = cap // size
        alone = device_ms([size] * count, short) / count
        assert (added < alone) == fills
        assert worth[1, tokens.index(size)] == fills


def test_samples_that_stay_whole_fill_for_nothing():
    """Prevents charging exchange for samples that a shared pack keeps on one rank."""
    short = Level(caps=Caps.of(tokens=3_000))
    long = Level(caps=Caps.of(tokens=65_536), context=8, cut=CutRule.WHOLE)
    levels, lengths = (short, long), texts([16, 2_048, 2_049, 60_000])
    worth = worth_filling(JOB.costs_at(levels), JOB.model, lengths, levels)
    assert worth[1, :-1].tolist() == [True, True, False]
