"""Strategies: all sizes that are possible, ranked as the planner alone predicts them."""

import contextlib
import dataclasses
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from cost_cases import assumed_h100, random_cost, small_model, workload_of_a_step
from expert_cases import DIGITS
from length_cases import lengths_of
from plan_cases import (
    ISF,
    JOB,
    MODEL,
    example_lengths,
    example_profile,
    job_spec,
    request,
    settings_of,
)
from rate_cases import tiled_rates
from rich.console import Console

from omnibal import cli
from omnibal.base.errors import DoesNotFit, UserError
from omnibal.cost.profile import Measured, model_sha256
from omnibal.cost.source import ANALYTIC
from omnibal.data.lengths import write_lengths
from omnibal.job.plan import read_plan
from omnibal.job.planner import PlanRequest, PlanResult, make_plan
from omnibal.model.config import load_cluster, load_model
from omnibal.model.limits import Caps, memory_cap_gib
from omnibal.model.parallel import Parallel, WeightSharding, check_parallel
from omnibal.pipeline.bounds import least_step_ms
from omnibal.pipeline.simulate import simulate_run
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.report import command_tables
from omnibal.search import bounded, parallel_sizes
from omnibal.search.bounded import CLEARLY_WORSE
from omnibal.search.caps import CapRule, CapSearchRequest, search_caps
from omnibal.search.parallel_sizes import (
    StrategySearch,
    possible_sizings,
    progress_total,
    search_strategies,
    strategy_samples_per_step,
    without_best,
)
from omnibal.search.strategy import (
    Bound,
    FreeSizes,
    Setting,
    Sizing,
    StrategyRequest,
    find_bound,
    pack_at,
)
from omnibal.search.weight_sharding import ShardingChoice

CLUSTER = load_cluster("laptop-cpu").model_copy(update={"gpus_per_node": 4, "link_latency_us": 1})
CAPS = Caps.of(tiles=8, tokens=320)


def strategy_request(**changes) -> StrategyRequest:
    fields = {"cluster": CLUSTER}
    fields |= {name: changes.pop(name) for name in JOB if name in changes}
    own = {field.name for field in dataclasses.fields(FreeSizes)}
    sizes = {"gpus": 4} | {name: changes.pop(name) for name in own if name in changes}
    alone = Parallel(tensor=fields.get("cost_source", ANALYTIC).tensor or 1, pipeline=1)
    defaults = {
        "job": job_spec(**fields, parallel=alone),
        "sizes": FreeSizes(**sizes),
        "lengths": example_lengths(),
        "samples_per_step": 50,
        "samples": 1000,
        "caps": CAPS,
    }
    settings = settings_of(changes)
    return StrategyRequest(settings=settings, **(defaults | changes))


def possible_parallels(searched: StrategyRequest) -> list[Parallel]:
    return [sizing.parallel for sizing in possible_sizings(searched)]


def with_sizes(searched: StrategyRequest, **changes: int) -> StrategyRequest:
    return replace(searched, sizes=replace(searched.sizes, **changes))


def search(**changes) -> StrategySearch:
    return search_strategies(strategy_request(**changes), lambda done: None)


def sizes(parallel: Parallel) -> tuple[int, int, int]:
    return parallel.tensor, parallel.pipeline, parallel.data


@pytest.mark.parametrize("gpus", [1, 6, 8, 12, 41])
@pytest.mark.parametrize("given", [{}, {"tensor": 2}, {"pipeline": 3}, {"tensor": 1, "data": 2}])
def test_all_possible_sizes_are_found(gpus, given):
    """Prevents a combination from being left out, doubled, or tried although it cannot be."""
    expected = []
    for tensor in range(1, gpus + 1):
        for pipeline in range(1, gpus + 1):
            for data in range(1, gpus + 1):
                wanted = {"tensor": tensor, "pipeline": pipeline, "data": data}
                if tensor * pipeline * data != gpus or given | wanted != wanted | given:
                    continue
                if any(wanted[name] != size for name, size in given.items()):
                    continue
                try:
                    check_parallel(MODEL, Parallel(**wanted), CLUSTER)
                except UserError:
                    continue
                expected.append((tensor, pipeline, data))
    try:
        found = possible_parallels(strategy_request(gpus=gpus, **given))
    except UserError:
        found = []
    assert [sizes(each) for each in found] == sorted(expected)
    assert all(each.sequence_parallel == (each.tensor > 1) for each in found)


