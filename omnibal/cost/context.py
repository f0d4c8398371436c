"""Costs by level: what sharing a pack adds to the costs of units.

The ranks of a block exchange what attention needs of samples that are divided over them, in every
language layer, and the encoders' features once, before the language model. All else of a layer is
of the share's own tokens, and costs what it costs at context size 1. Elements that a rank sends,
per layer and exchanged token, for context size c, query width h and width k of keys and values
together (per tensor-parallel rank):

* `gather`: (c - 1) k in forward, which gathers keys and values. Backward gathers them again, as
  they are not kept, and reduces and scatters their gradients: twice that.
* `heads`: (c - 1) / c (2 h + k) in forward, from tokens to heads for queries, keys and values and
  back for the output; the same in backward (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv
  2309.14509, section 3.2).

A recomputed layer repeats forward's. All are sent at the rate of the block's slowest link: a node's
while the tensor-parallel ranks of all of the block fit one, else the network's. Nothing of it is
hidden behind computation. What one rank has fewer tokens of than another is padding, or a wait that
takes as long: so exchanged tokens are those of the block's largest share (`EXCHANGED`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from omnibal.config import ClusterConfig, LanguageConfig, ModelConfig, Precision
from omnibal.cost.analytic import context_line
from omnibal.cost.counts import ELEMENT_BYTES, Features
from omnibal.cost.model import CostModel, UnitCost
from omnibal.errors import UserError
from omnibal.levels import ContextExchange, Level
from omnibal.parallel import Parallel
from omnibal.units import EXCHANGED, LANGUAGE_EMBED, feature_names_at, projector_name


@dataclass(frozen=True, kw_only=True, slots=True)
class _Added:
    """What a unit exchanges in one direction at most, and what it works with meanwhile."""

    forward_bytes: np.ndarray
    """Bytes that a rank sends in forward; all are [features]."""
    backward_bytes: np.ndarray
    forward_passes: int
    """Collectives of forward."""
    backward_passes: int
    working_bytes: np.ndarray
    """Working memory at the moment of the exchange."""


def costs_at(
    cost: CostModel,
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    frozen: Collection[str],
    levels: Sequence[Level],
) -> tuple[CostModel, ...]:
    """Costs of units on packs of every level, given those at context size 1.

    All are linear in the same features, one more than the model's where packs are shared. Without
    levels, there is one cost model, as given.

    Raises:
        UserError: a level exchanges heads that its context size does not divide.
    """
    names = feature_names_at(cost.features, levels)
    if len(names) > len(cost.features):
        units = {name: _widened(unit) for name, unit in cost.units.items()}
        cost = replace(cost, features=names, units=units)
    encoder_trained = any(
        part not in frozen
        for name in model.encoders
        for part in (name, projector_name(model, name))
    )
    return tuple(
        _at_level(cost, model, cluster, parallel, precision, encoder_trained, level)
        for level in levels
    ) or (cost,)


def exchange_mistake(model: ModelConfig, parallel: Parallel, level: Level) -> str | None:
    """Error message for an exchange that the heads do not allow; None if they do."""
    heads, rest = divmod(model.language.kv_heads, parallel.tensor)
    is_gather = level.exchange is ContextExchange.GATHER
    if is_gather or level.context == 1 or (not rest and heads % level.context == 0):
        return None
    return (
        f"context size {level.context} with exchange of heads needs a number of key-value heads "
        f"per tensor-parallel rank that it divides, and {model.name} has {model.language.kv_heads} "
        f"over {parallel.tensor}; exchange by gather, or take a smaller context size"
    )


def _widened(unit: UnitCost) -> UnitCost:
    """The unit's costs with one feature more, which costs nothing."""
    values = {each.name: getattr(unit, each.name) for each in fields(unit)}
    padded: dict[str, Any] = {
        name: np.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, 1)])
        for name, value in values.items()
        if isinstance(value, np.ndarray)
    }
    return replace(unit, **padded)


