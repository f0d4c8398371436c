"""Costs per packing level: extra cost of context parallelism.

Context-parallel ranks exchange attention's inputs for divided samples in every language layer, and
the encoders' features once (deepstack features before the layers that take them). Elements a rank
sends per layer and exchanged token, for context size c, query width h, and summed width k of keys
and values (per tensor-parallel rank):

* `gather`: (c - 1) k in forward; twice that in backward, which gathers again and reduce-scatters
  gradients. Nothing for recomputation: its gather replaces backward's.
* `heads`: (c - 1) / c (2 h + k) in forward, backward and second forward (Jacobs et al. 2023,
  DeepSpeed-Ulysses, arXiv 2309.14509, section 3.2).

Both run at the group's slowest link, are not overlapped, and are padded to the largest share
(`EXCHANGED`); copies follow `megatron/vlm/model/shared_attention.py`. Within a node, measured times
replace them if the profile has the context size and exchange. A ring overlaps compute (`_ring_ms`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.base.errors import refuse_if
from omnibal.cost.attention_costs import attention_widths
from omnibal.cost.kernels import ELEMENT_BYTES, unit_vectors
from omnibal.cost.link_rates import all_to_all_line, pass_line
from omnibal.cost.model import CostModel, UnitCost, with_features
from omnibal.cost.profile import fit_exchange_ms
from omnibal.cost.setting import CostSetting
from omnibal.cost.shaped_rates import LinearTime
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.model.adapter_settings import trained_kinds
from omnibal.model.config import ClusterConfig, ModelConfig
from omnibal.model.levels import ContextExchange, Level, exchange_mistake
from omnibal.model.parallel import Group
from omnibal.model.units import (
    EXCHANGED,
    LANGUAGE,
    LANGUAGE_EMBED,
    attended_feature,
    feature_names_at,
    unit_kinds,
)

_RING_KERNELS = 4  # kernels per further part of a ring, including attention


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange:
    """Exchange of a unit, per feature (0: constant). Rows: 0 is forward, 1 is backward."""

    sent_bytes: np.ndarray  # bytes that a rank sends, [2, features]
    copied_bytes: np.ndarray  # bytes that copies read and write, [2, features]
    launches: tuple[tuple[int, int], tuple[int, int]]  # (collectives, kernels) per pass
    working_bytes: np.ndarray  # working memory during the exchange, [features]

    def times_ms(self, line: LinearTime, cluster: ClusterConfig) -> np.ndarray:
        """Return the time of collectives and copies per feature, [2, features]."""
        times_ms = line.each_ms * self.sent_bytes + self.copied_bytes / _bytes_per_ms(cluster)
        times_ms[:, 0] += np.array(self.launches) @ (line.fixed_ms, cluster.kernel_us / 1e3)
        return times_ms


def _bytes_per_ms(cluster: ClusterConfig) -> float:
    return cluster.memory_gb_per_s * 1e6 * cluster.memory_efficiency


def _ring_ms(
    context: int,
    sample_tokens: int,
    attended: int,
    output_bytes: np.ndarray,
    exchange: _Exchange,
    unit: UnitCost,
    line: LinearTime,
    cluster: ClusterConfig,
) -> np.ndarray:
    """Return a ring's exposed time, with merges, [forward, backward, recomputation; features].

    Each rank attends to its own part, then to every other part while the next is sent (Liu et al.
    2023, Ring Attention, arXiv 2310.01889, section 3; Transformer Engine `context_parallel.py`).
    Backward sends keys, values and their gradients.

    Args:
        sample_tokens: tokens of every sample on all ranks. Parts are equal.
        attended: index of the feature of attention cost.
        output_bytes: attention's output of a rank, [features].
    """
    others, own_tokens = context - 1, sample_tokens / context
    compute_ms = np.stack([unit.forward_ms, unit.backward_ms, unit.recompute_ms])
    attention_ms = compute_ms[:, attended] * sample_tokens * own_tokens / context
    sent_ms = line.each_ms * exchange.sent_bytes[[0, 1, 0]]
    part_ms = sent_ms.sum(axis=1) * own_tokens / others + line.fixed_ms
    exposed = np.maximum(1 - attention_ms / part_ms, 0)
    # A merge reads two and writes one: outputs, or gradients of queries and of keys and values.
    moved_bytes = 3 * others * np.outer([1, 2, 1], output_bytes)
    times_ms = exposed[:, None] * sent_ms + moved_bytes / _bytes_per_ms(cluster)
    times_ms[:, 0] += others * (exposed * line.fixed_ms + _RING_KERNELS * cluster.kernel_us / 1e3)
    return times_ms


def costs_at(
    cost: CostModel, setting: CostSetting, levels: Sequence[Level], source: CostSource = ANALYTIC
) -> tuple[CostModel, ...]:
    """Return unit costs per level, with all levels' features, from those at context size 1."""
    setting = source.with_rates(setting)
    model, cluster, parallel = setting.model, setting.cluster, setting.parallel
    precision, runtime = setting.precision, setting.runtime
    added = feature_names_at(cost.features, levels)[len(cost.features) :]
    if added:
        cost = with_features(cost, added)
    # Also of data-parallel encoders, which `cost` has no units of.
    trained, kinds = trained_kinds(model, setting.frozen, setting.adapters), unit_kinds(model)
    encoder_trained = any(kind.tower != LANGUAGE and kind.name in trained for kind in kinds)
    features, size = unit_vectors(cost.features), ELEMENT_BYTES[precision]

    def at_level(level: Level) -> CostModel:
        mistake = exchange_mistake(model, parallel, level)
        refuse_if(mistake, str(mistake))
        if level.context == 1:
            return cost
        group, is_gather = Group(level.context, parallel.tensor), _is_gather(level)
        all_to_all = all_to_all_line(cluster, group, precision)
        line = pass_line(cluster, group, precision) if is_gather else all_to_all
        ring_tokens = runtime.ring_tokens if is_gather else None
        units = dict(cost.units)
        for kind in cost.kinds:
            unit = units[kind.name]
            if kind.layer is not None:
                widths = attention_widths(model.language, kind.layer, parallel.tensor)
                divided = np.array([widths.query, widths.key + widths.value, widths.output])
                of_token = np.append(model.language.hidden_size, divided / parallel.tensor) * size
                in_ring = ring_tokens is not None
                exchange = _attention_exchange(of_token, level, features, in_ring=in_ring)
                times_ms = exchange.times_ms(line, cluster)
                # Shares are measured within one node only.
                if group.is_within(cluster) and source.profile is not None:
                    measured_ms = fit_exchange_ms(source.profile, model, kind, level)
                    times_ms = times_ms if measured_ms is None else measured_ms
                # Only the exchange of heads adds time to recomputation.
                times_ms = times_ms[[0, 1, 0]] * [[1], [1], [not is_gather]]
                output_bytes = features["tokens"] * of_token[-1]
                if ring_tokens is not None:
                    attended = cost.features.index(attended_feature(kind.layer))
                    sizes_of_ring = level.context, ring_tokens, attended, output_bytes
                    times_ms = _ring_ms(*sizes_of_ring, exchange, unit, line, cluster)
                # Transformer Engine also keeps the output from before its all-to-all
                # (`AttnFuncWithCPAndQKVOA2A` of `context_parallel.py`).
                is_kept = runtime.accumulates_in_products and not is_gather
                is_kept = is_kept and unit.trained_parameters > 0
                kept_bytes = unit.activation_bytes + is_kept * output_bytes
                unit = replace(unit, activation_bytes=kept_bytes)
                units[kind.name] = _with_exchange(unit, exchange, times_ms, unit.has_backward)
            elif kind.name == LANGUAGE_EMBED and model.encoders:
                exchange = _features_exchange(model, level, features, size)
                times_ms = exchange.times_ms(all_to_all, cluster)[[0, 1, 0]] * [[1], [1], [0]]
                units[kind.name] = _with_exchange(unit, exchange, times_ms, encoder_trained)
        return replace(cost, units=units)

    return tuple(map(at_level, levels))


