"""Language models of Llama, Qwen2 and Qwen3, dense and sparse, and what all families share."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from omnibal.config import LanguageConfig
from omnibal.families.hub_table import HubTable, NoDropout
from omnibal.families.released_language import auxiliary_loss
from omnibal.layers import ExpertsConfig, LayerKind, LayerRun


class TextTable(HubTable):
    """Keys that the language models of all families have."""

    default_theta: ClassVar[float] = 10_000.0
    without_effect: ClassVar[frozenset[str]] = frozenset(
        # RoPE turns as many numbers however it is scaled; its sections share out time and place.
        {"partial_rotary_factor", "rope_interleave", "original_max_position_embeddings"}
    )

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool | None = None
    attention_dropout: NoDropout = 0.0
    rope_theta: PositiveFloat | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None

    @property
    def rope(self) -> dict[str, Any]:
        """The description of RoPE, in either spelling."""
        return self.rope_parameters or self.rope_scaling or {}

    @property
    def rope_kind(self) -> str:
        """How RoPE is scaled."""
        return str(self.rope.get("rope_type", self.rope.get("type", "default")))

    @property
    def rope_base(self) -> int:
        """Base of RoPE, of the layers that attend to all tokens."""
        rope = self.rope.get("full_attention", self.rope)
        return round(rope.get("rope_theta") or self.rope_theta or self.default_theta)

    @property
    def rope_fields(self) -> dict[str, Any]:
        """Fields of a LanguageConfig about RoPE; scaling other than by wavelength is not kept."""
        fields: dict[str, Any] = {
            "rope_base": self.rope_base,
            "max_positions": self.max_position_embeddings,
        }
        rope, kind = self.rope, self.rope_kind
        if kind == "dynamic":
            fields["rope_factor"] = rope.get("factor")
        if kind == "llama3":
            fields["rope_scaling"] = {
                "factor": rope.get("factor"),
                "low_frequency_factor": rope.get("low_freq_factor"),
                "high_frequency_factor": rope.get("high_freq_factor"),
                "original_positions": rope.get("original_max_position_embeddings"),
            }
        return fields

    @property
    def common_fields(self) -> dict[str, Any]:
        """Fields of a LanguageConfig that the keys above make."""
        return {
            "layers": self.num_hidden_layers,
            "hidden_size": self.hidden_size,
            "heads": self.num_attention_heads,
            "vocab_size": self.vocab_size,
            "norm_eps": self.rms_norm_eps,
            **self.rope_fields,
        }

    def is_tied(self, outer: bool | None = None, *, by_default: bool = False) -> bool:
        """Whether the head is the token embedding.

        Args:
            outer: what the whole model's table says, if there is one; it counts, as versions of
                Transformers write what they like into the inner one.
            by_default: what the class that wrote the files takes where nothing says it.
        """
        stated = self.tie_word_embeddings if outer is None else outer
        return by_default if stated is None else stated


class GroupedText(TextTable):
    """A language model of grouped-query attention and dense feed-forwards."""

    has_qkv_bias: ClassVar[bool] = False
    has_qk_norm: ClassVar[bool] = False
    without_effect: ClassVar[frozenset[str]] = TextTable.without_effect | {
        # Read by attention windows alone, which must be off.
        "sliding_window",
        "max_window_layers",
    }

    hidden_act: Literal["silu"] = "silu"
    intermediate_size: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    use_sliding_window: Literal[False] | None = None
    layer_types: tuple[Literal["full_attention"], ...] | None = None

    @model_validator(mode="after")
    def _has_a_type_for_each_layer(self) -> "GroupedText":
        check_layer_types(self.layer_types, self.num_hidden_layers)
        return self

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of a LanguageConfig, but for what says whether the head is tied."""
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        return {
            **self.common_fields,
            "kv_heads": kv_heads,
            "head_size": self.head_size,
            "ffn_hidden_size": self.intermediate_size,
            "qkv_bias": self.has_qkv_bias,
            "qk_norm": self.has_qk_norm,
        }

    @property
    def head_size(self) -> int | None:
        """Size of a head, where it is not the hidden size over the heads."""
        usual = self.hidden_size / self.num_attention_heads
        return None if self.head_dim in (None, usual) else self.head_dim

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """The language model that the table describes."""
        return LanguageConfig(**self.sizes, tied_head=tied_head)