def plan_of(searched: StrategyRequest, parallel: Parallel, micro_batches: int) -> PlanResult:
    return make_plan(
        request(
            model=searched.job.model,
            cluster=searched.job.cluster,
            parallel=parallel,
            caps=searched.caps,
            lengths=searched.lengths,
            packing=searched.settings.packing,
            packs_per_step=micro_batches * parallel.data,
            epochs=1,
        )
    )


def planned_ms_per_sample(searched: StrategyRequest, parallel: Parallel) -> float:
    """As the planner alone predicts it: a line through steps just below and above the samples."""
    packs = plan_of(searched, parallel, 1).plan.data.packs
    samples = len(searched.lengths)
    wanted = searched.samples_per_step * packs / samples / parallel.data
    points = []
    for micro_batches in (int(np.floor(wanted)), int(np.ceil(wanted))):
        plan = plan_of(searched, parallel, micro_batches).plan
        points.append((samples / plan.data.steps, plan.prediction.step_ms))
    (fewer, short_ms), (more, long_ms) = points
    if fewer == more:
        return short_ms / fewer
    slope, start = np.polyfit([fewer, more], [short_ms, long_ms], 1)
    return slope + start / searched.samples_per_step


def planned_times(searched: StrategyRequest) -> dict[Parallel, float]:
    """Milliseconds per sample of all sizes that fit, each planned alone."""
    planned = {}
    for parallel in possible_parallels(searched):
        with contextlib.suppress(DoesNotFit):
            planned[parallel] = planned_ms_per_sample(searched, parallel)
    return planned


def found_as_planned(searched: StrategyRequest) -> StrategySearch:
    """What is found, whose best, times and bounds are those of sizes planned alone."""
    found, planned = search_strategies(searched, lambda done: None), planned_times(searched)
    best_ms = min(planned.values())
    assert found.best.ms_per_sample == pytest.approx(best_ms, rel=1e-9)
    times = [each.ms_per_sample for each in found.ranking]
    assert times == sorted(times)
    for each in found.ranking:
        assert each.ms_per_sample == pytest.approx(planned[each.parallel], rel=1e-9)
        assert each.samples_per_second == pytest.approx(1e3 / each.ms_per_sample)
        assert sum(each.lost.named().values()) == pytest.approx(each.ms_per_sample)
    for each in found.ruled_out:
        if each.parallel in planned:
            if each.most_samples_per_second is not None:
                bound_ms = 1e3 / each.most_samples_per_second
                assert bound_ms <= planned[each.parallel] * (1 + 1e-9)
    listed = [each.parallel for each in (*found.ranking, *found.ruled_out)]
    assert sorted(map(str, listed)) == sorted(map(str, possible_parallels(searched)))
    return found


def test_ranking_is_the_planners_own():
    """Prevents a second cost formula, other packs, and a winner that is not the fastest."""
    searched = strategy_request(gpus=8, samples_per_step=30)
    assert len(possible_parallels(searched)) > 5
    found = found_as_planned(searched)
    assert found.ruled_out
    for each in found.ruled_out:
        assert each.most_samples_per_second * CLEARLY_WORSE < found.best.samples_per_second


def test_ranking_with_experts_is_the_planners_own():
    """Prevents an expert size that is not tried, or timed as another one is."""
    searched = strategy_request(model=DIGITS, gpus=4, samples_per_step=30)
    every = [
        Parallel(
            tensor=tensor,
            pipeline=pipeline,
            data=4 // (tensor * pipeline),
            expert=expert,
            sequence_parallel=tensor > 1,
        )
        for tensor, pipeline in [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]
        for expert in (1, 2, 4)
        if 4 // pipeline % expert == 0
    ]
    assert possible_parallels(searched) == every
    found = found_as_planned(searched)
    assert {each.parallel.expert for each in found.ranking} == {1, 2, 4}
    fixed = possible_parallels(with_sizes(searched, expert=4))
    assert fixed == [each for each in every if each.expert == 4]
    with pytest.raises(UserError, match="expert size 3 does not divide the 4 experts"):
        possible_parallels(with_sizes(searched, expert=3))
    with pytest.raises(UserError, match=r"--pp 4 --ep 2: .* an --ep that divides tensor x data"):
        possible_parallels(with_sizes(searched, pipeline=4, expert=2))


