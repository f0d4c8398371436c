"""Costs per packing level: extra cost of context parallelism.

Context-parallel ranks exchange attention's inputs for divided samples in every language layer, and
the encoders' features once (deepstack features before the layers that take them). Elements a rank
sends per layer and exchanged token, for context size c, query width h, and joint width k of keys
and values (per tensor-parallel rank):

* `gather`: (c - 1) k in forward; twice that in backward, which gathers again and reduce-scatters
  gradients. A recomputed layer's second forward gathers for its backward.
* `heads`: (c - 1) / c (2 h + k) in forward, backward and second forward (Jacobs et al. 2023,
  DeepSpeed-Ulysses, arXiv 2309.14509, section 3.2).

All run at the block's slowest link, are not overlapped, and are padded to the largest share
(`EXCHANGED`); copies follow `megatron/vlm/model/exchange.py`. Within a node, measured layers on
shares replace these counts if the profile has the same context size and exchange.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.base.errors import UserError
from omnibal.cost.attention import AttentionWidths, attention_widths
from omnibal.cost.kernels import ELEMENT_BYTES, Features
from omnibal.cost.links import Group, all_to_all_line, pass_line
from omnibal.cost.model import CostModel, UnitCost, with_features
from omnibal.cost.shaped_rates import Line
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.levels import ContextExchange, Level
from omnibal.model.parallel import Parallel
from omnibal.model.units import (
    EXCHANGED,
    LANGUAGE,
    LANGUAGE_EMBED,
    attended_feature,
    feature_names_at,
    unit_kinds,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeSource:
    """Source of exchange times."""

    costs: CostSource = ANALYTIC
    """Source of the job's costs, possibly with measured layers on shares."""
    ring_tokens: int | None = None
    """Tokens per sample overlapped by ring attention, or None if keys are gathered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """Exchange of a forward or a backward; vectors are [features]."""

    sent_bytes: np.ndarray
    """Bytes that a rank sends."""
    copied_bytes: np.ndarray
    """Bytes that copies read and write."""
    collectives: int
    kernels: int

    def time_ms(self, line: Line, cluster: ClusterConfig) -> np.ndarray:
        """Time with collectives of a latency and rate, [features]."""
        time_ms = line.each_ms * self.sent_bytes + self.copied_bytes / _bytes_per_ms(cluster)
        time_ms[0] += self.collectives * line.fixed_ms + self.kernels * cluster.kernel_us / 1e3
        return time_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class _Added:
    """Exchange of a unit."""

    forward: _Pass
    backward: _Pass
    is_repeated: bool
    """Whether a second forward exchanges again."""
    working_bytes: np.ndarray
    """Working memory during the exchange, [features]."""


def _bytes_per_ms(cluster: ClusterConfig) -> float:
    """Rate of copies."""
    return cluster.memory_gb_per_s * 1e6 * cluster.memory_efficiency


def _ring_ms(
    context: int,
    sample_tokens: int,
    attended: int,
    output_bytes: np.ndarray,
    added: _Added,
    unit: UnitCost,
    line: Line,
    cluster: ClusterConfig,
) -> np.ndarray:
    """Exposed ring time of a layer's forward, backward and second forward, [3, features].

    Each rank attends to its own part, then to every other part while the next is sent (Liu et al.
    2023, Ring Attention, arXiv 2310.01889, section 3; Transformer Engine `context_parallel.py`).
    Backward sends keys, values and their gradients. Partial outputs are merged in a pass over both.

    Args:
        attended: index of the feature of attention cost.
        output_bytes: attention's output of a rank, [features].
    """
    others, own_tokens = context - 1, sample_tokens / context

    def pass_ms(sent_bytes: np.ndarray, without_ms: np.ndarray, summed: int = 1) -> np.ndarray:
        attention_ms = without_ms[attended] * sample_tokens * own_tokens / context
        sent_ms = line.each_ms * sent_bytes
        step_ms = sent_ms.sum() * own_tokens / others + line.fixed_ms
        waited = max(1 - attention_ms / step_ms, 0)
        # Each further part reads the accumulated and its own output, and writes their sum.
        moved_bytes = 3 * summed * others * output_bytes
        time_ms = waited * sent_ms + moved_bytes / _bytes_per_ms(cluster)
        time_ms[0] += others * (waited * line.fixed_ms + _RING_KERNELS * cluster.kernel_us / 1e3)
        return time_ms

    there, back = added.forward.sent_bytes, added.backward.sent_bytes
    return np.stack(
        [
            pass_ms(there, unit.forward_ms),
            # Partial gradients of keys and values are accumulated like query gradients.
            pass_ms(back, unit.backward_ms, summed=2),
            pass_ms(there, unit.recompute_ms),
        ]
    )


_RING_KERNELS = 4
"""Kernels per further part of a ring, including attention."""


def costs_at(
    cost: CostModel,
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    trained: Collection[str],
    levels: Sequence[Level],
    source: ExchangeSource,
) -> tuple[CostModel, ...]:
    """Return unit costs at every level, given those at context size 1.

    All use the same features, with one more than the model's if packs are shared.
    """
    names = feature_names_at(cost.features, levels)
    if len(names) > len(cost.features):
        units = {name: replace(unit, **with_features(unit, 1)) for name, unit in cost.units.items()}
        cost = replace(cost, features=names, units=units)
    kinds = unit_kinds(model)
    encoder_trained = any(kind.tower != LANGUAGE and kind.name in trained for kind in kinds)

    def at_level(level: Level) -> CostModel:
        mistake = exchange_mistake(model, parallel, level)
        if mistake is not None:
            raise UserError(mistake)
        if level.context == 1:
            return cost
        group = Group(level.context, parallel.tensor)
        # Measurements are within one node.
        costs = source.costs if group.is_within(cluster) else ANALYTIC
        line = of_features = all_to_all_line(cluster, group, precision)
        ring_tokens = None
        if level.exchange is ContextExchange.GATHER:
            line, ring_tokens = pass_line(cluster, group, precision), source.ring_tokens
        features, size = Features(names=cost.features), ELEMENT_BYTES[precision]
        units = dict(cost.units)
        for kind in cost.kinds:
            unit = units[kind.name]
            if kind.layer is not None:
                widths = attention_widths(model.language, kind.layer, parallel.tensor)
                sizes = model.language.hidden_size, widths, parallel.tensor, level, features, size
                added = _of_attention(*sizes, in_ring=ring_tokens is not None)
                passes = added.forward, added.backward
                measured = costs.exchange_ms(model, kind, level)
                forward_ms, backward_ms = measured or (one.time_ms(line, cluster) for one in passes)
                times_ms = np.stack([forward_ms, backward_ms, added.is_repeated * forward_ms])
                if ring_tokens is not None:
                    attended = cost.features.index(attended_feature(kind.layer))
                    output_bytes = features.one("tokens") * widths.output / parallel.tensor * size
                    sizes_of_ring = level.context, ring_tokens, attended, output_bytes
                    times_ms = _ring_ms(*sizes_of_ring, added, unit, line, cluster)
                units[kind.name] = _with_exchange(unit, added, times_ms, unit.has_backward)
            elif kind.name == LANGUAGE_EMBED and model.encoders:
                added = _of_features(model, level, features, size)
                once_ms = added.forward.time_ms(of_features, cluster)
                times_ms = np.stack([once_ms, once_ms, 0 * once_ms])
                units[kind.name] = _with_exchange(unit, added, times_ms, encoder_trained)
        return replace(cost, units=units)

    return tuple(map(at_level, levels))


def exchange_mistake(model: ModelConfig, parallel: Parallel, level: Level) -> str | None:
    """Error message if attention, its heads or lockstep ranks rule out a level, else None."""
    lockstep_ranks = parallel.lockstep_ranks
    if level.context % lockstep_ranks and lockstep_ranks % level.context:
        return (
            f"context size {level.context} was given with {parallel.options}, whose "
            f"{lockstep_ranks} data-parallel ranks that share out experts, or divide weights, run "
            "in lockstep; one must divide the other: take another context size, --ep or --sharding"
        )
    if level.context > 1 and any(kind.attention == "linear" for kind in model.language.kinds):
        return (
            f"{model.name} has layers of linear attention, whose state goes from token to token, "
            f"and context size {level.context} divides samples over ranks; no exchange is counted "
            "for that: keep packs whole, with levels of context size 1"
        )
    # Every head of latent attention has its own key and value.
    language, is_latent = model.language, any(kind.latent for kind in model.language.kinds)
    all_heads = language.heads if is_latent else language.kv_heads
    heads, rest = divmod(all_heads, parallel.tensor)
    is_gather = level.exchange is ContextExchange.GATHER
    if is_gather or level.context == 1 or (not rest and heads % level.context == 0):
        return None
    return (
        f"context size {level.context} with exchange of heads needs a number of key-value heads "
        f"per tensor-parallel rank that it divides, and {model.name} has {all_heads} "
        f"over {parallel.tensor}; exchange by gather, or take a smaller context size"
    )


def _of_attention(
    hidden_size: int,
    widths: AttentionWidths,
    tensor: int,
    level: Level,
    features: Features,
    size: int,
    *,
    in_ring: bool,
) -> _Added:
    """Exchange of a language layer, with elements of `size` bytes.

    Args:
        in_ring: whether keys and values travel in a ring instead of an all-gather.
    """
    query_bytes = widths.query / tensor * size
    key_value_bytes = (widths.key + widths.value) / tensor * size
    output_bytes = widths.output / tensor * size
    # Gradients of the residual, of attention's output and of its query, key and value.
    each_bytes = hidden_size * size + query_bytes + output_bytes + key_value_bytes
    running_bytes = features.one("tokens") * each_bytes
    context, exchanged = level.context, features.one(EXCHANGED)
    if level.exchange is ContextExchange.GATHER:
        own_bytes = features.one("tokens") * key_value_bytes
        gathered_bytes = exchanged * context * key_value_bytes
        all_bytes = own_bytes + gathered_bytes
        sent_bytes = gathered_bytes * (context - 1) / context
        # Concatenate keys and values, gather, reorder to this rank's pieces; in backward, gradients
        # likewise, summed over ranks.
        copied_bytes, summed_bytes = 4 * own_bytes + 2 * all_bytes, 6 * all_bytes + 4 * own_bytes
        return _Added(
            forward=_Pass(
                sent_bytes=sent_bytes, copied_bytes=copied_bytes, collectives=1, kernels=6
            ),
            backward=_Pass(
                sent_bytes=2 * sent_bytes,
                copied_bytes=copied_bytes + summed_bytes,
                collectives=2,
                kernels=12,
            ),
            is_repeated=False,
            # Keys and values of all ranks (ring: the current part and the next), their gradients,
            # and those concatenated.
            working_bytes=running_bytes + 3 * (2 * own_bytes if in_ring else all_bytes),
        )
    turned_bytes = exchanged * (2 * query_bytes + key_value_bytes)
    exchange = _Pass(
        sent_bytes=turned_bytes * (context - 1) / context,
        # Queries, keys and values are packed by rank, then by sample. The output is packed by rank
        # and merged with undivided samples.
        copied_bytes=exchanged * (10 * query_bytes + 6 * key_value_bytes)
        + 4 * features.one("tokens") * query_bytes,
        collectives=2,
        kernels=12,
    )
    return _Added(
        forward=exchange,
        backward=exchange,
        is_repeated=True,
        # Buffers on both sides of both exchanges, and received gradients.
        working_bytes=running_bytes + exchanged * (6 * query_bytes + 4 * key_value_bytes),
    )


def _of_features(model: ModelConfig, level: Level, features: Features, size: int) -> _Added:
    """Exchange of all encoders' features, replicated on tensor-parallel ranks.

    Deepstack features are exchanged separately at the start of the stage that takes them, but
    counted here.
    """
    towers, width_bytes = model.encoders.values(), model.language.hidden_size * size
    rows = [features.one(tower.feature) * tower.tokens_per_item for tower in towers]
    own_bytes = np.sum(rows, axis=0) * width_bytes
    beside = [tower.deepstack_features for tower in towers]
    beside_bytes = np.sum([n * each for n, each in zip(beside, rows, strict=True)], axis=0)
    all_bytes = own_bytes + beside_bytes * width_bytes
    exchange = _Pass(
        sent_bytes=all_bytes * (level.context - 1) / level.context,
        copied_bytes=2 * all_bytes,
        collectives=1 + sum(beside),
        kernels=2 * (1 + sum(beside)),
    )
    # Deepstack features stay until their layers.
    working_bytes = own_bytes + all_bytes
    return _Added(
        forward=exchange, backward=exchange, is_repeated=False, working_bytes=working_bytes
    )


def _with_exchange(
    unit: UnitCost, added: _Added, times_ms: np.ndarray, goes_back: bool
) -> UnitCost:
    """Return the unit's costs with its exchange; `goes_back`: gradients are exchanged too."""
    # Without a backward nothing is recomputed, and working memory is forward's.
    runs_back = unit.has_backward
    times_ms = times_ms * np.array([[1], [goes_back], [runs_back]])
    working_bytes = added.working_bytes + (0 if runs_back else unit.transient_bytes.max(axis=0))
    working_bytes[0] += unit.whole_bytes if runs_back else 0
    return replace(
        unit,
        forward_ms=unit.forward_ms + times_ms[0],
        backward_ms=unit.backward_ms + times_ms[1],
        recompute_ms=unit.recompute_ms + times_ms[2],
        context_ms=unit.context_ms + times_ms,
        transient_bytes=np.vstack([unit.transient_bytes, working_bytes]),
        two_part_bytes=np.vstack([unit.two_part_bytes, working_bytes]),
    )
