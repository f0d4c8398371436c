"""Dealing: which rank and slot every pack of a step runs in.

Steps of equally many packs are dealt side by side.
"""

import numpy as np

_MOST_EXCHANGES = 400
"""Exchanges of a step's packs: some for each of a hundred ranks."""
_MOST_WORK = 600_000_000
"""Possible exchanges that are compared in all: about ten seconds of one core. Of runs of so many
steps that each has less than it needs, every step has fewer exchanges."""
_ENTRIES_AT_ONCE = 2_000_000
"""Possible exchanges that are compared at a time: bounds memory to a hundred MB."""
_TOLERANCE = 1e-9
"""Relative time by which an exchange must help."""


def deal_apart(rows: np.ndarray, items: np.ndarray, load: np.ndarray, dp: int) -> np.ndarray:
    """Deal packs of steps to ranks that wait for each other only when a step ends.

    In rounds of one per rank, of most items and load first, each round's heaviest pack to the rank
    with the least load so far; a rank runs its lightest packs first and last.

    Args:
        rows: packs of steps of equal size, [steps, packs]; the other two are of all packs, [packs].

    Returns:
        Packs of every rank, [steps, dp, slots]; -1 behind a rank's last one.
    """
    rounds = _rounds(rows, items, load, dp)
    slots, steps, _ = rounds.shape
    by_rank = np.empty((steps, slots, dp), np.int64)
    rank_load = np.zeros((steps, dp))
    for number, drawn in enumerate(rounds):
        heaviest_first = np.argsort(
            np.where(drawn < 0, np.inf, -load[drawn]), axis=1, kind="stable"
        )
        lightest_rank_first = np.argsort(rank_load, axis=1, kind="stable")
        dealt = np.take_along_axis(drawn, heaviest_first, axis=1)
        np.put_along_axis(by_rank[:, number], lightest_rank_first, dealt, axis=1)
        given = by_rank[:, number]
        rank_load += np.where(given < 0, 0.0, load[given])
    return _lightest_first_and_last(by_rank.swapaxes(1, 2), load)


