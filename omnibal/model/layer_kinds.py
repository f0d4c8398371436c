"""Kinds of language layers; unset fields fall back to `omnibal.model.config.LanguageConfig`."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from omnibal.base.frozen import Count, Frozen, Layers, Width, written_unless

MAX_IMBALANCE = 1e3  # max margin for expert imbalance
AttentionKind = Literal["full", "window", "latent", "linear"]


class ExpertsConfig(Frozen):
    """Mixture of experts instead of a dense feed-forward: a router and SwiGLU experts."""

    experts: Annotated[int, Field(ge=2, le=2**16)]
    experts_per_token: Count
    ffn_hidden_size: Width = Field(description="of one expert")
    shared_ffn_hidden_size: Width | None = Field(
        default=None, description="of what every token passes besides; left out: there is none"
    )
    shared_gate: bool = written_unless(
        False, "whether a learned gate scales the shared part for every token"
    )
    selection_bias: bool = written_unless(
        False, "whether a bias of each expert takes part in the choice alone (DeepSeek-V3)"
    )
    score: Literal["softmax", "sigmoid"] = written_unless("softmax", "of the router's logits")
    normalized: bool = written_unless(True, "whether the weights of a token's experts add up to 1")
    weight_factor: PositiveFloat = written_unless(1.0, "of the weights of routed experts")
    auxiliary_loss: Annotated[float, Field(ge=0, le=1e3)] = written_unless(
        0.0,
        "coefficient of the load-balancing loss of every layer: Switch Transformer's "
        "over experts_per_token, as Megatron's, which even experts make 1. Transformers' "
        "router_aux_loss_coef is this x layers with experts / experts_per_token",
    )
    imbalance: Annotated[float, Field(ge=1, le=MAX_IMBALANCE)] = written_unless(
        1.2,
        "tokens of the fullest expert-parallel rank over the mean, which time and "
        "memory are planned for",
    )

    @model_validator(mode="after")
    def _uses_what_there_is(self) -> "ExpertsConfig":
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} must not exceed experts {self.experts}"
            )
        if self.shared_gate and self.shared_ffn_hidden_size is None:
            raise ValueError("shared_gate scales the shared part; give shared_ffn_hidden_size too")
        return self


class LatentAttention(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1); ignores `kv_heads`."""

    query_rank: Width | None = Field(
        default=None, description="left out: q is made of the input in one product"
    )
    key_value_rank: Width
    head_size: Width = Field(description="of the part of q and k that is not rotated")
    rotary_head_size: Width = Field(
        description="of the part that is rotated, whose key all heads share"
    )
    value_head_size: Width


class LinearAttention(Frozen):
    """Gated delta rule: attention with cost linear in tokens.

    Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) as in Qwen3-Next and Qwen3.5: short causal
    convolution of q, k and v, gated norm of the output.
    """

    key_heads: Width
    value_heads: Width
    key_head_size: Width
    value_head_size: Width
    convolution_width: Count = 4

    @model_validator(mode="after")
    def _heads_divide(self) -> "LinearAttention":
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads {self.value_heads} must be a multiple of key_heads {self.key_heads}"
            )
        return self


class LayerKind(Frozen):
    """Attention and feed-forward of a language layer, as overrides of the model's."""

    window: Count | None = Field(
        default=None, description="tokens that each attends back to; left out: all of its sample"
    )
    latent: LatentAttention | None = written_unless(None, "left out: grouped-query attention")
    linear: LinearAttention | None = written_unless(
        None, "left out: attention to all tokens before"
    )
    experts: ExpertsConfig | None = Field(default=None, description="left out: dense feed-forward")

    @model_validator(mode="after")
    def _attends_in_one_way(self) -> "LayerKind":
        ways = {"window": self.window, "latent": self.latent, "linear": self.linear}
        given = [name for name, way in ways.items() if way is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are two kinds of attention; give one")
        return self

    @property
    def attention(self) -> AttentionKind:
        """Attention kind of the layer."""
        if self.window is not None:
            return "window"
        if self.latent is not None:
            return "latent"
        return "full" if self.linear is None else "linear"

    @property
    def name(self) -> str:
        """Name of this layer kind, such as "language_layer_window1024"."""
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
        """Kind of its layers."""
        return LayerKind(
            window=self.window, latent=self.latent, linear=self.linear, experts=self.experts
        )
