"""Features by name, with one limit or three, and other items than tiles, from file to steps."""

import json
import pickle
from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_cases import printed
from length_cases import lengths_of
from packing_cases import all_patterns, assert_valid, fewest_packs
from plan_cases import request
from pydantic import ValidationError
from scipy.optimize import linprog

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths, read_lengths, write_lengths
from omnibal.job.check import check_plan
from omnibal.job.plan import Shapes
from omnibal.job.plan_data import data_at_caps, model_of_lengths, smallest_caps
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import make_plan
from omnibal.model.levels import Level
from omnibal.model.limits import Caps, check_limits
from omnibal.packing.best_fit import pack_best_fit, pack_first_fit
from omnibal.packing.fit import size_keys
from omnibal.packing.pack_bound import naive_lower_bound, packs_lower_bound
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.packing.packs import read_packs
from omnibal.packing.patterns import CapGrid, knapsack_table
from omnibal.packing.steps import deal_steps, draw_steps, size_load
from omnibal.search.caps import CapSpace

FEATURES = (("tokens",), ("clips", "tiles", "tokens"), ("tiles", "loss_tokens", "tokens"))
KINDS = pytest.mark.parametrize("names", FEATURES, ids="-".join)


def draw_lengths(names: Sequence[str], caps: Caps, samples: int, rng, most: float = 1.0) -> Lengths:
    """Return samples with each feature from zero up to `most` of its cap."""
    columns = {name: rng.integers(0, int(most * caps[name]) + 1, samples) for name in names}
    columns["tokens"] = np.maximum(columns["tokens"], 1)
    return lengths_of(**columns)


def test_caps_have_one_order_and_one_json_form():
    """Prevents equal caps that pack differently, and plans that cannot be read back."""
    caps = Caps.of(tokens=4096, tiles=9, loss_tokens=100, clips=4)
    assert caps.names == ("clips", "tiles", "loss_tokens", "tokens")
    assert caps.values.tolist() == [4, 9, 100, 4096]
    assert list(caps.model_dump(mode="json").items())[:2] == [("max_clips", 4), ("max_tiles", 9)]
    again = Caps.model_validate_json(json.dumps(caps.model_dump(), sort_keys=True))
    assert again == caps == pickle.loads(pickle.dumps(caps))
    assert len({caps, again, Caps.of(tokens=4096)}) == 2
    assert (caps["clips"], caps.get("clips"), caps.get("frames")) == (4, 4, None)
    assert str(caps) == "4 clips, 9 tiles, 100 loss_tokens and 4096 tokens"
    options = "--limit clips=4 --max-tiles 9 --limit loss_tokens=100 --max-tokens 4096"
    assert " ".join(caps.options) == options and len(caps.options) == 4
    assert str(Caps.of(tokens=1)) == "1 tokens"


@pytest.mark.parametrize(
    "wrong", [{}, {"max_tiles": 9}, {"max_tokens": 0}, {"tokens": 9}, {"max_Tokens": 9}]
)
def test_caps_that_are_none_are_refused(wrong):
    """Prevents packs without a token limit, and unknown keys."""
    with pytest.raises(ValidationError):
        Caps.model_validate(wrong)


def test_limits_are_of_features_that_there_are():
    """Prevents a misspelt limit that never binds, and unlimited items."""
    check_limits(["tiles", "tokens"], ["tiles"], "it")
    check_limits(["loss_tokens", "tokens"], [], "it")
    mistake = r"it cannot have clip: .*--max-tiles MAX and --max-tokens"
    with pytest.raises(UserError, match=mistake):
        check_limits(["tiles", "clip", "tokens"], ["tiles"], "it")
    with pytest.raises(UserError, match="must be limited; give --limit clips=MAX"):
        check_limits(["tiles", "tokens"], ["tiles", "clips"], "it")
    # Optional limits may be left out.
    check_limits(["tokens"], [], "it", others=["clips", "tiles"])
    check_limits(["tiles", "tokens"], [], "it", others=["clips", "tiles"])


