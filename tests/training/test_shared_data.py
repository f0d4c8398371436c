"""A rank's shard of a pack, of tiles or native-resolution images, against the cut full pack."""

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_cases import FIRST, LAST, SKIP, TEXT, Data, assert_same, shares
from native_data_cases import CUTS, NativeData, data_of
from toy import share_of, stages_of

from megatron.vlm.inputs.batch import MicroBatchShape
from megatron.vlm.inputs.data import LossWeighting, MicroBatchOptions
from megatron.vlm.inputs.pack_share import Sharing
from megatron.vlm.inputs.validation_packs import pack_validation
from omnibal.base.errors import UserError
from omnibal.data.lengths import read_lengths, write_lengths
from omnibal.model.levels import CutRule, Level
from omnibal.model.limits import Caps

MIXED = [6, 5, 4, 3, 1]
"""Samples of images: text only, two images, and three with one image each."""
OF_NATIVE = [3, 1, 2, 4, 5, 0]
IN_ANY_WAY = [
    MicroBatchOptions(loss_weighting=weighting, augment=True, drop_path=True, seed=3)
    for weighting in LossWeighting
]
FAMILIES = ["qwen3-vl", "qwen2.5-vl"]


@pytest.fixture(params=["tiles", *FAMILIES])
def shown(request, tmp_path, tokenizer) -> Data:
    """Samples with images, and a pack of them."""
    found = data_of(request.param, tmp_path, tokenizer)
    found.pack = OF_NATIVE if isinstance(found, NativeData) else MIXED
    return found


def level_of(cut: CutRule, context: int, **caps: int) -> Level:
    limits = Caps.of(**caps or {"tokens": 1})
    weights = {"attention_weight": 0.01, "image_weight": 0.02}
    return Level(caps=limits, context=context, cut=cut, **weights)


@pytest.mark.parametrize("cut", CutRule)
@pytest.mark.parametrize("context", [2, 4])
def test_shares_are_the_whole_pack_cut(shown, cut, context):
    """Prevents lost, repeated or shifted tokens, tiles, patches, positions, labels or weights at a
    cut, and features sent to the wrong rank."""
    level = level_of(cut, context)
    for options in [MicroBatchOptions()] if isinstance(shown, NativeData) else IN_ANY_WAY:
        whole = shown.dataset([shown.pack], options=options)
        for part, got in enumerate(shares(whole, level)):
            assert_same(got, share_of(whole[0], level, part))


def tensors_by_stage(shown: Data) -> dict:
    """Return the names of the tensors that each stage loads."""
    places = {"image_positions_M", "sent_features_F"}
    labels = {"labels_L", "loss_positions_L", "loss_weights_L"}
    if not isinstance(shown, NativeData):
        return {FIRST: {"pixels_TCPP"}, TEXT: {"token_ids_S", *places}, LAST: labels}
    model = shown.reader.model
    embed, layers, projector, first, last = stages_of(model, *CUTS)
    of_layers = {"rope_positions_3S"} | (places if model.images.deepstack_layers else set())
    needs = {embed: {"patches_YX"}, layers: set(), projector: {"token_ids_S", *places}}
    return needs | {first: of_layers, last: of_layers | labels}


@pytest.mark.parametrize("context", [1, 4])
def test_stages_load_what_their_units_need(shown, context):
    """Prevents stages that load unused images or text, lack positions or routes of deepstack
    features, or disagree on shapes."""
    level = level_of(CutRule.ZIGZAG, context)
    for pack in [shown.pack] if context > 1 else [shown.pack, [2]]:
        of_whole = list(shares(shown.dataset([pack]), level))
        for stage, needed in tensors_by_stage(shown).items():
            own = list(shares(shown.dataset([pack], stage), level))
            names = needed if context > 1 else needed - {"sent_features_F"}
            for got, whole in zip(own, of_whole, strict=True):
                tensors = {name for name, value in vars(got).items() if torch.is_tensor(value)}
                assert tensors == names and got.shape == whole.shape
                for name in names:
                    assert torch.equal(getattr(got, name), getattr(whole, name)), name
                sees = "rope_positions_3S" not in names
                assert got.image_grids == (whole.image_grids if sees else ())
                if "sent_features_F" in names:
                    assert got.feature_counts == whole.feature_counts


def test_rank_decodes_only_its_own_images(shown):
    """Prevents every rank of a context-parallel group from decoding all images."""
    sample = 1 if isinstance(shown, NativeData) else 5
    [encodes, *_] = tensors_by_stage(shown)
    level, dataset = level_of(CutRule.CONTIGUOUS, 2), shown.dataset([[sample]], encodes)
    [intact, _] = shares(dataset, level)
    last = shown.reader.annotations[sample].images[-1].path
    os.truncate(last, last.stat().st_size - 40)  # its size is read by all ranks
    damaged = shares(dataset, level)
    first = next(damaged)
    assert_same(first, intact)
    assert first.tiles + first.image_tokens > 0
    with pytest.raises(UserError, match="--on-bad-sample skip"):
        next(damaged)


