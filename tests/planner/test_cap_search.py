"""Cap search: the caps of minimum predicted time that fit in memory."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cli_cases import printed
from length_cases import make_lengths
from plan_cases import (
    MODEL,
    example_lengths,
    example_profile,
    planned_ms_per_sample,
    request,
    search_request,
)

from omnibal.base.errors import UserError
from omnibal.base.files import write_json_model
from omnibal.cost.profile import Profile, model_sha256
from omnibal.cost.source import CostSource
from omnibal.data.lengths import Lengths, draw_samples, write_lengths
from omnibal.job.plan_data import smallest_caps
from omnibal.job.planner import make_plan
from omnibal.model.config import load_cluster
from omnibal.model.levels import Level
from omnibal.model.limits import Caps, memory_cap_gib
from omnibal.packing.isf import pack_isf
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod
from omnibal.search.cap_search import (
    CapSearch,
    cap_notes,
    isf_note,
    most_candidates,
    paper_caps,
    search_caps,
)
from omnibal.search.strategy import FreeSizes, StrategyRequest

CLUSTER = load_cluster("laptop-cpu")
RULES = pytest.mark.parametrize("rule", ["time", "paper"])


def profile_with_fixed_costs(fixed_ms: float) -> Profile:
    """Return a profile of `fixed_ms` per pass plus time per tile and token: favours large packs."""
    profile = example_profile()
    measurements = tuple(
        one.model_copy(update={"forward_ms": forward_ms, "backward_ms": 2 * forward_ms})
        for one in profile.measurements
        for forward_ms in [fixed_ms + one.tiles + one.tokens / 100]
    )
    changes = {"model_sha256": model_sha256(MODEL), "measurements": measurements}
    return profile.model_copy(update=changes)


def request_of(**changes) -> StrategyRequest:
    defaults = {
        "cost_source": CostSource(profile_with_fixed_costs(2.0)),
        "lengths": example_lengths(count=150),
        "samples_per_step": 50,
        "samples": 1000,
        "sizes": FreeSizes(gpus=4),
    }
    request = search_request(defaults, changes)
    return replace(request, layouts=(request.job.parallel,))


def search(rule="time", **changes) -> CapSearch:
    return search_caps(request_of(**changes), rule, lambda done: None)


def plan_ms(searched: StrategyRequest, caps: Caps) -> float:
    return planned_ms_per_sample(searched, caps, searched.job.parallel)


def min_caps(lengths: Lengths) -> Caps:
    return smallest_caps(lengths, ("tiles", "tokens"))


@pytest.mark.parametrize("packing", PackingMethod)
def test_winner_is_the_best_of_the_planners_own_predictions(packing):
    """Prevents a second cost formula, other packs than the planner's, and a suboptimal winner."""
    searched = request_of(packing=packing, lengths=example_lengths(count=120))
    found = search_caps(searched, "time", lambda done: None)
    assert len(found.candidates) >= 3
    shown = [each.strategy.ms_per_sample for each in found.candidates]
    assert shown == sorted(shown)
    compared = found.candidates if packing is PackingMethod.ISF else found.candidates[:3]
    planned = [plan_ms(searched, each.caps) for each in compared]
    np.testing.assert_allclose(shown[: len(planned)], planned, rtol=1e-9)


def test_few_candidates_come_close_to_all():
    """Prevents a candidate grid or moves that miss the best caps."""
    searched = request_of()
    found = search_caps(searched, "time", lambda done: None)
    least = min_caps(searched.lengths)
    everywhere = [
        plan_ms(searched, Caps.of(tiles=tiles, tokens=tokens))
        for tiles in range(least["tiles"], 4 * least["tiles"] + 1, 4)
        for tokens in range(160, 641, 160)
    ]
    assert found.candidates[0].strategy.ms_per_sample <= 1.01 * min(everywhere)
    assert max(everywhere) > 1.05 * min(everywhere)


def test_fixed_costs_ask_for_larger_packs():
    """Prevents a search that never leaves its start, or hides that the largest caps won."""
    cheap, dear = (
        search(cost_source=CostSource(profile_with_fixed_costs(ms))) for ms in (0.0, 50.0)
    )
    assert cheap.best["tokens"] < dear.best["tokens"] == 640
    assert dear.is_largest and not cheap.is_largest


