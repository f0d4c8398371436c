"""Dealing: which rank and slot every pack of a step runs in.

Steps of equally many packs are dealt side by side.
"""

import numpy as np


def deal_apart(rows: np.ndarray, items: np.ndarray, load: np.ndarray, dp: int) -> np.ndarray:
    """Deal packs of steps to ranks that wait for each other only when a step ends.

    In rounds of one per rank, of most items and load first, each round's heaviest pack to the rank
    with the least load so far; a rank runs its lightest packs first and last.

    Args:
        rows: packs of steps of equal size, [steps, packs]; the other two are of all packs, [packs].

    Returns:
        Packs of every rank, [steps, dp, slots]; -1 behind a rank's last one.
    """
    steps, size = rows.shape
    slots = -(-size // dp)
    most_first = np.lexsort((-load[rows], -items[rows]), axis=1)
    rounds = np.full((steps, slots * dp), -1)
    rounds[:, :size] = np.take_along_axis(rows, most_first, axis=1)
    by_rank = np.empty((steps, slots, dp), np.int64)
    rank_load = np.zeros((steps, dp))
    for number, drawn in enumerate(rounds.reshape(steps, slots, dp).swapaxes(0, 1)):
        heaviest_first = np.argsort(
            np.where(drawn < 0, np.inf, -load[drawn]), axis=1, kind="stable"
        )
        lightest_rank_first = np.argsort(rank_load, axis=1, kind="stable")
        dealt = np.take_along_axis(drawn, heaviest_first, axis=1)
        np.put_along_axis(by_rank[:, number], lightest_rank_first, dealt, axis=1)
        given = by_rank[:, number]
        rank_load += np.where(given < 0, 0.0, load[given])
    by_rank = by_rank.swapaxes(1, 2)
    # Empty places are the lightest here, and then come last in the order too.
    weight = np.where(by_rank < 0, -np.inf, load[by_rank])
    by_rank = np.take_along_axis(by_rank, np.argsort(-weight, axis=2, kind="stable"), axis=2)
    ordered = by_rank[:, :, lightest_at_the_ends(slots)]
    return np.take_along_axis(ordered, np.argsort(ordered < 0, axis=2, kind="stable"), axis=2)


def deal_in_lockstep(
    rows: np.ndarray, items: np.ndarray, load: np.ndarray, dp: int, lockstep_ranks: int
) -> np.ndarray:
    """Deal packs of steps to ranks of which neighbours run every slot in lockstep.

    A slot takes as long as the slowest rank of its group. So in rounds of one per rank, of most
    items and load first, packs of equal load go to a group together, the heaviest to the group with
    the least load so far. Rounds are slots, light ones first and last; the one that is not full is
    the last, and in as few groups as it can be.

    Args:
        rows: packs of steps of equal size, [steps, packs]; the next two are of all packs, [packs].
        lockstep_ranks: neighbouring ranks that run in lockstep, a divisor of `dp`.

    Returns:
        Packs of every rank, [steps, dp, slots]; -1 behind a rank's last one.
    """
    steps, size = rows.shape
    slots, groups = -(-size // dp), dp // lockstep_ranks
    most_first = np.lexsort((-load[rows], -items[rows]), axis=1)
    rounds = np.full((steps, slots * dp), -1)
    rounds[:, :size] = np.take_along_axis(rows, most_first, axis=1)
    by_group = np.empty((steps, slots, groups, lockstep_ranks), np.int64)
    group_load, round_load = np.zeros((steps, groups)), np.zeros((steps, slots))
    for number, drawn in enumerate(rounds.reshape(steps, slots, dp).swapaxes(0, 1)):
        drawn_load = np.where(drawn < 0, 0.0, load[drawn])
        order = np.argsort(np.where(drawn < 0, np.inf, -drawn_load), axis=1, kind="stable")
        chunks = np.take_along_axis(drawn, order, axis=1).reshape(steps, groups, lockstep_ranks)
        chunk_load = np.take_along_axis(drawn_load, order, axis=1)[:, ::lockstep_ranks]
        least_first = np.argsort(group_load, axis=1, kind="stable")
        np.put_along_axis(by_group[:, number], least_first[..., None], chunks, axis=1)
        given = np.zeros_like(group_load)
        np.put_along_axis(given, least_first, chunk_load, axis=1)
        group_load += given
        round_load[:, number] = chunk_load[:, 0]
    if size % dp:
        round_load[:, -1] = -np.inf
    full = size // dp
    heaviest_first = np.argsort(-round_load, axis=1, kind="stable")
    slot = np.append(lightest_at_the_ends(full), np.arange(full, slots))
    by_group = np.take_along_axis(by_group, heaviest_first[:, slot, None, None], axis=1)
    return by_group.reshape(steps, slots, dp).swapaxes(1, 2)


def lightest_at_the_ends(count: int) -> np.ndarray:
    """Order of `count` things, given from heavy to light, that rises in weight and then falls.

    Example:
        >>> lightest_at_the_ends(5).tolist()
        [4, 2, 0, 1, 3]
    """
    lightest_first = np.arange(count)[::-1]
    return np.concatenate([lightest_first[0::2], lightest_first[1::2][::-1]])
