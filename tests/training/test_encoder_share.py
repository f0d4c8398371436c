"""Shares of data-parallel encoders: what every rank encodes, and where each feature goes."""

import numpy as np
import pytest
from length_cases import lengths_of
from toy import toy_model

from megatron.vlm.inputs.encoder_share import EncoderShares, EncodingRanks, pass_bounds
from omnibal.model.data_parallel_encoders import DataParallelEncoders, takes_whole_samples
from omnibal.model.encoders import ClipsEncoder, ImagesEncoder
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import Packs, ScheduledPacks

pytestmark = pytest.mark.quick

MODEL = toy_model()
AUDIO = ClipsEncoder(
    layers=1, hidden_size=16, heads=2, ffn_hidden_size=16, normalization="LayerNorm",
    qkv_bias=True, qk_norm=False, mel_bins=8, frames=24, positions_per_token=4,
)  # fmt: skip
BOTH = MODEL.model_copy(update={"encoders": MODEL.encoders | {"audio": AUDIO}})
IMAGES = ImagesEncoder(
    layers=3, hidden_size=16, heads=2, ffn_hidden_size=16, normalization="LayerNorm",
    qkv_bias=True, qk_norm=False, patch_size=2, deepstack_layers=(0, 1),
)  # fmt: skip
"""Takes whole samples, and makes three rows of a cell."""
MODELS = (
    MODEL,
    BOTH,
    MODEL.model_copy(update={"encoders": {"vision": IMAGES}}),
    MODEL.model_copy(update={"encoders": {"vision": IMAGES, "audio": AUDIO}}),
)


def random_packs(random, data, steps):
    """Packs of random items, and lengths of their samples; some ranks have none in a step."""
    each = random.integers(0, 4, (steps, data))
    places = [
        (step, rank, slot)
        for step in range(steps)
        for rank in range(data)
        for slot in range(each[step, rank])
    ]
    step, rank, slot = (np.array(column) for column in zip((0, 0, 0), *places, strict=True))
    count = len(step)
    order = np.lexsort((slot, rank, step))
    items = {
        name: (random.integers(0, 9, count) * (random.random(count) < 0.6)).astype(np.int32)
        for name in ("tiles", "clips")
    }
    offsets = np.append(0, np.cumsum(random.integers(1, 4, count)))
    number = int(offsets[-1])
    cells = (random.integers(1, 9, number) * (random.random(number) < 0.6)).astype(np.int32)
    packs = Packs(samples=np.arange(number), offsets=offsets)
    lengths = lengths_of(image_tokens=cells, tokens=cells + 5, loss_tokens=cells)
    items["image_tokens"] = packs.sums(cells).astype(np.int32)
    scheduled = ScheduledPacks(
        packs=packs,
        step=step[order].astype(np.int64),
        dp_rank=rank[order].astype(np.int32),
        slot=slot[order].astype(np.int32),
        epoch=np.zeros(count, np.int32),
        items=items,
        tokens=np.full(count, 100, np.int32),
        level=np.zeros(count, np.int32),
    )
    return scheduled, lengths


def shares_of_all(seed):
    """Shares of every rank of a random job, by global rank."""
    random = np.random.default_rng(seed)
    pipelines = int(random.choice([1, 2, 3]))
    parallel = Parallel(
        tensor=int(random.choice([1, 2, 3])),
        pipeline=int(random.choice([1, 2])),
        data=pipelines * int(random.choice([1, 2])),
    )
    model = MODELS[seed % 4]
    names = list(model.encoders)
    beside = DataParallelEncoders(
        pipelines=pipelines,
        items_per_pass={name: int(random.integers(1, 5)) for name in names},
        kept_items={name: int(random.integers(0, 9)) for name in names},
        item_ms={name: float(random.random()) for name in names},
        square_ms=dict.fromkeys(takes_whole_samples(model), 0.01),
    )
    packs, lengths = random_packs(random, parallel.data, steps=3)
    return [
        EncoderShares(
            model=model,
            beside=beside,
            ranks=EncodingRanks(pipelines=pipelines, parallel=parallel, rank=rank),
            gpus_per_node=(2, 3, 8)[seed % 3],
            packs=packs,
            levels=[Level(caps=Caps.of(tokens=100))],
            lengths=lengths,
        )
        for rank in range(parallel.world_size)
    ]


def rows_made(share, model):
    """Names of the rows that a rank makes: (pack, encoder, item, row of the item)."""
    for one in share.passes:
        for run in one.runs:
            for item in run.items:
                for row in range(rows_of(model.encoders[one.encoder])):
                    yield run.row, one.encoder, item, row


def rows_of(encoder):
    """Rows of an item: of its tokens, or of its one and two deepstack features."""
    return 3 if encoder is IMAGES else encoder.tokens_per_item


def cut(values, slices):
    return [value for one in slices for value in values[one]]


