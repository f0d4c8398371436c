"""Portions of a plan's data on disk, written and read one at a time to bound memory.

`portions/00003/lengths.parquet` has a portion's samples (`sample`: row in the data), and
`packs-001.parquet` its packs in the second epoch. Packs files count samples, steps and epochs from
0 in the portion; `count_through_run` numbers steps and epochs through the run, for the trainer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product, starmap
from pathlib import Path

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths, join_lengths, read_lengths, write_lengths
from omnibal.job.plan import LENGTHS_FILE, DataPlan, DataPortion, portion_folder, portion_packs_file
from omnibal.job.plan_data import count_data
from omnibal.model.limits import Caps
from omnibal.packing.pack_bound import SizeCounts, bound_of_counts
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packs import ScheduledPacks, read_packs, write_packs
from omnibal.packing.portions import PortionedSamples, PortionPlace

PacksAndLengths = tuple[ScheduledPacks, Lengths]


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierPortions:
    """Portions of an earlier plan, with steps to reuse."""

    data: DataPlan
    directory: Path
    are_kept: bool = False  # whether packs keep ranks and slots too, as stages are unchanged

    @property
    def count(self) -> int:
        return self.data.portions_per_epoch

    @property
    def epochs(self) -> int:
        return self.data.epochs

    def samples(self, number: int) -> Lengths:
        return _read_lengths(self.data, number, self.directory)

    def packs(self, place: PortionPlace) -> ScheduledPacks:
        index = place.epoch * self.count + place.number
        return read_portion(self.data, index, self.directory)[0]

    def settings_of(self, place: PortionPlace) -> PackSettings:
        return PackSettings()


AllPortions = PortionedSamples | EarlierPortions  # to write; a plan is searched on the first


def write_portions(
    samples: AllPortions,
    schedule: Callable[[Lengths, PortionPlace], ScheduledPacks],
    directory: Path,
) -> tuple[DataPortion, ...]:
    """Schedule and write all portions of all epochs; return counts and hashes, in run order."""
    written = []
    for place in starmap(PortionPlace, product(range(samples.epochs), range(samples.count))):
        folder = portion_folder(directory, place.number)
        lengths = samples.samples(place.number)
        if place.epoch == 0:
            folder.mkdir(parents=True)
            write_lengths(lengths, folder / LENGTHS_FILE)
        packs = schedule(lengths, place)
        write_packs(packs, folder / portion_packs_file(place.epoch))
        written.append(count_data(packs, lengths))
    return tuple(written)


def bound_packs(samples: PortionedSamples, caps: Caps, found: int) -> int:
    """Return a lower bound on an epoch's packs over all portions; `found` packs are enough."""
    counts = (
        SizeCounts.from_sizes(samples.samples(n).sizes(caps.names)) for n in range(samples.count)
    )
    return bound_of_counts(SizeCounts.join(counts), caps, found=found)


def read_portion(data: DataPlan, index: int, directory: Path) -> PacksAndLengths:
    epoch, number = divmod(index, data.portions_per_epoch)
    file = portion_folder(directory, number) / portion_packs_file(epoch)
    packs = read_packs(file)
    check_hash(file.relative_to(directory), packs.sha256, data.portions[index].packs_sha256)
    return packs, _read_lengths(data, number, directory)


def _read_lengths(data: DataPlan, number: int, directory: Path) -> Lengths:
    file = portion_folder(directory, number) / LENGTHS_FILE
    lengths = read_lengths([file])
    check_hash(file.relative_to(directory), lengths.sha256, data.portions[number].lengths_sha256)
    return lengths


def check_hash(file: Path | str, actual: str, planned: str) -> None:
    """Raise UserError if a file's content hash differs from the plan's."""
    if actual != planned:
        raise UserError(
            f"{file} has the content hash {actual[:12]}, but plan.json says {planned[:12]}: "
            "restore the file, or make the plan again with `omnibal plan`"
        )


def portion_of_step(data: DataPlan, step: int) -> int:
    """Return the index in `data.portions` that holds a step of the run."""
    return int(np.searchsorted(data.first_steps, step, side="right")) - 1


def count_through_run(packs: ScheduledPacks, data: DataPlan, index: int) -> ScheduledPacks:
    """Return a portion's packs with steps and epochs numbered through the run."""
    epoch = np.full_like(packs.epoch, index // data.portions_per_epoch)
    return replace(packs, step=packs.step + data.first_steps[index], epoch=epoch)


def join_portions(
    data: DataPlan, directory: Path, steps: Sequence[int] | None = None
) -> PacksAndLengths:
    """Return packs of all or some steps of the run, and their samples' lengths in data order."""
    indices: Iterable[int] = range(len(data.portions))
    if steps is not None:
        indices = sorted({portion_of_step(data, step) for step in steps})
    parts, lengths_parts = [], []
    for index in indices:
        packs, lengths = read_portion(data, index, directory)
        packs, rows = count_through_run(packs, data, index), np.arange(len(lengths))
        # Every epoch repeats portions, so packs name samples by row in the data until the end.
        place = lengths.annotation_indices(rows)
        if steps is not None:
            packs = packs.take(np.flatnonzero(np.isin(packs.step, steps)))
            rows = np.unique(packs.packs.samples)
        parts.append(replace(packs, packs=packs.packs.of_rows(place)))
        if steps is not None or index < data.portions_per_epoch:
            lengths_parts.append(lengths.take(rows))
    rows_of_parts = [part.annotation_indices(np.arange(len(part))) for part in lengths_parts]
    all_rows, settings = np.concatenate(rows_of_parts), lengths_parts[0]
    lengths = replace(
        join_lengths(lengths_parts),
        origin=settings.origin,
        repeats=settings.repeats,
        sample=all_rows,
    )
    # Samples come once per epoch in packs, but once in lengths.
    places, first = np.unique(all_rows, return_index=True)
    lengths = lengths.take(first)
    if np.array_equal(places, np.arange(len(places))):
        lengths = replace(lengths, sample=None)
    joined = ScheduledPacks.join(parts)
    samples = np.searchsorted(places, joined.packs.samples)
    return replace(joined, packs=replace(joined.packs, samples=samples)), lengths
