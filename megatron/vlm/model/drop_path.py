"""Stochastic depth of the vision tower (Huang et al. 2016, arXiv 1603.09382, as in timm).

As in InternViT, rates rise linearly over the layers from 0, a layer's two branches are drawn
independently, and kept branches are scaled up. A draw depends only on the tile's key, layer and
branch, not on split, packing or recomputation.

Shapes: L layers of a stage, 2 branches, T tiles. Keys are int64, on the host.
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
    """Return each branch's scale: 0, or 1 / (1 - its rate), float32 [L, 2, T].

    Args:
        layers: global numbers of the stage's vision layers, from 0.
        rate: rate of the tower's last layer, in [0, 1).
    """
    numbers_L = np.asarray(layers, np.uint64)
    rates_L = rate * numbers_L / max(total_layers - 1, 1)
    places_L2 = numbers_L[:, None] * _BRANCHES + np.arange(1, _BRANCHES + 1, dtype=np.uint64)
    # SplitMix64's output for each state, as float64 in [0, 1).
    state_L2T = keys_T.numpy().view(np.uint64) + places_L2[:, :, None] * _INCREMENT
    state_L2T = (state_L2T ^ (state_L2T >> np.uint64(30))) * _FIRST_FACTOR
    state_L2T = (state_L2T ^ (state_L2T >> np.uint64(27))) * _SECOND_FACTOR
    state_L2T = state_L2T ^ (state_L2T >> np.uint64(31))
    draws_L2T = (state_L2T >> np.uint64(11)) * 2.0**-53
    rates_L11 = rates_L[:, None, None]
    scales_L2T = np.where(draws_L2T < rates_L11, 0.0, 1 / (1 - rates_L11))
    return torch.from_numpy(scales_L2T.astype(np.float32))
