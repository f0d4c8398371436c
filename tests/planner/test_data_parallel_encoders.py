"""Data-parallel encoders: times, memory and search, compared with plain loops."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from cost_cases import model_of, random_cost
from feature_exchange_cases import equal_passes, lockstep_ms, messages_ms, node_of
from plan_cases import JOB, job_spec, request

from omnibal.base.errors import UserError
from omnibal.cost.encoder_phase import (
    EncoderCost,
    EncodersCost,
    PassExchange,
    encoders_cost,
    pipeline_cost,
)
from omnibal.cost.shaped_rates import Line
from omnibal.cost.sharded import ShardedExchange
from omnibal.dispatch.items import share_items
from omnibal.job.planner import make_plan
from omnibal.model.config import load_cluster, load_model
from omnibal.model.data_parallel_encoders import DataParallelEncoders, EncoderPlacement
from omnibal.model.parallel import Parallel
from omnibal.model.rates import CollectiveTime, Rates
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule
from omnibal.pipeline.encoder_search import PlacementProblem, kept_choices, search_encoders
from omnibal.pipeline.encoder_waits import ItemShares, memory_of_encoders
from omnibal.pipeline.lost_time import lost_time
from omnibal.pipeline.schedules import Pass, one_forward_one_backward
from omnibal.pipeline.simulate import simulate_run
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.stage_memory import GIB, fits_cap, stage_memories
from omnibal.pipeline.unit_runs import stages_from_cuts, unit_words
from omnibal.pipeline.workload import Workload

LAYERS = {"vision": 2, "audio": 1, "language": 4}


def random_exchange(rng: np.random.Generator, features: int, item: int, trained_from: int):
    """Units of an encoder, and the exchange of their weights: some slower than computing.

    Args:
        trained_from: first unit of five that is trained.
    """
    of_kinds = np.zeros((3, 3, features))
    of_kinds[..., [0, item]] = rng.uniform(0, 1, (3, 3, 2))
    forward_ms, backward_ms, again_ms = of_kinds
    kinds = np.arange(3)
    is_trained = kinds >= trained_from
    exchange = ShardedExchange(
        forward_ms=forward_ms,
        backward_ms=2 * backward_ms * is_trained[:, None],
        gather_ms=rng.uniform(0, 3, 3),
        gather_back_ms=rng.uniform(0, 3, 3) * is_trained,
        reduce_ms=rng.uniform(0, 3, 3) * is_trained,
        sequence=(0, 1, 1, 1, 2),
    )
    second = replace(exchange, forward_ms=again_ms)
    return PassExchange(of_pass=exchange, of_second=second, columns=(0, item))


def random_encoders(
    rng: np.random.Generator,
    names: tuple[str, ...],
    parallel: Parallel,
    ways: tuple[int, ...] = (1,),
    cost_features: tuple[str, ...] = ("fixed", "tiles", "clips"),
) -> dict[int, EncodersCost]:
    """Costs of encoders that are as unlike each other as can be; one of several may be frozen, and
    their weights are divided over so many ranks."""
    features = {"vision": "tiles", "audio": "clips"}

    def encoder(name: str) -> EncoderCost:
        is_trained = name == names[0] or bool(rng.integers(2))
        item = cost_features.index(features[name])
        trained_from = int(rng.integers(3)) if is_trained else 3
        exchange = random_exchange(rng, len(cost_features), item, trained_from)
        units, second = exchange.of_pass, exchange.of_second
        held = list(units.sequence)
        return EncoderCost(
            feature=features[name],
            forward_ms=units.forward_ms[held].sum(axis=0)[[0, item]],
            backward_ms=units.backward_ms[held].sum(axis=0)[[0, item]],
            again_ms=is_trained * second.forward_ms[held].sum(axis=0)[[0, item]],
            kept_bytes=is_trained * rng.uniform(0, 4e6, 2),
            working_bytes=rng.uniform(0, 3e6, (2, 2)),
            input_bytes=float(rng.uniform(0, 1e5)),
            feature_bytes=float(rng.integers(1, 9) * 1_000),
            is_trained=is_trained,
            exchange=exchange,
        )

    whole = EncodersCost(
        encoders={name: encoder(name) for name in names},
        weights_bytes=1e6,
        gradients_bytes=2e6,
        optimizer_bytes=3e5,
        gather_ms=float(rng.uniform(0, 4)),
        reduction_ms=float(rng.uniform(0, 4)),
        update_ms=float(rng.uniform(0, 4)),
        within_node=Line(fixed_ms=0.2, each_ms=1e-4),
        between_nodes=Line(fixed_ms=0.3, each_ms=2e-4),
        tensor=Line(fixed_ms=0.1, each_ms=1e-4),
        peer_bytes=1e5,
        parallel=parallel,
        gpus_per_node=4,
    )

    def held(ranks: int) -> EncodersCost:
        """A way to hold weights: exchange in every pass, or once a step."""
        if ranks == 1:
            alone = {name: replace(one, exchange=None) for name, one in whole.encoders.items()}
            return replace(whole, encoders=alone)
        working = {
            name: replace(one, working_bytes=one.working_bytes + rng.uniform(0, 2e6))
            for name, one in whole.encoders.items()
        }
        return replace(
            whole,
            encoders=working,
            weights_bytes=whole.weights_bytes / ranks,
            gradients_bytes=whole.gradients_bytes / ranks,
            gather_ms=0.0,
            reduction_ms=float(rng.uniform(0, 4)),
            update_ms=float(rng.uniform(0, 4)),
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
    """A pipeline on random packs, of which some hold no items; steps may lack some of the packs."""
    names = tuple(towers.split())
    model = model_of(towers, *(LAYERS[name] for name in names))
    # What data-parallel ranks exchange is hidden behind computation, which plain loops know not.
    whole = random_cost(rng, model)
    whole = replace(whole, rates=replace(whole.rates, gradient_reduction_ms=0.0))
    encoders = random_encoders(rng, names[:-1], parallel, ways, whole.features)
    cost = pipeline_cost(whole, min(each.update_ms for each in encoders.values()))
    rows = [
        (step, rank, slot)
        for step in range(steps)
        for rank in range(parallel.data)
        for slot in range(int(rng.integers(1, most + 1)))
    ]
    step, rank, slot = np.array(rows).T
    features = rng.uniform(0, 4, (len(rows), len(cost.features)))
    features[:, 0], features[:, -2:] = 1, 0
    for name in {one.feature for one in encoders[ways[0]].encoders.values()}:
        some = rng.integers(0, 6, len(rows)) * (rng.random(len(rows)) < 0.7)
        features[:, cost.features.index(name)] = some
    workload = Workload(
        features=features, step=step, dp_rank=rank, slot=slot, data_parallel_size=parallel.data
    )
    return PlacementProblem(
        cost=cost,
        features=cost.features,
        model=model.without_encoders(),
        encoders=encoders,
        workload=workload,
        memory_cap_bytes=np.inf,
    )


def random_data_parallel(
    rng: np.random.Generator, problem: PlacementProblem
) -> DataParallelEncoders:
    size = problem.workload.data_parallel_size
    names = problem.any_encoders.encoders
    return DataParallelEncoders(
        pipelines=int(rng.choice([n for n in range(1, size + 1) if size % n == 0])),
        items_per_pass={name: int(rng.integers(1, 5)) for name in names},
        kept_items={name: int(rng.integers(0, 5)) for name in names},
        item_ms={name: float(rng.uniform(0.1, 3)) for name in names},
        sharded=int(rng.choice(list(problem.encoders))),
    )


def items_of_ranks(problem: PlacementProblem, beside: DataParallelEncoders, step: int, block: int):
    """Items that every rank of a group encodes in a step, by encoder, and the runs they are in."""
    load, ranks = problem.workload, problem.any_encoders.ranks_of_pipeline
    own = load.rows((load.step == step) & (load.dp_rank // beside.pipelines == block))
    items = {
        name: own.features[:, problem.features.index(one.feature)].astype(np.int64)
        for name, one in problem.any_encoders.encoders.items()
    }
    pipeline = own.dp_rank - block * beside.pipelines
    size = beside.pipelines * ranks
    runs = share_items(
        items,
        pipeline,
        pipelines=beside.pipelines,
        ranks_of_pipeline=ranks,
        item_ms=beside.item_ms,
        node=np.array(
            [node_of(problem.any_encoders, beside.pipelines, block, each) for each in range(size)]
        ),
    )
    counts = {
        name: [int(run.count[run.rank == rank].sum()) for rank in range(size)]
        for name, run in runs.items()
    }
    return counts, runs, pipeline


def together_ms(cost: EncoderCost, items: list[int], a_pass: int, kept: int) -> np.ndarray:
    """Forward and backward of ranks with these items, whose passes begin and end together."""
    return lockstep_ms(cost, [equal_passes(own, a_pass, kept) for own in items])


def ranks_ms(
    problem: PlacementProblem, beside: DataParallelEncoders, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of every rank of the job, in lockstep within its block, by its group
    and its number there, [groups, ranks of a group, 2]; and the time that it computes alone and
    waits for exchange, were all equally busy."""
    sizes, cost = problem.any_encoders.parallel, problem.encoders[beside.sharded]
    groups = sizes.data // beside.pipelines
    counts = [items_of_ranks(problem, beside, step, block)[0] for block in range(groups)]
    place = {
        (stage * sizes.data + block * beside.pipelines + pipeline, name): (
            block,
            pipeline * sizes.pipeline + stage,
        )
        for name in cost.encoders
        for block in range(groups)
        for pipeline in range(beside.pipelines)
        for stage in range(sizes.pipeline)
    }
    found = np.zeros((groups, beside.pipelines * sizes.pipeline, 2))
    alone = np.zeros_like(found)
    for name, one in cost.encoders.items():
        a_pass, kept = beside.items_per_pass[name], beside.kept_items[name]
        silent = replace(one, exchange=None)
        for first in range(0, sizes.world_size, beside.sharded):
            places = [place[rank, name] for rank in range(first, first + beside.sharded)]
            items = [counts[block][name][number] for block, number in places]
            together = together_ms(one, items, a_pass, kept)
            exposed = together - together_ms(silent, items, a_pass, kept)
            for (block, number), own in zip(places, items, strict=True):
                found[block, number] += together
                alone[block, number] += exposed + together_ms(silent, [own], a_pass, kept)
    return found, alone


