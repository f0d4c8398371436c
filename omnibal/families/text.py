"""Language models of Llama, Qwen2, Qwen3, InternLM2 and Phi-3, and what all families share."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from omnibal.base.frozen import Numbered
from omnibal.families.hub_table import HubTable, NoDropout, as_table
from omnibal.model.config import ChatTemplate, LanguageConfig, ModelConfig
from omnibal.model.layers import ExpertsConfig, LayerKind, LayerRun
from omnibal.model.limits import words

LanguageType = Literal["internlm2", "llama", "qwen2", "qwen3", "qwen3_moe", "phi3"]
"""Kinds of language model of InternVL's releases, by Transformers' model_type."""
SCALES_LATER, SCALES_WAVES = "dynamic", "llama3"
"""Kinds of RoPE: unscaled up to max_position_embeddings, and Llama 3.1's."""
_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    SCALES_LATER: ("factor",),
    SCALES_WAVES: (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
}
"""Numbers that a kind of RoPE must have, of those that are trained."""
GPT_OSS = "GPT-OSS, whose attention has learned sinks and whose experts have biases"


class Rope(Numbered):
    """Description of RoPE; keys of scalings that are not kept are ignored."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveFloat | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    mrope_section: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    mrope_interleaved: bool | None = None
    full_attention: "Rope | None" = None
    """Rotary embedding of layers that attend to all tokens, where others have another."""

    @property
    def kind(self) -> str:
        """How it is scaled."""
        return self.rope_type or self.type or "default"

    @property
    def numbers(self) -> dict[str, float | None]:
        """Numbers of the scaling, which two descriptions of one RoPE have alike."""
        return self.model_dump(include=set(_ROPE_NUMBERS[SCALES_WAVES]))


class TextTable(HubTable):
    """Keys that the language models of all families have."""

    default_theta: ClassVar[float] = 10_000.0
    tied_by_default: ClassVar[bool] = False
    inner_ties_too: ClassVar[bool] = False
    """Whether Transformers ties heads where this table says so, despite the whole model's."""
    chat_template: ClassVar[ChatTemplate] = "tokenizer"
    """Template of the newest releases of the language model alone."""
    without_effect: ClassVar[frozenset[str]] = frozenset(
        # RoPE turns as many numbers however it is scaled; its sections share out time and place.
        {"rope_interleave", "original_max_position_embeddings"}
    )

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool | None = None
    attention_dropout: NoDropout = 0.0
    rope_theta: PositiveFloat | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    partial_rotary_factor: float | None = None

    @property
    def rope(self) -> Rope:
        """The description of RoPE, in either spelling."""
        return self.rope_parameters or self.rope_scaling or Rope()

    @property
    def theta(self) -> float:
        """Base of RoPE, of the layers that attend to all tokens."""
        rope = self.rope.full_attention or self.rope
        return rope.rope_theta or self.rope_theta or self.default_theta

    @property
    def rope_fields(self) -> dict[str, Any]:
        """Fields of a LanguageConfig about RoPE; scaling other than by wavelength is not kept."""
        rope = self.rope
        scaling = {
            "factor": rope.factor,
            "low_frequency_factor": rope.low_freq_factor,
            "high_frequency_factor": rope.high_freq_factor,
            "original_positions": rope.original_max_position_embeddings,
        }
        return {
            "rope_base": round(self.theta),
            "max_positions": self.max_position_embeddings,
            "rope_factor": rope.factor if rope.kind == SCALES_LATER else None,
            "rope_scaling": scaling if rope.kind == SCALES_WAVES else None,
        }

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

    def is_tied(self, outer: bool | None = None) -> bool:
        """Whether the head is the token embedding.

        Args:
            outer: what the whole model's table says, if there is one; it counts, as versions of
                Transformers write what they like into the inner one.
        """
        inner = self.tie_word_embeddings
        stated = inner if outer is None else outer
        tied = self.tied_by_default if stated is None else stated
        return tied or (self.inner_ties_too and bool(inner))

    @abstractmethod
    def language(self, *, tied_head: bool) -> LanguageConfig:
        """The language model that the table describes."""

    def check_rope(self) -> None:
        """Raise ValueError for a RoPE that is not trained, in a family that is."""

    def alone(self, name: str, *, tied_head: bool) -> ModelConfig:
        """The language model as a whole one."""
        language = self.language(tied_head=tied_head)
        return ModelConfig(name=name, language=language, chat_template=self.chat_template)


