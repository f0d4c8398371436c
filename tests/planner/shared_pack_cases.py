"""Steps with packs shared by ranks, run by an event queue."""

import heapq

import numpy as np

Step = list[tuple[int, int]]
"""Context size and number of ranks of every slot of a step; only the first ranks take part."""


def random_step(rng: np.random.Generator, ranks: int) -> Step:
    """Return full slots, then slots with ever fewer ranks, as in plans."""
    sizes = [size for size in (1, 2, 4, 8) if size <= ranks]
    step = [(int(rng.choice(sizes)), ranks) for _ in range(rng.integers(1, 6))]
    left = ranks
    for _ in range(rng.integers(0, 3)):
        size = int(rng.choice([size for size in sizes if size <= left]))
        left = size * int(rng.integers(1, left // size + 1))
        step.append((size, left))
    return step


def contexts_of(step: Step, ranks: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every slot's context [ranks, slots], and the number of slots [ranks]."""
    context, counts = np.ones((ranks, slots), int), np.zeros(ranks, int)
    for slot, (size, present) in enumerate(step):
        context[:present, slot] = size
        counts[:present] += 1
    return context, counts


def joint_event_loop(
    forward_ms: np.ndarray,
    backward_ms: np.ndarray,
    forward_link_ms: np.ndarray,
    backward_link_ms: np.ndarray,
    context: np.ndarray,
    counts: np.ndarray,
) -> np.ndarray:
    """Return ends of all passes, [2, ranks, m, p], of ranks that wait for each other.

    A stage that reaches a pass of a shared micro-batch waits for the same stage of all ranks of
    the block. All run it for as long as the slowest needs.

    Args:
        context: size of the block, [ranks, m], or [ranks, m, p] if it depends on the stage.
    """
    context = np.broadcast_to(context.reshape(*context.shape[:2], -1), forward_ms.shape)
    ranks, m, p = forward_ms.shape
    took = {0: forward_ms, 1: backward_ms}
    ends = np.full((2, ranks, m, p), np.nan)
    arrived = np.zeros((2, ranks, m, p), bool)
    arrived[0, :, :, 0] = arrived[1, :, :, -1] = True
    started, finished = np.zeros((2, ranks, p), int), np.zeros((ranks, p), int)
    busy = np.zeros((ranks, p), bool)
    queue = [(0.0, "look", 0, rank, 0, stage) for rank in range(ranks) for stage in range(p)]

    def next_pass(rank: int, stage: int) -> tuple[int, int] | None:
        """Return (direction, micro-batch) of the stage's next pass, or None if it cannot start."""
        in_flight = started[0, rank, stage] - finished[rank, stage]
        direction = int(started[0, rank, stage] == counts[rank] or in_flight == p - stage)
        i = started[direction, rank, stage]
        can = not busy[rank, stage] and i < counts[rank] and arrived[direction, rank, i, stage]
        return (direction, i) if can else None

    while queue:
        now, event, direction, rank, i, stage = heapq.heappop(queue)
        if event == "end":
            busy[rank, stage] = False
            ends[direction, rank, i, stage] = now
            finished[rank, stage] += direction
            neighbour = stage - 1 if direction else stage + 1
            link = backward_link_ms if direction else forward_link_ms
            if 0 <= neighbour < p:
                arrival = now + link[rank, i, min(stage, neighbour)]
                heapq.heappush(queue, (arrival, "arrive", direction, rank, i, neighbour))
        elif event == "arrive":
            arrived[direction, rank, i, stage] = True
        wanted = next_pass(rank, stage)
        if wanted is None:
            continue
        direction, i = wanted
        size = context[rank, i, stage]
        block = range(rank - rank % size, rank - rank % size + size)
        if any(next_pass(member, stage) != wanted for member in block):
            continue
        end = now + max(took[direction][member, i, stage] for member in block)
        for member in block:
            started[direction, member, stage] += 1
            busy[member, stage] = True
            heapq.heappush(queue, (end, "end", direction, member, i, stage))
    return ends
