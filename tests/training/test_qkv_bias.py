"""Qwen2's bias on q, k and v: present where the model has it, absent elsewhere, and used."""

import pytest
import torch
from ranks import run_ranks
from toy import pack, stages_of, toy_model, toy_plan, toy_sample

from megatron.vlm.model.initialize import initialize_parameters
from megatron.vlm.model.stage import build_stage
from omnibal.model.parallel import Parallel

pytestmark = pytest.mark.quick

SAMPLES = [(2, 9), (0, 12), (1, 6)]
ONE = Parallel(pipeline=1)


def model_with(qkv_bias):
    model = toy_model()
    return model.model_copy(
        update={"language": model.language.model_copy(update={"qkv_bias": qkv_bias})}
    )


def biases_and_losses(links, model):
    """Language biases by name; the loss as initialized, with zero and with drawn biases."""
    stage = build_stage(toy_plan(model, stages_of(model)), 0)
    initialize_parameters(stage, seed=5)
    batch = pack([toy_sample(model, *counts, seed=i) for i, counts in enumerate(SAMPLES)])
    named = stage.language.named_parameters()
    biases = {name: parameter for name, parameter in named if name.endswith("bias")}
    losses = [loss_of(stage, batch)]
    for scale in (0.0, 0.5):
        generator = torch.Generator().manual_seed(1)
        for bias in biases.values():
            bias.data = scale * torch.randn(bias.shape, generator=generator)
        losses.append(loss_of(stage, batch))
    return {name: tuple(bias.shape) for name, bias in biases.items()}, losses


def loss_of(stage, batch):
    stage.set_input_tensor(None)
    return stage(batch).item()


def test_language_qkv_bias():
    """Prevents Qwen2's biases from being dropped, or from reaching the other linears."""
    model = model_with(qkv_bias=True)
    [(shapes, (initial, zero, drawn))] = run_ranks(ONE, biases_and_losses, model)
    [(other_shapes, other_losses)] = run_ranks(ONE, biases_and_losses, model_with(qkv_bias=False))
    language = model.language
    width = (language.heads + 2 * language.kv_heads) * (language.hidden_size // language.heads)
    names = [f"layers.{i}.self_attention.linear_qkv.bias" for i in range(language.layers)]
    assert shapes == dict.fromkeys(names, (width,))
    assert other_shapes == {}
    assert initial == zero == other_losses[0]
    assert abs(drawn - zero) > 1e-3 * zero
