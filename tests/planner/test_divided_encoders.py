"""Data-parallel encoders whose weights ranks divide: costs and memory by hand, plans, refusals."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from exchange_cases import simulated_ms
from plan_cases import example_lengths

from omnibal import cli
from omnibal.base.errors import DoesNotFit, UserError
from omnibal.cost.analytic import analytic_cost, streamed_bytes_per_ms
from omnibal.cost.encoder_phase import EncodersCost, encoders_cost
from omnibal.cost.model import CostModel
from omnibal.data.lengths import write_lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import ClusterConfig, ModelConfig, load_cluster, load_model
from omnibal.model.data_parallel_encoders import (
    DataParallelEncoders,
    EncoderPlacement,
    encoder_shards,
)
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.model.units import unit_names
from omnibal.pipeline.encoder_passes import EqualPasses
from omnibal.pipeline.encoder_waits import ItemShares, memory_of_encoders
from omnibal.pipeline.encoding import EncoderMemory
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.search.feasible import find_changes

pytestmark = pytest.mark.quick
MODEL = load_model("internvl2-1b")
JOB = Parallel(tensor=2, pipeline=2, data=4)
"""Sixteen ranks."""
EVERY = tuple(WeightSharding)


def slow_cluster() -> ClusterConfig:
    """Devices whose links no computation hides, with round figures."""
    changes = {"intra_node_gb_per_s": 5.0, "inter_node_gb_per_s": 2.0}
    changes |= {"link_latency_us": 30, "link_efficiency": 0.5, "rates": {}}
    return load_cluster("h100-80g").model_copy(update=changes)


def encoder_units(model: ModelConfig) -> list[str]:
    return [name for name in unit_names(model) if name.startswith(("vision", "projector"))]


def ring_ms(parameters: Sequence[int], size: int, ranks: int) -> np.ndarray:
    """A ring within a node: every rank sends all shares but one."""
    sent_bytes = size * np.array(parameters) * (ranks - 1) / ranks
    return np.where(sent_bytes > 0, 0.03 + sent_bytes / (5e6 * 0.5), 0)


@pytest.mark.parametrize("frozen", [(), ("vision",)], ids=["", "projector"])
def test_passes_wait_for_what_events_one_by_one_wait(frozen: tuple[str, ...]) -> None:
    """Prevents: exchange of a pass that is left out, hidden behind nothing or counted twice;
    gradients of what is frozen, and weights gathered again that are still there."""
    cluster = slow_cluster()
    cost = analytic_cost(MODEL, cluster, Parallel(pipeline=1, data=8), "bf16", frozen)
    one = encoders_cost(MODEL, cluster, JOB, "bf16", frozen, sharded=8).encoders["vision"]
    units = [cost.units[name] for name in encoder_units(MODEL)]
    gathers = ring_ms([unit.parameters for unit in units], 2, 8)
    back = ring_ms([unit.parameters * unit.has_backward for unit in units], 2, 8)
    back[0] = 0  # the embedding's backward reads no weight
    reduced = ring_ms([unit.trained_parameters for unit in units], 4, 8)
    assert (reduced > 0).sum() == (1 if frozen else len(units))
    # Whole gradients are set to zero, and shares in fp32 added: one is read, one read and written.
    moved = 4 + 3 * 4 / 8
    rate = streamed_bytes_per_ms(cluster, "bf16")
    added = [(unit, moved * unit.trained_parameters / rate) for unit in units]

    def events_ms(items: int, *, runs_again: bool) -> tuple[float, float]:
        """Forward, and all that comes after the pipeline, of a pass."""
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
        found = of_rank.exposed_ms(one)
        np.testing.assert_allclose(found[0, 0], expected, rtol=1e-9, atol=1e-9)
        assert (found > 0).all() == (items > 0)


def test_ranks_hold_shares_and_copies_are_reduced() -> None:
    """Prevents: state that is not divided, or by ranks that hold other shares, weights gathered
    once a step besides, and copies that are never the same again."""
    cluster = slow_cluster()
    whole, node, full = (
        encoders_cost(MODEL, cluster, JOB, "bf16", sharded=ranks) for ranks in (1, 8, 16)
    )
    cost = analytic_cost(MODEL, cluster, Parallel(pipeline=1, data=16), "bf16")
    parameters = sum(cost.units[name].parameters for name in encoder_units(MODEL))
    for divided, ranks in ((node, 8), (full, 16)):
        assert divided.weights_bytes == pytest.approx(2 * parameters / ranks)
        assert divided.gradients_bytes == pytest.approx(4 * parameters / ranks)
        assert divided.optimizer_bytes == pytest.approx(12 * parameters / ranks)
        assert divided.evaluation_bytes == 2 * parameters
        assert divided.gather_ms == 0
    assert whole.evaluation_bytes == 0
    # Two copies of each share, over one adapter a rank: reduced, and gathered again.
    assert full.reduction_ms == 0
    sent_bytes = 2 * (4 * parameters / 8) / 2
    assert node.reduction_ms == pytest.approx(sent_bytes / (2e6 * cluster.network_share))
    assert node.update_ms > full.update_ms


def walked_bytes(cost: CostModel, names: Sequence[str]) -> float:
    """Most bytes of a pass besides what is kept, unit after unit, over eight ranks."""
    most, units = 0.0, [cost.units[name] for name in names]
    column = cost.features.index("tiles")
    for place, unit in enumerate(units):
        forward, backward = 2 * unit.parameters, 4 * unit.trained_parameters
        if place + 1 < len(units):
            forward += 2 * units[place + 1].parameters
            backward += 4 * units[place + 1].trained_parameters * (1 + 1 / 8)
        for gathered in (place - 1, place):
            if gathered >= 0 and not names[gathered].endswith("embed"):
                backward += 2 * units[gathered].parameters
        working = unit.transient_bytes[:, [0, column]] + unit.shared_bytes[[0, column]]
        moments = working @ np.array([1, 2])
        most = max(most, moments[0] + forward, *(moments[1:] + backward))
    return most


def test_two_units_are_whole_while_a_pass_runs() -> None:
    """Prevents: a device out of memory where a unit's weights are gathered beside the next one's,
    or its gradients are whole beside those that are divided."""
    cluster = slow_cluster()
    cost = analytic_cost(MODEL, cluster, Parallel(pipeline=1, data=8), "bf16")
    one = encoders_cost(MODEL, cluster, JOB, "bf16", sharded=8).encoders["vision"]
    expected = walked_bytes(cost, encoder_units(MODEL))
    work = np.array([[1, 2]])
    assert one.pass_bytes(work, is_kept=True) == pytest.approx(expected)
    again = float(one.kept_bytes @ (1, 2))
    assert one.pass_bytes(work, is_kept=False) == pytest.approx(expected + again)


def test_a_block_is_of_neighbours_in_the_order_of_ranks() -> None:
    """Prevents: a rank that waits for another block's busiest rank, by `Parallel.place`."""
    rng = np.random.default_rng(0)
    for sharded in (2, 4, 8, 16):
        cost = encoders_cost(MODEL, slow_cluster(), JOB, "bf16", sharded=sharded)
        items = rng.integers(0, 9, (6, 8))  # three steps of two groups of two pipelines
        shares = ItemShares(steps=np.arange(3), pipelines=2, held={}, encoded={"vision": items})
        passes = EqualPasses(items=items, items_per_pass=4, kept_items=0)
        found = passes.in_lockstep(shares.blocks(cost)).items
        for step in range(3):
            place_of = {}
            for rank in range(16):
                at = JOB.place(rank)
                number = (at["data"] % 2) * 4 + at["pipeline"] * 2 + at["tensor"]
                place_of[rank] = step * 2 + at["data"] // 2, number
            for rank in range(16):
                block = range(rank // sharded * sharded, (rank // sharded + 1) * sharded)
                assert found[place_of[rank]] == max(items[place_of[one]] for one in block)


def memory_of(cost: EncodersCost, sharded: int) -> EncoderMemory:
    """Memory beside one rank's four tiles, of which two are kept, in passes of two."""
    beside = DataParallelEncoders(
        pipelines=1, items_per_pass={"vision": 2}, kept_items={"vision": 2},
        item_ms={"vision": 1.0}, sharded=sharded,
    )  # fmt: skip
    items = {"vision": np.full((4, 4), 4)}
    shares = ItemShares(
        steps=np.arange(1), pipelines=1, held={"vision": np.full((4, 1), 16)}, encoded=items
    )
    return memory_of_encoders(shares, cost, beside)


def job(parallel: Parallel = JOB, **changes: object) -> JobSpec:
    """A job with data-parallel encoders, whose weights may be held in every way."""
    given = {"encoder_shardings": EVERY, "precision": "bf16"} | changes
    return JobSpec(
        model=MODEL,
        cluster=load_cluster("h100-80g"),
        parallel=parallel,
        placement=EncoderPlacement.DATA_PARALLEL,
        **given,
    )


def request(job: JobSpec, packs_per_step: int = 16) -> PlanRequest:
    data = SampleData(
        lengths=example_lengths(count=400),
        levels=(Level(caps=Caps.of(tiles=12, tokens=2048)),),
        packs_per_step=packs_per_step,
    )
    return PlanRequest(job=job, data=data)


def test_first_stages_have_room_to_evaluate() -> None:
    """Prevents: a first stage that runs out of memory at its first held-out data, whose encoders it
    has whole beside its share, without a step; and stages without tokens that have such room."""
    cost = encoders_cost(MODEL, slow_cluster(), JOB, "bf16", sharded=16)
    assert memory_of(cost, 16).whole == cost.evaluation_bytes
    asked = request(job(encoder_shardings=(WeightSharding.FULL,)))
    plan = make_plan(asked).plan
    assert plan.beside is not None and plan.beside.sharded == 16
    of_job, levels = replace(asked.job, beside=plan.beside), asked.data.levels
    of_units, workload = of_job.cost_of_all(levels), replace(asked, job=of_job).workload()
    assert workload.encoding is not None
    taken = replace(workload.encoding.encoder_memory, whole=100 * GIB)
    roomy = replace(workload, encoding=replace(workload.encoding, encoder_memory=taken))
    first, second = stage_memories(of_units, plan.stages_at_levels, roomy)
    usual = stage_memories(of_units, plan.stages_at_levels, workload)
    assert second == usual[1]
    working = [
        (of_units.units[name].transient_bytes @ workload.features.T).max()
        for name in ("language_embed", "language_layer")
    ]
    expected = usual[0].state_gib + 100 + (taken.buffers + max(taken.evaluation, *working)) / GIB
    assert first.peak_gib == pytest.approx(expected)
    assert usual[0].peak_gib < first.peak_gib


def test_every_way_is_searched_and_the_fastest_taken() -> None:
    """Prevents: a plan that is slower than another way to hold the encoders' weights, or bounds
    that are above what is found."""
    asked = request(job())
    found = make_plan(asked)
    by_way = {
        way: make_plan(replace(asked, job=replace(asked.job, encoder_shardings=(way,))))
        for way in EVERY
    }
    for way, result in by_way.items():
        assert result.plan.beside is not None and result.plan.prediction is not None
        assert result.plan.beside.sharded == {"replicated": 1, "hybrid": 8, "full": 16}[way]
    assert len({result.plan.prediction.step_ms for result in by_way.values()}) == 3
    least_ms = min(result.plan.prediction.step_ms for result in by_way.values())
    assert found.plan.prediction.step_ms == pytest.approx(least_ms, rel=0.002)
    assert found.search is not None
    assert found.search.lower_bound_ms <= least_ms * (1 + 1e-9)


def test_encoders_too_large_for_a_device_are_divided() -> None:
    """Prevents: encoders that fit only where ranks divide them refused, or an answer that does not
    say so."""
    devices = load_cluster("h100-80g").model_copy(update={"memory_gib": 36.0})
    sizes = Parallel(tensor=8, pipeline=1, data=4, sequence_parallel=True)
    free = JobSpec(
        model=load_model("internvit-6b-llama3-8b"),
        cluster=devices,
        parallel=sizes,
        precision="bf16",
        placement=EncoderPlacement.DATA_PARALLEL,
        encoder_shardings=EVERY,
    )
    data = request(job()).data
    whole = PlanRequest(job=replace(free, encoder_shardings=EVERY[:1]), data=data)
    with pytest.raises(DoesNotFit, match="a whole copy of the encoders") as raised:
        make_plan(whole)
    assert "--sharding auto" in str(raised.value)
    advised = {change.text.split(" (")[0] for change in find_changes(whole).changes}
    assert "--sharding auto instead of replicated" in advised
    plan = make_plan(PlanRequest(job=free, data=data)).plan
    assert plan.beside is not None and plan.beside.sharded > 1


def test_a_divided_language_model_goes_with_data_parallel_encoders() -> None:
    """Prevents: what OrchMLLM ran refused, or planned without what ranks wait for: encoders, and
    the exchange of the language model's weights, each in its own time."""
    sizes = Parallel(pipeline=1, data=16, sharded=16)
    divided, whole = job(sizes), job(sizes.model_copy(update={"sharded": 1}))
    plan = make_plan(request(divided, packs_per_step=32)).plan
    assert plan.beside is not None
    asked = request(replace(divided, beside=plan.beside), packs_per_step=32)
    workload, names = asked.workload(), list(asked.job.cost.features)
    times = {
        name: workload.features[:, names.index(name)]
        for name in ("exposed_forward_ms", "beside_forward_ms")
    }
    assert (times["exposed_forward_ms"] > 0).all()
    assert (times["beside_forward_ms"] > 0).tolist() == (workload.slot == 0).tolist()
    # Exchange is of the language model's units alone.
    alone = replace(divided, model=MODEL.without_encoders(), placement=EncoderPlacement.PIPELINE)
    text = workload.features.copy()
    text[:, names.index("tiles")] = 0  # a model without encoders has none to put in their places
    found = divided.with_exposed(text)[:, names.index("exposed_forward_ms")]
    own = np.delete(text, [names.index("tiles")], axis=1)[:, : len(alone.cost.features) - 2]
    assert alone.exchange is not None
    np.testing.assert_allclose(found, alone.exchange.exposed_ms(own)[:, 0])
    weights = divided.cost.units["language_layer"].parameters
    assert weights == whole.cost.units["language_layer"].parameters
    assert divided.cost.rates.weight_bytes * 16 == whole.cost.rates.weight_bytes
    assert plan.prediction is not None
    assert sum(plan.prediction.lost.named().values()) == pytest.approx(plan.prediction.step_ms)


def test_blocks_are_of_a_node_or_of_all_ranks() -> None:
    """Prevents: a block that leaves a node, tensor-parallel ranks that are torn apart, and a job on
    one node that has no way to divide."""
    cluster = load_cluster("h100-80g")
    for sizes, expected in (
        (Parallel(pipeline=2, data=8), [1, 16, 8]),
        (Parallel(tensor=8, pipeline=1, data=4), [1, 32, 8]),
        (Parallel(tensor=3, pipeline=1, data=4), [1, 12, 6]),
        (Parallel(pipeline=1, data=4), [1, 4, 4]),
        (Parallel(pipeline=1, data=12), [1, 12, None]),
    ):
        assert [encoder_shards(way, sizes, cluster) for way in EVERY] == expected
    with pytest.raises(UserError, match="no whole nodes of h100-80g") as raised:
        job(Parallel(pipeline=1, data=12), encoder_shardings=(WeightSharding.HYBRID,))
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="--precision fp8 was given with data-parallel encoders"):
        job(precision="fp8", encoder_shardings=(WeightSharding.FULL,))


