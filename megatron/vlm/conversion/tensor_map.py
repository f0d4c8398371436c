"""Map from each parameter of this project to its released tensors.

    parameters(model)                        all parameters of the full model, with shapes
    find_released(parameter, model, layout)  its released tensors' names, shapes and arrangement

Layouts: InternVL's own, with InternLM2, Llama, Qwen2 or Qwen3; Transformers'
InternVLForConditionalGeneration; Qwen2-VL, Qwen2.5-VL and Qwen3-VL under released and Transformers'
names; Qwen3.5; text-only Llama, Qwen2, Qwen3, Qwen3Moe and Qwen3.5. Experts are separate tensors,
except stacked and transposed in released Qwen3-VL, and stacked in Qwen3.5 and Transformers 5.
Whisper's encoder has its own checkpoint (`whisper_tensors`). Only rows and axes are rearranged, so
round trips are bit-exact.

Shapes: R rows, with any trailing axes; G groups of heads; X experts.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import product
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

import torch
from pydantic import BaseModel

from megatron.vlm.model.embeddings import IMAGE_CHANNELS
from omnibal.base.files import read_toml_model
from omnibal.families.text import LanguageType
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.encoders import ClipsEncoder, Encoder, EncoderLayers, ImagesEncoder, TilesEncoder
from omnibal.model.layer_kinds import LayerKind, LinearAttention

Shape = tuple[int, ...]
LayoutFamily = Literal[
    "internvl", "transformers", "text", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe",
    "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text",
]  # fmt: skip
"""InternVL's own, Transformers' InternVL, text-only before Qwen3.5, or a Qwen's model_type."""
Root = Literal["language_model.model", "model.language_model", "model"]
_NESTED: Final = "model.language_model"
ExpertStorage = Literal["apart", "stacked", "transposed"]
"""A tensor per expert, one tensor per layer, or one tensor per layer of transposed matrices."""

_DEEPSTACK_KEY, _MERGERS = "vision_deepstack", "visual.deepstack_merger_list"
_STACKED_EXPERTS = ".mlp.experts.gate_up_proj"
WORD_TABLE, HEAD = "embedding.word_embeddings.weight", "head.weight"  # keys
_CONV_WIDTH = 3  # kernel of Whisper's convolutions
_OF_LAYER = re.compile(r"^(\w+)\.(?:layers|transformer_layer)\.(?:\d+\.)?(.*)$")
_PREDICTION = "prediction"  # prefix of the prediction layer's parameters
PREDICTION_PREFIX = "mtp."  # of its released tensors


