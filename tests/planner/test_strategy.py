"""Strategies: all possible parallel sizes, ranked by the planner's predictions."""

import contextlib
import dataclasses
import json
from dataclasses import replace
from io import StringIO
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import pytest
from cli_cases import status
from cost_cases import assumed_h100, random_cost, small_model, workload_of_a_step
from expert_cases import DIGITS
from length_cases import lengths_of
from plan_cases import (
    MODEL,
    example_lengths,
    example_profile,
    planned_ms_per_sample,
    search_request,
)
from rate_cases import tiled_rates
from rich.console import Console

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.cli import command_tables
from omnibal.cost.profile import model_sha256
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.job.plan import read_plan
from omnibal.job.planner import PlanRequest, PlanResult
from omnibal.model.config import load_cluster, load_model
from omnibal.model.limits import Caps, memory_cap_gib
from omnibal.model.parallel import Parallel, WeightSharding, check_parallel
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.pipeline.bounds import min_step_ms
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.search import bounded, strategy_search
from omnibal.search.bounded import CLEARLY_WORSE
from omnibal.search.parallel_sizes import possible_sizings
from omnibal.search.schedule_choice import ScheduleChoice, plan_in_best_schedule
from omnibal.search.step_size import (
    StepRate,
    default_samples_per_step,
    recipe_samples,
    remark,
    step_rates,
    with_enough_samples,
)
from omnibal.search.strategy import FreeSizes, Setting, Sizing, StrategyRequest, find_bound, pack_at
from omnibal.search.strategy_search import StrategySearch, progress_total, search_strategies
from omnibal.search.weight_sharding import ShardingChoice

CLUSTER = load_cluster("laptop-cpu").model_copy(update={"gpus_per_node": 4, "link_latency_us": 1})
CAPS = Caps.of(tiles=8, tokens=320)


def strategy_request(**changes) -> StrategyRequest:
    own = {field.name for field in dataclasses.fields(FreeSizes)}
    sizes = {"gpus": 4} | {name: changes.pop(name) for name in own if name in changes}
    tensor = changes.get("cost_source", ANALYTIC).tensor or 1
    defaults = {
        "sizes": FreeSizes(**sizes),
        "cluster": CLUSTER,
        "parallel": Parallel(tensor=tensor, pipeline=1),
        "lengths": example_lengths(),
        "samples_per_step": 50,
        "samples": 1000,
        "caps": CAPS,
    }
    return search_request(defaults, changes)


def possible_parallels(searched: StrategyRequest) -> list[Parallel]:
    return [sizing.parallel for sizing in possible_sizings(searched)]


def run_search(searched: StrategyRequest) -> StrategySearch:
    return search_strategies(searched, lambda done: None)


def search(**changes) -> StrategySearch:
    return run_search(strategy_request(**changes))


def list_parallels(found: StrategySearch) -> list[Parallel]:
    """Return the sizes of all ranked and ruled-out strategies."""
    return [each.parallel for each in (*found.ranking, *found.ruled_out)]


def assert_all_listed(found: StrategySearch, searched: StrategyRequest) -> None:
    assert sorted(map(str, list_parallels(found))) == sorted(map(str, possible_parallels(searched)))


def sizes(parallel: Parallel) -> tuple[int, int, int]:
    return parallel.tensor, parallel.pipeline, parallel.data


@pytest.mark.parametrize("gpus", [1, 6, 8, 12, 41])
@pytest.mark.parametrize("given", [{}, {"tensor": 2}, {"pipeline": 3}, {"tensor": 1, "data": 2}])
def test_all_possible_sizes_are_found(gpus, given):
    """Prevents missing, doubled or invalid combinations."""
    expected, found = [], []
    for chosen in product(range(1, gpus + 1), repeat=3):
        wanted = dict(zip(("tensor", "pipeline", "data"), chosen, strict=True))
        if prod(chosen) == gpus and given.items() <= wanted.items():
            with contextlib.suppress(UserError):
                check_parallel(MODEL, Parallel(**wanted), CLUSTER)
                expected.append(chosen)
    with contextlib.suppress(UserError):
        found = possible_parallels(strategy_request(gpus=gpus, **given))
    assert [sizes(each) for each in found] == expected
    assert all(each.sequence_parallel == (each.tensor > 1) for each in found)


