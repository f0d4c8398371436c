"""The weighted loss is of the global batch, however its samples are packed, ordered and spread."""

from dataclasses import replace

import pytest
import torch
from megatron.core import parallel_state
from ranks import run_ranks
from toy import OPTIONS, pack, stages_of, toy_model, toy_plan, toy_sample

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step

# (tiles, text tokens); two tokens of each carry no loss.
SAMPLES = [(0, 3), (1, 9), (0, 40), (2, 5), (1, 20), (0, 12)]
EXPONENTS = {"token": 0.0, "sample": 1.0, "sqrt": 0.5}


def gradients_of(links, plan, step, exponent):
    """Loss and unclipped gradients of one step, which lists each rank's packs of sample numbers."""
    trainer = build_trainer(plan, links, replace(OPTIONS, clip_grad=0.0), steps=10, seed=3)
    samples = [toy_sample(plan.model, *sizes, seed=i) for i, sizes in enumerate(SAMPLES)]
    own = step[parallel_state.get_data_parallel_rank()]
    batches = [pack([samples[i] for i in one], exponent) for one in own]
    result = train_step(trainer, MicroBatchStream.of(batches))
    buffers = {name: p.main_grad for name, p in trainer.stage.named_parameters()}
    if plan.parallel.data > 1:
        # Each rank of the distributed optimizer holds its part of the sum, at the start or the end.
        return result.loss, result.grad_norm, {}
    return result.loss, result.grad_norm, {name: g.clone() for name, g in buffers.items()}


@pytest.fixture(scope="module")
def alone():
    """Mean loss and its gradient of every sample by itself."""
    plan = toy_plan(toy_model(), stages_of(toy_model()))
    return [
        run_ranks(plan.parallel, gradients_of, plan, [[[i]]], 0.0)[0] for i in range(len(SAMPLES))
    ]


@pytest.mark.parametrize("weighting", EXPONENTS)
def test_gradient_is_the_weighted_mean_of_the_samples_own(alone, weighting):
    """Prevents: weights that count per pack, per rank or per micro-batch.

    Of n loss tokens, a sample weighs n, 1 or sqrt(n) as a whole.
    """
    exponent = EXPONENTS[weighting]
    shares = [(text_tokens - 2) ** (1 - exponent) for _, text_tokens in SAMPLES]
    total = sum(shares)
    loss = sum(share * one[0] for share, one in zip(shares, alone, strict=True)) / total
    gradients = {
        name: sum(share * one[2][name] for share, one in zip(shares, alone, strict=True)) / total
        for name in alone[0][2]
    }
    norm = float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
    plan = toy_plan(toy_model(), stages_of(toy_model()))
    for packs in ([[0, 1], [2], [3, 4, 5]], [[5, 3, 0, 1, 2, 4]], [[4], [2, 0], [1], [5, 3]]):
        [(got_loss, got_norm, got)] = run_ranks(
            plan.parallel, gradients_of, plan, [packs], exponent
        )
        assert got_loss == pytest.approx(loss, rel=1e-5)
        assert got_norm == pytest.approx(norm, rel=1e-4)
        for name, gradient in gradients.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    spread = toy_plan(toy_model(), stages_of(toy_model(), 4), data=2)
    ranks = [[[1], [0, 2, 4]], [[5], [3]]], [[[5, 4, 3, 2]], [[1], [0]]]
    for step in ranks:
        for got_loss, got_norm, _ in run_ranks(
            spread.parallel, gradients_of, spread, step, exponent
        ):
            assert got_loss == pytest.approx(loss, rel=1e-5)
            assert got_norm == pytest.approx(norm, rel=1e-4)
