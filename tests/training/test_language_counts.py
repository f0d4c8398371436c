"""Counts of language layers compared with Transformers: parameters, operations, kept bytes.

Shapes: T tokens of one sample.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from omnibal.cost.analytic import analytic_cost, kept_lines, unit_flops
from omnibal.cost.attention_costs import CHUNK
from omnibal.cost.setting import CostSetting
from omnibal.model.config import LanguageConfig, ModelConfig, load_cluster
from omnibal.model.layer_kinds import ExpertsConfig, LatentAttention, LayerRun, LinearAttention
from omnibal.model.parallel import Parallel
from omnibal.model.units import feature_names, unit_names

CLUSTER, ONE = load_cluster("h100-80g"), Parallel(pipeline=1)
T, VOCABULARY = 128, 256
HIDDEN = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY, "intermediate_size": 320, "head_dim": 48, "pad_token_id": 0,
}  # fmt: skip
OURS: dict[str, Any] = {
    "layers": 2, "hidden_size": 128, "heads": 4, "kv_heads": 2, "vocab_size": VOCABULARY,
    "ffn_hidden_size": 320, "head_size": 48,
}  # fmt: skip
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
OF_DEEPSEEK = {
    "kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, **ROUTED,
}  # fmt: skip
OF_RULE = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 24,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
EXPERTS = ExpertsConfig(experts=8, experts_per_token=2, ffn_hidden_size=96)
LATENT = LatentAttention(
    query_rank=64, key_value_rank=48, head_size=32, rotary_head_size=16, value_head_size=24
)
LINEAR = LinearAttention(key_heads=2, value_heads=4, key_head_size=32, value_head_size=24)


SHARING = EXPERTS.model_copy(update={"shared_ffn_hidden_size": 96})
GATED = EXPERTS.model_copy(update={"shared_ffn_hidden_size": 64, "shared_gate": True})


@dataclass(frozen=True)
class Family:
    """A small model of a family, configured for Transformers and for this project."""

    name: str
    theirs: dict[str, Any]
    ours: dict[str, Any]

    @cached_property
    def model(self) -> ModelConfig:
        return ModelConfig(name=self.name, language=LanguageConfig(**OURS | self.ours))

    def module(self, layers: int, attention: str = "eager", **more: Any) -> torch.nn.Module:
        # Families with images have a nested text configuration.
        has_text = hasattr(transformers, f"{self.name}TextConfig")
        config_class = getattr(transformers, f"{self.name}{'Text' if has_text else ''}Config")
        config = config_class(**HIDDEN | self.theirs | {"num_hidden_layers": layers} | more)
        config._attn_implementation = attention
        config._experts_implementation = "eager"  # counters miss grouped kernels
        torch.manual_seed(0)
        heads = {"GPT2": transformers.GPT2LMHeadModel}
        made = heads.get(self.name) or getattr(transformers, f"{self.name}ForCausalLM")
        model: torch.nn.Module = made(config)
        return model


MIXED = (LayerRun(layers=1, latent=LATENT), LayerRun(layers=1, latent=LATENT, experts=SHARING))
DIRECT = LATENT.model_copy(update={"query_rank": None})
HYBRID = (LayerRun(layers=3, linear=LINEAR, experts=GATED), LayerRun(layers=1, experts=GATED))
FAMILIES = (
    Family("Qwen3", {"tie_word_embeddings": True}, {"qk_norm": True, "tied_head": True}),
    Family(
        "Qwen3Moe",
        {"num_experts": 8, **ROUTED},
        {"qk_norm": True, "runs": (LayerRun(layers=1, experts=EXPERTS),)},
    ),
    Family(
        "DeepseekV2",
        {**OF_DEEPSEEK, "num_key_value_heads": 4, "q_lora_rank": None, "first_k_dense_replace": 2,
         "head_dim": 16},
        {"runs": (LayerRun(layers=1, latent=DIRECT),)},
    ),
    Family(
        "DeepseekV3",
        {**OF_DEEPSEEK, "num_key_value_heads": 4, "q_lora_rank": 64, "first_k_dense_replace": 1,
         "head_dim": 16},
        {"runs": MIXED},
    ),
    Family(
        "Qwen3_5Moe",
        {**OF_RULE, **ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 64},
        {"layers": 4, "qk_norm": True, "output_gate": True, "runs": HYBRID},
    ),
    Family(
        "Glm4Moe",
        {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, **ROUTED,
         "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True},
        {"qk_norm": True, "qkv_bias": True,
         "runs": (LayerRun(layers=1), LayerRun(layers=1, experts=SHARING))},
    ),
    Family(
        "Gemma3",
        {"sliding_window": T, "tie_word_embeddings": True},
        {"layers": 6, "qk_norm": True, "post_norms": True, "tied_head": True,
         "runs": (LayerRun(layers=5, window=T), LayerRun(layers=1))},
    ),
    Family(
        "GPT2",
        {"n_inner": 320, "n_positions": T, "tie_word_embeddings": True, **NO_DROPOUT},
        {"kv_heads": 4, "head_size": None, "activation": "gelu", "positions": "learned",
         "max_positions": T, "bias": True, "norm_bias": True, "tied_head": True},
    ),
    Family("Nemotron", {}, {"activation": "squared_relu", "norm_bias": True}),
    Family(
        "GptOss",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96,
         "sliding_window": T},
        {"bias": True, "sinks": True,
         "runs": (LayerRun(layers=1, window=T, experts=EXPERTS),
                  LayerRun(layers=1, experts=EXPERTS))},
    ),
)  # fmt: skip


def token_features(model: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return linear features of one sample of T tokens, and its squared (attention) features."""
    names = feature_names(model)
    attends = np.array([name.startswith("squared") for name in names])
    linear = np.array([{"fixed": 1, "tokens": T, "loss_tokens": T}.get(name, 0) for name in names])
    return linear, T * T * attends