def check_search(searched: StrategyRequest) -> StrategySearch:
    """Return the search after comparing its best, times and bounds with each size planned alone."""
    found, planned = run_search(searched), {}
    for parallel in possible_parallels(searched):
        with contextlib.suppress(DoesNotFit):
            planned[parallel] = planned_ms_per_sample(searched, searched.caps, parallel)
    times = [each.ms_per_sample for each in found.ranking]
    assert times == sorted(times)
    assert times[0] == pytest.approx(min(planned.values()), rel=1e-9)
    for each in found.ranking:
        assert each.ms_per_sample == pytest.approx(planned[each.parallel], rel=1e-9)
        assert each.samples_per_second == pytest.approx(1e3 / each.ms_per_sample)
        assert sum(each.lost.causes().values()) == pytest.approx(each.ms_per_sample)
    for each in found.ruled_out:
        if each.parallel in planned and each.most_samples_per_second is not None:
            bound_ms = 1e3 / each.most_samples_per_second
            assert bound_ms <= planned[each.parallel] * (1 + 1e-9)
    assert_all_listed(found, searched)
    return found


def test_ranking_is_the_planners_own():
    """Prevents ruling out a strategy that may be nearly as fast as the best."""
    found = check_search(strategy_request(gpus=8, samples_per_step=30))
    assert len(list_parallels(found)) > 5 and found.ruled_out
    for each in found.ruled_out:
        assert each.most_samples_per_second * CLEARLY_WORSE < found.best.samples_per_second


