"""Weights and gradients sharded over data-parallel ranks, as in FSDP and ZeRO-3."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from cost_cases import analytic_cost
from exchange_cases import simulated_ms
from expert_cases import DIGITS, expert_model
from plan_cases import example_lengths
from schedule_cases import lost_time

from omnibal.base.errors import UserError
from omnibal.cost import sharding_costs
from omnibal.cost.link_rates import pass_line
from omnibal.cost.model import CostModel, UnitCost
from omnibal.cost.setting import CostSetting
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.model.config import ClusterConfig, load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Group, Parallel
from omnibal.model.rate_tables import CollectiveTime, Rates
from omnibal.model.runtime import OWN_RUNTIME, RuntimeOptions
from omnibal.model.targets import TARGETS, StageRules, TargetName, TrainerConstraints
from omnibal.model.units import feature_names_at, unit_names
from omnibal.packing.features import trained_features
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.prediction import LostTime
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import StageTimes, per_step_costs, workload_times
from omnibal.pipeline.stage_memory import state_bytes
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.pipeline.workload import Workload
from omnibal.search.limit_costs import LimitName, lift_limit

pytestmark = pytest.mark.quick
MODEL = load_model("internvl2-1b")
EXPERT_LAYER = "language_layer_experts8"
LEVELS = (Level(caps=Caps.of(tiles=30, tokens=8192)),)
XTUNER = TARGETS[TargetName.XTUNER]
IN_BF16 = RuntimeOptions(scatters_weights_precision=True)


def fsdp(ranks: int, **sizes: int) -> Parallel:
    """Return one stage with fully sharded weights, unless `sizes` says otherwise."""
    return Parallel(**({"pipeline": 1, "data": ranks, "sharded": ranks} | sizes))


def job(ranks: int, **changes: object) -> JobSpec:
    """Return a job with fully sharded weights."""
    cluster = load_cluster("h100-80g").model_copy(update={"host_us": 0.0})
    whole = JobSpec(model=MODEL, cluster=cluster, parallel=fsdp(ranks), precision="bf16")
    return replace(whole, **changes)


def data_of(lengths: Lengths, packs_per_step: int, tiles=30, tokens=8192) -> SampleData:
    levels = (Level(caps=Caps.of(tiles=tiles, tokens=tokens)),)
    return SampleData(lengths=lengths, levels=levels, packs_per_step=packs_per_step)


def sharded_cost(cost, model, cluster, sizes, runtime=OWN_RUNTIME):
    setting = CostSetting(model, cluster, sizes, "bf16", runtime=runtime)
    return sharding_costs.sharded_cost(cost, unit_names(model), setting)


def measured_cluster(hidden: float | None) -> ClusterConfig:
    """Return devices with measured collectives (reductions slower than gathers) and overlap."""
    measured = {"all_reduce": 4.0, "all_gather": 2.0, "reduce_scatter": 0.5}
    collectives = tuple(
        CollectiveTime(kind=kind, ranks=8, latency_us=50, gb_per_s=gb_per_s)
        for kind, gb_per_s in measured.items()
    )
    rates = Rates(device="mine", collectives=collectives, hidden=hidden)
    return load_cluster("h100-80g").model_copy(update={"rates": {"bf16": rates}})


@pytest.mark.parametrize(("hidden", "is_serial"), [(None, False), (1.0, False), (0.0, True)])
def test_exchanges_have_the_times_and_the_overlap_that_were_measured(hidden, is_serial):
    """Prevents one rate for both gathers and reductions if both were measured."""
    cost = analytic_cost(MODEL, load_cluster("h100-80g"), fsdp(8), "bf16")
    _, exchange = sharded_cost(cost, MODEL, measured_cluster(hidden), fsdp(8))
    # Eight ranks send 7/8: bf16 weights at 2 GB/s, fp32 gradients at 0.5.
    gather_ms, reduce_ms = exchange.gather_ms[0] - 0.05, exchange.reduce_ms[0] - 0.05
    assert reduce_ms == pytest.approx(2 * 4 * gather_ms, rel=1e-6)
    features = np.ones((1, exchange.forward_ms.shape[1]))
    units = list(exchange.sequence)
    ahead, behind = exchange.exposed_ms(features)[0]
    all_ahead = exchange.gather_ms[units].sum()
    all_behind = (exchange.gather_back_ms + exchange.reduce_ms)[units].sum()
    assert (ahead == pytest.approx(all_ahead)) == is_serial
    assert (behind == pytest.approx(all_behind)) == is_serial


@pytest.mark.parametrize("frozen", [(), ("vision",)], ids=["all", "language"])
@pytest.mark.parametrize("gb_per_s", [0.5, 5.0, 500.0])
def test_exposed_exchange_is_that_of_events_one_by_one(gb_per_s: float, frozen: tuple) -> None:
    """Prevents exchange counted as hidden without computation to hide it, or hidden twice."""
    cluster = slow_cluster(gb_per_s)
    cost = analytic_cost(MODEL, cluster, fsdp(8), "bf16", frozen)
    _, exchange = sharded_cost(cost, MODEL, cluster, fsdp(8), IN_BF16)
    draw = np.random.default_rng(0)
    scale = np.where(np.array(cost.features) == "fixed", 1, 4_000)
    features = np.abs(draw.normal(size=(5, len(cost.features)))) * scale
    features[:, 0] = 1
    units = [[kind.name for kind in cost.kinds].index(name) for name in unit_names(MODEL)]
    exposed = exchange.exposed_ms(features)
    for row, (ahead, behind) in zip(features, exposed, strict=True):
        forward, backward = exchange.forward_ms @ row, exchange.backward_ms @ row
        nothing = [0.0] * len(units)
        whole = simulated_ms(list(forward[units]), list(exchange.gather_ms[units]), nothing)
        assert forward[units].sum() + ahead == pytest.approx(whole, rel=1e-9)
        exchanged = backward, exchange.gather_back_ms, exchange.reduce_ms
        whole = simulated_ms(*(list(each[units[::-1]]) for each in exchanged))
        assert backward[units].sum() + behind == pytest.approx(whole, rel=1e-9)


def slow_cluster(gb_per_s: float) -> ClusterConfig:
    """Return devices with links of this rate."""
    cluster = load_cluster("h100-80g").model_copy(update={"host_us": 0.0})
    return cluster.model_copy(update={"intra_node_gb_per_s": gb_per_s})


@pytest.mark.parametrize("runtime", [IN_BF16, OWN_RUNTIME], ids=["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_weights_go_round_a_ring(ranks: int, runtime: RuntimeOptions) -> None:
    """Prevents a rank that sends to itself, gradients of frozen units, gathers for backwards that
    read no weight, and a wrong gradient precision."""
    cluster = slow_cluster(5.0).model_copy(update={"link_latency_us": 30, "link_efficiency": 0.5})
    frozen = ("vision", "projector")
    cost = analytic_cost(MODEL, cluster, fsdp(ranks), "bf16", frozen)
    _, exchange = sharded_cost(cost, MODEL, cluster, fsdp(ranks), runtime)
    gradient_bytes = 2 if runtime is IN_BF16 else 4
    for place, kind in enumerate(cost.kinds):
        # A rank receives all shards except its own.
        byte_ms = (ranks - 1) * cost.units[kind.name].parameters / ranks / (5e6 * 0.5)
        gather_ms, reduce_ms = 2 * byte_ms + 0.03, gradient_bytes * byte_ms + 0.03
        is_trained = kind.tower == "language"
        found = exchange.gather_ms, exchange.gather_back_ms, exchange.reduce_ms
        is_read_back = is_trained and "layer" in kind.name
        expected = [gather_ms, is_read_back * gather_ms, is_trained * reduce_ms]
        assert [each[place] for each in found] == pytest.approx(expected), kind.name


def gathered_bytes(unit: UnitCost, expert_ranks: int) -> float:
    """Return bytes of a unit's gathered bf16 weights: all except this rank's own experts."""
    own = unit.expert_parameters if expert_ranks == 1 else 0
    return 2 * (unit.parameters - own)


def walked_forward(
    cost: CostModel, names: Sequence[str], expert_ranks: int = 1
) -> dict[str, float]:
    """Return peak bytes of gathered weights in each unit's forward."""
    held, most = Counter[int](), dict.fromkeys(names, 0.0)
    for place, name in enumerate(names):
        for gathered in (place, place + 1):
            if gathered < len(names):
                held[gathered] = gathered_bytes(cost.units[names[gathered]], expert_ranks)
        most[name] = max(most[name], held.total())
        del held[place]
    return most


