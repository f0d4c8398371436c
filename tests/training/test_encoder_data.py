"""What ranks read where encoders are data-parallel, beside whole packs."""

from dataclasses import replace

import pytest
import torch
from data_cases import CPU, SKIP, TEXT, WHOLE
from encoding_cases import EncodingJob

from megatron.vlm.inputs.data import DataOptions, OnBadSample, load_batches
from omnibal.base.errors import UserError
from omnibal.model.data_parallel_encoders import DataParallelEncoders

PACKS = [[0, 6], [1, 2, 3], [4, 5], [6], [3, 5, 1], [2, 0, 4]]
"""Samples of the pictures in packs of two steps."""
BESIDE = DataParallelEncoders(
    pipelines=2, items_per_pass={"vision": 3}, kept_items={"vision": 2}, item_ms={"vision": 1.0}
)
RANKS = EncodingJob.ranks


def job_of(pictures, options, text_stage=TEXT):
    return EncodingJob(pictures.dataset(PACKS, WHOLE, options), BESIDE, [text_stage] * 2)


def test_ranks_read_what_they_encode_and_their_own_text(pictures):
    """Prevents: another rank's tile, or another drop-path draw or degradation of it, and texts of
    another pack."""
    options = DataOptions(augment=True, drop_path=True, seed=3)
    job = job_of(pictures, options)
    whole = [job.whole[row] for row in range(len(PACKS))]
    seen = []
    for rank in RANKS:
        rows = iter(job.rows(rank))
        for passes, texts in job.read(rank):
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
        *_, (passes, texts) = job.read(rank)
        [(resumed, resumed_texts)] = job.read(rank, first_step=1)
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
