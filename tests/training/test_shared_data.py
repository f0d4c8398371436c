"""A rank's share of a pack as it is loaded, beside the whole pack cut token by token."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_cases import FIRST, LAST, SKIP, TEXT, WHOLE, Data, assert_same, shares
from toy import share_of

from megatron.vlm.inputs.data import DataOptions, LossWeighting
from megatron.vlm.inputs.pack_share import Sharing
from megatron.vlm.inputs.validation_packs import pack_validation
from omnibal.base.errors import UserError
from omnibal.model.levels import CutRule, Level
from omnibal.model.limits import Caps
from omnibal.steps.cut import item_bounds

MIXED = [6, 5, 4, 3, 1]
"""Samples of the pictures: text alone, two images in one, three of one image each."""


def level_of(cut, context):
    caps = Caps.of(tiles=1, tokens=1)
    return Level(caps=caps, context=context, cut=cut, attention_weight=0.01)


@pytest.mark.parametrize("cut", CutRule)
@pytest.mark.parametrize("context", [2, 4])
def test_shares_are_the_whole_pack_cut(pictures, cut, context):
    """Prevents: tokens, tiles, labels or weights that are lost, doubled or shifted at a cut, and
    features sent to a rank that does not wait for them."""
    level = level_of(cut, context)
    for weighting in LossWeighting:
        options = DataOptions(loss_weighting=weighting, augment=True, drop_path=True, seed=3)
        whole = pictures.dataset([MIXED], options=options)
        for part, got in enumerate(shares(whole, level)):
            assert_same(got, share_of(whole[0], level, part))


def test_stages_load_what_their_units_need(pictures):
    """Prevents: a stage that reads images or text that another stage uses, and stages whose shapes
    differ."""
    level = level_of(CutRule.ZIGZAG, 4)
    needs = {FIRST: {"pixels_TCPP"}, TEXT: {"token_ids_S", "image_positions_M", "sent_features_F"}}
    needs[LAST] = {"labels_L", "loss_positions_L", "loss_weights_L"}
    of_whole = shares(pictures.dataset([MIXED]), level)
    for stage, names in needs.items():
        for got, whole in zip(
            shares(pictures.dataset([MIXED], stage), level), of_whole, strict=True
        ):
            tensors = {name for name, value in vars(got).items() if torch.is_tensor(value)}
            assert tensors == names and got.shape == whole.shape
            for name in names:
                assert torch.equal(getattr(got, name), getattr(whole, name)), name


def test_rank_decodes_only_the_images_of_its_tiles(pictures):
    """Prevents: every rank of a block decoding all images of its pack."""
    level, dataset = level_of(CutRule.CONTIGUOUS, 2), pictures.dataset([[0, 1, 2, 3, 4]], FIRST)
    bounds = item_bounds(dataset.scheduled.column("tiles")[0], 2)
    tile = np.cumsum([0, *pictures.lengths.column("tiles")[:5]])
    whole = [share.pixels_TCPP for share in shares(dataset, level)]
    [last_of_first] = [n for n in range(5) if tile[n] < bounds[1] <= tile[n + 1]]
    for number in range(last_of_first + 1, 5):
        for path in pictures.reader.annotations[number].images:
            path.path.write_bytes(b"not an image")
    first, second = shares(dataset, level)
    assert torch.equal(first.pixels_TCPP, whole[0])
    assert isinstance(second, UserError)


@pytest.mark.parametrize("stages", [[WHOLE], [FIRST, TEXT, LAST]], ids=["one", "three"])
def test_unreadable_sample_is_passed_over_by_all_its_ranks(pictures, stages):
    """Prevents: a sample without its images that some rank of the block still learns from, shapes
    that are not the plan's, and one sample counted by several ranks."""
    level = level_of(CutRule.ZIGZAG, 4)
    options = [SKIP, replace(SKIP, loss_weighting=LossWeighting.MICRO_BATCH)]
    for option in options:
        intact = [shares(pictures.dataset([MIXED], stage, option), level) for stage in stages]
        learned = sum(len(share.labels_L) for share in intact[-1])
        assert not any(share.unreadable for share in itertools.chain(*intact))
    lost = len(pictures.dataset([[3]])[0].labels_L)
    image = pictures.reader.annotations[3].images[0].path  # of several tiles
    content = image.read_bytes()
    image.write_bytes(content[: len(content) // 2])
    assert pictures.lengths.column("tiles")[3] > 2
    for option in options:
        damaged = [shares(pictures.dataset([MIXED], stage, option), level) for stage in stages]
        for before, after in zip(itertools.chain(*intact), itertools.chain(*damaged), strict=True):
            assert before.shape == after.shape
        assert sum(len(share.labels_L) for share in damaged[-1]) == learned - lost
        assert sum(len(share.unreadable) for share in damaged[0]) == 1
        if option.loss_weighting is LossWeighting.MICRO_BATCH:
            weights = torch.cat([share.loss_weights_L for share in damaged[-1]])
            assert weights.sum().item() == pytest.approx(1)


def test_rows_are_in_the_order_of_slots(data: Data):
    """Prevents: a rank that loads its own packs before the shared ones of earlier slots."""
    dataset = data.dataset([[0], [1], [2], [3], [4], [5]])
    packs = dataset.scheduled
    # Slots 0 and 2 shared by two, slot 1 one a rank; slot 3 has a pack for rank 0 alone.
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


def test_validation_packs_are_shared_too(data: Data):
    """Prevents: held-out samples as long as the plan's that no rank alone has memory for, and some
    that are lost or counted twice."""
    level = level_of(CutRule.ZIGZAG, 2).model_copy(update={"caps": Caps.of(tiles=9, tokens=300)})
    alone = Level(caps=level.caps)
    labels = []
    for one, ranks in ((alone, 1), (level, 4)):
        packs = pack_validation(data.reader, 40, one, ranks)
        batches = []
        for rank in range(ranks):
            dataset = packs.dataset(data.reader, WHOLE, rank, DataOptions(drop_path=True))
            own = list(dataset)
            assert [batch.shape for batch in own] == packs.shapes(rank)
            assert all(batch.shape.context == one.context for batch in own)
            batches += own
        labels.append(Counter(torch.cat([batch.labels_L for batch in batches]).tolist()))
        assert sum(batch.tiles for batch in batches) == packs.scheduled.column("tiles").sum()
    assert labels[0] == labels[1]
