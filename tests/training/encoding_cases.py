"""What ranks of two pipelines of two stages read where they encode together, beside whole packs."""

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
"""Of six packs: two steps of two pipelines with two, one, two and one."""
Read = tuple[list[tuple[EncoderPass, MicroBatch]], list[MicroBatch]]
"""Passes with what was read for them, and texts."""


@dataclass(frozen=True)
class EncodingJob:
    """Two pipelines of two stages that encode together."""

    whole: PackDataset
    """Six packs as one stage reads them."""
    beside: DataParallelEncoders
    text_stages: Sequence[Stage]
    """What each stage of the pipeline reads of texts."""

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
        """Rows of the packs of a global rank's pipeline."""
        packs = self.whole.scheduled
        is_own = packs.dp_rank == self.parallel.place(rank)["data"]
        return np.flatnonzero(is_own & (packs.step >= first_step))

    def dataset(self, rank: int, first_step: int = 0) -> EncodingDataset:
        """What a global rank reads."""
        whole, rows = self.whole, self.rows(rank, first_step)
        of_texts = self.text_stages[self.parallel.place(rank)["pipeline"]]
        texts, items = (
            PackDataset(whole.reader, whole.scheduled, whole.lengths, rows, stage, whole.options)
            for stage in (of_texts, encoders_stage(self.model))
        )
        return EncodingDataset(texts, items, self.shares(rank), first_step, 2)

    def read(self, rank: int, first_step: int = 0) -> Iterator[Read]:
        """What a rank reads of every step, in the order of training."""
        items, steps = iter(self.dataset(rank, first_step)), self.whole.scheduled.step
        for step in range(first_step, 2):
            texts = int((steps[self.rows(rank)] == step).sum())
            passes = self.shares(rank).step(step).passes
            taken = zip(passes, itertools.islice(items, len(passes)), strict=True)
            yield list(taken), list(itertools.islice(items, texts))
        assert next(items, None) is None
