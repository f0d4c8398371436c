"""A rank's share of a pack of images at their native resolution as it is loaded, beside the whole
pack cut token by token and image by image."""

import os

import numpy as np
import pytest
import torch
from data_cases import assert_same, shares
from native_data_cases import NativeData, native_models, write_samples
from toy import share_of, stages_of

from megatron.vlm.inputs.data import DataOptions, OnBadSample
from megatron.vlm.inputs.validation_packs import pack_validation
from omnibal.base.errors import UserError
from omnibal.data.lengths import read_lengths, write_lengths
from omnibal.model.levels import CutRule, Level
from omnibal.model.limits import Caps

PACK = [3, 1, 2, 4, 5, 0]
SKIP = DataOptions(on_bad_sample=OnBadSample.SKIP)
CUTS = (1, 6, 8, 9)
"""Stages: embed; layers; projector and language embed; a layer; the rest."""


@pytest.fixture(params=["qwen3-vl", "qwen2.5-vl"])
def data(request, tmp_path) -> NativeData:
    write_samples(tmp_path)
    return NativeData(tmp_path, native_models()[request.param])


def level_of(cut: CutRule, context: int) -> Level:
    caps = Caps.of(image_tokens=1, tokens=1)
    return Level(caps=caps, context=context, cut=cut, attention_weight=0.01, image_weight=0.02)


def shares_of(data: NativeData, level: Level, stage, options=None, pack=PACK) -> list:
    """What every rank of the block loads of the pack."""
    return shares(data.dataset([pack], stage, options), level)


@pytest.mark.parametrize("cut", CutRule)
@pytest.mark.parametrize("context", [2, 4])
def test_shares_are_the_whole_pack_cut(data, cut, context):
    """Prevents: patches, positions, tokens or labels that are lost, doubled or another rank's, and
    features sent to a rank that does not wait for them."""
    [stage] = stages_of(data.reader.model)
    whole, level = data.dataset([PACK], stage)[0], level_of(cut, context)
    for part, got in enumerate(shares_of(data, level, stage)):
        assert_same(got, share_of(whole, level, part))


def test_stages_load_what_their_units_need(data):
    """Prevents: a stage that lacks the places or routes of deepstack features, and stages whose
    shapes differ."""
    model, level = data.reader.model, level_of(CutRule.ZIGZAG, 4)
    [whole] = stages_of(model)
    of_whole = shares_of(data, level, whole)
    embed, layers, projector, first, last = stages_of(model, *CUTS)
    for stage in (embed, layers, projector, first, last):
        for got, expected in zip(shares_of(data, level, stage), of_whole, strict=True):
            assert got.shape == expected.shape
            sees = stage in (embed, layers, projector)
            assert got.image_grids == (expected.image_grids if sees else ())
            wanted = {"patches_YX"} if stage is embed else set()
            if stage in (first, last):
                wanted = {"rope_positions_3S"}
            takes_deepstack = stage in (first, last) and model.images.deepstack_layers
            if stage is projector or takes_deepstack:
                wanted |= {"image_positions_M", "sent_features_F"}
                assert got.feature_counts == expected.feature_counts
            for name in wanted:
                assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_rank_decodes_only_its_own_images(data):
    """Prevents: every rank of a block decoding all images of its pack."""
    level, embed = level_of(CutRule.CONTIGUOUS, 2), stages_of(data.reader.model, 1)[0]
    intact = shares_of(data, level, embed, pack=[1])
    last = data.reader.annotations[1].images[2].path
    os.truncate(last, last.stat().st_size - 40)
    first, second = shares_of(data, level, embed, pack=[1])
    assert torch.equal(first.patches_YX, intact[0].patches_YX) and len(first.image_grids)
    assert isinstance(second, UserError)


def test_unreadable_sample_is_passed_over_by_all_its_ranks(data):
    """Prevents: a sample without its images that some rank still learns from, or counted twice."""
    [stage] = stages_of(data.reader.model)
    level, path = level_of(CutRule.ZIGZAG, 4), data.reader.annotations[1].images[2].path
    intact = shares_of(data, level, stage, SKIP)
    lost = len(data.dataset([[1]], stage)[0].labels_L)
    lost += sum(
        len(data.dataset([[s]], stage)[0].labels_L)
        for s in PACK
        if s != 1 and path in {image.path for image in data.reader.annotations[s].images}
    )
    os.truncate(path, path.stat().st_size - 40)
    damaged = shares_of(data, level, stage, SKIP)
    for before, after in zip(intact, damaged, strict=True):
        assert before.shape == after.shape
        assert before.patches_YX.shape == after.patches_YX.shape
    learned = [sum(len(share.labels_L) for share in each) for each in (intact, damaged)]
    assert learned[1] == learned[0] - lost
    told = sum(len(share.unreadable) for share in damaged)
    assert told == sum(
        path in {image.path for image in data.reader.annotations[s].images} for s in PACK
    )


def test_lengths_list_images_and_times_of_videos(data, tmp_path):
    """Prevents: shares of other images than the data has, and a list that a file loses."""
    [stage] = stages_of(data.reader.model)
    write_lengths(data.lengths, tmp_path / "lengths.parquet")
    read = read_lengths([tmp_path / "lengths.parquet"])
    assert read.sha256 == data.lengths.sha256
    for sample in PACK:
        grids = data.dataset([[sample]], stage)[0].image_grids
        found = read.image_sizes.take(np.array([sample])).images.tolist()
        assert found == [(grid.times, grid.rows * grid.columns // 4) for grid in grids]


def test_validation_packs_are_shared_too(data):
    """Prevents: held-out images that are lost, or counted twice."""
    [stage] = stages_of(data.reader.model)
    caps = Caps.of(image_tokens=400, tokens=900)
    level = level_of(CutRule.ZIGZAG, 2).model_copy(update={"caps": caps})
    found = []
    for one, ranks in ((Level(caps=caps), 1), (level, 4)):
        packs = pack_validation(data.reader, 6, one, ranks)
        own = [b for r in range(ranks) for b in packs.dataset(data.reader, stage, r, SKIP)]
        found.append((
            sorted(torch.cat([batch.labels_L for batch in own]).tolist()),
            sum(batch.image_tokens for batch in own),
            sum(len(batch.patches_YX) for batch in own),
        ))  # fmt: skip
    assert found[0] == found[1]
