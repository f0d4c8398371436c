"""Advice if nothing fits: each change makes a feasible plan, and no smaller one would."""

import pickle
import re
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from cli_cases import failure, run
from plan_cases import MODEL, alter, counting, example_lengths, example_profile, request

from omnibal import Free, Goal, Samples, plan, training_job
from omnibal.base.errors import DoesNotFit, UserError
from omnibal.cost.profile import model_sha256
from omnibal.cost.source import CostSource
from omnibal.job.plan_data import MockData, smallest_caps
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import load_cluster, load_model
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import Level
from omnibal.model.limits import Caps, memory_cap_gib
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.model.targets import RecomputeFreedom, StageRules, TrainerConstraints
from omnibal.packing import steps
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.packing.steps import steps_of
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule, SplitRule
from omnibal.search import feasible
from omnibal.search.feasible import Advice, Change, find_changes, roomier_devices, smaller_caps
from omnibal.search.goal import ShapesAlone
from omnibal.search.level_estimates import LevelRule
from omnibal.search.memory_need import gib_text
from omnibal.search.strategy import FreeSizes

LIMITED = StageRules(
    encoders_on_first=True, language_everywhere=True, recompute=RecomputeFreedom.LANGUAGE
)
ANY = Caps.of(tiles=1, tokens=1)
"""Every sample exceeds these caps."""


def fits(asked: PlanRequest | Goal) -> bool:
    try:
        plan(asked) if isinstance(asked, Goal) else make_plan(asked)
    except UserError:
        return False
    return True


def with_memory(asked: PlanRequest | Goal, gib: float) -> PlanRequest | Goal:
    cluster = asked.job.cluster.model_copy(update={"memory_gib": gib})
    return replace(asked, job=replace(asked.job, cluster=cluster))


@cache
def min_memory(asked: PlanRequest | Goal, accuracy: float = 1e-3) -> float:
    """Return the minimum GiB per device that allow a plan, by bisection."""
    low, high = 0.0, 0.02
    while not fits(with_memory(asked, high)):
        low, high = high, 2 * high
    while high - low > accuracy * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(with_memory(asked, middle)) else (middle, high)
    return high


def limit_memory(planned: PlanRequest, share: float) -> PlanRequest:
    """Return the request with this share of its minimum memory."""
    return with_memory(planned, share * min_memory(planned))


def resize_job(planned: PlanRequest, **sizes: int) -> PlanRequest:
    """Return the request with these sizes, at constant micro-batches per rank."""
    parallel = planned.job.parallel.model_copy(update=sizes)
    if isinstance(planned.data, MockData):
        return alter(planned, parallel=parallel)
    packs_per_step = planned.data.micro_batches(planned.job) * parallel.data
    return alter(planned, parallel=parallel, packs_per_step=packs_per_step)


def one_epoch(**changes) -> PlanRequest:
    given = {"parallel": Parallel(pipeline=2), "packs_per_step": 4, "epochs": 1}
    return request(**(given | changes))


ROOMY, ROOMY_SHAPES = one_epoch(), one_epoch(lengths=None)


def changes_of(planned: PlanRequest) -> tuple[Change, ...]:
    return find_changes(planned).changes


LARGER = (
    [{"tensor": 2, "sequence_parallel": True}],
    [{"pipeline": size} for size in range(3, 9)],
    [{"data": 2}, {"data": 3}, {"data": 4}],
)


