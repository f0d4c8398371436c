"""config.json tables of Llama, Qwen2, Qwen3, InternLM2 and Phi-3, and keys all families share."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from omnibal.base.frozen import Numbered
from omnibal.families.hub_table import HubTable, NoDropout, as_table
from omnibal.model.config import ChatTemplateName, LanguageConfig, ModelConfig
from omnibal.model.layer_kinds import ExpertsConfig, LayerKind, LayerRun
from omnibal.model.limits import words

# Transformers' model_type of the language models of InternVL.
LanguageType = Literal["internlm2", "llama", "qwen2", "qwen3", "qwen3_moe", "phi3"]
SCALES_LATER = "dynamic"  # RoPE type: unscaled up to max_position_embeddings
SCALES_WAVES = "llama3"  # RoPE type of Llama 3.1
# Required numbers by supported RoPE type.
_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    SCALES_LATER: ("factor",),
    SCALES_WAVES: (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
}


class Rope(Numbered):
    """RoPE table of config.json; keys of unsupported scalings are ignored."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveFloat | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    mrope_section: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    full_attention: "Rope | None" = None  # RoPE of full-attention layers if different

    @property
    def kind(self) -> str:
        """RoPE type, "default" if not given."""
        return self.rope_type or self.type or "default"

    @property
    def numbers(self) -> dict[str, float | None]:
        """Numbers of Llama 3.1's scaling by key, None if absent."""
        return self.model_dump(include=set(_ROPE_NUMBERS[SCALES_WAVES]))


class TextTable(HubTable):
    """Keys shared by all language models."""

    default_theta: ClassVar[float] = 10_000.0
    tied_by_default: ClassVar[bool] = False
    inner_ties_too: ClassVar[bool] = False  # Transformers ties by this table or the outer one
    # Whether `parts` keep a head_size of hidden_size / heads, as the presets do.
    states_head_size: ClassVar[bool] = False
    chat_template: ClassVar[ChatTemplateName] = "tokenizer"  # of the newest releases
    # Required numbers by supported RoPE type; None: every type is planned, and none trained.
    rope_numbers: ClassVar[Mapping[str, tuple[str, ...]] | None] = None

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt
    intermediate_size: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool | None = None
    attention_dropout: NoDropout = 0.0
    rope_theta: PositiveFloat | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    partial_rotary_factor: float | None = None

    @property
    def rope(self) -> Rope:
        """RoPE table: rope_parameters, else rope_scaling, else empty."""
        return self.rope_parameters or self.rope_scaling or Rope()

    @property
    def theta(self) -> float:
        """RoPE base of full-attention layers."""
        rope = self.rope.full_attention or self.rope
        return rope.rope_theta or self.rope_theta or self.default_theta

    @property
    def rope_fields(self) -> dict[str, Any]:
        """RoPE fields of a LanguageConfig, with Llama 3.1's and dynamic scaling only."""
        rope = self.rope
        scaling = {
            "factor": rope.factor,
            "low_frequency_factor": rope.low_freq_factor,
            "high_frequency_factor": rope.high_freq_factor,
            "original_positions": rope.original_max_position_embeddings,
        }
        return {
            "rope_base": round(self.theta),
            "rope_factor": rope.factor if rope.kind == SCALES_LATER else None,
            "rope_scaling": scaling if rope.kind == SCALES_WAVES else None,
        }

    @property
    def parts(self) -> dict[str, Any]:
        is_usual = self.head_dim == self.hidden_size / self.num_attention_heads
        heads = {
            "kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_size": None if is_usual and not self.states_head_size else self.head_dim,
        }
        return heads | super().parts

    @property
    def kinds(self) -> list[LayerKind]:
        """Kind of every layer, or of one period of layers."""
        return [LayerKind()]

    def is_tied(self, outer: bool | None = None) -> bool:
        """Return whether head and embedding are tied; `outer`, if set, overrides this table."""
        inner = self.tie_word_embeddings
        stated = inner if outer is None else outer
        tied = self.tied_by_default if stated is None else stated
        return tied or (self.inner_ties_too and bool(inner))

    def language(self, *, tied_head: bool) -> LanguageConfig:
        return LanguageConfig(
            **self.parts, **self.rope_fields, tied_head=tied_head, runs=runs_of(self.kinds)
        )

    def as_model(self, name: str, *, tied_head: bool) -> ModelConfig:
        """Return a model of the language model alone."""
        language = self.language(tied_head=tied_head)
        return ModelConfig(name=name, language=language, chat_template=self.chat_template)

    def check_rope(self) -> None:
        """Raise ValueError for a RoPE that is unsupported, incomplete or contradictory."""
        if self.rope_numbers is None:
            return
        rope, older, newer = self.rope, self.rope_scaling, self.rope_parameters
        kind, numbers = rope.kind, rope.numbers
        if kind not in self.rope_numbers:
            raise ValueError(
                f"RoPE of type {kind!r} is not trained; it must be one of "
                f"{', '.join(self.rope_numbers)}; to plan, leave the scaling out: it costs nothing"
            )
        lacking = [name for name in self.rope_numbers[kind] if numbers[name] is None]
        if lacking:
            raise ValueError(f"RoPE of type {kind!r} lacks {words(lacking)}, which must be given")
        if older and newer and (older.kind, older.numbers) != (kind, numbers):
            raise ValueError("rope_scaling and rope_parameters differ; give one, or both alike")
        self.check_rotated_share(rope.partial_rotary_factor or self.partial_rotary_factor)
        if not self.theta.is_integer():
            raise ValueError(f"has rope_theta {self.theta}; it must be a whole number")

    def check_rotated_share(self, share: float | None) -> None:
        """Raise ValueError unless RoPE rotates whole heads."""
        if share not in (None, 1):
            raise ValueError(f"has partial_rotary_factor {share}; it must be 1")


