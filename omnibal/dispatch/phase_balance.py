"""Balance of a step's phases: each encoder and the language model, over the ranks that run it.

OrchMLLM (arXiv 2503.23830) calls a phase what one modality's module computes of a batch. Packs can
be equal in one phase only at the cost of another, so each has its own balance: the busiest rank's
load as a multiple of the mean, before and after items are dealt anew, and the least it can be.

Shapes: S steps, D data-parallel ranks (pipelines), R ranks of a pipeline.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from omnibal.dispatch.items import shares_of_ranks
from omnibal.dispatch.load_bounds import load_bound
from omnibal.model.data_parallel_encoders import DataParallelEncoders

ALL_ENCODERS = "encoders"
LANGUAGE_PHASE = "language"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBalance:
    """The busiest rank's load over the mean of all ranks; both are sums over steps."""

    phase: str
    """Name of the encoder, "encoders" for all of them together, or "language"."""
    imbalance_before: float
    """Each pipeline has what its own packs hold."""
    imbalance_after: float | None
    """As the plan deals it; None where each pipeline keeps its own."""
    bound: float
    """No assignment is below, of items in an encoder's phase and of packs in the language model's.
    """


def encoder_balances(
    held: Mapping[str, np.ndarray], ranks_of_pipeline: int, beside: DataParallelEncoders | None
) -> list[PhaseBalance]:
    """Balance of every encoder, and of all together where several are data-parallel.

    Args:
        held: items by encoder that packs of every pipeline hold, int64 [S, D].
        ranks_of_pipeline: R.
        beside: how encoders are data-parallel; None where each pipeline runs its own, and
            balance is that of pipelines.
    """
    if beside is None:
        return [
            PhaseBalance(
                phase=name,
                imbalance_before=_imbalance(items),
                imbalance_after=None,
                bound=_items_bound(items),
            )
            for name, items in held.items()
        ]
    groups = {name: items.reshape(-1, beside.pipelines) for name, items in held.items()}
    dealt = shares_of_ranks(groups, ranks_of_pipeline=ranks_of_pipeline, item_ms=beside.item_ms)
    before = {name: _own_shares(items, ranks_of_pipeline) for name, items in held.items()}
    after = {name: dealt[name].reshape(before[name].shape) for name in held}
    found = [
        PhaseBalance(
            phase=name,
            imbalance_before=_imbalance(before[name]),
            imbalance_after=_imbalance(after[name]),
            bound=_items_bound(before[name]),
        )
        for name in held
    ]
    if len(held) > 1:
        all_before, all_after = (
            sum((beside.item_ms[name] * items[name] for name in held), np.zeros(1))
            for items in (before, after)
        )
        found.append(
            PhaseBalance(
                phase=ALL_ENCODERS,
                imbalance_before=_imbalance(all_before),
                imbalance_after=_imbalance(all_after),
                bound=_together_bound(before, beside.item_ms),
            )
        )
    return found


def language_balance(
    step: np.ndarray, rank: np.ndarray, load_ms: np.ndarray, ranks: int
) -> PhaseBalance:
    """Balance of the language model over data-parallel ranks; the plan deals its packs.

    Args:
        step: of every pack, ascending, [packs].
        rank: data-parallel rank of every pack, [packs].
        load_ms: language model's time of every pack, [packs].
        ranks: D.
    """
    _, first, number = np.unique(step, return_index=True, return_inverse=True)
    loads = np.bincount(number * ranks + rank, load_ms, len(first) * ranks).reshape(-1, ranks)
    least_ms = sum(load_bound(packs, ranks) for packs in np.split(load_ms, first[1:]))
    return PhaseBalance(
        phase=LANGUAGE_PHASE,
        imbalance_before=_imbalance(loads),
        imbalance_after=None,
        bound=_over_mean(least_ms, loads),
    )


def _own_shares(held: np.ndarray, ranks_of_pipeline: int) -> np.ndarray:
    """Items of every rank where each pipeline's ranks share what its packs hold. [S, D * R]"""
    each, more = np.divmod(held[..., None], ranks_of_pipeline)
    shares = each + (np.arange(ranks_of_pipeline) < more)
    return shares.reshape(len(held), -1)


def _imbalance(loads: np.ndarray) -> float:
    """Busiest over mean of loads [S, ranks]; 1 where there is no load."""
    return _over_mean(float(loads.max(axis=1).sum()), loads)


def _items_bound(items: np.ndarray) -> float:
    """Least imbalance of equal items, int64 [S, ranks]."""
    return _over_mean(float((-(-items.sum(axis=1) // items.shape[1])).sum()), items)


def _together_bound(items: Mapping[str, np.ndarray], item_ms: Mapping[str, float]) -> float:
    """Least imbalance of all encoders' items together, each [S, ranks]."""
    loads = sum((item_ms[name] * each for name, each in items.items()), np.zeros(1))
    fewest = [item_ms[name] * -(-each.sum(axis=1) // each.shape[1]) for name, each in items.items()]
    # Some rank has the mean number of every encoder's items, rounded up.
    least_ms = np.maximum(loads.mean(axis=1), np.max(fewest, axis=0))
    return _over_mean(float(least_ms.sum()), loads)


def _over_mean(busiest: float, loads: np.ndarray) -> float:
    mean = float(loads.mean(axis=1).sum())
    # Not below 1 by rounding.
    return max(busiest / mean, 1.0) if mean else 1.0