def _at_level(
    cost: CostModel,
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    encoder_trained: bool,
    level: Level,
) -> CostModel:
    mistake = exchange_mistake(model, parallel, level)
    if mistake is not None:
        raise UserError(mistake)
    if level.context == 1:
        return cost
    line = context_line(cluster, level.context, parallel.tensor, precision)
    features, size = Features(names=cost.features), ELEMENT_BYTES[precision]
    units = dict(cost.units)
    for kind in cost.kinds:
        unit = units[kind.name]
        if kind.layer is not None:
            added = _of_attention(model.language, parallel.tensor, level, features, size)
            units[kind.name] = _with_exchange(
                unit, added, line.fixed_ms, line.each_ms, bool(unit.backward_ms.any())
            )
        elif kind.name == LANGUAGE_EMBED and model.encoders:
            added = _of_features(model, level, features, size)
            units[kind.name] = _with_exchange(
                unit, added, line.fixed_ms, line.each_ms, encoder_trained
            )
    return replace(cost, units=units)


def _of_attention(
    language: LanguageConfig, tensor: int, level: Level, features: Features, size: int
) -> _Added:
    """Exchange of a language layer, with elements of `size` bytes."""
    exchanged, context = features.one(EXCHANGED), level.context
    query_bytes = language.hidden_size / tensor * size
    key_value_bytes = 2 * query_bytes * language.kv_heads / language.heads
    # Gradients of the residual, of attention's output and of its query, key and value.
    each_bytes = language.hidden_size * size + 2 * query_bytes + key_value_bytes
    running_bytes = features.one("tokens") * each_bytes
    if level.exchange is ContextExchange.GATHER:
        gathered_bytes = exchanged * context * key_value_bytes
        sent_bytes = gathered_bytes * (context - 1) / context
        return _Added(
            forward_bytes=sent_bytes,
            backward_bytes=2 * sent_bytes,
            forward_passes=1,
            backward_passes=2,
            # Keys and values of all ranks, and their gradients.
            working_bytes=running_bytes + 2 * gathered_bytes,
        )
    turned_bytes = exchanged * (2 * query_bytes + key_value_bytes)
    sent_bytes = turned_bytes * (context - 1) / context
    return _Added(
        forward_bytes=sent_bytes,
        backward_bytes=sent_bytes,
        forward_passes=2,
        backward_passes=2,
        working_bytes=running_bytes + 2 * turned_bytes,
    )


def _of_features(model: ModelConfig, level: Level, features: Features, size: int) -> _Added:
    """Exchange of the features of all encoders, which are whole on every tensor-parallel rank."""
    item_tokens = [
        features.one(tower.feature) * tower.tokens_per_item for tower in model.encoders.values()
    ]
    encoded_bytes = np.sum(item_tokens, axis=0) * model.language.hidden_size * size
    sent_bytes = encoded_bytes * (level.context - 1) / level.context
    return _Added(
        forward_bytes=sent_bytes,
        backward_bytes=sent_bytes,
        forward_passes=1,
        backward_passes=1,
        working_bytes=2 * encoded_bytes,
    )


def _with_exchange(
    unit: UnitCost, added: _Added, pass_ms: float, ms_per_byte: float, goes_back: bool
) -> UnitCost:
    """The unit's costs with its exchange; `goes_back` says whether gradients are exchanged too."""
    forward_ms = ms_per_byte * added.forward_bytes
    forward_ms[0] += added.forward_passes * pass_ms
    backward_ms = ms_per_byte * added.backward_bytes
    backward_ms[0] += added.backward_passes * pass_ms
    backward_ms = backward_ms * goes_back
    # Without a backward, a unit's moments are of all that its forward needs.
    runs_back = bool(unit.backward_ms.any())
    working_bytes = added.working_bytes + (0 if runs_back else unit.transient_bytes.max(axis=0))
    return replace(
        unit,
        forward_ms=unit.forward_ms + forward_ms,
        backward_ms=unit.backward_ms + backward_ms,
        recompute_ms=unit.recompute_ms + forward_ms * bool(unit.recompute_ms.any()),
        context_ms=unit.context_ms + np.stack([forward_ms, backward_ms]),
        transient_bytes=np.vstack([unit.transient_bytes, working_bytes]),
    )
