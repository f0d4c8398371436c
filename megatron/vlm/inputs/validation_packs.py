"""Packs of held-out samples for the validation loss."""

from dataclasses import dataclass, replace

import numpy as np

from megatron.vlm.inputs.data import MicroBatchOptions, PackDataset
from megatron.vlm.inputs.pack_share import Sharing
from megatron.vlm.inputs.reader import SampleReader
from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.data.scan import scan_lengths
from omnibal.model.levels import Level
from omnibal.packing.isf import pack_isf
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.stage_units import Stage

_PACKING_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPacks:
    """Validation packs, equal on every rank and in every run."""

    scheduled: ScheduledPacks  # one step, dealt round-robin to blocks of `context` ranks
    lengths: Lengths
    level: Level
    left_out: int  # number of samples that exceed a cap

    def sharing(self, rank: int) -> Sharing:
        return Sharing(dp_rank=rank, levels=[self.level])

    def dataset(
        self, reader: SampleReader, stage: Stage, rank: int, options: MicroBatchOptions
    ) -> PackDataset:
        """Return a data-parallel rank's dataset, without augmentation and drop path."""
        plain, sharing = replace(options, augment=False, drop_path=False), self.sharing(rank)
        rows = sharing.rows(self.scheduled, 0, 1)
        return PackDataset(reader, self.scheduled, self.lengths, rows, stage, plain, sharing)


def pack_validation(
    reader: SampleReader, samples: int, level: Level, data_parallel: int
) -> ValidationPacks:
    """Return packs of the first `samples` held-out samples that fit the caps. UserError if none.

    All packs have one context-parallel size, so that no rank has gaps between its slots.
    """
    scanned = min(samples, len(reader.annotations))
    annotations = reader.annotations.take(np.arange(scanned))
    # "skip", and raise below: the scan's own error advises --on-error, which is no option here.
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
            f"all {scanned} held-out samples exceed the plan's caps of {caps}; "
            "validate on samples like those trained on"
        )
    packs = pack_isf(lengths, caps, _PACKING_SEED)
    slot, block = np.divmod(np.arange(len(packs)), data_parallel // level.context)
    return ValidationPacks(
        scheduled=ScheduledPacks.from_packs(packs, lengths, 0 * slot, block * level.context, slot),
        lengths=lengths,
        level=level,
        left_out=scanned - len(lengths),
    )