def pipeline_ms(problem: PlacementProblem, stages, own: Workload) -> float:
    """One pipeline's step, operation after operation as each can start."""
    times = stage_times(problem.cost, stages, own.features)
    schedule = one_forward_one_backward(len(stages), 1, len(own))
    queues = [list(operations) for operations in schedule.operations]
    free, end = [0.0] * len(stages), {}
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            operation = queue[0]
            kind, batch = operation.kind, operation.micro_batch
            source = stage - 1 if kind is Pass.FORWARD else stage + 1
            ready = 0.0
            if 0 <= source < len(stages):
                if (kind, batch, source) not in end:
                    continue
                links = times.forward_link_ms if kind is Pass.FORWARD else times.backward_link_ms
                ready = end[kind, batch, source] + links[batch, min(stage, source)]
            took = (times.forward_ms if kind is Pass.FORWARD else times.backward_ms)[batch, stage]
            free[stage] = end[kind, batch, stage] = max(free[stage], ready) + took
            queue.pop(0)
    return max(free)


def parts_of_group(
    problem: PlacementProblem, beside: DataParallelEncoders, stages, step: int, block: int
) -> tuple[list[float], float]:
    """Pipelines of a group, and its exchanges, in ms."""
    load = problem.workload
    _, runs, pipeline = items_of_ranks(problem, beside, step, block)
    pipelines_ms = [
        pipeline_ms(
            problem,
            stages,
            load.rows((load.step == step) & (load.dp_rank == block * beside.pipelines + number)),
        )
        for number in range(beside.pipelines)
    ]
    homes = pipeline, block
    exchange_ms = sum(
        exchanged_ms(problem, beside, runs, homes, is_back=is_back) for is_back in (False, True)
    )
    return pipelines_ms, exchange_ms


