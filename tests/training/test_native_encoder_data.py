"""What ranks read where encoders of native-resolution images are data-parallel, beside whole
packs."""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data_parallel_cases import shares_of
from native_data_cases import NativeData, native_models, write_samples
from toy import stages_of

from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.data import DataOptions, OnBadSample, PackDataset
from megatron.vlm.inputs.encoder_data import EncodingDataset
from omnibal.base.errors import UserError
from omnibal.model.config import load_cluster
from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.model.parallel import Parallel
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD
from omnibal.pipeline.unit_runs import encoders_stage

PACKS = [[0, 3, 2], [1, 5], [4], [2], [5, 4, 1, 0], [2, 3]]
"""Samples in packs of two steps, of two pipelines with two, one, two and one; 2 shows nothing, and
3 and 4 a video."""
PLACES = {"step": [0, 0, 0, 1, 1, 1], "dp_rank": [0, 0, 1, 0, 0, 1], "slot": [0, 1, 0] * 2}
PLAIN, SKIP = DataOptions(), DataOptions(on_bad_sample=OnBadSample.SKIP)


@dataclass(frozen=True)
class Job:
    """Two pipelines of two stages that encode together."""

    data: NativeData
    options: DataOptions = PLAIN

    parallel = Parallel(pipeline=2, data=2)
    beside = DataParallelEncoders(
        pipelines=2, items_per_pass={"vision": 30}, kept_items={"vision": 20},
        item_ms={"vision": 1.0}, square_ms={"vision": 0.01},
    )  # fmt: skip
    levels = ()
    schedule = ONE_FORWARD_ONE_BACKWARD
    cluster = load_cluster("laptop-cpu")

    @property
    def model(self):
        return self.data.reader.model

    @property
    def ranks(self):
        return range(self.parallel.world_size)

    def whole(self) -> PackDataset:
        """Packs with all that any stage needs."""
        [everything] = stages_of(self.model)
        packs = self.data.dataset(PACKS, everything, self.options)
        places = {name: np.array(column) for name, column in PLACES.items()}
        packs.scheduled = replace(packs.scheduled, **places)
        return packs

    def read(self, rank: int):
        """(passes with what was read for them, texts) of every step, in the order of training."""
        packs, place = self.whole().scheduled, self.parallel.place(rank)
        stages = stages_of(self.model.without_encoders(), 2)
        rows = np.flatnonzero(packs.dp_rank == place["data"])
        texts, items = (
            PackDataset(self.data.reader, packs, self.data.lengths, rows, stage, self.options)
            for stage in (stages[place["pipeline"]], encoders_stage(self.model))
        )
        shares = shares_of(self, packs, rank, self.data.lengths)
        read = iter(EncodingDataset(texts, items, shares, 0, 2))
        for step in range(2):
            passes = shares.step(step).passes
            number = int((packs.step[rows] == step).sum())
            taken = list(itertools.islice(read, len(passes) + number))
            yield list(zip(passes, taken, strict=False)), taken[len(passes) :]
        assert next(read, None) is None


@pytest.fixture(params=["qwen3-vl", "qwen2.5-vl"])
def job(request, tmp_path: Path) -> Job:
    write_samples(tmp_path)
    return Job(NativeData(tmp_path, native_models()[request.param]))


def images_of(batch: MicroBatch):
    """Each image or video of a micro-batch, with its patches."""
    patches = batch.patches_YX.split([grid.patches for grid in batch.image_grids])
    return list(zip(batch.image_grids, patches, strict=True))


def test_ranks_read_images_of_whole_samples_and_their_own_text(job):
    """Prevents: another image than the one whose place its features go to, one that is read twice
    or by none, a video in parts, and texts whose positions are of another pack."""
    whole = [job.whole()[row] for row in range(len(PACKS))]
    seen = []
    for rank in job.ranks:
        rows = iter(np.flatnonzero(np.array(PLACES["dp_rank"]) == job.parallel.place(rank)["data"]))
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


def test_images_that_cannot_be_read_are_told_of_once(job, tmp_path):
    """Prevents: a sample that every rank counts, one whose text is learned without its image, and
    shapes that are not the plan's."""
    skipping = replace(job, options=SKIP)
    shapes = [[one.shape for one in everything_read(skipping, rank)] for rank in job.ranks]
    image = tmp_path / "2.png"  # of samples 1 and 5, which are in packs 1 and 4
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    batches = [everything_read(skipping, rank) for rank in job.ranks]
    assert [[one.shape for one in each] for each in batches] == shapes
    told = [error for each in batches for one in each for error in one.unreadable]
    # Two samples, each in two packs.
    assert sorted(told) == sorted(2 * list(set(told))) and len(told) == 4
    labels = sum(len(one.labels_L) for each in batches for one in each if one.labels_L is not None)
    assert labels == sum(len(one.labels_L) for one in skipping.whole())
    stopped = [one for rank in job.ranks for one in everything_read(job, rank)]
    assert any(isinstance(one, UserError) for one in stopped)


def everything_read(job: Job, rank: int) -> list:
    return [one for passes, texts in job.read(rank) for one in ([b for _, b in passes] + texts)]


@pytest.mark.parametrize("most", [1, 9, 25, 1000])
def test_held_out_images_are_split_whole(job, most):
    """Prevents: an image in two passes, or one that is left out, where a first stage encodes
    held-out data for itself."""
    batch = job.whole()[4]
    parts = batch.split_items("image_tokens", most)
    assert [one for part in parts for one in part.image_grids] == list(batch.image_grids)
    assert torch.equal(torch.cat([part.patches_YX for part in parts]), batch.patches_YX)
    for part in parts:
        assert part.image_tokens == sum(grid.patches // 4 for grid in part.image_grids)
        assert part.image_tokens <= most or len(part.image_grids) == 1
    [none] = job.whole()[3].split_items("image_tokens", most)
    assert (none.image_tokens, none.image_grids, len(none.patches_YX)) == (0, (), 0)
