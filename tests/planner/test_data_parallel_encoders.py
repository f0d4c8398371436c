"""Data-parallel encoders: times, memory and search, compared with plain loops."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cost_cases import encoders_cost, model_of, random_cost
from encoder_cases import choice_of
from feature_exchange_cases import (
    equal_passes,
    every_choice,
    lockstep_ms,
    messages_ms,
    random_choice,
    ranks_ms,
    ranks_of_group,
)
from partition_cases import planners_figures
from plan_cases import JOB, job_spec, request
from schedule_cases import event_loop, lost_time, needed_ms, workload_of

from omnibal.cost.encoder_phase_costs import EncoderCost, EncodersCost, pipeline_cost
from omnibal.cost.shaped_rates import LinearTime
from omnibal.cost.sharding_costs import ShardedExchange
from omnibal.job.planner import make_plan
from omnibal.model.config import load_cluster, load_model
from omnibal.model.data_parallel_encoders import DataParallelEncoders, EncoderPlacement
from omnibal.model.parallel import Parallel
from omnibal.model.rate_tables import CollectiveTime, Rates
from omnibal.packing.items import share_items
from omnibal.pipeline.encoder_search import PlacementProblem, search_encoders
from omnibal.pipeline.encoder_waits import ItemShares, memory_of_encoders
from omnibal.pipeline.schedules import Pass, PipelineSchedule, one_forward_one_backward
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.stage_memory import fits_cap
from omnibal.pipeline.unit_runs import stage_units, stages_from_cuts, unit_spans
from omnibal.pipeline.workload import Workload

LAYERS = {"vision": 2, "audio": 1, "language": 3}
FEATURES = {"vision": "tiles", "audio": "clips"}
FEW = dict.fromkeys(FEATURES, (5, 5))


def random_encoder(rng, feature: str, is_trained: bool):
    """Return five units of three kinds, some frozen; some exchanges outlast their passes."""
    forward_ms, backward_ms, again_ms = rng.uniform(0, 1, (3, 3, 2))
    trained = np.arange(3) >= (rng.integers(3) if is_trained else 3)
    units = ShardedExchange(
        forward_ms=forward_ms,
        backward_ms=2 * backward_ms * trained[:, None],
        again_ms=again_ms,
        gather_ms=rng.uniform(0, 3, 3),
        gather_back_ms=rng.uniform(0, 3, 3) * trained,
        reduce_ms=rng.uniform(0, 3, 3) * trained,
        sequence=(0, 1, 1, 1, 2),
    )
    held = list(units.sequence)
    return EncoderCost(
        feature=feature,
        forward_ms=forward_ms[held].sum(axis=0),
        backward_ms=units.backward_ms[held].sum(axis=0),
        again_ms=is_trained * again_ms[held].sum(axis=0),
        kept_bytes=is_trained * rng.uniform(0, 4e6, 2),
        working_bytes=rng.uniform(0, 3e6, (2, 2)),
        input_bytes=float(rng.uniform(0, 1e5)),
        feature_bytes=float(rng.integers(1, 9) * 1_000),
        is_trained=is_trained,
        exchange=units,
    )


def random_encoders(
    rng: np.random.Generator,
    names: tuple[str, ...],
    parallel: Parallel,
    ways: tuple[int, ...] = (1,),
) -> dict[int, EncodersCost]:
    """Return costs of unlike encoders, some frozen, by the number of ranks that shard weights."""

    def once_ms() -> dict[str, float]:
        names = ("gather_ms", "reduction_ms", "update_ms")
        return dict(zip(names, rng.uniform(0, 4, 3).tolist(), strict=True))

    encoders = {}
    for name in names:
        is_trained = name == names[0] or bool(rng.integers(2))
        encoders[name] = random_encoder(rng, FEATURES[name], is_trained)
    whole = EncodersCost(
        encoders=encoders,
        weights_bytes=1e6,
        gradients_bytes=2e6,
        optimizer_bytes=3e5,
        **once_ms(),
        within_node=LinearTime(fixed_ms=0.2, each_ms=1e-4),
        between_nodes=LinearTime(fixed_ms=0.3, each_ms=2e-4),
        tensor=LinearTime(fixed_ms=0.1, each_ms=1e-4),
        peer_bytes=1e5,
        parallel=parallel,
        gpus_per_node=4,
    )

    def held(ranks: int) -> EncodersCost:
        """Return costs with weights sharded over `ranks`: exchanges per pass, or per step at 1."""
        if ranks == 1:
            alone = {name: replace(one, exchange=None) for name, one in encoders.items()}
            return replace(whole, encoders=alone)
        more = {name: one.working_bytes + rng.uniform(0, 2e6) for name, one in encoders.items()}
        return replace(
            whole,
            encoders={name: replace(encoders[name], working_bytes=more[name]) for name in names},
            weights_bytes=whole.weights_bytes / ranks,
            gradients_bytes=whole.gradients_bytes / ranks,
            **once_ms() | {"gather_ms": 0.0},
            sharded=ranks,
            evaluation_bytes=whole.weights_bytes * float(rng.integers(1, 6)),
        )

    return {ranks: held(ranks) for ranks in ways}


def random_problem(
    rng: np.random.Generator,
    towers: str,
    parallel: Parallel,
    steps: int,
    most: int = 3,
    ways: tuple[int, ...] = (1,),
) -> PlacementProblem:
    """Return a pipeline on random packs; some packs lack items, and some steps lack packs."""
    names = tuple(towers.split())
    model = model_of(towers, *(LAYERS[name] for name in names))
    # Data-parallel exchanges overlap with computation, which the plain loops do not model.
    whole = random_cost(rng, model)
    whole = replace(whole, rates=replace(whole.rates, gradient_reduction_ms=0.0))
    encoders = random_encoders(rng, names[:-1], parallel, ways)
    cost = pipeline_cost(whole, min(each.update_ms for each in encoders.values()))
    counts = rng.integers(1, most + 1, (steps, parallel.data))
    features = rng.uniform(0, 4, (counts.sum(), len(cost.features)))
    features[:, 0], features[:, -2:] = 1, 0
    for name in {one.feature for one in encoders[ways[0]].encoders.values()}:
        some = rng.integers(0, 6, len(features)) * (rng.random(len(features)) < 0.7)
        features[:, cost.features.index(name)] = some
    workload = workload_of(counts, features)
    task = SplitTask(cost, model.without_encoders(), workload, parallel.pipeline)
    return PlacementProblem(task=task, features=cost.features, encoders=encoders)


def items_of_ranks(problem: PlacementProblem, choice: DataParallelEncoders, step: int, block: int):
    """Return items per rank of a group in a step, by encoder, with their runs and pipelines."""
    load, cost = problem.task.workload, problem.any_encoders
    own = load.rows((load.step == step) & (load.dp_rank // choice.pipelines == block))
    columns = {name: problem.features.index(one.feature) for name, one in cost.encoders.items()}
    items = {name: own.features[:, columns[name]].astype(np.int64) for name in columns}
    pipeline = own.dp_rank - block * choice.pipelines
    ranks = ranks_of_group(cost, choice.pipelines, block)
    runs = share_items(
        items,
        pipeline,
        pipelines=choice.pipelines,
        ranks_of_pipeline=cost.ranks_of_pipeline,
        item_ms=choice.item_ms,
        node=ranks // cost.gpus_per_node,
    )
    counts = {name: np.bincount(one.rank, one.count, len(ranks)) for name, one in runs.items()}
    return {name: found.astype(int).tolist() for name, found in counts.items()}, runs, pipeline


def pipeline_ms(problem: PlacementProblem, stages, own: Workload) -> float:
    """Return a pipeline's step time: each operation starts as soon as possible."""
    times = stage_times(problem.task.cost, stages, own.features)
    passes = {Pass.FORWARD: times.forward_ms, Pass.BACKWARD: times.backward_ms}
    schedule = one_forward_one_backward(len(stages), 1, len(own))
    ran = event_loop(schedule, passes, times.forward_link_ms, times.backward_link_ms)
    return max(end for _, end in ran.values())


