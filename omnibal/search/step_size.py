"""Samples per step: the default, and predicted rates of other step sizes.

Published fine-tuning recipes of InternVL, LLaVA and Qwen-VL train 128 samples per step on 8 to 32
GPUs, and 256 to 512 on more.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.levels import are_plain
from omnibal.model.limits import SEARCH_SAMPLES, Caps
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD
from omnibal.search.bounded import BoundedTrials
from omnibal.search.caps import cap_space
from omnibal.search.strategy import Choice, Setting, StrategyRequest
from omnibal.search.strategy_search import StrategySearch, search_strategies

_RECIPE_STEPS = ((32, 128), (128, 256))
"""Max number of GPUs, and samples per step of recipes for it."""
_MOST_SAMPLES = 512  # samples per step of recipes for more GPUs
MIN_MICRO_BATCHES = 4  # micro-batches per rank and step below which the default step is doubled
_CAP_HEADROOM = 1.25  # assumed max tokens of packs without caps, over those of the longest sample
_STEP_FACTORS = (0.5, 2, 4)  # step sizes to compare, relative to the plan's
COMPARED_SIZES = len(_STEP_FACTORS)
_COMPARED_SAMPLES = SEARCH_SAMPLES // 4
_COMPARED, _COMPARED_SHORT, _PLANNED = 2, 12, 2
"""Max layouts to compare (ranked and near-best, each; short of packs), and choices to plan."""
_LARGER = 2**0.5  # factor on the best caps that larger steps may fill
_COMPARED_SLACK = 1.3
"""Max ratio of the estimated time to the best for sizes to be compared at other steps."""
_MIN_REMARKED_GAIN = 1.1  # min gain of another step size for a remark
_OFF, _UNEVEN = 0.05, 0.15
"""Relative differences of the mean, and of nine of ten steps, above which to warn."""


@dataclass(frozen=True, slots=True, order=True)
class StepRate:
    """Predicted rate of the fastest parallel sizes at a number of samples per step."""

    samples_per_step: int
    samples_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """Samples and tokens of a plan's steps."""

    samples: float  # mean samples per step
    low: int  # 5 % quantile of the samples of a step
    high: int  # 95 % quantile
    tokens: float  # mean tokens per step

    @classmethod
    def count(cls, packs: ScheduledPacks) -> Self:
        samples = np.bincount(packs.step, weights=np.diff(packs.packs.offsets))
        # 5 % of steps are below `low`, 5 % above `high`: nine of ten are between.
        low, high = np.quantile(samples, [0.05, 0.95], method="nearest").astype(int).tolist()
        return cls(
            samples=float(samples.mean()),
            low=low,
            high=high,
            tokens=float(packs.tokens.sum(dtype=np.int64)) / packs.steps,
        )

    def note(self, asked: int) -> str | None:
        """Return a warning if steps differ from the samples asked for. None if they do not."""
        is_even = asked * (1 - _UNEVEN) <= self.low and self.high <= asked * (1 + _UNEVEN)
        if is_even and abs(self.samples / asked - 1) <= _OFF:
            return None
        return (
            f"steps have {self.samples:,.0f} samples in the mean, {self.low:,} to {self.high:,} "
            f"in nine of ten, where {asked:,} were asked for: every rank runs whole packs; lower "
            "--max-tokens, or more --samples-per-step, bring them closer"
        )


def recipe_samples(gpus: int) -> int:
    """Return the samples per step of published recipes on this number of GPUs."""
    return next((samples for most, samples in _RECIPE_STEPS if gpus <= most), _MOST_SAMPLES)


def default_samples_per_step(
    lengths: Lengths, caps: Caps | None, gpus: int, data_parallel: int
) -> int:
    """Return the recipes' samples per step, doubled until ranks have `MIN_MICRO_BATCHES`.

    Without caps, packs are assumed to hold `_CAP_HEADROOM` times the longest sample.
    """
    tokens, samples = lengths.tokens, recipe_samples(gpus)
    # The longest sample must fit.
    pack_tokens = _CAP_HEADROOM * float(tokens.max()) if caps is None else caps["tokens"]
    return _double_to_fill(samples, samples * float(tokens.mean()) / (pack_tokens * data_parallel))


def default_source(samples_per_step: int, gpus: int) -> str:
    """Return the reason for a default number of samples per step, as a clause."""
    if samples_per_step > recipe_samples(gpus):
        return f"as fewer give ranks less than {MIN_MICRO_BATCHES} micro-batches"
    return f"as published recipes on {gpus:,} GPUs"


