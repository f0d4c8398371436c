"""Times of exchange between ranks, by group size, placement and measurements.

Within a node a rank sends at the node's rate. A ring across nodes uses the network adapters of all
its ranks in a node in parallel (NCCL builds a ring per adapter), limited by the links within the
node. A message between two ranks uses one adapter.
"""

from dataclasses import replace

from omnibal.cost.shaped_rates import LinearTime, collective_line
from omnibal.model.config import ClusterConfig, Precision
from omnibal.model.parallel import Group
from omnibal.model.rate_tables import RingKind
from omnibal.model.runtime import Dispatcher


def pass_line(
    cluster: ClusterConfig,
    group: Group,
    precision: Precision,
    kind: RingKind | None = None,
    *,
    blocking: bool = False,
) -> LinearTime:
    """Return the latency of a ring pass, and the time per byte that a rank sends.

    An all-gather or a reduce-scatter is one pass, an all-reduce two.

    Args:
        kind: of the collective, or None for any.
        blocking: whether the next kernel waits for it, so that its chunks are not pipelined.
    """
    if group.ranks == 1:
        return LinearTime(fixed_ms=0, each_ms=0)
    known, place = cluster.measured_rates(precision).collectives, group.place(cluster)
    measured = collective_line(known, group.ranks, place, kind)
    gb_per_s = cluster.intra_node_gb_per_s * cluster.link_efficiency
    if not group.is_within(cluster):
        # NCCL builds a ring per adapter of the group's ranks in a node.
        adapters = max(cluster.gpus_per_node // group.stride, 1)
        gb_per_s = min(gb_per_s, adapters * _adapter_gb_per_s(cluster))
    latency_ms = cluster.link_latency_us / 1e3
    fixed_ms = max(latency_ms, hops_ms(cluster, group))
    if blocking and place == "network":  # every hop waits for a message
        fixed_ms = latency_ms * (group.ranks - 1)
    return measured or LinearTime(fixed_ms=fixed_ms, each_ms=1 / (gb_per_s * 1e6))


def message_line(
    cluster: ClusterConfig, consecutive_ranks: int, precision: Precision
) -> LinearTime:
    """Return latency and time per byte of a message within a span of `consecutive_ranks`."""
    place = Group(consecutive_ranks).place(cluster)
    measured = collective_line(cluster.measured_rates(precision).collectives, 2, place, "send")
    within_gb_per_s = cluster.intra_node_gb_per_s * cluster.link_efficiency
    gb_per_s = within_gb_per_s if place == "node" else _adapter_gb_per_s(cluster)
    return measured or LinearTime(
        fixed_ms=cluster.link_latency_us / 1e3, each_ms=1 / (gb_per_s * 1e6)
    )


def all_to_all_line(
    cluster: ClusterConfig,
    group: Group,
    precision: Precision,
    *,
    copies: int = 1,
    dispatcher: Dispatcher = "alltoall",
) -> LinearTime:
    """Return an all-to-all's latency, and time per byte of all copies for other ranks.

    Args:
        copies: experts per token, assumed on random ranks.
        dispatcher: "flex" sends a token once per rank, and over the network once per node (DeepEP,
            HybridEP); "allgather" sends all tokens to all ranks.
    """
    if group.ranks == 1:
        return LinearTime(fixed_ms=0, each_ms=0)
    if dispatcher == "allgather":
        line = pass_line(cluster, group, precision, "all_gather")
        return replace(line, each_ms=line.each_ms * group.ranks / copies)
    known, place = cluster.measured_rates(precision).collectives, group.place(cluster)
    measured = collective_line(known, group.ranks, place, "all_to_all")
    if measured is not None:
        return measured

    def sent_share(places: int) -> float:
        """Return the share of copies sent: 1, or less if flex sends a token once per place."""
        # Expected number of distinct places of `copies` random choices, over `copies`.
        return (1 - (1 - 1 / places) ** copies) * places / copies if dispatcher == "flex" else 1.0

    others, neighbours = group.ranks - 1, max(cluster.gpus_per_node // group.stride, 1)
    within = message_line(cluster, 1, precision)
    within = replace(within, each_ms=within.each_ms * sent_share(group.ranks))
    if group.is_within(cluster):
        return within
    between = message_line(cluster, group.ranks * group.stride, precision)
    within_ms = within.each_ms * (neighbours - 1) / others
    between_ms = between.each_ms * (group.ranks - neighbours) / others
    between_ms *= sent_share(-(-group.ranks // neighbours))
    # Links and network work at the same time.
    return LinearTime(fixed_ms=between.fixed_ms, each_ms=max(within_ms, between_ms))


def ring_ms_per_byte(
    cluster: ClusterConfig,
    group: Group,
    precision: Precision,
    kind: RingKind | None = None,
    bucket_bytes: int | None = None,
) -> float:
    """Return the time of a ring reduce-scatter or all-gather per byte of the full buffer.

    A ring of d ranks sends (d - 1) / d of the buffer in d - 1 hops. Their latency counts for small
    buckets only, of `bucket_bytes`.
    """
    sent_ms = pass_line(cluster, group, precision, kind).each_ms * (group.ranks - 1) / group.ranks
    return sent_ms + (0 if bucket_bytes is None else hops_ms(cluster, group) / bucket_bytes)


def hops_ms(cluster: ClusterConfig, group: Group) -> float:
    """Return the latency of all hops of a ring across nodes, or 0 within a node."""
    return 0.0 if group.is_within(cluster) else (group.ranks - 1) * cluster.hop_us / 1e3


def _adapter_gb_per_s(cluster: ClusterConfig) -> float:
    return cluster.inter_node_gb_per_s * (cluster.network_efficiency or cluster.link_efficiency)
