"""Data read by two pipelines of two stages that share encoder passes, against full packs."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from data_parallel_cases import shares_of

from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.data import PackDataset
from megatron.vlm.inputs.encoder_data import EncodingDataset
from megatron.vlm.inputs.encoder_share import EncoderPass, EncoderShares
from omnibal.model.config import ModelConfig, load_cluster
from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.model.parallel import Parallel
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import encoders_stage

PLACES = {"step": [0, 0, 0, 1, 1, 1], "dp_rank": [0, 0, 1, 0, 0, 1], "slot": [0, 1, 0] * 2}
"""Places of six packs: in two steps, two pipelines have two and one packs each."""
Read = tuple[list[tuple[EncoderPass, MicroBatch]], list[MicroBatch]]
"""Encoder passes with their items, and micro-batches without items."""


@dataclass(frozen=True)
class EncodingJob:
    """Two pipelines of two stages that share encoder passes."""

    whole: PackDataset
    """Six packs, read for the full model."""
    data_parallel_encoders: DataParallelEncoders
    text_stages: Sequence[Stage]
    """Units of each pipeline stage."""

    parallel = Parallel(pipeline=2, data=2)
    ranks = range(4)
    cluster = load_cluster("laptop-cpu")
    levels = ()

    def __post_init__(self) -> None:
        places = {name: np.array(column) for name, column in PLACES.items()}
        self.whole.scheduled = replace(self.whole.scheduled, **places)

    @property
    def model(self) -> ModelConfig:
        return self.whole.reader.model

    def shares(self, rank: int) -> EncoderShares:
        return shares_of(self, self.whole.scheduled, rank, self.whole.lengths)

    def rows(self, rank: int, first_step: int = 0) -> np.ndarray:
        """Return the rows of the packs of a rank's pipeline."""
        packs = self.whole.scheduled
        is_own = packs.dp_rank == self.parallel.place(rank)["data"]
        return np.flatnonzero(is_own & (packs.step >= first_step))

    def dataset(self, rank: int, first_step: int = 0) -> EncodingDataset:
        """Return the dataset of a global rank."""
        whole, rows = self.whole, self.rows(rank, first_step)
        of_texts = self.text_stages[self.parallel.place(rank)["pipeline"]]
        texts, items = (
            PackDataset(whole.reader, whole.scheduled, whole.lengths, rows, stage, whole.options)
            for stage in (of_texts, encoders_stage(self.model))
        )
        return EncodingDataset(texts, items, self.shares(rank), first_step, 2)

    def read(self, rank: int, first_step: int = 0) -> Iterator[MicroBatch]:
        """Yield all items of a global rank's dataset."""
        dataset = self.dataset(rank, first_step)
        return map(dataset.__getitem__, dataset.keys())

    def stream(self, rank: int, first_step: int = 0) -> Iterator[Read]:
        """Yield a rank's data of each step, in training order."""
        items, steps = self.read(rank, first_step), self.whole.scheduled.step
        for step in range(first_step, 2):
            texts = int((steps[self.rows(rank)] == step).sum())
            passes = self.shares(rank).step(step).passes
            taken = zip(passes, itertools.islice(items, len(passes)), strict=True)
            yield list(taken), list(itertools.islice(items, texts))
        assert next(items, None) is None
