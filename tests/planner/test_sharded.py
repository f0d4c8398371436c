"""Weights and gradients divided over data-parallel ranks, as FSDP and ZeRO-3 do."""

from dataclasses import replace

import numpy as np
import pytest
from plan_cases import example_lengths

from omnibal.base.errors import UserError
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import trained_features
from omnibal.cost.sharded import ShardedExchange, sharded_cost
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import ClusterConfig, load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import OWN, TARGETS, Sharding, StageRules, TargetName, TrainerConstraints
from omnibal.model.units import unit_names
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.lost_time import lost_time
from omnibal.pipeline.prediction import LostTime
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import per_step_costs, workload_times
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.search.limit_costs import LimitName, lifted

pytestmark = pytest.mark.quick
MODEL = load_model("internvl2-1b")
LEVELS = (Level(caps=Caps.of(tiles=30, tokens=8192)),)
XTUNER = TARGETS[TargetName.XTUNER]


def simulated_ms(compute_ms: list[float], gather_ms: list[float], reduce_ms: list[float]) -> float:
    """Time of units in turn beside one link: an event at a time, each gather one unit ahead.

    The link serves a unit's gather first, then the reduction of the unit before.
    """
    link_ms, compute_end = gather_ms[0], 0.0
    ready = [link_ms]
    for unit, own_ms in enumerate(compute_ms):
        start = max(compute_end, ready[unit])
        link_ms = max(link_ms, start)
        if unit + 1 < len(compute_ms):
            link_ms += gather_ms[unit + 1]
        if unit:
            link_ms += reduce_ms[unit - 1]
        ready.append(link_ms)
        compute_end = start + own_ms
    return max(compute_end, link_ms) + reduce_ms[-1]


@pytest.mark.parametrize("frozen", [(), ("vision",)], ids=["all", "language"])
@pytest.mark.parametrize("gb_per_s", [0.5, 5.0, 500.0])
def test_exposed_exchange_is_that_of_events_one_by_one(gb_per_s: float, frozen: tuple) -> None:
    """Prevents: exchange counted as hidden that no computation hides, or twice."""
    cluster = slow_cluster(gb_per_s)
    cost = analytic_cost(MODEL, cluster, Parallel(pipeline=1, data=8), "bf16", frozen)
    exchange = ShardedExchange.of(cost, MODEL, cluster, 8, "bf16")
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
        turned = units[::-1]
        whole = simulated_ms(
            list(backward[turned]),
            list(exchange.gather_back_ms[turned]),
            list(exchange.reduce_ms[turned]),
        )
        assert backward[units].sum() + behind == pytest.approx(whole, rel=1e-9)


def slow_cluster(gb_per_s: float) -> ClusterConfig:
    """Devices whose links have this rate."""
    cluster = load_cluster("h100-80g")
    return cluster.model_copy(update={"intra_node_gb_per_s": gb_per_s})


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_weights_go_round_a_ring(ranks: int) -> None:
    """Prevents: a rank that sends its own share too, frozen units whose gradients are exchanged,
    and units without a backward that are gathered for one."""
    cluster = slow_cluster(5.0).model_copy(update={"link_latency_us": 30, "link_efficiency": 0.5})
    frozen = ("vision", "projector")
    cost = analytic_cost(MODEL, cluster, Parallel(pipeline=1, data=ranks), "bf16", frozen)
    exchange = ShardedExchange.of(cost, MODEL, cluster, ranks, "bf16")
    for place, kind in enumerate(cost.kinds):
        parameters, ring_ms = cost.units[kind.name].parameters, 0.0
        for step in range(1, ranks):
            ring_ms += 2 * parameters / ranks / (5e6 * 0.5) + (0.03 if step == 1 else 0)
        is_trained = kind.tower == "language"
        found = exchange.gather_ms, exchange.gather_back_ms, exchange.reduce_ms
        expected = [ring_ms, is_trained * ring_ms, is_trained * ring_ms]
        assert [each[place] for each in found] == pytest.approx(expected), kind.name