class LayeredText(TextTable):
    """A language model whose layers may be of two kinds, of which one has full attention."""

    layer_types: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _has_a_type_for_each_layer(self) -> "LayeredText":
        types, layers = self.layer_types, self.num_hidden_layers
        if types is not None and len(types) != layers:
            raise ValueError(
                f"layer_types has {len(types)} entries; it must have one for each of "
                f"num_hidden_layers {layers}"
            )
        return self

    def full_layers(self, every: int) -> list[bool]:
        """Whether each layer has full attention, [layers]; each `every`th where no list says it."""
        if self.layer_types is not None:
            return [kind == "full_attention" for kind in self.layer_types]
        return [(at + 1) % every == 0 for at in range(self.num_hidden_layers)]


class GroupedText(LayeredText):
    """A language model of grouped-query attention and dense feed-forwards."""

    architecture: ClassVar[str]
    """Name of the class in Transformers."""
    has_qkv_bias: ClassVar[bool] = False
    has_qk_norm: ClassVar[bool] = False
    rope_numbers: ClassVar[Mapping[str, tuple[str, ...]]] = _ROPE_NUMBERS
    without_effect: ClassVar[frozenset[str]] = TextTable.without_effect | {
        # Read by attention windows alone, which must be off.
        "sliding_window",
        "max_window_layers",
    }

    hidden_act: Literal["silu"] = "silu"
    intermediate_size: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    bias: Literal[False] = False
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    use_sliding_window: Literal[False] | None = None
    layer_types: tuple[Literal["full_attention"], ...] | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of a LanguageConfig, but for what says whether the head is tied."""
        usual = self.hidden_size / self.num_attention_heads
        return {
            **self.common_fields,
            "kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_size": None if self.head_dim in (None, usual) else self.head_dim,
            "ffn_hidden_size": self.intermediate_size,
            "qkv_bias": self.has_qkv_bias,
            "qk_norm": self.has_qk_norm,
        }

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """The language model that the table describes."""
        return LanguageConfig(**self.sizes, tied_head=tied_head)

    def check_rope(self) -> None:
        """Raise ValueError for a RoPE that is not trained, where it would be another model."""
        rope, older, newer = self.rope, self.rope_scaling, self.rope_parameters
        kind, numbers = rope.kind, rope.numbers
        if kind not in self.rope_numbers:
            raise ValueError(
                f"RoPE of type {kind!r} is not trained; it must be one of "
                f"{', '.join(self.rope_numbers)}: without the scaling, times and memory are the "
                "same"
            )
        lacking = [name for name in self.rope_numbers[kind] if numbers[name] is None]
        if lacking:
            raise ValueError(f"RoPE of type {kind!r} lacks {words(lacking)}, which must be given")
        if older and newer and (older.kind, older.numbers) != (kind, numbers):
            raise ValueError(
                "has a rope_scaling and rope_parameters that differ; give one of them, or both "
                "alike"
            )
        share = rope.partial_rotary_factor or self.partial_rotary_factor or 1
        if share != 1:
            raise ValueError(f"has partial_rotary_factor {share}; it must be 1")
        if not self.theta.is_integer():
            raise ValueError(f"has rope_theta {self.theta}; it must be a whole number")

    def check_trained(self) -> None:
        """Raise ValueError for what layers that are trained cannot be."""
        self.check_rope()


class LlamaText(GroupedText):
    """Table of Llama."""

    architecture: ClassVar[str] = "LlamaForCausalLM"
    chat_template: ClassVar[ChatTemplate] = "llama3"


class InternLM2Text(GroupedText):
    """Table of InternLM2, whose files give all sizes."""

    architecture: ClassVar[str] = "InternLM2ForCausalLM"


class Phi3Text(GroupedText):
    """Table of Phi-3, whose files give all sizes; its RoPE's scaling costs nothing."""

    architecture: ClassVar[str] = "Phi3ForCausalLM"
    rope_numbers: ClassVar[Mapping[str, tuple[str, ...]]] = _ROPE_NUMBERS | dict.fromkeys(
        ("su", "yarn", "longrope"), ()
    )

    sliding_window: PositiveInt | None = None

    @model_validator(mode="after")
    def _has_no_window(self) -> "Phi3Text":
        window, longest = self.sliding_window, self.max_position_embeddings
        if window is not None and window < longest:
            raise ValueError(
                f"sliding_window {window} must be none, or at least max_position_embeddings "
                f"{longest}"
            )
        return self


class Qwen2Text(GroupedText):
    """Table of Qwen2 and 2.5, whose q, k and v have biases."""

    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    chat_template: ClassVar[ChatTemplate] = "qwen2.5"
    has_qkv_bias: ClassVar[bool] = True


