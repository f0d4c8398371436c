"""Breakdown of a simulated step: simulate repeatedly, removing one more cause each time.

The differences sum to the step exactly; measured waits do not, since a wait may have many causes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np

from omnibal.cost.model import CostModel, UnitCost
from omnibal.pipeline.prediction import LostTime
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import PerStepCosts, StageTimes, workload_times
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CauseTimes:
    """Micro-batch times with causes of lost time removed one after another."""

    all: StageTimes
    local: StageTimes  # times without context-parallel exchange
    silent: StageTimes  # times without it and without tensor-parallel collectives
    needed: StageTimes  # times without either and without padding of heads and packs

    def rows(self, picked: np.ndarray) -> "CauseTimes":
        """Select micro-batches."""
        return CauseTimes(**{f.name: getattr(self, f.name).rows(picked) for f in fields(self)})


def causes_of(
    cost: CostModel, stages_at: Sequence[Sequence[Stage]], workload: Workload
) -> CauseTimes:
    """Return the workload's micro-batch times, with more causes removed in each field."""

    def without(*causes: str) -> StageTimes:
        units = {kind: _remove_causes(unit, causes) for kind, unit in cost.units.items()}
        without_padding = _PADDING in causes
        return workload_times(
            replace(cost, units=units), stages_at, workload, without_padding=without_padding
        )

    all_ = workload_times(cost, stages_at, workload)
    return CauseTimes(
        all=all_,
        local=without(_CONTEXT) if workload.has_shared else all_,
        silent=without(_CONTEXT, _COLLECTIVE),
        needed=without(_CONTEXT, _COLLECTIVE, _PADDING),
    )


def lost_time_of(
    causes: CauseTimes,
    workload: Workload,
    once: PerStepCosts,
    step_ms: float,
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
) -> LostTime:
    """Return the time lost to each cause, in ms, given the mean step by `predict_steps`; times need
    not be a cost model's."""
    ranks = len(np.unique(workload.step)) * workload.data_parallel_size  # over all steps
    loose_ms = step_ms
    if workload.lockstep_ranks > 1:  # without lockstep and its empty micro-batches
        if workload.encoding is None:  # encoders may wait in empty micro-batches
            causes, workload = causes.rows(~workload.is_empty), workload.rows(~workload.is_empty)
        workload = replace(workload, lockstep_ranks=1)
        loose_ms = float(predict_steps(causes.all, workload, once, schedule).step_ms.mean())
    alone = workload.each_rank_alone()
    update, nothing = once.without_exchange(), once.nothing()
    bare = _without_links(causes.silent)
    times = _without_recompute(_without_links(causes.needed))
    waits = None if workload.encoding is None else workload.encoding.waits
    even, silent, needed = (
        (None, None, None) if waits is None else (waits.even, waits.silent, waits.needed)
    )
    # Equal stages: every micro-batch's time spread evenly.
    shape, computed = times.forward_ms.shape, ("forward_ms", "backward_ms", "weight_ms")
    means = {name: getattr(times, name).mean(axis=1, keepdims=True) for name in computed}
    equal = replace(times, **{name: np.broadcast_to(ms, shape) for name, ms in means.items()})
    # Each simulation removes one more cause: rank imbalance, context-parallel exchange, other
    # communication, weight update, recomputation, padding, stage imbalance.
    steps = (
        (replace(causes.all, waits_ms=even), once),
        (replace(causes.local, waits_ms=even), once),
        (replace(bare, waits_ms=silent), update),
        (replace(bare, waits_ms=silent), nothing),
        (replace(_without_recompute(bare), waits_ms=needed), nothing),
        (replace(times, waits_ms=needed), nothing),
        (replace(equal, waits_ms=needed), nothing),
    )
    left = [loose_ms]  # mean step after each removal
    for of_step, costs in steps:
        simulated_ms = predict_steps(of_step, alone, costs, schedule).step_ms
        # Ranks without packs only exchange and update.
        idle_ms = costs.exchange_ms.max() + costs.update_ms.max()
        idle_ms *= ranks - len(simulated_ms)
        left.append(float(simulated_ms.sum() + idle_ms) / ranks)
    # With few micro-batches unequal stages can be faster than equal stages, and then cost nothing.
    left[-1] = min(left[-2:])
    work_ms = float((times.forward_ms + times.backward_ms).mean(axis=1).sum()) * schedule.chunks
    work_ms += 0.0 if waits is None else float(waits.needed.sum())
    left.append(work_ms / ranks)
    lost = [before - after for before, after in pairwise(left)]
    return LostTime(
        rank_imbalance_ms=lost[0],
        expert_wait_ms=step_ms - loose_ms,
        context_exchange_ms=lost[1],
        communication_ms=lost[2],
        weight_update_ms=lost[3],
        recompute_ms=lost[4],
        padding_ms=lost[5],
        stage_imbalance_ms=lost[6],
        bubble_ms=lost[7],
        ideal_ms=left[-1],
    )


# Cost fields of a unit with one cause each.
_CONTEXT, _COLLECTIVE, _PADDING = "context_ms", "collective_ms", "padding_ms"


def _remove_causes(unit: UnitCost, causes: Sequence[str]) -> UnitCost:
    # Rows are forward, backward and, for context-parallel exchange only, recomputed forward.
    caused_ms = (getattr(unit, c)[[0, 1, 2 if c == _CONTEXT else 0]] for c in causes)
    forward_ms, backward_ms, again_ms = np.sum([*caused_ms], axis=0)
    backward_ms = unit.backward_ms - backward_ms
    return replace(
        unit,
        forward_ms=unit.forward_ms - forward_ms,
        backward_ms=backward_ms,
        weight_ms=np.minimum(unit.weight_ms, backward_ms),
        recompute_ms=np.maximum(unit.recompute_ms - again_ms, 0),
    )


def _without_links(times: StageTimes) -> StageTimes:
    return replace(
        times,
        forward_link_ms=0 * times.forward_link_ms,
        backward_link_ms=0 * times.backward_link_ms,
    )


def _without_recompute(times: StageTimes) -> StageTimes:
    return replace(
        times,
        backward_ms=times.backward_ms - times.recompute_ms,
        recompute_ms=np.zeros_like(times.recompute_ms),
    )