class LlamaText(GroupedText):
    """Table of Llama."""

    vocab_size: PositiveInt = 32_000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11_008
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    max_position_embeddings: PositiveInt = 2048


class Qwen2Text(GroupedText):
    """Table of Qwen2 and 2.5, whose q, k and v have biases."""

    has_qkv_bias: ClassVar[bool] = True

    vocab_size: PositiveInt = 151_936
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 22_016
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = 32
    max_position_embeddings: PositiveInt = 32_768


class Qwen3Text(GroupedText):
    """Table of Qwen3, whose heads of q and k are normed."""

    has_qk_norm: ClassVar[bool] = True

    vocab_size: PositiveInt = 151_936
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 22_016
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = 32
    head_dim: PositiveInt | None = 128
    max_position_embeddings: PositiveInt = 32_768


class Qwen3MoeText(Qwen3Text):
    """Table of Qwen3's mixture of experts."""

    older_names: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    hidden_size: PositiveInt = 2048
    intermediate_size: PositiveInt = 6144
    num_hidden_layers: PositiveInt = 24
    num_key_value_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = None
    moe_intermediate_size: PositiveInt = 768
    num_experts: PositiveInt = 128
    num_experts_per_tok: PositiveInt = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: tuple[int, ...] | None = None
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False

    @property
    def _sparse(self) -> list[int]:
        """Layers with experts: those whose number from 1 is a sparse step."""
        dense = set(self.mlp_only_layers or ())
        step = self.decoder_sparse_step
        return [at for at in range(step - 1, self.num_hidden_layers, step) if at not in dense]

    @property
    def experts(self) -> ExpertsConfig:
        """The experts of a layer that has some."""
        return ExpertsConfig(
            experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
            ffn_hidden_size=self.moe_intermediate_size,
            normalized=self.norm_topk_prob,
            # As Transformers trains: the loss is added where the router's logits are returned.
            auxiliary_loss=auxiliary_loss(
                self.router_aux_loss_coef, self.num_experts_per_tok, len(self._sparse)
            )
            if self.output_router_logits
            else 0.0,
        )

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """The language model."""
        sparse = self._sparse
        kinds = [
            LayerKind(experts=self.experts if at in sparse else None)
            for at in range(self.num_hidden_layers)
        ]
        return LanguageConfig(**self.sizes, tied_head=tied_head, runs=runs_of(kinds))


def check_layer_types(types: Sequence[str] | None, layers: int) -> None:
    """Refuse a list of layers' kinds that has not one for each.

    Raises:
        ValueError: it has more or fewer.
    """
    if types is not None and len(types) != layers:
        raise ValueError(
            f"layer_types has {len(types)} entries; it must have one for each of "
            f"num_hidden_layers {layers}"
        )


def runs_of(kinds: Sequence[LayerKind]) -> tuple[LayerRun, ...]:
    """The shortest pattern of runs that, repeated, gives these layers; empty for plain layers.

    Example:
        >>> kinds = [LayerKind(window=8), LayerKind(window=8), LayerKind()] * 2
        >>> [(run.layers, run.window) for run in runs_of(kinds)]
        [(2, 8), (1, None)]
    """
    period = next(
        length
        for length in range(1, len(kinds) + 1)
        if all(kind == kinds[at % length] for at, kind in enumerate(kinds))
    )
    runs: list[LayerRun] = []
    for kind in kinds[:period]:
        if runs and runs[-1].kind == kind:
            runs[-1] = runs[-1].model_copy(update={"layers": runs[-1].layers + 1})
        else:
            runs.append(LayerRun(layers=1, **dict(kind)))
    return () if [run.kind for run in runs] == [LayerKind()] else tuple(runs)
