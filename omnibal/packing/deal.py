"""Rank and slot of every pack of a step. Steps of equal size are dealt at once, as arrays."""

from itertools import chain

import numpy as np

_MAX_EXCHANGES = 400  # swaps of `deal_by_speed` per step
_MAX_COMPARISONS = 600_000_000  # over all steps, about ten seconds on one core
_ENTRIES_AT_ONCE = 2_000_000  # comparisons at once, to bound memory to 100 MB
_MIN_GAIN = 1e-9  # min relative gain in time of an exchange


def deal_in_rounds(
    rows: np.ndarray, items: np.ndarray, load: np.ndarray, dp: int, lockstep_ranks: int = 1
) -> np.ndarray:
    """Deal packs of steps in rounds of one pack per rank, by descending items, then load.

    In a round, neighbours in lockstep get packs of similar load; the heaviest go to the group with
    minimal load so far (a group takes the load of its heaviest pack). Without lockstep, ranks run
    their lightest packs first and last. With it, rounds become slots: light rounds first and last,
    but an incomplete round last of all and on as few groups as possible.

    Args:
        rows: packs of steps of equal size, [steps, packs].
        items: of all packs, like `load`, [all packs].
        lockstep_ranks: neighbouring ranks in lockstep, a divisor of `dp`.

    Returns:
        Packs of every rank, [steps, dp, slots], padded with -1.
    """
    (steps, size), groups = rows.shape, dp // lockstep_ranks
    slots = -(-size // dp)
    most_first = np.lexsort((-load[rows], -items[rows]), axis=1)
    rounds = np.full((steps, slots * dp), -1)  # packs in rounds of dp; -1 pads the last
    rounds[:, :size] = np.take_along_axis(rows, most_first, axis=1)
    by_group = np.empty((steps, slots, groups, lockstep_ranks), np.int64)
    group_load, round_load = np.zeros((steps, groups)), np.zeros((steps, slots))
    for number, drawn in enumerate(rounds.reshape(steps, slots, dp).swapaxes(0, 1)):
        drawn_load = np.where(drawn < 0, 0.0, load[drawn])
        order = np.argsort(np.where(drawn < 0, np.inf, -drawn_load), axis=1, kind="stable")
        chunks = np.take_along_axis(drawn, order, axis=1).reshape(steps, groups, lockstep_ranks)
        chunk_load = np.take_along_axis(drawn_load, order, axis=1)[:, ::lockstep_ranks]
        lightest_first = np.argsort(group_load, axis=1, kind="stable")
        np.put_along_axis(by_group[:, number], lightest_first[..., None], chunks, axis=1)
        added = np.zeros_like(group_load)
        np.put_along_axis(added, lightest_first, chunk_load, axis=1)
        group_load += added
        round_load[:, number] = chunk_load[:, 0]
    if lockstep_ranks == 1:
        return _lightest_first_and_last(by_group[..., 0].swapaxes(1, 2), load)
    full = size // dp
    if size % dp:
        round_load[:, -1] = -np.inf
    heaviest_first = np.argsort(-round_load, axis=1, kind="stable")
    slot = np.append(lightest_at_the_ends(full), np.arange(full, slots))
    by_group = np.take_along_axis(by_group, heaviest_first[:, slot, None, None], axis=1)
    return by_group.reshape(steps, slots, dp).swapaxes(1, 2)


def deal_by_speed(
    rows: np.ndarray, load: np.ndarray, slowness: np.ndarray, most: int
) -> np.ndarray:
    """Deal packs of steps to ranks of unequal speed that synchronize only at the end of a step.

    Longest processing time first on uniform machines (Gonzalez et al. 1977, SIAM J. Comput. 6,
    155-166), with at least one pack per rank. Then the last rank to finish swaps or gives away
    packs while that lowers the step's time.

    Args:
        rows: packs of steps of equal size, [steps, packs].
        load: of all packs, [all packs].
        slowness: time per load of every rank, relative to the fastest, [dp].
        most: max packs per rank.

    Returns:
        Packs of every rank, [steps, dp, slots], padded with -1.
    """
    order = np.argsort(-load[rows], axis=1, kind="stable")
    rows = np.take_along_axis(rows, order, axis=1)
    steps, dp = len(rows), len(slowness)
    rank = _assign_longest_first(load[rows], slowness, most)
    # An exchange compares up to `most` packs of the last rank with all others.
    exchanges = min(_MAX_COMPARISONS // (most * rows.size), _MAX_EXCHANGES)
    at_once = max(_ENTRIES_AT_ONCE // (most * rows.shape[1]), 1)
    for first in range(0, steps, at_once):
        active = np.arange(first, min(first + at_once, steps))
        for _ in range(exchanges):
            changed, is_better = _exchange_packs(rank[active], load[rows[active]], slowness, most)
            rank[active], active = changed, active[is_better]
            if not len(active):
                break
    by_rank = np.full((steps, dp, min(most, rows.shape[1])), -1)
    counts, all_steps = np.zeros((steps, dp), np.int64), np.arange(steps)
    for drawn, of_drawn in zip(rows.T, rank.T, strict=True):
        by_rank[all_steps, of_drawn, counts[all_steps, of_drawn]] = drawn
        counts[all_steps, of_drawn] += 1
    return _lightest_first_and_last(by_rank[:, :, : counts.max()], load)


def _assign_longest_first(load: np.ndarray, slowness: np.ndarray, most: int) -> np.ndarray:
    """Return the rank of every pack, [steps, packs], for loads in descending order."""
    steps, size = load.shape
    rank, all_steps = np.empty((steps, size), np.int64), np.arange(steps)
    counts, rank_load = np.zeros((steps, len(slowness)), np.int64), np.zeros((steps, len(slowness)))
    for place in range(size):
        finish = (rank_load + load[:, place, None]) * slowness  # [steps, dp]
        is_empty = counts == 0
        # The packs left are just enough for the ranks without one.
        is_reserved = (is_empty.sum(axis=1) >= size - place)[:, None] & ~is_empty
        chosen = np.where((counts >= most) | is_reserved, np.inf, finish).argmin(axis=1)
        rank[:, place] = chosen
        counts[all_steps, chosen] += 1
        rank_load[all_steps, chosen] += load[:, place]
    return rank


def _exchange_packs(
    rank: np.ndarray, load: np.ndarray, slowness: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Swap or give away a pack of the last rank to finish, in every step that this shortens.

    Ranks and loads of packs are [steps, packs]. Returns the new ranks, and whether each step
    improved, bool [steps].
    """
    steps, size = rank.shape
    dp, all_steps = len(slowness), np.arange(steps)
    place = (rank + all_steps[:, None] * dp).ravel()
    counts = np.bincount(place, minlength=steps * dp).reshape(steps, dp)
    rank_load = np.bincount(place, load.ravel(), steps * dp).reshape(steps, dp)
    last = (rank_load * slowness).argmax(axis=1)  # last rank to finish, [steps]
    last_load, last_slow = rank_load[all_steps, last], slowness[last]
    given = np.argsort(rank != last[:, None], axis=1, kind="stable")[:, :most]  # its packs first
    # Append an empty pack per rank, so that giving away is a swap.
    with_none = np.concatenate([load, np.zeros((steps, dp))], axis=1)
    holder = np.concatenate([rank, np.broadcast_to(np.arange(dp), (steps, dp))], axis=1)
    # Load that moves off the last rank, [steps, given, taken], and the later finish of both ranks.
    moved = np.take_along_axis(load, given, axis=1)[:, :, None] - with_none[:, None, :]
    holder_load = np.take_along_axis(rank_load, holder, axis=1)[:, None]
    finish = np.maximum(
        (last_load[:, None, None] - moved) * last_slow[:, None, None],
        (holder_load + moved) * slowness[holder][:, None],
    )
    # No swap within the last rank, above the max packs, or that takes a rank's only pack.
    is_barred = holder == last[:, None]
    is_barred[:, size:] |= (counts >= most) | (counts[all_steps, last] < 2)[:, None]
    is_other = np.take_along_axis(rank, given, axis=1) != last[:, None]  # padding of `given`
    finish[is_other[:, :, None] | is_barred[:, None, :]] = np.inf
    best = finish.reshape(steps, -1).argmin(axis=1)
    given_pack, taken_pack = given[all_steps, best // (size + dp)], best % (size + dp)
    better = finish.reshape(steps, -1)[all_steps, best] < last_load * last_slow * (1 - _MIN_GAIN)
    changed = rank.copy()
    changed[all_steps[better], given_pack[better]] = holder[all_steps, taken_pack][better]
    swapped = better & (taken_pack < size)
    changed[all_steps[swapped], taken_pack[swapped]] = last[swapped]
    return changed, better


def _lightest_first_and_last(by_rank: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Sort the packs of every rank, [steps, dp, slots], lightest first and last, then padding."""
    # Empty places count as lightest, and are moved to the end below.
    weight = np.where(by_rank < 0, -np.inf, load[by_rank])
    by_rank = np.take_along_axis(by_rank, np.argsort(-weight, axis=2, kind="stable"), axis=2)
    ordered = by_rank[:, :, lightest_at_the_ends(by_rank.shape[2])]
    return np.take_along_axis(ordered, np.argsort(ordered < 0, axis=2, kind="stable"), axis=2)


def lightest_at_the_ends(count: int) -> np.ndarray:
    """Return the order of `count` elements, given heaviest first, that ascends and then descends.

    Example:
        >>> lightest_at_the_ends(5).tolist()
        [4, 2, 0, 1, 3]
    """
    lightest_first = np.arange(count)[::-1]
    return np.concatenate([lightest_first[0::2], lightest_first[1::2][::-1]])


def deal_rows(
    context: np.ndarray, items: np.ndarray, load: np.ndarray, ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Deal packs of several context-parallel sizes to data-parallel ranks.

    Packs of one size are dealt in rows by descending items and load, each row's heaviest pack to
    the block of ranks with minimal load so far. Rows of the largest size come first, so that no
    block waits for a rank's unshared pack. The first and last rows are light, as other stages idle
    during pipeline fill and drain.

    Args:
        context: context-parallel sizes, equal in all steps, divisors of `ranks`, [packs].
        items: of each pack, [steps, packs].
        load: of each pack per rank, [steps, packs].

    Returns:
        First rank of every pack's block, and its slot, [steps, packs].
    """
    rank, slot = np.empty_like(items), np.empty_like(items)
    rank_load = np.zeros((len(load), ranks))
    full: list[list[np.ndarray]] = []  # rows for all ranks, by size
    partial: list[tuple[int, np.ndarray]] = []  # negative number of ranks, and the row
    for size in np.unique(context)[::-1].tolist():  # largest context first
        packs = np.flatnonzero(context == size)
        order = np.lexsort((-load[:, packs], -items[:, packs]), axis=1)
        packs, width = packs[order], ranks // size
        full.append([])
        for first in range(0, len(packs[0]), width):
            row = packs[:, first : first + width]
            block = _assign_row(row, load, rank_load, size)
            np.put_along_axis(rank, row, block * size, axis=1)
            if row.shape[1] == width:
                full[-1].append(row)
            else:
                partial.append((-row.shape[1] * size, row))
    # Rows of each size come by descending load. Reversing the first size makes the ends light.
    groups = [group for group in full if group]
    if len(groups) == 1:
        groups = [[groups[0][place] for place in lightest_at_the_ends(len(groups[0]))]]
    elif groups:
        groups[0].reverse()
    widest_first = [row for _, row in sorted(partial, key=lambda pair: pair[0])]
    for number, row in enumerate([*chain(*groups), *widest_first]):
        np.put_along_axis(slot, row, number, axis=1)
    return rank, slot


def _assign_row(
    row: np.ndarray, load: np.ndarray, rank_load: np.ndarray, context: int
) -> np.ndarray:
    """Return the block of every pack of a row [steps, packs], and add its load to `rank_load`."""
    steps, count = row.shape
    row_load = np.take_along_axis(load, row, axis=1)
    blocks = rank_load[:, : count * context].reshape(steps, count, context)
    heaviest_first = np.argsort(-row_load, axis=1, kind="stable")
    lightest_first = np.argsort(blocks.max(axis=2), axis=1, kind="stable")
    block = np.empty((steps, count), np.int64)
    np.put_along_axis(block, heaviest_first, lightest_first, axis=1)
    added = np.zeros((steps, count))
    np.put_along_axis(added, block, row_load, axis=1)
    # Ranks of a block advance together, with the slowest.
    together = blocks.max(axis=2, keepdims=True) + added[:, :, None]
    rank_load[:, : count * context] = np.broadcast_to(together, blocks.shape).reshape(steps, -1)
    return block