@pytest.mark.parametrize("seed", range(40))
def test_every_feature_arrives_at_its_place(seed):
    """Prevents: features in another pack's places, which no shape would show.

    Ranks are played one after the other; rows are names, and are sent as the route says.
    """
    ranks = shares_of_all(seed)
    parallel, model = ranks[0].ranks.parallel, ranks[0].model
    for shares in ([rank.step(step) for rank in ranks] for step in range(3)):
        for block in range(parallel.data // ranks[0].ranks.pipelines):
            group = sorted(ranks[0].ranks.global_ranks(block))
            leaving = {}
            for rank in group:
                rows = cut(list(rows_made(shares[rank], model)), shares[rank].route.sent_slices)
                bounds = np.cumsum([0, *shares[rank].route.sent])
                assert bounds[-1] == len(rows)
                for place, target in enumerate(group):
                    leaving[rank, target] = rows[bounds[place] : bounds[place + 1]]
            for rank in group:
                check_arrived(shares[rank], [leaving[source, rank] for source in group], rank)


def check_arrived(share, by_source, rank):
    """This rank's rows are its part of its pipeline's, in order, and others get none."""
    ranks, place = share.ranks, share.ranks.parallel.place(rank)
    assert list(map(len, by_source)) == share.route.received
    if place["pipeline"]:
        assert not any(by_source)
        return
    arrived = [row for rows in by_source for row in rows]
    part = cut(arrived, share.route.received_slices)
    wanted = []
    own = share.rows[share.pipeline == ranks.pipeline]
    found = [dict[str, list]() for _ in own]
    for name, encoder in share.encoders.items():
        for row, pack in zip(own, found, strict=True):
            count = int(share.items[name][share.rows == row][0])
            pack[name] = [
                (row, name, item, token)
                for item in range(count)
                for token in range(rows_of(encoder))
            ]
            wanted += pack[name]
    for pack, slices in zip(found, share.slices(), strict=True):
        assert all(wanted[slices[name]] == rows for name, rows in pack.items())
    start = sum(share.route.parts[: place["tensor"]])
    assert part == wanted[start : start + share.route.parts[place["tensor"]]]
    assert sum(share.route.parts) == len(wanted)
    assert max(share.route.parts) - min(share.route.parts) <= 1


@pytest.mark.parametrize("seed", range(12))
def test_counted_passes_are_those_of_every_step(seed):
    """Prevents: a dataset whose items are not the passes that training takes, and more items kept
    than there is memory for."""
    for rank in shares_of_all(seed):
        counted = rank.passes_of_steps(0, 3).tolist()
        passes = [rank.step(step).passes for step in range(3)]
        assert counted[1:] == rank.passes_of_steps(1, 3).tolist()
        assert counted == [len(each) for each in passes]
        for one in (one for each in passes for one in each):
            most, encoder = (
                rank.beside.items_per_pass[one.encoder],
                rank.model.encoders[one.encoder],
            )
            assert 1 <= one.items <= most or len(samples_of(one, rank)) == 1
            assert one.feature == encoder.feature
        for name, kept in rank.beside.kept_items.items():
            for each in passes:
                own = [one for one in each if one.encoder == name]
                items, is_kept = (sum(one.items for one in ones) for ones in (
                    own, [one for one in own if one.is_kept],
                ))  # fmt: skip
                if rank.model.encoders[name] is not IMAGES:
                    assert is_kept == min(kept, items)
                    continue
                # As many whole samples as fit.
                again = [cells for one in own if not one.is_kept for cells in samples_of(one, rank)]
                assert is_kept <= kept and (not again or is_kept + again[0] > kept)


@pytest.mark.parametrize("seed", range(12))
def test_every_item_is_encoded_once(seed):
    """Prevents: an item that is encoded twice or never."""
    ranks = shares_of_all(seed)
    named = [
        (run.row, one.encoder, item)
        for rank in ranks
        for step in range(3)
        for one in rank.step(step).passes
        for run in one.runs
        for item in run.items
    ]
    encoders, packs = ranks[0].model.encoders, ranks[0].packs
    assert len(set(named)) == len(named)
    assert len(named) == sum(int(packs.column(one.feature).sum()) for one in encoders.values())


def samples_of(planned, rank):
    """Cells of the samples of a pass, none of which is divided; [] of equal items."""
    if rank.model.encoders[planned.encoder] is not IMAGES:
        return []
    found = []
    for run in planned.runs:
        cells = rank.lengths.items["image_tokens"][rank.packs.packs[run.row]]
        starts = np.cumsum(cells) - cells
        held = [
            c for c, s in zip(cells.tolist(), starts.tolist(), strict=True) if c and s in run.items
        ]
        assert sum(held) == len(run.items)
        found += held
    return found


def test_passes_do_not_mix_kept_items_and_others():
    """Prevents: activations kept of more items, or fewer, than memory was planned for."""
    of_ten = [(0, 4, True), (4, 5, True), (5, 9, False), (9, 10, False)]
    assert pass_bounds(10, 4, 5) == of_ten
    assert pass_bounds(3, 4, 5) == [(0, 3, True)]
    assert pass_bounds(3, 4, 0) == [(0, 3, False)]
    assert pass_bounds(0, 4, 5) == []
