"""Costs of data-parallel encoders, and of the pipeline without them.

No encoder is divided by tensor-parallel ranks, so that units cost what they cost at tensor size 1.
A rank runs its share of a step's items in passes. A pass of n items computes for a time that is
linear in n and, where items attend to each other, in the sum over images of their items squared:
vectors below are of a pass, an item and, of such encoders, a square. Of kept items the activations
stay from forward to backward; of all others the forward runs again, frozen layers before a trained
projector too, as nothing of it was kept.

Features leave in one all-to-all of the encoding group and gradients come back in another. A rank
takes as long as it sends or receives, whichever is more, at the rate of the slowest link between
the group's ranks, and a message's latency for every peer. A communication library has buffers for
each peer (`ClusterConfig.peer_bytes`), which is what makes large groups expensive.

Where every rank holds whole encoders, gradients are summed over all ranks of the job, with the last
backward behind them, and weights are gathered before the first forward: neither is hidden behind
computation.

Neighbouring ranks of the job may divide weights, gradients and optimizer state instead. Then every
pass gathers and reduces unit after unit, as `omnibal.cost.sharded` says, and what its computation
does not hide is a time that is not linear. In a second forward the last unit's weights stay
for the backward that follows. Blocks of so many ranks are copies of each other, which sum the
gradients of their shares once a step, after the last backward.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.cost.counts import ELEMENT_BYTES, FP32_BYTES
from omnibal.cost.links import Group, message_line, pass_line
from omnibal.cost.model import CostModel, UnitCost, with_features
from omnibal.cost.shaped_rates import Line, exchanged_line
from omnibal.cost.sharded import ShardedExchange, sharded_cost
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.model.adapters import AdapterConfig
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.data_parallel_encoders import nodes_of_groups
from omnibal.model.parallel import Parallel
from omnibal.model.rates import CollectiveTime
from omnibal.model.runtime import OWN_RUNTIME
from omnibal.model.units import (
    ENCODER_WAITS_MS,
    LANGUAGE,
    LANGUAGE_EMBED,
    unit_kinds,
    unit_names,
)

ITEM, SQUARE = 1, 2
"""Places of what each item costs, and each square, after what their pass does."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassExchange:
    """Exchange of an encoder's weights and gradients, in every pass of ranks that divide them."""

    of_pass: ShardedExchange
    """In a forward, and in the backward of kept items."""
    of_second: ShardedExchange
    """In a second forward."""
    columns: tuple[int, ...]
    """Places of a pass, of the encoder's items and of their squares among the features of costs."""

    def exposed_ms(self, work: np.ndarray) -> np.ndarray:
        """What computation does not hide in a forward, in the backward of kept items, and in the
        second forward and the backward of others, [passes, 3].

        Args:
            work: 1, items and, if they count, squares of every pass, [passes, 2 or 3]; without
                items it is what a pass of none waits.
        """
        features = np.zeros((len(work), self.of_pass.forward_ms.shape[1]))
        features[:, self.columns] = work
        ahead, behind = self.of_pass.exposed_ms(features).T
        ahead_again = self.of_second.exposed_ms(features)[:, 0]
        # The last unit's weights are still there.
        again = ahead_again + behind - self.of_pass.gather_back_ms[self.of_pass.sequence[-1]]
        return np.stack([ahead, behind, again], axis=-1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderCost:
    """Cost of an encoder with its projector on one device; vectors are [pass, item] or, of whole
    samples, [pass, item, square]."""

    feature: str
    """What its items are."""
    forward_ms: np.ndarray
    backward_ms: np.ndarray
    """0 where all of it is frozen."""
    again_ms: np.ndarray
    """Time of the second forward of items that are not kept; 0 where all of it is frozen."""
    kept_bytes: np.ndarray
    """Activations of kept items."""
    working_bytes: np.ndarray
    """Working memory of a pass, [moments, 2 or 3]; the largest of the moments counts. Of one that
    is not kept, its activations come to it."""
    input_bytes: float
    """What an item is read as, held from its forward to its second one."""
    feature_bytes: float
    """Features of an item, those of deepstack projectors too."""
    is_trained: bool
    """Whether any part of it is trained, so that gradients come back."""
    exchange: PassExchange | None = None
    """None where ranks hold weights whole."""

    @property
    def is_of_samples(self) -> bool:
        """Whether a rank takes all items of a sample, as they attend to each other."""
        return len(self.forward_ms) > SQUARE

    @property
    def item_ms(self) -> np.ndarray:
        """Forward and backward, [2 or 3]."""
        return self.forward_ms + self.backward_ms

    def pass_bytes(self, work: np.ndarray, *, is_kept: bool) -> np.ndarray:
        """Bytes that passes of this work, [passes, 2 or 3], take besides what is kept, [passes]."""
        working = (work @ self.working_bytes.T).max(axis=1, initial=0)
        return working if is_kept else working + work @ self.kept_bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodersCost:
    """Cost of all data-parallel encoders, on one device."""

    encoders: Mapping[str, EncoderCost]
    """By name, in model order."""
    weights_bytes: float
    """Weights of this rank; this and the next are a share where ranks divide them."""
    gradients_bytes: float
    optimizer_bytes: float
    """Optimizer state, a share of the ranks that divide weights, or of all ranks of the job."""
    gather_ms: float
    """Gather of new weights from all ranks, once a step; 0 where every pass gathers them."""
    reduction_ms: float
    """Sum of gradients over all ranks, or over those with the same share, once a step."""
    update_ms: float
    """Weight update of this rank's share."""
    within_node: Line
    """Time of a message and of a byte of the exchange, where the group is within a node."""
    between_nodes: Line
    """Time of a message and of a byte of the exchange, where the group is on several nodes."""
    measured: tuple[CollectiveTime, ...] = ()
    """Measured collectives, of which an all-to-all counts in place of messages."""
    tensor: Line
    """Time of a collective of tensor-parallel ranks, and of a byte of it."""
    peer_bytes: float
    """Buffers for each peer of the exchange."""
    parallel: Parallel
    gpus_per_node: int
    sharded: int = 1
    """Neighbouring ranks of the job that divide weights; 1 where each holds them whole."""
    evaluation_bytes: float = 0.0
    """Whole weights that a rank that embeds tokens gathers to evaluate held-out data; 0 where it
    holds them."""

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimizer state."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def ranks_of_pipeline(self) -> int:
        """Ranks of one pipeline."""
        return self.parallel.pipeline * self.parallel.tensor

    def buffers_bytes(self, pipelines: int) -> float:
        """Buffers of the communication library for the peers of a group of so many pipelines."""
        return (pipelines * self.ranks_of_pipeline - 1) * self.peer_bytes

    def nodes(self, pipelines: int) -> np.ndarray:
        """Node of every rank of every group of so many pipelines, int64 [groups, ranks]."""
        return nodes_of_groups(self.parallel, pipelines, self.gpus_per_node)

    def exchange_ms(
        self, pipelines: int, within_bytes: np.ndarray, across_bytes: np.ndarray
    ) -> np.ndarray:
        """Time of an exchange of features in groups of so many pipelines, [...].

        What leaves a node takes the network's rate; what stays within goes beside that at the
        node's, and the slower of the two counts. With networks that are eight to twelve times as
        slow as a node's links, that is the network as soon as a tenth of the bytes cross. A
        measured all-to-all counts in place of messages; one over the network is of all bytes.

        Args:
            within_bytes: that a rank exchanges within its node, [...].
            across_bytes: that it exchanges with other nodes, [...].
        """
        is_within = not np.ptp(self.nodes(pipelines), axis=1).any()
        ranks = pipelines * self.ranks_of_pipeline
        whole = exchanged_line(self.measured, ranks, "node" if is_within else "network")
        if whole is not None:
            return whole.fixed_ms + whole.each_ms * (within_bytes + across_bytes)
        line = self.within_node if is_within else self.between_nodes
        within_ms = self.within_node.each_ms * within_bytes
        slower_ms = np.maximum(within_ms, line.each_ms * across_bytes)
        return line.fixed_ms * (ranks - 1) + slower_ms

    def item_ms(self, items_per_pass: Mapping[str, int]) -> dict[str, float]:
        """Forward and backward of an item by encoder; where items are equal, with its part of a
        full pass. Whole samples fill no pass, and are dealt alike whatever a pass may have."""
        return {
            name: float(
                cost.item_ms[ITEM]
                if cost.is_of_samples
                else cost.item_ms @ (1 / items_per_pass[name], 1)
            )
            for name, cost in self.encoders.items()
        }

    @property
    def square_ms(self) -> dict[str, float]:
        """Forward and backward of a square, of encoders that take whole samples."""
        return {
            name: float(cost.item_ms[SQUARE])
            for name, cost in self.encoders.items()
            if cost.is_of_samples
        }


def encoders_cost(
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    frozen: Collection[str] = (),
    source: CostSource = ANALYTIC,
    *,
    adapters: AdapterConfig | None = None,
    sharded: int = 1,
) -> EncodersCost:
    """Cost of a model's data-parallel encoders, whose weights, gradients and optimizer state
    `sharded` neighbouring ranks divide."""
    # Whole copies on all ranks are what tensor size 1 with so many data-parallel ranks is.
    copies = Parallel(pipeline=1, data=parallel.world_size, sharded=sharded)
    whole = source.costs(model, cluster, copies, precision, frozen, adapters=adapters)
    shards = source.with_rates(cluster), copies, precision, OWN_RUNTIME
    rates = source.with_rates(cluster).measured(precision)
    encoders, held = dict[str, EncoderCost](), list[tuple[int, UnitCost]]()
    cost = whole
    for name in model.encoders:
        exchange = None
        if sharded > 1:
            names = _unit_names(model, name)
            cost = sharded_cost(whole, names, *shards)
            exchange = ShardedExchange.of(whole, names, *shards)
        encoders[name] = _encoder_cost(model, cost, name, precision, exchange)
        held += _held(model, cost, name)
    parameters = sum(number * unit.parameters for number, unit in held)
    trained = sum(number * unit.trained_parameters for number, unit in held)
    whole_bytes = parameters * whole.rates.weight_bytes
    return EncodersCost(
        encoders=encoders,
        weights_bytes=parameters * cost.rates.weight_bytes,
        gradients_bytes=trained * cost.rates.gradient_bytes,
        optimizer_bytes=trained * cost.rates.optimizer_bytes,
        gather_ms=trained * cost.rates.weight_gather_ms,
        reduction_ms=trained * cost.rates.gradient_reduction_ms,
        update_ms=trained * cost.rates.optimizer_ms,
        within_node=source.link or message_line(cluster, 1, precision),
        between_nodes=message_line(cluster, cluster.gpus_per_node + 1, precision),
        measured=() if rates is None else rates.collectives,
        tensor=pass_line(cluster, Group(parallel.tensor), precision),
        peer_bytes=cluster.peer_bytes,
        parallel=parallel,
        gpus_per_node=cluster.gpus_per_node,
        sharded=sharded,
        evaluation_bytes=whole_bytes if sharded > 1 else 0.0,
    )


def _unit_names(model: ModelConfig, name: str) -> list[str]:
    """Kinds of an encoder's units, in the order in which they run."""
    own = {kind.name for kind in unit_kinds(model) if kind.tower == name}
    return [unit for unit in unit_names(model) if unit in own]


def _held(model: ModelConfig, cost: CostModel, name: str) -> list[tuple[int, UnitCost]]:
    """Costs of an encoder's units of every kind, each with their number."""
    numbers = Counter(_unit_names(model, name))
    return [(number, cost.units[kind]) for kind, number in numbers.items()]


def _encoder_cost(
    model: ModelConfig,
    cost: CostModel,
    name: str,
    precision: Precision,
    exchange: ShardedExchange | None,
) -> EncoderCost:
    """Cost of one encoder: its embedding, its layers and its projector together."""
    tower = model.encoders[name]
    # The fixed feature, an encoder's items, and their squares if they count.
    squares = [] if tower.squares is None else [tower.squares]
    columns = [0, *(cost.features.index(each) for each in (tower.feature, *squares))]
    held = _held(model, cost, name)
    is_trained = any(unit.has_backward for _, unit in held)

    def total(value: Callable[[UnitCost], np.ndarray]) -> np.ndarray:
        return np.sum([number * value(unit)[columns] for number, unit in held], axis=0)

    rows = tower.tokens_per_item * (1 + tower.deepstack_features)
    assert tower.values_per_item is not None, "a job has none without"
    feature_bytes = rows * model.language.hidden_size * ELEMENT_BYTES[precision]
    return EncoderCost(
        feature=tower.feature,
        forward_ms=total(lambda unit: unit.forward_ms),
        backward_ms=total(lambda unit: unit.backward_ms),
        again_ms=is_trained * total(_again_ms),
        kept_bytes=total(lambda unit: unit.activation_bytes),
        working_bytes=np.concatenate(
            [unit.transient_bytes[:, columns] + unit.shared_bytes[columns] for _, unit in held]
        ),
        input_bytes=FP32_BYTES * tower.values_per_item,
        feature_bytes=float(feature_bytes),
        is_trained=is_trained,
        exchange=None if exchange is None else _pass_exchange(exchange, cost, columns),
    )


def _pass_exchange(
    exchange: ShardedExchange, cost: CostModel, columns: Sequence[int]
) -> PassExchange:
    """The exchange of passes of items of these features, and that of second forwards."""
    features = exchange.forward_ms.shape[1]
    again_ms = [_again_ms(cost.units[kind.name])[:features] for kind in cost.kinds]
    again = replace(exchange, forward_ms=np.stack(again_ms))
    return PassExchange(of_pass=exchange, of_second=again, columns=tuple(columns))


def _again_ms(unit: UnitCost) -> np.ndarray:
    return unit.recompute_ms if unit.has_backward else unit.forward_ms


def pipeline_cost(cost: CostModel, update_ms: float) -> CostModel:
    """Costs of the language model's units alone, where encoders are data-parallel.

    Two features more are times already: what the first forward of a step waits for encoders, and
    what comes after the last backward. The stage that embeds tokens takes that time, so that
    whatever simulates or bounds a pipeline counts it. Features of samples stay: to put features of
    items in their places takes time.

    Args:
        cost: of the whole model.
        update_ms: weight update of the encoders, which comes to every stage's.
    """
    kinds, units = tuple(kind for kind in cost.kinds if kind.tower == LANGUAGE), {}
    for kind in kinds:
        padded = with_features(cost.units[kind.name], len(ENCODER_WAITS_MS))
        if kind.name == LANGUAGE_EMBED:
            padded["forward_ms"][-2] = padded["backward_ms"][-1] = 1.0
        units[kind.name] = replace(cost.units[kind.name], **padded)
    return replace(
        cost,
        features=(*cost.features, *ENCODER_WAITS_MS),
        kinds=kinds,
        units=units,
        optimizer_ms_fixed=cost.optimizer_ms_fixed + update_ms,
    )
