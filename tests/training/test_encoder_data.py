"""Data read by each rank for data-parallel encoders, of tiles or native-resolution images, compared
with complete packs."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_cases import CPU, SKIP, TEXT, Data
from encoder_cases import choice_of
from encoding_cases import EncodingJob
from native_data_cases import NativeData, data_of
from toy import stages_of

from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.data import MicroBatchOptions, OnBadSample, load_batches
from omnibal.base.errors import UserError

PACKS = [[0, 6], [1, 2, 3], [4, 5], [6], [3, 5, 1], [2, 0, 4]]
"""Sample numbers of packs of two steps."""
OF_NATIVE = [[0, 3, 2], [1, 5], [4], [2], [5, 4, 1, 0], [2, 3]]
"""Packs of native-resolution samples; sample 2 has no image, 3 and 4 a video."""
OF_TILES = choice_of(2, 3, {"vision": 2})
OF_PATCHES = choice_of(2, 30, {"vision": 20}, square_ms={"vision": 0.01})
FAMILIES = ["qwen3-vl", "qwen2.5-vl"]


@pytest.fixture(params=["tiles", *FAMILIES])
def shown(request, tmp_path, tokenizer) -> Data:
    """Return samples with images."""
    return data_of(request.param, tmp_path, tokenizer)


def job_of(shown: Data, options: MicroBatchOptions, texts=None) -> EncodingJob:
    """Return two pipelines of two stages, which read `texts` (None: as stages without encoders)."""
    is_native = isinstance(shown, NativeData)
    whole = shown.dataset(OF_NATIVE if is_native else PACKS, options=options)
    stages = texts or stages_of(shown.reader.model.without_encoders(), 2)
    return EncodingJob(whole, OF_PATCHES if is_native else OF_TILES, stages)


def items_of(batch: MicroBatch) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield (start, (tile, draw)) of tiles, or (start, (patches, grid)) of images or videos."""
    if batch.pixels_TCPP is not None:
        yield from enumerate(zip(batch.pixels_TCPP, batch.drop_path_keys_T, strict=True))
    else:
        sizes = [grid.patches for grid in batch.image_grids]
        starts = np.cumsum([0, *sizes])[:-1] // 4
        grids = [torch.tensor(grid) for grid in batch.image_grids]
        yield from zip(
            starts.tolist(), zip(batch.patches_YX.split(sizes), grids, strict=True), strict=True
        )


def test_ranks_read_what_they_encode_and_their_own_text(shown):
    """Prevents another rank's tile, drop-path draw or augmentation, an image or video read twice,
    partly or never, and text of another pack."""
    is_native = isinstance(shown, NativeData)
    job = job_of(shown, MicroBatchOptions(augment=not is_native, drop_path=not is_native, seed=3))
    whole, seen = list(job.whole), []
    for rank in job.ranks:
        rows = iter(job.rows(rank))
        for passes, texts in job.stream(rank):
            for planned, batch in passes:
                assert batch.tiles + batch.image_tokens == planned.items and not batch.tokens
                assert batch.rope_positions_3S is None and batch.token_ids_S is None
                assert is_native or planned.items <= 3
                stream = items_of(batch)
                for run in planned.runs:
                    for start, item in items_of(whole[run.row]):
                        if start in run.items:
                            _, own = next(stream)
                            assert all(map(torch.equal, own, item))
                            seen.append((run.row, start))
                assert next(stream, None) is None
            for batch, row in zip(texts, rows, strict=False):
                assert batch.shape == whole[row].shape
                assert batch.patches_YX is batch.pixels_TCPP is None
                tensors = {n: value for n, value in vars(batch).items() if torch.is_tensor(value)}
                assert tensors
                for name, value in tensors.items():
                    assert torch.equal(value, vars(whole[row])[name]), name
    assert sorted(seen) == [
        (row, start) for row, pack in enumerate(whole) for start, _ in items_of(pack)
    ]


def test_reading_begins_anywhere(pictures):
    """Prevents a resumed run that reads another step's items."""
    job = job_of(pictures, MicroBatchOptions(), [TEXT] * 2)
    for rank in job.ranks:
        *_, (passes, texts) = job.stream(rank)
        [(resumed, resumed_texts)] = job.stream(rank, first_step=1)
        assert len(texts) == len(resumed_texts)
        for (_, batch), (_, again) in zip(passes, resumed, strict=True):
            assert torch.equal(batch.pixels_TCPP, again.pixels_TCPP)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_read_the_same(pictures):
    """Prevents passes in another order with several workers."""
    job = job_of(pictures, MicroBatchOptions(), [TEXT] * 2)
    expected = [one.shape for one in job.read(0)]
    for workers in (0, 2):
        assert [one.shape for one in load_batches(job.dataset(0), workers, CPU)] == expected


def test_unreadable_sample_is_told_of_once(shown):
    """Prevents a bad sample counted by every rank that holds a tile or text of it, loss on its
    text, and shapes that differ from the plan."""
    job = job_of(shown, SKIP)
    shapes = [[one.shape for one in job.read(rank)] for rank in job.ranks]
    is_native = isinstance(shown, NativeData)
    # Sample 3 with several tiles, or samples 1 and 5. Each is in packs 1 and 4.
    bad, sample = ([1, 5], 5) if is_native else ([3], 3)
    learned = sum(len(one.labels_L) for one in job.whole)
    lost = 2 * sum(len(shown.load([k]).labels_L) for k in bad)
    image = shown.reader.annotations[sample].images[0].path
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    batches = [list(job.read(rank)) for rank in job.ranks]
    assert [[one.shape for one in each] for each in batches] == shapes
    told = [error for each in batches for one in each for error in one.unreadable]
    assert sorted(told) == sorted(2 * list(set(told))) and len(told) == 2 * len(bad)
    labels = sum(len(one.labels_L) for each in batches for one in each if one.labels_L is not None)
    assert learned - labels == lost
    stops = job_of(shown, replace(SKIP, on_bad_sample=OnBadSample.STOP))
    with pytest.raises(UserError, match="--on-bad-sample skip"):
        [list(stops.read(rank)) for rank in job.ranks]


@pytest.mark.parametrize("most", [1, 9, 25, 1000])
@pytest.mark.parametrize("shown", FAMILIES, indirect=True)
def test_held_out_images_are_split_whole(shown, most):
    """Prevents a held-out image split between two passes, or left out, if the first stage encodes
    it."""
    batch, nothing = shown.load(OF_NATIVE[4]), shown.load(OF_NATIVE[3])
    parts = batch.split_items("image_tokens", most)
    assert [one for part in parts for one in part.image_grids] == list(batch.image_grids)
    assert torch.equal(torch.cat([part.patches_YX for part in parts]), batch.patches_YX)
    for part in parts:
        assert part.image_tokens == sum(grid.patches // 4 for grid in part.image_grids)
        assert part.image_tokens <= most or len(part.image_grids) == 1
    [none] = nothing.split_items("image_tokens", most)
    assert (none.image_tokens, none.image_grids, len(none.patches_YX)) == (0, (), 0)
