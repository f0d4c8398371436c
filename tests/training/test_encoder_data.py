"""What ranks read where encoders are data-parallel, beside whole packs."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from data_cases import CPU, SKIP, TEXT, WHOLE
from data_parallel_cases import shares_of

from megatron.vlm.inputs.data import DataOptions, OnBadSample, PackDataset, load_batches
from megatron.vlm.inputs.encoder_data import EncodingDataset
from omnibal.base.errors import UserError
from omnibal.model.config import load_cluster
from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.model.parallel import Parallel
from omnibal.pipeline.unit_runs import encoders_stage

PACKS = [[0, 6], [1, 2, 3], [4, 5], [6], [3, 5, 1], [2, 0, 4]]
"""Samples of the pictures in packs of two steps, of two pipelines with two, one, two and one."""
PLACES = {"step": [0, 0, 0, 1, 1, 1], "dp_rank": [0, 0, 1, 0, 0, 1], "slot": [0, 1, 0] * 2}
PARALLEL = Parallel(pipeline=2, data=2)
BESIDE = DataParallelEncoders(
    pipelines=2, items_per_pass={"vision": 3}, kept_items={"vision": 2}, item_ms={"vision": 1.0}
)
RANKS = range(PARALLEL.world_size)
CLUSTER = load_cluster("laptop-cpu")


@dataclass(frozen=True)
class Job:
    """Two pipelines of two stages that encode together; `whole` has whole packs, in one stage."""

    whole: PackDataset
    text_stage: object = TEXT

    @property
    def beside(self):
        return BESIDE

    @property
    def parallel(self):
        return PARALLEL

    @property
    def cluster(self):
        return CLUSTER

    @property
    def levels(self):
        return ()

    @property
    def model(self):
        return self.whole.reader.model

    def shares(self, rank):
        return shares_of(self, self.whole.scheduled, rank)

    def dataset(self, rank, first_step=0):
        """What a global rank reads."""
        packs, lengths, options = self.whole.scheduled, self.whole.lengths, self.whole.options
        rows = np.flatnonzero((packs.dp_rank == data_rank(rank)) & (packs.step >= first_step))
        texts, items = (
            PackDataset(self.whole.reader, packs, lengths, rows, stage, options)
            for stage in (self.text_stage, encoders_stage(self.model))
        )
        return EncodingDataset(texts, items, self.shares(rank), first_step, 2)


def job_of(pictures, options, text_stage=TEXT):
    whole = pictures.dataset(PACKS, WHOLE, options)
    places = {name: np.array(column) for name, column in PLACES.items()}
    whole.scheduled = replace(whole.scheduled, **places)
    return Job(whole, text_stage)


def data_rank(rank):
    return PARALLEL.place(rank)["data"]


def read(job, rank, first_step=0):
    """(passes with what was read for them, texts) of every step, in the order of training."""
    items, packs = iter(job.dataset(rank, first_step)), job.whole.scheduled
    for step in range(first_step, 2):
        texts = int(((packs.step == step) & (packs.dp_rank == data_rank(rank))).sum())
        passes = job.shares(rank).step(step).passes
        taken = zip(passes, itertools.islice(items, len(passes)), strict=True)
        yield list(taken), list(itertools.islice(items, texts))
    assert next(items, None) is None


def test_ranks_read_what_they_encode_and_their_own_text(pictures):
    """Prevents: another rank's tile, or another drop-path draw or degradation of it, and texts of
    another pack."""
    options = DataOptions(augment=True, drop_path=True, seed=3)
    job = job_of(pictures, options)
    whole = [job.whole[row] for row in range(len(PACKS))]
    seen = []
    for rank in RANKS:
        rows = iter(np.flatnonzero(job.whole.scheduled.dp_rank == data_rank(rank)))
        for passes, texts in read(job, rank):
            for planned, batch in passes:
                assert batch.tiles == planned.items <= 3 and not batch.tokens
                for name in ("pixels_TCPP", "drop_path_keys_T"):
                    parts = [
                        vars(whole[run.row])[name][run.items.start : run.items.stop]
                        for run in planned.runs
                    ]
                    assert torch.equal(vars(batch)[name], torch.cat(parts)), name
                seen += [(run.row, item) for run in planned.runs for item in run.items]
            for batch, row in zip(texts, rows, strict=False):
                assert batch.shape == whole[row].shape and batch.pixels_TCPP is None
                for name in ("token_ids_S", "image_positions_M"):
                    assert torch.equal(vars(batch)[name], vars(whole[row])[name])
    assert sorted(seen) == [
        (row, item) for row, pack in enumerate(whole) for item in range(pack.tiles)
    ]


def test_reading_begins_anywhere(pictures):
    """Prevents: a resumed run that reads the items of another step."""
    job = job_of(pictures, DataOptions())
    for rank in RANKS:
        *_, (passes, texts) = read(job, rank)
        [(resumed, resumed_texts)] = read(job, rank, first_step=1)
        assert len(texts) == len(resumed_texts)
        for (_, batch), (_, again) in zip(passes, resumed, strict=True):
            assert torch.equal(batch.pixels_TCPP, again.pixels_TCPP)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_read_the_same(pictures):
    """Prevents: passes in another order where several processes read."""
    dataset = job_of(pictures, DataOptions()).dataset(0)
    expected = [one.shape for one in dataset]
    for workers in (0, 2):
        assert [one.shape for one in load_batches(dataset, workers, CPU)] == expected


def test_unreadable_sample_is_told_of_once(pictures):
    """Prevents: a sample counted by every rank that has a tile or text of it, blank tiles whose
    text is learned, and shapes that are not the plan's."""
    job = job_of(pictures, SKIP, WHOLE)
    shapes = [[one.shape for one in job.dataset(rank)] for rank in RANKS]
    learned = [len(one.labels_L) for one in job.whole]
    lost = len(pictures.dataset([[3]])[0].labels_L)
    image = pictures.reader.annotations[3].images[0].path  # of several tiles, in packs 1 and 4
    content = image.read_bytes()
    image.write_bytes(content[: len(content) // 2])
    batches = [list(job.dataset(rank)) for rank in RANKS]
    assert [[one.shape for one in each] for each in batches] == shapes
    told = [error for each in batches for one in each for error in one.unreadable]
    assert len(told) == 2 and len(set(told)) == 1
    labels = [len(one.labels_L) for one in batches[0] + batches[1] if one.tokens]
    assert sum(learned) - sum(labels) == 2 * lost
    stops = job_of(pictures, replace(SKIP, on_bad_sample=OnBadSample.STOP))
    assert any(isinstance(one, UserError) for rank in RANKS for one in stops.dataset(rank))
