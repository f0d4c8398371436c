"""Balance of a step's phases: each encoder and the language model, over the ranks that run it.

A phase is one modality's computation of a batch (OrchMLLM, arXiv 2503.23830). Its imbalance is
`max load / mean load` of ranks, before and after dispatch, with a lower bound.

Shapes: S steps, D data-parallel ranks (pipelines), R ranks of a pipeline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.packing.balance import load_bound
from omnibal.packing.balance_metrics import imbalance, over_mean
from omnibal.packing.items import NO_LOAD, shares_of_ranks, unit_of_time
from omnibal.packing.whole_samples import SampleItems

ALL_ENCODERS = "encoders"
LANGUAGE_PHASE = "language"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBalance:
    """Imbalances of a phase: max over mean load of ranks, both summed over steps."""

    phase: str  # name of the encoder, "encoders" for all together, or "language"
    imbalance_before: float  # if each pipeline runs its own packs
    imbalance_after: float | None  # As planned. None if that is each pipeline's own packs.
    bound: float  # min imbalance of any assignment of items (encoders) or packs (language model)


def encoder_balances(
    held: Mapping[str, np.ndarray],
    ranks_of_pipeline: int,
    dp_encoders: DataParallelEncoders | None,
    whole: Mapping[str, SampleItems],
    pipeline: np.ndarray,
) -> list[PhaseBalance]:
    """Return the balance of every encoder, and of all together if several are data-parallel.

    Args:
        held: items by encoder of every pipeline's packs, int64 [S, D].
        dp_encoders: data-parallel encoders, None if every pipeline runs its own.
        whole: samples of encoders that take whole samples, balanced by time.
        pipeline: of every row of `whole` among all steps' pipelines, step x D + rank, int64.
    """
    if dp_encoders is None:
        return [
            _balance(name, items, None, float(_mean_items(items).sum()))
            for name, items in held.items()
        ]
    # Loads [S, D * R] are in items, or in units of time for whole samples.
    before, after, bounds = _rank_loads(held, ranks_of_pipeline, dp_encoders, whole, pipeline)
    balances = [_balance(n, before[n], after[n], float(bounds[n].sum())) for n in held]
    if len(held) > 1:
        unit_ms = unit_of_time(dp_encoders.item_ms, dp_encoders.square_ms)
        ms = {name: unit_ms if name in whole else dp_encoders.item_ms[name] for name in held}
        before_ms, after_ms = (
            sum((ms[name] * load for name, load in loads.items()), np.zeros(1))
            for loads in (before, after)
        )
        # The busiest rank takes at least the mean, and at least the bound of any encoder.
        bound_ms = np.max([ms[name] * load for name, load in bounds.items()], axis=0)
        bound_ms = np.maximum(before_ms.mean(axis=1), bound_ms)
        balances.append(_balance(ALL_ENCODERS, before_ms, after_ms, float(bound_ms.sum())))
    return balances


def _rank_loads(
    held: Mapping[str, np.ndarray],
    ranks_of_pipeline: int,
    dp_encoders: DataParallelEncoders,
    whole: Mapping[str, SampleItems],
    pipeline: np.ndarray,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return ranks' loads by encoder before and after dispatch, [S, D * R], and bounds, [S]."""
    unit_ms = unit_of_time(dp_encoders.item_ms, dp_encoders.square_ms)
    before, after, bounds = dict[str, np.ndarray](), dict[str, np.ndarray](), {}
    load, by_group = NO_LOAD, (-1, dp_encoders.pipelines * ranks_of_pipeline)
    for name, samples in whole.items():
        shape = len(held[name]), held[name].shape[1] * ranks_of_pipeline
        for loads, pipelines in ((before, 1), (after, dp_encoders.pipelines)):
            sizes = {"pipelines": pipelines, "ranks_of_pipeline": ranks_of_pipeline}
            dealt = samples.deal(pipeline, dp_encoders, name, **sizes)
            loads[name] = dealt.of_ranks(dealt.weight, shape[0] * shape[1]).reshape(shape)
        load = load + after[name].reshape(by_group)
        steps = np.split(dealt.weight, np.searchsorted(dealt.rank // shape[1], range(1, shape[0])))
        bounds[name] = np.array([load_bound(weights, shape[1]) for weights in steps])
    equal = {name: items for name, items in held.items() if name not in whole}
    share = partial(shares_of_ranks, ranks_of_pipeline=ranks_of_pipeline)
    alone = share(
        {name: items.reshape(-1, 1) for name, items in equal.items()},
        # Without times, encoders are shared independently.
        item_ms=dict.fromkeys(equal, 0.0),
    )
    dispatched = share(
        {name: items.reshape(-1, dp_encoders.pipelines) for name, items in equal.items()},
        item_ms=dp_encoders.item_ms,
        load=load,
        unit_ms=unit_ms,
    )
    for name, items in equal.items():
        before[name], after[name] = (
            shares[name].reshape(len(items), -1) for shares in (alone, dispatched)
        )
        bounds[name] = _mean_items(before[name])
    return before, after, bounds


def language_balance(
    step: np.ndarray, rank: np.ndarray, load_ms: np.ndarray, ranks: int
) -> PhaseBalance:
    """Return the language model's balance over D `ranks`, from [packs] with ascending steps."""
    _, first, number = np.unique(step, return_index=True, return_inverse=True)
    loads = np.bincount(number * ranks + rank, load_ms, len(first) * ranks).reshape(-1, ranks)
    bound_ms = sum(load_bound(packs, ranks) for packs in np.split(load_ms, first[1:]))
    return _balance(LANGUAGE_PHASE, loads, None, bound_ms)


def _balance(
    phase: str, before: np.ndarray, after: np.ndarray | None, bound: float
) -> PhaseBalance:
    """Return the balance of loads [S, ranks], with a lower bound summed over steps."""
    return PhaseBalance(
        phase=phase,
        imbalance_before=imbalance(before),
        imbalance_after=None if after is None else imbalance(after),
        bound=over_mean(bound, before),
    )


def _mean_items(items: np.ndarray) -> np.ndarray:
    """Return the mean items per rank, rounded up, [S]: a lower bound, for items [S, ranks]."""
    return np.negative(-items.sum(axis=1) // items.shape[1])