def _is_gather(level: Level) -> bool:
    return level.exchange is ContextExchange.GATHER


def _attention_exchange(
    of_token: np.ndarray, level: Level, features: Mapping[str, np.ndarray], *, in_ring: bool
) -> _Exchange:
    """Return the exchange of a language layer.

    Args:
        of_token: bytes of a token on a rank: hidden, query, key with value, attention's output.
        in_ring: whether keys and values travel in a ring instead of an all-gather.
    """
    context, tokens, exchanged = level.context, features["tokens"], features[EXCHANGED]
    _, query_bytes, key_value_bytes, _ = of_token
    # Gradients of the residual, of attention's output and of its query, key and value.
    gradient_bytes = tokens * of_token.sum()
    if _is_gather(level):
        own_bytes = tokens * key_value_bytes
        gathered_bytes = exchanged * context * key_value_bytes
        all_bytes = own_bytes + gathered_bytes
        # Concatenate keys and values, gather, reorder to this rank's pieces. Backward repeats this,
        # and sums gradients over ranks.
        copied_bytes, summed_bytes = 4 * own_bytes + 2 * all_bytes, 6 * all_bytes + 4 * own_bytes
        return _Exchange(
            sent_bytes=np.outer([1, 2], gathered_bytes * (context - 1) / context),
            copied_bytes=np.stack([copied_bytes, copied_bytes + summed_bytes]),
            launches=((1, 6), (2, 12)),
            # Keys and values of all ranks (ring: the current part and the next), their gradients,
            # and the concatenation.
            working_bytes=gradient_bytes + 3 * (2 * own_bytes if in_ring else all_bytes),
        )
    sent_bytes = exchanged * (2 * query_bytes + key_value_bytes)
    # Queries, keys and values are packed by rank, then by sample. The output is packed by rank
    # and merged with undivided samples.
    copied_bytes = exchanged * (10 * query_bytes + 6 * key_value_bytes) + 4 * tokens * query_bytes
    return _Exchange(
        sent_bytes=np.outer([1, 1], sent_bytes * (context - 1) / context),
        copied_bytes=np.outer([1, 1], copied_bytes),
        launches=((2, 12),) * 2,
        # Buffers on both sides of both exchanges, and received gradients.
        working_bytes=gradient_bytes + exchanged * (6 * query_bytes + 4 * key_value_bytes),
    )


