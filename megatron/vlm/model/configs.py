"""Megatron-core's TransformerConfigs of the encoders and the language model.

Each has its own layout, so that layer numbers, and so checkpoint names, are those in the model for
any pipeline split.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.backend import fuses_weight_gradients, has_cuda
from megatron.vlm.model.tensor_parallel import padded_size
from omnibal.model.config import ModelConfig, Precision
from omnibal.model.encoders import ImagesEncoder
from omnibal.model.fp8 import FP8_FORMAT, TRAINED_FP8
from omnibal.model.parallel import Parallel
from omnibal.pipeline.stage_units import Stage


def parameter_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of weights and activations."""
    # Main weights are fp32 in the optimizer. FP8 quantises bf16 weights.
    return torch.float32 if precision == "fp32" else torch.bfloat16


def encoder_transformer_configs(
    model: ModelConfig, stage: Stage, parallel: Parallel, precision: Precision
) -> dict[str, TransformerConfig]:
    """Return each encoder's config on a stage, with heads padded to a multiple of TP."""
    # No sequence parallelism, as TP may not divide the positions of a tile (odd) or an image.
    configs = {}
    for name, tower in model.encoders.items():
        is_gated = isinstance(tower, ImagesEncoder) and tower.gated
        configs[name] = TransformerConfig(
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
            **_common_options(parallel, precision),
        )
    return configs


def language_transformer_config(
    model: ModelConfig, stage: Stage, parallel: Parallel, precision: Precision
) -> TransformerConfig:
    """Return the language model's config on a stage."""
    language, moe, of_kinds = model.language, dict[str, Any](), dict[str, Any]()
    if language.is_hybrid:
        # Core then stores each layer by its number.
        of_kinds = {"linear_attention_freq": [int(bool(kind.linear)) for kind in language.kinds]}
    experts = language.kinds[0].experts
    if experts is not None:
        moe = {
            "num_moe_experts": experts.experts,
            "moe_ffn_hidden_size": experts.ffn_hidden_size,
            "moe_router_topk": experts.experts_per_token,
            "moe_router_score_function": experts.score,
            # Softmax over the top k equals softmax over all experts, normalized over the top k.
            "moe_router_pre_softmax": not experts.normalized,
            "moe_router_topk_scaling_factor": experts.weight_factor,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "aux_loss" if experts.auxiliary_loss else "none",
            "moe_aux_loss_coeff": experts.auxiliary_loss,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": parallel.expert,
            "expert_tensor_parallel_size": 1,
            "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
            "moe_shared_expert_gate": experts.shared_gate,
        }
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
        attention_output_gate=language.output_gate,
        layernorm_zero_centered_gamma=language.zero_centered_norms,
        gated_linear_unit=True,
        sequence_parallel=parallel.sequence_parallel,
        activation_func=F.silu,
        pipeline_model_parallel_layout=_Layout(language.layers, stage.layers("language")),
        # Encoders run in bf16: FP8 needs multiples of 16 positions (`FP8_MULTIPLE`).
        **({"fp8": FP8_FORMAT, "fp8_recipe": TRAINED_FP8.recipe} if precision == "fp8" else {}),
        **moe,
        **of_kinds,
        **_common_options(parallel, precision),
    )


class _Layout(PipelineParallelLayerLayout):
    """Layout of all `layers` as one stage, with decoder layers numbered from `held.start`."""

    def __init__(self, layers: int, held: range) -> None:
        super().__init__([["embedding", *["decoder"] * layers, "loss"]], 1)
        self._held = held

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, *_: Any, **__: Any
    ) -> int:
        return self._held.start if layer_type is LayerType.decoder else 0


def _common_options(parallel: Parallel, precision: Precision) -> dict:
    dtype = parameter_dtype(precision)
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": precision != "fp32",
        "use_cpu_initialization": not has_cuda(),
        # `initialize_parameters` draws weights by name, the same for any layout.
        "perform_initialization": False,
        # Core then sums gradients over DP ranks, and the step divides them by the loss weights.
        "calculate_per_token_loss": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": fuses_weight_gradients(),
    }
