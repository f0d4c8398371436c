"""Dataset of a rank with data-parallel encoders: the items it encodes, then its own texts."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megatron.vlm.inputs.batch import MicroBatch, join_items
from megatron.vlm.inputs.data import PackDataset
from megatron.vlm.inputs.encoder_share import EncoderPass, EncoderShares


class EncodingDataset:
    """Encoder passes, then micro-batches, of each step `first_step` to `last_step` (exclusive).

    Args:
        texts: micro-batches of the rank's stage, from `first_step` on.
        items: items of all packs, read for all encoders.
    """

    def __init__(
        self,
        texts: PackDataset,
        items: PackDataset,
        shares: EncoderShares,
        first_step: int,
        last_step: int,
    ) -> None:
        self._texts, self._items, self._shares = texts, items, shares
        self._steps = range(first_step, last_step)

    def keys(self) -> Iterator[EncoderPass | int]:
        """Yield the key of every micro-batch: an encoder pass, or a number in `texts`."""
        steps = self._texts.scheduled.step[self._texts.rows]
        for step in self._steps:
            yield from self._shares.step(step).passes
            yield from range(*np.searchsorted(steps, [step, step + 1]).tolist())

    def __getitem__(self, key: EncoderPass | int) -> MicroBatch:
        if isinstance(key, EncoderPass):
            return join_items(
                [self._items.load_items(run.row, {key.feature: run.items}) for run in key.runs]
            )
        # The encoding rank reports an unreadable item, once in the job.
        return replace(self._texts[key], unreadable=())
