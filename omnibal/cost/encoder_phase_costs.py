"""Costs of data-parallel encoders, and of the pipeline without them.

Encoders run at tensor size 1. A rank runs its share of a step's items in passes. A pass's time is
linear in [1, items] and, if items attend to each other, in the sum of squared items per image.
Activations of kept items stay until backward; the forward of other items runs again.

Features leave in one all-to-all of the encoding group, and gradients return in another. Each takes
max(sent, received) of the slowest rank, plus a latency per peer. NCCL's buffers per peer
(`ClusterConfig.peer_bytes`) make large groups expensive.

Replicated encoders all-reduce gradients after the last backward and gather weights before the first
forward, both exposed. Sharded encoders gather and reduce per unit in every pass
(`omnibal.cost.sharding_costs`); in a second forward the last unit's weights stay for the backward
that follows. Replicas of a shard sum gradients once a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.cost.kernels import ELEMENT_BYTES, FP32_BYTES
from omnibal.cost.link_rates import message_line, pass_line
from omnibal.cost.model import CostModel, UnitCost, with_features
from omnibal.cost.setting import CostSetting
from omnibal.cost.shaped_rates import LinearTime, collective_line
from omnibal.cost.sharding_costs import ShardedExchange, sharded_cost
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.model.config import ModelConfig, Precision
from omnibal.model.data_parallel_encoders import nodes_of_groups
from omnibal.model.parallel import Group, Parallel
from omnibal.model.rate_tables import CollectiveTime, Place
from omnibal.model.runtime import OWN_RUNTIME
from omnibal.model.units import ENCODER_WAITS_MS, LANGUAGE, LANGUAGE_EMBED, unit_kinds, unit_names

ITEM, SQUARE = 1, 2  # indices of the costs per item and per square; index 0 is per pass


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderCost:
    """Cost of an encoder and projector on one device; vectors are [pass, item(, square)]."""

    feature: str  # name of its item feature
    forward_ms: np.ndarray
    backward_ms: np.ndarray  # 0 if fully frozen
    again_ms: np.ndarray  # second forward of items that are not kept, or 0 if fully frozen
    kept_bytes: np.ndarray  # activations of kept items
    working_bytes: np.ndarray
    """Working memory of a pass at its moments, [moments, 2 or 3]; unkept activations are extra."""
    input_bytes: float  # input bytes per item, held until its last forward
    feature_bytes: float  # feature bytes per item, including deepstack
    is_trained: bool  # whether any part is trained, so that gradients return
    exchange: ShardedExchange | None = None  # of sharded units in a pass, None if replicated

    @property
    def is_of_samples(self) -> bool:
        """Whether a sample's items attend to each other, so that they stay on one rank."""
        return len(self.forward_ms) > SQUARE

    @property
    def item_ms(self) -> np.ndarray:
        """Forward plus backward time, [2 or 3]."""
        return self.forward_ms + self.backward_ms

    def items_ms(self, items: np.ndarray) -> tuple[float, float]:
        """Return forward and backward time of `items` [1 or 2], without a pass's own time."""
        return float(items @ self.forward_ms[ITEM:]), float(items @ self.backward_ms[ITEM:])

    def pass_bytes(self, work: np.ndarray, *, is_kept: bool) -> np.ndarray:
        """Return peak bytes by pass for `work` [passes, 2 or 3]; activations only if not kept."""
        working = (work @ self.working_bytes.T).max(axis=1, initial=0)
        return working if is_kept else working + work @ self.kept_bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodersCost:
    """Cost of all data-parallel encoders, on one device."""

    encoders: Mapping[str, EncoderCost]  # encoders by name, in model order
    weights_bytes: float  # weights on this rank, a shard if ranks shard them
    gradients_bytes: float
    optimizer_bytes: float  # optimizer state, sharded with the weights or over all ranks of the job
    gather_ms: float  # weight gather from all ranks, once a step, or 0 if every pass gathers
    reduction_ms: float  # gradient reduction over all ranks, or a shard's replicas, once a step
    update_ms: float  # update time of this rank's shard
    within_node: LinearTime  # latency and time per byte of the exchange if within a node
    between_nodes: LinearTime  # latency and time per byte of the exchange if the group spans nodes
    measured: tuple[CollectiveTime, ...] = ()  # an all-to-all replaces the counted messages
    tensor: LinearTime  # latency and time per byte of tensor-parallel collectives
    peer_bytes: float  # buffers for each peer of the exchange
    parallel: Parallel
    gpus_per_node: int
    sharded: int = 1  # neighbouring ranks that shard the weights, or 1 if replicated
    evaluation_bytes: float = 0.0  # gathered weights on an embedding rank in evaluation

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimizer state."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def ranks_of_pipeline(self) -> int:
        """Number of ranks of one pipeline, tensor-parallel ranks included."""
        return self.parallel.pipeline * self.parallel.tensor

    def buffers_bytes(self, pipelines: int) -> float:
        """Return NCCL's buffers for the peers in a group of `pipelines`."""
        return (pipelines * self.ranks_of_pipeline - 1) * self.peer_bytes

    def nodes(self, pipelines: int) -> np.ndarray:
        """Return the node of every rank in groups of `pipelines`, int64 [groups, ranks]."""
        return nodes_of_groups(self.parallel, pipelines, self.gpus_per_node)

    def exchange_ms(
        self, pipelines: int, within_bytes: np.ndarray, across_bytes: np.ndarray
    ) -> np.ndarray:
        """Return the time of a feature exchange in groups of `pipelines`, [...].

        A latency per peer, plus the longer of the network's time for bytes between nodes and the
        links' time for others. A measured all-to-all is used for all bytes instead.

        Args:
            within_bytes: exchanged by a rank within its node, [...].
            across_bytes: exchanged by a rank with other nodes, [...].
        """
        is_within = not np.ptp(self.nodes(pipelines), axis=1).any()
        ranks = pipelines * self.ranks_of_pipeline
        place: Place = "node" if is_within else "network"
        measured = collective_line(self.measured, ranks, place, "all_to_all")
        if measured is not None:
            return measured.fixed_ms + measured.each_ms * (within_bytes + across_bytes)
        line = self.within_node if is_within else self.between_nodes
        within_ms = self.within_node.each_ms * within_bytes
        slower_ms = np.maximum(within_ms, line.each_ms * across_bytes)
        return line.fixed_ms * (ranks - 1) + slower_ms

    def item_ms(self, items_per_pass: Mapping[str, int]) -> dict[str, float]:
        """Return time per item by encoder in full passes; no pass constant if `is_of_samples`."""
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
        """Forward plus backward time per squared item, of encoders with `is_of_samples`."""
        return {
            name: float(cost.item_ms[SQUARE])
            for name, cost in self.encoders.items()
            if cost.is_of_samples
        }