def looped_steps_ms(
    problem: PlacementProblem, beside: DataParallelEncoders, stages, step: int
) -> tuple[float, float]:
    """One step: encoders, exchange, pipelines, exchange, encoders, update; and what the mean
    pipeline would take alone if the ranks of its group had equally much to encode."""
    cost, ends, alone = problem.encoders[beside.sharded], [], []
    busy, even = ranks_ms(problem, beside, step)
    for block in range(problem.workload.data_parallel_size // beside.pipelines):
        pipelines_ms, exchange_ms = parts_of_group(problem, beside, stages, step, block)
        ends.append(busy[block].max(axis=0).sum() + max(pipelines_ms) + exchange_ms)
        alone += [even[block].sum(axis=1).mean() + each + exchange_ms for each in pipelines_ms]
    once_ms = cost.gather_ms + cost.reduction_ms
    parameters = [
        sum(problem.cost.units[kind.name].trained_parameters for kind in held)
        for held in (
            [
                kind
                for kind in problem.cost.kinds
                for _ in range(
                    sum(map(kind.has_layer, stage.layers(kind.tower)))
                    if kind.is_layer
                    else stage.holds(kind.words)
                )
            ]
            for stage in stages
        )
    ]
    of_all = [each.update_ms for each in problem.encoders.values()]
    once_ms += problem.cost.optimizer_ms_fixed - min(of_all) + cost.update_ms
    once_ms += problem.cost.rates.optimizer_ms * max(parameters)
    return max(ends) + once_ms, float(np.mean(alone)) + once_ms


def exchanged_ms(problem, beside, runs, homes, *, is_back: bool) -> float:
    """Time of an exchange by who sends each run to whom; no pipeline has tensor-parallel ranks."""
    cost, ranks = problem.any_encoders, problem.any_encoders.ranks_of_pipeline
    pipeline, block = homes
    carries = [one for one in cost.encoders.values() if one.is_trained or not is_back]
    if beside.pipelines * ranks == 1 or not carries:
        return 0.0
    moved = [
        (source, pipeline[pack] * ranks, count * cost.encoders[name].feature_bytes)
        for name, run in runs.items()
        for pack, count, source in zip(run.pack, run.count, run.rank, strict=True)
        if cost.encoders[name] in carries
    ]
    return messages_ms(cost, beside.pipelines, block, moved)


def test_features_leave_at_the_measured_rate_of_an_all_to_all():
    """Prevents an exchange of features that is counted by messages where all-to-alls were measured,
    and one within a node that stands in for the network."""
    sizes = Parallel(pipeline=2, data=4)
    counted = random_encoders(np.random.default_rng(0), ("vision",), sizes)[1]
    exchange = CollectiveTime(kind="all_to_all", ranks=4, latency_us=300, gb_per_s=2)
    measured = replace(counted, measured=(exchange,), gpus_per_node=8)
    bytes_ = np.array([0.0, 2e6]), np.array([0.0, 4e6])
    # Two pipelines of two ranks.
    assert measured.exchange_ms(2, *bytes_) == pytest.approx([0.3, 3.3], rel=1e-6)
    across = replace(measured, gpus_per_node=4)
    # Three messages, and the slower of 2 MB within a node and 4 MB that leave it.
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
    """Prevents a step that leaves out a group's busiest rank, a pass, a second forward, an exchange
    or the slowest pipeline, or takes them of another group; and of ranks that divide weights, an
    empty pass, or a rank that does not wait for others of its block."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, towers, parallel, steps=3, ways=ways)
        if seed == 0:  # no items at all
            columns = [
                problem.features.index(one.feature)
                for one in problem.any_encoders.encoders.values()
            ]
            problem.workload.features[:, columns] = 0
        units = len(unit_words(problem.model))
        cuts = np.sort(rng.choice(np.arange(1, units), parallel.pipeline - 1, replace=False))
        stages = stages_from_cuts(problem.model, cuts.tolist())
        beside = random_data_parallel(rng, problem)
        cost = problem.cost_beside(beside)
        simulated = simulate_run(cost, stages, problem.with_encoders(beside)).step_ms
        looped = [looped_steps_ms(problem, beside, stages, step)[0] for step in range(3)]
        np.testing.assert_allclose(simulated, looped, rtol=1e-9)


def test_parts_of_a_step_add_up():
    """Prevents time of encoders that is lost to no cause, or to several, and an ideal step that is
    not all work evenly on all devices."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        parallel = Parallel(pipeline=2, data=4)
        problem = random_problem(rng, "vision audio language", parallel, 2, ways=(1, 2, 8))
        beside = random_data_parallel(rng, problem)
        workload, cost = problem.with_encoders(beside), problem.cost_beside(beside)
        stages = stages_from_cuts(problem.model, [3])
        step_ms = float(simulate_run(cost, stages, workload).step_ms.mean())
        lost = lost_time(cost, [stages], workload, step_ms)
        named = lost.named()
        assert sum(named.values()) == pytest.approx(step_ms)
        assert named["rank imbalance"] >= 0
        looped = [looped_steps_ms(problem, beside, stages, step) for step in range(2)]
        uneven_ms = np.mean([all_ms - alone_ms for all_ms, alone_ms in looped])
        assert lost.rank_imbalance_ms == pytest.approx(uneven_ms)
        bare = replace(
            problem.cost,
            units={
                name: replace(
                    unit,
                    forward_ms=unit.forward_ms - unit.collective_ms[0],
                    backward_ms=unit.backward_ms - unit.collective_ms[1],
                )
                for name, unit in problem.cost.units.items()
            },
        )
        times = stage_times(bare, stages, workload.features)
        work_ms = times.forward_ms.sum() + times.backward_ms.sum()
        for step, block in product(range(2), range(4 // beside.pipelines)):
            counts, *_ = items_of_ranks(problem, beside, step, block)
            for name, one in problem.any_encoders.encoders.items():
                a_pass, kept = beside.items_per_pass[name], beside.kept_items[name]
                again = replace(one, again_ms=0 * one.again_ms, exchange=None)
                work_ms += sum(together_ms(again, [n], a_pass, kept).sum() for n in counts[name])
        devices, steps = 8, 2
        assert lost.ideal_ms == pytest.approx(work_ms / devices / steps)


def test_memory_is_what_a_loop_over_ranks_counts():
    """Prevents kept items, inputs, features or buffers that are left out, or are of a step that is
    not the heaviest."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, "vision audio language", Parallel(pipeline=2, data=4), 4)
        beside, cost = random_data_parallel(rng, problem), problem.any_encoders
        shares = ItemShares.of(problem.workload, problem.features, cost, beside)
        encoder_memory = memory_of_encoders(shares, cost, beside)
        held, rows, features = [], [], []
        for step, block in product(range(4), range(4 // beside.pipelines)):
            counts, *_ = items_of_ranks(problem, beside, step, block)
            for rank in range(beside.pipelines * 2):
                own = {name: items[rank] for name, items in counts.items()}
                held.append(0.0)
                for name, one in cost.encoders.items():
                    if one.is_trained:
                        kept = min(own[name], beside.kept_items[name])
                        passes = -(-kept // beside.items_per_pass[name])
                        held[-1] += float(one.kept_bytes @ (passes, kept))
                        held[-1] += one.input_bytes * (own[name] - kept)
                rows.append(sum(cost.encoders[n].feature_bytes * count for n, count in own.items()))
            load = problem.workload
            for number in range(beside.pipelines):
                picked = (load.step == step) & (load.dp_rank == block * beside.pipelines + number)
                features.append(
                    sum(
                        load.features[picked][:, problem.features.index(one.feature)].sum()
                        * one.feature_bytes
                        * (1 + one.is_trained)
                        for one in cost.encoders.values()
                    )
                )
        assert encoder_memory.features == pytest.approx(max(features))
        assert encoder_memory.buffers == (beside.pipelines * 2 - 1) * cost.peer_bytes
        # Of several encoders, the most of each is kept to be on one rank.
        assert encoder_memory.kept >= max(held) * (1 - 1e-9)
        assert encoder_memory.encoding >= 2 * max(rows)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("is_trained", [False, True])
def test_features_take_memory_as_they_arrive(is_trained: bool, tensor: int):
    """Prevents: a rank that embeds tokens out of memory as features of its pipeline arrive, where
    that is more than encoding takes."""
    (cost,) = random_encoders(
        np.random.default_rng(0), ("vision",), Parallel(tensor=tensor, pipeline=2, data=2)
    ).values()
    one = replace(
        cost.encoders["vision"], working_bytes=np.zeros((1, 2)), kept_bytes=np.zeros(2),
        feature_bytes=1000.0, input_bytes=7.0, is_trained=is_trained,
    )  # fmt: skip
    cost, ranks = replace(cost, encoders={"vision": one}), 4 * tensor
    beside = DataParallelEncoders(
        pipelines=2, items_per_pass={"vision": 3}, kept_items={"vision": 1}, item_ms={"vision": 1.0}
    )
    # Two steps: all images in one pipeline's packs, or a few in both.
    shares = ItemShares(
        steps=np.arange(2),
        pipelines=2,
        held={"vision": np.array([[6 * ranks, 0], [ranks, ranks]])},
        encoded={"vision": np.array([[6] * ranks, [2] * ranks])},
    )
    encoder_memory, arrived = memory_of_encoders(shares, cost, beside), 6 * ranks * 1000
    # Held to the step's end, with their gradients; as they came, and in order, and a rank's part.
    assert encoder_memory.features == (2 if is_trained else 1) * arrived
    on_their_way = 2 * arrived + (arrived / 2 if tensor == 2 else 0)
    assert encoder_memory.features + encoder_memory.arrival == pytest.approx(on_their_way)
    # In two orders, before there are any others.
    assert encoder_memory.encoding == 2 * 6 * 1000
    # Inputs of what is encoded again.
    assert encoder_memory.kept == (5 if is_trained else 0) * 7


def test_passes_that_run_again_have_the_room_of_those_that_were_kept():
    """Prevents: a plan that keeps fewer items than there is memory for, or that runs an encoder
    again beside what another one, whose backward comes later, has kept."""
    (cost,) = random_encoders(
        np.random.default_rng(0), ("vision", "audio"), Parallel(pipeline=1, data=1)
    ).values()
    sizes = {"vision": 100.0, "audio": 10.0}
    encoders = {
        name: replace(
            cost.encoders[name], working_bytes=np.zeros((1, 2)), feature_bytes=1.0,
            kept_bytes=np.array([0.0, size]), input_bytes=0.0, is_trained=True,
        )
        for name, size in sizes.items()
    }  # fmt: skip
    cost = replace(cost, encoders=encoders)
    one = dict.fromkeys(sizes, 1)
    items = {name: np.array([[9]]) for name in sizes}
    shares = ItemShares(steps=np.arange(1), pipelines=1, held=items, encoded=items)

    def encoding(vision: int, audio: int) -> float:
        beside = DataParallelEncoders(
            pipelines=1, items_per_pass={"vision": 4, "audio": 4}, item_ms=one,
            kept_items={"vision": vision, "audio": audio},
        )  # fmt: skip
        found = memory_of_encoders(shares, cost, beside)
        assert found.kept == 100 * vision + 10 * audio
        return found.kept + found.encoding

    rows = 18
    # Four of vision again, where nothing is kept of vision any more.
    assert encoding(0, 0) == 400 + rows
    assert encoding(3, 0) == 400 + rows
    assert encoding(3, 9) == 490 + rows
    # Four of audio again, after all that was kept; two orders of rows, before anything ran.
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
    """Prevents a choice that is not the fastest of those that fit: every size of groups and of
    blocks that divide weights, pass, kept items, split and set of recomputed layers is tried."""
    compared = 0
    for seed in range(2):
        rng = np.random.default_rng(seed)
        parallel = Parallel(pipeline=2, data=2)
        problem = random_problem(rng, towers, parallel, steps=1, most=2, ways=ways)
        if in_lockstep:
            cost = replace(problem.cost, runs_in_lockstep=True)
            problem = replace(problem, cost=cost, workload=problem.workload.in_groups_of(2))
        tried = list(all_choices(problem))
        # A cap that most choices do not fit, and some do.
        cap = sorted(need for need, _ in tried)[len(tried) // 50] * 1.0001
        best_ms = min(ms for need, ms in tried if fits_cap(need, cap))
        found = search_encoders(replace(problem, memory_cap_bytes=cap))
        assert found.search.step_ms == pytest.approx(best_ms, rel=1e-9)
        assert found.search.lower_bound_ms <= best_ms * (1 + 1e-9)
        compared += found.search.gap < 1e-9
    assert compared, "some are proven"


def all_choices(problem: PlacementProblem):
    """Peak in bytes and step of every choice with every split and every set of layers."""
    units = len(unit_words(problem.model))
    layers = [
        index for index, word in enumerate(unit_words(problem.model)) if word.layers is not None
    ]
    splits = []
    for (cut,) in combinations(range(1, units), 1):
        held = [sum(place < cut for place in layers), sum(place >= cut for place in layers)]
        if min(held) > 0:
            splits += [
                stages_from_cuts(problem.model, [cut], [[a], [b]])
                for a, b in product(range(held[0] + 1), range(held[1] + 1))
            ]
    for beside in every_choice(problem):
        workload = problem.with_encoders(beside)
        for stages in splits:
            memories = stage_memories(problem.cost, [stages], workload)
            peak = max(memory.peak_gib for memory in memories) * GIB
            cost = problem.cost_beside(beside)
            yield peak, float(simulate_run(cost, stages, workload).step_ms.mean())


def every_choice(problem: PlacementProblem):
    """Every choice that the search may make."""
    for pipelines in (1, 2):
        one = dict.fromkeys(problem.any_encoders.encoders, 1)
        for a_pass in (1, 2, 4, 8, 16):
            sizes = dict.fromkeys(one, a_pass)
            item_ms = {n: round(ms, 6) for n, ms in problem.any_encoders.item_ms(sizes).items()}
            keep_none = DataParallelEncoders(
                pipelines=pipelines, items_per_pass=sizes, kept_items=dict.fromkeys(one, 0),
                item_ms=item_ms,
            )  # fmt: skip
            shares = ItemShares.of(
                problem.workload, problem.features, problem.any_encoders, keep_none
            )
            if a_pass >= 2 * max(1, *shares.most().values()):
                break
            of_all = kept_choices(problem.any_encoders, shares.most()), problem.encoders
            for kept, sharded in product(*of_all):
                yield DataParallelEncoders(
                    pipelines=pipelines,
                    items_per_pass=sizes,
                    kept_items=kept,
                    item_ms=item_ms,
                    sharded=sharded,
                )


def test_a_whole_copy_costs_what_its_units_cost():
    """Prevents encoders that are divided by tensor-parallel ranks, or layers that are left out, in
    time, memory or state."""
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
    assert cost.weights_bytes == 2 * parameters
    assert cost.gradients_bytes == 4 * parameters
    assert cost.optimizer_bytes == pytest.approx(12 * parameters / 16)
    # Every trained parameter is exchanged: its weight in bf16, its gradient in fp32.
    assert cost.gather_ms == pytest.approx(cost.reduction_ms / 2)
    each = encoders_cost(model.with_tower("vision", layers=1), cluster, parallel, "bf16")
    fewer = (layers - 1) * units["vision_layer"].parameters / parameters
    for name in ("update_ms", "gather_ms", "reduction_ms"):
        assert getattr(each, name) == pytest.approx((1 - fewer) * getattr(cost, name)), name
    assert vision.feature_bytes == 256 * model.language.hidden_size * 2
    assert vision.input_bytes == 3 * 448 * 448 * 4


def test_frozen_encoders_keep_and_send_back_nothing():
    """Prevents gradients, second forwards or kept activations of what is not trained; a projector
    behind a frozen tower is trained and runs again with the tower."""
    model, cluster = load_model("internvl2-1b"), load_cluster("h100-80g")
    sizes = model, cluster, Parallel(pipeline=2, data=4), "bf16"
    none = encoders_cost(*sizes, ("vision", "projector")).encoders["vision"]
    assert not none.is_trained
    assert not none.backward_ms.any()
    assert not none.again_ms.any()
    assert not none.kept_bytes.any()
    tower = encoders_cost(*sizes, ("vision",)).encoders["vision"]
    everything = encoders_cost(*sizes).encoders["vision"]
    assert tower.is_trained
    np.testing.assert_allclose(tower.again_ms, everything.again_ms)
    assert 0 < tower.kept_bytes[1] < everything.kept_bytes[1] / 10


def data_parallel_request(**changes):
    return request(placement=EncoderPlacement.DATA_PARALLEL, **changes)


def test_plans_are_whole_and_within_memory():
    """Prevents a data-parallel plan whose stages hold encoders, or whose prediction leaves
    them out."""
    result = make_plan(data_parallel_request())
    plan = result.plan
    assert plan.beside is not None
    assert not any("vision" in span.name for stage in plan.stages for span in stage.units)
    assert plan.prediction is not None
    assert plan.prediction.beside is not None
    beside = plan.prediction.beside
    for stage in plan.prediction.stages:
        assert stage.memory.peak_gib <= 0.9 * JOB["cluster"].memory_gib
        assert stage.memory.weights_gib > beside.memory.weights_gib
        assert 0 <= stage.wait_fraction <= 1
    encoding_ms = beside.forward_ms + beside.exchange_ms + beside.backward_ms
    assert plan.prediction.step_ms > encoding_ms > 0
    assert sum(plan.prediction.lost.named().values()) == pytest.approx(plan.prediction.step_ms)


def test_what_does_not_go_together_is_refused():
    """Prevents a plan of a method that does not know of encoders' memory, or of a model without
    encoders."""
    with pytest.raises(UserError, match="leave both options out, or give --encoder pipeline"):
        data_parallel_request(method=PartitionMethod.PARAMETER, recompute=RecomputeRule.FULL)
    with pytest.raises(UserError, match="no encoder to be data-parallel"):
        job_spec(model=load_model("qwen2.5-32b"), placement=EncoderPlacement.DATA_PARALLEL)


def test_packs_of_any_model_are_balanced_by_the_pipeline_alone():
    """Prevents packs that are dealt by the time of encoders, which no pipeline spends."""
    data = request().data
    packs, lengths = data.schedule(job_spec())
    beside = job_spec(placement=EncoderPlacement.DATA_PARALLEL).load_ms(packs.packs, lengths)
    whole = job_spec().load_ms(packs.packs, lengths)
    assert (beside < whole)[packs.column("tiles") > 0].all()