class TensorLayout(StrEnum):
    """Names and arrangement of a released checkpoint's tensors."""

    family: LayoutFamily
    language: LanguageType | None  # None for Transformers' InternVL: any except InternLM2
    root: Root  # prefix of the language model's tensors
    experts: ExpertStorage

    def __new__(
        cls,
        name: str,
        family: LayoutFamily,
        language: LanguageType | None = None,
        root: Root = "language_model.model",
        experts: ExpertStorage = "apart",
    ) -> "TensorLayout":
        # A member is the string `name`, with attributes.
        member = str.__new__(cls, name)
        member._value_ = name
        member.family, member.language = family, language
        member.root, member.experts = root, experts
        return member

    INTERNVL_INTERNLM2 = "internvl-internlm2", "internvl", "internlm2"
    INTERNVL_LLAMA = "internvl-llama", "internvl", "llama"
    INTERNVL_QWEN2 = "internvl-qwen2", "internvl", "qwen2"
    INTERNVL_QWEN3 = "internvl-qwen3", "internvl", "qwen3"
    INTERNVL_QWEN3_MOE = "internvl-qwen3-moe", "internvl", "qwen3_moe"
    TRANSFORMERS = "transformers", "transformers"
    # Some versions of Transformers put `model.` before all names but the head's.
    TRANSFORMERS_PREFIXED = "transformers-prefixed", "transformers", None, _NESTED
    TRANSFORMERS_STACKED = "transformers-stacked", "transformers", None, _NESTED, "stacked"
    LLAMA = "llama", "text", "llama", "model"
    QWEN2 = "qwen2", "text", "qwen2", "model"
    QWEN3 = "qwen3", "text", "qwen3", "model"
    QWEN3_MOE = "qwen3-moe", "text", "qwen3_moe", "model"
    QWEN3_MOE_STACKED = "qwen3-moe-stacked", "text", "qwen3_moe", "model", "stacked"
    QWEN2_VL = "qwen2-vl", "qwen2_vl", "qwen2", "model"
    QWEN2_VL_PREFIXED = "qwen2-vl-prefixed", "qwen2_vl", "qwen2", _NESTED
    QWEN2_5_VL = "qwen2.5-vl", "qwen2_5_vl", "qwen2", "model"
    QWEN2_5_VL_PREFIXED = "qwen2.5-vl-prefixed", "qwen2_5_vl", "qwen2", _NESTED
    QWEN3_VL = "qwen3-vl", "qwen3_vl", "qwen3", _NESTED
    # Experts as released and in Transformers 4, as in Transformers 5, as in text-only models.
    QWEN3_VL_MOE = "qwen3-vl-moe", "qwen3_vl_moe", "qwen3_moe", _NESTED, "transposed"
    QWEN3_VL_MOE_STACKED = "qwen3-vl-moe-stacked", "qwen3_vl_moe", "qwen3_moe", _NESTED, "stacked"
    QWEN3_VL_MOE_APART = "qwen3-vl-moe-apart", "qwen3_vl_moe", "qwen3_moe", _NESTED
    QWEN3_5 = "qwen3.5", "qwen3_5", "qwen3", _NESTED
    QWEN3_5_MOE = "qwen3.5-moe", "qwen3_5_moe", "qwen3_moe", _NESTED, "stacked"
    QWEN3_5_MOE_APART = "qwen3.5-moe-apart", "qwen3_5_moe", "qwen3_moe", _NESTED
    QWEN3_5_TEXT = "qwen3.5-text", "qwen3_5_text", "qwen3", "model"
    QWEN3_5_MOE_TEXT = "qwen3.5-moe-text", "qwen3_5_moe_text", "qwen3_moe", "model", "stacked"
    QWEN3_5_MOE_TEXT_APART = "qwen3.5-moe-text-apart", "qwen3_5_moe_text", "qwen3_moe", "model"

    def storage_of(self, tower: str) -> ExpertStorage:
        """Return how a tower's experts are stored: always apart in the prediction layer."""
        return "apart" if tower == _PREDICTION else self.experts

    @property
    def is_original(self) -> bool:
        """Return whether the layout is InternVL's own."""
        return self.family == "internvl"

    @property
    def is_text_only(self) -> bool:
        """Return whether the layout has no encoder."""
        return self.family.endswith("text")

    @property
    def is_qwen_vl(self) -> bool:
        """Return whether the layout is Qwen-VL's or Qwen3.5's, with native-resolution images."""
        return self.family.startswith("qwen") and not self.is_text_only

    @property
    def is_hybrid(self) -> bool:
        """Return whether the layout is Qwen3.5's, with gated delta layers."""
        return self.family.startswith("qwen3_5")