def encoders_cost(
    setting: CostSetting, source: CostSource = ANALYTIC, *, sharded: int = 1
) -> EncodersCost:
    """Return costs of data-parallel encoders with weights sharded over `sharded` ranks."""
    model, cluster, parallel = setting.model, setting.cluster, setting.parallel
    precision = setting.precision
    # Encoders are replicated or sharded over all ranks, at tensor size 1.
    copies = Parallel(pipeline=1, data=parallel.world_size, sharded=sharded)
    alone = source.with_rates(replace(setting, parallel=copies, runtime=OWN_RUNTIME))
    whole = source.costs(alone)
    link = None if source.profile is None else source.profile.link
    encoders, units, cost = dict[str, EncoderCost](), list[UnitCost](), whole
    towers = {kind.name: kind.tower for kind in unit_kinds(model)}
    for name in model.encoders:
        names, exchange = [unit for unit in unit_names(model) if towers[unit] == name], None
        if sharded > 1:
            cost, exchange = sharded_cost(whole, names, alone)
        own = [cost.units[unit] for unit in names]
        encoders[name] = _encoder_cost(model, cost, name, own, precision, exchange)
        units += own
    parameters = sum(unit.parameters for unit in units)
    trained = sum(unit.trained_parameters for unit in units)
    whole_bytes = parameters * whole.rates.weight_bytes
    return EncodersCost(
        encoders=encoders,
        weights_bytes=parameters * cost.rates.weight_bytes,
        gradients_bytes=trained * cost.rates.gradient_bytes,
        optimizer_bytes=trained * cost.rates.optimizer_bytes,
        gather_ms=trained * cost.rates.weight_gather_ms,
        reduction_ms=trained * cost.rates.gradient_reduction_ms,
        update_ms=trained * cost.rates.optimizer_ms,
        within_node=link or message_line(cluster, 1, precision),
        between_nodes=message_line(cluster, cluster.gpus_per_node + 1, precision),
        measured=alone.cluster.measured_rates(precision).collectives,
        tensor=pass_line(cluster, Group(parallel.tensor), precision),
        peer_bytes=cluster.peer_bytes,
        parallel=parallel,
        gpus_per_node=cluster.gpus_per_node,
        sharded=sharded,
        evaluation_bytes=whole_bytes if sharded > 1 else 0.0,
    )


