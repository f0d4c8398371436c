"""Entries of a language model in config.json, tested with Transformers 4.57.3 and 5.23."""

from typing import Any

from omnibal.families.text import SCALES_LATER, SCALES_WAVES, LanguageType, released_coefficient
from omnibal.model.config import LanguageConfig
from omnibal.model.layers import ExpertsConfig

_MAX_POSITIONS = 32_768
"""Maximum length of most released InternVL2, 2.5 and 3 models, for a ModelConfig without a limit.
Serving tools use it as context length; unscaled RoPE does not depend on it."""


def text_entries(language: LanguageConfig, kind: LanguageType) -> dict[str, Any]:
    """Sizes and options of a language model, without RoPE."""
    states_head_size = language.head_size is not None or kind in ("qwen3", "qwen3_moe")
    head_size = {"head_dim": language.head_width} if states_head_size else {}
    experts = language.kinds[0].experts
    of_experts = {} if experts is None else _experts(experts, language.layers)
    return (
        head_size
        | of_experts
        | {
            "model_type": kind,
            "hidden_act": "silu",
            "hidden_size": language.hidden_size,
            "intermediate_size": language.ffn_hidden_size,
            "max_position_embeddings": language.max_positions or _MAX_POSITIONS,
            "num_attention_heads": language.heads,
            "num_hidden_layers": language.layers,
            "num_key_value_heads": language.kv_heads,
            "rms_norm_eps": language.norm_eps,
            "tie_word_embeddings": language.tied_head,
            "vocab_size": language.vocab_size,
        }
    )


def rope_entries(language: LanguageConfig) -> dict[str, Any]:
    """RoPE's base, scaling and sections under the names of Transformers 4 and of 5."""
    base, scaling = {"rope_theta": float(language.rope_base)}, rope_scaling(language)
    if scaling is None:
        return base | {"rope_parameters": base | {"rope_type": "default"}}
    return base | {"rope_parameters": base | scaling, "rope_scaling": scaling}


def rope_scaling(language: LanguageConfig) -> dict[str, Any] | None:
    """RoPE scaling or sections. None if neither is used."""
    scaling, sections = language.rope_scaling, language.rope_sections
    if sections is not None:
        interleaved = {"mrope_interleaved": True} if sections.interleaved else {}
        return interleaved | {
            "rope_type": "default",
            "mrope_section": [sections.time, sections.rows, sections.columns],
        }
    if scaling is not None:
        return {
            "rope_type": SCALES_WAVES,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    if language.rope_factor is not None:
        return {"rope_type": SCALES_LATER, "factor": language.rope_factor}
    return None


def kind_of(language: LanguageConfig) -> LanguageType:
    """Kind of language model that Transformers has for these layers."""
    if language.qk_norm:
        return "qwen3" if language.kinds[0].experts is None else "qwen3_moe"
    return "qwen2" if language.qkv_bias else "llama"


def dtype_entries(dtype: str) -> dict[str, Any]:
    """Tensor type under the names of Transformers 4 and of 5."""
    return {"dtype": dtype, "torch_dtype": dtype}


def _experts(experts: ExpertsConfig, layers: int) -> dict[str, Any]:
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": experts.ffn_hidden_size,
        "norm_topk_prob": experts.normalized,
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.experts_per_token,
        "output_router_logits": experts.auxiliary_loss > 0,
        "router_aux_loss_coef": released_coefficient(
            experts.auxiliary_loss, experts.experts_per_token, layers
        ),
    }
