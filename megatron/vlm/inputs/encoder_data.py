"""Dataset of a rank with data-parallel encoders: the items it encodes, then its own texts."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from megatron.vlm.inputs.batch import MicroBatch, join_items
from megatron.vlm.inputs.data import PackDataset
from megatron.vlm.inputs.encoder_share import EncoderShares


class EncodingDataset(torch.utils.data.Dataset):
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
        self._texts, self._items, self._first_step = texts, items, first_step
        passes_of_step = shares.passes_of_steps(first_step, last_step)
        steps = texts.scheduled.step[texts.rows] - first_step
        texts_of_step = np.bincount(steps, minlength=last_step - first_step)
        # Prefix sums over steps, int64 [steps].
        self._text_start = np.cumsum(texts_of_step) - texts_of_step
        self._end = np.cumsum(passes_of_step + texts_of_step)
        self._passes_end = self._end - texts_of_step
        # Keeps the latest step's passes: their assignment is the same for all its items.
        self._passes_of = lru_cache(1)(lambda step: shares.step(step).passes)

    def __len__(self) -> int:
        return int(self._end[-1]) if len(self._end) else 0

    def __getitem__(self, item: int) -> MicroBatch:
        step = int(np.searchsorted(self._end, item, "right"))
        place = item - int(self._passes_end[step])
        if place < 0:  # counts passes from the step's last
            planned = self._passes_of(self._first_step + step)[place]
            return join_items(
                [
                    self._items.load_items(run.row, {planned.feature: run.items})
                    for run in planned.runs
                ]
            )
        batch = self._texts[int(self._text_start[step]) + place]
        # The encoding rank reports an unreadable item, once in the job.
        return replace(batch, unreadable=())
