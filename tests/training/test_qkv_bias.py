"""Qwen2's bias on q, k and v: where the model has it, and zero at first."""

import pytest
from ranks import run_ranks
from toy import stages_of, toy_model, toy_plan

from megatron.vlm.model.initialize import initialize_parameters
from megatron.vlm.model.stage import build_stage
from omnibal.model.parallel import Parallel

pytestmark = pytest.mark.quick


def language_biases(links, qkv_bias):
    """Shapes of the language model's biases by name; they begin as zeros."""
    model = toy_model().with_tower("language", qkv_bias=qkv_bias)
    stage = build_stage(toy_plan(model, stages_of(model)), 0)
    initialize_parameters(stage, seed=5)
    named = stage.language.named_parameters()
    biases = {name: parameter for name, parameter in named if name.endswith("bias")}
    assert not any(bias.any() for bias in biases.values())
    return {name: tuple(bias.shape) for name, bias in biases.items()}


def test_language_qkv_bias():
    """Prevents Qwen2's biases from being dropped, from reaching the other linears, or random."""
    language = toy_model().language
    width = (language.heads + 2 * language.kv_heads) * (language.hidden_size // language.heads)
    names = [f"layers.{i}.self_attention.linear_qkv.bias" for i in range(language.layers)]
    for qkv_bias, expected in ((True, dict.fromkeys(names, (width,))), (False, {})):
        assert run_ranks(Parallel(pipeline=1), language_biases, qkv_bias) == [expected]