@pytest.mark.parametrize(
    ("roomy", "share"),
    [*product([ROOMY], (0.97, 0.7, 0.55)), *product([ROOMY_SHAPES], (0.85, 0.55))],
    ids=["data-0.97", "data-0.7", "data-0.55", "shapes-0.85", "shapes-0.55"],
)
def test_changes_are_the_smallest_that_fit(roomy, share):
    """Prevents advice that does not help, or names more devices than needed."""
    planned = limit_memory(roomy, share)
    assert not fits(planned)
    found = changes_of(planned)
    for change in found:
        assert fits(change.request)
        exact = [change.need_gib, memory_cap_gib(change.request.job.cluster)]
        assert exact[0] <= exact[1]
        figures = re.search(r"needs (\S+) of (\S+) GiB\)$", change.text)
        assert list(map(float, figures.groups())) == pytest.approx(exact, rel=0.005)
    expected = set()
    for kinds in LARGER:
        requests = (resize_job(planned, **sizes) for sizes in kinds)
        expected |= {each.job.parallel for each in [*filter(fits, requests)][:1]}
    parallels = [change.request.job.parallel for change in found]
    assert expected == {
        parallel
        for parallel, change in zip(parallels, found, strict=True)
        if parallel != planned.job.parallel and len(change.text.split("--")) == 2
    }
    sizes = [parallel.world_size for parallel in parallels]
    assert sizes[:-1] == sorted(sizes[:-1])


def test_changes_keep_to_limits_of_stages():
    """Prevents advice with splits that the trainer does not support."""
    most = Parallel(pipeline=MODEL.language.layers)
    roomy = one_epoch(lengths=None, parallel=most, packs_per_step=8)
    limited = replace(roomy, job=replace(roomy.job, trainer=TrainerConstraints(stages=LIMITED)))
    found = changes_of(limit_memory(limited, 0.8))
    assert all(
        fits(change.request) and change.request.job.trainer.stages == LIMITED for change in found
    )
    sizes = [change.request.job.parallel for change in found]
    others = [each for each in sizes if each.pipeline != most.pipeline]
    assert others == [Parallel(pipeline=2, data=2)]


def test_no_size_between_is_left_out():
    """Prevents advising four times the ranks if three times suffice."""
    planned = with_memory(ROOMY_SHAPES, 1.002 * min_memory(resize_job(ROOMY_SHAPES, data=3)))
    assert not fits(resize_job(planned, data=2))
    assert 3 in [change.request.job.parallel.data for change in changes_of(planned)]


BALANCED = one_epoch(packing=PackingMethod.BALANCED)


@pytest.mark.parametrize("share", [0.95, 0.8])
def test_next_larger_caps_do_not_fit(share):
    """Prevents caps smaller than needed, or too small for a sample."""
    planned = limit_memory(BALANCED, share)
    change = changes_of(planned)[0]
    least = smallest_caps(planned.data.lengths, ("tiles", "tokens"))
    tried = [planned.data.caps, *smaller_caps(planned.data.caps, least)]
    caps = change.request.data.caps
    assert fits(change.request)
    assert not fits(alter(planned, caps=tried[tried.index(caps) - 1]))
    text = f"--max-tokens {caps['tokens']} --max-tiles {caps['tiles']} instead of 512 and 8"
    assert change.text.startswith(text)


def test_smaller_caps_are_round_and_hold_every_sample():
    """Prevents caps that `omnibal plan` refuses, and tiles that tokens cannot fill."""
    assert smaller_caps(Caps.of(tiles=9, tokens=4096), ANY)[:2] == [
        Caps.of(tiles=8, tokens=3840),
        Caps.of(tiles=8, tokens=3584),
    ]
    lengths = example_lengths()
    least = Caps.of(tiles=int(lengths.column("tiles").max()), tokens=int(lengths.tokens.max()))
    limits = smallest_caps(lengths, ("tiles", "tokens"))
    for caps in smaller_caps(Caps.of(tiles=8, tokens=512), limits):
        assert caps["tokens"] >= least["tokens"] and caps["tiles"] >= least["tiles"]
    assert smaller_caps(least, limits) == smaller_caps(ANY, ANY) == []


def test_two_larger_sizes_where_one_is_not_enough():
    """Prevents no advice if two sizes must grow together."""
    alone = [{"tensor": 2}, {"data": 4}, {"pipeline": 8}]
    enough = 0.9 * min(min_memory(resize_job(ROOMY_SHAPES, **sizes)) for sizes in alone)
    planned = with_memory(ROOMY_SHAPES, enough)
    found = changes_of(planned)
    (pair,) = (change for change in found if " --pp " in change.text and "--tp 2" in change.text)
    assert fits(pair.request)
    for tensor, pipeline in product([1, 2], range(2, 9)):
        if tensor * pipeline < pair.request.job.parallel.world_size:
            assert not fits(resize_job(planned, tensor=tensor, pipeline=pipeline))