SLOW = {"intra_node_gb_per_s": 0.05, "inter_node_gb_per_s": 0.02}


def test_experts_in_sharded_weights_rank_as_the_planner_alone_says():
    """Prevents: an expert size that is not tried beside divided weights, or timed as another."""
    winners, every = set(), []
    for changes, samples_per_step in (({"memory_gib": 0.0095}, 30), (SLOW, 90)):
        searched = strategy_request(
            model=DIGITS, cluster=CLUSTER.model_copy(update=changes), gpus=8, tensor=1,
            shardings=tuple(WeightSharding), samples_per_step=samples_per_step,
        )  # fmt: skip
        every = possible_parallels(searched)
        winners.add(found_as_planned(searched).best.parallel.sharded > 1)
    assert winners == {True, False}
    # Not groups of four with all experts, of which there are two: each rank has all their state.
    tried = {(each.expert, each.sharded) for each in every if each.pipeline == 1}
    assert tried == {(1, 1), (2, 1), (4, 1), (1, 4), (2, 4), (1, 8), (2, 8), (4, 8)}
    assert {each.expert for each in every if each.sharded > 1 < each.pipeline} == {1, 2, 4}


def test_sharded_weights_rank_as_the_planner_alone_says():
    """Prevents: a way to hold weights that is not tried, or timed as another."""
    fast = {"intra_node_gb_per_s": 1_000.0, "inter_node_gb_per_s": 1_000.0, "link_latency_us": 0}
    winners = set()
    for changes in (fast, SLOW, fast | {"memory_gib": 0.05}, {"memory_gib": 0.03}):
        cluster = CLUSTER.model_copy(update=changes)
        searched = strategy_request(
            cluster=cluster, gpus=8, samples_per_step=30, shardings=tuple(WeightSharding)
        )
        every = possible_parallels(searched)
        one_stage = [each for each in every if each.pipeline == 1]
        assert {each.pipeline for each in every if each.sharded > 1} == {1, 2, 4}
        ways = {(each.tensor, each.sharding) for each in one_stage}
        assert {(1, way) for way in WeightSharding} <= ways
        assert {each.sharded for each in one_stage if each.tensor == 1} == {1, 4, 8}
        found = found_as_planned(searched)
        winners.add(found.best.parallel.sharding)
        choice = ShardingChoice.of_strategies(found)
        assert choice.chosen is found.best.parallel.sharding
        assert {choice.chosen, *choice.others} == {each.sharding for each in every}
    assert WeightSharding.REPLICATED in winners and len(winners) > 1


@pytest.mark.parametrize("samples_per_step", [24, 63])
def test_strategies_of_least_estimates_are_planned(monkeypatch, samples_per_step):
    """Prevents a limit of plans that loses the best, hides what was left out."""
    searched = strategy_request(gpus=8, samples_per_step=samples_per_step)
    every = search_strategies(searched, lambda done: None)
    monkeypatch.setattr(parallel_sizes, "_MOST_PLANNED", 4)
    # All are estimated, also those that bounds rule out.
    for slack in ("_ESTIMATE_SLACK", "_LIKELY", "_NEAR"):
        monkeypatch.setattr(bounded, slack, 10)
    done: list[int] = []
    few = search_strategies(searched, done.append)
    assert min(done) >= 0
    assert sum(done) == progress_total(searched)
    assert few.best == every.best
    assert few.planned <= len(few.ranking) <= 4
    listed = [each.parallel for each in (*few.ranking, *few.ruled_out)]
    assert sorted(map(str, listed)) == sorted(map(str, possible_parallels(searched)))
    estimated = {
        each.parallel: each.estimated_samples_per_second
        for each in few.ruled_out
        if each.estimated_samples_per_second is not None
    }
    assert estimated
    slower = [each.ms_per_sample for each in every.ranking if each.parallel in estimated]
    assert min(slower, default=np.inf) >= few.best.ms_per_sample * (1 - few.gap)
    for parallel, per_second in estimated.items():
        planned_ms = planned_ms_per_sample(searched, parallel)
        assert 1e3 / per_second == pytest.approx(planned_ms, rel=0.15)
    left = without_best(few, "no")
    for each in left.ruled_out[1:]:
        if each.estimated_samples_per_second is not None:
            more = left.best.samples_per_second / each.estimated_samples_per_second - 1
            assert each.why == f"estimated {more:+.0%}, not planned"