# Families whose encoder has the tensor names of another family.
_TOWERS_LIKE = dict.fromkeys(("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen3_vl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of the full model, independent of pipeline stages and tensor-parallel ranks."""

    key: str  # key in this project's checkpoints, which stack a tower's layers if all are equal
    shape: Shape  # shape in one layer
    layer: int | None = None  # number of the layer, from 0, if stacked under `key`, else None
    layers: int | None = None  # number of layers stacked under `key`, or None if not stacked

    @property
    def name(self) -> str:
        """Return the name in the full model, as `initialize.global_parameter_name` does."""
        if self.layers is None:
            return self.key
        return self.key.replace(".layers.", f".layers.{self.layer}.", 1)

    @property
    def own_name(self) -> tuple[str, str]:
        """Return tower (or "prediction") and name in the layer; "" and the key outside layers."""
        match = _OF_LAYER.match(self.key)
        return ("", self.key) if match is None else (match[1], match[2])


class Arrangement(Protocol):
    """Arrangement of a parameter's values in its released tensors."""

    def join(self, pieces: Sequence[torch.Tensor], own: Shape) -> torch.Tensor:
        """Return the parameter of shape `own` from its released tensors."""

    def divide(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the released tensors: the inverse of `join`."""


@dataclass(frozen=True, slots=True)
class Parts:
    """`count` released tensors of `shape`, concatenated and reshaped, such as gate and up."""

    shape: Shape
    count: int = 1

    def join(self, pieces: Sequence[torch.Tensor], own: Shape) -> torch.Tensor:
        # A single tensor is not copied.
        return (torch.cat(list(pieces)) if self.count > 1 else pieces[0]).reshape(own)

    def divide(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.reshape(self.count * self.shape[0], *self.shape[1:]).chunk(self.count)


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows of several parts, such as q, k and v. Released: part after part. Here: all parts of
    group 0, of group 1, ..., as in Megatron-core, so that each tensor-parallel rank has groups.
    """

    groups: int
    parts: tuple[tuple[int, ...], ...]  # rows of each part, by released tensor

    def join(self, pieces: Sequence[torch.Tensor], own: Shape) -> torch.Tensor:
        parts = (
            part
            for piece, rows in zip(pieces, self.parts, strict=True)
            for part in piece.split(rows)
        )
        grouped = [part.unflatten(0, (self.groups, -1)) for part in parts]  # [G, R / G]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def divide(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = [rows // self.groups for piece in self.parts for rows in piece]
        parts = iter(tensor.unflatten(0, (self.groups, -1)).split(rows, dim=1))
        pieces = ([next(parts).flatten(0, 1) for _ in piece] for piece in self.parts)
        return tuple(torch.cat(own) if len(own) > 1 else own[0] for own in pieces)

    def of_piece(self, index: int) -> "GroupedRows":
        """Return the arrangement of released tensor `index` alone."""
        return GroupedRows(self.groups, (self.parts[index],))


def query_key_value(
    rows: int, heads: int, kv_heads: int, *, is_fused: bool, is_gated: bool = False
) -> GroupedRows:
    """Return the arrangement of q, k and v, in total `rows`, released as one tensor or three.

    `is_gated`: each head of q is followed by its output gate.
    """
    queries = heads * (1 + is_gated)
    size = rows // (queries + 2 * kv_heads)
    parts = (queries * size, kv_heads * size, kv_heads * size)
    return GroupedRows(kv_heads, (parts,) if is_fused else tuple((part,) for part in parts))


def delta_rows(linear: LinearAttention) -> tuple[GroupedRows, GroupedRows]:
    """Return arrangements of a gated delta layer's in_proj (qkv, gate, beta, decay) and conv."""
    keys = linear.key_heads * linear.key_head_size
    values = linear.value_heads * linear.value_head_size
    mixed, heads = (keys, keys, values), (linear.value_heads,)
    return (
        GroupedRows(linear.key_heads, (mixed, (values,), heads, heads)),
        GroupedRows(linear.key_heads, (mixed,)),
    )


class Transposed:
    """One released tensor of all experts, [X, columns, rows]; here [X, rows, columns]."""

    def join(self, pieces: Sequence[torch.Tensor], own: Shape) -> torch.Tensor:
        return pieces[0].transpose(1, 2).contiguous()

    def divide(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor.transpose(1, 2).contiguous(),)


@dataclass(frozen=True, slots=True)
class QueryValueBias:
    """Bias of q, k and v, interleaved by head. Released without k's, which is 0 here (Whisper)."""

    heads: int

    def join(self, pieces: Sequence[torch.Tensor], own: Shape) -> torch.Tensor:
        queries, values = (piece.unflatten(0, (self.heads, -1)) for piece in pieces)
        return torch.cat([queries, torch.zeros_like(queries), values], dim=1).flatten()

    def divide(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queries, _, values = tensor.unflatten(0, (self.heads, -1)).chunk(3, dim=1)
        return queries.flatten(), values.flatten()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Names of the released tensors of a parameter of shape `own`, and their conversion."""

    names: tuple[str, ...]
    own: Shape
    arrangement: Arrangement

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of the released tensors."""
        pieces = self.arrangement.divide(torch.empty(self.own, device="meta"))
        return tuple(tuple(piece.shape) for piece in pieces)


_ModuleNames: TypeAlias = dict[str, str | tuple[str, ...]]


class _TowerNames(BaseModel, frozen=True):
    """Released names of a tower's modules, from tensor_names.toml."""

    path: str = ""  # prefix of layer numbers
    layer: _ModuleNames = {}
    outside: _ModuleNames = {}


@cache
def _read_tower_names() -> dict[str, _TowerNames]:
    file = Path(__file__).with_name("tensor_names.toml")
    return read_toml_model(dict[str, _TowerNames], file, "install OmniBal again")


_NamedShapes = Iterable[tuple[str, Shape]]  # keys and shapes of parameters


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Yield the full model's parameters, in forward order, without a tied head."""
    language, width = model.language, model.language.hidden_size
    for name in model.encoders:
        yield from encoder_parameters(model, name)
    yield embedding_parameter(model)
    for number, kind in enumerate(language.kinds):
        for name, shape in _language_shapes(language, kind):
            yield layer_parameter(model, "language", number, name, shape)
    yield Parameter(key="language.final_layernorm.weight", shape=(width,))
    if not language.tied_head:
        yield Parameter(key=HEAD, shape=(language.vocab_size, width))
    if language.prediction_layers:
        yield from _make(_prediction_shapes(language))


def _prediction_shapes(language: LanguageConfig) -> _NamedShapes:
    width = language.hidden_size
    for norm in ("enorm", "hnorm", "final_layernorm"):
        yield f"{_PREDICTION}.{norm}.weight", (width,)
    yield f"{_PREDICTION}.eh_proj.weight", (width, 2 * width)
    for name, shape in _language_shapes(language, language.kinds[-1]):
        yield f"{_PREDICTION}.transformer_layer.{name}", shape


def layer_parameter(
    model: ModelConfig, tower: str, number: int, name: str, shape: Shape
) -> Parameter:
    """Return a parameter of layer `number`, which is in the key if the language model is hybrid."""
    language = model.language
    if tower == "language" and language.is_hybrid:
        return Parameter(key=f"language.layers.{number}.{name}", shape=shape)
    layers = language.layers if tower == "language" else model.encoders[tower].layers
    return Parameter(key=f"{tower}.layers.{name}", shape=shape, layer=number, layers=layers)


def encoder_parameters(model: ModelConfig, name: str) -> Iterator[Parameter]:
    """Yield the parameters of an encoder and its projectors."""
    tower, width = model.encoders[name], model.language.hidden_size
    cell, is_of_tiles = tower.projector_input_size, isinstance(tower, TilesEncoder)
    normed = cell if is_of_tiles else tower.hidden_size
    inner = (tower.projector_hidden_size or cell) if isinstance(tower, ImagesEncoder) else width
    bias = is_of_tiles or tower.normalization == "LayerNorm"
    yield from _make(_embedding_shapes(f"{name}_embedding", tower))
    for number, named in product(range(tower.layers), _encoder_shapes(tower)):
        yield layer_parameter(model, name, number, *named)
    projector = "projector" if name == "vision" else f"{name}_projector"
    yield from _make(_projector_shapes(projector, normed, cell, inner, width, bias=bias))
    for place in range(tower.deepstack_features):
        # Unlike the projector's, the norm is over a folded cell.
        deepstack = f"{_DEEPSTACK_KEY}.{place}"
        yield from _make(_projector_shapes(deepstack, cell, cell, inner, width, bias=bias))


def _embedding_shapes(name: str, tower: Encoder) -> _NamedShapes:
    width, patches = tower.hidden_size, f"{name}.patch_projection"
    if isinstance(tower, ClipsEncoder):
        yield from _linear(f"{name}.conv1", width, tower.mel_bins, _CONV_WIDTH)
        yield from _linear(f"{name}.conv2", width, width, _CONV_WIDTH)
    elif isinstance(tower, TilesEncoder):
        yield from _linear(patches, width, IMAGE_CHANNELS * tower.patch_size**2)
        yield f"{name}.class_token", (width,)
        yield f"{name}.positions", (tower.positions_per_item, width)
    else:
        yield from _linear(patches, width, tower.values_per_patch, bias=tower.patch_bias)
        if tower.learned_positions:
            yield f"{name}.positions", (tower.learned_positions, width)


def _projector_shapes(
    name: str, normed: int, cell: int, inner: int, width: int, *, bias: bool = True
) -> _NamedShapes:
    """Yield a norm over `normed` channels, with `bias` if a LayerNorm, and two linears."""
    yield from _linear(f"{name}.norm", normed, bias=bias)
    yield from _linear(f"{name}.linear_fc1", inner, cell)
    yield from _linear(f"{name}.linear_fc2", width, inner)


def _linear(name: str, rows: int, *inner: int, bias: bool = True) -> _NamedShapes:
    """Yield weight and bias of a linear, a convolution or, without `inner`, a norm."""
    yield f"{name}.weight", (rows, *inner)
    if bias:
        yield f"{name}.bias", (rows,)


def _make(named: _NamedShapes) -> Iterator[Parameter]:
    return (Parameter(key=key, shape=shape) for key, shape in named)


def _encoder_shapes(tower: EncoderLayers) -> _NamedShapes:
    width, inner = tower.hidden_size, tower.ffn_hidden_size
    gated = isinstance(tower, ImagesEncoder) and tower.gated
    for norm in ("input_layernorm", "pre_mlp_layernorm"):
        yield from _linear(norm, width, bias=tower.normalization == "LayerNorm")
    yield from _linear("self_attention.linear_qkv", 3 * width, width, bias=tower.qkv_bias)
    if tower.qk_norm:
        yield "self_attention.q_layernorm.weight", (width,)
        yield "self_attention.k_layernorm.weight", (width,)
    yield from _linear("self_attention.linear_proj", width, width)
    yield from _linear("mlp.linear_fc1", 2 * inner if gated else inner, width)
    yield from _linear("mlp.linear_fc2", width, inner)
    if tower.layer_scale_init is not None:
        yield "self_attn_bda.scale", (width,)
        yield "mlp_bda.scale", (width,)


def _language_shapes(language: LanguageConfig, kind: LayerKind) -> _NamedShapes:
    width, inner, experts = language.hidden_size, language.ffn_hidden_size, kind.experts
    yield "input_layernorm.weight", (width,)
    attention = (
        _attention_shapes(language) if kind.linear is None else _delta_shapes(kind.linear, width)
    )
    yield from ((f"self_attention.{name}", shape) for name, shape in attention)
    yield "pre_mlp_layernorm.weight", (width,)
    if experts is None:
        yield "mlp.linear_fc1.weight", (2 * inner, width)
        yield "mlp.linear_fc2.weight", (width, inner)
    else:
        count, inner = experts.experts, experts.ffn_hidden_size
        yield "mlp.router.weight", (count, width)
        yield "mlp.experts.linear_fc1.weight", (count, 2 * inner, width)
        yield "mlp.experts.linear_fc2.weight", (count, width, inner)
        shared = experts.shared_ffn_hidden_size
        if shared is not None:
            yield "mlp.shared_experts.linear_fc1.weight", (2 * shared, width)
            yield "mlp.shared_experts.linear_fc2.weight", (width, shared)
        if experts.shared_gate:
            yield "mlp.shared_experts.gate_weight", (1, width)


def _attention_shapes(language: LanguageConfig) -> _NamedShapes:
    width, size = language.hidden_size, language.head_width
    rows = (language.heads * (1 + language.output_gate) + 2 * language.kv_heads) * size
    yield from _linear("linear_qkv", rows, width, bias=language.qkv_bias)
    if language.qk_norm:
        yield "q_layernorm.weight", (size,)
        yield "k_layernorm.weight", (size,)
    yield "linear_proj.weight", (width, language.heads * size)


def _delta_shapes(linear: LinearAttention, width: int) -> _NamedShapes:
    made_of, convolved = delta_rows(linear)
    values, heads = linear.value_heads * linear.value_head_size, (linear.value_heads,)
    yield "in_proj.weight", (sum(map(sum, made_of.parts)), width)
    yield "conv_weight", (sum(map(sum, convolved.parts)), 1, linear.convolution_width)
    yield from (("A_log", heads), ("dt_bias", heads), ("norm_weight", (linear.value_head_size,)))
    yield "out_proj.weight", (width, values)


def find_released(parameter: Parameter, model: ModelConfig, layout: TensorLayout) -> Sources:
    """Return a parameter's released tensors in a layout."""
    names = _released_names(parameter, layout)
    arrangement = _arrange(parameter, len(names), model, layout)
    return Sources(names=names, own=parameter.shape, arrangement=arrangement)


def whisper_tensors(parameter: Parameter, audio: ClipsEncoder, prefix: str) -> Sources | None:
    """Return an audio parameter's tensors in Whisper, or None for the projector's linears."""
    tower, own = parameter.own_name
    modules, heads = _read_tower_names()["whisper"], audio.heads
    names = modules.layer if tower else modules.outside
    if own.rpartition(".")[0] not in names:
        return None
    released = _expand_names(names, own, parameter.shape)
    layer = f"{modules.path}.{parameter.layer}." if tower else ""
    arrangement: Arrangement = Parts(parameter.shape)
    if len(released) > 1:
        rows, has_keys = parameter.shape[0], len(released) == 3
        qkv = query_key_value(rows, heads, heads, is_fused=False)
        arrangement = qkv if has_keys else QueryValueBias(heads)
    full = tuple(f"{prefix}{layer}{name}" for name in released)
    return Sources(names=full, own=parameter.shape, arrangement=arrangement)


def head_name(layout: TensorLayout) -> str:
    """Return the head's released name, under which checkpoints of tied heads may have a copy."""
    return _released_names(Parameter(key=HEAD, shape=()), layout)[0]


def embedding_parameter(model: ModelConfig) -> Parameter:
    """Return the token embedding's parameter."""
    return Parameter(key=WORD_TABLE, shape=(model.language.vocab_size, model.language.hidden_size))


def _arrange(
    parameter: Parameter, count: int, model: ModelConfig, layout: TensorLayout
) -> Arrangement:
    """Return the arrangement of a parameter that is released as `count` tensors."""
    tower, own = parameter.own_name
    shape, images, language = parameter.shape, model.images, model.language
    if own.startswith("self_attention.linear_qkv") and tower == "vision":
        heads = model.encoders[tower].heads
        return query_key_value(shape[0], heads, heads, is_fused=count == 1)
    if own.startswith("self_attention.linear_qkv") and layout.language != "internlm2":
        heads, kv_heads, gate = language.heads, language.kv_heads, language.output_gate
        return query_key_value(shape[0], heads, kv_heads, is_fused=False, is_gated=gate)
    if own in ("self_attention.in_proj.weight", "self_attention.conv_weight"):
        linear = next(kind.linear for kind in model.language.kinds if kind.linear is not None)
        return delta_rows(linear)["conv" in own]
    is_of_experts = own.startswith("mlp.experts.")
    if is_of_experts and layout.storage_of(tower) == "transposed":
        return Transposed()
    if count > 1:  # gate and up, or experts
        axes = 2 if is_of_experts else 1
        return Parts((math.prod(shape[:axes]) // count, *shape[axes:]), count)
    if parameter.key == "vision_embedding.patch_projection.weight":
        side = model.vision.patch_size if images is None else images.patch_size
        times = () if images is None else (images.frames_per_patch,)
        return Parts((shape[0], IMAGE_CHANNELS, *times, side, side))  # a convolution's kernel
    if parameter.key == "vision_embedding.class_token":
        return Parts((1, 1, *shape))  # broadcast over tiles
    if parameter.key == "vision_embedding.positions" and images is None:
        return Parts((1, *shape))  # broadcast over tiles
    return Parts(shape)


def _expand_names(names: _ModuleNames, own: str, shape: Shape) -> list[str]:
    """Return the released names of tensor `own` of a layer, or of a tensor outside of layers.

    A name with `*`, which is an expert's number, is repeated for all of `shape[0]` experts.
    """
    module, _, part = (own, "", "") if own in names else own.rpartition(".")
    entry = names[module]
    modules = [entry] if isinstance(entry, str) else entry
    numbers = range(shape[0]) if any("*" in name for name in modules) else ("",)
    end = f".{part}" if part else ""
    return [name.replace("*", str(number)) + end for number in numbers for name in modules]


def _released_names(parameter: Parameter, layout: TensorLayout) -> tuple[str, ...]:
    tower, own = parameter.own_name
    towers = _read_tower_names()
    vision = towers.get(_TOWERS_LIKE.get(layout.family, layout.family), _TowerNames())
    language = towers["internlm2" if layout.language == "internlm2" else "llama"]
    if not tower:
        prefix, names = "", vision.outside | language.outside
    elif tower == _PREDICTION:
        prefix, names = f"{PREDICTION_PREFIX}layers.0.", language.layer
    else:
        side = vision if tower == "vision" else language
        number = parameter.name.removeprefix(f"{tower}.layers.").partition(".")[0]
        prefix, names = f"{side.path}.{number}.", side.layer
    if layout.storage_of(tower) != "apart":
        names = names | towers["stacked"].layer
    if own.startswith(_DEEPSTACK_KEY):  # numbered, and otherwise named like the projector
        released = [own.replace(_DEEPSTACK_KEY, _MERGERS, 1)]
    else:
        released = [prefix + name for name in _expand_names(names, own, parameter.shape)]
    # tensor_names.toml has the root of InternVL's own layout, and no root of prediction layers.
    if layout.root == "language_model.model" or released[0].startswith(PREDICTION_PREFIX):
        return tuple(released)
    if layout.root == "model" or released[0].startswith("language_model.lm_head"):
        return tuple(name.removeprefix("language_model.") for name in released)
    old, new = "language_model.model.", "language_model."
    return tuple("model." + name.replace(old, new, 1) for name in released)


def has_stacked_experts(names: Collection[str]) -> bool:
    """Return whether released tensors with these names stack a layer's experts."""
    return any(name.endswith(_STACKED_EXPERTS) for name in names)