def _encoder_cost(
    model: ModelConfig,
    cost: CostModel,
    name: str,
    units: Sequence[UnitCost],
    precision: Precision,
    exchange: ShardedExchange | None,
) -> EncoderCost:
    """Return the summed cost of the `units` of one encoder: embedding, layers and projector."""
    tower = model.encoders[name]
    # Columns of the fixed feature, items and, if items attend to each other, squares.
    squares = [] if tower.squares is None else [tower.squares]
    columns = [0, *(cost.features.index(feature) for feature in (tower.feature, *squares))]
    is_trained = any(unit.has_backward for unit in units)

    def total(name: str) -> np.ndarray:
        return np.sum([getattr(unit, name)[columns] for unit in units], axis=0)

    def again_ms(unit: UnitCost) -> np.ndarray:
        # A frozen unit before trained ones has no recomputation, but its forward repeats.
        return (unit.recompute_ms if unit.has_backward else unit.forward_ms)[columns]

    rows = tower.tokens_per_item * (1 + tower.deepstack_features)
    if exchange is not None:
        exchange = replace(
            exchange,
            forward_ms=exchange.forward_ms[:, columns],
            backward_ms=exchange.backward_ms[:, columns],
            again_ms=np.stack([again_ms(unit) for unit in cost.units.values()]),
        )
    return EncoderCost(
        feature=tower.feature,
        forward_ms=total("forward_ms"),
        backward_ms=total("backward_ms"),
        again_ms=is_trained * np.sum([*map(again_ms, units)], axis=0),
        kept_bytes=total("activation_bytes"),
        working_bytes=np.concatenate(
            [
                unit.transient_bytes[:, columns] + unit.shared_bytes[columns]
                for unit in dict.fromkeys(units)  # layers are one object, with the same moments
            ]
        ),
        input_bytes=FP32_BYTES * tower.values_per_item,
        feature_bytes=float(rows * model.language.hidden_size * ELEMENT_BYTES[precision]),
        is_trained=is_trained,
        exchange=exchange,
    )


def pipeline_cost(cost: CostModel, update_ms: float) -> CostModel:
    """Return costs of the pipeline's units with data-parallel encoders.

    Adds two features that are times, charged to the embedding stage: the wait for encoders before
    the first forward, and their work after the last backward. Item features remain, since inserting
    features into the sequence takes time.

    Args:
        cost: of the full model.
        update_ms: weight update of the encoders, added to every stage's.
    """
    kinds = tuple(kind for kind in cost.kinds if kind.tower == LANGUAGE)
    cost = with_features(cost, ENCODER_WAITS_MS)
    embed = cost.units[LANGUAGE_EMBED]
    embed.forward_ms[-2] = embed.backward_ms[-1] = 1.0
    return replace(
        cost,
        kinds=kinds,
        units={kind.name: cost.units[kind.name] for kind in kinds},
        optimizer_ms_fixed=cost.optimizer_ms_fixed + update_ms,
    )
