"""Megatron-core's transformer configurations of all towers, made from a model description.

Each tower of a part of the model gets its own configuration with its own layout, so that core
numbers layers (and names them in checkpoints) over the whole model wherever the part begins, and
whichever stage holds it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.backend import fuses_weight_gradients, has_cuda
from megatron.vlm.model.tensor_parallel import padded_size
from omnibal.model.config import LanguageConfig, ModelConfig, Precision
from omnibal.model.encoders import EncoderLayers, ImagesEncoder
from omnibal.model.fp8 import FP8_FORMAT, TRAINED_FP8
from omnibal.model.parallel import Parallel
from omnibal.pipeline.stage import Stage


def parameter_dtype(precision: Precision) -> torch.dtype:
    """The type of weights and activations; bf16 has fp32 master weights in the optimizer."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


def encoder_transformer_configs(
    model: ModelConfig, stage: Stage, parallel: Parallel, precision: Precision
) -> dict[str, TransformerConfig]:
    """The layers of every encoder, of which a part of the model begins where its stage says.

    Heads are padded to a multiple of the tensor-parallel size. Sequences are never divided: a
    tile's positions are an odd number, and an image's any multiple of a cell's.
    """
    return {
        name: _encoder_config(name, tower, stage, parallel, precision)
        for name, tower in model.encoders.items()
    }


def _encoder_config(
    name: str,
    tower: EncoderLayers,
    stage: Stage,
    parallel: Parallel,
    precision: Precision,
) -> TransformerConfig:
    is_gated = isinstance(tower, ImagesEncoder) and tower.gated
    return TransformerConfig(
        num_layers=tower.layers,
        hidden_size=tower.hidden_size,
        num_attention_heads=padded_size(tower.heads, parallel.tensor),
        kv_channels=tower.head_width,
        ffn_hidden_size=tower.ffn_hidden_size,
        normalization=tower.normalization,
        layernorm_epsilon=tower.norm_eps,
        qk_layernorm=tower.qk_norm,
        add_bias_linear=True,
        gated_linear_unit=is_gated,
        activation_func=F.silu if is_gated else F.gelu,
        pipeline_model_parallel_layout=_Layout(tower.layers, stage.layers(name)),
        **_common(parallel, precision),
    )


def language_transformer_config(
    model: ModelConfig, stage: Stage, parallel: Parallel, precision: Precision
) -> TransformerConfig:
    """The language model's layers, of which a part of the model begins where its stage says."""
    language = model.language
    return TransformerConfig(
        num_layers=language.layers,
        hidden_size=language.hidden_size,
        num_attention_heads=language.heads,
        num_query_groups=language.kv_heads,
        kv_channels=language.head_width,
        ffn_hidden_size=language.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=language.norm_eps,
        add_bias_linear=False,
        add_qkv_bias=language.qkv_bias,
        qk_layernorm=language.qk_norm,
        gated_linear_unit=True,
        sequence_parallel=parallel.sequence_parallel,
        activation_func=F.silu,
        pipeline_model_parallel_layout=_Layout(language.layers, stage.layers("language")),
        **_expert_settings(language, parallel),
        # Encoders do not multiply in FP8: an item's positions are an odd number, which no FP8
        # product takes.
        **({"fp8": FP8_FORMAT, "fp8_recipe": TRAINED_FP8.recipe} if precision == "fp8" else {}),
        **_common(parallel, precision),
    )


def _expert_settings(language: LanguageConfig, parallel: Parallel) -> dict[str, Any]:
    """What core needs to know of a mixture of experts in every layer."""
    experts = language.kinds[0].experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.experts,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.experts_per_token,
        "moe_router_score_function": experts.score,
        # Core's softmax over the chosen experts alone is the one over all, normalized.
        "moe_router_pre_softmax": not experts.normalized,
        "moe_router_topk_scaling_factor": experts.weight_factor,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if experts.auxiliary_loss else "none",
        "moe_aux_loss_coeff": experts.auxiliary_loss,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
    }


class _Layout(PipelineParallelLayerLayout):
    """Where the layers of a tower that a part of the model holds are in the tower.

    Core would ask which rank it runs on, and knows no placement of parts but its own.
    """

    def __init__(self, layers: int, held: range) -> None:
        super().__init__([["embedding", *["decoder"] * layers, "loss"]], 1)
        self._held = held

    def get_layer_offset(self, *_: Any, **__: Any) -> int:
        """Layers of the tower before those held (core's name)."""
        return self._held.start


def _common(parallel: Parallel, precision: Precision) -> dict:
    dtype = parameter_dtype(precision)
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": precision != "fp32",
        "use_cpu_initialization": not has_cuda(),
        # Weights are drawn by `initialize_parameters`, by name, so that no layout changes them.
        "perform_initialization": False,
        # Gradients are summed over data-parallel ranks; the step divides by the loss tokens.
        "calculate_per_token_loss": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": fuses_weight_gradients(),
        # "full" routes training through PlannedBlock, which decides layer by layer.
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 0,
    }
