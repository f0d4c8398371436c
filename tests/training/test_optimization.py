"""Optimizer options and loss weighting, against their formulas."""

import math
from dataclasses import replace

import pytest
import torch
from megatron.core import parallel_state
from pipeline_cases import pipeline_plan
from ranks import run_ranks
from toy import OPTIONS, pack, toy_batch, toy_sample

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.inputs.data import LossWeighting
from megatron.vlm.step.train import build_trainer, train_step


def run_steps(links, plan, options, steps, total):
    """Return the steps' learning rates, and the weights before and after."""
    trainer = build_trainer(plan, links, options, steps=total, seed=3)
    before = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
    batch = toy_batch(plan.model, [(1, 9), (0, 6)], seed=0)
    rates = [train_step(trainer, MicroBatchStream.of([batch])).learning_rate for _ in range(steps)]
    return rates, before, {name: p.detach() for name, p in trainer.stage.named_parameters()}


def train_one_rank(steps=1, **changes):
    plain = {"lr_decay_style": "constant", "lr_warmup_fraction": 0.0}
    options = replace(OPTIONS, **plain | changes)
    [result] = run_ranks(pipeline_plan().parallel, run_steps, pipeline_plan(), options, steps, 10)
    return result


def expected_rate(style, step, total, warmup):
    """Return the rate of step `step` (from 1): linear warm-up, then decay."""
    if step <= warmup:
        return OPTIONS.lr * step / warmup
    share = (step - warmup) / (total + 1 - warmup)
    fall = {
        "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share)), "constant": 1.0,
    }[style]  # fmt: skip
    return OPTIONS.min_lr + fall * (OPTIONS.lr - OPTIONS.min_lr)


@pytest.mark.parametrize("style", ["linear", "cosine", "constant"])
def test_rate_warms_up_and_decays(style):
    """Prevents a schedule over another number of steps, or without its first or last step."""
    rates, _, _ = train_one_rank(steps=10, lr_decay_style=style, lr_warmup_fraction=0.2)
    assert rates == pytest.approx([expected_rate(style, step, 10, 2) for step in range(1, 11)])


def test_weight_decay_spares_vectors():
    """Prevents weight decay of norms, biases, layer scales and the class token.

    AdamW (Loshchilov and Hutter 2019, algorithm 2) subtracts rate * decay * weight, independent of
    the gradient. Two runs that differ in decay differ by this term.
    """
    decay = 0.3
    (_, before, without), (_, _, decayed) = (
        train_one_rank(adam_eps=1e-3, weight_decay=one) for one in (0.0, decay)
    )
    vectors = {name for name, weight in before.items() if weight.dim() == 1}
    assert {"vision_embedding.class_token", "language.final_layernorm.weight"} < vectors
    for name, weight in before.items():
        taken = 0.0 if name in vectors else OPTIONS.lr * decay
        torch.testing.assert_close(
            decayed[name], without[name] - taken * weight, rtol=1e-5, atol=1e-7, msg=name
        )


def test_clipping_bounds_the_step():
    """Prevents a reported norm that is not applied. A large epsilon makes Adam act like SGD."""
    norms = []
    for clip in (0.0, 0.05):
        sgd = {"adam_eps": 1e4, "weight_decay": 0.0, "lr": 100.0, "min_lr": 0.0}
        _, before, after = train_one_rank(clip_grad=clip, **sgd)
        squares = [float((before[name] - after[name]).square().sum()) for name in before]
        norms.append(math.sqrt(sum(squares)))
    # An update is the rate times the gradient over epsilon.
    assert norms[1] == pytest.approx(100.0 * 0.05 / 1e4, rel=1e-3)
    assert norms[0] > 2 * norms[1]


# (tiles, text tokens); two tokens per sample carry no loss.
SAMPLES = [(0, 3), (1, 9), (0, 40), (2, 5), (1, 20), (0, 12)]
LOSS_TOKENS = [text_tokens - 2 for _, text_tokens in SAMPLES]


