"""Times of encoder passes and of a feature exchange, one by one."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product

import numpy as np
from encoder_cases import choice_of
from exchange_cases import simulated_ms

from omnibal.cost.encoder_phase_costs import EncoderCost, EncodersCost
from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.pipeline.encoder_search import PlacementProblem, kept_choices
from omnibal.pipeline.encoder_waits import ItemShares


def random_choice(
    rng, costs: Mapping[int, EncodersCost], below: Mapping[str, tuple[int, int]]
) -> DataParallelEncoders:
    """Return random passes and kept items below these limits, with times unlike the costs'."""
    cost = next(iter(costs.values()))
    size = cost.parallel.data
    sizes = {name: int(rng.integers(1, below[name][0])) for name in cost.encoders}
    return DataParallelEncoders(
        pipelines=int(rng.choice([each for each in range(1, size + 1) if size % each == 0])),
        items_per_pass=sizes,
        kept_items={name: int(rng.integers(0, below[name][1])) for name in sizes},
        item_ms={name: ms * rng.uniform(0.3, 3) for name, ms in cost.item_ms(sizes).items()},
        square_ms=cost.square_ms,
        sharded=int(rng.choice(list(costs))),
    )


def every_choice(problem: PlacementProblem, fewest: int = 1) -> Iterator[DataParallelEncoders]:
    """Yield every choice of the search, with passes of at least `fewest` items."""
    cost = problem.any_encoders
    none = dict.fromkeys(cost.encoders, 0)
    square_ms = {name: round(ms, 12) for name, ms in cost.square_ms.items()}
    for pipelines in (1, 2):
        for a_pass in (fewest * 2**power for power in range(5)):
            item_ms = cost.item_ms(dict.fromkeys(none, a_pass))
            rounded = {name: round(ms, 6) for name, ms in item_ms.items()}
            choice = choice_of(pipelines, a_pass, none, item_ms=rounded, square_ms=square_ms)
            workload = problem.task.workload
            most = ItemShares.build(workload, problem.features, cost, choice).max_items()
            if a_pass >= 2 * max(fewest, *most.values()):
                break
            for kept, sharded in product(kept_choices(cost, most), problem.encoders):
                yield choice.model_copy(update={"kept_items": kept, "sharded": sharded})


def ranks_of_group(cost: EncodersCost, pipelines: int, block: int) -> np.ndarray:
    """Return the job's ranks in a group, by pipeline, stage, tensor."""
    sizes = cost.parallel
    found = [
        (stage * sizes.data + block * pipelines + pipeline) * sizes.tensor + shard
        for pipeline in range(pipelines)
        for stage in range(sizes.pipeline)
        for shard in range(sizes.tensor)
    ]
    return np.array(found)


def messages_ms(
    cost: EncodersCost, pipelines: int, block: int, moved: Iterable[tuple[int, int, float]]
) -> float:
    """Return ms of (source, target, bytes) messages, intra-node next to inter-node."""
    groups = range(cost.parallel.data // pipelines)
    node = [ranks_of_group(cost, pipelines, each) // cost.gpus_per_node for each in groups]
    size = pipelines * cost.ranks_of_pipeline
    sent, received = np.zeros((2, size)), np.zeros((2, size))
    for source, target, bytes_ in moved:
        is_across = int(node[block][source] != node[block][target])
        if source != target:
            sent[is_across, source] += bytes_
            received[is_across, target] += bytes_
    within, across = np.maximum(sent, received).max(axis=1)
    line = cost.between_nodes if np.ptp(node, axis=1).any() else cost.within_node
    slower_ms = max(cost.within_node.each_ms * within, cost.between_nodes.each_ms * across)
    return line.fixed_ms * (size - 1) + slower_ms


Passes = dict[bool, list[tuple[int, ...]]]
"""Items of kept and of rerun passes; for full samples, also their squares."""


def equal_passes(choice: DataParallelEncoders, name: str, items: int) -> Passes:
    """Return passes of `items` items of an encoder."""
    a_pass, kept = choice.items_per_pass[name], choice.kept_items[name]
    found: Passes = {}
    for is_kept, left in ((True, min(items, kept)), (False, max(items - kept, 0))):
        whole, rest = divmod(left, a_pass)
        found[is_kept] = [(a_pass,)] * whole + [(rest,)] * (rest > 0)
    return found


def ranks_ms(
    cost: EncodersCost, pipelines: int, passes: Mapping[str, list[list[Passes]]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return forward and backward ms, [groups, ranks of a group, 2], from passes by encoder, group
    and rank; and again as if all ranks of a block were equally busy."""
    groups = cost.parallel.data // pipelines
    order = [ranks_of_group(cost, pipelines, block).tolist() for block in range(groups)]
    place = {rank: (b, n) for b, group in enumerate(order) for n, rank in enumerate(group)}
    found, alone = np.zeros((2, groups, pipelines * cost.ranks_of_pipeline, 2))
    for first, (name, one) in product(range(0, len(place), cost.sharded), cost.encoders.items()):
        places = [place[rank] for rank in range(first, first + cost.sharded)]
        own = [passes[name][block][number] for block, number in places]
        silent = replace(one, exchange=None)
        together = lockstep_ms(one, own)
        exposed = together - lockstep_ms(silent, own)
        for at, of_rank in zip(places, own, strict=True):
            found[at] += together
            alone[at] += exposed + lockstep_ms(silent, [of_rank])
    return found, alone


def lockstep_ms(cost: EncoderCost, ranks: list[Passes]) -> np.ndarray:
    """Return forward and backward ms of ranks in lockstep, by each pass's largest rank."""
    total = np.zeros(2)
    for is_kept in (True, False):
        for number in range(max(len(passes[is_kept]) for passes in ranks)):
            there = [p[is_kept][number] for p in ranks if number < len(p[is_kept])]
            most = tuple(int(each) for each in np.max(there, axis=0))
            total += pass_ms(cost, most, is_kept=is_kept)
    return total


def pass_ms(cost: EncoderCost, work: tuple[int, ...], *, is_kept: bool) -> tuple[float, float]:
    """Return forward and backward ms of a pass of items (and squares of full samples), unit by
    unit, with its ranks' exchange if any."""
    one, again = np.array([1, *work]), 0.0 if is_kept else 1.0
    if cost.exchange is None:
        return float(one @ cost.forward_ms), float(one @ (cost.backward_ms + again * cost.again_ms))
    units = cost.exchange
    order = list(units.sequence)
    turned, nothing = order[::-1], [0.0] * len(order)
    forward_ms = simulated_ms((units.forward_ms @ one)[order], units.gather_ms[order], nothing)
    if not cost.is_trained:
        return forward_ms, 0.0
    gathers, again_ms = units.gather_back_ms[turned].copy(), 0.0
    if not is_kept:
        gathers[0] = 0
        again_ms = simulated_ms((units.again_ms @ one)[order], units.gather_ms[order], nothing)
    backward_ms = simulated_ms((units.backward_ms @ one)[turned], gathers, units.reduce_ms[turned])
    return forward_ms, again_ms + backward_ms
