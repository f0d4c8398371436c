"""Data-parallel encoders with sharded weights: costs and memory by hand, plans, refusals."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from cost_cases import analytic_cost, encoders_cost
from encoder_cases import choice_of
from exchange_cases import simulated_ms
from plan_cases import example_lengths

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.cost.device_rates import streamed_bytes_per_ms
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, PlanResult, make_plan
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.data_parallel_encoders import EncoderPlacement, encoder_shards
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.model.units import unit_names
from omnibal.pipeline.encoder_passes import EqualPasses, exposed_ms
from omnibal.pipeline.encoder_waits import ItemShares, memory_of_encoders
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.search.feasible import find_changes

pytestmark = pytest.mark.quick
MODEL = load_model("internvl2-1b")
JOB = Parallel(tensor=2, pipeline=2, data=4)
"""Sixteen ranks."""
EVERY = tuple(WeightSharding)


NO_HOST = load_cluster("h100-80g").model_copy(update={"host_us": 0.0})
ROUND = {"link_latency_us": 30, "link_efficiency": 0.5, "rates": {}}
SLOW = NO_HOST.model_copy(update=ROUND | {"intra_node_gb_per_s": 5.0, "inter_node_gb_per_s": 2.0})
"""Devices with more communication than computation, and round numbers."""


def encoder_units(model: ModelConfig) -> list[str]:
    return [name for name in unit_names(model) if name.startswith(("vision", "projector"))]


def ring_ms(parameters: Sequence[int], size: int, ranks: int) -> np.ndarray:
    """Return the time of a ring within a node: every rank sends all shards except one."""
    sent_bytes = size * np.array(parameters) * (ranks - 1) / ranks
    return np.where(sent_bytes > 0, 0.03 + sent_bytes / (5e6 * 0.5), 0)


@pytest.mark.parametrize("frozen", [(), ("vision",)], ids=["", "projector"])
def test_passes_wait_for_what_events_one_by_one_wait(frozen: tuple[str, ...]) -> None:
    """Prevents an exchange left out, counted twice, hidden without computation, or not needed."""
    cost = analytic_cost(MODEL, SLOW, Parallel(pipeline=1, data=8), "bf16", frozen)
    one = encoders_cost(MODEL, SLOW, JOB, "bf16", frozen, sharded=8).encoders["vision"]
    units = [cost.units[name] for name in encoder_units(MODEL)]
    gathers = ring_ms([unit.parameters for unit in units], 2, 8)
    back = ring_ms([unit.parameters * unit.has_backward for unit in units], 2, 8)
    back[0] = 0  # the embedding's backward reads no weight
    reduced = ring_ms([unit.trained_parameters for unit in units], 4, 8)
    assert (reduced > 0).sum() == (1 if frozen else len(units))
    # Full gradients are zeroed; fp32 shards are accumulated: one is read, one read and written.
    moved = 4 + 3 * 4 / 8
    rate = streamed_bytes_per_ms(SLOW, "bf16")
    added = [(unit, moved * unit.trained_parameters / rate) for unit in units]

    def events_ms(items: int, *, runs_again: bool) -> tuple[float, float]:
        """Return a pass's forward time, and its time after the pipeline."""
        row = np.zeros(len(cost.features))
        row[[0, cost.features.index("tiles")]] = 1, items
        nothing = [0.0] * len(units)
        forward_ms = simulated_ms([unit.forward_ms @ row for unit in units], gathers, nothing)
        again_ms, kept = 0.0, back[::-1].copy()
        if runs_again:
            again = [unit.recompute_ms if unit.has_backward else unit.forward_ms for unit in units]
            again_ms = simulated_ms([unit_ms @ row for unit_ms in again], gathers, nothing)
            kept[0] = 0
        backward = [sums_ms + unit.backward_ms @ row for unit, sums_ms in added[::-1]]
        return forward_ms, again_ms + simulated_ms(backward, kept, reduced[::-1])

    for items, kept in ((0, 4), (3, 4), (8, 4), (11, 4), (11, 0), (11, 11)):
        passes = [(min(items - first, 4), first >= kept) for first in range(0, items, 4)]
        expected = np.zeros(2)
        for size, runs_again in passes:
            expected += events_ms(size, runs_again=runs_again)
            both, second = np.array([1, size]), runs_again * one.again_ms
            expected -= [both @ one.forward_ms, both @ (one.backward_ms + second)]
        of_rank = EqualPasses(items=np.array([[items]]), items_per_pass=4, kept_items=kept)
        found = exposed_ms(one, of_rank)
        np.testing.assert_allclose(found[0, 0], expected, rtol=1e-9, atol=1e-9)
        assert (found > 0).all() == (items > 0)


