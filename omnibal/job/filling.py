"""Samples worth adding to long packs: less device time there than in a pack of their own.

HBP fills long packs with any sample that fits (arXiv 2503.07680, section 4, GreedyFill). In a
shared pack a divided sample is exchanged in every layer; in a pack of its own level it takes its
share of the pack's fixed cost.
"""

from collections.abc import Sequence

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.data.lengths import Lengths
from omnibal.model.config import ModelConfig
from omnibal.model.levels import CutRule, Level
from omnibal.model.units import EXCHANGED
from omnibal.packing.by_level import levels_of_samples
from omnibal.packing.cut import SHORT_SHARE
from omnibal.pipeline.stage_cost import model_ms


def worth_filling(
    costs: Sequence[CostModel], model: ModelConfig, lengths: Lengths, levels: Sequence[Level]
) -> np.ndarray:
    """Return whether each sample takes less device time in free space of a level than in its own
    pack, given the `costs` of every level. bool [levels, samples]"""
    # Tokens and items cost the same in both. Recomputation, unknown before packing, is ignored.
    own_level, sample = levels_of_samples(lengths, levels), np.arange(len(lengths))
    exchange_ms = np.stack(
        [
            _ms_of(cost, model, EXCHANGED) * is_divided(lengths.tokens, level) * lengths.tokens
            for cost, level in zip(costs, levels, strict=True)
        ]
    )
    pack_ms = [
        level.context * _ms_of(cost, model, "fixed")
        for cost, level in zip(costs, levels, strict=True)
    ]
    # A sample's share of its own pack is the max over caps: [levels, samples].
    sizes = lengths.sizes(levels[0].caps.names)
    shares = np.stack([(sizes / level.caps.values[:, None]).max(axis=0) for level in levels])
    part_ms = np.array(pack_ms)[own_level] * shares[own_level, sample]
    return exchange_ms < exchange_ms[own_level, sample] + part_ms


def is_divided(tokens: np.ndarray, level: Level) -> np.ndarray:
    """Return whether samples of `tokens` [...] are divided over a full pack's ranks, bool [...]."""
    if level.context == 1:
        return np.zeros(np.shape(tokens), bool)
    if level.cut is not CutRule.WHOLE:
        return np.ones(np.shape(tokens), bool)
    cost = tokens + level.attention_weight * tokens.astype(np.float64) ** 2
    return cost > SHORT_SHARE * level.caps["tokens"] / level.context


def _ms_of(cost: CostModel, model: ModelConfig, feature: str) -> float:
    """Return the model's time per unit of a feature, or 0 if it has none."""
    unit = np.array([[name == feature for name in cost.features]], np.float64)
    return float(model_ms(cost, model, unit)[0])
