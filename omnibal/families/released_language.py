"""Language models that InternVL is released with, as their part of a config.json describes them:
InternLM2, Llama, Qwen2, Qwen3 dense and with experts, and Phi-3, which conversion does not take.

Keys that are not read have no part in the structure. What this project's layers cannot be is
refused by name. Defaults are those of the classes that wrote the files, which leave them out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, Field, PositiveInt, ValidationError

from omnibal.config import LanguageConfig
from omnibal.errors import UserError
from omnibal.files import complaint
from omnibal.frozen import Numbered
from omnibal.layers import ExpertsConfig, LayerRun

LanguageType = Literal["internlm2", "llama", "qwen2", "qwen3", "qwen3_moe", "phi3"]
"""Kinds of language model, by Transformers' model_type."""
ARCHITECTURES: dict[LanguageType, str] = {
    "internlm2": "InternLM2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_GPT_OSS = {"gpt_oss", "GptOssForCausalLM"}
SCALES_LATER, SCALES_WAVES = "dynamic", "llama3"
"""Kinds of RoPE: unscaled up to max_position_embeddings, and Llama 3.1's."""
_PHI3_SCALES = ("su", "yarn", "longrope")
"""Names of Phi-3's RoPE for long contexts, which costs the same and is left out of plans."""
_QWEN3_HEAD_SIZE = 128
Case = tuple[bool, str, str]
"""Whether it holds, what was given, and what it must be."""


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


class _Rope(Numbered):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"

    @property
    def scaling(self) -> tuple[str | float | None, ...]:
        """All that scales RoPE, which two descriptions of one model have alike."""
        numbers = (self.factor, self.low_freq_factor, self.high_freq_factor)
        return (self.kind, *numbers, self.original_max_position_embeddings)


class ReleasedLanguage(Numbered):
    """A language model's configuration: these kinds share their names."""

    architectures: list[str] | None = None
    model_type: str = ""
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    vocab_size: PositiveInt
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    max_position_embeddings: PositiveInt | None = None
    hidden_act: str = "silu"
    bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = None
    layer_types: list[str] | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool | None = None
    num_experts: PositiveInt = Field(
        default=128, validation_alias=AliasChoices("num_experts", "num_local_experts")
    )
    num_experts_per_tok: PositiveInt = 8
    moe_intermediate_size: PositiveInt = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    @property
    def language_type(self) -> LanguageType | None:
        """Kind of language model, by its class or else its model_type; None for another."""
        stated = self.architectures[0] if self.architectures else None
        for name, architecture in ARCHITECTURES.items():
            if stated == architecture or (stated is None and self.model_type == name):
                return name
        return None

    @property
    def is_gpt_oss(self) -> bool:
        """Whether it is one of OpenAI's open models."""
        return self.model_type in _GPT_OSS or bool(_GPT_OSS & set(self.architectures or ()))

    @property
    def has_two_ropes(self) -> bool:
        """Whether two descriptions of RoPE say different things."""
        older, newer = self.rope_scaling, self.rope_parameters
        return older is not None and newer is not None and older.scaling != newer.scaling

    @property
    def rotary_share(self) -> float:
        """Share of a head's width that RoPE turns."""
        return self._rope.partial_rotary_factor or self.partial_rotary_factor or 1.0

    @property
    def rope(self) -> tuple[float, str]:
        """Base and kind of RoPE."""
        parameters = self._rope
        return parameters.rope_theta or self.rope_theta, parameters.kind

    @property
    def _rope(self) -> _Rope:
        return self.rope_parameters or self.rope_scaling or _Rope()

    @property
    def scaling(self) -> dict[str, Any]:
        """Fields of a LanguageConfig about the scaling of RoPE; empty if there is none.

        Either its scaling by wavelength, or the position up to which it is not scaled and the
        scaling from there on.
        """
        rope = self._rope
        if rope.kind == SCALES_WAVES:
            return {
                "rope_scaling": {
                    "factor": rope.factor,
                    "low_frequency_factor": rope.low_freq_factor,
                    "high_frequency_factor": rope.high_freq_factor,
                    "original_positions": rope.original_max_position_embeddings,
                }
            }
        if rope.kind != SCALES_LATER:
            return {}
        usual = 32_768 if (self.language_type or "").startswith("qwen") else 2048
        most = self.max_position_embeddings or usual
        return {"max_positions": most, "rope_factor": rope.factor}

    @property
    def head_size(self) -> int | None:
        """Size of a head where it is not hidden_size / heads."""
        usual = _QWEN3_HEAD_SIZE if self.language_type == "qwen3" else None
        size = self.head_dim or usual
        return None if size is None or size * self.num_attention_heads == self.hidden_size else size

    @property
    def experts(self) -> ExpertsConfig:
        """The experts of every layer of a model that has some."""
        return ExpertsConfig(
            experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
            ffn_hidden_size=self.moe_intermediate_size,
            normalized=self.norm_topk_prob,
            # Transformers adds the loss where the router's logits are returned.
            auxiliary_loss=auxiliary_loss(
                self.router_aux_loss_coef, self.num_experts_per_tok, self.num_hidden_layers
            )
            if self.output_router_logits
            else 0.0,
        )


def known_type(given: ReleasedLanguage, path: Path, known: Sequence[LanguageType]) -> LanguageType:
    """Kind of the language model that a part of `path` describes, which must be one of some.

    Raises:
        UserError: it is another one.
    """
    kind = given.language_type
    if kind is not None and kind in known:
        return kind
    names = ", ".join(ARCHITECTURES[each] for each in known)
    if given.is_gpt_oss:
        raise UserError(
            f"{path}: its language model is GPT-OSS, whose attention has learned sinks and whose "
            f"experts have biases and a clamped activation; it must be one of {names}, which the "
            "other models of InternVL3.5 have"
        )
    name = (given.architectures or [given.model_type])[0]
    raise UserError(
        f"{path}: its language model is {name or 'not named'}; it must be one of {names}"
    )


def language_config(
    given: ReleasedLanguage, kind: LanguageType, tied_head: bool, path: Path
) -> LanguageConfig:
    """The language model that a part of `path` describes.

    Raises:
        UserError: it is of a variant that this project's layers are not.
    """
    experts = given.experts if kind == "qwen3_moe" else None
    refuse(
        path, *_rope_cases(given), *_layer_cases(given), *(_expert_cases(given) if experts else ())
    )
    return LanguageConfig(
        layers=given.num_hidden_layers,
        hidden_size=given.hidden_size,
        heads=given.num_attention_heads,
        kv_heads=given.num_key_value_heads or given.num_attention_heads,
        head_size=given.head_size,
        ffn_hidden_size=given.intermediate_size,
        vocab_size=given.vocab_size,
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        norm_eps=given.rms_norm_eps,
        rope_base=int(given.rope[0]),
        **given.scaling,
        tied_head=tied_head,
        runs=() if experts is None else (LayerRun(layers=1, experts=experts),),
    )


def invalid(path: Path, error: ValidationError) -> UserError:
    """What is wrong with a value that a configuration of this project does not take."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return UserError(f"{path}: {place}: {complaint(first)}; pass the file of a released model")


def refuse(path: Path, *cases: Case) -> None:
    """Raise UserError for the first case that holds."""
    for holds, given, must_be in cases:
        if holds:
            raise UserError(f"{path}: has {given}; it must be {must_be}")


def _rope_cases(given: ReleasedLanguage) -> list[Case]:
    base, kind = given.rope
    others = _PHI3_SCALES if given.language_type == "phi3" else ()
    return [
        (
            kind not in ("default", SCALES_LATER, SCALES_WAVES, *others),
            f"RoPE of type {kind!r}",
            "unscaled, or scaled as Llama 3.1's",
        ),
        (
            None in (given.scaling.get("rope_scaling") or {}).values(),
            f"RoPE of type {kind!r} without all of its numbers",
            "one with all of them",
        ),
        (
            given.scaling.get("rope_factor", 1.0) is None,
            f"RoPE of type {kind!r} without a factor",
            "one with a factor",
        ),
        (
            given.has_two_ropes,
            "a rope_scaling and rope_parameters that differ",
            "one of them, or both alike",
        ),
        (given.rotary_share != 1, f"partial_rotary_factor {given.rotary_share}", "1"),
        (not base.is_integer(), f"rope_theta {base}", "a whole number"),
    ]


def _layer_cases(given: ReleasedLanguage) -> list[Case]:
    types = sorted(set(given.layer_types or ()))
    # Without the switch that Qwen's classes have.
    window, longest = given.sliding_window, given.max_position_embeddings or 4096
    return [
        (
            types not in ([], ["full_attention"]),
            f"layer_types {types}",
            "full_attention in all layers",
        ),
        (given.hidden_act != "silu", f"hidden_act {given.hidden_act!r}", "'silu'"),
        (
            given.bias or given.attention_bias or given.mlp_bias,
            "biases in the language model",
            "without any but Qwen2's of q, k and v",
        ),
        (given.use_sliding_window, "use_sliding_window true", "false"),
        (
            given.language_type == "phi3" and window is not None and window < longest,
            f"sliding_window {window}",
            f"none, or at least max_position_embeddings {longest}",
        ),
    ]


def _expert_cases(given: ReleasedLanguage) -> list[Case]:
    is_plain = given.decoder_sparse_step == 1 and not given.mlp_only_layers
    return [
        (
            not is_plain,
            "a decoder_sparse_step or mlp_only_layers that leave layers without experts",
            "1 and []: experts in every layer",
        ),
    ]