def test_ranking_with_experts_is_the_planners_own():
    """Prevents an expert size that is not tried, or timed as another size."""
    searched = strategy_request(model=DIGITS, gpus=4, samples_per_step=30)
    every = [
        Parallel(tensor=t, pipeline=p, data=4 // (t * p), expert=e, sequence_parallel=t > 1)
        for t, p in [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
        for e in (1, 2, 4)
        if 4 // p % e == 0
    ]
    assert possible_parallels(searched) == every
    found = check_search(searched)
    assert len({each.parallel.expert for each in found.ranking}) > 1
    fixed = possible_parallels(strategy_request(model=DIGITS, expert=4))
    assert fixed == [each for each in every if each.expert == 4]


SLOW = {"intra_node_gb_per_s": 0.05, "inter_node_gb_per_s": 0.02}


def test_experts_in_sharded_weights_rank_as_the_planner_alone_says():
    """Prevents an expert size that is not tried with sharded weights, or timed as another."""
    winners, every = set(), []
    for changes, samples_per_step in (({"memory_gib": 0.0095}, 30), (SLOW, 90)):
        searched = strategy_request(
            model=DIGITS, cluster=CLUSTER.model_copy(update=changes), gpus=8, tensor=1,
            shardings=tuple(WeightSharding), samples_per_step=samples_per_step,
        )  # fmt: skip
        every = possible_parallels(searched)
        winners.add(check_search(searched).best.parallel.sharded > 1)
    assert winners == {True, False}
    # Not groups of 4 with all experts: there are two, and each rank has all their state.
    tried = {(each.expert, each.sharded) for each in every if each.pipeline == 1}
    assert tried == {(1, 1), (2, 1), (4, 1), (1, 4), (2, 4), (1, 8), (2, 8), (4, 8)}
    assert {each.expert for each in every if each.sharded > 1 < each.pipeline} == {1, 2, 4}


def test_sharded_weights_rank_as_the_planner_alone_says():
    """Prevents another cost formula, other packs, a slower winner, and untried shardings."""
    fast = {"intra_node_gb_per_s": 1_000.0, "inter_node_gb_per_s": 1_000.0, "link_latency_us": 0}
    winners = set()
    for changes in (fast, SLOW, fast | {"memory_gib": 0.05}, {"memory_gib": 0.03}):
        searched = strategy_request(
            cluster=CLUSTER.model_copy(update=changes), gpus=8, samples_per_step=30,
            shardings=tuple(WeightSharding),
        )  # fmt: skip
        every = possible_parallels(searched)
        one_stage = [each for each in every if each.pipeline == 1]
        assert {each.pipeline for each in every if each.sharded > 1} == {1, 2, 4}
        assert {each.sharding for each in one_stage if each.tensor == 1} == {*WeightSharding}
        assert {each.sharded for each in one_stage if each.tensor == 1} == {1, 4, 8}
        choice = ShardingChoice.of_strategies(found := check_search(searched))
        winners.add(choice.sharding)
        assert choice.sharding is found.best.parallel.sharding
        assert {choice.sharding, *choice.others} == {each.sharding for each in every}
    assert WeightSharding.REPLICATED in winners and len(winners) > 1


def test_slow_shardings_are_tried_if_no_others_fit():
    """Prevents free shardings without a plan where a given one has one."""
    cluster = load_cluster("h100-80g").model_copy(update={"memory_gib": 24})
    model, lengths = load_model("llama3.1-8b"), lengths_of(tokens=[300] * 60)
    found = search(
        model=model, cluster=cluster, lengths=lengths, caps=Caps.of(tokens=1200),
        gpus=8, tensor=2, data=2, shardings=tuple(WeightSharding),
    )  # fmt: skip
    assert found.best.parallel.sharding is WeightSharding.FULL


@pytest.mark.parametrize("samples_per_step", [24, 63])
def test_strategies_of_least_estimates_are_planned(monkeypatch, samples_per_step):
    """Prevents a plan limit that loses the best strategy or hides skipped strategies."""
    searched = strategy_request(gpus=8, samples_per_step=samples_per_step)
    every = run_search(searched)
    monkeypatch.setattr(strategy_search, "_MOST_PLANNED", 4)
    # All are estimated, including strategies that bounds rule out.
    for slack in ("_ESTIMATE_SLACK", "_LIKELY", "_PLANNED_SLACK"):
        monkeypatch.setattr(bounded, slack, 10)
    few = search_with_progress(searched)
    assert few.best == every.best
    assert few.planned <= len(few.ranking) <= 4
    assert_all_listed(few, searched)
    estimated = {
        each.parallel: each.estimated_samples_per_second
        for each in few.ruled_out
        if each.estimated_samples_per_second is not None
    }
    assert estimated
    slower = [each.ms_per_sample for each in every.ranking if each.parallel in estimated]
    assert min(slower, default=np.inf) >= few.best.ms_per_sample * (1 - few.gap)
    for parallel, per_second in estimated.items():
        planned_ms = planned_ms_per_sample(searched, CAPS, parallel)
        assert 1e3 / per_second == pytest.approx(planned_ms, rel=0.15)
    left = few.without(few.best, "no")
    for each in left.ruled_out[1:]:
        if each.estimated_samples_per_second is not None:
            more = left.best.samples_per_second / each.estimated_samples_per_second - 1
            assert each.why == f"{more:+.0%}, estimated"


@pytest.mark.parametrize("samples_per_step", [50, 63])
def test_bound_holds(samples_per_step):
    """Prevents a bound above the time of steps with unequal numbers of packs."""
    searched = strategy_request(gpus=8, samples_per_step=samples_per_step)
    setting = Setting(request=searched, packs={})
    setting.packs.update([pack_at(setting, CAPS)])
    bounds = []
    for parallel in possible_parallels(searched):
        _, bound = find_bound(setting, (Sizing(parallel), CAPS))
        bounds.append(bound.least_ms)
        assert bound.least_ms <= planned_ms_per_sample(searched, CAPS, parallel) * (1 + 1e-9)
    assert min(bounds) > 0


def test_memory_rules_out_what_cannot_be_planned():
    """Prevents strategies that do not fit, and feasible strategies reported as infeasible."""
    peak_gib = max(each.peak_gib for each in search(gpus=8).ranking)
    for share in np.arange(0.7, 0.1, -0.1):
        tight = CLUSTER.model_copy(update={"memory_gib": share * peak_gib / 0.9})
        searched = strategy_request(cluster=tight, gpus=8)
        found = run_search(searched)
        without_room = {
            each.parallel: each for each in found.ruled_out if each.most_samples_per_second is None
        }
        if without_room:
            break
    assert without_room
    for parallel, out in without_room.items():
        assert out.need_gib > memory_cap_gib(tight)
        shown = [float(word) for word in out.why.split() if word[0].isdigit()]
        assert shown == pytest.approx([out.need_gib, memory_cap_gib(tight)], rel=0.005)
        with pytest.raises(UserError, match="GiB"):
            planned_ms_per_sample(searched, CAPS, parallel)
    assert max(each.peak_gib for each in found.ranking) <= memory_cap_gib(tight)


def test_processes_do_not_matter():
    """Prevents results that depend on processes, and a progress bar that does not end at 100 %."""
    searched = strategy_request(gpus=2, caps=None, samples=100, samples_per_step=20)
    one = search_with_progress(searched)
    assert one == search_strategies(searched, lambda done: None, 2)


def test_caps_are_chosen_for_each_strategy():
    """Prevents caps worse than the levels' caps, or too small for a sample."""
    few = {"samples": 100, "samples_per_step": 20}
    free = search(caps=None, **few)
    lengths = example_lengths()
    for each in free.ranking:
        assert each.caps["tiles"] >= lengths.column("tiles").max()
        assert each.caps["tokens"] >= lengths.tokens.max()
    for each in free.ranking:
        fixed = search(caps=each.caps, **few)
        (same,) = (other for other in fixed.ranking if other.parallel == each.parallel)
        assert replace(same, why="") == replace(each, why="")
    assert free.best.ms_per_sample <= search(caps=CAPS, **few).best.ms_per_sample * 1.02


def search_with_progress(searched: StrategyRequest) -> StrategySearch:
    done: list[int] = []
    found = search_strategies(searched, done.append)
    assert sum(done) == progress_total(searched) and min(done) >= 0
    return found


def test_loser_is_told_why():
    """Prevents a reason that is not the main cause of the slower strategy's extra time."""
    slow_links = CLUSTER.model_copy(update={"link_latency_us": 10_000})
    found = search(cluster=slow_links, samples_per_step=300)
    assert found.best.why == "best"
    of_best = found.best.lost.causes()
    for each in found.ranking[1:]:
        name, percent = each.why.split(", ")[0].rsplit(" ", 1)
        more_ms = {cause: ms - of_best[cause] for cause, ms in each.lost.causes().items()}
        most_ms = more_ms["ideal" if name == "compute" else name]
        assert most_ms == max(more_ms.values())
        assert percent == f"{most_ms / found.best.ms_per_sample:+.0%}"
    assert len(found.ranking) > 1


def test_ranks_without_a_pack_are_refused():
    """Prevents comparing strategies with different step sizes."""
    few = {"samples_per_step": 6, "lengths": example_lengths(count=60), "gpus": 8}
    packs = len(pack_samples(few["lengths"], CAPS, PackingMethod.ISF, 0))
    found = search(**few)
    idle = {each.parallel for each in found.ruled_out if "packs for" in each.why}
    assert idle == {each for each in list_parallels(found) if each.data > 6 * packs / 60}
    assert idle < {*list_parallels(found)}
    with pytest.raises(
        UserError, match=r"at least 8 data-parallel ranks.*larger --samples-per-step"
    ):
        search(**few, data=8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 7, "tensor": 2}, "7 GPUs are no multiple of --tp 2 = 2.*use 6 or 8 GPUs"),
        ({"gpus": 4, "tensor": 2, "pipeline": 4}, "--tp 2 x --pp 4 = 8.*use 8 GPUs"),
        ({"gpus": 6, "tensor": 3}, "tensor size 3 does not divide"),
        ({"gpus": 99, "pipeline": 99}, "pipeline size 99 is more than"),
        ({"gpus": 97, "data": 1}, "multiply to 97 GPUs with --dp 1.*at most .* pipeline stages"),
        ({"model": DIGITS, "expert": 3}, "expert size 3 does not divide the 4 experts"),
        (
            {"model": DIGITS, "pipeline": 4, "expert": 2},
            "--pp 4 --ep 2: .* an --ep that divides tensor x data",
        ),
        *(
            ({"gpus": gpus, "shardings": (way,)}, f"{gpus} GPUs were given with --sharding {way}")
            for gpus, way in (
                (1, WeightSharding.FULL),
                *((n, WeightSharding.HYBRID) for n in (4, 6)),
            )
        ),
        (
            {"cluster": assumed_h100(), "gpus": 12, "shardings": (WeightSharding.HYBRID,)},
            "12 GPUs were given with --sharding hybrid",
        ),
        (
            {"cluster": CLUSTER.model_copy(update={"memory_gib": 0.001})},
            r"none of 6 ways to share 4 GPUs fits internvl-digits.* cap is 0\.000900 GiB",
        ),
    ],
)
def test_impossible_sizes_are_refused(changes, words):
    """Prevents an empty search, or an error that does not say what is possible."""
    with pytest.raises(UserError, match=words):
        search(**changes)