def with_enough_samples(request: StrategyRequest, processes: int) -> StrategyRequest:
    """Return the request with its step doubled until the fastest layout has `MIN_MICRO_BATCHES`.

    All layouts are compared on a part of the samples at the first step, and `_near_choices` at
    larger steps.
    """
    some = replace(request, samples=_COMPARED_SAMPLES)
    found = search_strategies(some, lambda done: None, processes, is_quick=True)
    best, samples = found.best, request.samples_per_step
    while best.micro_batches < MIN_MICRO_BATCHES and samples < len(request.lengths):
        samples = _double_to_fill(samples, best.micro_batches)
        setting = Setting(request=replace(some, samples_per_step=samples).draw_samples(), packs={})
        trials = _compare_near(setting, samples, _near_choices(setting, found), processes)
        if not trials.planned:
            break
        best = trials.rank_strategies()[0]
    return replace(request, samples_per_step=samples)


def _double_to_fill(samples: int, micro_batches: float) -> int:
    """Return the samples doubled until `micro_batches` per rank would be `MIN_MICRO_BATCHES`."""
    return samples * 2 ** max(math.ceil(math.log2(MIN_MICRO_BATCHES / micro_batches)), 0)


def step_rates(
    request: StrategyRequest, found: StrategySearch, on_progress: Callable[[int], None]
) -> list[StepRate]:
    """Return the rates at half to four times the samples per step, on a part of the samples.

    Only layouts that are near the best, or had too few packs, are compared, with one level of the
    best layout's caps or larger caps. Steps above the number of samples are left out.
    """
    best = found.best
    own, is_plain = found.samples_per_step, are_plain(best.levels)
    rates = [StepRate(own, best.samples_per_second)] if is_plain else []
    sizes = [round(factor * own) for factor in _STEP_FACTORS] + ([] if is_plain else [own])
    sizes = [size for size in sizes if size <= len(request.lengths)]
    drawn = replace(
        request,
        samples=_COMPARED_SAMPLES,
        samples_per_step=max(sizes, default=1),
        # Schedules that lost at this step seldom win at another, and planning them takes long.
        schedules=request.schedules & {ONE_FORWARD_ONE_BACKWARD.name, best.schedule.chosen.name},
    )
    setting = Setting(request=drawn.draw_samples(), packs={})
    choices = _near_choices(setting, found)
    for size in sizes:
        trials = _compare_near(setting, size, choices, processes=1)
        if trials.planned:
            rates.append(StepRate(size, trials.rank_strategies()[0].samples_per_second))
        on_progress(1)
    return sorted(rates)


def _near_choices(setting: Setting, found: StrategySearch) -> list[Choice]:
    """Return near-best layouts and layouts short of packs, each at the best and larger caps."""
    layouts = [strategy.sizing for strategy in found.ranking]
    slowest = found.best.samples_per_second / _COMPARED_SLACK
    near = [other.sizing for other in found.ruled_out if other.fastest >= slowest]
    # Without a bound or a need of memory, a layout had too few packs, which larger steps have.
    short = [o.sizing for o in found.ruled_out if not o.fastest and o.need_gib is None]
    short.sort(key=lambda sizing: sizing.parallel.data)  # the first to have enough
    compared = [*layouts[:_COMPARED], *near[:_COMPARED], *short[:_COMPARED_SHORT]]
    all_caps = [found.best.caps]
    if setting.request.caps is None:
        all_caps.append(cap_space(setting.request).moves(found.best.caps, _LARGER)[-1])
    return list(product(compared, dict.fromkeys(all_caps)))


def _compare_near(
    setting: Setting, samples_per_step: int, choices: Sequence[Choice], processes: int
) -> BoundedTrials:
    """Return trials of some choices at this number of samples per step, the best planned."""
    request = replace(setting.request, samples_per_step=samples_per_step)
    sized = replace(setting, request=request)
    trials = BoundedTrials(setting=sized, processes=processes, advance=lambda done: None)
    trials.run(choices, _PLANNED)
    return trials


def remark(rates: Sequence[StepRate], samples_per_step: int) -> str | None:
    """Return a remark on the smallest step size with a clearly higher rate, or None."""
    (own,) = (rate for rate in rates if rate.samples_per_step == samples_per_step)
    least = _MIN_REMARKED_GAIN * own.samples_per_second
    better = next((rate for rate in rates if rate.samples_per_second >= least), None)
    if better is None:
        return None
    gain = better.samples_per_second / own.samples_per_second
    return (
        f"--samples-per-step {better.samples_per_step} would train {gain - 1:.0%} more samples per "
        f"second than {samples_per_step} (simulated)"
    )
