"""Context-parallel packs on four processes against one: equal losses, gradients and weights."""

from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from ranks import run_ranks
from shared_training_cases import (
    CASES,
    GATHER,
    STEPS,
    Case,
    options_of,
    own_batches,
    plan_of,
    whole_packs,
)
from tensor_parallel_cases import OPTIONS, compare_with_one_process, run
from toy import share_of, toy_batch

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.model import shared_attention
from megatron.vlm.model.groups import create_context_groups
from megatron.vlm.step.clock import PhaseClock
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.model.levels import CutRule


@pytest.mark.parametrize("name", CASES)
def test_shared_packs_train_as_one_process(name):
    """Prevents losses or gradients that depend on a pack's context-parallel size or cut, and
    deadlocks between ranks with different packs."""
    case = CASES[name]
    compare_with_one_process(plan_of(case), **options_of(case))


def test_bf16_shares_train_as_fp32():
    """Prevents exchanges that mix types or lose a shared pack's gradient to rounding."""
    case = CASES["dp4"]
    plan = plan_of(case)
    fp32 = run(plan, **options_of(case))[0][0]
    plan = plan.model_copy(update={"precision": "bf16"})
    for results, _, weights in run(plan, **options_of(case)):
        for got, expected in zip(results, fp32, strict=True):
            assert got[:2] == pytest.approx(expected[:2], rel=5e-2)
        assert all(weight.dtype == torch.bfloat16 for weight in weights.values())


ZIGZAG = (2, CutRule.ZIGZAG, GATHER)


def recomputed_layers(links, plan):
    """Return (language layers recomputed in backward, key gathers) of a step, per level."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    seen, gathers, gather = [], [], shared_attention.gather_rows
    shared_attention.gather_rows = lambda *given: gathers.append(1) or gather(*given)
    for layer in trainer.stage.language.layers:
        layer.register_forward_hook(lambda layer, *_: seen.append(layer.layer_number - 1))
    found = []
    for number, level in enumerate(plan.levels):
        whole = replace(toy_batch(plan.model, [(1, 20)], seed=1), level=number)
        own = share_of(whole, level, parallel_state.get_data_parallel_rank())
        train_step(trainer, MicroBatchStream.of([own]))
        found.append((sorted(seen[len(trainer.stage.language.layers) :]), len(gathers)))
        seen.clear()
        gathers.clear()
    return found


def test_each_level_recomputes_its_own_layers():
    """Prevents recomputation other than planned for a level, and extra gathers: a layer needs one
    in forward and one before backward, recomputed or not."""
    recompute = ({}, {"language": (1,)}, {"language": (0, 1)})
    plan = plan_of(Case((ZIGZAG, ZIGZAG), {"data": 2}, recompute=recompute))
    for found in run_ranks(plan.parallel, recomputed_layers, plan):
        assert found == [([], 0), ([1], 4), ([0, 1], 4)]


def own_groups(links, plan):
    groups = create_context_groups(plan.parallel, [level.context for level in plan.levels])
    ranks = {size: dist.get_process_group_ranks(group) for size, group in groups.items()}
    data = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
    return ranks, data


def test_blocks_are_aligned_runs_of_data_parallel_ranks():
    """Prevents context-parallel groups that span tensor-parallel ranks or stages."""
    of_two = (ZIGZAG, ZIGZAG)
    for case in (
        Case(((4, CutRule.ZIGZAG, GATHER), ZIGZAG), {"data": 4}),
        Case(of_two, {"tensor": 2, "data": 2}),
        Case(of_two, {"data": 2}, cuts=(4,)),
    ):
        plan = plan_of(case)
        sizes = {level.context for level in plan.levels} - {1}
        for rank, (ranks, data) in enumerate(run_ranks(plan.parallel, own_groups, plan)):
            place = plan.parallel.place(rank)["data"]
            assert ranks == {size: data[place // size * size :][:size] for size in sizes}


def list_exchanges(links, plan, case, number):
    """Return the exchanges of a step in the order this rank starts them, by their ranks."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    buckets = type(trainer.models[0].bucket_groups[0])
    begun, start = [], buckets.start_grad_sync

    def with_note(exchange):
        def note_and_exchange(*arguments, group, **options):
            begun.append(("pack", *dist.get_process_group_ranks(group)))
            return exchange(*arguments, group=group, **options)

        return note_and_exchange

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        setattr(dist, name, with_note(getattr(dist, name)))
    buckets.start_grad_sync = lambda bucket: begun.append(("gradients",)) or start(bucket)
    rows = list(whole_packs(plan.model, number, STEPS[number], case.drop_path))
    trainer.zero_gradients()
    trainer.run_step(own_batches(plan, number, rows), PhaseClock())
    return begun


@pytest.mark.parametrize("number", [0, 1], ids=["full-rows", "short-rows"])
def test_all_ranks_begin_exchanges_in_one_order(small_buckets, number):
    """Prevents a deadlock on devices that run exchanges in launch order, if ranks reduce gradients
    at different points among the exchanges of a shared pack."""
    case = CASES["dp4"]
    plan = plan_of(case)
    order = TopologicalSorter()  # merges the orders of all ranks
    for begun in run_ranks(plan.parallel, list_exchanges, plan, case, number):
        nodes = [(group, begun[:place].count(group)) for place, group in enumerate(begun)]
        assert begun.count(("gradients",)) > 3 and len(set(begun)) > 1
        for earlier, later in pairwise(nodes):
            order.add(later, earlier)
        if number == 0:  # with full rows, reductions start before the last exchange
            last = max(place for place, group in enumerate(begun) if group[0] == "pack")
            assert begun[-1] == ("gradients",) and begun.index(("gradients",)) < last
    order.prepare()