def run(capsys: pytest.CaptureFixture[str], command: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert (ended.value.code or 0) == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


@pytest.fixture
def planned(tmp_path: Path) -> str:
    """A command that plans data-parallel encoders."""
    write_lengths(example_lengths(count=100), tmp_path / "lengths.parquet")
    return (
        "plan --model internvl-digits --cluster laptop-cpu --max-tiles 8 --max-tokens 512 "
        f"--packing-levels 1 --lengths {tmp_path / 'lengths.parquet'} --encoder data-parallel "
    )


def test_plans_say_how_encoders_are_held(capsys, tmp_path, planned) -> None:
    """Prevents: a number of ranks that only the file knows, and one that is there for encoders in
    the pipeline; the option asks for both towers."""
    plan = tmp_path / "plan"
    for option, ranks, of_language in (
        ("--pp 2 --dp 2", 1, 1),
        ("--pp 2 --dp 2 --sharding replicated", 1, 1),
        ("--dp 4 --sharding full", 4, 4),
    ):
        found = json.loads(run(capsys, f"{planned} {option} --json -o {plan}"))
        assert found["encoder"]["sharded_ranks"] == ranks
        assert found["sharding_ranks"] == of_language
        assert json.loads((plan / "plan.json").read_text())["beside"]["sharded"] == ranks
    auto = json.loads(run(capsys, f"{planned} --pp 2 --dp 2 --sharding auto --json -o {plan}"))
    assert auto["encoder"]["sharded_ranks"] in (1, 4)
    assert auto["sharding"] == "replicated"
    shown = " ".join(run(capsys, f"{planned} --dp 4 --sharding full -o {plan}").split())
    assert "weights of encoders divided over 4 neighbouring ranks" in shown
    run(capsys, f"report {plan} -o {tmp_path / 'page.html'}")
    words = "weights are divided over 4 neighbouring ranks"
    assert words in (tmp_path / "page.html").read_text()
    in_pipeline = planned.replace("--encoder data-parallel", "--encoder pipeline")
    found = json.loads(run(capsys, f"{in_pipeline} --dp 4 --json -o {plan}"))
    assert "sharded_ranks" not in found["encoder"]


def test_edited_numbers_of_ranks_are_counted_or_refused(capsys, tmp_path, planned) -> None:
    """Prevents: an edit that is trained unseen, or that no block of ranks could follow."""
    plan = tmp_path / "plan"
    run(capsys, f"{planned} --pp 2 --dp 2 -o {plan}")
    path = plan / "plan.json"
    edited = json.loads(path.read_text())
    before = edited.pop("prediction")
    for ranks in (2, 4):
        edited["beside"]["sharded"] = ranks
        path.write_text(json.dumps(edited))
        assert "fullest stage" in run(capsys, f"check {plan}")
    path.write_text(json.dumps(edited | {"prediction": before}))
    assert "the stored prediction is of another plan" in run(capsys, f"check {plan}", 2)
    edited["beside"]["sharded"] = 3
    path.write_text(json.dumps(edited))
    error = run(capsys, f"check {plan}", 2)
    assert "beside.sharded is 3, and must divide the 4 ranks of the job" in error
    assert len(error.strip().splitlines()) == 1


def test_sizes_that_are_free_leave_the_encoders_free(capsys, tmp_path, planned) -> None:
    """Prevents: a free search that knows no divided encoders, or divides those that were asked to
    be whole."""
    plan = tmp_path / "plan"
    for sharding, allowed in (("replicated", {1}), ("full", {4}), ("auto", {1, 4})):
        command = f"{planned} --gpus 4 --tp 1 --samples-per-step 40 --sharding {sharding}"
        found = json.loads(run(capsys, f"{command} --json -o {plan}"))
        assert found["encoder"]["sharded_ranks"] in allowed
        assert "fullest stage" in run(capsys, f"check {plan}")
