"""Stochastic depth of the vision tower: in training a tile skips some branches of some layers.

As in InternViT: the rate rises linearly from 0 at the first layer to its full value at the last, a
layer's two branches are drawn apart, and a branch that is kept is scaled up by what others lose
(Huang et al. 2016, arXiv 1603.09382, as in timm). Whether a tile skips a branch follows from its
own random number and the layer's, so no split, packing or recomputation changes it.

Shapes: L layers of a stage, 2 branches, T tiles.
"""

from collections.abc import Sequence

import numpy as np
import torch

_BRANCHES = 2
# Weyl increment and multipliers of SplitMix64 (Steele, Lea and Flood 2014).
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def branch_scales(
    keys_T: torch.Tensor, layers: Sequence[int], total_layers: int, rate: float
) -> torch.Tensor:
    """Scale of every branch's output: 0, or 1 / (1 - its rate). float32 [L, 2, T]

    Args:
        layers: numbers of the stage's vision layers in the whole tower, from 0.
        rate: of the tower's last layer, from 0 to below 1.
    """
    numbers_L = np.asarray(layers, np.uint64)
    rates_L = rate * numbers_L / max(total_layers - 1, 1)
    places_L2 = numbers_L[:, None] * _BRANCHES + np.arange(1, _BRANCHES + 1, dtype=np.uint64)
    draws_L2T = _uniform(keys_T.numpy().view(np.uint64) + places_L2[:, :, None] * _INCREMENT)
    rates_L11 = rates_L[:, None, None]
    scales_L2T = np.where(draws_L2T < rates_L11, 0.0, 1 / (1 - rates_L11))
    return torch.from_numpy(scales_L2T.astype(np.float32))


def _uniform(state: np.ndarray) -> np.ndarray:
    """SplitMix64's output for each state, as float64 in [0, 1)."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST_FACTOR
    state = (state ^ (state >> np.uint64(27))) * _SECOND_FACTOR
    state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)) * 2.0**-53
