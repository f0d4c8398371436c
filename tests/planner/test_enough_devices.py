"""What would fit where no sizes on some devices do: what is named is planned, as named."""

import functools
import re
from dataclasses import replace

import pytest
from plan_cases import example_lengths

from omnibal import Free, Goal, Samples, plan, training_job
from omnibal.base.errors import UserError
from omnibal.job.job import JobSpec
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.search.goal import ShapesAlone
from omnibal.search.level_estimates import LevelRule
from omnibal.search.strategy import FreeSizes

CAPS = Caps.of(tiles=8, tokens=512)
SHAPES = ShapesAlone(caps=CAPS)
REPLICATED = (WeightSharding.REPLICATED,)
ALL = tuple(WeightSharding)


def job_of(gib: float) -> JobSpec:
    job = training_job("internvl-digits", "laptop-cpu")
    return replace(job, cluster=job.cluster.model_copy(update={"memory_gib": gib}))


def goal_of(gib: float, gpus: int, *, shardings=ALL, data=SHAPES, **sizes) -> Goal:
    free = Free(sizes=FreeSizes(gpus=gpus, **sizes), shardings=shardings)
    return Goal(job=job_of(gib), data=data, free=free)


def fits(goal: Goal) -> bool:
    try:
        plan(goal)
    except UserError:
        return False
    return True


def told(goal: Goal) -> str:
    with pytest.raises(UserError, match="what would fit: ") as error:
        plan(goal)
    assert "\n" not in str(error.value)
    return str(error.value).partition("what would fit: ")[2]


def least_gib(goal: Goal) -> float:
    """GiB of a device with which a goal is planned, by trying."""
    low, high = 0.0, 0.04
    while not fits(with_memory(goal, high)):
        low, high = high, 2 * high
    while high - low > 0.03 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(with_memory(goal, middle)) else (middle, high)
    return high


def with_memory(goal: Goal, gib: float) -> Goal:
    cluster = goal.job.cluster.model_copy(update={"memory_gib": gib})
    return replace(goal, job=replace(goal.job, cluster=cluster))


@functools.cache
def enough_for_four_ranks() -> float:
    """GiB with which four data-parallel ranks fit if they divide weights, and no other way."""
    return 1.1 * least_gib(goal_of(1.0, 4, tensor=1, pipeline=1))


@pytest.mark.parametrize("data", [SHAPES, Samples(lengths=example_lengths(count=100), caps=CAPS)])
def test_as_many_devices_as_are_named_are_planned(data):
    """Prevents: advice to use more devices that does not say how many, or says too few."""
    enough_for_four = least_gib(goal_of(1.0, 4, data=data))
    advice = told(goal_of(enough_for_four, 1, data=data))
    [gpus] = map(int, re.findall(r"--gpus (\d+) instead of 1, as in --tp ", advice))
    assert fits(goal_of(enough_for_four, gpus, data=data))
    for fewer in range(2, gpus):
        if goal_of(1.0, fewer).job.cluster.gpus_per_node <= fewer:
            assert not fits(goal_of(enough_for_four, fewer, data=data))


def test_what_was_given_is_named_where_it_stands_in_the_way():
    """Prevents: more devices advised where weights that ranks divide would fit, or free sizes."""
    given = {"tensor": 1, "pipeline": 1}
    gib = enough_for_four_ranks()
    advice = told(goal_of(gib, 4, shardings=REPLICATED, **given))
    assert "--sharding auto instead of replicated, as in --tp 1 --pp 1 --dp 4 --sharding" in advice
    [named] = re.findall(r"no (--\w\w) 1, as in", advice) or [None]
    for option, left in {"--tp": {"pipeline": 1}, "--pp": {"tensor": 1}}.items():
        if named in (option, None):
            assert fits(goal_of(gib, 4, shardings=REPLICATED, **left)) == (named == option)


def test_smaller_caps_are_named():
    """Prevents: "smaller caps" that nobody has tried."""
    data = ShapesAlone(caps=Caps.of(tiles=32, tokens=8192))
    gib = least_gib(goal_of(1.0, 2, data=ShapesAlone(caps=Caps.of(tiles=16, tokens=4096))))
    [(tokens, tiles)] = re.findall(
        r"--max-tokens (\d+) --max-tiles (\d+) instead of", told(goal_of(gib, 2, data=data))
    )
    caps = Caps.of(tiles=int(tiles), tokens=int(tokens))
    assert fits(goal_of(gib, 2, data=ShapesAlone(caps=caps)))


@pytest.mark.parametrize("levels", [LevelRule(count=1), LevelRule()])
def test_given_sizes_with_samples_are_told_of_sharding(levels):
    """Prevents: a search of levels that ends with general advice, or names stages alone."""
    gib = enough_for_four_ranks()
    job = job_of(gib).sized(Parallel(pipeline=1, data=4))
    data = Samples(lengths=example_lengths(), caps=CAPS)
    goal = Goal(job=job, data=data, free=Free(levels=levels, shardings=REPLICATED))
    assert "--sharding full instead of replicated (needs " in told(goal)
    assert fits(replace(goal, free=replace(goal.free, shardings=(WeightSharding.FULL,))))


def test_reasons_of_what_was_not_chosen_are_no_advice():
    """Prevents: a plan whose table of other ways says what would fit in its place."""
    gib = enough_for_four_ranks()
    job = job_of(gib).sized(Parallel(pipeline=1, data=4))
    free = Free(shardings=ALL, placements=(EncoderPlacement.PIPELINE,))
    planned = plan(Goal(job=job, data=SHAPES, free=free))
    assert planned.sharding.chosen is WeightSharding.FULL
    assert "memory cap" in planned.sharding.reason
    assert "what would fit" not in planned.sharding.reason
