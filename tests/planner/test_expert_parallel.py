"""Expert parallelism: valid sizes, and which ranks split or replicate experts."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cli_cases import printed
from expert_cases import DIGITS, EXPERTS, expert_model
from plan_cases import MODEL, example_lengths, job_spec, request
from pydantic import ValidationError

from omnibal import Free, Goal, Samples, plan
from omnibal.base.errors import UserError
from omnibal.cli.options import JobOptions, SizeOptions
from omnibal.data.lengths import write_lengths
from omnibal.job.check import open_plan
from omnibal.job.plan import read_plan
from omnibal.job.planner import make_plan
from omnibal.model.config import load_cluster, with_imbalance
from omnibal.model.layer_kinds import LayerRun
from omnibal.model.limits import USABLE_MEMORY_FRACTION, Caps
from omnibal.model.parallel import Parallel, WeightSharding, check_parallel, expert_sizes
from omnibal.packing.deal import deal_in_rounds
from omnibal.packing.packs import read_packs
from omnibal.packing.shares import empty_slots
from omnibal.pipeline.prediction import StageMemory
from omnibal.pipeline.stage_memory import GIB
from omnibal.search.feasible import find_changes
from omnibal.search.memory_need import least_need_gib

CLUSTER = load_cluster("h100-80g")


def parallel_of(tensor: int, pipeline: int, data: int, expert: int) -> Parallel:
    sizes = {"tensor": tensor, "pipeline": pipeline, "data": data, "expert": expert}
    return Parallel(**sizes, sequence_parallel=tensor > 1)


TWO_KEY_HEADS = expert_model().with_tower("language", kv_heads=2)


@pytest.mark.parametrize(
    ("model", "parallel", "words"),
    [
        (expert_model(), parallel_of(1, 2, 2, 2), None),
        (expert_model(), parallel_of(1, 1, 4, 4), None),
        (expert_model(), parallel_of(1, 1, 3, 3), "does not divide the 8 experts"),
        # Experts of width 5 are not divided by tensor parallelism.
        (TWO_KEY_HEADS, parallel_of(2, 1, 1, 1), None),
        (TWO_KEY_HEADS, Parallel(tensor=2, pipeline=1), "need sequence parallelism"),
        (MODEL, parallel_of(1, 1, 2, 2), "no experts: leave --ep out"),
    ],
)
def test_experts_are_shared_out_evenly(model, parallel, words):
    """Prevents unequal expert counts per rank, tensor ranks that route the same tokens twice, and
    an ignored --ep."""
    with pytest.raises(UserError, match=words) if words else nullcontext():
        check_parallel(model, parallel, CLUSTER)


def test_sizes_that_do_not_nest_are_refused():
    """Prevents expert groups that contain parts of several tensor-parallel groups."""
    with pytest.raises(ValidationError, match="must divide tensor size 2 or be a multiple"):
        Parallel(tensor=2, pipeline=1, data=3, expert=3)
    options = SizeOptions(tp=2, dp=3, ep=3)
    with pytest.raises(UserError, match="must divide tensor size 2 or be a multiple"):
        options.parallel()
    assert replace(options, ep=6).parallel() == parallel_of(2, 1, 3, 6)


def test_groups_that_divide_weights_hold_whole_groups_of_experts_or_parts():
    """Prevents shard groups that split an expert group after sizes change."""
    three = Parallel(pipeline=1, data=48, expert=3)
    assert three.with_sharding(WeightSharding.HYBRID, CLUSTER) is None
    assert three.with_sharding(WeightSharding.FULL, CLUSTER).sharded == 48
    for expert in (2, 16):
        sizes = Parallel(pipeline=1, data=48, expert=expert)
        held = sizes.with_sharding(WeightSharding.HYBRID, CLUSTER)
        assert held.sharded == 8
        with pytest.raises(UserError, match=r"sharded 8, .* must divide the 3 data-parallel ranks"):
            held.with_sizes(expert=3)
    lengths = Samples(lengths=example_lengths(), caps=Caps.of(tiles=8, tokens=320))
    twelve = LayerRun(layers=1, experts=EXPERTS.model_copy(update={"experts": 12}))
    model = MODEL.with_tower("language", runs=(twelve,))
    spec = job_spec(model=model, cluster=CLUSTER, parallel=three, precision="bf16")
    free = Free(shardings=(WeightSharding.HYBRID,))
    with pytest.raises(UserError, match="a divisor or a multiple of the 3 that share out experts"):
        plan(Goal(job=spec, data=lengths, free=free))


def test_all_expert_sizes_are_found():
    """Prevents a size missing from the search, or an invalid size tried."""
    assert expert_sizes(MODEL, 2, 8) == [1]
    model = expert_model()
    for tensor, data in [(1, 1), (1, 8), (2, 3), (4, 6), (2, 8), (8, 2)]:
        possible = []
        for expert in range(1, tensor * data + 1):
            try:
                parallel = parallel_of(tensor, 1, data, expert)
            except ValidationError:
                continue
            if 8 % expert == 0:
                possible.append(parallel.expert)
        assert expert_sizes(model, tensor, data) == possible


@pytest.mark.parametrize("lockstep_ranks", [1, 2, 3, 6])
def test_ranks_in_lockstep_have_equally_many_micro_batches(lockstep_ranks):
    """Prevents a rank that waits in an all-to-all for ranks without micro-batches."""
    rng = np.random.default_rng(lockstep_ranks)
    counts = rng.integers(0, 4, (5, 6))
    counts[3] = 0
    step, rank = (np.repeat(each.ravel(), counts.ravel()) for each in np.indices(counts.shape))
    empty = empty_slots(step * 2, rank, ranks=6, lockstep_ranks=lockstep_ranks)
    expected = [
        (2 * s, r, slot)
        for s, of_step in enumerate(counts)
        for r in range(6)
        for slot in range(
            of_step[r], max(of_step[r // lockstep_ranks * lockstep_ranks :][:lockstep_ranks])
        )
    ]
    assert [*zip(*empty, strict=True)] == expected


@pytest.mark.parametrize(
    ("dp", "lockstep_ranks", "size"), [(4, 2, 13), (6, 3, 12), (8, 8, 20), (4, 2, 3)]
)
def test_ranks_in_lockstep_have_like_packs_in_a_slot(dp, lockstep_ranks, size):
    """Prevents lost or repeated packs, needless empty slots, and longer waits in groups than with
    separately assigned ranks."""
    rng = np.random.default_rng(size)
    steps = 5
    rows = rng.permutation(steps * size).reshape(steps, size)
    items = rng.integers(0, 3, rows.size)
    load = 10 * items + rng.exponential(1, rows.size)
    found = deal_in_rounds(rows, items, load, dp, lockstep_ranks)
    waits = []
    for dealt in (found, deal_in_rounds(rows, items, load, dp)):
        assert dealt.shape == (steps, dp, -(-size // dp))
        for step in range(steps):
            assert sorted(dealt[step][dealt[step] >= 0].tolist()) == sorted(rows[step].tolist())
        assert (np.diff((dealt >= 0).astype(int), axis=2) <= 0).all(), "a gap between packs"
        groups = np.where(dealt < 0, 0.0, load[dealt]).reshape(
            steps, dp // lockstep_ranks, lockstep_ranks, -1
        )
        waits.append((groups.max(axis=2) * lockstep_ranks - groups.sum(axis=2)).sum())
    assert waits[0] <= waits[1]
    counts = (found >= 0).sum(axis=2).reshape(steps, -1, lockstep_ranks)
    with_empty = (counts.max(axis=2) > counts.min(axis=2)).sum(axis=1)
    assert (with_empty == (size % lockstep_ranks > 0)).all()


def memory_of(expert: int, peer_mib: float = 0.0) -> StageMemory:
    """Return the memory of the stage of a plan on 4 ranks without recomputation."""
    cluster = load_cluster("laptop-cpu").model_copy(update={"peer_mib": peer_mib})
    parallel = parallel_of(1, 1, 4, expert)
    planned = make_plan(request(model=DIGITS, cluster=cluster, parallel=parallel)).plan
    assert not planned.stages[0].recompute
    return planned.prediction.stages[0].memory


def test_memory_of_shared_out_experts_is_counted():
    """Prevents counting other ranks' experts, sharding their optimizer state over wrong ranks, and
    omitting communication buffers."""
    all_experts = 4 * 4 * 3 * 96 * 64  # layers, experts, matrices
    alone = memory_of(1)
    for expert in (2, 4):
        shared = memory_of(expert)
        gone = all_experts * (1 - 1 / expert)
        assert (alone.weights_gib - shared.weights_gib) * GIB == pytest.approx(gone * 4)
        assert (alone.gradients_gib - shared.gradients_gib) * GIB == pytest.approx(gone * 4)
        # Two fp32 moments: a quarter of all experts' state for either size.
        assert alone.optimizer_gib * GIB == pytest.approx(shared.optimizer_gib * GIB)
        buffers = memory_of(expert, peer_mib=3).peak_gib - shared.peak_gib
        assert buffers * GIB == pytest.approx((expert - 1) * 3 * 2**20)
    assert memory_of(1, peer_mib=3) == alone


def test_a_larger_expert_size_is_advised():
    """Prevents advice for a job that does not fit from ignoring its own devices."""
    asked = request(model=DIGITS, parallel=parallel_of(1, 1, 4, 1))
    shared = asked.with_sizes(parallel_of(1, 1, 4, 2))
    least_gib = [least_need_gib(each) for each in (asked, shared)]
    assert least_gib[1] < least_gib[0]
    device_gib = (least_gib[0] + least_gib[1]) / 2 / USABLE_MEMORY_FRACTION
    cluster = asked.job.cluster.model_copy(update={"memory_gib": device_gib})
    asked = replace(asked, job=replace(asked.job, cluster=cluster))
    changes = [each.text for each in find_changes(asked).changes]
    assert any(text.startswith("--ep 2 instead of 1 (needs") for text in changes), changes


def test_the_margin_for_uneven_experts_is_replaced():
    """Prevents --expert-imbalance ignored, or applied if a rank has all experts."""
    forward_ms = {}
    for expert, margin in product((1, 4), (1.0, 2.0)):
        model, parallel = with_imbalance(DIGITS, margin), parallel_of(1, 1, 4, expert)
        layer = job_spec(model=model, parallel=parallel).cost.units["language_layer_experts4"]
        forward_ms[expert, margin] = layer.forward_ms
    assert forward_ms[4, 2.0][2] > forward_ms[4, 1.0][2]
    np.testing.assert_array_equal(forward_ms[1, 2.0], forward_ms[1, 1.0])
    options = JobOptions(model="internvl-digits", cluster="laptop-cpu", expert_imbalance=1.5)
    with pytest.raises(UserError, match="has no experts, leave it out"):
        options.job()
    moe = replace(options, model="internvl-digits-moe").job().model
    assert {kind.experts.imbalance for kind in moe.language.kinds if kind.experts} == {1.5}


def test_shapes_of_experts_are_planned_at_tensor_sizes(capsys, tmp_path):
    """Prevents --tp refused for lack of sequence parallelism, which is its default."""
    sizes = "--tp 2 --pp 1 --precision fp32 --max-tiles 8 --max-tokens 512"
    command = (
        f"plan --model internvl-digits-moe --cluster laptop-cpu {sizes} -o {tmp_path / 'plan'}"
    )
    assert printed(capsys, *command.split())


@pytest.mark.parametrize(
    "options",
    [{"--encoder": "data-parallel"}, {"--window": "40", "--dispatch": "off"}, {"--epochs": "2"}],
)
def test_plans_of_experts_are_checked_as_they_were_made(capsys, tmp_path, options):
    """Prevents a check that ignores empty micro-batches or lockstep ranks."""
    lengths, out = tmp_path / "lengths.parquet", tmp_path / "plan"
    write_lengths(example_lengths(count=160), lengths)
    sizes = {"--pp": "1", "--dp": "4", "--ep": "4", "--max-tiles": "8", "--max-tokens": "512"}
    given = {"--model": "internvl-digits-moe", "--cluster": "laptop-cpu", "-o": str(out)}
    given |= {"--lengths": str(lengths), "--precision": "fp32"} | sizes | options
    assert printed(capsys, "plan", *(word for pair in given.items() for word in pair))
    plan, packs = read_plan(out), read_packs(out / "packs.parquet")
    assert plan.parallel.expert == 4
    assert plan.prediction.lost.expert_wait_ms > 0
    assert "is predicted to need" in printed(capsys, "check", str(out))
    counts = np.bincount(packs.step * 4 + packs.dp_rank, minlength=4 * packs.steps).reshape(-1, 4)
    missing = int((counts.max(axis=1, keepdims=True) - counts).sum())
    opened = open_plan(out)
    workload = opened.job.workload(*opened.data, plan.pack_levels)
    assert len(workload) == len(packs) + missing > len(packs)
    assert plan.data_parallel_encoders is not None or "--encoder" not in options