def looped_steps_ms(problem: PlacementProblem, choice, stages, step: int) -> tuple[float, float]:
    """Return a step's time (encoders, exchange, pipelines, exchange, encoders, update), and the
    mean pipeline's with evenly divided encoder work."""
    cost, ends, alone = problem.encoders[choice.sharded], [], []
    groups = range(problem.task.workload.data_parallel_size // choice.pipelines)
    dealt = [items_of_ranks(problem, choice, step, block) for block in groups]
    passes = {
        name: [[equal_passes(choice, name, n) for n in items[name]] for items, *_ in dealt]
        for name in cost.encoders
    }
    busy, even = ranks_ms(cost, choice.pipelines, passes)
    load = problem.task.workload.rows(problem.task.workload.step == step)
    for block in groups:
        exchange_ms = exchanges_ms(problem, choice, block, dealt[block])
        pipelines_ms = [
            pipeline_ms(problem, stages, load.rows(load.dp_rank == rank))
            for rank in range(block * choice.pipelines, (block + 1) * choice.pipelines)
        ]
        ends.append(busy[block].max(axis=0).sum() + max(pipelines_ms) + exchange_ms)
        alone += [even[block].sum(axis=1).mean() + each + exchange_ms for each in pipelines_ms]
    once_ms = cost.gather_ms + cost.reduction_ms
    parameters = [
        sum(problem.task.cost.units[unit].trained_parameters for unit in units)
        for units in (stage_units(problem.task.cost.kinds, stage.units) for stage in stages)
    ]
    of_all = [each.update_ms for each in problem.encoders.values()]
    once_ms += problem.task.cost.optimizer_ms_fixed - min(of_all) + cost.update_ms
    once_ms += problem.task.cost.rates.optimizer_ms * max(parameters)
    return max(ends) + once_ms, float(np.mean(alone)) + once_ms


def exchanges_ms(problem: PlacementProblem, choice, block: int, dealt) -> float:
    """Return the time of both exchanges, from every run's sender and receiver, at tensor size 1."""
    cost, (_, runs, pipeline), total_ms = problem.any_encoders, dealt, 0.0
    ranks = cost.ranks_of_pipeline
    for encoders in (cost.encoders, {n: one for n, one in cost.encoders.items() if one.is_trained}):
        moved = [
            (source, pipeline[pack] * ranks, count * one.feature_bytes)
            for run, one in ((runs[name], encoders[name]) for name in encoders)
            for pack, count, source in zip(run.pack, run.count, run.rank, strict=True)
        ]
        if choice.pipelines * ranks > 1 and encoders:
            total_ms += messages_ms(cost, choice.pipelines, block, moved)
    return total_ms


def test_features_leave_at_the_measured_rate_of_an_all_to_all():
    """Prevents exchanges timed by messages although that network's all-to-all is measured."""
    sizes = Parallel(pipeline=2, data=4)
    counted = random_encoders(np.random.default_rng(0), ("vision",), sizes)[1]
    exchange = CollectiveTime(kind="all_to_all", ranks=4, latency_us=300, gb_per_s=2)
    measured = replace(counted, measured=(exchange,), gpus_per_node=8)
    bytes_ = np.array([0.0, 2e6]), np.array([0.0, 4e6])
    # Two pipelines of two ranks.
    assert measured.exchange_ms(2, *bytes_) == pytest.approx([0.3, 3.3], rel=1e-6)
    across = replace(measured, gpus_per_node=4)
    # Three messages, and the slower of 2 MB within a node and 4 MB between nodes.
    expected = [3 * 0.3, 3 * 0.3 + 4e6 * 2e-4]
    assert across.exchange_ms(2, *bytes_) == pytest.approx(expected)
    assert across.exchange_ms(2, *bytes_[::-1]) == pytest.approx([0.9, 0.9 + 4e6 * 1e-4])
    cluster = load_cluster("h100-80g")
    rates = Rates(device="mine", collectives=(exchange,))
    table = cluster.model_copy(update={"rates": {"bf16": rates}})
    cost = encoders_cost(load_model("internvl2-1b"), table, Parallel(pipeline=1, data=4), "bf16")
    assert cost.exchange_ms(4, *bytes_) == pytest.approx([0.3, 3.3], rel=1e-6)


CASES = [
    ("vision language", Parallel(pipeline=2, data=1), (1, 2)),
    ("vision language", Parallel(pipeline=1, data=4), (1,)),
    ("vision language", Parallel(pipeline=1, data=4), (2, 4)),
    ("vision language", Parallel(pipeline=3, data=4), (1, 2, 6, 12)),
    ("vision audio language", Parallel(pipeline=2, data=4), (1,)),
    ("vision audio language", Parallel(pipeline=2, data=4), (2, 4, 8)),
    ("vision audio language", Parallel(pipeline=1, data=1), (1,)),
]


@pytest.mark.parametrize(("towers", "parallel", "ways"), CASES)
def test_steps_last_as_an_event_loop_says(towers, parallel, ways):
    """Prevents a step without a group's busiest rank, second forwards, an exchange or the slowest
    pipeline; with sharded weights, without empty passes or waits."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, towers, parallel, steps=3, ways=ways)
        if seed == 0:  # no items at all
            columns = [problem.features.index(FEATURES[name]) for name in towers.split()[:-1]]
            problem.task.workload.features[:, columns] = 0
        units = len(unit_spans(problem.task.model))
        cuts = np.sort(rng.choice(np.arange(1, units), parallel.pipeline - 1, replace=False))
        stages = stages_from_cuts(problem.task.model, cuts.tolist())
        choice = random_choice(rng, problem.encoders, FEW)
        task = problem.make_stage_task(choice)
        simulated = simulate_levels(task.cost, [stages], task.workload).step_ms
        looped = [looped_steps_ms(problem, choice, stages, step)[0] for step in range(3)]
        np.testing.assert_allclose(simulated, looped, rtol=1e-9)


def test_parts_of_a_step_add_up():
    """Prevents time without a cause or counted twice, and a wrong ideal step."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        parallel = Parallel(pipeline=2, data=4)
        problem = random_problem(rng, "vision audio language", parallel, 2, ways=(1, 2, 8))
        choice = random_choice(rng, problem.encoders, FEW)
        task = problem.make_stage_task(choice)
        cost, workload = task.cost, task.workload
        stages = stages_from_cuts(problem.task.model, [3])
        step_ms = float(simulate_levels(cost, [stages], workload).step_ms.mean())
        lost = lost_time(cost, [stages], workload, step_ms)
        named = lost.causes()
        assert sum(named.values()) == pytest.approx(step_ms)
        assert named["rank imbalance"] >= 0
        looped = [looped_steps_ms(problem, choice, stages, step) for step in range(2)]
        uneven_ms = np.mean([all_ms - alone_ms for all_ms, alone_ms in looped])
        assert lost.rank_imbalance_ms == pytest.approx(uneven_ms)
        work_ms = needed_ms(problem.task.cost, stages, workload.features)
        for step, block in product(range(2), range(4 // choice.pipelines)):
            counts, *_ = items_of_ranks(problem, choice, step, block)
            for name, one in problem.any_encoders.encoders.items():
                again = replace(one, again_ms=0 * one.again_ms, exchange=None)
                passes = [equal_passes(choice, name, items) for items in counts[name]]
                work_ms += sum(lockstep_ms(again, [of_rank]).sum() for of_rank in passes)
        assert lost.ideal_ms == pytest.approx(work_ms / parallel.world_size / 2)


def test_memory_is_what_a_loop_over_ranks_counts():
    """Prevents kept items, inputs, features or buffers left out, or a peak of a lighter step."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, "vision audio language", Parallel(pipeline=2, data=4), 4)
        choice, cost = random_choice(rng, problem.encoders, FEW), problem.any_encoders
        shares = ItemShares.build(problem.task.workload, problem.features, cost, choice)
        encoder_memory = memory_of_encoders(shares, cost, choice)
        held, rows, features, load = [], [], [], problem.task.workload
        for step, block in product(range(4), range(4 // choice.pipelines)):
            counts, _, pipeline = items_of_ranks(problem, choice, step, block)
            own = load.rows((load.step == step) & (load.dp_rank // choice.pipelines == block))
            of_ranks, arrived = np.zeros((2, choice.pipelines * 2)), np.zeros(choice.pipelines)
            for name, one in cost.encoders.items():
                items = np.array(counts[name])
                of_ranks[1] += one.feature_bytes * items
                column = own.features[:, problem.features.index(one.feature)]
                here = np.bincount(pipeline, column, choice.pipelines)
                arrived += here * one.feature_bytes * (1 + one.is_trained)
                if one.is_trained:
                    kept = np.minimum(items, choice.kept_items[name])
                    passes = -(-kept // choice.items_per_pass[name])
                    of_ranks[0] += np.stack([passes, kept], axis=1) @ one.kept_bytes
                    of_ranks[0] += one.input_bytes * (items - kept)
            held, rows = [*held, *of_ranks[0]], [*rows, *of_ranks[1]]
            features += arrived.tolist()
        assert encoder_memory.features == pytest.approx(max(features))
        assert encoder_memory.buffers == (choice.pipelines * 2 - 1) * cost.peer_bytes
        # With several encoders, the bound assumes each encoder's maximum on the same rank.
        assert encoder_memory.kept >= max(held) * (1 - 1e-9)
        assert encoder_memory.encoding >= 2 * max(rows)


def change_encoders(parallel: Parallel, **encoders: dict) -> EncodersCost:
    """Return encoder costs with these changes; passes need no working memory."""
    (cost,) = random_encoders(np.random.default_rng(0), tuple(encoders), parallel).values()
    told = {name: {"working_bytes": np.zeros((1, 2))} | encoders[name] for name in encoders}
    changed = {name: replace(one, **told[name]) for name, one in cost.encoders.items()}
    return replace(cost, encoders=changed)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("is_trained", [False, True])
def test_features_take_memory_as_they_arrive(is_trained: bool, tensor: int):
    """Prevents running out of memory as features arrive, hidden by a larger encoding peak."""
    vision = {"feature_bytes": 1000.0, "input_bytes": 7.0, "kept_bytes": np.zeros(2)}
    sizes, ranks = Parallel(tensor=tensor, pipeline=2, data=2), 4 * tensor
    cost = change_encoders(sizes, vision=vision | {"is_trained": is_trained})
    choice = choice_of(2, 3, {"vision": 1})
    # Two steps: all images in packs of one pipeline, or a few in both.
    shares = ItemShares(
        steps=np.arange(2),
        pipelines=2,
        held={"vision": np.array([[6 * ranks, 0], [ranks, ranks]])},
        encoded={"vision": np.array([[6] * ranks, [2] * ranks])},
    )
    encoder_memory, arrived = memory_of_encoders(shares, cost, choice), 6 * ranks * 1000
    # Features and gradients until the step's end; arriving: received, reordered, and a rank's part.
    assert encoder_memory.features == (2 if is_trained else 1) * arrived
    on_their_way = 2 * arrived + (arrived / 2 if tensor == 2 else 0)
    assert encoder_memory.features + encoder_memory.arrival == pytest.approx(on_their_way)
    # Two orders of rows at the start, with no others in memory.
    assert encoder_memory.encoding == 2 * 6 * 1000
    # Inputs of items encoded a second time.
    assert encoder_memory.kept == (5 if is_trained else 0) * 7


def test_passes_that_run_again_have_the_room_of_those_that_were_kept():
    """Prevents fewer kept items than fit, by charging second passes on top of freed activations."""
    usual = {"feature_bytes": 1.0, "input_bytes": 0.0, "is_trained": True}
    vision, audio = (usual | {"kept_bytes": np.array([0.0, size])} for size in (100.0, 10.0))
    cost = change_encoders(Parallel(pipeline=1, data=1), vision=vision, audio=audio)
    items = dict.fromkeys(("vision", "audio"), np.array([[9]]))
    shares = ItemShares(steps=np.arange(1), pipelines=1, held=items, encoded=items)

    def encoding(vision: int, audio: int) -> float:
        choice = choice_of(1, 4, {"vision": vision, "audio": audio})
        found = memory_of_encoders(shares, cost, choice)
        assert found.kept == 100 * vision + 10 * audio
        return found.kept + found.encoding

    rows = 18
    # A second pass of four vision items, after all kept vision activations are freed.
    assert encoding(0, 0) == 400 + rows
    assert encoding(3, 0) == 400 + rows
    assert encoding(3, 9) == 490 + rows
    # A second pass of four audio items, after all kept ones; two orders of rows at the start.
    assert encoding(9, 0) == 900 + 2 * rows


@pytest.mark.parametrize(
    ("towers", "ways", "in_lockstep"),
    [
        ("vision language", (1, 2, 4), False),
        ("vision language", (1, 4), True),
        ("vision audio language", (1, 4), False),
    ],
)
def test_search_finds_what_trying_everything_finds(towers, ways, in_lockstep):
    """Prevents a choice slower than the fastest that fits, over all splits and recomputations."""
    compared = 0
    for seed in range(2):
        rng = np.random.default_rng(seed)
        parallel = Parallel(pipeline=2, data=2)
        problem = random_problem(rng, towers, parallel, steps=1, most=2, ways=ways)
        if in_lockstep:
            cost = replace(problem.task.cost, runs_in_lockstep=True)
            workload = problem.task.workload.in_groups_of(2)
            problem = replace(problem, task=replace(problem.task, cost=cost, workload=workload))
        tried = list(all_choices(problem))
        # A memory cap that few choices fit.
        cap = sorted(need for need, _ in tried)[len(tried) // 50] * 1.0001
        best_ms = min(ms for need, ms in tried if fits_cap(need, cap))
        capped = replace(problem, task=replace(problem.task, memory_cap_bytes=cap))
        _, found = search_encoders(capped)
        assert found.step_ms == pytest.approx(best_ms, rel=1e-9)
        assert found.lower_bound_ms <= best_ms * (1 + 1e-9)
        compared += found.gap < 1e-9
    assert compared, "some are proven"


def all_choices(problem: PlacementProblem):
    """Yield peak bytes and step time of every choice with every split and recomputation."""
    is_layer = [word.layers is not None for word in unit_spans(problem.task.model)]
    splits = []
    for cut in range(1, len(is_layer)):
        held = sum(is_layer[:cut]), sum(is_layer[cut:])
        for a, b in product(range(held[0] + 1), range(held[1] + 1)) if min(held) > 0 else ():
            splits.append(stages_from_cuts(problem.task.model, [cut], [[a], [b]]))
    for choice in every_choice(problem):
        task = problem.make_stage_task(choice)
        cost, workload = task.cost, task.workload
        for stages in splits:
            yield planners_figures(cost, stages, workload)[::-1]


def test_a_whole_copy_costs_what_its_units_cost():
    """Prevents encoders divided by tensor-parallel ranks, or lacking some layers' time or state."""
    model, cluster = load_model("internvl2-1b"), load_cluster("h100-80g")
    parallel = Parallel(tensor=2, pipeline=2, data=4)
    cost = encoders_cost(model, cluster, parallel, "bf16")
    vision = cost.encoders["vision"]
    layers = model.vision.layers
    alone = job_spec(model=model, cluster=cluster, parallel=Parallel(pipeline=1), precision="bf16")
    units = alone.cost.units
    both = [units["vision_embed"], units["projector"]]
    column = alone.cost.features.index("tiles")
    expected = layers * units["vision_layer"].forward_ms + sum(unit.forward_ms for unit in both)
    np.testing.assert_allclose(vision.forward_ms, expected[[0, column]])
    parameters = layers * units["vision_layer"].parameters + sum(unit.parameters for unit in both)
    state = cost.weights_bytes, cost.gradients_bytes, cost.optimizer_bytes
    assert state == pytest.approx((2 * parameters, 4 * parameters, 12 * parameters / 16))
    # Every trained parameter is exchanged: weights in bf16, gradients in fp32.
    assert cost.gather_ms == pytest.approx(cost.reduction_ms / 2)
    each = encoders_cost(model.with_tower("vision", layers=1), cluster, parallel, "bf16")
    fewer = (layers - 1) * units["vision_layer"].parameters / parameters
    for name in ("update_ms", "gather_ms", "reduction_ms"):
        assert getattr(each, name) == pytest.approx((1 - fewer) * getattr(cost, name)), name
    assert vision.feature_bytes == 256 * model.language.hidden_size * 2
    assert vision.input_bytes == 3 * 448 * 448 * 4


def test_frozen_encoders_keep_and_send_back_nothing():
    """Prevents backward work for frozen encoders, and no second forward under a projector."""
    model, cluster = load_model("internvl2-1b"), load_cluster("h100-80g")
    sizes = model, cluster, Parallel(pipeline=2, data=4), "bf16"
    none = encoders_cost(*sizes, ("vision", "projector")).encoders["vision"]
    of_training = none.is_trained, none.backward_ms, none.again_ms, none.kept_bytes
    assert not any(map(np.any, of_training))
    tower = encoders_cost(*sizes, ("vision",)).encoders["vision"]
    everything = encoders_cost(*sizes).encoders["vision"]
    assert tower.is_trained
    np.testing.assert_allclose(tower.again_ms, everything.again_ms)
    assert 0 < tower.kept_bytes[1] < everything.kept_bytes[1] / 10


def test_plans_are_whole_and_within_memory():
    """Prevents stages that hold data-parallel encoders, or a prediction without them."""
    plan = make_plan(request(placement=EncoderPlacement.DATA_PARALLEL)).plan
    assert plan.data_parallel_encoders is not None
    assert not any("vision" in span.name for stage in plan.stages for span in stage.units)
    encoding = plan.prediction.data_parallel_encoders
    for stage in plan.prediction.stages:
        assert stage.memory.peak_gib <= 0.9 * JOB["cluster"].memory_gib
        assert stage.memory.weights_gib > encoding.memory.weights_gib
        assert 0 <= stage.wait_fraction <= 1
    encoding_ms = encoding.forward_ms + encoding.exchange_ms + encoding.backward_ms
    assert plan.prediction.step_ms > encoding_ms > 0
    assert sum(plan.prediction.lost.causes().values()) == pytest.approx(plan.prediction.step_ms)


def test_encoders_leave_the_memory_that_a_schedule_needs():
    """Prevents a schedule refused for the memory of encoders that were chosen in 1F1B."""
    asked = request(placement=EncoderPlacement.DATA_PARALLEL)
    greedy = make_plan(asked).plan.data_parallel_encoders  # as without a cap
    cluster = JOB["cluster"].model_copy(update={"memory_gib": 0.026})
    job = replace(asked.job, cluster=cluster, data_parallel_encoders=greedy)
    plan = make_plan(replace(asked, job=job, schedule=PipelineSchedule(name="zb-h1"))).plan
    assert plan.data_parallel_encoders.kept_items["vision"] < greedy.kept_items["vision"]
    assert max(stage.memory.peak_gib for stage in plan.prediction.stages) <= job.memory_cap_gib


def test_packs_of_any_model_are_balanced_by_the_pipeline_alone():
    """Prevents packs balanced by encoder time, which pipelines do not spend."""
    data = request().data
    packs, lengths = data.schedule(job_spec())
    language = job_spec(placement=EncoderPlacement.DATA_PARALLEL).load_ms(packs.packs, lengths)
    whole = job_spec().load_ms(packs.packs, lengths)
    assert (language < whole)[packs.column("tiles") > 0].all()
