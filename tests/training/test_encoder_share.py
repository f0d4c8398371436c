"""Shares of data-parallel encoders: items encoded by each rank, and destinations of features."""

from collections import Counter
from itertools import chain, islice, product

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
SIZES = {
    "hidden_size": 16, "heads": 2, "ffn_hidden_size": 16, "normalization": "LayerNorm",
    "qkv_bias": True, "qk_norm": False,
}  # fmt: skip
AUDIO = ClipsEncoder(layers=1, mel_bins=8, frames=24, positions_per_token=4, **SIZES)
IMAGES = ImagesEncoder(layers=3, patch_size=2, deepstack_layers=(0, 1), **SIZES)
"""Encodes complete samples; three rows per cell."""
MODELS = [
    MODEL.model_copy(update={"encoders": {"vision": vision, **audio}})
    for vision in (MODEL.vision, IMAGES)
    for audio in ({}, {"audio": AUDIO})
]


def random_packs(random, data, steps):
    """Return packs of random items and their samples' lengths; some ranks lack packs in a step."""
    each = random.integers(0, 4, (steps, data))
    each[0, 0] += 1
    step, rank = (np.repeat(axis, each.ravel()) for axis in np.indices(each.shape).reshape(2, -1))
    slot = np.concatenate([np.arange(count) for count in each.ravel()])
    offsets = np.append(0, np.cumsum(random.integers(1, 4, len(step))))
    samples = np.arange(offsets[-1])
    items = {
        name: random.integers(1, most, len(samples)) * (random.random(len(samples)) < share)
        for name, most, share in (("tiles", 6, 0.4), ("clips", 6, 0.4), ("image_tokens", 9, 0.6))
    }
    lengths = lengths_of(**items, tokens=0 * samples + 50)
    packs = Packs(samples=samples, offsets=offsets)
    return ScheduledPacks.from_packs(packs, lengths, step, rank, slot), lengths


def shares_of_all(seed):
    """Return shares of all ranks of a random job, by global rank."""
    random = np.random.default_rng(seed)
    pipelines = int(random.choice([1, 2, 3]))
    parallel = Parallel(
        tensor=int(random.choice([1, 2, 3])),
        pipeline=int(random.choice([1, 2])),
        data=pipelines * int(random.choice([1, 2])),
    )
    model = MODELS[seed % 4]
    names = list(model.encoders)
    dp_encoders = DataParallelEncoders(
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
            settings=dp_encoders,
            ranks=EncodingRanks(pipelines=pipelines, parallel=parallel, rank=rank),
            gpus_per_node=(2, 3, 8)[seed % 3],
            packs=packs,
            levels=[Level(caps=Caps.of(tokens=100))],
            lengths=lengths,
        )
        for rank in range(parallel.world_size)
    ]


def items_made(share):
    """Return (pack, encoder, item) encoded by a rank, in order."""
    runs = ((run, one.encoder) for one in share.passes for run in one.runs)
    return [(run.row, encoder, item) for run, encoder in runs for item in run.items]


def rows_of(items, model):
    """Yield names of the items' rows: of tokens, or of the feature and two deepstack features."""
    for pack, name, item in items:
        encoder = model.encoders[name]
        count = 3 if encoder is IMAGES else encoder.tokens_per_item
        yield from ((pack, name, item, row) for row in range(count))


def select_rows(values, slices):
    return [value for one in slices for value in values[one]]


@pytest.mark.parametrize("seed", range(40))
def test_every_feature_arrives_at_its_place(seed):
    """Prevents items encoded twice or never, and features at another pack's positions, which shapes
    would not reveal."""
    ranks = shares_of_all(seed)
    parallel, model = ranks[0].ranks.parallel, ranks[0].model
    # Ranks are simulated in turn; rows are names, sent by the route.
    for shares in ([rank.step(step) for rank in ranks] for step in range(3)):
        made = [items_made(share) for share in shares]
        assert max(Counter(chain(*made)).values(), default=1) == 1
        for block in range(parallel.data // ranks[0].ranks.pipelines):
            group = sorted(ranks[0].ranks.global_ranks(block))
            leaving = {}
            for rank in group:
                route = shares[rank].route
                rows = iter(select_rows(list(rows_of(made[rank], model)), route.sent_slices))
                for target, count in zip(group, route.sent, strict=True):
                    leaving[rank, target] = list(islice(rows, count))
                assert not list(rows)
            for rank in group:
                check_arrived(shares[rank], [leaving[source, rank] for source in group], model)


def check_arrived(share, by_source, model):
    """Assert that the rank gets its part of its pipeline's rows in order, later stages none."""
    ranks, route = share.ranks, share.route
    place = ranks.parallel.place(ranks.rank)
    assert list(map(len, by_source)) == route.received
    if place["pipeline"]:
        assert not any(by_source)
        return
    own = share.rows[share.pipeline == ranks.pipeline]
    wanted, found = [], [dict[str, list]() for _ in own]
    for name in share.encoders:
        for row, pack in zip(own, found, strict=True):
            count = int(share.items[name][share.rows == row][0])
            pack[name] = list(rows_of([(row, name, item) for item in range(count)], model))
            wanted += pack[name]
    for pack, slices in zip(found, share.slices(), strict=True):
        assert all(wanted[slices[name]] == rows for name, rows in pack.items())
    start, stop = (sum(route.parts[: place["tensor"] + more]) for more in (0, 1))
    assert select_rows(list(chain(*by_source)), route.received_slices) == wanted[start:stop]
    assert sum(route.parts) == len(wanted) and max(route.parts) - min(route.parts) <= 1


@pytest.mark.parametrize("seed", range(12))
def test_passes_keep_their_limits(seed):
    """Prevents larger passes, and more kept items, than planned."""
    for rank in shares_of_all(seed):
        passes = [rank.step(step).passes for step in range(3)]
        for one in chain(*passes):
            most = rank.settings.items_per_pass[one.encoder]
            assert 1 <= one.items <= most or len(samples_of(one, rank)) == 1
            assert one.feature == rank.model.encoders[one.encoder].feature
        for (name, kept), each in product(rank.settings.kept_items.items(), passes):
            own = [one for one in each if one.encoder == name]
            is_kept = sum(one.items for one in own if one.is_kept)
            if rank.model.encoders[name] is not IMAGES:
                assert is_kept == min(kept, sum(one.items for one in own))
                continue
            # As many complete samples as fit.
            again = [cells for one in own if not one.is_kept for cells in samples_of(one, rank)]
            assert is_kept <= kept and (not again or is_kept + again[0] > kept)


def samples_of(planned, rank):
    """Return cells of a pass's samples, asserting that none is divided; [] if items are equal."""
    if rank.model.encoders[planned.encoder] is not IMAGES:
        return []
    found = []
    for run in planned.runs:
        cells = rank.lengths.items["image_tokens"][rank.packs.packs[run.row]]
        starts = np.cumsum(cells) - cells
        held = cells[(cells > 0) & (starts >= run.items.start) & (starts < run.items.stop)]
        assert held.sum() == len(run.items)
        found += held.tolist()
    return found


def test_passes_do_not_mix_kept_items_and_others():
    """Prevents activations kept for more or fewer items than the plan's memory counts."""
    of_ten = [(0, 4, True), (4, 5, True), (5, 9, False), (9, 10, False)]
    assert pass_bounds(10, 4, 5) == of_ten
    assert pass_bounds(3, 4, 5) == [(0, 3, True)]
    assert pass_bounds(3, 4, 0) == [(0, 3, False)]
    assert pass_bounds(0, 4, 5) == []