@pytest.mark.parametrize("frozen", [(), ("vision", "projector")], ids=["all", "language"])
def test_whole_weights_are_there_for_a_while(frozen: tuple[str, ...]) -> None:
    """Prevents: a device out of memory where a unit's weights are gathered beside the next one's,
    gradients of frozen weights, and an exchange that is counted once a step besides."""
    given = Parallel(pipeline=1, data=8), "bf16", frozen
    whole = analytic_cost(MODEL, load_cluster("h100-80g"), *given)
    shared = sharded_cost(whole, 8)
    assert shared.features == (*whole.features, "exposed_forward_ms", "exposed_backward_ms")
    largest = sorted(unit.parameters for unit in whole.units.values())[-1]
    for name, before in whole.units.items():
        after, waits = shared.units[name], 1.0 if name == "head" else 0.0
        # Its own weights and the next unit's, its gradients whole; all of bf16.
        gathered = 2 * (before.parameters + largest)
        expected = np.pad(before.transient_bytes, [(0, 0), (0, 2)])
        expected[:, 0] += gathered + (
            0 if before.trained_parameters == 0 else 2 * before.parameters
        )
        np.testing.assert_allclose(after.transient_bytes, expected, rtol=1e-12)
        passing = np.pad(before.passing_bytes, (0, 2))
        passing[0] += 0 if before.backward_ms.any() else gathered
        np.testing.assert_allclose(after.passing_bytes, passing, rtol=1e-12)
        np.testing.assert_array_equal(after.forward_ms, [*before.forward_ms, waits, 0])
        np.testing.assert_array_equal(after.backward_ms, [*before.backward_ms, 0, waits])
        collective = np.hstack([before.collective_ms, [[waits, 0], [0, waits]]])
        np.testing.assert_array_equal(after.collective_ms, collective)
    assert shared.runs_in_lockstep and shared.bucket_parameters == np.inf
    # Every micro-batch exchanges; nothing is left to exchange once a step.
    for rates in (shared.reduction_ms, shared.gather_ms):
        assert rates(1e9, 0) == rates(1e9, 1e9) == 0
    for rates in ("optimizer_bytes", "update_ms"):
        for experts in (0, 1e8):
            counts = 1e9, experts
            assert getattr(shared, rates)(*counts) == getattr(whole, rates)(*counts) > 0


def job(ranks: int, **changes: object) -> JobSpec:
    """A job whose ranks divide all."""
    whole = JobSpec(
        model=MODEL,
        cluster=load_cluster("h100-80g"),
        parallel=Parallel(pipeline=1, data=ranks),
        precision="bf16",
    )
    return replace(whole, trainer=TrainerConstraints(sharding=Sharding.ALL), **changes)


def test_a_rank_holds_its_share_of_what_zero_divides() -> None:
    """Prevents: weights or gradients that stay whole, or are divided twice.

    arXiv 1910.02054, section 5: all three kinds of state are divided by the ranks.
    """
    whole, shared = replace(job(8), trainer=OWN).cost, job(8).cost
    assert shared.weight_bytes_per_parameter == whole.weight_bytes_per_parameter / 8
    assert shared.gradient_bytes_per_parameter == whole.gradient_bytes_per_parameter / 8
    assert shared.optimizer_bytes_per_parameter == whole.optimizer_bytes_per_parameter
    total = sum(
        (
            shared.weight_bytes_per_parameter
            + shared.gradient_bytes_per_parameter
            + shared.optimizer_bytes_per_parameter,
        )
    )
    # Weights in bf16, gradients and three states in fp32: 2 + 4 + 12 bytes.
    assert total == pytest.approx(18 / 8)


def test_a_model_too_large_for_one_device_is_planned_on_many() -> None:
    """Prevents: plans for FSDP refused as if every rank held the model whole."""
    large = load_model("internvl2-26b")
    lengths = example_lengths(count=600)
    for trainer, fits in ((OWN, False), (XTUNER, True)):
        request = PlanRequest(
            job=JobSpec(
                model=large,
                cluster=load_cluster("h100-80g"),
                parallel=Parallel(pipeline=1, data=32),
                precision="bf16",
                trainer=trainer,
            ),
            data=SampleData(
                lengths=lengths,
                levels=(Level(caps=Caps.of(tiles=40, tokens=8192)),),
                packs_per_step=32,
            ),
        )
        if not fits:
            with pytest.raises(UserError, match="needs"):
                make_plan(request)
            continue
        prediction = make_plan(request).plan.prediction
        assert prediction is not None
        memory = prediction.stages[0].memory
        assert memory.weights_gib * 32 == pytest.approx(2 * parameters(large) / 2**30, rel=0.02)
        assert prediction.lost.communication_ms > 0