def gradients_of(links, plan, step, weighting):
    """Return loss, norm and gradients of a step: sample numbers by rank and pack."""
    options = replace(OPTIONS, clip_grad=0.0, loss_weighting=weighting)
    trainer = build_trainer(plan, links, options, steps=10, seed=3)
    samples = [toy_sample(plan.model, *sizes, seed=i) for i, sizes in enumerate(SAMPLES)]
    own = step[parallel_state.get_data_parallel_rank()]
    batches = [pack([samples[i] for i in one], weighting) for one in own]
    result = train_step(trainer, MicroBatchStream.of(batches))
    # With several ranks, each holds a partial sum.
    own = trainer.stage.named_parameters() if plan.parallel.data == 1 else ()
    return result.loss, result.grad_norm, {name: p.main_grad.clone() for name, p in own}


@pytest.fixture(scope="module")
def sample_results():
    """Loss, norm and gradients of each sample trained by itself."""
    plan = pipeline_plan()
    return [
        run_ranks(plan.parallel, gradients_of, plan, [[[i]]], LossWeighting.TOKEN)[0]
        for i in range(len(SAMPLES))
    ]


def sample_weights(weighting, packs):
    """Return the weights of the samples' mean losses, as defined in the literature."""
    total, roots = sum(LOSS_TOKENS), [n**0.5 for n in LOSS_TOKENS]
    held = {i: sum(LOSS_TOKENS[j] for j in one) for one in packs for i in one}
    of_tokens = [n / total for n in LOSS_TOKENS]  # the mean over all tokens
    return {
        "token": of_tokens,
        "sum": of_tokens,
        "sample": [1 / len(SAMPLES)] * len(SAMPLES),  # the mean over samples
        "sqrt": [root / sum(roots) for root in roots],  # a sample's n tokens weigh sqrt(n) in total
        # Mean over packs of the mean over a pack's tokens.
        "micro-batch": [n / held[i] / len(packs) for i, n in enumerate(LOSS_TOKENS)],
    }[weighting]


def weighted_mean(sample_results, weighting, packs):
    """Return loss, gradient norm and gradients by the formula."""
    shares = sample_weights(weighting, packs)
    loss = sum(share * one[0] for share, one in zip(shares, sample_results, strict=True))
    factor = sum(LOSS_TOKENS) if weighting == "sum" else 1  # gradients of the sum over tokens
    gradients = {
        name: factor
        * sum(share * one[2][name] for share, one in zip(shares, sample_results, strict=True))
        for name in sample_results[0][2]
    }
    norm = math.sqrt(sum(float(one.double().square().sum()) for one in gradients.values()))
    return loss, norm, gradients


@pytest.mark.parametrize("weighting", LossWeighting)
def test_gradient_is_the_weighted_mean_of_the_samples_own(sample_results, weighting):
    """Prevents weights that depend on ranks or packs, and a divisor other than their sum."""
    # The two ranks have different numbers of samples and of packs.
    two_ranks = [[[5, 4, 3]], [[1, 2], [0]]]
    for step in ([[[5, 3, 0, 1, 2, 4]]], [[[4], [2, 0], [1], [5, 3]]], two_ranks):
        cuts = (4,) if len(step) > 1 else ()
        plan = pipeline_plan(*cuts, data=len(step))
        loss, norm, gradients = weighted_mean(
            sample_results, weighting, [one for rank in step for one in rank]
        )
        for got_loss, got_norm, got in run_ranks(
            plan.parallel, gradients_of, plan, step, weighting
        ):
            assert got_loss == pytest.approx(loss, rel=1e-5)
            assert got_norm == pytest.approx(norm, rel=1e-4)
            expected, atol = gradients if len(step) == 1 else {}, 1e-6 * max(1, norm)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=atol)


def test_published_names_are_understood():
    """Prevents names of HBP's table 10 that are refused or select another normalization."""
    names = {"Ave-Token": "token", "sample-mean": "sample", "Token-Mean": "micro-batch"}
    for name, value in {**names, "Sum": "sum", "sqrt": "sqrt"}.items():
        assert LossWeighting(name).value == value
    with pytest.raises(ValueError, match="mean"):
        LossWeighting("mean")
