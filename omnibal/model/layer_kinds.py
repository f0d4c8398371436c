"""Kinds of language layers: settings that differ from `omnibal.model.config.LanguageConfig`."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from omnibal.base.errors import refuse_if
from omnibal.base.frozen import Count, Frozen, Layers, Width, written_unless

MAX_IMBALANCE = 1e3  # of experts; more is a typo
AttentionKind = Literal["full", "window", "latent", "linear"]


class ExpertsConfig(Frozen):
    """Mixture of SwiGLU experts with a router, instead of a dense feed-forward."""

    experts: Annotated[int, Field(ge=2, le=2**16)]
    experts_per_token: Count
    ffn_hidden_size: Width  # of one expert
    # of the shared expert of all tokens; left out: none
    shared_ffn_hidden_size: Width | None = None
    # a learned gate scales the shared expert's output per token
    shared_gate: bool = written_unless(False)
    # a bias per expert counts in the top-k choice only (DeepSeek-V3)
    selection_bias: bool = written_unless(False)
    score: Literal["softmax", "sigmoid"] = written_unless("softmax")  # of the router's logits
    normalized: bool = written_unless(True)  # the weights of a token's experts sum to 1
    weight_factor: PositiveFloat = written_unless(1.0)  # scales the weights of routed experts
    # --moe-aux-loss-coeff of every layer, whose loss is 1 for balanced experts. Transformers'
    # router_aux_loss_coef is this x layers with experts / experts_per_token
    auxiliary_loss: Annotated[float, Field(ge=0, le=1e3)] = written_unless(0.0)
    # max / mean tokens of expert-parallel ranks that time and memory are planned for
    imbalance: Annotated[float, Field(ge=1, le=MAX_IMBALANCE)] = written_unless(1.2)

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "ExpertsConfig":
        k, number = self.experts_per_token, self.experts
        refuse_if(k > number, f"experts_per_token {k} must not exceed experts {number}")
        has_shared = self.shared_ffn_hidden_size is not None
        refuse_if(self.shared_gate and not has_shared, "shared_gate needs shared_ffn_hidden_size")
        return self


class LatentAttention(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1); `kv_heads` is unused."""

    query_rank: Width | None = None  # q_lora_rank; left out: q has one projection
    key_value_rank: Width  # kv_lora_rank
    head_size: Width  # qk_nope_head_dim
    rotary_head_size: Width  # qk_rope_head_dim; all heads share this key
    value_head_size: Width  # v_head_dim


class LinearAttention(Frozen):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) as in Qwen3-Next and Qwen3.5.

    Cost is linear in tokens; q, k and v pass a short causal convolution, the output a gated norm.
    """

    key_heads: Width
    value_heads: Width
    key_head_size: Width
    value_head_size: Width
    convolution_width: Count = 4

    @model_validator(mode="after")
    def _heads_divide(self) -> "LinearAttention":
        values, keys = self.value_heads, self.key_heads
        refuse_if(values % keys, f"value_heads {values} must be a multiple of key_heads {keys}")
        return self


class LayerKind(Frozen):
    """Attention and feed-forward of a language layer."""

    window: Count | None = None  # sliding window in tokens; left out: full attention
    latent: LatentAttention | None = written_unless(None)  # left out: grouped-query attention
    linear: LinearAttention | None = written_unless(None)  # left out: softmax attention
    experts: ExpertsConfig | None = None  # left out: dense feed-forward

    @model_validator(mode="after")
    def _has_one_attention(self) -> "LayerKind":
        fields = {"window": self.window, "latent": self.latent, "linear": self.linear}
        given = " and ".join(name for name, value in fields.items() if value)
        refuse_if(" " in given, f"{given} are exclusive kinds of attention; drop one")
        return self

    @property
    def attention(self) -> AttentionKind:
        if self.window is not None:
            return "window"
        if self.latent is not None:
            return "latent"
        return "full" if self.linear is None else "linear"

    @property
    def name(self) -> str:
        """Name that keys costs, such as "language_layer_window1024"."""
        attention = {"full": "", "window": f"_window{self.window}"}.get(
            self.attention, f"_{self.attention}"
        )
        experts = "" if self.experts is None else f"_experts{self.experts.experts}"
        return f"language_layer{attention}{experts}"


class LayerRun(LayerKind):
    """Consecutive equal layers."""

    layers: Layers

    @property
    def kind(self) -> LayerKind:
        return LayerKind(
            window=self.window, latent=self.latent, linear=self.linear, experts=self.experts
        )
