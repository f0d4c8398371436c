"""Qwen3-MoE at toy size, and Transformers' model with equal weights."""

import torch
import torch.nn.functional as F
from toy import ToySample, toy_text_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from omnibal.model.config import ModelConfig
from omnibal.model.layer_kinds import ExpertsConfig, LayerRun


def model_of(normalized: bool, auxiliary_loss: float = 0.0) -> ModelConfig:
    """Return a toy Qwen3-MoE: q/k norms, wide heads, no biases."""
    experts = ExpertsConfig(
        experts=6, experts_per_token=2, ffn_hidden_size=12, normalized=normalized,
        auxiliary_loss=auxiliary_loss,
    )  # fmt: skip
    run = LayerRun(layers=1, experts=experts)
    return toy_text_model(runs=(run,), qk_norm=True, head_size=10, qkv_bias=False)


def transformers_model(model: ModelConfig, tensors: dict[str, torch.Tensor]) -> Qwen3MoeForCausalLM:
    """Return Transformers' model with these weights."""
    language = model.language
    experts = language.kinds[0].experts
    config = Qwen3MoeConfig(
        vocab_size=language.vocab_size, hidden_size=language.hidden_size,
        num_hidden_layers=language.layers, num_attention_heads=language.heads,
        num_key_value_heads=language.kv_heads, head_dim=language.head_width,
        rms_norm_eps=language.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": language.rope_base},
        moe_intermediate_size=experts.ffn_hidden_size, num_experts=experts.experts,
        num_experts_per_tok=experts.experts_per_token, norm_topk_prob=experts.normalized,
    )  # fmt: skip
    theirs = Qwen3MoeForCausalLM(config)
    theirs.load_state_dict(tensors)
    return theirs


def answer_losses(theirs: Qwen3MoeForCausalLM, sample: ToySample, **options: bool):
    """Return losses of a sample's answers by Transformers' model, and the model's output."""
    ids = torch.tensor(sample.ids)
    asked = torch.tensor(sample.loss_mask).nonzero().squeeze(1) - 1
    output = theirs.model(input_ids=ids.unsqueeze(0), **options)
    logits_LW = theirs.lm_head(output.last_hidden_state)[0, asked]
    return F.cross_entropy(logits_LW, ids[asked + 1], reduction="none"), output


def rename_tensors(model: ModelConfig, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this project's tensors with Transformers' names, with q, k and v split."""
    language = model.language
    groups, per_group = language.kv_heads, language.heads // language.kv_heads
    found = {
        "model.embed_tokens.weight": own["embedding.word_embeddings.weight"][: language.vocab_size],
        "model.norm.weight": own["language.final_layernorm.weight"],
        "lm_head.weight": own["head.weight"][: language.vocab_size],
    }
    names = {
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.linear_fc2.weight": "mlp.experts.down_proj",
    }
    for layer in range(language.layers):
        here, there = f"language.layers.{layer}", f"model.layers.{layer}"
        found |= {f"{there}.{new}": own[f"{here}.{old}"] for old, new in names.items()}
        qkv = own[f"{here}.self_attention.linear_qkv.weight"]
        heads = qkv.unflatten(0, (groups, per_group + 2, language.head_width))
        parts = heads.split([per_group, 1, 1], dim=1)
        for name, part in zip("qkv", parts, strict=True):
            found[f"{there}.self_attn.{name}_proj.weight"] = part.flatten(0, 2)
    return found