def test_profile_decides_the_tensor_size():
    """Prevents a profile's costs from being used for another tensor size."""
    profile = example_profile().model_copy(update={"model_sha256": model_sha256(MODEL)})
    found = search(cost_source=CostSource(profile))
    assert {each.tensor for each in list_parallels(found)} == {1}
    with pytest.raises(UserError, match="--tp 2 was given with a profile of tensor size 1"):
        search(cost_source=CostSource(profile), tensor=2)
    of_two = profile.model_copy(update={"tensor": 2})
    with pytest.raises(UserError, match=r"the profile is of tensor size 2 alone.*another tensor"):
        search(cost_source=CostSource(of_two), gpus=3)


PLAN = (
    "plan --model internvl-digits --cluster laptop-cpu --max-tiles 8 --max-tokens 512 --gpus 4 "
    "--encoder pipeline --samples-per-step 40 --json --lengths"
)


def run_plan(monkeypatch, lengths: Path, directory: Path, unfit: int) -> tuple[int, list[Parallel]]:
    """Return exit code and tried sizes if the first `unfit` strategies do not fit all data."""
    tried: list[Parallel] = []

    def plan_or_fail(planned: PlanRequest, schedules) -> tuple[PlanResult, ScheduleChoice]:
        tried.append(planned.job.parallel)
        if len(tried) <= unfit:
            stages = planned.job.parallel.pipeline
            raise DoesNotFit(f"needs too much on {stages} stages", "buy memory")
        return plan_in_best_schedule(planned, schedules)

    monkeypatch.setattr("omnibal.search.finalists.plan_in_best_schedule", plan_or_fail)
    # Plan only the best at a time, in this process.
    monkeypatch.setattr("omnibal.search.finalists._FINALISTS", 1)
    return status(PLAN, lengths, "-o", directory / "plan"), tried


