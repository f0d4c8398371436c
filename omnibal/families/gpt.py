"""GPT-2, GPT-OSS, MPT, Nemotron-4: no gates, learned positions, ALiBi, biases, sinks."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from omnibal.base.frozen import Numbered
from omnibal.families.hub_table import NoDropout
from omnibal.families.text import LayeredText, TextTable, runs_of
from omnibal.model.config import LanguageConfig
from omnibal.model.layers import ExpertsConfig, LayerKind


class Gpt2Text(TextTable):
    """Table of GPT-2."""

    older_names: ClassVar[Mapping[str, str]] = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
    }
    without_effect: ClassVar[frozenset[str]] = TextTable.without_effect | {
        *("n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "scale_attn_weights"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        *("summary_type", "summary_use_proj", "reorder_and_upcast_attn"),
        "scale_attn_by_inverse_layer_idx",
    }
    tied_by_default: ClassVar[bool] = True

    hidden_act: Literal["gelu_new", "gelu", "gelu_pytorch_tanh"] = "gelu_new"
    intermediate_size: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-5

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """Return the language model of the table."""
        return LanguageConfig(
            **self.common_fields,
            kv_heads=self.num_attention_heads,
            ffn_hidden_size=self.intermediate_size or 4 * self.hidden_size,
            activation="gelu",
            positions="learned",
            bias=True,
            norm_bias=True,
            tied_head=tied_head,
        )


class _MptAttention(Numbered):
    """Attention of MPT; keys of kernels are ignored."""

    alibi: bool = False
    kv_n_heads: PositiveInt | None = None
    attn_pdrop: NoDropout = 0.0
    qk_ln: Literal[False] = False


class MptText(TextTable):
    """Table of MPT (MosaicML llm-foundry)."""

    older_names: ClassVar[Mapping[str, str]] = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
    }
    without_effect: ClassVar[frozenset[str]] = TextTable.without_effect | {
        *("embedding_fraction", "init_config", "init_device", "logit_scale", "norm_type"),
        *("tokenizer_name", "verbose"),
    }
    tied_by_default: ClassVar[bool] = True

    attn_config: _MptAttention = _MptAttention()
    expansion_ratio: PositiveInt = 4
    no_bias: bool = True
    learned_pos_emb: bool = True
    emb_pdrop: NoDropout = 0.0
    resid_pdrop: NoDropout = 0.0
    rms_norm_eps: PositiveFloat = 1e-5

    @model_validator(mode="after")
    def _has_positions(self) -> "MptText":
        if not (self.attn_config.alibi or self.learned_pos_emb):
            raise ValueError("attn_config.alibi or learned_pos_emb must be true")
        return self

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """Return the language model of the table."""
        return LanguageConfig(
            **self.common_fields,
            kv_heads=self.attn_config.kv_n_heads or self.num_attention_heads,
            ffn_hidden_size=self.expansion_ratio * self.hidden_size,
            activation="gelu",
            positions="alibi" if self.attn_config.alibi else "learned",
            bias=not self.no_bias,
            norm_bias=not self.no_bias,
            tied_head=tied_head,
        )


class NemotronText(TextTable):
    """Table of Nemotron-4 and Minitron, with LayerNorm."""

    older_names: ClassVar[Mapping[str, str]] = {"norm_eps": "rms_norm_eps"}
    without_effect: ClassVar[frozenset[str]] = TextTable.without_effect | {"rope_percent"}

    hidden_act: Literal["relu2"] = "relu2"
    intermediate_size: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt | None = None
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    hidden_dropout: NoDropout = 0.0
    rms_norm_eps: PositiveFloat = 1e-5

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """Return the language model of the table."""
        usual = self.hidden_size / self.num_attention_heads
        return LanguageConfig(
            **self.common_fields,
            kv_heads=self.num_key_value_heads,
            head_size=None if self.head_dim in (None, usual) else self.head_dim,
            ffn_hidden_size=self.intermediate_size,
            activation="squared_relu",
            norm_bias=True,
            tied_head=tied_head,
        )


class GptOssText(LayeredText):
    """Table of GPT-OSS: experts in all layers, windows in every other one."""

    older_names: ClassVar[Mapping[str, str]] = {"experts_per_token": "num_experts_per_tok"}
    without_effect: ClassVar[frozenset[str]] = TextTable.without_effect | {
        *("initial_context_length", "swiglu_alpha", "swiglu_limit", "router_aux_loss_coef"),
    }

    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[True] = True
    intermediate_size: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    num_local_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    output_router_logits: Literal[False] = False
    sliding_window: PositiveInt = 128
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """Return the language model of the table."""
        experts = ExpertsConfig(
            experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
            ffn_hidden_size=self.intermediate_size,
        )
        kinds = [
            LayerKind(window=None if is_full else self.sliding_window, experts=experts)
            for is_full in self.full_layers(2)
        ]
        return LanguageConfig(
            **self.common_fields,
            kv_heads=self.num_key_value_heads,
            head_size=self.head_dim,
            ffn_hidden_size=self.intermediate_size,
            bias=True,
            sinks=True,
            tied_head=tied_head,
            runs=runs_of(kinds),
        )