def test_lengths_have_the_columns_that_there_are(tmp_path):
    """Prevents items lost or misplaced if files have different columns."""
    texts = lengths_of(tokens=[30, 5], loss_tokens=[7, 2])
    media = lengths_of(clips=[0, 3, 1], tiles=[2, 0, 5], tokens=[9, 8, 7])
    for name, lengths in (("texts", texts), ("media", media)):
        write_lengths(lengths, tmp_path / name)
        again = read_lengths([tmp_path / name])
        assert again.item_names == lengths.item_names
        assert again.sha256 == lengths.sha256
    assert pq.read_schema(tmp_path / "texts").names == ["tokens", "loss_tokens", "source"]
    joined = read_lengths([tmp_path / "texts", tmp_path / "media"])
    assert joined.sizes(["clips", "tiles", "tokens"]).tolist() == [
        [0, 0, 0, 3, 1], [0, 0, 2, 0, 5], [30, 5, 9, 8, 7],
    ]  # fmt: skip
    assert texts.column("tiles").tolist() == [0, 0]
    taken = joined.take(np.array([4, 1]))
    assert taken.sizes(["clips", "tokens"]).tolist() == [[1, 0], [7, 5]]
    assert taken.annotation_indices(np.array([0, 1])).tolist() == [4, 1]
    columns = ({}, {"tiles": [0, 0]}, {"clips": [0, 0]})
    assert len({lengths_of(tokens=[1, 2], **items).sha256 for items in columns}) == 3


