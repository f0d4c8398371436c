"""Packs that data-parallel ranks share, on four processes, against one process that has them whole:
same loss, every gradient, same weights after."""

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
    """Prevents: a loss or gradient that depends on how many ranks share a pack or on how it is cut,
    and ranks that wait for each other for ever where their packs differ."""
    case = CASES[name]
    compare_with_one_process(plan_of(case), **options_of(case))


def test_bf16_shares_train_as_fp32():
    """Prevents: an exchange that mixes types, or loses a shared pack's gradient to rounding."""
    case = CASES["dp4"]
    plan = plan_of(case)
    fp32 = run(plan, **options_of(case))[0][0]
    plan = plan.model_copy(update={"precision": "bf16"})
    for results, _, weights in run(plan, **options_of(case)):
        for got, expected in zip(results, fp32, strict=True):
            assert got[:2] == pytest.approx(expected[:2], rel=5e-2)
        assert all(weight.dtype == torch.bfloat16 for weight in weights.values())


ZIGZAG = (2, CutRule.ZIGZAG, GATHER)


def layers_run_again(links, plan):
    """For every level, (language layers that a backward ran again, keys gathered) of one step."""
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
    """Prevents: memory that is not what was planned for a level, and an exchange more than needed:
    one in forward and one before backward, whether the layer is recomputed or not."""
    recompute = ({}, {"language": (1,)}, {"language": (0, 1)})
    plan = plan_of(Case((ZIGZAG, ZIGZAG), {"data": 2}, recompute=recompute))
    for found in run_ranks(plan.parallel, layers_run_again, plan):
        assert found == [([], 0), ([1], 4), ([0, 1], 4)]


def own_groups(links, plan):
    groups = create_context_groups(plan.parallel, [level.context for level in plan.levels])
    ranks = {size: dist.get_process_group_ranks(group) for size, group in groups.items()}
    data = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
    return ranks, data


def test_blocks_are_aligned_runs_of_data_parallel_ranks():
    """Prevents: packs shared with ranks of another tensor-parallel rank or another stage."""
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


def begun_exchanges(links, plan, case, number):
    """Exchanges of a step that this rank begins, in order, by the ranks that take part."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    buckets = type(trainer.models[0].bucket_groups[0])
    begun, start = [], buckets.start_grad_sync

    def noting(exchange):
        def noted(*arguments, group, **options):
            begun.append(("pack", *dist.get_process_group_ranks(group)))
            return exchange(*arguments, group=group, **options)

        return noted

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        setattr(dist, name, noting(getattr(dist, name)))
    buckets.start_grad_sync = lambda bucket: begun.append(("gradients",)) or start(bucket)
    rows = list(whole_packs(plan.model, number, STEPS[number], case.drop_path))
    trainer.zero_gradients()
    trainer.run_step(own_batches(plan, number, rows), PhaseClock())
    return begun


@pytest.mark.parametrize("number", [0, 1], ids=["full-rows", "short-rows"])
def test_all_ranks_begin_exchanges_in_one_order(small_buckets, number):
    """Prevents: a deadlock on devices that begin exchanges in the order of their launches, where
    one rank reduces gradients among the exchanges of a shared pack and another after them."""
    case = CASES["dp4"]
    plan = plan_of(case)
    order = TopologicalSorter()  # of all exchanges, of which every rank's own is a part
    for begun in run_ranks(plan.parallel, begun_exchanges, plan, case, number):
        nodes = [(group, begun[:place].count(group)) for place, group in enumerate(begun)]
        assert begun.count(("gradients",)) > 3 and len(set(begun)) > 1
        for earlier, later in pairwise(nodes):
            order.add(later, earlier)
        if number == 0:  # where all rows are full, reductions begin before the last exchange
            last = max(place for place, group in enumerate(begun) if group[0] == "pack")
            assert begun[-1] == ("gradients",) and begun.index(("gradients",)) < last
    order.prepare()
