"""Weights, gradients and optimizer state sharded over data-parallel ranks, on four processes
against one: equal losses, gradients and trained weights."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import shared_training_cases as shared
import torch
import torch.distributed as dist
from mixture_cases import plan_of as mixture_plan
from ranks import run_ranks
from tensor_parallel_cases import (
    MODELS,
    OPTIONS,
    TIED,
    compare_with_one_process,
    run,
    unshard_parameters,
)
from toy import cut_plan

from megatron.vlm.model.groups import create_shard_groups
from megatron.vlm.model.initialize import first_values, initialize_parameters
from megatron.vlm.model.stage import build_stage
from megatron.vlm.step.train import build_trainer
from omnibal.model.parallel import copies_group, state_group

IN_PARTS = {"tensor": 2, "sequence_parallel": True}
plan_of = partial(cut_plan, MODELS["300M-like"])
SOME = {"vision": (1,), "language": (0,)}
# Each step has unequal packs per rank, and packs without images.
PLANS = {
    "full": plan_of(data=4, sharded=4, recompute=SOME),
    "hybrid-tied-frozen": cut_plan(
        TIED, data=4, sharded=2, frozen=("vision",), recompute={"vision": (0,), "language": (1,)}
    ),
    "full-language-frozen": plan_of(data=4, sharded=4, frozen=("language",), recompute=SOME),
    "tensor": cut_plan(MODELS["6B-like"], **IN_PARTS, data=2, sharded=2, recompute=SOME),
    # Other micro-batches run between a forward and its backward. Units: vision embed, two layers,
    # projector, language embed, two layers, head.
    "pipeline": plan_of(3, data=2, sharded=2, recompute=SOME),
    "pipeline-in-vision-frozen": plan_of(
        2, data=2, sharded=2, frozen=("vision",), recompute={"language": (0, 1)}
    ),
    "pipeline-language-frozen": plan_of(6, data=2, sharded=2, frozen=("language",)),
    "pipeline-tensor-tied": cut_plan(TIED, 5, **IN_PARTS, data=2, sharded=2),
    "pipeline-of-four": plan_of(2, 4, 6, data=2, sharded=2),
}
# Units: vision embed, two layers, projector, language embed, three layers, head.
MIXTURES = {
    "experts-2-full": mixture_plan(data=4, expert=2, sharded=4),
    "experts-4-hybrid": mixture_plan(data=4, expert=4, sharded=2, recompute=(0, 2)),
    "experts-whole": mixture_plan(data=4, sharded=2),
    "tensor-experts-4": mixture_plan(**IN_PARTS, data=2, expert=4, sharded=2),
    "tensor-experts-2": mixture_plan(**IN_PARTS, data=2, expert=2, sharded=2, recompute=(1,)),
    "pipeline-experts-2": mixture_plan(6, data=2, expert=2, sharded=2),
    "pipeline-experts-4-hybrid": mixture_plan(5, data=4, expert=4, sharded=2, recompute=(0, 2)),
    "pipeline-tensor-experts-4": mixture_plan(7, **IN_PARTS, data=2, expert=4, sharded=2),
}
TRAINED = (
    "experts-2-full experts-4-hybrid tensor-experts-4 pipeline-experts-2 pipeline-tensor-experts-4"
).split()
SHARED = {"dp4": 4, "dp4-wide": 2, "tp2-sp-dp2": 2, "dp2-text": 2, "dp4-experts": 4}
"""Cases of context-parallel packs, and shard group sizes."""


@pytest.mark.parametrize("name", [*PLANS, *TRAINED])
def test_same_training_as_one_process(name):
    """Prevents weights, gradients or norms that depend on the sharding, expert shards mixed across
    expert ranks, and deadlocks if a rank has no pack."""
    compare_with_one_process((PLANS | MIXTURES)[name], rel=1e-5 if name in PLANS else 2e-5)


@pytest.mark.parametrize(("name", "sharded"), SHARED.items())
def test_shared_packs_train_as_one_process(name, sharded):
    """Prevents ranks that order context-parallel and weight exchanges differently."""
    case = shared.CASES[name]
    plan = shared.plan_of(replace(case, sizes=case.sizes | {"sharded": sharded}))
    compare_with_one_process(plan, **shared.options_of(case))


def test_bf16_trains_as_whole_weights_do():
    """Prevents bf16 training that loses fp32 sums or updates under some sharding."""
    losses = {}
    for sharded in (1, 2, 4):
        plan = plan_of(data=4, sharded=sharded).model_copy(update={"precision": "bf16"})
        ranks = run(plan)
        [losses[sharded]] = {tuple(loss for loss, _, _ in results) for results, _, _ in ranks}
    # fp32 sums of equal micro-batches, in different orders.
    assert losses[2] == pytest.approx(losses[4], rel=1e-3)
    assert losses[1] == pytest.approx(losses[4], rel=1e-2)


def first_weights(links, plan):
    """Assert that sharded initial weights equal a full stage's; return their number."""
    stage = build_trainer(plan, links, OPTIONS, steps=10, seed=3).stage
    drawn = unshard_parameters({flat: flat.own_Q for flat in stage.sharded.flats})
    whole = build_stage(plan, links.rank)
    initialize_parameters(whole, first_values(whole, seed=3))
    for (name, expected), parameter in zip(
        whole.named_parameters(), stage.parameters(), strict=True
    ):
        assert torch.equal(drawn[parameter], expected), name
        assert not name.endswith("bias") or not expected.any(), name
    return len(drawn)


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        (PLANS["hybrid-tied-frozen"], "fp32"),
        (PLANS["tensor"], "bf16"),
        (MIXTURES["experts-2-full"], "bf16"),
    ],
    ids=["fp32", "tensor", "experts"],
)
def test_first_weights_are_those_of_a_whole_stage(plan, precision):
    """Prevents initial weights other than a full stage's, lost vectors, and random biases."""
    plan = plan.model_copy(update={"precision": precision})
    assert min(run_ranks(plan.parallel, first_weights, plan)) > 20


def shard_group_ranks(links, plan):
    """Return ranks of the shard and replica groups of dense and expert weights."""
    dense, experts = create_shard_groups(plan.parallel)
    groups = (dense.shards, dense.copies, experts.shards, experts.copies)
    return [dist.get_process_group_ranks(group) for group in groups]


@pytest.mark.parametrize("plan", MIXTURES.values(), ids=MIXTURES)
def test_ranks_divide_what_they_are_planned_to(plan):
    """Prevents expert shards over fewer ranks or other links than planned."""
    parallel = plan.parallel
    planned = [
        group_of(parallel, of_experts=of_experts)
        for of_experts in (False, True)
        for group_of in (state_group, copies_group)
    ]
    for rank, found in enumerate(run_ranks(parallel, shard_group_ranks, plan)):
        for ranks, group in zip(found, planned, strict=True):
            assert rank in ranks and len(ranks) == group.ranks
            assert {*np.diff(ranks)} <= {group.stride}