def test_runner_up_is_planned_where_the_best_does_not_fit(
    monkeypatch, lengths_file, tmp_path, capsys
):
    """Prevents an error although another strategy fits, and the wrong one reported as best."""
    code, tried = run_plan(monkeypatch, lengths_file, tmp_path, unfit=1)
    assert not code
    assert len(set(tried)) == 2
    planned = read_plan(tmp_path / "plan")
    assert planned.parallel == tried[1]
    printed = capsys.readouterr()
    first = json.loads(printed.out)["strategies"][0]
    assert (first["parallel"], first["why"]) == (tried[1].model_dump(), "best")
    assert planned.data.packs_per_step == first["micro_batches"] * tried[1].data
    notes = [line for line in printed.err.splitlines() if "and not all: taking" in line]
    assert len(notes) == 1
    assert f"--tp {tried[0].tensor} --pp {tried[0].pipeline} --dp {tried[0].data}" in notes[0]


def test_no_strategy_fits_all_data(monkeypatch, lengths_file, tmp_path, capsys):
    """Prevents a traceback, or the slowest strategy's error instead of the best's."""
    code, tried = run_plan(monkeypatch, lengths_file, tmp_path, unfit=99)
    assert code == 2
    assert len(tried) == len(set(tried)) > 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: needs too much on {tried[0].pipeline} stages; what would fit")
    assert not (tmp_path / "plan").exists()