def test_device_with_more_memory():
    """Prevents missing the smallest sufficient device, and replacing a profile's device."""
    planned = request(
        model=load_model("internvl-chat-1.5-6b-20b"),
        cluster=load_cluster("a100-80g"),
        parallel=Parallel(tensor=2, pipeline=2, data=1, sequence_parallel=True),
        precision="bf16",
        caps=Caps.of(tiles=8, tokens=2560),
        lengths=None,
        packs_per_step=8,
    )
    found = [change.text for change in changes_of(planned)]
    assert found[-1].startswith("--cluster h200-141g instead of a100-80g (needs ")
    assert found[-1].endswith("of 125 GiB)")
    assert any(text.startswith("--tp 4 instead of 2 (8 devices, needs ") for text in found)


def test_a_larger_device_needs_its_own_memory():
    """Prevents advice that fails while --memory-gib remains on the command line."""
    whole = one_epoch(
        model=load_model("internvl2-8b"), cluster=load_cluster("a100-80g"), precision="bf16",
        parallel=Parallel(pipeline=2, data=2), lengths=None,
    )  # fmt: skip
    for planned, also in ((whole, ""), (with_memory(whole, 20.0), " and no --memory-gib")):
        named = [text for text, _ in roomier_devices(planned.job)]
        larger = ("h200-141g", "b200-180g", "gb200-186g", "b300-288g", "gb300-288g")
        assert named[-5:] == [f"--cluster {name}{also} instead of a100-80g" for name in larger]
        assert also or len(named) == 5


def test_steps_that_are_given_stay():
    """Prevents other caps, or other packs per step, if the steps are fixed."""
    scheduled, _ = ROOMY.data.schedule(ROOMY.job)
    planned = limit_memory(alter(ROOMY, steps=steps_of(scheduled)), 0.9)
    found = changes_of(planned)
    assert found
    for change in found:
        data = change.request.data
        assert (data.caps, data.packs_per_step) == (planned.data.caps, planned.data.packs_per_step)
        assert fits(change.request)


def test_jobs_of_levels_are_told_what_fits():
    """Prevents advice computed from memory without context-parallel sizes."""
    levels = (
        Level(caps=Caps.of(tiles=4, tokens=192)),
        Level(caps=Caps.of(tiles=8, tokens=512), context=2),
    )
    roomy = one_epoch(parallel=Parallel(pipeline=2, data=2))
    found = changes_of(limit_memory(alter(roomy, levels=levels, packs_per_step=8), 0.95))
    assert found
    for change in found:
        assert change.request.data.levels == levels
        assert fits(change.request)
        assert not fits(with_memory(change.request, 0.98 * change.need_gib))


LAYER = {"split": SplitRule(method=PartitionMethod.LAYER, recompute=RecomputeRule.NONE)}


def test_named_methods_are_told_of_more_than_the_search():
    """Prevents claiming that nothing suffices although the joint search was not tried."""
    tight = limit_memory(ROOMY, 0.8)
    expected = [change.request.job.parallel for change in changes_of(tight)]
    found = changes_of(replace(tight, **LAYER))
    assert [change.request.job.parallel for change in found] == expected
    assert found
    for change in found:
        assert fits(change.request)
        assert "instead of layer with none, and --" in change.text