class Qwen3Text(Qwen2Text):
    """Table of Qwen3, whose heads of q and k are normed, and have no biases."""

    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    chat_template: ClassVar[ChatTemplate] = "tokenizer"
    has_qkv_bias: ClassVar[bool] = False
    has_qk_norm: ClassVar[bool] = True

    head_dim: PositiveInt | None = 128


class RoutedKeys(HubTable):
    """Keys of Qwen's mixtures of experts."""

    num_hidden_layers: PositiveInt
    moe_intermediate_size: PositiveInt
    num_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    norm_topk_prob: bool
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False

    def experts_of(self, layers: int, **more: Any) -> ExpertsConfig:
        """The experts of each of `layers` layers, with more fields of an ExpertsConfig."""
        loss = auxiliary_loss(self.router_aux_loss_coef, self.num_experts_per_tok, layers)
        return ExpertsConfig(
            experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
            ffn_hidden_size=self.moe_intermediate_size,
            normalized=self.norm_topk_prob,
            # As Transformers trains: the loss is added where the router's logits are returned.
            auxiliary_loss=loss if self.output_router_logits else 0.0,
            **more,
        )


class Qwen3MoeText(RoutedKeys, Qwen3Text):
    """Table of Qwen3's mixture of experts."""

    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    older_names: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}

    head_dim: PositiveInt | None = None
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: tuple[int, ...] | None = None

    @property
    def _sparse(self) -> list[int]:
        """Layers with experts: those whose number from 1 is a sparse step."""
        dense = set(self.mlp_only_layers or ())
        step = self.decoder_sparse_step
        return [at for at in range(step - 1, self.num_hidden_layers, step) if at not in dense]

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """The language model that the table describes."""
        sparse = self._sparse
        experts = self.experts_of(len(sparse)) if sparse else None
        kinds = [
            LayerKind(experts=experts if at in sparse else None)
            for at in range(self.num_hidden_layers)
        ]
        return LanguageConfig(**self.sizes, tied_head=tied_head, runs=runs_of(kinds))

    def check_trained(self) -> None:
        """Raise ValueError for what layers that are trained cannot be."""
        super().check_trained()
        if len(self._sparse) < self.num_hidden_layers:
            raise ValueError(
                "has a decoder_sparse_step or mlp_only_layers that leave layers without experts; "
                "they must be 1 and []: experts in every layer"
            )


LANGUAGES: dict[LanguageType, type[GroupedText]] = {
    "internlm2": InternLM2Text,
    "llama": LlamaText,
    "qwen2": Qwen2Text,
    "qwen3": Qwen3Text,
    "qwen3_moe": Qwen3MoeText,
    "phi3": Phi3Text,
}
"""Tables by kind of language model."""


def language_type(given: Mapping[str, Any], known: Collection[LanguageType]) -> LanguageType:
    """Kind of the language model that a table describes, by its class or else its model_type."""
    classes = given.get("architectures")
    stated = classes[0] if isinstance(classes, list) and classes else given.get("model_type")
    for kind in known:
        if stated in (kind, LANGUAGES[kind].architecture):
            return kind
    if stated in ("gpt_oss", "GptOssForCausalLM"):
        stated = GPT_OSS
    names = ", ".join(LANGUAGES[kind].architecture for kind in known)
    raise ValueError(f"its language model is {stated or 'not named'}; it must be one of {names}")


def read_text(kind: type[TextTable], given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Read a file of a language model alone, of which `kind` is the table."""
    table = as_table(kind, given, str(path))
    table.check_rope()
    return table.alone(name, tied_head=table.is_tied())


def auxiliary_loss(coefficient: float, experts_per_token: int, layers: int) -> float:
    """Coefficient of each layer's auxiliary loss, which trains as Transformers' `coefficient`.

    Transformers' `load_balancing_loss_func` takes shares and scores of all layers' tokens together,
    and a token's share of experts sums to `experts_per_token`, so that even experts make its loss
    `experts_per_token`. Those of `layers` single layers (`ExpertsConfig.auxiliary_loss`) are then 1
    each, and their gradients the same where layers are about as uneven as each other.
    """
    return coefficient * experts_per_token / layers


def released_coefficient(auxiliary_loss: float, experts_per_token: int, layers: int) -> float:
    """Transformers' `router_aux_loss_coef`, of which `auxiliary_loss` makes this one."""
    # Without what the two divisions round.
    return float(f"{auxiliary_loss * layers / experts_per_token:.12g}")


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
