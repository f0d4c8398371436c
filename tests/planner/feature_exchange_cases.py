"""Times of passes of encoders and of an exchange of features, one by one."""

from collections.abc import Iterable

import numpy as np
from exchange_cases import simulated_ms

from omnibal.cost.encoder_phase import EncoderCost, EncodersCost


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


Passes = dict[bool, list[tuple[int, ...]]]
"""Items of passes and, of whole samples, their squares: kept ones, and those that run again."""


def equal_passes(items: int, a_pass: int, kept: int) -> Passes:
    """Passes of so many items, of which some are kept."""
    found: Passes = {}
    for is_kept, left in ((True, min(items, kept)), (False, max(items - kept, 0))):
        whole, rest = divmod(left, a_pass)
        found[is_kept] = [(a_pass,)] * whole + [(rest,)] * (rest > 0)
    return found


def lockstep_ms(cost: EncoderCost, ranks: list[Passes]) -> np.ndarray:
    """Forward and backward of ranks whose passes begin and end together, each as long as one with
    the most items and squares of any of them."""
    total = np.zeros(2)
    for is_kept in (True, False):
        for number in range(max(len(passes[is_kept]) for passes in ranks)):
            there = [p[is_kept][number] for p in ranks if number < len(p[is_kept])]
            most = tuple(int(each) for each in np.max(there, axis=0))
            total += pass_ms(cost, most, is_kept=is_kept)
    return total


def pass_ms(cost: EncoderCost, work: tuple[int, ...], *, is_kept: bool) -> tuple[float, float]:
    """Forward and backward of a pass, unit by unit beside what its ranks exchange, if they do.

    Args:
        work: items and, of whole samples, their squares.
    """
    one, again = np.array([1, *work]), 0.0 if is_kept else 1.0
    if cost.exchange is None:
        return float(one @ cost.forward_ms), float(one @ (cost.backward_ms + again * cost.again_ms))
    units, second = cost.exchange.of_pass, cost.exchange.of_second
    row = np.zeros(units.forward_ms.shape[1])
    row[list(cost.exchange.columns)] = one
    order = list(units.sequence)
    turned, nothing = order[::-1], [0.0] * len(order)
    forward_ms = simulated_ms((units.forward_ms @ row)[order], units.gather_ms[order], nothing)
    if not cost.is_trained:
        return forward_ms, 0.0
    gathers, again_ms = units.gather_back_ms[turned].copy(), 0.0
    if not is_kept:
        gathers[0] = 0
        again_ms = simulated_ms((second.forward_ms @ row)[order], units.gather_ms[order], nothing)
    backward_ms = simulated_ms((units.backward_ms @ row)[turned], gathers, units.reduce_ms[turned])
    return forward_ms, again_ms + backward_ms