@pytest.mark.parametrize("method", [{}, LAYER], ids=["joint", "layer"])
def test_only_what_was_tried_is_called_not_enough(method):
    """Prevents excluding caps or devices that were not tried."""
    kinds = ("--max-tokens", "--tp", "--pp", "--dp", "preset device", "joint partition")
    model = {"model_sha256": model_sha256(MODEL)}
    profile = example_profile(activation_bytes=2**20).model_copy(update=model)
    scheduled, _ = ROOMY.data.schedule(ROOMY.job)
    for changes, absent in (
        ({}, set()),
        ({"steps": steps_of(scheduled)}, {"--max-tokens"}),
        ({"cost_source": CostSource(profile)}, {"preset device", "--tp"}),
    ):
        tiny = with_memory(one_epoch(**changes, **method), 1e-6)
        if "cost_source" not in changes:
            # No preset is large enough for this vocabulary.
            tiny = alter(tiny, model=MODEL.with_tower("language", vocab_size=10**10))
        with pytest.raises(DoesNotFit) as raised:
            make_plan(tiny)
        message = find_changes(tiny).message(raised.value)
        assert "what would fit" not in message
        named = message.rpartition("is enough: ")[2]
        wanted = set(kinds) - absent - (set() if method else {"joint partition"})
        assert {kind for kind in kinds if kind in named} == wanted


def test_a_cause_with_semicolons_stays_whole():
    """Prevents a cause cut at its last semicolon, or lost in pickling."""
    sent = DoesNotFit("needs 93.0 GiB; the cap is 80.0", "raise it; or use less")
    error = pickle.loads(pickle.dumps(sent))
    assert (error.need, error.advice) == (sent.need, sent.advice)
    assert str(error) == "needs 93.0 GiB; the cap is 80.0; raise it; or use less"
    found = Advice(changes=(), tried=("more stages",)).message(error)
    assert found.startswith("needs 93.0 GiB; the cap is 80.0; of these, no single one")
    assert Advice(changes=(), tried=()).message(error) == str(error)


@pytest.mark.parametrize("gib", [125.06, 72.0, 9.996, 0.5, 0.01234, 0.000321])
def test_small_devices_have_figures(gib):
    """Prevents messages like "needs 0.0 of 0.0 GiB"."""
    assert float(gib_text(gib)) == pytest.approx(gib, rel=0.005)
    assert len(gib_text(gib).replace(".", "").lstrip("0")) in (3, 4)


def test_many_samples_are_drawn_from(monkeypatch):
    """Prevents minutes of packing millions of samples for every tried cap."""
    planned = limit_memory(ROOMY, 0.9)
    monkeypatch.setattr(feasible, "SAMPLES", 200)
    packed = counting(monkeypatch, steps, pack_samples)
    found = changes_of(planned)
    assert found and {len(call.args[0]) for call in packed.call_args_list} == {200}
    assert all(len(change.request.data.lengths) == 300 for change in found)


def test_other_mistakes_are_said_as_they_are():
    """Prevents answering a mistake unrelated to memory with advice."""
    with pytest.raises(UserError, match="exceed the caps"):
        find_changes(one_epoch(caps=Caps.of(tiles=1, tokens=64)))


CAPS = Caps.of(tiles=8, tokens=512)
SHAPES = ShapesAlone(caps=CAPS)
REPLICATED = (WeightSharding.REPLICATED,)
ALL = tuple(WeightSharding)


def goal_of(gib: float, gpus: int, *, shardings=ALL, data=SHAPES, **sizes) -> Goal:
    free = Free(sizes=FreeSizes(gpus=gpus, **sizes), shardings=shardings)
    job = training_job("internvl-digits", "laptop-cpu")
    return with_memory(Goal(job=job, data=data, free=free), gib)


def sufficient_gib(gpus: int, **given) -> float:
    return min_memory(goal_of(1.0, gpus, **given), 0.03)


@cache
def gib_if_sharded() -> float:
    """Return GiB that suffice for four data-parallel ranks only with sharded weights."""
    return 1.1 * sufficient_gib(4, tensor=1, pipeline=1)


def fit_advice(goal: Goal) -> str:
    with pytest.raises(UserError, match="what would fit: ") as error:
        plan(goal)
    assert "\n" not in str(error.value)
    return str(error.value).partition("what would fit: ")[2]