def walked_backward(
    cost: CostModel, names: Sequence[str], gradient_bytes: int, expert_ranks: int = 1
) -> dict[str, float]:
    """Return peak bytes of gathered weights and gradients per unit's backward, on eight ranks."""
    held, most = Counter[tuple[str, int]](), dict.fromkeys(names, 0.0)
    tied_bytes = gradient_bytes * cost.tied_trained_parameters
    for place, name in reversed([*enumerate(names)]):
        own_bytes = gradient_bytes * cost.units[name].trained_parameters
        for gathered in (place - 1, place):
            unit = cost.units[names[max(gathered, 0)]]
            if gathered >= 0 and unit.has_backward and not names[gathered].endswith("embed"):
                held["weights", gathered] = gathered_bytes(unit, expert_ranks)
        if name == "head":
            held["tied", 0] = tied_bytes
            own_bytes -= tied_bytes
        elif name == "language_embed":
            assert held.pop(("tied", 0)) == tied_bytes  # a separate unit
        held["gradients", place] = own_bytes
        most[name] = max(most[name], held.total())
        # Gradients of later units are reduced by now.
        held = Counter({key: size for key, size in held.items() if key[1] in (0, place - 1, place)})
        held.pop(("weights", place), None)
        of_experts = gradient_bytes * cost.units[name].trained_expert_parameters
        held["share", place] = (own_bytes - of_experts) / 8
        if expert_ranks > 1:
            held["share", place] += of_experts / expert_ranks
    return most


