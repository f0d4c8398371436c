"""Frozen parts: the rest of the model trains as if nothing had changed, and nothing else moves."""

from dataclasses import replace

import pytest
import torch
from pipeline_cases import STEPS
from ranks import run_ranks
from toy import OPTIONS, stages_of, toy_batch, toy_model, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.measure.profiler import peak_activation_bytes
from megatron.vlm.step.train import build_trainer, train_step

PREFIXES = {
    "vision": ("vision_embedding.", "vision."),
    "projector": ("projector.",),
    "language": ("embedding.", "language.", "head."),
}


def plan_with(cuts, frozen, data=1, **recompute):
    model = toy_model()
    plan = toy_plan(model, stages_of(model, *cuts, **recompute), data=data)
    return plan.model_copy(update={"frozen": frozen})


def frozen_weights(links, plan):
    """Whether each of this stage's parameters moved in one step."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    before = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
    batch = toy_batch(plan.model, [(2, 9), (1, 14)], seed=0)
    train_step(trainer, MicroBatchStream.of([batch]))
    return {name: not torch.equal(before[name], p) for name, p in trainer.stage.named_parameters()}


FROZEN = [
    ("vision",), ("language",), ("projector",), ("vision", "language"),
    ("vision", "projector"),
]  # fmt: skip


@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
@pytest.mark.parametrize("cuts", [(3,), (8,)], ids=["vision", "language"])
def test_only_trained_parts_move(frozen, cuts):
    """Prevents: a part that was to stay as it is and is trained, or one that silently is not.

    Covers stages that hold no trained parameter at all, on either end.
    """
    plan = plan_with(cuts, frozen)
    still = tuple(prefix for part in frozen for prefix in PREFIXES[part])
    for rank in run_ranks(plan.parallel, frozen_weights, plan):
        assert rank and rank == {name: not name.startswith(still) for name in rank}


def train_trained(links, plan, steps):
    """Losses and norms of all steps, and the first one's gradients, unclipped, by name."""
    options = replace(OPTIONS, clip_grad=0.0)
    trainer = build_trainer(plan, links, options, steps=10, seed=3)
    results, gradients = [], {}
    for number, step in enumerate(steps):
        batches = [
            toy_batch(plan.model, pack, seed=100 * number + i) for i, pack in enumerate(step)
        ]
        result = train_step(trainer, MicroBatchStream.of(batches))
        results.append((result.loss, result.grad_norm))
        if number == 0:
            own = trainer.stage.named_parameters()
            gradients = {n: p.main_grad.clone() for n, p in own if p.requires_grad}
    return results, gradients


@pytest.mark.parametrize("frozen", FROZEN[:3], ids="+".join)
def test_frozen_split_equals_frozen_single_process_and_the_gradients_of_the_whole(frozen):
    """Prevents: gradients that stop at a frozen part which trained ones come before."""
    recompute = {"vision": (0, 2), "language": (1,)}
    whole = plan_with((), frozen)
    [(results, gradients)] = run_ranks(whole.parallel, train_trained, whole, STEPS)
    for cuts in ((3,), (8,)):
        plan = plan_with(cuts, frozen, **recompute)
        for rank_results, _ in run_ranks(plan.parallel, train_trained, plan, STEPS):
            for got, expected in zip(rank_results, results, strict=True):
                assert got == pytest.approx(expected, rel=1e-5)
    free = plan_with((), ())
    [(_, all_gradients)] = run_ranks(free.parallel, train_trained, free, STEPS[:1])
    still = tuple(prefix for part in frozen for prefix in PREFIXES[part])
    assert gradients.keys() == {name for name in all_gradients if not name.startswith(still)}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, all_gradients[name], rtol=1e-4, atol=1e-6)


def kept_activations(links, plan):
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    batches = [toy_batch(plan.model, [(2, 9)], seed=i) for i in range(2)]

    def step():
        train_step(trainer, MicroBatchStream.of(batches))

    return peak_activation_bytes(trainer, step)


def test_frozen_first_stage_keeps_nothing_for_backward():
    """Prevents: activations of layers that have no backward."""
    frozen = plan_with((6,), ("vision", "projector"))
    assert run_ranks(frozen.parallel, kept_activations, frozen)[0] == 0
    trained = plan_with((6,), ())
    assert run_ranks(trained.parallel, kept_activations, trained)[0] > 0
