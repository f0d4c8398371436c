"""The time of an exchange of features, message by message."""

from collections.abc import Iterable

import numpy as np

from omnibal.cost.encoder_phase import EncodersCost


def node_of(cost: EncodersCost, pipelines: int, block: int, number: int) -> int:
    """Node of a rank of a group, by its number: pipeline, stage, tensor."""
    sizes, of_pipeline = cost.parallel, cost.ranks_of_pipeline
    data_rank = block * pipelines + number // of_pipeline
    stage, shard = divmod(number % of_pipeline, sizes.tensor)
    return ((stage * sizes.data + data_rank) * sizes.tensor + shard) // cost.gpus_per_node


def messages_ms(
    cost: EncodersCost, pipelines: int, block: int, moved: Iterable[tuple[int, int, float]]
) -> float:
    """Time of messages within a node beside those between nodes, of source, target and bytes."""
    size = pipelines * cost.ranks_of_pipeline
    sent, received = np.zeros((2, size)), np.zeros((2, size))
    for source, target, bytes_ in moved:
        nodes = {node_of(cost, pipelines, block, each) for each in (source, target)}
        if source != target:
            sent[len(nodes) - 1, source] += bytes_
            received[len(nodes) - 1, target] += bytes_
    within, across = np.maximum(sent, received).max(axis=1)
    blocks = range(cost.parallel.data // pipelines)
    is_within = all(
        len({node_of(cost, pipelines, each, number) for number in range(size)}) == 1
        for each in blocks
    )
    line = cost.within_node if is_within else cost.between_nodes
    slower_ms = max(cost.within_node.each_ms * within, cost.between_nodes.each_ms * across)
    return line.fixed_ms * (size - 1) + slower_ms