class LayeredText(TextTable):
    """Language model with up to two layer kinds, including full attention."""

    layer_types: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _has_a_type_for_each_layer(self) -> "LayeredText":
        types, layers = self.layer_types, self.num_hidden_layers
        if types is not None and len(types) != layers:
            raise ValueError(f"layer_types has {len(types)} entries for num_hidden_layers {layers}")
        return self

    def full_layers(self, every: int) -> list[bool]:
        """Return whether layers have full attention, [layers]; every `every`-th by default."""
        if self.layer_types is not None:
            return [kind == "full_attention" for kind in self.layer_types]
        return [(at + 1) % every == 0 for at in range(self.num_hidden_layers)]


class GroupedText(LayeredText):
    """Language model with grouped-query attention and dense feed-forwards."""

    architecture: ClassVar[str]  # entry of `architectures` in config.json
    rope_numbers: ClassVar[Mapping[str, tuple[str, ...]] | None] = _ROPE_NUMBERS

    intermediate_size: PositiveInt
    use_sliding_window: Literal[False] | None = None
    layer_types: tuple[Literal["full_attention"], ...] | None = None

    def check_trained(self) -> None:
        """Raise ValueError for a RoPE or layers that the trainer does not build."""
        self.check_rope()


class LlamaText(GroupedText):
    architecture = "LlamaForCausalLM"
    chat_template = "llama3"


class InternLM2Text(GroupedText):
    architecture = "InternLM2ForCausalLM"

    head_dim: None = None  # not read by InternLM2's code


class Phi3Text(GroupedText):
    architecture = "Phi3ForCausalLM"
    rope_numbers = _ROPE_NUMBERS | dict.fromkeys(("su", "yarn", "longrope"), ())

    sliding_window: PositiveInt | None = None

    @model_validator(mode="after")
    def _has_no_window(self) -> "Phi3Text":
        window, longest = self.sliding_window, self.max_position_embeddings
        if window is not None and window < longest:
            raise ValueError(f"sliding_window {window} is below max_position_embeddings {longest}")
        return self