@pytest.mark.parametrize("runtime", [IN_BF16, OWN_RUNTIME], ids=["bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("frozen", [(), ("vision", "projector")], ids=["all", "language"])
def test_whole_weights_are_there_for_a_while(frozen, tied, runtime):
    """Prevents out-of-memory while the next weights are gathered or gradients wait for reduction;
    gradients of frozen weights, exchange counted twice, and gradient sums without time."""
    cluster = load_cluster("h100-80g").model_copy(update={"host_us": 0.0})
    model = MODEL.with_tower("language", tied_head=tied)
    whole = analytic_cost(model, cluster, fsdp(8), "bf16", frozen)
    shared, _ = sharded_cost(whole, model, cluster, fsdp(8), runtime)
    assert (whole.tied_trained_parameters > 0) == tied
    assert shared.features == (*whole.features, "exposed_forward_ms", "exposed_backward_ms")
    names, gradient_bytes = unit_names(model), 2 if runtime is IN_BF16 else 4
    walked = (walked_forward(whole, names), walked_backward(whole, names, gradient_bytes))
    for name, before in whole.units.items():
        after, waits = shared.units[name], 1.0 if name == "head" else 0.0
        forward, backward = (each[name] for each in walked)
        expected = np.pad(before.transient_bytes, [(0, 0), (0, 2)])
        # The loss's backward precedes the gather of the head's weights.
        of_forward = (2 if name == "head" else 1) if before.has_backward else len(expected)
        expected[:of_forward, 0] += forward
        expected[of_forward:, 0] += backward
        np.testing.assert_allclose(after.transient_bytes, expected, rtol=1e-12)
        np.testing.assert_array_equal(after.passing_bytes, np.pad(before.passing_bytes, (0, 2)))
        np.testing.assert_array_equal(after.forward_ms, [*before.forward_ms, waits, 0])
        # Zeros are written; of 1/8, the received part is read and the sum read and written.
        moved = gradient_bytes + (gradient_bytes + 2 * 4) / 8
        sums_ms = moved * before.trained_parameters / (cluster.memory_gb_per_s * 1e6)
        expected_ms = np.array([*before.backward_ms, 0, waits])
        expected_ms[0] += sums_ms
        np.testing.assert_allclose(after.backward_ms, expected_ms, rtol=1e-12)
        collective = np.hstack([before.collective_ms, [[waits, 0], [0, waits]]])
        np.testing.assert_array_equal(after.collective_ms, collective)
    assert shared.runs_in_lockstep and shared.bucket_parameters == np.inf
    # Every micro-batch exchanges, so no exchange is left per step.
    for rate in ("gradient_reduction_ms", "weight_gather_ms"):
        assert shared.of_parameters(rate, 1e9, 0) == shared.of_parameters(rate, 1e9, 1e9) == 0
    for rate in ("optimizer_bytes", "optimizer_ms"):
        for experts in (0, 1e8):
            counts = rate, 1e9, experts
            assert shared.of_parameters(*counts) == whole.of_parameters(*counts) > 0


@pytest.mark.parametrize(("expert", "expert_ranks"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_experts_are_whole_for_a_while(expert: int, expert_ranks: int) -> None:
    """Prevents memory of other ranks' experts, and missing memory of gathered experts."""
    model, cluster, sizes = expert_model(), load_cluster("h100-80g"), fsdp(8, expert=expert)
    whole = analytic_cost(model, cluster, sizes, "bf16")
    names = unit_names(model)
    shared, _ = sharded_cost(whole, model, cluster, sizes)
    forward = walked_forward(whole, names, expert_ranks)
    backward = walked_backward(whole, names, 4, expert_ranks)
    for name in names:
        more = shared.units[name].transient_bytes[:, 0] - whole.units[name].transient_bytes[:, 0]
        assert more[0] == pytest.approx(forward[name]), name
        assert more[-1] == pytest.approx(backward[name]), name
    layer = whole.units[EXPERT_LAYER]
    assert 0 < layer.expert_parameters == 8 // expert * 3 * 8 * 5
    moved = 4 * (layer.parameters - layer.expert_parameters) * (1 + 3 / 8)
    moved += 4 * layer.expert_parameters * (1 + 3 / expert_ranks)
    summed_ms = shared.units[EXPERT_LAYER].backward_ms[0] - layer.backward_ms[0]
    assert summed_ms == pytest.approx(moved / (cluster.memory_gb_per_s * 1e6))


@pytest.mark.parametrize(
    ("tensor", "data", "expert", "sharded", "ranks", "copies", "apart"),
    [
        (1, 16, 1, 16, 16, 1, 16),
        (1, 16, 2, 16, 8, 1, 16),
        (1, 16, 4, 8, 2, 2, 8),
        (1, 16, 8, 4, 1, 2, 8),
        (1, 8, 8, 8, 1, 1, 8),
        (2, 8, 8, 8, 2, 1, 16),
        (2, 8, 1, 4, 8, 2, 8),
        (4, 4, 2, 2, 4, 2, 8),
    ],
)
def test_experts_are_divided_by_the_ranks_that_hold_the_same(
    tensor: int, data: int, expert: int, sharded: int, ranks: int, copies: int, apart: int
) -> None:
    """Prevents experts sharded over ranks with other experts, or exchanged without need.

    By hand: `ranks` of the sharding ranks hold the same experts.
    """
    sizes = {"tensor": tensor, "expert": expert, "sharded": sharded}
    parallel = fsdp(data, **sizes, sequence_parallel=tensor > 1)
    cluster = load_cluster("h100-80g").model_copy(update={"rates": {}})
    model = expert_model().with_tower("language", heads=4, kv_heads=4)
    divided = job(8, model=model, cluster=cluster, parallel=parallel)
    cost, rates = divided.cost, divided.cost.expert_rates
    assert (rates.weight_bytes, rates.gradient_bytes) == (2 / ranks, 4 / ranks)
    assert rates.optimizer_bytes == 12 / ranks
    # An all-reduce sends its bytes twice, except a copy's own.
    line = pass_line(cluster, Group(copies, stride=apart), "bf16")
    sent_ms = line.each_ms * 2 * (copies - 1) / copies * 4 / ranks
    assert rates.gradient_reduction_ms == pytest.approx(sent_ms)
    layer, place = cost.units[EXPERT_LAYER], [*cost.units].index(EXPERT_LAYER)
    others = layer.parameters - layer.expert_parameters
    expected = np.zeros(2)
    for size, group in (
        (others, Group(sharded, stride=tensor)),
        (layer.expert_parameters, Group(ranks, stride=expert)),
    ):
        line = pass_line(cluster, group, "bf16")
        sent = size * (group.ranks - 1) / group.ranks
        expected += [line.fixed_ms + line.each_ms * each * sent for each in (2, 4)]
    exchange = divided.exchange
    found = exchange.gather_ms[place], exchange.reduce_ms[place]
    assert found == pytest.approx(expected)
    assert exchange.gather_back_ms[place] == found[0]
    state = state_bytes(cost, layer).sum()
    assert state == pytest.approx(18 * (others / sharded + layer.expert_parameters / ranks))
    assert cost.source.endswith(f"experts over {ranks}")


def test_stages_of_divided_weights_send_over_the_links_of_the_whole_job() -> None:
    """Prevents inter-node sends priced at the intra-node rate."""
    ways = [fsdp(8, pipeline=2, sharded=sharded) for sharded in (1, 4)]
    whole, shared = (job(8, parallel=each).cost for each in ways)
    assert shared.link_ms_per_byte == whole.link_ms_per_byte
    assert shared.link_ms_per_byte > job(4, parallel=fsdp(4, pipeline=2)).cost.link_ms_per_byte


@pytest.mark.parametrize("frozen", [(), ("vision",), ("language",)])
def test_stages_have_what_is_exposed_between_them(frozen: tuple[str, ...]) -> None:
    """Prevents all exposed exchange from being charged to the head's stage."""
    given = {"cluster": measured_cluster(hidden=0.0), "frozen": frozen}
    one, three = (job(4, parallel=fsdp(4, pipeline=pipeline), **given) for pipeline in (1, 3))
    features = np.ones((2, one.cost.features.index("exposed_forward_ms")))
    whole, divided = (each.exchange.exposed_ms(features) for each in (one, three))
    layer = [kind.name for kind in one.cost.kinds].index("language_layer")
    again = three.exchange.gather_back_ms[layer] + three.exchange.reduce_ms[layer]
    # Two more stages begin with a layer's gather and end with its reduction.
    np.testing.assert_allclose(
        divided - whole, [[2 * three.exchange.gather_ms[layer], 2 * again]] * 2, rtol=1e-9
    )
    names = unit_names(MODEL)
    for column, exposed in ((-2, "forward_ms"), (-1, "backward_ms")):
        shares = [getattr(three.cost.units[name], exposed)[column] for name in names]
        assert sum(shares) == pytest.approx(1)
        assert max(shares) < 0.5
        assert getattr(three.cost.units["language_layer"], exposed)[column] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp8"}, "--precision fp8 excludes sharded weights"),
        ({"trainer": TARGETS[TargetName.MEGATRON_LM]}, "Megatron-LM, which supports replicated"),
        ({"trainer": XTUNER, "parallel": fsdp(4, sharded=2)}, "XTuner v1, which supports full"),
        ({"trainer": XTUNER, "parallel": fsdp(2, tensor=2)}, "--tp 2 was given"),
        ({"model": DIGITS, "trainer": XTUNER, "parallel": fsdp(2, expert=2)}, "--ep 2 was given"),
    ],
)
def test_what_does_not_go_with_sharded_weights_is_refused(changes, message):
    """Prevents a prediction for a combination that the trainer does not support."""
    with pytest.raises(UserError, match=message) as raised:
        job(2, **changes)
    assert "\n" not in str(raised.value)


def test_copies_of_shares_are_reduced_once_a_step() -> None:
    """Prevents hybrid shards that diverge, and optimizer state divided over ranks with other
    shards.

    Eight groups of one node: an all-reduce over one adapter per rank, by hand.
    """
    cluster = load_cluster("h100-80g").model_copy(update={"rates": {}})
    given = {"cluster": cluster, "frozen": ("vision",)}
    hybrid, alone = (job(size, parallel=fsdp(size, sharded=8), **given).cost for size in (64, 8))
    gb_per_s = cluster.inter_node_gb_per_s * cluster.network_efficiency
    for parameters in (1e9, 5e9):
        sent_bytes = 4 * parameters / 8 * 2 * 7 / 8
        ms = hybrid.of_parameters("gradient_reduction_ms", parameters, 0)
        assert ms == pytest.approx(sent_bytes / (gb_per_s * 1e6))
        assert hybrid.of_parameters(
            "gradient_reduction_ms", parameters, parameters
        ) == pytest.approx(ms)
        assert alone.of_parameters("gradient_reduction_ms", parameters, 0) == 0
    assert hybrid.of_parameters("optimizer_bytes", 1e9, 0) == pytest.approx(12e9 / 8)
    stages = stages_from_cuts(MODEL, ())
    once, of_all = (per_step_costs(cost, stages) for cost in (hybrid, alone))
    trained = sum(hybrid.units[name].trained_parameters for name in unit_names(MODEL))
    assert once.reduction_ms[0] == pytest.approx(
        hybrid.of_parameters("gradient_reduction_ms", trained, 0)
    )
    assert once.update_ms == pytest.approx(of_all.update_ms)
    # Within the last backward, if gathers stay within the node.
    assert once.exposed_ms(np.array([1e6]))[0] < once.reduction_ms[0] / 2
    wide = per_step_costs(job(64, parallel=fsdp(64, sharded=16), **given).cost, stages)
    assert not wide.overlaps and wide.reduction_ms[0] > 0


def test_tensor_parallel_ranks_gather_their_parts() -> None:
    """Prevents full weights gathered on every tensor-parallel rank, over separate links."""
    alone, parts = (
        job(2, parallel=fsdp(16, tensor=tensor, sequence_parallel=tensor > 1)) for tensor in (1, 2)
    )
    names = [kind.name for kind in alone.cost.kinds]
    layer = names.index("language_layer")
    line = pass_line(alone.cluster, Group(16, stride=2), "bf16")
    held = parts.cost.units["language_layer"].parameters
    expected = line.fixed_ms + line.each_ms * 2 * held * 15 / 16
    assert parts.exchange.gather_ms[layer] == pytest.approx(expected)
    assert held < alone.cost.units["language_layer"].parameters / 1.8
    unit = parts.cost.units["language_layer"]
    computed = (unit.forward_ms - unit.collective_ms[0])[:-2]
    assert parts.exchange.forward_ms[layer] == pytest.approx(computed)
    assert unit.collective_ms[0].sum() > 0


def test_ranks_that_share_packs_gather_beside_their_own_tokens() -> None:
    """Prevents exposed exchange computed from full packs, or lost if packs have levels."""
    levels = (
        Level(caps=Caps.of(tiles=6, tokens=110)),
        Level(caps=Caps.of(tiles=12, tokens=440), context=4),
    )
    shared = job(8)
    data = replace(data_of(example_lengths(count=400), 16), levels=levels)
    packs, lengths = data.schedule(shared)
    workload = shared.workload(packs, lengths, levels)
    names = feature_names_at(shared.cost.features, levels)
    columns = [names.index(name) for name in ("exposed_forward_ms", "exposed_backward_ms")]
    plain = workload.features[:, : columns[0]]
    for row, found in zip(plain, workload.features[:, columns], strict=True):
        assert found == pytest.approx(shared.exchange.exposed_ms(row[None])[0])
        assert found.min() > 0
    assert {1, 4} == set(workload.context.tolist())
    whole = job(8, parallel=fsdp(8, sharded=1))
    for cost, before in zip(shared.costs_at(levels), whole.costs_at(levels), strict=True):
        for name, unit in cost.units.items():
            more = unit.transient_bytes[:, 0] - before.units[name].transient_bytes[:, 0]
            # After the moments of the forward and the loss.
            assert more[2:] == pytest.approx(np.full(len(more) - 2, unit.whole_bytes)), name


def test_ranks_of_a_group_run_in_lockstep_with_like_packs() -> None:
    """Prevents a straggler without waiting ranks, and packs dealt as if ranks did not wait.

    By hand: every slot takes its slowest rank's passes.
    """
    lengths = example_lengths(count=600)
    for sharded in (8, 4):
        shared = job(8, parallel=fsdp(8, sharded=sharded))
        data = data_of(lengths, 32, tiles=12, tokens=2048)
        steps_ms = {}
        for dealt in ("alike", "apart"):
            of_deal = shared if dealt == "alike" else job(8, parallel=fsdp(8, sharded=1))
            packs, used = data.schedule(of_deal)
            workload = shared.workload(packs, used, data.levels)
            stages = [stages_from_cuts(MODEL, ())]
            times = workload_times(shared.cost, stages, workload)
            once = per_step_costs(shared.cost, stages[0])
            found_ms = predict_steps(times, workload, once).step_ms
            walked_ms = [
                walked_step_ms(times, workload, np.flatnonzero(workload.step == step), sharded)
                for step in range(packs.steps)
            ]
            exposed_ms = once.exposed_ms(times.backward_ms[:, 0].max())
            once_ms = once.without_exchange().update_ms[0] + exposed_ms[0]
            assert found_ms == pytest.approx(np.array(walked_ms) + once_ms, rel=0.02)
            steps_ms[dealt] = found_ms.mean()
            lost = lost_time(shared.cost, stages, workload, float(found_ms.mean()))
            assert lost.expert_wait_ms > 0
        assert steps_ms["alike"] < steps_ms["apart"]


def walked_step_ms(times: StageTimes, workload: Workload, rows: np.ndarray, sharded: int) -> float:
    """Return the slowest group's step ms on one stage: slots wait for their slowest rank."""
    groups = []
    for group in np.unique(workload.dp_rank[rows] // sharded):
        own = rows[workload.dp_rank[rows] // sharded == group]
        slots = [own[workload.slot[own] == slot] for slot in np.unique(workload.slot[own])]
        assert all(len(slot) == sharded for slot in slots)
        groups.append(
            sum(times.forward_ms[s, 0].max() + times.backward_ms[s, 0].max() for s in slots)
        )
    return max(groups)


def test_padding_is_one_more_segment_of_every_pack() -> None:
    """Prevents padding without cost, or padding that attends to all of its pack."""
    names = ("fixed", "tiles", "tokens", "squared_tokens", "loss_tokens")
    packs = np.array([[1, 3, 700, 250_000, 300], [1, 0, 1_000, 1_000_000, 1_000.0]])
    padded = trained_features(packs, names, padded=True, whole_loss=False)
    assert padded.tolist() == [[1, 3, 1_000, 340_000, 300], [1, 0, 1_000, 1_000_000, 1_000]]
    whole = trained_features(packs, names, padded=True, whole_loss=True)
    assert whole[:, 4].tolist() == [1_000, 1_000]
    assert trained_features(packs, names, padded=False, whole_loss=False) is packs


def test_padding_of_packs_is_told_from_needed_work() -> None:
    """Prevents padding counted as needed work, or counted at all if packs are equally long."""
    padded = job(4, trainer=XTUNER)
    plain = replace(padded, trainer=lift_limit(XTUNER, LimitName.PADDED))
    lengths = example_lengths(count=200)
    longest = int(lengths.tokens.max())
    equal = replace(lengths, tokens=np.full_like(lengths.tokens, longest))
    for samples, is_even in ((lengths, False), (equal, True)):
        packs = data_of(samples, 8, tokens=longest).schedule(padded)
        lost, needed = lost_of(padded, *packs), lost_of(plain, *packs)
        assert lost.ideal_ms == pytest.approx(needed.ideal_ms)
        of_packs_ms = lost.padding_ms - needed.padding_ms  # without padded attention heads
        assert (of_packs_ms == pytest.approx(0, abs=1e-9)) == is_even
        assert of_packs_ms > -1e-9


def lost_of(job: JobSpec, packs: ScheduledPacks, lengths: Lengths) -> LostTime:
    """Return the breakdown of the mean step on one stage. It adds up to the step."""
    stages, workload = stages_from_cuts(MODEL, ()), job.workload(packs, lengths, LEVELS)
    once = per_step_costs(job.cost, stages)
    step_ms = predict_steps(workload_times(job.cost, [stages], workload), workload, once).step_ms
    lost = lost_time(job.cost, [stages], workload, float(step_ms.mean()))
    assert sum(lost.causes().values()) == pytest.approx(step_ms.mean())
    return lost


def test_tokens_without_loss_cost_the_head_too() -> None:
    """Prevents prompt logits left out for trainers that compute them."""
    plain = job(2, parallel=fsdp(2, sharded=1))
    whole = replace(plain, trainer=TrainerConstraints(stages=StageRules(head_on_all_tokens=True)))
    packs, lengths = data_of(example_lengths(count=200), 4).schedule(plain)
    column = plain.cost.features.index("loss_tokens")
    of_loss = plain.workload(packs, lengths, LEVELS).features[:, column]
    of_all = whole.workload(packs, lengths, LEVELS).features[:, column]
    assert (of_loss <= packs.tokens).all()
    assert of_all.tolist() == packs.tokens.tolist()
