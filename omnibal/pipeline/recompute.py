"""Which layers a stage recomputes so that it fits: the exact cheapest set.

Layers of one tower cost the same, so a set is two counts, vision and language. For every number of
recomputed vision layers the fewest language layers that fit is found by bisection: recomputing one
more layer never needs more memory, once the first has brought its working memory. (OmniBal, section
on adaptive re-computation, recomputes from the front of the stage, vision first; here the cheaper
tower is chosen. Within a tower the earliest layers are taken, for determinism.)
"""

import numpy as np

from omnibal.pipeline.stage_cost import MemoryTable
from omnibal.pipeline.units import LANGUAGE_LAYER, VISION_LAYER


def cheapest_recompute(
    table: MemoryTable, counts: np.ndarray, forward_ms: np.ndarray, memory_cap_bytes: float
) -> tuple[np.ndarray, np.ndarray]:
    """The layers to recompute in each of many possible stages, all held to one cap.

    Args:
        counts: [stages, kinds] units of each stage.
        forward_ms: [kinds]; what recomputing one unit costs.

    Returns:
        Recomputed counts [stages, kinds] and their time in ms [stages], which is infinite where
        the stage does not fit whatever it recomputes.
    """
    best = np.zeros_like(counts)
    best_ms = np.full(len(counts), np.inf)
    for vision in range(int(counts[:, VISION_LAYER].max(initial=0)) + 1):
        vision_ms = vision * forward_ms[VISION_LAYER]
        rows = np.flatnonzero((counts[:, VISION_LAYER] >= vision) & (best_ms > vision_ms))
        recomputed = np.zeros((len(rows), counts.shape[1]), counts.dtype)
        recomputed[:, VISION_LAYER] = vision
        fits = _add_fewest_language(table, counts[rows], recomputed, memory_cap_bytes)
        added_ms = vision_ms + recomputed[:, LANGUAGE_LAYER] * forward_ms[LANGUAGE_LAYER]
        better = fits & (added_ms < best_ms[rows])
        best[rows[better]] = recomputed[better]
        best_ms[rows[better]] = added_ms[better]
    return best, best_ms


def least_peak_bytes(table: MemoryTable, counts: np.ndarray) -> np.ndarray:
    """Smallest peak that recomputing can reach in each of many possible stages. [stages]

    All layers of a tower or none: a tower's layers share one working memory.
    """
    peaks = []
    for kinds in ([], [VISION_LAYER], [LANGUAGE_LAYER], [VISION_LAYER, LANGUAGE_LAYER]):
        recomputed = np.zeros_like(counts)
        recomputed[:, kinds] = counts[:, kinds]
        peaks.append(table.peak_bytes(counts, recomputed))
    return np.minimum.reduce(peaks)


def _add_fewest_language(
    table: MemoryTable, counts: np.ndarray, recomputed: np.ndarray, memory_cap_bytes: float
) -> np.ndarray:
    """Set `recomputed`'s language layers to the fewest that fit; whether each stage fits. [stages]

    Without any is tried first, since only from one layer on does memory fall with the number.
    """

    def fits(rows: np.ndarray, language: np.ndarray) -> np.ndarray:
        recomputed[rows, LANGUAGE_LAYER] = language
        return table.peak_bytes(counts[rows], recomputed[rows]) <= memory_cap_bytes

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
    return fitting
