"""What the optimizer's options do, against their formulas."""

import math
from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from toy import OPTIONS, stages_of, toy_batch, toy_model, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step


def run_steps(links, plan, options, steps, total):
    """Rates of the steps, and the weights after them."""
    trainer = build_trainer(plan, links, options, steps=total, seed=3)
    before = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
    batch = toy_batch(plan.model, [(1, 9), (0, 6)], seed=0)
    rates = [train_step(trainer, MicroBatchStream.of([batch])).learning_rate for _ in range(steps)]
    after = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
    return rates, before, after


def trained(options, steps=1, total=10):
    model = toy_model()
    plan = toy_plan(model, stages_of(model))
    return run_ranks(plan.parallel, run_steps, plan, options, steps, total)[0]


def expected_rate(style, step, total, warmup):
    """Of step `step`, counted from 1: up over `warmup`, then down over one more than are left."""
    if step <= warmup:
        return OPTIONS.lr * step / warmup
    share = (step - warmup) / (total + 1 - warmup)
    fall = {
        "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share)), "constant": 1.0,
    }[style]  # fmt: skip
    return OPTIONS.min_lr + fall * (OPTIONS.lr - OPTIONS.min_lr)


@pytest.mark.parametrize("style", ["linear", "cosine", "constant"])
def test_rate_warms_up_and_decays(style):
    """Prevents: a schedule over other steps than the run's, or a first or last one that is lost."""
    options = replace(OPTIONS, lr_decay_style=style, lr_warmup_fraction=0.2)
    rates, _, _ = trained(options, steps=10)
    assert rates == pytest.approx([expected_rate(style, step, 10, 2) for step in range(1, 11)])


def test_weight_decay_spares_vectors():
    """Prevents: norms, biases, layer scales and the class token shrunk towards 0.

    AdamW (Loshchilov and Hutter 2019, algorithm 2) takes rate * decay of a weight, apart from its
    gradient: two runs that differ in the decay differ by just that.
    """
    decay = 0.3
    options = replace(OPTIONS, lr_decay_style="constant", lr_warmup_fraction=0.0, adam_eps=1e-3)
    _, before, without = trained(replace(options, weight_decay=0.0))
    _, _, decayed = trained(replace(options, weight_decay=decay))
    vectors = {name for name, weight in before.items() if weight.dim() == 1}
    assert {"vision_embedding.class_token", "language.final_layernorm.weight"} < vectors
    for name, weight in before.items():
        taken = 0.0 if name in vectors else options.lr * decay
        torch.testing.assert_close(
            decayed[name], without[name] - taken * weight, rtol=1e-5, atol=1e-7, msg=name
        )


def test_clipping_bounds_the_step():
    """Prevents: a norm that is reported and not applied. SGD-like: a large epsilon of Adam."""
    options = replace(
        OPTIONS, lr_decay_style="constant", lr_warmup_fraction=0.0, weight_decay=0.0, adam_eps=1e4
    )
    moved = []
    for clip in (0.0, 0.05):
        _, before, after = trained(replace(options, clip_grad=clip, lr=100.0, min_lr=0.0))
        moved.append({name: before[name] - after[name] for name in before})
    norms = [math.sqrt(sum(float(m.square().sum()) for m in one.values())) for one in moved]
    # An update is the rate times the gradient over epsilon.
    assert norms[1] == pytest.approx(100.0 * 0.05 / 1e4, rel=1e-3)
    assert norms[0] > 2 * norms[1]
