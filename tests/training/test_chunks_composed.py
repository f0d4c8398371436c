"""Stages of several chunks with everything else that a plan may have, held against one process."""

import pytest
import torch
from chunk_cases import run_by_rule, whole_back_and_forth, with_chunks
from mixture_cases import plan_of as mixture_plan
from ranks import run_ranks
from tensor_parallel_cases import (
    MODELS,
    OPTIONS,
    STEPS,
    TIED,
    batches_of,
    compare_resumed,
    compare_with_one_process,
)
from toy import stages_of, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.model.initialize import global_parameter_name
from megatron.vlm.step.clock import PhaseClock
from megatron.vlm.step.train import build_trainer
from omnibal.model.adapters import AdapterConfig

PLAIN = MODELS["300M-like"]
SOME = {"vision": (1,), "language": (0,)}
IN_PARTS = {"tensor": 2, "sequence_parallel": True}


def plan_of(*cuts, model=PLAIN, name="interleaved", frozen=(), recompute=None, **sizes):
    """Two chunks a stage. Units: 0 vision embed, 1-2 vision layers, 3 projector, 4 language embed,
    5-6 language layers, 7 head."""
    plan = toy_plan(model, stages_of(model, *cuts, **(recompute or {})), **sizes)
    return with_chunks(plan, 2, name).model_copy(update={"frozen": frozen})


PLANS = {
    # A step of every plan has no images at all.
    "tensor": plan_of(2, 4, 6, **IN_PARTS, recompute=SOME),
    "frozen-vision": plan_of(2, 4, 6, data=2, frozen=("vision",)),
    "frozen-language": plan_of(3, 5, 7, frozen=("language",)),
    "divided": plan_of(2, 4, 6, data=2, sharded=2, recompute=SOME),
    "back-and-forth": plan_of(2, 4, 6, name="zb-v", data=2),
    "tied-two-stages-tensor": plan_of(2, 4, 6, model=TIED, **IN_PARTS),
    "tied-one-stage-divided": plan_of(2, 5, 6, model=TIED, data=2, sharded=2),
    "tied-one-stage-back-and-forth": plan_of(5, 6, 7, model=TIED, name="zb-v", data=2),
    "tied-one-stage-frozen": plan_of(2, 5, 6, model=TIED, frozen=("language",)),
    "tied-one-part": plan_of(1, 3, 4, model=TIED),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_same_training_as_one_process(monkeypatch, plan):
    """Prevents: parts of a stage that sum, divide or recompute what is another's, and copies of a
    tied matrix in two parts of one stage that drift apart or count twice."""
    run_by_rule(monkeypatch, "zb-v", whole_back_and_forth)
    compare_with_one_process(plan)


ADAPTERS = AdapterConfig(rank=4, alpha=8, parts=("language",))
IN_TWO_PARTS = {
    "adapters": plan_of(2, 4, 6, name="zb-v", recompute=SOME, **IN_PARTS),
    "adapters-in-one-part": plan_of(2, 5, 6, name="zb-v", data=2),
    "tied": plan_of(2, 5, 6, model=TIED, name="zb-v", recompute=SOME, **IN_PARTS),
    "frozen": plan_of(2, 4, 6, name="zb-v", frozen=("vision",), recompute=SOME, **IN_PARTS),
}


@pytest.mark.parametrize("name", IN_TWO_PARTS)
def test_chunks_with_backwards_in_two_parts_equal_one_process(name):
    """Prevents: products for weights that are left out, doubled or summed over the wrong ranks
    where a stage has adapters, both ends of a tied matrix or frozen parts in several chunks."""
    plan = IN_TWO_PARTS[name]
    adapters = ADAPTERS if name.startswith("adapters") else None
    compare_with_one_process(plan.model_copy(update={"adapters": adapters}))


def test_experts_equal_one_process():
    """Prevents: experts of one chunk whose tokens another chunk of the group waits for."""
    plan = with_chunks(mixture_plan(3, 5, 6, data=2, expert=2, recompute=(0, 2)), 2)
    compare_with_one_process(plan, rel=2e-5)


def test_many_buckets_are_summed_in_one_order(small_buckets):
    """Prevents: a bucket that is reduced before it is whole, and weights that a forward of another
    chunk does not wait for."""
    compare_with_one_process(plan_of(2, 4, 6, data=2))


def test_checkpoints_resume_under_another_schedule(tmp_path, monkeypatch):
    """Prevents: a checkpoint that tells which chunks a stage had, or loses those of one."""
    run_by_rule(monkeypatch, "zb-v", whole_back_and_forth)
    plans = [
        plan_of(2, 5, 6, model=TIED, data=2),
        toy_plan(TIED, stages_of(TIED, 5), data=2, sharded=2),
        plan_of(1, 4, 6, model=TIED, name="zb-v", data=2),
    ]
    compare_resumed(tmp_path, *((plan, 1) for plan in plans))


def held_out_losses(links, plan):
    """Losses of packs without a backward, and who has them."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    packs = [batch for number, packs in enumerate(STEPS) for batch in
             batches_of(plan.model, number, packs)]  # fmt: skip
    with trainer.evaluating():
        losses = trainer.run_forward(MicroBatchStream.of(packs))
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_held_out_losses_equal_one_process(name):
    """Prevents: answers and losses of micro-batches in another order, or from the wrong stage."""
    plan = plan_of(2, 4, 6, name=name)
    whole = toy_plan(PLAIN, stages_of(PLAIN))
    [expected] = run_ranks(whole.parallel, held_out_losses, whole)
    ranks = run_ranks(plan.parallel, held_out_losses, plan)
    last = {"interleaved": 1, "zb-v": 0}[name]
    assert ranks[last] == pytest.approx(expected, rel=1e-5)
    assert ranks[1 - last] == []


def unclipped_step(links, plan):
    """Gradients of a step by name, as they were summed."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    trainer.zero_gradients()
    batches = list(batches_of(plan.model, 0, STEPS[0]))
    clock = PhaseClock()
    losses = trainer.run_micro_batches(MicroBatchStream.of(batches), clock)
    found = {}
    for stage in trainer.chunks:
        found |= {
            global_parameter_name(stage, name): p.main_grad.clone()
            for name, p in stage.named_parameters()
        }
    return losses, found


def test_sums_are_those_of_one_chunk_a_stage_bit_by_bit():
    """Prevents: gradients summed over micro-batches in another order than the lists'."""
    chunks = plan_of(2, 4, 6)
    plain = toy_plan(PLAIN, stages_of(PLAIN, 2, 4, 6))
    ranks, expected = (run_ranks(plan.parallel, unclipped_step, plan) for plan in (chunks, plain))
    found, of_plain = (
        {k: v for _, each in run for k, v in each.items()} for run in (ranks, expected)
    )
    assert found.keys() == of_plain.keys()
    assert all(torch.equal(found[name], value) for name, value in of_plain.items())
    assert all(map(torch.equal, ranks[-1][0], expected[-1][0]))