def triangle_flops(triangle: Any, right: Any, *_: Any, **__: Any) -> int:
    """Return operations to solve for all columns of the right side, as products with an inverse."""
    return int(2 * triangle[-1] * np.prod(right))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_parameters_and_operations_are_those_of_transformers(family):
    """Prevents a weight or a product of a family's layers that is missed, counted twice or of
    another size."""
    language, module = family.model.language, family.module(family.model.language.layers)
    cost = analytic_cost(CostSetting(family.model, CLUSTER, ONE, "bf16"))
    names = unit_names(family.model)
    parameters = sum(cost.units[name].parameters for name in names) - cost.tied_parameters
    assert parameters == sum(parameter.numel() for parameter in module.parameters())
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.linalg_solve_triangular: triangle_flops}
    )
    with torch.no_grad(), counter:
        module(input_ids=torch.zeros((1, T), dtype=torch.int64), use_cache=False)
    # Forward is a third of training. Eager attention computes both halves of the square.
    flops = unit_flops(family.model, ())
    linear, squares = token_features(family.model)
    found = sum(flops[name] @ (linear + 2 * squares) for name in names) / 3
    assert counter.get_total_flops() == pytest.approx(found, rel=0.01)
    rules = sum(kind.linear is not None for kind in language.kinds)
    # The difference: inverses of triangles, solved without products by Transformers, and padding.
    inverse = rules * T * LINEAR.value_heads * CHUNK**2 / 3
    assert found - counter.get_total_flops() == pytest.approx(inverse, rel=0.01)


LINEARS, FULLS = {"layer_types": "linear_attention"}, {"layer_types": "full_attention"}
KEPT = (
    ("Qwen3", {}, LayerRun(layers=1)),
    ("Qwen3Moe", {}, LayerRun(layers=1, experts=EXPERTS)),
    ("DeepseekV3", {"first_k_dense_replace": 9}, MIXED[0]),
    ("DeepseekV3", {"first_k_dense_replace": 0}, MIXED[1]),
    ("Qwen3_5Moe", LINEARS, HYBRID[0]),
    ("Qwen3_5Moe", FULLS, HYBRID[1]),
    ("Gemma3", FULLS, LayerRun(layers=1)),
    ("GPT2", {}, LayerRun(layers=1)),
    ("Nemotron", {}, LayerRun(layers=1)),
)


class InputsOfProducts(TorchDispatchMode):
    """Records inputs of matrix products with weights, by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            tensors = (each for each in args if torch.is_tensor(each))
            self.found |= {each.untyped_storage().data_ptr(): each for each in tensors}
        return function(*args, **kwargs or {})


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Records tensors saved by autograd, by storage."""

    def __init__(self) -> None:
        self.found: dict[int, torch.Tensor] = {}
        super().__init__(self.save, lambda tensor: tensor)

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor


def bytes_besides(found: dict[int, torch.Tensor], weights: Iterable[torch.Tensor]) -> int:
    """Return bytes of these storages without the weights' storages."""
    held = {each.untyped_storage().data_ptr() for each in weights}
    return sum(one.untyped_storage().nbytes() for at, one in found.items() if at not in held)


def kept_bytes(module: torch.nn.Module) -> tuple[int, int]:
    """Return bytes of activations: inputs of weight products, and all tensors saved by autograd."""
    saved = SavedTensors()
    with InputsOfProducts() as products, saved:
        module.base_model(input_ids=torch.zeros((1, T), dtype=torch.int64), use_cache=False)
    weights = module.state_dict().values()
    return bytes_besides(products.found, weights), bytes_besides(saved.found, weights)


@pytest.mark.parametrize(("name", "more", "run"), KEPT, ids=lambda each: str(each)[:24])
def test_kept_bytes_are_between_what_must_be_kept_and_what_no_fused_operation_keeps(
    name, more, run
):
    """Prevents missing kept activations, and more than an unfused layer keeps.

    Measured by adding a second layer. Lower bound: inputs of products, needed for weights'
    gradients. Upper bound: all tensors that Transformers' modules save.
    """
    [family] = (each for each in FAMILIES if each.name == name)
    found = []
    for layers in (1, 2):
        sizes = {key: [one] * layers if key == "layer_types" else one for key, one in more.items()}
        found.append(kept_bytes(family.module(layers, "sdpa", **sizes).to(torch.bfloat16)))
    at_least, at_most = np.subtract(*reversed(found))
    language = family.model.language.model_copy(update={"runs": (run,)})
    model = ModelConfig(name=name, language=language)
    linear, squares = token_features(model)
    lines = kept_lines(model, ONE, "bf16")[run.kind.name]
    counted = sum(float((linear + squares) @ line.bytes) for line in lines)
    assert at_least < counted < at_most