@pytest.mark.parametrize("samples_per_step", [50, 63])
def test_bound_holds_for_mixed_steps(samples_per_step):
    """Prevents a bound above the time where the line goes on beyond both step sizes."""
    searched = strategy_request(gpus=8, samples_per_step=samples_per_step)
    setting = Setting(request=searched, packs={})
    setting.packs.update([pack_at(setting, CAPS)])
    bounds = []
    for parallel in possible_parallels(searched):
        _, bound = find_bound(setting, (Sizing(parallel), CAPS))
        assert isinstance(bound, Bound)
        bounds.append(bound.least_ms)
        assert bound.least_ms <= planned_ms_per_sample(searched, parallel) * (1 + 1e-9)
    assert sum(bound > 0 for bound in bounds) > len(bounds) / 3


def test_memory_rules_out_what_cannot_be_planned():
    """Prevents strategies that cannot be trained, and feasible ones that are called infeasible."""
    peak_gib = max(each.peak_gib for each in search(gpus=8).ranking)
    for share in np.arange(0.7, 0.1, -0.1):
        tight = CLUSTER.model_copy(update={"memory_gib": share * peak_gib / 0.9})
        searched = strategy_request(cluster=tight, gpus=8)
        found = search_strategies(searched, lambda done: None)
        if len(found.ranking) < len(possible_parallels(searched)) / 2:
            break
    without_room = {
        each.parallel: each for each in found.ruled_out if each.most_samples_per_second is None
    }
    assert found.ranking
    assert without_room
    for parallel in possible_parallels(searched):
        if parallel in without_room:
            out = without_room[parallel]
            assert out.need_gib > memory_cap_gib(tight)
            shown = [float(word) for word in out.why.split() if word[0].isdigit()]
            assert shown == pytest.approx([out.need_gib, memory_cap_gib(tight)], rel=0.005)
            with pytest.raises(UserError, match="GiB"):
                planned_ms_per_sample(searched, parallel)
    assert max(each.peak_gib for each in found.ranking) <= memory_cap_gib(tight)


def test_caps_and_strategies_are_timed_alike():
    """Prevents caps that are best by `omnibal caps` and not by the choice of strategies."""
    parallel = Parallel(pipeline=2, data=2)
    shared = {
        "job": job_spec(cluster=CLUSTER, parallel=parallel),
        "lengths": example_lengths(),
        "settings": ISF,
        "samples_per_step": 50,
        "samples": 1000,
    }
    by_caps = search_caps(CapSearchRequest(**shared, rule=CapRule.TIME), lambda done: None)
    assert len(by_caps.candidates) > 5
    for candidate in by_caps.candidates[::5]:
        found = search_strategies(
            StrategyRequest(
                **shared,
                sizes=FreeSizes(gpus=4, tensor=1, pipeline=2),
                caps=candidate.caps,
            ),
            lambda done: None,
        )
        assert found.best.ms_per_sample == pytest.approx(candidate.ms_per_sample, rel=1e-12)
        assert found.best.micro_batches == candidate.micro_batches


def test_processes_do_not_matter():
    """Prevents results that depend on which process was the first."""
    changes = {"gpus": 2, "caps": None, "samples": 100, "samples_per_step": 20}
    one, two = (
        search_strategies(strategy_request(**changes), lambda done: None, processes)
        for processes in (1, 2)
    )
    assert one == two


def test_caps_are_chosen_for_each_strategy():
    """Prevents caps that are worse than those of the levels, or that a sample does not fit."""
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


@pytest.mark.parametrize("caps", [CAPS, None], ids=["given", "searched for"])
def test_progress_ends_at_the_end(caps):
    """Prevents a bar that stops half-way or runs over."""
    searched = strategy_request(caps=caps, samples=100, samples_per_step=20)
    done: list[int] = []
    search_strategies(searched, done.append)
    assert sum(done) == progress_total(searched)
    assert min(done) >= 0


