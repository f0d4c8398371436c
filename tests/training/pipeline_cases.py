"""Training of a split pipeline, held against one process."""

import pytest
import torch
from megatron.core import parallel_state
from ranks import run_ranks
from toy import OPTIONS, stages_of, toy_batch, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.model.initialize import global_parameter_name
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.model.parallel import Parallel

# Packs of different shapes; one has no image, one is a single sample, one only images' worth.
STEPS = [
    [[(2, 9), (1, 14)], [(0, 12), (0, 7)], [(3, 5)], [(1, 8), (0, 6), (2, 11)]],
    [[(0, 20)], [(1, 6), (4, 10)], [(2, 8)]],
]


def named_parameters(trainer):
    """The parameters of all chunks of a stage, by global name."""
    return {
        global_parameter_name(stage, name): parameter
        for stage in trainer.chunks
        for name, parameter in stage.named_parameters()
    }


def train_steps(links, plan, steps, data_size=1, new_samples=True):
    """Losses, grad norms, each step's gradients and the final weights, by global name."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    results, gradients = [], []
    for number, step in enumerate(steps):
        seed = 100 * number if new_samples else 0
        batches = [toy_batch(plan.model, pack, seed=seed + i) for i, pack in enumerate(step)]
        own = batches[parallel_state.get_data_parallel_rank() :: data_size]
        before = {name: p.detach().clone() for name, p in named_parameters(trainer).items()}
        result = train_step(trainer, MicroBatchStream.of(own))
        trainer.wait_for_weights()
        results.append((result.loss, result.grad_norm, result.loss_tokens))
        own = named_parameters(trainer).items()
        gradients.append({name: parameter.main_grad.clone() for name, parameter in own})
        assert any(not torch.equal(before[name], parameter) for name, parameter in own)
    weights = {name: p.detach().clone() for name, p in named_parameters(trainer).items()}
    return results, gradients, weights


def single_process(model, steps, *options):
    plan = toy_plan(model, stages_of(model))
    return run_ranks(Parallel(pipeline=1), train_steps, plan, steps, *options)[0]


def assert_same_results(ranks, results):
    """Loss, gradient norm and loss tokens of every step, on every rank."""
    for rank in ranks:
        for got, expected in zip(rank[0], results, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)


def assert_same_weights(ranks, weights):
    """Every rank's own weights, and together all of them."""
    assert {name for rank in ranks for name in rank[2]} == weights.keys()
    for rank in ranks:
        for name, weight in rank[2].items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5, msg=name)


def assert_same_training(ranks, reference):
    results, gradients, weights = reference
    merged_gradients = [
        {name: value for rank in ranks for name, value in rank[1][step].items()}
        for step in range(len(gradients))
    ]
    assert_same_results(ranks, results)
    for got, expected in zip(merged_gradients, gradients, strict=True):
        assert got.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert_same_weights(ranks, weights)
