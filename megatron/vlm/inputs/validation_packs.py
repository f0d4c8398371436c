"""Packs of held-out samples, for the validation loss."""

from dataclasses import dataclass, replace

import numpy as np

from megatron.vlm.inputs.batch import MicroBatchShape
from megatron.vlm.inputs.data import DataOptions, PackDataset
from megatron.vlm.inputs.pack_share import Sharing
from megatron.vlm.inputs.reader import SampleReader
from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.data.scan import scan_lengths
from omnibal.model.levels import Level
from omnibal.model.parallel import Parallel
from omnibal.packing.isf import pack_isf
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.pipeline.stage_units import Stage

_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPacks:
    """Validation packs, equal on every rank and in every run."""

    scheduled: ScheduledPacks
    """Packs of one step, dealt to ranks or blocks of ranks in turn. A rank may have none."""
    lengths: Lengths
    level: Level
    left_out: int
    """Samples beyond a cap."""

    @property
    def samples(self) -> int:
        """Return the samples in the packs of all ranks."""
        return len(self.lengths)

    def dataset(
        self, reader: SampleReader, stage: Stage, rank: int, options: DataOptions
    ) -> PackDataset:
        """Return one data-parallel rank's dataset, without augmentation or drop path."""
        plain = replace(options, augment=False, drop_path=False)
        packs, rows, sharing = self.scheduled, self._rows(rank), self._sharing(rank)
        return PackDataset(reader, packs, self.lengths, rows, stage, plain, sharing)

    def shapes(self, rank: int) -> list[MicroBatchShape]:
        return MicroBatchShape.of_shares(
            self.scheduled, self.lengths, self._rows(rank), self._sharing(rank)
        )

    def slots(self, rank: int, parallel: Parallel) -> int:
        """Return the rank's micro-batches, with empty ones to join other ranks."""
        return self._sharing(rank).slots(self.scheduled, parallel)

    def _rows(self, rank: int) -> np.ndarray:
        return self._sharing(rank).rows(self.scheduled, 0, 1)

    def _sharing(self, rank: int) -> Sharing:
        return Sharing(dp_rank=rank, levels=[self.level])


def pack_validation(
    reader: SampleReader, samples: int, level: Level, data_parallel: int
) -> ValidationPacks:
    """Scan the first `samples` held-out samples and pack all that fit.

    All packs have the level of the longest training samples, so that no rank has gaps between its
    slots.
    """
    taken = np.arange(min(samples, len(reader.annotations)))
    annotations = reader.annotations.take(taken)
    # Skipped here and raised below, without the scan's own advice.
    scan = scan_lengths(
        annotations, reader.model, reader.tokenizer, lambda done: None, on_error="skip"
    )
    if scan.skipped:
        raise UserError(f"held-out data: {scan.skipped[0].message}")
    caps = level.caps
    fits = (scan.lengths.sizes(caps.names) <= caps.values[:, None]).all(axis=0)
    lengths = scan.lengths.take(np.flatnonzero(fits))
    if not len(lengths):
        raise UserError(
            f"all {len(taken)} held-out samples exceed the plan's caps of {caps}; "
            "validate on samples like those trained on"
        )
    packs = pack_isf(lengths, caps, _SEED)
    return ValidationPacks(
        scheduled=_deal_packs(packs, lengths, data_parallel // level.context, level.context),
        lengths=lengths,
        level=level,
        left_out=len(taken) - len(lengths),
    )


def _deal_packs(packs: Packs, lengths: Lengths, blocks: int, context: int) -> ScheduledPacks:
    """Deal packs in turn: every block of `context` ranks takes every `blocks`-th pack."""
    slot, block = np.divmod(np.arange(len(packs)), blocks)
    return ScheduledPacks.of(packs, lengths, 0 * slot, block * context, slot)
