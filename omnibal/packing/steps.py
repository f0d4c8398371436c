"""Optimizer steps: the packs of each step, and their ranks and slots.

The packs of a step do not depend on ranks, so a run can resume with another number of ranks; only
the deal to ranks changes. A step consists of rows. The packs of a row have equal items and similar
predicted time, so that ranks with one pack each do not wait. Rows are shuffled into steps, because
steps of one kind of sample train worse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.model.levels import Level, are_plain, largest_caps
from omnibal.model.limits import Caps
from omnibal.model.targets import ANY_PACKS, PackRules
from omnibal.packing.by_level import levels_of_packs, pack_by_level
from omnibal.packing.deal import deal_by_speed, deal_in_rounds, deal_rows
from omnibal.packing.fit import size_keys
from omnibal.packing.full_steps import level_to_fill, split_to_fill
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import pack_media_apart, pack_samples
from omnibal.packing.packs import Packs, ScheduledPacks, sha256_of_columns
from omnibal.packing.rows import RowRequest, match_packs, match_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """Packs in the order of their steps, independent of ranks.

    Within a step they are sorted by their first sample, so equal steps are equal arrays.
    """

    packs: Packs
    step: np.ndarray  # step of every pack, int64 [packs], counted from 0 through all epochs
    epoch: np.ndarray  # epoch of every pack, int32 [packs]

    @classmethod
    def from_packs(cls, packs: Packs, step: np.ndarray, epoch: np.ndarray) -> "Steps":
        order = np.lexsort((packs.samples[packs.offsets[:-1]], step))
        return cls(packs=packs.take(order), step=step[order], epoch=epoch[order])

    @property
    def steps(self) -> int:
        return int(self.step[-1]) + 1

    @property
    def sha256(self) -> str:
        """Hash of the packs, their steps and epochs, independent of ranks."""
        return sha256_of_columns(
            (self.step, "<i8"),
            (self.epoch, "<i4"),
            (self.packs.offsets, "<i8"),
            (self.packs.samples, "<i8"),
        )

    @property
    def window_sha256(self) -> str:
        """Hash of the samples of every step, independent of packs and ranks.

        Identifies the training on windows of a stream, which are repacked for other ranks.
        """
        # A step's gradient is a sum over its samples, and random numbers are drawn per sample.
        sizes = np.diff(self.packs.offsets)
        step, epoch = np.repeat(self.step, sizes), np.repeat(self.epoch, sizes)
        order = np.lexsort((self.packs.samples, step))
        return sha256_of_columns(
            (step[order], "<i8"), (epoch[order], "<i4"), (self.packs.samples[order], "<i8")
        )


def pack_epochs(
    lengths: Lengths,
    settings: PackSettings,
    levels: Sequence[Level],
    may_fill: np.ndarray | None = None,
    *,
    rules: PackRules = ANY_PACKS,
    max_types: int | None = None,
) -> list[Packs]:
    """Return packs of every epoch, drawn from (seed, epoch).

    Args:
        levels: by ascending caps.
        may_fill: samples allowed in packs of each longer level, [levels, samples], default all.
        rules: of a trainer, for unshared packs of one level.
        max_types: as in `pack_samples`, for unshared packs of one level.
    """
    seeds = [_seeds(settings, epoch)[0] for epoch in range(settings.epochs)]
    if not are_plain(levels):
        return [
            pack_by_level(lengths, levels, settings.packing, seed, may_fill=may_fill)
            for seed in seeds
        ]
    caps = levels[0].caps
    if rules.tokens_alone:
        caps = Caps.of(tokens=caps["tokens"])
    pack = partial(pack_samples, caps=caps, method=settings.packing, max_types=max_types)
    if rules.one_medium:
        return [pack_media_apart(lengths, partial(pack, seed=seed)) for seed in seeds]
    return [pack(lengths, seed=seed) for seed in seeds]


def draw_steps(
    lengths: Lengths,
    settings: PackSettings,
    levels: Sequence[Level],
    load: Callable[[Packs], np.ndarray],
    packed: Sequence[Packs] | None = None,
    *,
    packs_per_step: int,
    packs_per_row: int,
    rules: PackRules = ANY_PACKS,
) -> Steps:
    """Pack all epochs, unless `packed` by `pack_epochs`, and order their packs into steps.

    Args:
        load: returns the load of every pack, such as its predicted milliseconds.
        packs_per_step: of all ranks, a shared pack once per rank. Not used if `settings` give
            samples, unless `rules` require full steps.
        packs_per_row: data-parallel size to balance for, a divisor of `packs_per_step`.
    """
    parts = list(pack_epochs(lengths, settings, levels, rules=rules) if packed is None else packed)
    step: list[np.ndarray] = []
    first_step, caps = 0, largest_caps(levels)
    rows = RowRequest(
        contexts=[level.context for level in levels],
        ranks=packs_per_row,
        rows_per_step=packs_per_step // packs_per_row,
        curriculum_steps=settings.curriculum_steps,
        samples_per_step=None if rules.full_steps else settings.samples_per_step,
    )
    is_even = settings.samples_per_step is not None
    for epoch, packs in enumerate(parts):
        seed = _seeds(settings, epoch)[1]
        if rules.full_steps and rules.next_fit:
            packs = level_to_fill(packs, packs_per_step, lengths.tokens, caps["tokens"], seed)
        elif rules.full_steps:
            packs = split_to_fill(packs, packs_per_step, load)
        items, load_ms = _item_keys(packs, lengths, caps.names[:-1]), load(packs)
        samples = np.diff(packs.offsets)
        if are_plain(levels) and rows.samples_per_step is None:
            step_of_pack = match_packs(
                items,
                load_ms,
                packs_per_step,
                packs_per_row,
                seed,
                rest_last=rules.full_steps,
                samples=samples if is_even else None,
            )
        else:
            level = levels_of_packs(packs, lengths, levels)
            # The curriculum is in the first epoch only.
            request = replace(rows, curriculum_steps=0) if epoch else rows
            step_of_pack = match_rows(level, items, load_ms, samples, request, seed)
        parts[epoch] = packs
        step.append(step_of_pack + first_step)
        first_step = int(step[-1].max()) + 1
    epochs = np.repeat(np.arange(len(parts), dtype=np.int32), list(map(len, parts)))
    return Steps.from_packs(Packs.join(parts), np.concatenate(step), epochs)


def _seeds(settings: PackSettings, epoch: int) -> list[np.random.SeedSequence]:
    return np.random.SeedSequence([settings.seed, epoch]).spawn(2)  # for packs, for steps


def _item_keys(packs: Packs, lengths: Lengths, names: Sequence[str]) -> np.ndarray:
    """Return int64 keys [packs] in the lexicographic order of their sums of these features."""
    sums = [packs.sums(lengths.column(name)) for name in names]
    return size_keys(np.array(sums, np.int64).reshape(len(names), len(packs)))


def deal_steps(
    steps: Steps,
    lengths: Lengths,
    load: Callable[[Packs], np.ndarray],
    dp: int,
    levels: Sequence[Level],
    lockstep_ranks: int = 1,
    slowness: np.ndarray | None = None,
) -> ScheduledPacks:
    """Return the schedule of all packs on `dp` data-parallel ranks. Raise if an epoch has too few.

    Packs are dealt in rounds (`deal_in_rounds`), for ranks of unequal speed by `deal_by_speed`, and
    with context-parallel packs by `deal_rows`. A rank runs its lightest packs first and last, as
    other stages idle during pipeline fill and drain.

    Args:
        load: returns the load of every pack, on each of its ranks.
        lockstep_ranks: neighbours that run slots together, e.g. for expert parallelism.
        slowness: relative time of every rank, [dp]. None with several levels or lockstep.
    """
    level = levels_of_packs(steps.packs, lengths, levels)
    context = np.array([part.context for part in levels])[level]
    fewest = int(np.bincount(steps.epoch, weights=context).min())
    if fewest < dp:
        raise UserError(
            f"an epoch has {fewest} packs for {dp} data-parallel ranks; every rank must have one "
            "to train: use fewer ranks, lower the caps, or add data"
        )
    weight, items = load(steps.packs), _item_keys(steps.packs, lengths, lengths.item_names)
    dp_rank, slot = np.empty((2, len(steps.packs)), np.int32)
    usual = int(np.median(np.bincount(steps.step)))
    # Steps of equal contexts at once: nearly all steps have the same size.
    for rows in _steps_of_equal_contexts(steps.step, context):
        if not are_plain(levels):
            dealt = deal_rows(context[rows[0]], items[rows], weight[rows], dp)
            dp_rank[rows], slot[rows] = dealt
            continue
        if slowness is not None and rows.shape[1] > dp:
            by_rank = deal_by_speed(rows, weight, slowness, most_slots(usual, dp))
        else:
            by_rank = deal_in_rounds(rows, items, weight, dp, lockstep_ranks)
        _, rank, position = np.nonzero(by_rank >= 0)
        dp_rank[by_rank[by_rank >= 0]] = rank
        slot[by_rank[by_rank >= 0]] = position
    return ScheduledPacks.from_packs(
        steps.packs, lengths, steps.step, dp_rank, slot, steps.epoch, level
    )


def most_slots(packs_per_step: int, dp: int) -> int:
    """Return the max packs of a rank per step: 1.5 times its share, as in the largest step."""
    return -(-3 * packs_per_step // (2 * dp))


def _steps_of_equal_contexts(step: np.ndarray, context: np.ndarray) -> list[np.ndarray]:
    """Return packs [steps, packs] of all steps with equal contexts, for each such combination."""
    by_context = np.lexsort((context, step))
    values, code = np.unique(context, return_inverse=True)
    counts = np.bincount(step * len(values) + code, minlength=(int(step[-1]) + 1) * len(values))
    counts = counts.reshape(-1, len(values))  # [steps, contexts]
    first = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
    _, kind = np.unique(counts, axis=0, return_inverse=True)
    groups = []
    for number in range(int(kind.max()) + 1):
        chosen = np.flatnonzero(kind == number)
        size = int(counts[chosen[0]].sum())
        groups.append(by_context[first[chosen][:, None] + np.arange(size)])
    return groups


def steps_of(scheduled: ScheduledPacks) -> Steps:
    """Return the steps of a schedule, before packs were dealt to ranks."""
    return Steps.from_packs(scheduled.packs, scheduled.step, scheduled.epoch)


def size_load(packs: Packs, lengths: Lengths) -> np.ndarray:
    """Return the load of packs without a cost model: all features have equal totals."""
    sums = [packs.sums(lengths.column(name)) for name in (*lengths.item_names, "tokens")]
    return np.sum([per_pack / max(per_pack.sum(), 1) for per_pack in sums], axis=0)