def test_other_columns_are_no_items(tmp_path):
    """Prevents names, scores and foreign indices from becoming required limits."""
    columns = {
        "tokens": [3], "loss_tokens": [1], "source": ["a"], "clips": [2], "name": ["x"],
        "score": [0.5], "__index_level_0__": [7],
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert read_lengths([tmp_path / "a.parquet"]).item_names == ("clips",)
    pq.write_table(pa.table(columns | {"clips": [-2]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has clips -2, which must be at least 0; rebu"):
        read_lengths([tmp_path / "a.parquet"])
    twice = pa.table([[3], [1], ["a"], [2], [2]], [*list(columns)[:3], "clips", "clips"])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"column\(s\) clips once"):
        read_lengths([tmp_path / "a.parquet"])


def test_keys_order_sizes_of_any_magnitude():
    """Prevents sort keys that overflow with many or large features."""
    rng = np.random.default_rng(0)
    for most in (3, 2**31 - 1):
        for features in range(5):
            sizes = rng.integers(0, most, (features, 200))[:, rng.integers(0, 60, 300)]
            keys = size_keys(sizes)
            order = np.argsort(keys, kind="stable")
            expected = sorted(range(300), key=lambda i: (*sizes[:, i], i))
            assert order.tolist() == expected
            assert len(np.unique(keys)) == len(set(zip(*sizes.tolist(), strict=True)) or {()})


@KINDS
@pytest.mark.parametrize(
    ("draws", "samples", "shares", "more"), [(12, (1, 9), (0.5, 1.0), 0), (4, (16, 17), (0.6,), 1)]
)
def test_packs_are_the_fewest_or_one_more_of_many(names, draws, samples, shares, more):
    """Prevents a lost pack, invalid bounds, and packs far from the integer optimum."""
    rng = np.random.default_rng(1)
    for _ in range(draws):
        caps = Caps.of(**{name: int(rng.integers(5, 40)) for name in names})
        lengths = draw_lengths(names, caps, int(rng.integers(*samples)), rng, rng.choice(shares))
        fewest = fewest_packs(lengths.sizes(caps.names), caps.values)
        packs = pack_samples(lengths, caps, PackingMethod.BALANCED, 0)
        assert_valid(packs, lengths, caps)
        assert fewest <= len(packs) <= fewest + more
        assert naive_lower_bound(lengths, caps) <= packs_lower_bound(lengths, caps) <= fewest
        assert_valid(pack_samples(lengths, caps, PackingMethod.ISF, 0), lengths, caps)


@KINDS
@pytest.mark.parametrize("most", [0.02, 0.3, 1.0])
def test_many_samples_are_packed_once_under_all_caps(names, most):
    """Prevents lost samples, exceeded caps, and more packs than ISF."""
    rng = np.random.default_rng(3)
    caps = Caps.of(**dict(zip(names, (400, 90, 4096)[-len(names) :], strict=True)))
    lengths = draw_lengths(names, caps, 400, rng, most)
    for seed in range(2):
        packs = pack_samples(lengths, caps, PackingMethod.BALANCED, seed)
        assert_valid(packs, lengths, caps)
        isf = pack_samples(lengths, caps, PackingMethod.ISF, seed)
        assert_valid(isf, lengths, caps)
        assert naive_lower_bound(lengths, caps) <= len(packs) <= len(isf)


GIVEN_SIZES = np.array([
    [72, 89, 92, 95, 111, 127, 167, 172],
    [8, 11, 11, 13, 12, 7, 11, 6],
    [2904, 4186, 4357, 3235, 6452, 2110, 3678, 4948],
])  # fmt: skip
GIVEN_COUNTS = np.array([241, 29, 165, 225, 9, 146, 47, 172])
"""Sizes (tiles, clips, tokens) and sample counts: 251 packs suffice at the caps."""


def few_sizes(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sizes [features, sizes], counts [sizes], caps [features]; 2 to 6 samples per pack."""
    if seed < 0:
        return GIVEN_SIZES, GIVEN_COUNTS * -seed, np.array([512, 40, 16_384])
    rng = np.random.default_rng(seed)
    caps = np.array([rng.choice([40, 512]), rng.choice([24, 64]), rng.choice([8192, 16_384])])
    shares = rng.uniform(0.12, 0.55, (3, 9)) * rng.uniform(0.7, 1.0, (3, 1))
    return np.ceil(shares * caps[:, None]).astype(int), rng.integers(5, 300, 9), caps


def packs_by_rounding_down(sizes: np.ndarray, counts: np.ndarray, caps: np.ndarray) -> int:
    """Return packs of the linear program over all patterns: rounded down, plus first fit."""
    columns = all_patterns(sizes, caps)
    times = np.floor(linprog(np.ones(len(columns)), A_ub=-columns.T, b_ub=-counts).x + 1e-9)
    left = np.maximum(counts - times @ columns, 0).astype(int)
    rest = np.repeat(np.arange(len(left)), left)
    in_order = -np.arange(len(rest), dtype=float)
    return int(times.sum()) + len(pack_first_fit(sizes[:, rest], in_order, caps))


@pytest.mark.parametrize("seed", [-1, -60, 1, 2, 3, 4])
def test_three_limits_need_no_more_packs_than_rounding_down(seed):
    """Prevents 3 to 12 % extra packs by too coarse a grid for several item kinds."""
    sizes, counts, caps = few_sizes(seed)
    columns = np.repeat(sizes, counts, axis=1)
    lengths = lengths_of(**dict(zip(("tiles", "clips", "tokens"), columns, strict=True)))
    limits = Caps.of(tiles=int(caps[0]), clips=int(caps[1]), tokens=int(caps[2]))
    packs = pack_samples(lengths, limits, PackingMethod.BALANCED, 0)
    assert_valid(packs, lengths, limits)
    assert len(packs) <= packs_by_rounding_down(sizes, counts, caps)
    if seed == -1:
        assert packs_lower_bound(lengths, limits) <= len(packs) == 251


@pytest.mark.parametrize("samples", [10, 400])
def test_a_limit_that_never_binds_changes_nothing(samples):
    """Prevents texts packed worse, or differently, if the data has no tiles."""
    tokens = np.random.default_rng(samples).integers(1, 900, samples)
    texts = lengths_of(tokens=tokens), Caps.of(tokens=1000)
    with_tiles = lengths_of(tiles=0 * tokens, tokens=tokens), Caps.of(tiles=3, tokens=1000)
    found = []
    for given in (texts, with_tiles):
        packs = pack_samples(*given, PackingMethod.BALANCED, 5)
        lists = packs.samples.tolist(), packs.offsets.tolist()
        found.append((*lists, packs_lower_bound(*given), schedule_packs(*given).sha256))
    assert found[0] == found[1]


def schedule_packs(lengths: Lengths, caps: Caps):
    settings_, levels = PackSettings(seed=1, epochs=2), [Level(caps=caps)]
    load = partial(size_load, lengths=lengths)
    steps = draw_steps(lengths, settings_, levels, load, packs_per_step=2, packs_per_row=2)
    return deal_steps(steps, lengths, load, 2, levels)


def some_kinds(features: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Return a few sizes and caps. At most five samples fit a pack."""
    caps = np.array([12, 20, 300])[-features:]
    sizes = rng.integers(0, caps // 2 + 1, (5, features)).T
    sizes[-1] = np.maximum(sizes[-1], 51)
    return sizes, caps


@pytest.mark.parametrize("features", [1, 3])
def test_knapsacks_equal_all_packs(features):
    """Prevents tables wrong along an axis; compares with all patterns."""
    rng = np.random.default_rng(6)
    for _ in range(25):
        sizes, caps = some_kinds(features, rng)
        values = rng.random(sizes.shape[1]) * (0.2 + sizes[-1] / 300)
        table = knapsack_table(values, sizes, CapGrid.from_caps(caps, 1 << 18))
        fitting = all_patterns(sizes, caps)
        for room in rng.integers(0, caps + 1, (4, features)):
            inside = fitting[(fitting @ sizes.T <= room).all(axis=1)]
            assert table[tuple(room)] == pytest.approx((inside @ values).max(initial=0))


def plain_best_fit(sizes, values, first, caps) -> list[list[int]]:
    """Return best-fit-decreasing packs by scanning all samples for every place."""
    left, packs = sorted(range(len(values)), key=lambda i: -first[i]), []
    while left:
        pack = [left.pop(0)]
        while True:
            room = caps - sizes[:, pack].sum(axis=1)
            # Among samples with equal items, only the longest is offered.
            offers: dict[tuple[int, ...], tuple] = {}
            for i in left:
                if (sizes[:, i] <= room).all():
                    items = tuple(sizes[:-1, i].tolist())
                    offer = (sizes[-1, i], values[i], i)
                    offers[items] = max(offer, offers.get(items, offer))
            if not offers:
                break
            chosen = max(offers.values(), key=lambda offer: offer[1])[2]
            pack.append(chosen)
            left.remove(chosen)
        packs.append(pack)
    return packs


@pytest.mark.parametrize("most", [(), (2, 3), (2**31 - 1, 2**31 - 1, 2**31 - 1)])
def test_best_fit_equals_its_rule(most):
    """Prevents a packed integer's field from borrowing from its neighbour's."""
    rng = np.random.default_rng(8)
    for _ in range(15):
        caps = np.array([*most, 500])
        sizes = rng.integers(0, caps + 1, (40, len(caps))).T
        if len(most) == 3:
            sizes = sizes[:, rng.integers(0, 20, 40)]  # No more counts than shelves.
        values, first = rng.random(40), rng.random(40)
        given = sizes, values, first, caps
        assert pack_best_fit(*given) == plain_best_fit(*given)


def test_mock_samples_are_at_every_cap():
    """Prevents micro-batches of shapes that lack some of the model's items."""
    shapes = Shapes(caps=Caps.of(tiles=3, clips=7, tokens=50), micro_batches_per_step=2)
    packs, lengths = data_at_caps(shapes, 2)
    assert lengths.sizes(["clips", "tiles", "tokens"]).tolist() == [[7] * 4, [3] * 4, [50] * 4]
    assert packs.column("clips").tolist() == [7] * 4
    written = {"max_clips": 7, "max_tiles": 3, "max_tokens": 50}
    assert shapes.model_dump(mode="json")["caps"] == written


@KINDS
def test_caps_to_search_hold_every_sample(names):
    """Prevents candidate caps that exclude a sample, lack a feature, or ignore a fixed one."""
    caps = Caps.of(**dict(zip(names, (40, 30, 500)[-len(names) :], strict=True)))
    lengths = draw_lengths(names, caps, 200, np.random.default_rng(9))
    space = CapSpace.for_lengths(lengths, names)
    least, grid = smallest_caps(lengths, names).values, space.grid()
    tried = [*grid, *space.moves(grid[0], 2**0.25)]
    assert all(each.names == caps.names and (each.values >= least).all() for each in tried)
    assert len(space.moves(grid[-1], 2**0.25)) == 2 * len(names) + 2
    fixed = CapSpace.for_lengths(lengths, names, {"tokens": 600})
    tried = [*fixed.grid(), *fixed.moves(fixed.smallest_caps, 2)]
    assert {caps["tokens"] for caps in tried} == {600}


def test_commands_take_any_features(capsys, tmp_path):
    """Prevents options parsed but not used, and JSON without the limited features."""
    rng = np.random.default_rng(10)
    tokens = rng.integers(5, 200, 150)
    write_lengths(lengths_of(tokens=tokens), tmp_path / "text")
    write_lengths(lengths_of(tiles=tokens % 3, clips=tokens % 4, tokens=tokens), tmp_path / "media")
    common = ("--dp", 2, "--micro-batches", 2, "--no-bound", "--json")
    text = json.loads(printed(capsys, "pack", tmp_path / "text", "--max-tokens", 512, *common))
    of_features = {key for key in text if "fill" in key or "dist" in key}
    assert of_features == {"fill_tokens", "dist_ratio_language"}
    limits = ("--limit", "tiles=6", "--limit", "clips=7", "--limit", "tokens=512")
    packed = "pack", tmp_path / "media", *limits, *common, "-o", tmp_path / "packs"
    media = json.loads(printed(capsys, *packed))
    assert {"fill_clips", "fill_tiles", "dist_ratio_clips", "dist_ratio_vision"} <= media.keys()
    assert read_packs(tmp_path / "packs").column("clips").max() <= 7
    job = ("--model", "internvl-digits", "--cluster", "laptop-cpu", "--samples-per-step", 20)
    fixed = ("--limit", "loss_tokens=900", "--samples", 100, "--processes", 1, "--json")
    found = json.loads(printed(capsys, "caps", tmp_path / "text", *job, *fixed))
    assert found["max_loss_tokens"] == 900
    assert {each["max_loss_tokens"] for each in found["candidates"]} == {900}
    assert list(found)[:3] == ["max_tiles", "max_loss_tokens", "max_tokens"]


def test_texts_are_planned_for_a_model_that_sees(tmp_path):
    """Prevents a plan of lengths without tiles that cannot be checked or read again."""
    tokens = np.random.default_rng(11).integers(5, 300, 120)
    result = make_plan(request(lengths=lengths_of(tokens=tokens)))
    save_plan(result, tmp_path / "plan")
    assert "tokens of every pack are the sums" in "\n".join(check_plan(tmp_path / "plan"))
    with pytest.raises(UserError, match="count clips, and internvl-digits has no encoder"):
        model_of_lengths(result.plan.model, lengths_of(clips=[1], tokens=[3]))
    assert model_of_lengths(result.plan.model, lengths_of(clips=[0], tokens=[3]))