class Qwen2Text(GroupedText):
    architecture = "Qwen2ForCausalLM"
    chat_template: ClassVar[ChatTemplateName] = "qwen2.5"


class Qwen3Text(Qwen2Text):
    architecture = "Qwen3ForCausalLM"
    chat_template = "tokenizer"

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
        """Return the experts of `layers` layers; `more` are other ExpertsConfig fields."""
        loss = auxiliary_loss(self.router_aux_loss_coef, self.num_experts_per_tok, layers)
        return ExpertsConfig(
            **self.fields_of("experts"),
            # Transformers adds the loss only if router logits are returned.
            auxiliary_loss=loss if self.output_router_logits else 0.0,
            **more,
        )


class Qwen3MoeText(RoutedKeys, Qwen3Text):
    architecture = "Qwen3MoeForCausalLM"

    head_dim: PositiveInt | None = None
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: tuple[int, ...] | None = None

    @property
    def _sparse_layers(self) -> list[int]:
        dense = set(self.mlp_only_layers or ())
        step = self.decoder_sparse_step  # layers step - 1, 2 x step - 1, ... have experts
        return [at for at in range(step - 1, self.num_hidden_layers, step) if at not in dense]

    @property
    def kinds(self) -> list[LayerKind]:
        sparse = self._sparse_layers
        experts = self.experts_of(len(sparse)) if sparse else None
        layers = range(self.num_hidden_layers)
        return [LayerKind(experts=experts if at in sparse else None) for at in layers]

    def check_trained(self) -> None:
        super().check_trained()
        if len(self._sparse_layers) < self.num_hidden_layers:
            raise ValueError(
                "has layers without experts; decoder_sparse_step must be 1, mlp_only_layers []"
            )


LANGUAGES: dict[LanguageType, type[GroupedText]] = {
    "internlm2": InternLM2Text,
    "llama": LlamaText,
    "qwen2": Qwen2Text,
    "qwen3": Qwen3Text,
    "qwen3_moe": Qwen3MoeText,
    "phi3": Phi3Text,
}


def language_type(given: Mapping[str, Any], known: Collection[LanguageType]) -> LanguageType:
    """Return the type in `known` by architecture, else model_type. ValueError if there is none."""
    classes = given.get("architectures")
    stated = classes[0] if isinstance(classes, list) and classes else given.get("model_type")
    for kind in known:
        if stated in (kind, LANGUAGES[kind].architecture):
            return kind
    names = ", ".join(LANGUAGES[kind].architecture for kind in known)
    raise ValueError(f"its language model is {stated or 'not named'}; it must be one of {names}")


def read_language_model(
    kind: type[TextTable], given: dict[str, Any], name: str, path: Path
) -> ModelConfig:
    """Return the model of a table of class `kind`, without encoders; `path` is for errors."""
    table = as_table(kind, given, str(path))
    table.check_rope()
    return table.as_model(name, tied_head=table.is_tied())


def auxiliary_loss(coefficient: float, experts_per_token: int, layers: int) -> float:
    """Return Megatron-core's per-layer coefficient for Transformers' router_aux_loss_coef."""
    # Transformers' `load_balancing_loss_func` pools all layers, and its shares sum to
    # experts_per_token. Megatron-core's loss of a layer is 1 for balanced experts.
    return coefficient * experts_per_token / layers


def released_coefficient(auxiliary_loss: float, experts_per_token: int, layers: int) -> float:
    """Return Transformers' router_aux_loss_coef: the inverse of `auxiliary_loss`."""
    # 12 digits undo the rounding of both divisions.
    return float(f"{auxiliary_loss * layers / experts_per_token:.12g}")


def runs_of(kinds: Sequence[LayerKind]) -> tuple[LayerRun, ...]:
    """Return runs of equal layers in the shortest period of `kinds`, empty for plain layers.

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
