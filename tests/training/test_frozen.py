"""Frozen parts: they do not move, and trained parts train as before."""

import pytest
import torch
from pipeline_cases import STEPS, pipeline_plan
from ranks import run_ranks
from tensor_parallel_cases import as_one_process, compare_with_one_process, find_moved
from toy import OPTIONS, toy_batch

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.measure.profiler import peak_activation_bytes
from megatron.vlm.step.train import build_trainer, train_step

PREFIXES = {
    "vision": ("vision_embedding.", "vision."),
    "projector": ("projector.",),
    "language": ("embedding.", "language.", "head."),
}
FROZEN = [
    ("vision",), ("language",), ("projector",), ("vision", "language"),
    ("vision", "projector"),
]  # fmt: skip


def prefixes_of(frozen):
    return tuple(prefix for part in frozen for prefix in PREFIXES[part])


@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
@pytest.mark.parametrize("cut", [3, 8], ids=["vision", "language"])
def test_only_trained_parts_move(frozen, cut):
    """Prevents training a frozen part, or not training another part.

    Covers stages without trained parameters at either end.
    """
    plan = pipeline_plan(cut, frozen=frozen)
    for rank in run_ranks(plan.parallel, find_moved, plan):
        assert rank and rank == {name: not name.startswith(prefixes_of(frozen)) for name in rank}


def unclipped_gradients(frozen):
    """Return one process's gradients by name of the first step, before clipping."""
    results, gradients, _ = as_one_process(pipeline_plan(frozen=frozen), STEPS)
    clipped = max(1.0, results[0][1] / OPTIONS.clip_grad)
    return {name: gradient * clipped for name, gradient in gradients[0].items()}


@pytest.mark.parametrize("frozen", FROZEN[:3], ids="+".join)
def test_frozen_split_equals_frozen_single_process_and_the_gradients_of_the_whole(frozen):
    """Prevents gradients that stop at a frozen part and so miss trained parts before it."""
    for cut in (3, 8):
        plan = pipeline_plan(cut, vision=(0, 2), language=(1,), frozen=frozen)
        compare_with_one_process(plan, STEPS)
    found, whole = unclipped_gradients(frozen), unclipped_gradients(())
    assert found.keys() == {name for name in whole if not name.startswith(prefixes_of(frozen))}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-6)


def kept_bytes(links, plan):
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    batches = [toy_batch(plan.model, [(2, 9)], seed=i) for i in range(2)]
    return peak_activation_bytes(trainer, lambda: train_step(trainer, MicroBatchStream.of(batches)))


def test_frozen_first_stage_keeps_nothing_for_backward():
    """Prevents keeping activations of frozen layers without a backward."""
    for frozen, keeps in ((("vision", "projector"), False), ((), True)):
        plan = pipeline_plan(6, frozen=frozen)
        assert (run_ranks(plan.parallel, kept_bytes, plan)[0] > 0) == keeps