def test_ranks_hold_shares_and_copies_are_reduced() -> None:
    """Prevents state of other ranks' shards, extra weight gathers, and unreduced replicas."""
    sizes = MODEL, SLOW, JOB, "bf16"
    whole, node, full = (encoders_cost(*sizes, sharded=ranks) for ranks in (1, 8, 16))
    cost = analytic_cost(MODEL, SLOW, Parallel(pipeline=1, data=16), "bf16")
    parameters = sum(cost.units[name].parameters for name in encoder_units(MODEL))
    for divided, ranks in ((node, 8), (full, 16)):
        state = divided.weights_bytes, divided.gradients_bytes, divided.optimizer_bytes
        assert state == pytest.approx(tuple(np.array([2, 4, 12]) * parameters / ranks))
        assert (divided.evaluation_bytes, divided.gather_ms) == (2 * parameters, 0)
    assert whole.evaluation_bytes == 0
    # Two replicas of each shard, one network adapter per rank: reduced and gathered.
    assert full.reduction_ms == 0
    sent_bytes = 2 * (4 * parameters / 8) / 2
    assert node.reduction_ms == pytest.approx(sent_bytes / (2e6 * SLOW.network_efficiency))
    assert node.update_ms > full.update_ms


def test_two_units_are_whole_while_a_pass_runs() -> None:
    """Prevents running out of memory by prefetched weights, or by gradients not yet sharded."""
    names = encoder_units(MODEL)
    cost = analytic_cost(MODEL, SLOW, Parallel(pipeline=1, data=8), "bf16")
    one = encoders_cost(MODEL, SLOW, JOB, "bf16", sharded=8).encoders["vision"]
    expected, units = 0.0, [cost.units[name] for name in names]
    columns = [0, cost.features.index("tiles")]
    for place, unit in enumerate(units):
        forward, backward = 2 * unit.parameters, 4 * unit.trained_parameters
        for after in units[place + 1 : place + 2]:
            forward += 2 * after.parameters
            backward += 4 * after.trained_parameters * (1 + 1 / 8)
        for gathered in range(max(place - 1, 0), place + 1):
            if not names[gathered].endswith("embed"):
                backward += 2 * units[gathered].parameters
        working = unit.transient_bytes[:, columns] + unit.shared_bytes[columns]
        moments = working @ np.array([1, 2])
        expected = max(expected, moments[0] + forward, *(moments[1:] + backward))
    work = np.array([[1, 2]])
    assert one.pass_bytes(work, is_kept=True) == pytest.approx(expected)
    again = float(one.kept_bytes @ (1, 2))
    assert one.pass_bytes(work, is_kept=False) == pytest.approx(expected + again)