def test_loser_is_told_why():
    """Prevents a cause that is not what the slower strategy loses more time to."""
    slow_links = CLUSTER.model_copy(update={"link_latency_us": 10_000})
    found = search(cluster=slow_links, samples_per_step=300)
    assert found.best.why == "best"
    for each in found.ranking[1:]:
        name, percent = each.why.split(", ")[0].rsplit(" ", 1)
        key = "ideal" if name == "compute" else name
        more_ms = each.lost.named()[key] - found.best.lost.named()[key]
        assert percent == f"{more_ms / found.best.ms_per_sample:+.0%}"
        assert all(
            more_ms >= each.lost.named()[other] - found.best.lost.named()[other]
            for other in each.lost.named()
        )
    assert len(found.ranking) > 1


def test_ranks_without_a_pack_are_refused():
    """Prevents a comparison in which a strategy trains larger steps than the others."""
    few = {"samples_per_step": 6, "lengths": example_lengths(count=60), "gpus": 8}
    packs = plan_of(strategy_request(**few), Parallel(pipeline=1), 1).plan.data.packs
    found = search(**few)
    idle = {each.parallel for each in found.ruled_out if "packs for" in each.why}
    every = {each.parallel for each in (*found.ranking, *found.ruled_out)}
    assert idle == {each for each in every if each.data > 6 * packs / 60}
    assert idle < every
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
        *(
            ({"gpus": gpus, "shardings": (way,)}, f"{gpus} GPUs were given with --sharding {way}")
            for gpus, way in ((1, WeightSharding.FULL), (4, WeightSharding.HYBRID))
        ),
        (
            {"cluster": CLUSTER.model_copy(update={"memory_gib": 0.001})},
            r"none of 5 ways to share 4 GPUs fits internvl-digits.* cap is 0\.000900 GiB",
        ),
    ],
)
def test_impossible_sizes_are_refused(changes, words):
    """Prevents an empty search, or an error that does not say what is possible."""
    with pytest.raises(UserError, match=words):
        search(**changes)


def test_profile_decides_the_tensor_size():
    """Prevents measured costs from being used for another tensor size than was measured."""
    profile = example_profile().model_copy(update={"model_sha256": model_sha256(MODEL)})
    found = search(cost_source=Measured(profile))
    every = [*found.ranking, *found.ruled_out]
    assert {each.parallel.tensor for each in every} == {1}
    with pytest.raises(UserError, match="are not those of internvl-digits"):
        search(cost_source=Measured(example_profile()))
    with pytest.raises(UserError, match="--tp 2 was given with a profile of tensor size 1"):
        search(cost_source=Measured(profile), tensor=2)
    of_two = profile.model_copy(update={"tensor": 2})
    with pytest.raises(UserError, match=r"the profile is of tensor size 2 alone.*another tensor"):
        search(cost_source=Measured(of_two), gpus=3)


PLAN = (
    "plan --model internvl-digits --cluster laptop-cpu --max-tiles 8 --max-tokens 512 --gpus 4 "
    "--encoder pipeline"
)


def run_plan(monkeypatch, directory: Path, unfit: int) -> tuple[int | None, list[Parallel]]:
    """Exit code and sizes tried, where the first strategies do not fit all data."""
    write_lengths(example_lengths(), directory / "lengths.parquet")
    tried: list[Parallel] = []

    def scarcely(planned: PlanRequest) -> PlanResult:
        tried.append(planned.job.parallel)
        if len(tried) <= unfit:
            raise DoesNotFit(
                f"needs too much on {planned.job.parallel.pipeline} stages", "buy memory"
            )
        return make_plan(planned)

    monkeypatch.setattr("omnibal.planning.make_ordered_plan", scarcely)
    # The best alone is planned at a time, here and not in other processes.
    monkeypatch.setattr("omnibal.planning._FINALISTS", 1)
    files = ["--lengths", str(directory / "lengths.parquet"), "-o", str(directory / "plan")]
    with pytest.raises(SystemExit) as ended:
        cli.main([*PLAN.split(), "--samples-per-step", "40", "--json", *files])
    return ended.value.code, tried