def test_less_memory_excludes_large_caps():
    """Prevents caps that run out of memory, and feasible caps reported as infeasible."""
    costs = {"cost_source": CostSource(profile_with_fixed_costs(50.0))}
    roomy = search(**costs)
    gib = 0.255 * roomy.candidates[0].strategy.peak_gib / 0.9
    tight_cluster = CLUSTER.model_copy(update={"memory_gib": gib})
    tight = search(cluster=tight_cluster, **costs)
    assert tight.infeasible and not roomy.infeasible
    assert tight.best["tokens"] < roomy.best["tokens"]
    assert max(each.strategy.peak_gib for each in tight.candidates) <= memory_cap_gib(tight_cluster)
    for caps, reason in tight.infeasible.items():
        with pytest.raises(UserError, match="more than the memory cap"):
            make_plan(request(cluster=tight_cluster, caps=caps, epochs=1, **costs))
        assert "more than the memory cap" in reason


def test_no_caps_fit():
    """Prevents a traceback or a list of failures instead of one error that names a remedy."""
    words = "at 4 tiles and 160 tokens.*GiB per device at best"
    with pytest.raises(UserError, match=words):
        search(cluster=CLUSTER.model_copy(update={"memory_gib": 0.001}))


@RULES
@pytest.mark.parametrize(
    "sizes",
    [
        [(1, 40)] * 60 + [(30, 9000)],
        [(5, 300)] * 40 + [(1, 90), (3, 190)] * 10,
        [(0, 17), (0, 90), (2, 60)] * 20,
        [(3, 5)] * 12,
    ],
    ids=["one giant", "lumpy", "mostly text", "few samples"],
)
def test_every_sample_fits(sizes, rule):
    """Prevents caps that `omnibal plan` refuses, on data of any shape."""
    found = search(lengths=make_lengths(sizes), rule=rule, samples=30, samples_per_step=8)
    assert found.best["tiles"] >= max(tiles for tiles, _ in sizes)
    assert found.best["tokens"] >= max(tokens for _, tokens in sizes)


def test_text_alone_has_caps_by_time_only():
    """Prevents a division by zero tiles on text-only data."""
    text = make_lengths([(0, 17), (0, 90)] * 20)
    assert search(lengths=text).best["tiles"] == 1
    with pytest.raises(UserError, match="none of 40 samples has a tile"):
        search(lengths=text, rule="paper")


def test_seed_decides_the_result():
    """Prevents results that depend on the process count, or on anything outside the request."""
    few = {"samples": 40, "samples_per_step": 8, "packing": PackingMethod.ISF}
    first, again = search(**few), search_caps(request_of(**few), "time", lambda done: None, 2)
    assert first == again
    assert search(seed=1, **few).candidates != first.candidates


@RULES
def test_progress_ends_at_the_end(rule):
    """Prevents a progress bar that stops early or overruns."""
    done: list[int] = []
    search_caps(request_of(), rule, done.append)
    assert sum(done) == most_candidates(request_of(), rule)
    assert done[-1] >= 0


def test_draw_keeps_samples_whole():
    """Prevents tiles of one sample with the tokens of another, and repeated samples."""
    lengths = example_lengths(count=90)
    drawn = draw_samples(lengths, 40, seed=3)
    assert len(np.unique(drawn.sample)) == 40
    for name in ("tiles", "tokens", "loss_tokens"):
        np.testing.assert_array_equal(drawn.column(name), lengths.column(name)[drawn.sample])
    np.testing.assert_array_equal(drawn.source, lengths.source[drawn.sample])
    assert draw_samples(lengths, 90, seed=3) is lengths


@cache
def documents(tokens_per_tile: int = 100) -> Lengths:
    """Return samples of 0 to 5 tiles with `tokens_per_tile` each, and some text."""
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, 6, 800)
    tokens = tokens_per_tile * tiles + rng.integers(2, 9, 800) * tokens_per_tile
    return make_lengths(list(zip(tiles.tolist(), tokens.tolist(), strict=True)))


def plain_dist_ratio(loads: list[list[int]]) -> float:
    ratios = [
        sum(max(step) - load for load in step) / (max(step) * len(step)) if max(step) else 0.0
        for step in loads
    ]
    return sum(ratios) / len(ratios)