def parameters(model: object) -> int:
    """Parameters of a model, all units together."""
    cost = analytic_cost(model, load_cluster("h100-80g"), Parallel(pipeline=1), "bf16")
    names = unit_names(model)
    return sum(cost.units[name].parameters for name in names)


@pytest.mark.parametrize("option", ["pipeline", "tensor"])
def test_other_parallel_sizes_are_refused(option: str) -> None:
    """Prevents: a prediction of something that the trainer does not do."""
    sizes = {"pipeline": 1, "data": 2} | {option: 2}
    with pytest.raises(UserError, match="2 was given"):
        replace(job(2), parallel=Parallel(**sizes))


def test_padding_is_one_more_segment_of_every_pack() -> None:
    """Prevents: padding that costs nothing, or attends to all of its pack."""
    names = ("fixed", "tiles", "tokens", "squared_tokens", "loss_tokens")
    packs = np.array([[1, 3, 700, 250_000, 300], [1, 0, 1_000, 1_000_000, 1_000.0]])
    padded = trained_features(packs, names, padded=True, whole_loss=False)
    assert padded.tolist() == [[1, 3, 1_000, 340_000, 300], [1, 0, 1_000, 1_000_000, 1_000]]
    whole = trained_features(packs, names, padded=True, whole_loss=True)
    assert whole[:, 4].tolist() == [1_000, 1_000]
    assert trained_features(packs, names, padded=False, whole_loss=False) is packs


def test_padding_of_packs_is_told_from_needed_work() -> None:
    """Prevents: padding counted as needed work, or any of it where packs are equally long."""
    padded = JobSpec(
        model=MODEL, cluster=load_cluster("h100-80g"), parallel=Parallel(pipeline=1, data=4),
        precision="bf16", trainer=XTUNER,
    )  # fmt: skip
    plain = replace(padded, trainer=lifted(XTUNER, LimitName.PADDED))
    lengths = example_lengths(count=200)
    longest = int(lengths.tokens.max())
    equal = replace(lengths, tokens=np.full_like(lengths.tokens, longest))
    for samples, is_even in ((lengths, False), (equal, True)):
        data = SampleData(
            lengths=samples,
            levels=(Level(caps=Caps.of(tiles=30, tokens=longest)),),
            packs_per_step=8,
        )
        packs = data.schedule(padded)
        lost, needed = lost_of(padded, *packs), lost_of(plain, *packs)
        assert lost.ideal_ms == pytest.approx(needed.ideal_ms)
        of_packs_ms = lost.padding_ms - needed.padding_ms  # besides that of attention heads
        assert (of_packs_ms == pytest.approx(0, abs=1e-9)) == is_even
        assert of_packs_ms > -1e-9


def lost_of(job: JobSpec, packs: ScheduledPacks, lengths: Lengths) -> LostTime:
    """Breakdown of the mean step on one stage, which adds up to it."""
    stages, workload = stages_from_cuts(MODEL, ()), job.workload(packs, lengths, LEVELS)
    once = per_step_costs(job.cost, stages)
    step_ms = predict_steps(workload_times(job.cost, [stages], workload), workload, once).step_ms
    lost = lost_time(job.cost, [stages], workload, float(step_ms.mean()))
    assert sum(lost.named().values()) == pytest.approx(step_ms.mean())
    return lost


def test_tokens_without_loss_cost_the_head_too() -> None:
    """Prevents: logits of prompts left out for trainers that compute them."""
    plain = replace(job(2), trainer=OWN)
    whole = replace(plain, trainer=TrainerConstraints(stages=StageRules(head_on_all_tokens=True)))
    lengths = example_lengths(count=200)
    data = SampleData(
        lengths=lengths, levels=(Level(caps=Caps.of(tiles=30, tokens=8192)),), packs_per_step=4
    )
    packs, lengths = data.schedule(plain)
    column = plain.cost.features.index("loss_tokens")
    of_loss = plain.workload(packs, lengths, LEVELS).features[:, column]
    of_all = whole.workload(packs, lengths, LEVELS).features[:, column]
    assert (of_loss <= packs.tokens).all()
    assert of_all.tolist() == packs.tokens.tolist()
