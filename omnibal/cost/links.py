"""Times of exchanges between ranks, by how many they are, where they stand, and what was measured.

Within a node a rank sends at the node's rate. A ring that leaves the node goes through the network
adapters of all the ranks that it has in a node, side by side, and is as fast as these together or
as the links within the node, whichever is slower (NCCL lays a ring through each adapter; NCCL's
tests call the rate of a rank in it the bus bandwidth). So a group of neighbours crosses nodes at
eight adapters' rate, and a group with one rank a node at one's. A message between two ranks takes
one adapter.
"""

from dataclasses import dataclass

from omnibal.cost.shaped_rates import Line, exchanged_line, ring_line, send_line
from omnibal.model.config import ClusterConfig, Precision
from omnibal.model.parallel import Parallel
from omnibal.model.rates import Place, RingKind


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that exchange, `stride` apart: Megatron numbers ranks tensor first, then data."""

    ranks: int
    stride: int = 1

    @property
    def consecutive(self) -> int:
        """Consecutive ranks that the group reaches over."""
        return self.ranks * self.stride

    def is_within(self, cluster: ClusterConfig) -> bool:
        """Whether one node holds all of the group."""
        return self.consecutive <= cluster.gpus_per_node

    def place(self, cluster: ClusterConfig) -> Place:
        """Where the group exchanges, as measured rates name it."""
        return "node" if self.is_within(cluster) else "network"


def pass_line(
    cluster: ClusterConfig, group: Group, precision: Precision, kind: RingKind | None = None
) -> Line:
    """Time of a pass round a group's ring, and of a byte that a rank sends in it.

    An all-gather and a reduce-scatter are one pass, an all-reduce is two. Where none was measured,
    a pass takes the latency of a send once. What was measured over the network is taken for every
    group that leaves a node, however many adapters it has.

    Args:
        kind: of the collective, where that is known; None for passes of any.
    """
    if group.ranks == 1:
        return Line(fixed_ms=0, each_ms=0)
    rates = cluster.measured(precision)
    place = group.place(cluster)
    measured = ring_line(rates.collectives, group.ranks, place, kind) if rates else None
    gb_per_s = cluster.intra_node_gb_per_s * cluster.link_efficiency
    if not group.is_within(cluster):
        adapters = max(cluster.gpus_per_node // group.stride, 1)
        gb_per_s = min(gb_per_s, adapters * _adapter_gb_per_s(cluster))
    return measured or Line(fixed_ms=cluster.link_latency_us / 1e3, each_ms=1 / (gb_per_s * 1e6))


def message_line(cluster: ClusterConfig, consecutive_ranks: int, precision: Precision) -> Line:
    """Time of a message between two of so many consecutive ranks, and of a byte of it."""
    rates = cluster.measured(precision)
    place = Group(consecutive_ranks).place(cluster)
    measured = send_line(rates.collectives, place) if rates else None
    within_gb_per_s = cluster.intra_node_gb_per_s * cluster.link_efficiency
    gb_per_s = within_gb_per_s if place == "node" else _adapter_gb_per_s(cluster)
    return measured or Line(fixed_ms=cluster.link_latency_us / 1e3, each_ms=1 / (gb_per_s * 1e6))


def all_to_all_line(cluster: ClusterConfig, group: Group, precision: Precision) -> Line:
    """Time of an all-to-all of a group, and of a byte that a rank sends to the others.

    A tensor goes in equal parts to all ranks, one of them its own. Parts within a node go beside
    those between nodes, and the slower of the two counts; where none was measured, the latency is a
    message's, as ranks send to all others at the same time.
    """
    if group.ranks == 1:
        return Line(fixed_ms=0, each_ms=0)
    rates = cluster.measured(precision)
    place = group.place(cluster)
    measured = exchanged_line(rates.collectives, group.ranks, place) if rates else None
    if measured is not None:
        return measured
    others, neighbours = group.ranks - 1, max(cluster.gpus_per_node // group.stride, 1)
    within = message_line(cluster, 1, precision)
    if group.is_within(cluster):
        return within
    between = message_line(cluster, group.consecutive, precision)
    within_ms = within.each_ms * (neighbours - 1) / others
    between_ms = between.each_ms * (group.ranks - neighbours) / others
    return Line(fixed_ms=between.fixed_ms, each_ms=max(within_ms, between_ms))


def hidden_share(cluster: ClusterConfig, precision: Precision) -> float:
    """Hidden share of a collective beside a computation (`Rates.hidden`): all of it where that was
    not measured."""
    rates = cluster.measured(precision)
    return 1.0 if rates is None or rates.hidden is None else rates.hidden


def ring_ms_per_byte(
    cluster: ClusterConfig, group: Group, precision: Precision, kind: RingKind | None = None
) -> float:
    """Time of a ring reduce-scatter or all-gather, per byte of the whole buffer.

    A ring sends (d - 1) / d of the buffer. The fixed time of a pass comes once a bucket of tens of
    millions of parameters, and is left out.
    """
    return pass_line(cluster, group, precision, kind).each_ms * (group.ranks - 1) / group.ranks


def state_group(parallel: Parallel) -> Group:
    """The data-parallel ranks of a stage that divide the optimizer's state of all but experts:
    those that divide weights too, or all."""
    if parallel.sharded > 1:
        return shard_group(parallel)
    return Group(parallel.data, stride=parallel.tensor)


def expert_state_group(parallel: Parallel) -> Group:
    """The ranks of a stage that divide the optimizer's state of experts, of which they hold the
    same ones: those that divide the weights too, or all."""
    ranks = parallel.expert_shards if parallel.sharded > 1 else parallel.expert_data
    return Group(ranks, stride=parallel.expert)


def shard_group(parallel: Parallel) -> Group:
    """The data-parallel ranks of a stage that divide its weights among them."""
    return Group(parallel.sharded, stride=parallel.tensor)


def shard_copies(parallel: Parallel) -> Group:
    """The ranks of a stage that hold the same part of divided weights."""
    stride = parallel.tensor * parallel.sharded
    return Group(parallel.data // parallel.sharded, stride=stride)


def expert_shard_copies(parallel: Parallel) -> Group:
    """The ranks of a stage that hold the same part of divided experts."""
    stride = max(parallel.tensor * parallel.sharded, parallel.expert)
    return Group(parallel.expert_data // parallel.expert_shards, stride=stride)


def _adapter_gb_per_s(cluster: ClusterConfig) -> float:
    return cluster.inter_node_gb_per_s * cluster.network_share