def test_given_layouts_are_planned_once_each(monkeypatch, lengths_file, tmp_path, capsys):
    """Prevents a sharding given up unplanned because another sharding did not fit all data."""
    tried = []

    def unfit(planned: PlanRequest, *schedules) -> PlanResult:
        tried.append((planned.job.parallel, planned.job.placement))
        raise DoesNotFit("needs too much", "buy memory")

    for name in ("make_ordered_plan", "plan_in_best_schedule"):
        monkeypatch.setattr(f"omnibal.search.finalists.{name}", unfit)
    monkeypatch.setattr("omnibal.search.finalists.usable_cores", lambda: 1)
    given = "--pp 1 --dp 4 --encoder auto --sharding auto --lengths"
    command = (
        f"plan --model internvl-digits --cluster laptop-cpu --max-tiles 8 --max-tokens 512 {given}"
    )
    assert status(command, lengths_file, "-o", tmp_path / "plan") == 2
    assert "needs too much" in capsys.readouterr().err
    of_strategies = tried[: len(set(tried))]
    assert len(set(of_strategies)) == len(of_strategies) > 2


def test_without_the_best_the_next_is_compared_with():
    """Prevents reasons relative to a strategy that cannot be used."""
    found = search(gpus=8, samples_per_step=24)
    left = found.without(found.best, "no")
    assert [each.parallel for each in left.ranking] == [e.parallel for e in found.ranking[1:]]
    assert left.best.why == "best"
    assert {*list_parallels(left)} == {*list_parallels(found)}
    assert (left.ruled_out[0].parallel, left.ruled_out[0].why) == (found.best.parallel, "no")
    compared = [each for each in left.ruled_out if each.most_samples_per_second is not None]
    assert compared
    for each in compared:
        slower = left.best.samples_per_second / each.most_samples_per_second - 1
        assert each.why.startswith(f"at best {slower:+.0%}")
        assert (each.sizing.options in each.why) == (slower <= -0.005)


@pytest.mark.parametrize(
    ("gpus", "samples"), [(1, 128), (32, 128), (33, 256), (128, 256), (129, 512), (4096, 512)]
)
def test_default_steps_are_those_of_recipes(gpus, samples):
    """Prevents a default step size that halves the speed, or exceeds published recipes."""
    assert recipe_samples(gpus) == samples


def test_default_steps_give_every_rank_four_packs():
    """Prevents default steps with fewer than four packs per data-parallel rank."""
    asked = strategy_request(gpus=32, tensor=1, pipeline=1)
    samples = default_samples_per_step(asked.lengths, asked.caps, 32, 32)
    packs = samples * asked.lengths.tokens.mean() / asked.caps["tokens"]
    assert samples % 128 == 0 and 4 <= packs / 32 < 8


