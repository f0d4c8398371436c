"""What ranks read where encoders of native-resolution images are data-parallel, beside whole
packs."""

from pathlib import Path

import pytest
import torch
from encoding_cases import EncodingJob
from native_data_cases import NativeData, native_models, write_samples
from toy import stages_of

from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.data import DataOptions, OnBadSample
from omnibal.base.errors import UserError
from omnibal.model.data_parallel_encoders import DataParallelEncoders

PACKS = [[0, 3, 2], [1, 5], [4], [2], [5, 4, 1, 0], [2, 3]]
"""Samples in packs of two steps; 2 shows nothing, and 3 and 4 a video."""
BESIDE = DataParallelEncoders(
    pipelines=2, items_per_pass={"vision": 30}, kept_items={"vision": 20},
    item_ms={"vision": 1.0}, square_ms={"vision": 0.01},
)  # fmt: skip
SKIP = DataOptions(on_bad_sample=OnBadSample.SKIP)


def job_of(data: NativeData, options: DataOptions | None = None) -> EncodingJob:
    model = data.reader.model
    [everything] = stages_of(model)
    whole = data.dataset(PACKS, everything, options)
    return EncodingJob(whole, BESIDE, stages_of(model.without_encoders(), 2))


@pytest.fixture(params=["qwen3-vl", "qwen2.5-vl"])
def data(request, tmp_path: Path) -> NativeData:
    write_samples(tmp_path)
    return NativeData(tmp_path, native_models()[request.param])


def images_of(batch: MicroBatch):
    """Each image or video of a micro-batch, with its patches."""
    patches = batch.patches_YX.split([grid.patches for grid in batch.image_grids])
    return list(zip(batch.image_grids, patches, strict=True))


def test_ranks_read_images_of_whole_samples_and_their_own_text(data):
    """Prevents: another image than the one whose place its features go to, one that is read twice
    or by none, a video in parts, and texts whose positions are of another pack."""
    job = job_of(data)
    whole = list(job.whole)
    seen = []
    for rank in job.ranks:
        rows = iter(job.rows(rank))
        for passes, texts in job.read(rank):
            for planned, batch in passes:
                assert batch.image_tokens == planned.items and not batch.tokens
                assert batch.rope_positions_3S is None and batch.token_ids_S is None
                read = iter(images_of(batch))
                for run in planned.runs:
                    start = 0
                    for number, (grid, patches) in enumerate(images_of(whole[run.row])):
                        if start in run.items:
                            own_grid, own_patches = next(read)
                            assert own_grid == grid and torch.equal(own_patches, patches)
                            seen.append((run.row, number))
                        start += grid.patches // 4
                assert next(read, None) is None
            for batch, row in zip(texts, rows, strict=False):
                assert batch.shape == whole[row].shape and batch.patches_YX is None
                assert torch.equal(batch.rope_positions_3S, whole[row].rope_positions_3S)
                if batch.token_ids_S is not None:
                    assert torch.equal(batch.token_ids_S, whole[row].token_ids_S)
                    assert torch.equal(batch.image_positions_M, whole[row].image_positions_M)
    assert sorted(seen) == [
        (row, number) for row, pack in enumerate(whole) for number in range(len(pack.image_grids))
    ]


def test_images_that_cannot_be_read_are_told_of_once(data, tmp_path):
    """Prevents: a sample that every rank counts, one whose text is learned without its image, and
    shapes that are not the plan's."""
    job, skipping = job_of(data), job_of(data, SKIP)
    shapes = [[one.shape for one in skipping.dataset(rank)] for rank in job.ranks]
    image = tmp_path / "2.png"  # of samples 1 and 5, which are in packs 1 and 4
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    batches = [list(skipping.dataset(rank)) for rank in job.ranks]
    assert [[one.shape for one in each] for each in batches] == shapes
    told = [error for each in batches for one in each for error in one.unreadable]
    # Two samples, each in two packs.
    assert sorted(told) == sorted(2 * list(set(told))) and len(told) == 4
    labels = sum(len(one.labels_L) for each in batches for one in each if one.labels_L is not None)
    assert labels == sum(len(one.labels_L) for one in skipping.whole)
    stopped = [one for rank in job.ranks for one in job.dataset(rank)]
    assert any(isinstance(one, UserError) for one in stopped)


@pytest.mark.parametrize("most", [1, 9, 25, 1000])
def test_held_out_images_are_split_whole(data, most):
    """Prevents: an image in two passes, or one that is left out, where a first stage encodes
    held-out data for itself."""
    whole = job_of(data).whole
    batch = whole[4]
    parts = batch.split_items("image_tokens", most)
    assert [one for part in parts for one in part.image_grids] == list(batch.image_grids)
    assert torch.equal(torch.cat([part.patches_YX for part in parts]), batch.patches_YX)
    for part in parts:
        assert part.image_tokens == sum(grid.patches // 4 for grid in part.image_grids)
        assert part.image_tokens <= most or len(part.image_grids) == 1
    [none] = whole[3].split_items("image_tokens", most)
    assert (none.image_tokens, none.image_grids, len(none.patches_YX)) == (0, (), 0)
