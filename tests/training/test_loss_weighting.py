"""The weighted loss is the mean that its name says, over the whole global batch."""

from dataclasses import replace

import pytest
import torch
from megatron.core import parallel_state
from ranks import run_ranks
from toy import OPTIONS, pack, stages_of, toy_model, toy_plan, toy_sample

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.inputs.data import LossWeighting
from megatron.vlm.step.train import build_trainer, train_step

# (tiles, text tokens); two tokens of each carry no loss.
SAMPLES = [(0, 3), (1, 9), (0, 40), (2, 5), (1, 20), (0, 12)]
LOSS_TOKENS = [text_tokens - 2 for _, text_tokens in SAMPLES]


def gradients_of(links, plan, step, weighting):
    """Loss and unclipped gradients of one step, which lists each rank's packs of sample numbers."""
    options = replace(OPTIONS, clip_grad=0.0, loss_weighting=weighting)
    trainer = build_trainer(plan, links, options, steps=10, seed=3)
    samples = [toy_sample(plan.model, *sizes, seed=i) for i, sizes in enumerate(SAMPLES)]
    own = step[parallel_state.get_data_parallel_rank()]
    batches = [pack([samples[i] for i in one], weighting) for one in own]
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
        run_ranks(plan.parallel, gradients_of, plan, [[[i]]], LossWeighting.TOKEN)[0]
        for i in range(len(SAMPLES))
    ]


def shares_of(weighting, packs):
    """What the samples' own means are multiplied by in the loss, as the literature writes it."""
    total = sum(LOSS_TOKENS)
    match weighting:
        case "token" | "sum":  # the mean over all tokens
            return [n / total for n in LOSS_TOKENS]
        case "sample":  # the mean over samples
            return [1 / len(SAMPLES)] * len(SAMPLES)
        case "sqrt":  # a sample weighs sqrt(n) as a whole
            return [n**0.5 / sum(m**0.5 for m in LOSS_TOKENS) for n in LOSS_TOKENS]
        case "micro-batch":  # the mean over packs of each one's mean over tokens
            held = {i: sum(LOSS_TOKENS[j] for j in one) for one in packs for i in one}
            return [n / held[i] / len(packs) for i, n in enumerate(LOSS_TOKENS)]
    raise AssertionError(weighting)


def mean_of(alone, weighting, packs):
    """Loss, gradient norm and gradients by the formula."""
    shares = shares_of(weighting, packs)
    loss = sum(share * one[0] for share, one in zip(shares, alone, strict=True))
    factor = sum(LOSS_TOKENS) if weighting == "sum" else 1  # gradients of the sum over tokens
    gradients = {
        name: factor * sum(share * one[2][name] for share, one in zip(shares, alone, strict=True))
        for name in alone[0][2]
    }
    norm = float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
    return loss, norm, gradients


@pytest.mark.parametrize("weighting", LossWeighting)
def test_gradient_is_the_weighted_mean_of_the_samples_own(alone, weighting):
    """Prevents: weights that count per rank, or per pack where they should not, and a divisor that
    is not the weights' sum."""
    plan = toy_plan(toy_model(), stages_of(toy_model()))
    for packs in ([[5, 3, 0, 1, 2, 4]], [[4], [2, 0], [1], [5, 3]]):
        loss, norm, gradients = mean_of(alone, weighting, packs)
        [(got_loss, got_norm, got)] = run_ranks(
            plan.parallel, gradients_of, plan, [packs], weighting
        )
        assert got_loss == pytest.approx(loss, rel=1e-5)
        assert got_norm == pytest.approx(norm, rel=1e-4)
        for name, gradient in gradients.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6 * max(1, norm))
    spread = toy_plan(toy_model(), stages_of(toy_model(), 4), data=2)
    step = [[[5, 4, 3]], [[1, 2], [0]]]  # another number of samples, and of packs, on each rank
    loss, norm, _ = mean_of(alone, weighting, [pack for rank in step for pack in rank])
    for got_loss, got_norm, _ in run_ranks(spread.parallel, gradients_of, spread, step, weighting):
        assert got_loss == pytest.approx(loss, rel=1e-5)
        assert got_norm == pytest.approx(norm, rel=1e-4)


def test_published_names_are_understood():
    """Prevents: a name of HBP's table 10 that is refused, or means another normalization."""
    names = {"Ave-Token": "token", "sample-mean": "sample", "Token-Mean": "micro-batch"}
    for name, value in {**names, "Sum": "sum", "sqrt": "sqrt"}.items():
        assert LossWeighting(name).value == value
    with pytest.raises(ValueError, match="mean"):
        LossWeighting("mean")