def _features_exchange(
    model: ModelConfig, level: Level, features: Mapping[str, np.ndarray], size: int
) -> _Exchange:
    """Return the exchange of all encoders' features, replicated on tensor-parallel ranks."""
    # Deepstack features are counted here too, though the stage that takes them exchanges them.
    number, own_bytes, all_bytes = 1, *np.zeros((2, len(features)))
    for tower in model.encoders.values():
        rows = features[tower.feature] * tower.tokens_per_item
        tower_bytes = rows * model.language.hidden_size * size
        own_bytes = own_bytes + tower_bytes
        all_bytes = all_bytes + (1 + tower.deepstack_features) * tower_bytes
        number += tower.deepstack_features
    return _Exchange(
        sent_bytes=np.outer([1, 1], all_bytes * (level.context - 1) / level.context),
        copied_bytes=np.outer([1, 1], 2 * all_bytes),
        launches=((number, 2 * number),) * 2,
        # Deepstack features stay until their layers.
        working_bytes=own_bytes + all_bytes,
    )


def _with_exchange(
    unit: UnitCost, exchange: _Exchange, times_ms: np.ndarray, in_backward: bool
) -> UnitCost:
    """Add an exchange to a unit's costs; its backward counts only if `in_backward`."""
    # Without a backward nothing is recomputed, and working memory is forward's.
    runs_back = unit.has_backward
    times_ms = times_ms * np.array([[1], [in_backward], [runs_back]])
    working_bytes = exchange.working_bytes + (0 if runs_back else unit.transient_bytes.max(axis=0))
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
