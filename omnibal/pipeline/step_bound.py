"""A lower bound on the step time of every split, for a fraction of what the search takes.

A step takes at least as long as any path through what must run in order. For every possible stage
the longest of a few such paths is known without knowing the other stages' limits, as what runs
before and after it is the same however it is split. The bound is then the split whose longest path
is shortest, by dynamic programming over positions. Neither memory nor recomputation nor links are
in it: they only add to a step.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.config import ModelConfig
from omnibal.cost.model import CostModel
from omnibal.pipeline.stage_cost import model_ms
from omnibal.pipeline.units import LANGUAGE_LAYER, UNITS, VISION_LAYER, unit_sequence
from omnibal.pipeline.workload import Workload


def least_step_ms(
    cost: CostModel, model: ModelConfig, workload: Workload, pipeline_size: int
) -> float:
    """No split and recomputed layers have a mean step, as `simulate_run` gives it, below this.

    Args:
        pipeline_size: stages; at most as many as the model has layers.
    """
    kinds = np.array([UNITS.index(unit) for unit in unit_sequence(model)])
    before = _Before.of(cost, kinds)
    heaviest = _heaviest_ranks(model_ms(cost, model, workload.features), workload)
    is_layer = np.isin(kinds, (VISION_LAYER, LANGUAGE_LAYER))
    layers_before = np.concatenate([[0], np.cumsum(is_layer)])
    has_layer = layers_before > layers_before[:, None]
    reached = np.where(np.arange(len(kinds) + 1) == 0, 0.0, np.inf)
    for stage in range(pipeline_size):
        ways = _ways_through(heaviest, pipeline_size - 1 - stage)
        length = np.where(has_layer, before.longest(heaviest, ways), np.inf)
        reached = np.maximum(reached[:, None], length).min(axis=0)
    return float(reached[-1]) + cost.optimizer_ms_fixed


def _heaviest_ranks(load_ms: np.ndarray, workload: Workload) -> list[np.ndarray]:
    """Features [m, 5] of one rank of every step, that with the most to do."""
    row = workload.step * workload.data_parallel_size + workload.dp_rank
    _, first, row_index = np.unique(row, return_index=True, return_inverse=True)
    row_ms = np.bincount(row_index, weights=load_ms)
    packs = np.split(workload.features, first[1:])
    step = workload.step[first]
    order = np.lexsort((-row_ms, step))
    return [packs[order[i]] for i in np.unique(step[order], return_index=True)[1]]


def _ways_through(steps: list[np.ndarray], later_stages: int) -> np.ndarray:
    """Features of what runs on a path through a stage, mean over steps. [ways, 3, 5]

    Its own forwards, its own backwards, and forward and backward of all stages after it. A path may
    leave the stage for the first micro-batch's round trip in place of the forwards that warm it up,
    and for the last one's in place of the backwards after its last forward.
    """
    ways = []
    for features in steps:
        ahead = min(later_stages, len(features) - 1)
        everything = features.sum(axis=0)
        warm_up = features[1 : ahead + 1].sum(axis=0)
        closing = features[len(features) - 1 - ahead : -1].sum(axis=0)
        nothing = np.zeros_like(everything)
        opened = (everything - warm_up, everything, features[0])
        closed = (everything, everything - closing, features[-1])
        # With both detours, the first backward must come before the last forward.
        both = (everything - warm_up, everything - closing, features[0] + features[-1])
        on_time = len(features) - 1 > ahead
        ways.append(
            ((everything, everything, nothing), opened, closed, both if on_time else opened)
        )
    return np.mean(ways, axis=0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Before:
    """What the units before each position take."""

    forward_ms: np.ndarray
    """[units + 1, 5], as is the next."""
    backward_ms: np.ndarray
    reduction_ms: np.ndarray
    """[units + 1], as is the next; once a step."""
    update_ms: np.ndarray

    @classmethod
    def of(cls, cost: CostModel, kinds: np.ndarray) -> "_Before":
        units = [cost.units[unit] for unit in UNITS]

        def summed(per_kind: np.ndarray) -> np.ndarray:
            return np.concatenate([np.zeros_like(per_kind[:1]), per_kind[kinds].cumsum(axis=0)])

        trained = summed(np.array([unit.trained_parameters for unit in units], np.float64))
        return cls(
            forward_ms=summed(np.stack([unit.forward_ms for unit in units])),
            backward_ms=summed(np.stack([unit.backward_ms for unit in units])),
            reduction_ms=cost.gradient_reduction_ms_per_parameter * trained,
            update_ms=cost.optimizer_ms_per_parameter * trained,
        )

    def longest(self, steps: list[np.ndarray], ways: np.ndarray) -> np.ndarray:
        """Longest path through a stage from each position to each. [units + 1, units + 1]

        A path ends with the stage's reduction, or with the last backward of all stages before it.
        """
        opening = np.mean([features[0] for features in steps], axis=0)
        closing = np.mean([features[-1] for features in steps], axis=0)
        lengths = []
        for forwards, backwards, later in ways:
            # Each is a sum of what depends on the start and what depends on the end.
            start = self.forward_ms @ (opening - forwards) - self.backward_ms @ backwards
            end = self.forward_ms @ forwards + self.backward_ms @ backwards
            end += (self.forward_ms[-1] - self.forward_ms) @ later
            end += (self.backward_ms[-1] - self.backward_ms) @ later
            lengths += [
                (start - self.reduction_ms)[:, None] + end + self.reduction_ms,
                (start + self.backward_ms @ closing)[:, None] + end,
            ]
        return np.max(lengths, axis=0) + self.update_ms - self.update_ms[:, None]