@pytest.mark.parametrize("data", [SHAPES, Samples(lengths=example_lengths(count=100), caps=CAPS)])
def test_as_many_devices_as_are_named_are_planned(data):
    """Prevents advice for more devices without a number, or with too few."""
    gib = sufficient_gib(4, data=data)
    advice = fit_advice(goal_of(gib, 1, data=data))
    [gpus] = map(int, re.findall(r"--gpus (\d+) instead of 1, as in --tp ", advice))
    assert fits(goal_of(gib, gpus, data=data))
    of_a_node = training_job("internvl-digits", "laptop-cpu").cluster.gpus_per_node
    for fewer in range(max(of_a_node, 2), gpus):
        assert not fits(goal_of(gib, fewer, data=data))


def test_what_was_given_is_named_where_it_stands_in_the_way():
    """Prevents advising more devices if sharding, or a free size, suffices."""
    gib = gib_if_sharded()
    advice = fit_advice(goal_of(gib, 4, shardings=REPLICATED, tensor=1, pipeline=1))
    assert "--sharding auto instead of replicated, as in --tp 1 --pp 1 --dp 4 --sharding" in advice
    [named] = re.findall(r"no (--\w\w) 1, as in", advice) or [None]
    for option, left in {"--tp": {"pipeline": 1}, "--pp": {"tensor": 1}}.items():
        if named in (option, None):
            assert fits(goal_of(gib, 4, shardings=REPLICATED, **left)) == (named == option)


def test_smaller_caps_are_named():
    """Prevents advising "smaller caps" that were not tried."""
    data, half = (ShapesAlone(caps=Caps.of(tiles=tiles, tokens=256 * tiles)) for tiles in (32, 16))
    gib = sufficient_gib(2, data=half)
    advice = fit_advice(goal_of(gib, 2, data=data))
    [caps] = re.findall(r"--max-tokens (\d+) --max-tiles (\d+) instead of", advice)
    tokens, tiles = map(int, caps)
    assert fits(goal_of(gib, 2, data=ShapesAlone(caps=Caps.of(tiles=tiles, tokens=tokens))))


def four_ranks(**given) -> Goal:
    """Return a goal of four data-parallel ranks that fits only with sharded weights."""
    parallel = Parallel(pipeline=1, data=4)
    job = training_job("internvl-digits", "laptop-cpu", parallel=parallel)
    return with_memory(Goal(job=job, **given), gib_if_sharded())


def test_one_device_is_told_of_adapters_before_larger_devices(tmp_path, capsys):
    """Prevents advising a user with one GPU to buy another if adapters suffice."""
    job = "plan --cluster a100-80g --gpus 1 --model internvl3-8b --max-tokens 4096"
    fit_advice = failure(capsys, job, "-o", tmp_path / "whole").split("what would fit: ")[1]
    ways = [re.match(r"--[a-z-]+(?: [a-z0-9-]+)?", way)[0] for way in fit_advice.split("; or ")]
    assert ways[:2] == ["--lora-rank 16", "--freeze language"] and "--cluster b200-180g" in ways
    for number, way in enumerate(ways[:2]):
        run(f"{job} {way}", "-o", tmp_path / str(number))


@pytest.mark.parametrize("levels", [LevelRule(count=1), LevelRule()])
def test_given_sizes_with_samples_are_told_of_sharding(levels):
    """Prevents general advice after a search over levels, or advice of stages only."""
    data = Samples(lengths=example_lengths(), caps=CAPS)
    goal = four_ranks(data=data, free=Free(levels=levels, shardings=REPLICATED))
    assert "--sharding full instead of replicated (needs " in fit_advice(goal)
    assert fits(replace(goal, free=replace(goal.free, shardings=(WeightSharding.FULL,))))


def test_reasons_of_what_was_not_chosen_are_no_advice():
    """Prevents advice inside the reasons for rejected shardings of a feasible plan."""
    free = Free(shardings=ALL, placements=(EncoderPlacement.PIPELINE,))
    sharding = plan(four_ranks(data=SHAPES, free=free)).sharding
    assert sharding.sharding is WeightSharding.FULL
    assert " GiB" in sharding.reason and "what would fit" not in sharding.reason
