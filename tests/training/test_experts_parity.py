"""A language model with experts compared with Transformers' Qwen3-MoE: loss and all gradients."""

from dataclasses import replace

import pytest
import torch
from mixture_cases import plan_of
from qwen3_moe_cases import answer_losses, model_of, rename_tensors, transformers_model
from ranks import run_ranks
from tensor_parallel_cases import by_name, gather_gradients
from toy import OPTIONS, pack, toy_sample
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.families.text import auxiliary_loss, released_coefficient
from omnibal.model.config import ModelConfig


def samples_of(model: ModelConfig):
    return [toy_sample(model, 0, tokens, seed=i) for i, tokens in enumerate((12, 7, 16))]


def our_loss(links, model: ModelConfig):
    """Return the loss, weights and gradients by name."""
    unclipped = replace(OPTIONS, clip_grad=0.0)
    trainer = build_trainer(plan_of(model=model), links, unclipped, steps=2, seed=4)
    weights = by_name(trainer.stage, lambda parameter: parameter)
    result = train_step(trainer, MicroBatchStream.of([pack(samples_of(model))]))
    gather_gradients(trainer.models[0])
    return result.loss, weights, by_name(trainer.stage, lambda parameter: parameter.main_grad)


def reference(links, model: ModelConfig, tensors: dict[str, torch.Tensor]):
    """Return loss and gradients of Transformers' model with these weights, sample by sample."""
    theirs = transformers_model(model, tensors)
    loss = torch.cat([answer_losses(theirs, sample)[0] for sample in samples_of(model)]).mean()
    loss.backward()
    return loss.item(), {name: value.grad for name, value in theirs.named_parameters()}


@pytest.mark.parametrize("normalized", [True, False])
def test_equals_transformers(normalized):
    """Prevents expert weights, their order, gate and value, or norms that differ from Qwen3's."""
    model = model_of(normalized)
    [(loss, weights, gradients)] = run_ranks(plan_of().parallel, our_loss, model)
    own = rename_tensors(model, weights)
    [(expected, expected_gradients)] = run_ranks(plan_of().parallel, reference, model, own)
    assert loss == pytest.approx(expected, rel=1e-5)
    found = rename_tensors(model, gradients)
    assert found.keys() == expected_gradients.keys()
    for name, value in expected_gradients.items():
        atol = 1e-4 * value.abs().max().item()
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=atol, msg=name)


@pytest.mark.in_own_process
def test_auxiliary_loss_is_transformers_of_all_layers():
    """Prevents an imported auxiliary coefficient that acts more strongly than the released value.

    All layers route alike here. Otherwise Transformers' loss averages routing over layers.
    """
    layers, experts, chosen = 12, 6, 2
    generator = torch.Generator().manual_seed(1)
    logits_SE = torch.randn(64, experts, generator=generator, requires_grad=True)
    theirs = load_balancing_loss_func((logits_SE,) * layers, experts, chosen)
    scores_SE = logits_SE.softmax(-1)
    shares_E = torch.bincount(scores_SE.topk(chosen).indices.flatten(), minlength=experts) / 128
    # The trainer's loss of every layer (test_auxiliary_loss_is_switch_transformers).
    our_loss = layers * experts * (shares_E * scores_SE.mean(0)).sum()
    coefficient = auxiliary_loss(0.001, chosen, layers)
    assert released_coefficient(coefficient, chosen, layers) == 0.001
    pair = (0.001 * theirs, coefficient * our_loss)
    torch.testing.assert_close(*pair)
    torch.testing.assert_close(*(torch.autograd.grad(one, logits_SE)[0] for one in pair))