def test_steps_are_doubled_until_ranks_have_four_packs():
    """Prevents default steps too small for the fastest layout."""
    asked = strategy_request(gpus=8, samples_per_step=10, lengths=example_lengths(count=400))
    samples = with_enough_samples(asked, 1).samples_per_step
    found = [
        run_search(replace(asked, samples_per_step=size)).best for size in (samples // 2, samples)
    ]
    assert samples in (20, 40, 80, 160)
    assert found[0].micro_batches < 4 <= found[1].micro_batches


def test_rates_of_other_steps_are_those_of_their_own_searches():
    """Prevents advice on the step size that contradicts a search at this size."""
    asked = strategy_request(gpus=8, samples_per_step=60)
    rates = step_rates(asked, run_search(asked), lambda done: None)
    assert [rate.samples_per_step for rate in rates] == [30, 60, 120, 240]
    for rate in rates:
        own = run_search(replace(asked, samples_per_step=rate.samples_per_step)).best
        assert rate.samples_per_second == pytest.approx(own.samples_per_second, rel=0.02)


@pytest.mark.parametrize(
    ("per_second", "named"),
    [([9, 10, 10.9, 10.99], None), ([9, 10, 11.2, 14], 20), ([12, 10, 10, 9], 5)],
)
def test_a_faster_step_is_named(per_second, named):
    """Prevents silence about a step size that trains ten percent faster."""
    rates = list(map(StepRate, (5, 10, 20, 40), per_second))
    said = remark(rates, 10)
    assert said is None if named is None else said.startswith(f"--samples-per-step {named} ")


def test_bound_is_the_time_where_nothing_is_lost():
    """Prevents a bound too loose to rule out strategies: equal stages, free links."""
    rng = np.random.default_rng(0)
    model = small_model(4, 4)
    cost = random_cost(rng)
    any_unit = next(iter(cost.units.values()))
    layer = replace(any_unit, trained_parameters=0, collective_ms=np.zeros((2, 5)))
    nothing = replace(layer, forward_ms=np.zeros(5), backward_ms=np.zeros(5))
    units = {kind: layer if kind.endswith("layer") else nothing for kind in cost.units}
    free = replace(cost, units=units, link_latency_ms=0.0, link_ms_per_byte=0.0)
    features = np.tile(rng.uniform(1, 2, 5), (12, 1))
    workload = workload_of_a_step(features)
    split = stages_from_cuts(model, (3, 5, 9))
    assert [stage.number_of_layers() for stage in split] == [2, 2, 2, 2]
    simulated = simulate_levels(free, [split], workload).step_ms.mean()
    assert min_step_ms(SplitTask(free, model, workload, 4)) == pytest.approx(simulated, rel=1e-9)


def test_table_fits_a_terminal():
    """Prevents rows that wrap, and strategies missing from the table."""
    found = search(cluster=CLUSTER.model_copy(update={"memory_gib": 0.02}), gpus=8)
    console = Console(width=80, file=StringIO())
    console.print(command_tables.strategy_table(found, 72.0))
    printed = console.file.getvalue().splitlines()
    rows = [tuple(map(int, line.split()[:3])) for line in printed if line[:3].strip().isdigit()]
    every = [*found.ranking[:10], *found.ruled_out[:10]]
    assert rows == [sizes(each.parallel) for each in every]
    assert max(map(len, printed)) <= 80


def test_paper_sized_job_is_shared_as_in_the_paper():
    """Prevents an implausible ranking: OmniBal trains 6B + 20B at TP 2, PP 4."""
    rng = np.random.default_rng(0)
    tiles = rng.integers(1, 6, 1200)
    tokens = 256 * tiles + rng.integers(40, 400, 1200)
    found = search(
        model=load_model("internvl-chat-1.5-6b-20b"),
        cluster=load_cluster("a100-80g"),
        gpus=32,
        precision="bf16",
        lengths=lengths_of(tiles=tiles, tokens=tokens, loss_tokens=tokens // 8),
        samples_per_step=144,
        samples=600,
        caps=Caps.of(tiles=8, tokens=2560),
        tensor=2,
    )
    assert found.best.parallel.pipeline in (4, 8)
    needs = {each.parallel.pipeline: each.need_gib for each in found.ruled_out}
    assert needs[1] > 72


def test_slices_that_are_measured_to_be_slow_are_not_chosen():
    """Prevents tensor parallelism with slices that the device's table shows to be slow."""
    cluster, tiled = assumed_h100(), tiled_rates()
    # Every product starts as slowly as a slice of this model computes.
    late = tuple(one.model_copy(update={"ms": one.ms + 0.03}) for one in tiled.products)
    alone = tiled.model_copy(update={"products": late, "collectives": (), "copies": ()})

    given = {
        "model": load_model("internvl2-2b"), "precision": "bf16", "gpus": 8, "samples_per_step": 8,
        "samples": 100, "caps": Caps.of(tiles=9, tokens=1024),
        "lengths": example_lengths(count=100),
    }  # fmt: skip
    chosen, penalty = [], []
    for rates in ({}, {"bf16": alone}):
        given["cluster"] = cluster.model_copy(update={"rates": rates})
        chosen.append(search(**given).best.parallel.tensor)
        whole, slices = (search(**given, tensor=size).best for size in (1, 8))
        penalty.append(slices.ms_per_sample / whole.ms_per_sample)
    assert chosen[1] < chosen[0] and penalty[0] < 1 < penalty[1]