@pytest.mark.parametrize("is_split", [False, True])
def test_unreadable_sample_is_passed_over_by_all_its_ranks(shown, is_split):
    """Prevents loss on a skipped sample in some rank of its group, unplanned shapes, and a sample
    counted by several ranks."""
    level, stages = level_of(CutRule.ZIGZAG, 4), [*tensors_by_stage(shown)]
    by_pack = replace(SKIP, loss_weighting=LossWeighting.MICRO_BATCH)
    datasets = {
        option.loss_weighting: [
            shown.dataset([shown.pack], stage, option) for stage in (stages if is_split else [None])
        ]
        for option in (SKIP, by_pack)
    }
    intact = {
        weighting: [list(shares(dataset, level)) for dataset in own]
        for weighting, own in datasets.items()
    }
    image = shown.reader.annotations[3].images[-1].path  # with several tiles, if tiled
    users = [k for k in shown.pack if image in {i.path for i in shown.reader.annotations[k].images}]
    lost = sum(len(shown.load([sample]).labels_L) for sample in users)
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    for weighting, own in datasets.items():
        before, after = intact[weighting], [list(shares(dataset, level)) for dataset in own]
        for one, other in zip(*map(itertools.chain.from_iterable, (before, after)), strict=True):
            assert one.shape == other.shape and not one.unreadable
            for name in ("pixels_TCPP", "patches_YX"):
                tensors = getattr(one, name), getattr(other, name)
                assert tensors == (None, None) or tensors[0].shape == tensors[1].shape
        learned = [sum(len(share.labels_L) for share in each[-1]) for each in (before, after)]
        assert learned[1] == learned[0] - lost
        assert sum(len(share.unreadable) for share in after[0]) == len(users)
        if weighting is LossWeighting.MICRO_BATCH:
            weights = torch.cat([share.loss_weights_L for share in after[-1]])
            assert weights.sum().item() == pytest.approx(1)


def test_rows_are_in_the_order_of_slots(data: Data):
    """Prevents a rank that loads its own packs before shared packs of earlier slots."""
    packs = data.dataset([[0], [1], [2], [3], [4], [5]]).scheduled
    # Slots 0 and 2: shared by two ranks. Slot 1: a pack per rank. Slot 3: rank 0 only.
    place = {"step": [0] * 5 + [1], "dp_rank": [0, 0, 0, 0, 1, 0], "slot": [0, 1, 2, 3, 1, 0]}
    for name, column in {**place, "level": [1, 0, 1, 0, 0, 1]}.items():
        getattr(packs, name)[:] = column
    levels = [level_of(CutRule.CONTIGUOUS, 1), level_of(CutRule.CONTIGUOUS, 2)]
    for rank, rows in enumerate([[0, 1, 2, 3, 5], [0, 4, 2, 5]]):
        sharing = Sharing(dp_rank=rank, levels=levels)
        assert sharing.rows(packs, 0, 2).tolist() == rows
        assert sharing.rows(packs, 1, 2).tolist() == [5]
    assert not sharing.rows_are_full(packs.take(np.arange(5)), 2)
    assert sharing.rows_are_full(packs.take(np.arange(5, 6)), 2)


@pytest.mark.parametrize("shown", FAMILIES, indirect=True)
def test_lengths_list_images_and_times_of_videos(shown, tmp_path):
    """Prevents image sizes that differ from the data, or are lost in the file."""
    write_lengths(shown.lengths, tmp_path / "lengths.parquet")
    read = read_lengths([tmp_path / "lengths.parquet"])
    assert read.sha256 == shown.lengths.sha256
    for sample in shown.pack:
        grids = shown.load([sample]).image_grids
        found = read.image_sizes.take(np.array([sample])).images.tolist()
        assert found == [(grid.times, grid.rows * grid.columns // 4) for grid in grids]


def test_validation_packs_are_shared_too(shown, data: Data):
    """Prevents validation packs that exceed a rank's memory, and samples lost or counted twice."""
    is_native = isinstance(shown, NativeData)
    held_out, count = (shown, 6) if is_native else (data, 40)
    caps = {"image_tokens": 160, "tokens": 600} if is_native else {"tiles": 9, "tokens": 300}
    level, found = level_of(CutRule.ZIGZAG, 2, **caps), []
    for one, ranks in ((Level(caps=level.caps), 1), (level, 4)):
        packs, batches = pack_validation(held_out.reader, count, one, ranks), []
        for rank in range(ranks):
            options = MicroBatchOptions(drop_path=not is_native)
            dataset = packs.dataset(held_out.reader, held_out.whole, rank, options)
            own, held = list(dataset), (packs.scheduled, packs.lengths, dataset.rows)
            shapes = MicroBatchShape.of_shares(*held, packs.sharing(rank))
            assert [batch.shape for batch in own] == shapes
            assert all(batch.shape.context == one.context for batch in own)
            batches += own
        assert len(packs.lengths) + packs.left_out == count
        assert all(packs.scheduled.column(name).max() <= caps[name] for name in caps)
        for name in ("tiles", "image_tokens"):
            counts = packs.scheduled.column(name)
            assert sum(getattr(batch, name) for batch in batches) == counts.sum()
        labels = torch.cat([batch.labels_L for batch in batches]).tolist()
        items = ([each.patches_YX, each.pixels_TCPP] for each in batches)
        items = [len(one) for one in itertools.chain.from_iterable(items) if one is not None]
        found.append((sorted(labels), sum(items)))
    assert found[0] == found[1]
