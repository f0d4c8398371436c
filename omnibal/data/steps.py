"""Steps: which packs share an optimizer step, and the rank and slot that each one runs in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.data.packing import PackingMethod, Seed, pack_samples
from omnibal.data.packs import Packs, ScheduledPacks
from omnibal.plan import Caps


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRequest:
    """How samples become micro-batches."""

    caps: Caps
    method: PackingMethod
    seed: int
    epochs: int
    dp: int
    """Data-parallel ranks."""
    micro_batches: int
    """Packs of one rank in a full step."""


def draw_packs(
    lengths: Lengths, request: DataRequest, load: Callable[[Packs], np.ndarray]
) -> ScheduledPacks:
    """Pack and schedule all epochs; each is drawn anew from (seed, epoch), its packs included.

    Args:
        lengths: of all samples.
        request: caps, method, seed and sizes.
        load: gives the load of every pack, such as its predicted milliseconds.
    """
    parts: list[ScheduledPacks] = []
    for epoch in range(request.epochs):
        packing_seed, order_seed = np.random.SeedSequence([request.seed, epoch]).spawn(2)
        packs = pack_samples(lengths, request.caps, request.method, packing_seed)
        parts.append(
            schedule_packs(
                packs,
                lengths,
                epoch=epoch,
                first_step=parts[-1].steps if parts else 0,
                dp=request.dp,
                micro_batches=request.micro_batches,
                seed=order_seed,
                load=load(packs),
            )
        )
    return join_epochs(parts)


def schedule_packs(
    packs: Packs,
    lengths: Lengths,
    *,
    epoch: int,
    first_step: int,
    dp: int,
    micro_batches: int,
    seed: Seed,
    load: np.ndarray,
) -> ScheduledPacks:
    """Shuffle one epoch's packs, cut them into steps, and balance each step over its ranks.

    A step takes dp * micro_batches packs in shuffled order; the last one takes what is left, and
    its ranks hold equally many packs or one fewer (perhaps none). Inside a step the packs are dealt
    in rounds of one per rank, heaviest round first, each round's heaviest pack to the rank with the
    least load so far: longest processing time first, with equal counts. A rank runs its lightest
    packs first and last, since all stages but one idle while the pipeline fills and drains on them.

    Args:
        packs: of one epoch.
        lengths: of all samples.
        epoch: number of the epoch, recorded with every pack.
        first_step: number of the epoch's first step.
        dp: data-parallel ranks.
        micro_batches: packs of a rank in a full step.
        seed: of the shuffle.
        load: what ranks must have equally much of, such as predicted ms; [packs].
    """
    steps = -(-len(packs) // (dp * micro_batches))
    order = np.full((steps, micro_batches * dp), -1)
    order.flat[: len(packs)] = np.random.default_rng(seed).permutation(len(packs))
    # Empty places weigh less than any pack, so that they sort behind all of them.
    weight = np.where(order < 0, -np.inf, load[order])
    heaviest_first = np.argsort(-weight, axis=1, kind="stable")
    rounds = np.take_along_axis(order, heaviest_first, axis=1).reshape(steps, micro_batches, dp)
    by_rank = _deal(rounds, load)[:, :, _lightest_at_the_ends(micro_batches)]
    filled = by_rank >= 0
    step, dp_rank, _ = np.nonzero(filled)
    slot = np.cumsum(filled, axis=2)[filled] - 1
    ordered = packs.take(by_rank[filled])
    return ScheduledPacks(
        packs=ordered,
        step=step + first_step,
        dp_rank=dp_rank.astype(np.int32),
        slot=slot.astype(np.int32),
        epoch=np.full(len(ordered), epoch, np.int32),
        tiles=ordered.sums(lengths.tiles).astype(np.int32),
        tokens=ordered.sums(lengths.tokens).astype(np.int32),
    )


def _deal(rounds: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Deal rounds [steps, micro_batches, dp] of pack indices to ranks, [steps, dp, micro_batches].

    Rounds and their packs are sorted from heavy to light; -1 is an empty place.
    """
    by_rank = np.empty_like(rounds)
    rank_load = np.zeros_like(rounds[:, 0], dtype=np.float64)
    for number in range(rounds.shape[1]):
        lightest_rank_first = np.argsort(rank_load, axis=1, kind="stable")
        np.put_along_axis(by_rank[:, number], lightest_rank_first, rounds[:, number], axis=1)
        dealt = by_rank[:, number]
        rank_load += np.where(dealt < 0, 0.0, load[dealt])
    return by_rank.swapaxes(1, 2)


def _lightest_at_the_ends(count: int) -> np.ndarray:
    """Order of `count` things, given from heavy to light, that rises in weight and then falls.

    Example:
        >>> _lightest_at_the_ends(5).tolist()
        [4, 2, 0, 1, 3]
    """
    lightest_first = np.arange(count)[::-1]
    return np.concatenate([lightest_first[0::2], lightest_first[1::2][::-1]])


def join_epochs(epochs: Sequence[ScheduledPacks]) -> ScheduledPacks:
    """One schedule of consecutive epochs, whose steps must already count on."""
    sizes = np.concatenate([np.diff(part.packs.offsets) for part in epochs])
    return ScheduledPacks(
        packs=Packs(
            samples=np.concatenate([part.packs.samples for part in epochs]),
            offsets=np.concatenate([[0], np.cumsum(sizes)]),
        ),
        **{
            name: np.concatenate([getattr(part, name) for part in epochs])
            for name in ("step", "dp_rank", "slot", "epoch", "tiles", "tokens")
        },
    )


def size_load(packs: Packs, lengths: Lengths) -> np.ndarray:
    """Load of packs when no model is known: tiles and tokens count the same over all packs."""
    tiles, tokens = packs.sums(lengths.tiles), packs.sums(lengths.tokens)
    return tiles / max(tiles.sum(), 1) + tokens / tokens.sum()