def _rounds(rows: np.ndarray, items: np.ndarray, load: np.ndarray, dp: int) -> np.ndarray:
    """Packs of steps in rounds of one per rank, of most items and load first, [slots, steps, dp];
    -1 where the last round has none."""
    steps, size = rows.shape
    slots = -(-size // dp)
    most_first = np.lexsort((-load[rows], -items[rows]), axis=1)
    rounds = np.full((steps, slots * dp), -1)
    rounds[:, :size] = np.take_along_axis(rows, most_first, axis=1)
    return rounds.reshape(steps, slots, dp).swapaxes(0, 1)


def deal_by_speed(
    rows: np.ndarray, load: np.ndarray, slowness: np.ndarray, most: int
) -> np.ndarray:
    """Deal packs of steps to ranks of unequal speed that wait for each other only when a step ends.

    Heaviest first, each to the rank that then is done first: longest processing time first on
    uniform machines (Gonzalez et al. 1977, SIAM J. Comput. 6, 155-166), but every rank has one at
    least. Then the last rank to be done exchanges packs, or gives one away, while that helps.

    Args:
        rows: packs of steps of equal size, at least one a rank, [steps, packs].
        load: of all packs, [packs].
        slowness: time of a load on every rank, over that of the fastest, [dp].
        most: packs of a rank.

    Returns:
        As `deal_apart`.
    """
    order = np.argsort(-load[rows], axis=1, kind="stable")
    rows = np.take_along_axis(rows, order, axis=1)
    steps, dp = len(rows), len(slowness)
    rank = _longest_first(load[rows], slowness, most)
    exchanges = min(_MOST_WORK // (most * rows.size), _MOST_EXCHANGES)
    at_once = max(_ENTRIES_AT_ONCE // (most * rows.shape[1]), 1)
    for first in range(0, steps, at_once):
        active = np.arange(first, min(first + at_once, steps))
        for _ in range(exchanges):
            changed, helps = _exchanged(rank[active], load[rows[active]], slowness, most)
            rank[active], active = changed, active[helps]
            if not len(active):
                break
    by_rank = np.full((steps, dp, min(most, rows.shape[1])), -1)
    counts, each = np.zeros((steps, dp), np.int64), np.arange(steps)
    for drawn, of_drawn in zip(rows.T, rank.T, strict=True):
        by_rank[each, of_drawn, counts[each, of_drawn]] = drawn
        counts[each, of_drawn] += 1
    return _lightest_first_and_last(by_rank[:, :, : counts.max()], load)


def _longest_first(load: np.ndarray, slowness: np.ndarray, most: int) -> np.ndarray:
    """Rank of every pack, [steps, packs], given their loads from heavy to light."""
    steps, size = load.shape
    rank, each = np.empty((steps, size), np.int64), np.arange(steps)
    counts, rank_load = np.zeros((steps, len(slowness)), np.int64), np.zeros((steps, len(slowness)))
    for place in range(size):
        done = (rank_load + load[:, place, None]) * slowness
        without = counts == 0
        others_are_owed = (without.sum(axis=1) >= size - place)[:, None] & ~without
        chosen = np.where((counts >= most) | others_are_owed, np.inf, done).argmin(axis=1)
        rank[:, place] = chosen
        counts[each, chosen] += 1
        rank_load[each, chosen] += load[:, place]
    return rank


def _exchanged(
    rank: np.ndarray, load: np.ndarray, slowness: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Exchange a pack of the last rank to be done with one of another, or with none, in every step
    where that rank and the other are then done earlier.

    Args:
        rank: of every pack; this and the next are [steps, packs].

    Returns:
        The ranks after it, and in which steps it helps, [steps].
    """
    steps, size = rank.shape
    dp, each = len(slowness), np.arange(steps)
    place = (rank + each[:, None] * dp).ravel()
    counts = np.bincount(place, minlength=steps * dp).reshape(steps, dp)
    rank_load = np.bincount(place, load.ravel(), steps * dp).reshape(steps, dp)
    last = (rank_load * slowness).argmax(axis=1)
    last_load, last_slow = rank_load[each, last], slowness[last]
    given = np.argsort(rank != last[:, None], axis=1, kind="stable")[:, :most]
    # Behind the packs stands nothing, once for every rank.
    with_none = np.concatenate([load, np.zeros((steps, dp))], axis=1)
    holder = np.concatenate([rank, np.broadcast_to(np.arange(dp), (steps, dp))], axis=1)
    more = np.take_along_axis(load, given, axis=1)[:, :, None] - with_none[:, None, :]
    others_done = (np.take_along_axis(rank_load, holder, axis=1)[:, None] + more) * (
        slowness[holder][:, None]
    )
    later = np.maximum((last_load[:, None, None] - more) * last_slow[:, None, None], others_done)
    cannot = holder == last[:, None]
    cannot[:, size:] |= (counts >= most) | (counts[each, last] < 2)[:, None]
    has_not = np.take_along_axis(rank, given, axis=1) != last[:, None]
    later[has_not[:, :, None] | cannot[:, None, :]] = np.inf
    best = later.reshape(steps, -1).argmin(axis=1)
    one, other = given[each, best // (size + dp)], best % (size + dp)
    better = later.reshape(steps, -1)[each, best] < last_load * last_slow * (1 - _TOLERANCE)
    changed = rank.copy()
    changed[each[better], one[better]] = holder[each, other][better]
    swapped = better & (other < size)
    changed[each[swapped], other[swapped]] = last[swapped]
    return changed, better


def _lightest_first_and_last(by_rank: np.ndarray, load: np.ndarray) -> np.ndarray:
    """The packs of every rank, [steps, dp, slots], in the order in which it runs them; -1 behind
    its last one."""
    # Empty places are the lightest here, and then come last in the order too.
    weight = np.where(by_rank < 0, -np.inf, load[by_rank])
    by_rank = np.take_along_axis(by_rank, np.argsort(-weight, axis=2, kind="stable"), axis=2)
    ordered = by_rank[:, :, lightest_at_the_ends(by_rank.shape[2])]
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
    rounds, groups = _rounds(rows, items, load, dp), dp // lockstep_ranks
    slots, (steps, size) = len(rounds), rows.shape
    by_group = np.empty((steps, slots, groups, lockstep_ranks), np.int64)
    group_load, round_load = np.zeros((steps, groups)), np.zeros((steps, slots))
    for number, drawn in enumerate(rounds):
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