def test_a_block_is_of_neighbours_in_the_order_of_ranks() -> None:
    """Prevents waiting for another group's busiest rank; groups follow `Parallel.place`."""
    rng = np.random.default_rng(0)
    for sharded in (2, 4, 8, 16):
        cost = encoders_cost(MODEL, SLOW, JOB, "bf16", sharded=sharded)
        items = rng.integers(0, 9, (6, 8))  # three steps of two groups of two pipelines
        shares = ItemShares(steps=np.arange(3), pipelines=2, held={}, encoded={"vision": items})
        passes = EqualPasses(items=items, items_per_pass=4, kept_items=0)
        found = passes.in_lockstep(shares.blocks(cost)).items
        of_group = [JOB.place(rank) for rank in range(16)]
        group = [at["data"] // 2 for at in of_group]
        number = [(at["data"] % 2) * 4 + at["pipeline"] * 2 + at["tensor"] for at in of_group]
        given, together = (each.reshape(3, 2, 8)[:, group, number] for each in (items, found))
        most = given.reshape(3, -1, sharded).max(axis=2)
        np.testing.assert_array_equal(together, np.repeat(most, sharded, axis=1))


def job(parallel: Parallel = JOB, **changes: object) -> JobSpec:
    """Return a job with data-parallel encoders and all encoder shardings allowed."""
    usual = {"model": MODEL, "cluster": NO_HOST, "precision": "bf16"}
    usual |= {"encoder_shardings": EVERY, "placement": EncoderPlacement.DATA_PARALLEL}
    return JobSpec(parallel=parallel, **(usual | changes))


def request(job: JobSpec, packs_per_step: int = 16) -> PlanRequest:
    lengths, level = example_lengths(count=400), Level(caps=Caps.of(tiles=12, tokens=2048))
    data = SampleData(lengths=lengths, levels=(level,), packs_per_step=packs_per_step)
    return PlanRequest(job=job, data=data)


@pytest.fixture(scope="module")
def by_way() -> dict[WeightSharding, PlanResult]:
    """Return plans of a job by encoder sharding."""
    return {way: make_plan(request(job(encoder_shardings=(way,)))) for way in EVERY}


def test_first_stages_have_room_to_evaluate(by_way) -> None:
    """Prevents first stages that run out of memory in evaluation, or others charged for it."""
    cost = encoders_cost(MODEL, SLOW, JOB, "bf16", sharded=16)
    # A rank has four tiles, keeps two, and encodes two per pass.
    shares = ItemShares(
        steps=np.arange(1),
        pipelines=1,
        held={"vision": np.full((4, 1), 16)},
        encoded={"vision": np.full((4, 4), 4)},
    )
    of_ranks = memory_of_encoders(shares, cost, choice_of(1, 2, {"vision": 2}, sharded=16))
    assert of_ranks.whole == cost.evaluation_bytes
    asked, plan = request(job()), by_way[WeightSharding.FULL].plan
    of_job = replace(asked.job, data_parallel_encoders=plan.data_parallel_encoders)
    of_units = of_job.cost_of_all(asked.data.levels)
    workload = replace(asked, job=of_job).workload()
    taken = replace(workload.encoding.encoder_memory, whole=100 * GIB)
    roomy = replace(workload, encoding=replace(workload.encoding, encoder_memory=taken))
    first, second = stage_memories(of_units, plan.stages_at_levels, roomy)
    usual = stage_memories(of_units, plan.stages_at_levels, workload)
    assert second == usual[1]
    held = (of_units.units[name] for name in ("language_embed", "language_layer"))
    working = [(unit.transient_bytes @ workload.features.T).max() for unit in held]
    expected = usual[0].state_gib + 100 + (taken.buffers + max(taken.evaluation, *working)) / GIB
    assert first.peak_gib == pytest.approx(expected)
    assert usual[0].peak_gib < first.peak_gib


def test_every_way_is_searched_and_the_fastest_taken(by_way) -> None:
    """Prevents a plan slower than another sharding's, or a bound above the found step time."""
    found = make_plan(request(job()))
    shards = {way: result.plan.data_parallel_encoders.sharded for way, result in by_way.items()}
    assert shards == {"replicated": 1, "hybrid": 8, "full": 16}
    assert len({result.plan.prediction.step_ms for result in by_way.values()}) == 3
    least_ms = min(result.plan.prediction.step_ms for result in by_way.values())
    assert found.plan.prediction.step_ms == pytest.approx(least_ms, rel=0.002)
    assert found.search.lower_bound_ms <= least_ms * (1 + 1e-9)


def test_encoders_too_large_for_a_device_are_divided() -> None:
    """Prevents refusing encoders that fit if sharded, or advice without --sharding auto."""
    devices = load_cluster("h100-80g").model_copy(update={"memory_gib": 36.0})
    sizes = Parallel(tensor=8, pipeline=1, data=4, sequence_parallel=True)
    free = job(sizes, model=load_model("internvit-6b-llama3-8b"), cluster=devices)
    data = request(job()).data
    whole = PlanRequest(job=replace(free, encoder_shardings=EVERY[:1]), data=data)
    with pytest.raises(DoesNotFit, match="with data-parallel encoders needs") as raised:
        make_plan(whole)
    assert "--sharding auto" in str(raised.value)
    advised = {change.text.split(" (")[0] for change in find_changes(whole).changes}
    assert "--sharding auto instead of replicated" in advised
    plan = make_plan(PlanRequest(job=free, data=data)).plan
    assert plan.data_parallel_encoders.sharded > 1


def test_a_divided_language_model_goes_with_data_parallel_encoders() -> None:
    """Prevents refusing OrchMLLM's jobs, or planning without waits for encoders and weights."""
    sizes = Parallel(pipeline=1, data=16, sharded=16)
    divided, whole = job(sizes), job(sizes.model_copy(update={"sharded": 1}))
    plan = make_plan(request(divided, packs_per_step=32)).plan
    divided = replace(divided, data_parallel_encoders=plan.data_parallel_encoders)
    asked = request(divided, packs_per_step=32)
    workload, names = asked.workload(), list(asked.job.cost.features)
    exposed = names.index("exposed_forward_ms")
    assert (workload.features[:, exposed] > 0).all()
    is_first = workload.features[:, names.index("encoders_forward_ms")] > 0
    assert is_first.tolist() == (workload.slot == 0).tolist()
    # Only the language model's units exchange weights.
    alone = replace(divided, model=MODEL.without_encoders(), placement=EncoderPlacement.PIPELINE)
    text = workload.features.copy()
    text[:, names.index("tiles")] = 0  # a model without encoders scatters no features
    found = divided.with_exposed(text)[:, exposed]
    own = np.delete(text, [names.index("tiles")], axis=1)[:, : len(alone.cost.features) - 2]
    np.testing.assert_allclose(found, alone.exchange.exposed_ms(own)[:, 0])
    weights = divided.cost.units["language_layer"].parameters
    assert weights == whole.cost.units["language_layer"].parameters
    assert divided.cost.rates.weight_bytes * 16 == whole.cost.rates.weight_bytes
    assert sum(plan.prediction.lost.causes().values()) == pytest.approx(plan.prediction.step_ms)


def test_blocks_are_of_a_node_or_of_all_ranks() -> None:
    """Prevents shard groups across nodes, groups that split tensor-parallel ranks, or no group."""
    cluster = load_cluster("h100-80g")
    for sizes, expected in (
        (Parallel(pipeline=2, data=8), [1, 16, 8]),
        (Parallel(tensor=8, pipeline=1, data=4), [1, 32, 8]),
        (Parallel(tensor=3, pipeline=1, data=4), [1, 12, 6]),
        (Parallel(pipeline=1, data=4), [1, 4, 4]),
        (Parallel(pipeline=1, data=12), [1, 12, None]),
    ):
        assert [encoder_shards(way, sizes, cluster) for way in EVERY] == expected
    with pytest.raises(UserError, match="do not fill nodes of h100-80g") as raised:
        job(Parallel(pipeline=1, data=12), encoder_shardings=(WeightSharding.HYBRID,))
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="--precision fp8 excludes data-parallel encoders"):
        job(precision="fp8", encoder_shardings=(WeightSharding.FULL,))