@pytest.mark.parametrize("tokens_per_tile", [40, 100, 250])
def test_papers_rule_is_what_its_code_does(tokens_per_tile):
    """Prevents a rule that differs from the paper's: plain loops compute it again, step by step."""
    lengths, seed = documents(tokens_per_tile), 5
    mean_tokens = np.mean([256 * np.ceil(tokens / 256) for tokens in lengths.tokens])
    per_tile = int((mean_tokens // np.mean(lengths.column("tiles")) + 1) // 16) * 16
    scores = {}
    for moves in range(1 - 4096 // per_tile, 30):
        caps = Caps.of(tiles=4096 // per_tile + moves, tokens=4096 + moves * per_tile)
        if caps["tiles"] < 5 or caps["tokens"] < lengths.tokens.max():
            continue
        packs = pack_isf(lengths, caps, seed)
        if not 4 <= len(lengths) / len(packs) <= 5:
            continue
        share = len(packs) // 8
        order = np.arange(8 * share).reshape(8, share)
        by_step = np.random.default_rng(seed).permuted(order, axis=1).T
        scores[caps] = sum(
            plain_dist_ratio([[int(size[packs[pack]].sum()) for pack in step] for step in by_step])
            for size in (lengths.column("tiles"), lengths.tokens)
        )
    assert len(scores) > 1
    assert paper_caps(lengths, min_caps(lengths), seed) == sorted(scores, key=scores.get)


@pytest.mark.parametrize(
    "size", [(1, 200), (3, 900), (6, 3000)], ids=["from above", "in between", "from below"]
)
def test_papers_rule_ends_at_4_to_5_samples(size):
    """Prevents a walk in the wrong direction, or a stop outside 4 to 5 samples per pack."""
    rng = np.random.default_rng(0)
    sizes = [(size[0] + n % 2, size[1] + int(rng.integers(99))) for n in range(400)]
    lengths = make_lengths(sizes)
    for caps in paper_caps(lengths, min_caps(lengths), 0):
        assert 4 <= len(lengths) / len(pack_isf(lengths, caps, 0)) <= 5


def test_papers_rule_skips_what_does_not_fit_into_memory():
    """Prevents the rule from choosing caps that exceed memory while other candidates fit."""
    costs = {"lengths": documents(), "rule": "paper", "samples": 800}
    by_rule = paper_caps(documents(), min_caps(documents()), 0)
    assert [each.caps for each in search(**costs).candidates] == by_rule
    none_gib, all_gib = 0.001, CLUSTER.memory_gib
    for _ in range(30):
        gib = (none_gib + all_gib) / 2
        try:
            tight = search(cluster=CLUSTER.model_copy(update={"memory_gib": gib}), **costs)
        except UserError:
            none_gib = gib
            continue
        if tight.infeasible:
            break
        all_gib = gib
    feasible = [caps for caps in by_rule if caps not in tight.infeasible]
    assert 0 < len(feasible) < len(by_rule)
    assert [each.caps for each in tight.candidates] == feasible


LUMPY = make_lengths([(5, 1400)] * 600 + [(3, 900)] * 400)


def test_isf_is_warned_of_where_filtering_does_harm():
    """Prevents caps distorted by ISF's filtering without a warning, and a needless warning."""
    lumpy, searched = Caps.of(tiles=9, tokens=4096), request_of(lengths=LUMPY)
    once, by_default = (len(pack_isf(LUMPY, lumpy, 0, iterations=each)) for each in (1, 10))
    assert by_default > once
    note = isf_note(LUMPY, lumpy, 0)
    assert all(words in note for words in (f"{once:,}", f"{by_default:,}", "--packing balanced"))
    assert isf_note(documents(), Caps.of(tiles=20, tokens=8192), 0) is None
    known = search().candidates[0]
    levels = (Level(caps=lumpy),)
    candidate = replace(known, strategy=replace(known.strategy, levels=levels))
    chosen = CapSearch(candidates=(candidate,), infeasible={}, is_largest=False)
    assert note in cap_notes(searched, chosen)
    assert not cap_notes(replace(searched, settings=PackSettings()), chosen)


CAPS = "caps --model internvl-digits --cluster laptop-cpu --pp 2 --dp 2 --precision fp32"
CAPS += " --processes 1 --packing isf --samples-per-step 30 --samples 100 --seed 3"


def test_command_prints_one_json_object(capsys, tmp_path):
    """Prevents options that do not reach the search, and notes mixed with the JSON."""
    profile = profile_with_fixed_costs(50.0)
    write_lengths(example_lengths(count=150), tmp_path / "lengths.parquet")
    write_json_model(profile, tmp_path / "profile.json")
    files = (tmp_path / "lengths.parquet", "--profile", tmp_path / "profile.json")
    result = json.loads(printed(capsys, f"{CAPS} --memory-gib 0.011 --json", *files))
    found = search(
        cluster=CLUSTER.model_copy(update={"memory_gib": 0.011}),
        cost_source=CostSource(profile), samples_per_step=30, samples=100, seed=3,
    )  # fmt: skip
    assert list(result) == "max_tiles max_tokens rule candidates infeasible seconds".split()
    assert Caps.of(tiles=result["max_tiles"], tokens=result["max_tokens"]) == found.best
    assert result["candidates"] == [candidate.as_dict() for candidate in found.candidates]
    assert len(result["infeasible"]) == len(found.infeasible) > 0