def test_runner_up_is_planned_where_the_best_does_not_fit_all_data(monkeypatch, tmp_path, capsys):
    """Prevents an error although another strategy fits, and the wrong one named the best."""
    code, tried = run_plan(monkeypatch, tmp_path, unfit=1)
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


def test_no_strategy_fits_all_data(monkeypatch, tmp_path, capsys):
    """Prevents a traceback, or the cause of the slowest strategy in place of the best's."""
    code, tried = run_plan(monkeypatch, tmp_path, unfit=99)
    assert code == 2
    assert len(tried) == len(set(tried)) > 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: needs too much on {tried[0].pipeline} stages; what would fit")
    assert not (tmp_path / "plan").exists()


def test_without_best_compares_with_the_next():
    """Prevents reasons that are relative to a strategy that cannot be used."""
    found = search(gpus=8, samples_per_step=24)
    left = without_best(found, "no")
    assert [each.parallel for each in left.ranking] == [e.parallel for e in found.ranking[1:]]
    assert left.best.why == "best"
    every = {each.parallel for each in (*found.ranking, *found.ruled_out)}
    assert {each.parallel for each in (*left.ranking, *left.ruled_out)} == every
    assert (left.ruled_out[0].parallel, left.ruled_out[0].why) == (found.best.parallel, "no")
    compared = [each for each in left.ruled_out if each.most_samples_per_second is not None]
    assert compared
    for each in compared:
        slower = left.best.samples_per_second / each.most_samples_per_second - 1
        assert each.why == f"at best {slower:+.0%}"


def test_steps_are_as_large_as_the_cluster():
    """Prevents steps that do not grow with the devices they are shared by."""
    assert strategy_samples_per_step(64, load_cluster("a100-80g")) == 8 * 36
    assert strategy_samples_per_step(4, load_cluster("a100-80g")) == 36


def test_bound_is_the_time_where_nothing_is_lost():
    """Prevents a bound so loose that nothing is ever ruled out: equal stages, free links."""
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
    assert [stage.layer_count for stage in split] == [2, 2, 2, 2]
    simulated = simulate_run(free, split, workload).step_ms.mean()
    assert least_step_ms(free, model, workload, 4) == pytest.approx(simulated, rel=1e-9)


def test_table_fits_a_terminal():
    """Prevents rows that wrap, and strategies that are not in the table."""
    found = search(cluster=CLUSTER.model_copy(update={"memory_gib": 0.02}), gpus=8)
    console = Console(width=80, file=StringIO())
    console.print(command_tables.strategy_table(found, 72.0))
    printed = console.file.getvalue().splitlines()
    rows = [tuple(map(int, line.split()[:3])) for line in printed if line[:3].strip().isdigit()]
    every = [*found.ranking[:10], *found.ruled_out[:10]]
    assert rows == [sizes(each.parallel) for each in every]
    assert max(map(len, printed)) <= 80


def test_paper_sized_job_is_shared_as_in_the_paper():
    """Prevents a ranking that no one would follow: OmniBal trains 6B + 20B at TP 2, PP 4."""
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
    """Prevents: tensor parallelism chosen for slices that the device's table says are slow."""
    cluster, tiled = assumed_h100(), tiled_rates()
    # Every product takes as long to begin as a slice of this model does to compute.
    late = tuple(one.model_copy(update={"ms": one.ms + 0.03}) for one in tiled.products)
    alone = tiled.model_copy(update={"products": late, "collectives": (), "copies": ()})

    def searched(rates, **fixed) -> StrategySearch:
        return search(
            model=load_model("internvl2-2b"),
            cluster=cluster.model_copy(update={"rates": rates}),
            precision="bf16",
            gpus=8,
            samples_per_step=8,
            samples=100,
            caps=Caps.of(tiles=9, tokens=1024),
            lengths=example_lengths(count=100),
            **fixed,
        )

    chosen, penalty = [], []
    for rates in ({}, {"bf16": alone}):
        chosen.append(searched(rates).ranking[0].parallel.tensor)
        whole, slices = (searched(rates, tensor=size).ranking[0] for size in (1, 8))
        penalty.append(slices.ms_per_sample / whole.ms_per_sample)
    assert chosen[1] < chosen[0] and penalty[0] < 1 < penalty[1]
