"""Planning: a goal in; the best plan that is found, the alternatives and what is proven out.

    from omnibal import Goal, plan
    planned = plan(Goal(job=job, data=Samples(lengths=lengths), free=Free.everything(gpus=64)))

Where sizes are free, they are searched for together with caps, levels and the placement of encoders
(`omnibal.search.parallel_sizes`, `omnibal.search.sizes_with_levels`); with given sizes, levels
(`omnibal.search.levels`) or caps (`omnibal.search.caps`) are, and of several placements of encoders
the faster plan is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from omnibal.beside import EncoderPlacement
from omnibal.config import ModelConfig
from omnibal.data.lengths import Lengths
from omnibal.data.scan_pool import usable_cores
from omnibal.errors import DoesNotFit, UserError
from omnibal.goal import (
    DEFAULT_MICRO_BATCHES,
    Earlier,
    Free,
    Goal,
    Listener,
    Samples,
    ShapesAlone,
    Stream,
)
from omnibal.job import JobSpec
from omnibal.levels import FillRule, Level
from omnibal.limits import Caps
from omnibal.parallel import Parallel
from omnibal.pipeline.prediction import Prediction
from omnibal.plan_data import MockData, PlanData, SampleData, StreamData, limited_features
from omnibal.planner import PlanRequest, PlanResult, make_plan
from omnibal.search import caps as cap_search
from omnibal.search import levels as level_search
from omnibal.search import sizes_with_levels
from omnibal.search.encoder_placement import PlacementChoice, fastest, neither
from omnibal.search.feasible import does_not_fit_message, find_changes
from omnibal.search.level_estimates import top_caps
from omnibal.search.level_trial import as_data_has, levels_in_use
from omnibal.search.parallel_sizes import (
    StrategySearch,
    progress_total,
    search_strategies,
    strategy_samples_per_step,
    without_best,
)
from omnibal.search.strategy import FreeSizes, Strategy, StrategyRequest
from omnibal.targets import ANY_PACKS, TARGETS, PackRules, Target

SEARCH_SAMPLES = 20_000
"""Samples drawn to try caps and sizes on: a search takes about as long for any more."""
IMAGE_TOKENS = 1_024
"""Tokens of an image at its native resolution in packs of shapes: 1,024 x 1,024 pixels where a
token is of 32 x 32, as in Qwen3-VL."""
_ROOM_OF_CAPS = 1.25
"""Tokens of the smallest packs that are compared, of the longest sample's, at most."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """The plan for a goal, what it was chosen from, and what is proven of it."""

    result: PlanResult
    placement: PlacementChoice
    """The placement of encoders, and what is predicted of the other one."""
    strategies: StrategySearch | None = None
    """Parallel sizes that were compared, with the reason why each is slower; None where they were
    given."""

    @property
    def prediction(self) -> Prediction:
        """What is predicted of the plan."""
        assert self.result.plan.prediction is not None
        return self.result.plan.prediction

    @property
    def gap(self) -> float:
        """Share by which a plan may be faster that was not found, by what is proven."""
        searched = 0.0 if self.result.search is None else self.result.search.gap
        return max(searched, 0.0 if self.strategies is None else self.strategies.gap)


def plan(goal: Goal, listener: Listener | None = None) -> Planned:
    """Find the best plan for a goal. Equal goals give equal plans.

    Args:
        listener: told of notes and progress; None to stay silent.

    Raises:
        UserError: nothing that is asked for can be planned, with what would fit where memory is
            short.
    """
    search = _Planning(goal=goal, listener=listener or Listener())
    if goal.free.sizes is not None:
        return search.with_free_sizes(goal.free.sizes)
    return search.with_given_sizes()


def without_trainer(goal: Goal, planned: PlanResult) -> Goal:
    """The goal of a plan for another trainer without that trainer's limits, to compare with.

    A trainer that divides weights over all ranks has no other sizes; without that limit any sizes
    on as many devices are searched for, at as many samples per step.
    """
    job = replace(goal.job, **_UNLIMITED)
    target = _target(goal.job)
    assert target is not None
    if not target.has_data_parallelism_alone or goal.free.sizes is not None:
        return replace(goal, job=job)
    from omnibal.search.limits import samples_per_step

    free = replace(goal.free, sizes=FreeSizes(gpus=planned.plan.parallel.world_size))
    data = goal.data
    if isinstance(data, Samples):
        data = replace(data, micro_batches=None, samples_per_step=samples_per_step(planned))
    elif isinstance(data, ShapesAlone):
        data = replace(data, micro_batches=None, packs_per_step=samples_per_step(planned))
    smallest = Parallel(pipeline=1, tensor=1 if job.profile is None else job.profile.tensor)
    return Goal(job=job.sized(smallest), data=data, free=free)
