"""A rank's inputs with data-parallel encoders: assigned items, and its own texts."""

from dataclasses import replace

import numpy as np
import torch

from megatron.vlm.inputs.batch import MicroBatch, join_items
from megatron.vlm.inputs.data import PackDataset
from megatron.vlm.inputs.encoder_share import EncoderPass, EncoderShares
from omnibal.base.errors import UserError


class EncodingDataset(torch.utils.data.Dataset):
    """Every step's encoder passes, then its micro-batches; items are as in `PackDataset`.

    Args:
        texts: micro-batches of the rank's stage, from `first_step` on.
        items: items of all packs, read for all encoders.
        last_step: end step.
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
        self._first_step = first_step
        passes_of_step = shares.passes_of_steps(first_step, last_step)
        steps = texts.scheduled.step[texts.rows] - first_step
        texts_of_step = np.bincount(steps, minlength=last_step - first_step)
        self._text_start = np.cumsum(texts_of_step) - texts_of_step
        self._end = np.cumsum(passes_of_step + texts_of_step)
        self._passes_end = self._end - texts_of_step
        self._read: tuple[int, tuple[EncoderPass, ...]] | None = None

    def __len__(self) -> int:
        return int(self._end[-1]) if len(self._end) else 0

    def __getitem__(self, item: int) -> MicroBatch | UserError:
        step = int(np.searchsorted(self._end, item, "right"))
        place = item - int(self._passes_end[step])
        if place < 0:
            return self._load_pass(self._passes_of(step)[place])
        batch = self._texts[int(self._text_start[step]) + place]
        # The encoding rank reports an unreadable item, once in the job.
        return batch if isinstance(batch, UserError) else replace(batch, unreadable=())

    def _load_pass(self, planned: EncoderPass) -> MicroBatch | UserError:
        try:
            return join_items(
                [
                    self._items.load_items(run.row, {planned.feature: run.items})
                    for run in planned.runs
                ]
            )
        except UserError as error:
            return error

    def _passes_of(self, step: int) -> tuple[EncoderPass, ...]:
        if self._read is None or self._read[0] != step:
            self._read = step, self._shares.step(self._first_step + step).passes
        return self._read[1]
