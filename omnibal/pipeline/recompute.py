"""Sets of layers that a stage may recompute so that it fits: every set that can be the best one.

Layers of one tower cost the same, so a set is two counts, vision and language. For every number of
recomputed vision layers the fewest language layers that fit is found by bisection: recomputing one
more layer never needs more memory, once the first has brought its working memory. Of those pairs,
one that takes at least as long as another on every micro-batch cannot be better. (OmniBal, section
on adaptive re-computation, recomputes from the front of the stage, vision first. Within a tower the
earliest layers are taken, for determinism.)
"""

from dataclasses import dataclass

import numpy as np

from omnibal.pipeline.stage_cost import MemoryTable, fits_cap
from omnibal.pipeline.units import LANGUAGE_LAYER, VISION_LAYER

_CHUNK_ENTRIES = 4_000_000
"""Entries of [stages, sets of micro-batches] at a time: bounds memory to some 100 MB."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recomputes:
    """Sets of recomputed layers; each array has one entry a set, sorted by stage, then vision."""

    stage: np.ndarray
    """Index of the stage among those given."""
    vision: np.ndarray
    """Recomputed vision layers."""
    language: np.ndarray
    """Recomputed language layers."""


def useful_recomputes(
    table: MemoryTable, counts: np.ndarray, extreme_ms: np.ndarray, memory_cap_bytes: float
) -> Recomputes:
    """The sets worth considering in each of many possible stages; stages that never fit have none.

    Args:
        counts: [stages, kinds] units of each stage.
        extreme_ms: [2, 2]; time to recompute a vision and a language layer, on the micro-batches
            where the first is largest and smallest beside the second, of those where either takes
            any time.
    """
    nothing = fits_cap(_peak_bytes(table, counts, np.zeros_like(counts)), memory_cap_bytes)
    without = np.flatnonzero(nothing)
    stage, vision = _with_vision(counts, np.flatnonzero(~nothing))
    language, fits = _fewest_language(table, counts[stage], vision, memory_cap_bytes)
    stage, vision, language = stage[fits], vision[fits], language[fits]
    stage = np.concatenate([without, stage])
    vision = np.concatenate([np.zeros_like(without), vision])
    language = np.concatenate([np.zeros_like(without), language])
    added_ms = np.stack([vision, language], axis=1) @ extreme_ms.T
    kept = _undominated(stage, added_ms)
    kept = kept[np.lexsort((vision[kept], stage[kept]))]
    return Recomputes(stage=stage[kept], vision=vision[kept], language=language[kept])


def least_peak_bytes(table: MemoryTable, counts: np.ndarray) -> np.ndarray:
    """Smallest peak that recomputing can reach in each of many possible stages. [stages]

    All layers of a tower or none: a tower's layers share one working memory.
    """
    peaks = []
    for kinds in ([], [VISION_LAYER], [LANGUAGE_LAYER], [VISION_LAYER, LANGUAGE_LAYER]):
        recomputed = np.zeros_like(counts)
        recomputed[:, kinds] = counts[:, kinds]
        peaks.append(_peak_bytes(table, counts, recomputed))
    return np.minimum.reduce(peaks)


def _peak_bytes(table: MemoryTable, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
    """Peak memory of every stage by `MemoryTable.peak_bytes`, in chunks of stages. [stages]"""
    at_once = max(_CHUNK_ENTRIES // len(table.kept_bytes), 1)
    peaks = np.empty(len(counts))
    for first in range(0, len(counts), at_once):
        chunk = slice(first, first + at_once)
        peaks[chunk] = table.peak_bytes(counts[chunk], recomputed[chunk])
    return peaks


def _with_vision(counts: np.ndarray, stages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of each stage and each number of vision layers that it could recompute."""
    choices = counts[stages, VISION_LAYER] + 1
    first = np.cumsum(choices) - choices
    return np.repeat(stages, choices), np.arange(choices.sum()) - np.repeat(first, choices)


def _fewest_language(
    table: MemoryTable, counts: np.ndarray, vision: np.ndarray, memory_cap_bytes: float
) -> tuple[np.ndarray, np.ndarray]:
    """Fewest recomputed language layers that fit beside `vision`, and whether any do. [stages] each

    Without any is tried first, since only from one layer on does memory fall with the number.
    """
    recomputed = np.zeros_like(counts)
    recomputed[:, VISION_LAYER] = vision

    def fits(rows: np.ndarray, language: np.ndarray) -> np.ndarray:
        recomputed[rows, LANGUAGE_LAYER] = language
        return fits_cap(_peak_bytes(table, counts[rows], recomputed[rows]), memory_cap_bytes)

    layers = counts[:, LANGUAGE_LAYER]
    everyone = np.arange(len(counts))
    fitting = fits(everyone, np.zeros_like(layers))
    rows = everyone[~fitting & (layers > 0)]
    rows = rows[fits(rows, layers[rows])]
    fitting[rows] = True
    low, high = np.ones_like(layers)[rows], layers[rows]
    while (low < high).any():
        middle = (low + high) // 2
        enough = fits(rows, middle)
        low, high = (
            np.where(enough, low, np.minimum(middle + 1, high)),
            np.where(enough, middle, high),
        )
    recomputed[rows, LANGUAGE_LAYER] = high
    return recomputed[:, LANGUAGE_LAYER], fitting


def _undominated(group: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Entries of which no other entry of their group is as small in both costs [entries, 2].

    Of equal entries the first stays.
    """
    order = np.lexsort((costs[:, 1], costs[:, 0], group))
    _, rank = np.unique(costs[order, 1], return_inverse=True)
    # Shifted so that every group lies below the one before it, the running minimum starts anew.
    running = np.minimum.accumulate(rank - group[order] * (len(order) + 1))
    falls = np.append(True, running[1:] < running[:-1])[: len(order)]
    return order[falls]
