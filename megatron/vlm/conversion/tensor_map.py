"""Map each parameter of this project to its released tensors.

    parameters(model)            every parameter of the whole model, with its shape
    released(parameter, layout)  its released tensors, and their arrangement

Layouts: InternVL's own, with InternLM2, Llama, Qwen2 or Qwen3; Transformers'
InternVLForConditionalGeneration; Qwen2-VL, Qwen2.5-VL and Qwen3-VL under released and Transformers'
names; text-only Llama, Qwen2, Qwen3 and Qwen3Moe. Experts are separate tensors, except stacked and
transposed in released Qwen3-VL, and stacked in Transformers 5. Whisper's encoder has its own
checkpoint (`whisper_tensors`). Only rows and axes are rearranged, so round trips are bit-exact.

Shapes: R rows (any trailing axes stay), N heads, G key/value heads, Q = N / G heads of a group,
D head size, X experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

import torch

from megatron.vlm.model.embeddings import IMAGE_CHANNELS
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.encoders import ClipsEncoder, EncoderLayers, ImagesEncoder

Shape = tuple[int, ...]

_DEEPSTACK = "vision_deepstack"
_STACKED = ".mlp.experts.gate_up_proj"
_TAPS = 3
"""Width of the audio encoder's convolutions."""


class Layout(StrEnum):
    """Names and arrangement of a released checkpoint's tensors."""

    INTERNVL_INTERNLM2 = "internvl-internlm2"
    INTERNVL_LLAMA = "internvl-llama"
    INTERNVL_QWEN2 = "internvl-qwen2"
    INTERNVL_QWEN3 = "internvl-qwen3"
    INTERNVL_QWEN3_MOE = "internvl-qwen3-moe"
    TRANSFORMERS = "transformers"
    TRANSFORMERS_PREFIXED = "transformers-prefixed"
    """Transformers' layout with names of some versions: `model.vision_tower...`"""
    TRANSFORMERS_STACKED = "transformers-stacked"
    """Transformers 5's names: `transformers` with stacked experts."""
    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3-moe"
    QWEN3_MOE_STACKED = "qwen3-moe-stacked"
    QWEN2_VL = "qwen2-vl"
    QWEN2_VL_PREFIXED = "qwen2-vl-prefixed"
    QWEN2_5_VL = "qwen2.5-vl"
    QWEN2_5_VL_PREFIXED = "qwen2.5-vl-prefixed"
    """With Transformers' names: `model.visual...`, not `visual...`, as in all Qwen3-VL."""
    QWEN3_VL = "qwen3-vl"
    QWEN3_VL_MOE = "qwen3-vl-moe"
    """As released and in Transformers 4: experts stacked and transposed."""
    QWEN3_VL_MOE_STACKED = "qwen3-vl-moe-stacked"
    """As in Transformers 5: experts stacked, not transposed."""
    QWEN3_VL_MOE_APART = "qwen3-vl-moe-apart"
    """With separate experts, as text-only models have."""

    @property
    def is_original(self) -> bool:
        """Whether it is InternVL's own."""
        return self.value.startswith("internvl")

    @property
    def is_text_only(self) -> bool:
        """Whether its models have no encoder."""
        has_tiles = self.is_original or self.value.startswith("transformers")
        return not (has_tiles or self.is_qwen_vl)

    @property
    def is_qwen_vl(self) -> bool:
        """Whether it is a Qwen-VL's: images at native resolution."""
        return "-vl" in self.value

    @property
    def has_gated_vision(self) -> bool:
        """Whether the vision tower has gated MLPs."""
        return self in (Layout.QWEN2_5_VL, Layout.QWEN2_5_VL_PREFIXED)

    @property
    def has_prefix(self) -> bool:
        """Whether names begin with `model.`, including the vision tower."""
        return self.value.startswith("qwen3-vl") or self in (
            Layout.TRANSFORMERS_PREFIXED,
            Layout.TRANSFORMERS_STACKED,
            Layout.QWEN2_VL_PREFIXED,
            Layout.QWEN2_5_VL_PREFIXED,
        )

    @property
    def has_stacked_experts(self) -> bool:
        """Whether a layer's experts are one tensor."""
        return self.value.endswith("-stacked") or self.has_turned_experts

    @property
    def has_turned_experts(self) -> bool:
        """Whether experts' matrices are transposed."""
        return self is Layout.QWEN3_VL_MOE


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of the whole model, over all pipeline stages and tensor-parallel ranks."""

    key: str
    """Key in this project's checkpoints, which stack a tower's layers in one tensor."""
    shape: Shape
    """Shape of one layer's parameter."""
    layer: int | None = None
    """Number of the layer, from 0. None outside layers."""
    layers: int | None = None

    @property
    def name(self) -> str:
        """Name as in `initialize.global_parameter_name`."""
        if self.layer is None:
            return self.key
        return self.key.replace(".layers.", f".layers.{self.layer}.", 1)


class Arrangement(ABC):
    """Arrangement of a parameter in its released tensors."""

    @abstractmethod
    def shapes(self, own: Shape) -> tuple[Shape, ...]:
        """Shapes of the released tensors of a parameter of shape `own`."""

    @abstractmethod
    def join(self, pieces: Sequence[torch.Tensor], own: Shape) -> torch.Tensor:
        """Join released tensors into a parameter of shape `own`."""

    @abstractmethod
    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split a parameter into released tensors. The inverse of `join`."""


@dataclass(frozen=True, slots=True)
class Parts(Arrangement):
    """Concatenated tensors of one shape: SwiGLU's gate and up, or experts' matrices."""

    shape: Shape
    count: int = 1

    def shapes(self, own: Shape) -> tuple[Shape, ...]:
        return (self.shape,) * self.count

    def join(self, pieces: Sequence[torch.Tensor], own: Shape) -> torch.Tensor:
        # A single tensor is not copied.
        return (torch.cat(list(pieces)) if self.count > 1 else pieces[0]).reshape(own)

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.reshape(self.count * self.shape[0], *self.shape[1:]).chunk(self.count)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryKeyValue(Arrangement):
    """All queries, all keys, all values; here a group's queries, its key, its value, and so on."""

    heads: int
    kv_heads: int
    is_fused: bool
    """Whether the released checkpoint has one tensor too."""

    def shapes(self, own: Shape) -> tuple[Shape, ...]:
        if self.is_fused:
            return (own,)
        return tuple((rows, *own[1:]) for rows in self._rows(own[0]))

    def join(self, pieces: Sequence[torch.Tensor], own: Shape) -> torch.Tensor:
        if self.is_fused:
            pieces = pieces[0].split(self._rows(own[0]))
        grouped = [piece.unflatten(0, (self.kv_heads, -1)) for piece in pieces]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grouped_GR = tensor.unflatten(0, (self.kv_heads, -1))
        rows = [rows // self.kv_heads for rows in self._rows(len(tensor))]
        pieces = [piece.flatten(0, 1) for piece in grouped_GR.split(rows, dim=1)]
        return (torch.cat(pieces),) if self.is_fused else tuple(pieces)

    def _rows(self, own_rows: int) -> list[int]:
        head_size = own_rows // (self.heads + 2 * self.kv_heads)
        return [self.heads * head_size, self.kv_heads * head_size, self.kv_heads * head_size]


class Turned(Arrangement):
    """A stack of matrices [X, rows, columns], each transposed."""

    def shapes(self, own: Shape) -> tuple[Shape, ...]:
        return ((own[0], own[2], own[1]),)

    def join(self, pieces: Sequence[torch.Tensor], own: Shape) -> torch.Tensor:
        return pieces[0].transpose(1, 2).contiguous()

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor.transpose(1, 2).contiguous(),)


@dataclass(frozen=True, slots=True)
class QueryValueBias(Arrangement):
    """Biases of queries and values, with zeros for keys: Whisper's keys have no bias."""

    heads: int

    def shapes(self, own: Shape) -> tuple[Shape, ...]:
        return ((own[0] // 3,),) * 2

    def join(self, pieces: Sequence[torch.Tensor], own: Shape) -> torch.Tensor:
        queries, values = (piece.unflatten(0, (self.heads, -1)) for piece in pieces)
        return torch.cat([queries, torch.zeros_like(queries), values], dim=1).flatten()

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queries, _, values = tensor.unflatten(0, (self.heads, -1)).chunk(3, dim=1)
        return queries.flatten(), values.flatten()


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """The released tensors of one parameter."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    arrangement: Arrangement


# Module names here, or a tensor without a module. A tuple is several released tensors, `*` the
# expert's number.
_Names = dict[str, str | tuple[str, ...]]

_LAYER = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules of a layer in every tower."""


def _layer(*names: str | tuple[str, ...]) -> _Names:
    return dict(zip(_LAYER, names, strict=True))


def _tile_layer(layer: _Names, attention: str, scale: str) -> _Names:
    """Names of an InternViT layer, with q and k norms and layer scales."""
    return layer | {
        "self_attention.q_layernorm": f"{attention}.q_norm",
        "self_attention.k_layernorm": f"{attention}.k_norm",
        "self_attn_bda.scale": f"{scale}1",
        "mlp_bda.scale": f"{scale}2",
    }


def _apart(attention: str) -> tuple[str, ...]:
    return tuple(f"{attention}.{one}_proj" for one in "qkv")


_GATED = ("mlp.gate_proj", "mlp.up_proj")
_QWEN2_VL_VISION = _layer("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
_ORIGINAL_VISION = _tile_layer(_QWEN2_VL_VISION, "attn", "ls")
_TRANSFORMERS_VISION = _tile_layer(
    _layer(
        "layernorm_before",
        _apart("attention"),
        "attention.projection_layer",
        "layernorm_after",
        "mlp.fc1",
        "mlp.fc2",
    ),
    "attention",
    "lambda_",
)
_QWEN2_5_VL_VISION = _QWEN2_VL_VISION | {
    "mlp.linear_fc1": _GATED,
    "mlp.linear_fc2": "mlp.down_proj",
}
_QWEN3_VL_VISION = _QWEN2_VL_VISION | {
    "mlp.linear_fc1": "mlp.linear_fc1",
    "mlp.linear_fc2": "mlp.linear_fc2",
}
_WHISPER = _layer(
    "self_attn_layer_norm",
    _apart("self_attn"),
    "self_attn.out_proj",
    "final_layer_norm",
    "fc1",
    "fc2",
)
_WHISPER_REST: _Names = {
    "audio_embedding.conv1": "conv1",
    "audio_embedding.conv2": "conv2",
    "audio_projector.norm": "layer_norm",
}
_INTERNLM2 = _layer(
    "attention_norm",
    "attention.wqkv",
    "attention.wo",
    "ffn_norm",
    ("feed_forward.w1", "feed_forward.w3"),
    "feed_forward.w2",
)
_LLAMA = _layer(
    "input_layernorm",
    _apart("self_attn"),
    "self_attn.o_proj",
    "post_attention_layernorm",
    _GATED,
    "mlp.down_proj",
)
_QWEN3 = _LLAMA | {
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.router": "mlp.gate",
    "mlp.experts.linear_fc1": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
    "mlp.experts.linear_fc2": "mlp.experts.*.down_proj",
}
_STACKED_QWEN3 = _QWEN3 | {
    "mlp.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.linear_fc2.weight": "mlp.experts.down_proj",
}
_ORIGINAL_REST: _Names = {
    "vision_embedding.patch_projection": "vision_model.embeddings.patch_embedding",
    "vision_embedding.class_token": "vision_model.embeddings.class_embedding",
    "vision_embedding.positions": "vision_model.embeddings.position_embedding",
    "projector.norm": "mlp1.0",
    "projector.linear_fc1": "mlp1.1",
    "projector.linear_fc2": "mlp1.3",
}
_TRANSFORMERS_REST: _Names = {
    "vision_embedding.patch_projection": "vision_tower.embeddings.patch_embeddings.projection",
    "vision_embedding.class_token": "vision_tower.embeddings.cls_token",
    "vision_embedding.positions": "vision_tower.embeddings.position_embeddings",
    "projector.norm": "multi_modal_projector.layer_norm",
    "projector.linear_fc1": "multi_modal_projector.linear_1",
    "projector.linear_fc2": "multi_modal_projector.linear_2",
}
_QWEN3_VL_REST: _Names = {
    "vision_embedding.patch_projection": "visual.patch_embed.proj",
    "vision_embedding.positions": "visual.pos_embed.weight",
    "projector.norm": "visual.merger.norm",
    "projector.linear_fc1": "visual.merger.linear_fc1",
    "projector.linear_fc2": "visual.merger.linear_fc2",
}
_QWEN2_VL_REST = _QWEN3_VL_REST | {
    "projector.norm": "visual.merger.ln_q",
    "projector.linear_fc1": "visual.merger.mlp.0",
    "projector.linear_fc2": "visual.merger.mlp.2",
}
_LLAMA_REST: _Names = {
    "embedding.word_embeddings": "language_model.model.embed_tokens",
    "language.final_layernorm": "language_model.model.norm",
    "head": "language_model.lm_head",
}
_INTERNLM2_REST = _LLAMA_REST | {
    "embedding.word_embeddings": "language_model.model.tok_embeddings",
    "head": "language_model.output",
}


_Named = tuple[str, Shape]


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Yield every parameter once, in forward order."""
    if model.takes_images:
        yield from _tile_parameters(model)
    if model.images is not None:
        yield from _image_parameters(model.images, model.language.hidden_size)
    if model.takes_audio:
        yield from audio_parameters(model)
    language, width = model.language, model.language.hidden_size
    yield Parameter(key="embedding.word_embeddings.weight", shape=(language.vocab_size, width))
    yield from _stacked("language", language.layers, _language_layer(language))
    yield Parameter(key="language.final_layernorm.weight", shape=(width,))
    if not language.tied_head:
        yield Parameter(key="head.weight", shape=(language.vocab_size, width))


def _tile_parameters(model: ModelConfig) -> Iterator[Parameter]:
    vision, own, width = model.vision, model.vision.hidden_size, model.language.hidden_size
    patch_values = IMAGE_CHANNELS * vision.patch_size**2
    yield from _single(
        *_linear("vision_embedding.patch_projection", own, patch_values),
        ("vision_embedding.class_token", (own,)),
        ("vision_embedding.positions", (vision.positions_per_item, own)),
    )
    yield from _stacked("vision", vision.layers, _encoder_layer(vision))
    yield from _single(
        *_linear("projector.norm", vision.projector_input_size),
        *_linear("projector.linear_fc1", width, vision.projector_input_size),
        *_linear("projector.linear_fc2", width, width),
    )


def _image_parameters(tower: ImagesEncoder, width: int) -> Iterator[Parameter]:
    """Parameters of a native-resolution image encoder and its projectors."""
    own, cell = tower.hidden_size, tower.projector_input_size
    yield from _single(
        *_linear(
            "vision_embedding.patch_projection", own, tower.values_per_patch, bias=tower.patch_bias
        )
    )
    if tower.learned_positions:
        yield Parameter(key="vision_embedding.positions", shape=(tower.learned_positions, own))
    yield from _stacked("vision", tower.layers, _encoder_layer(tower))
    yield from _single(*_cell_projector("projector", tower, own, width))
    for place in range(len(tower.deepstack_layers)):
        yield from _single(*_cell_projector(f"{_DEEPSTACK}.{place}", tower, cell, width))


def _cell_projector(name: str, tower: ImagesEncoder, normed: int, width: int) -> Iterator[_Named]:
    """A norm, of a patch or of a cell, and two linears over cells."""
    cell = tower.projector_input_size
    inner = tower.projector_hidden_size or cell
    yield from _linear(f"{name}.norm", normed, bias=tower.normalization == "LayerNorm")
    yield from _linear(f"{name}.linear_fc1", inner, cell)
    yield from _linear(f"{name}.linear_fc2", width, inner)


def audio_parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Yield the parameters of the audio encoder and its projector."""
    audio, own, width = model.audio, model.audio.hidden_size, model.language.hidden_size
    yield from _single(
        *_linear("audio_embedding.conv1", own, audio.mel_bins, _TAPS),
        *_linear("audio_embedding.conv2", own, own, _TAPS),
    )
    yield from _stacked("audio", audio.layers, _encoder_layer(audio))
    yield from _single(
        *_linear("audio_projector.norm", own, bias=audio.normalization == "LayerNorm"),
        *_linear("audio_projector.linear_fc1", width, audio.projector_input_size),
        *_linear("audio_projector.linear_fc2", width, width),
    )


def _linear(name: str, rows: int, *inner: int, bias: bool = True) -> Iterator[_Named]:
    """Weight and bias of a linear, a convolution or, without `inner`, a norm."""
    yield f"{name}.weight", (rows, *inner)
    if bias:
        yield f"{name}.bias", (rows,)


def _single(*named: _Named) -> Iterator[Parameter]:
    return (Parameter(key=key, shape=shape) for key, shape in named)


def _stacked(tower: str, layers: int, named: Iterator[_Named]) -> Iterator[Parameter]:
    for layer, (name, shape) in product(range(layers), named):
        yield Parameter(key=f"{tower}.layers.{name}", shape=shape, layer=layer, layers=layers)


def _encoder_layer(tower: EncoderLayers) -> Iterator[_Named]:
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


def _language_layer(language: LanguageConfig) -> Iterator[_Named]:
    width, inner, size = language.hidden_size, language.ffn_hidden_size, language.head_width
    experts = language.kinds[0].experts
    qkv_rows = (language.heads + 2 * language.kv_heads) * size
    yield "input_layernorm.weight", (width,)
    yield from _linear("self_attention.linear_qkv", qkv_rows, width, bias=language.qkv_bias)
    if language.qk_norm:
        yield "self_attention.q_layernorm.weight", (size,)
        yield "self_attention.k_layernorm.weight", (size,)
    yield "self_attention.linear_proj.weight", (width, language.heads * size)
    yield "pre_mlp_layernorm.weight", (width,)
    if experts is None:
        yield "mlp.linear_fc1.weight", (2 * inner, width)
        yield "mlp.linear_fc2.weight", (width, inner)
    else:
        count, inner = experts.experts, experts.ffn_hidden_size
        yield "mlp.router.weight", (count, width)
        yield "mlp.experts.linear_fc1.weight", (count, 2 * inner, width)
        yield "mlp.experts.linear_fc2.weight", (count, width, inner)


def released(parameter: Parameter, model: ModelConfig, layout: Layout) -> Released:
    """The released tensors of `parameter`."""
    arrangement = _arrangement(parameter, model, layout)
    return Released(
        names=_released_names(parameter, layout),
        shapes=arrangement.shapes(parameter.shape),
        arrangement=arrangement,
    )


def whisper_tensors(parameter: Parameter, audio: ClipsEncoder, prefix: str) -> Released | None:
    """Whisper tensors of an audio parameter. None for the projector, except its norm."""
    _, _, rest = parameter.key.partition(".layers.")
    own = rest or parameter.key
    module, _, part = own.rpartition(".")
    there = (_WHISPER if rest else _WHISPER_REST).get(module)
    if there is None:
        return None
    modules = (there,) if isinstance(there, str) else there
    arrangement: Arrangement = Parts(parameter.shape)
    if own == "self_attention.linear_qkv.bias":
        modules, arrangement = (modules[0], modules[2]), QueryValueBias(audio.heads)
    elif len(modules) > 1:
        arrangement = QueryKeyValue(heads=audio.heads, kv_heads=audio.heads, is_fused=False)
    layer = f"layers.{parameter.layer}." if rest else ""
    return Released(
        names=tuple(f"{prefix}{layer}{name}.{part}" for name in modules),
        shapes=arrangement.shapes(parameter.shape),
        arrangement=arrangement,
    )


def head_name(layout: Layout) -> str:
    """The head's tensor, which a model with a tied head may store as a copy of its embedding."""
    return _released_names(Parameter(key="head.weight", shape=()), layout)[0]


def embedding_parameter(model: ModelConfig) -> Parameter:
    """The token embedding, tied to the head or not."""
    return next(one for one in parameters(model) if one.key == "embedding.word_embeddings.weight")


def _arrangement(parameter: Parameter, model: ModelConfig, layout: Layout) -> Arrangement:
    tower, _, rest = parameter.key.partition(".layers.")
    if tower == "vision" and rest.startswith("self_attention.linear_qkv"):
        heads, is_fused = model.encoders[tower].heads, layout.is_original or layout.is_qwen_vl
        return QueryKeyValue(heads=heads, kv_heads=heads, is_fused=is_fused)
    if layout is not Layout.INTERNVL_INTERNLM2 and rest.startswith("self_attention.linear_qkv"):
        language = model.language
        return QueryKeyValue(heads=language.heads, kv_heads=language.kv_heads, is_fused=False)
    rows, *inner = parameter.shape
    is_gated = tower == "language" or layout.has_gated_vision
    if is_gated and rest.startswith("mlp.linear_fc1"):
        return Parts((rows // 2, *inner), 2)
    if rest.startswith("mlp.experts.") and layout.has_turned_experts:
        return Turned()
    if rest.startswith("mlp.experts.") and not layout.has_stacked_experts:
        parts = 2 if "linear_fc1" in rest else 1
        return Parts((inner[0] // parts, *inner[1:]), rows * parts)
    return Parts(_released_shape(parameter, model))


def _released_shape(parameter: Parameter, model: ModelConfig) -> Shape:
    if parameter.key == "vision_embedding.patch_projection.weight":
        own, tower = parameter.shape[0], model.images
        if tower is not None:
            patch = tower.patch_size
            return (own, IMAGE_CHANNELS, tower.frames_per_patch, patch, patch)
        return (own, IMAGE_CHANNELS, model.vision.patch_size, model.vision.patch_size)
    if parameter.key == "vision_embedding.class_token":
        return (1, 1, *parameter.shape)
    if parameter.key == "vision_embedding.positions" and model.takes_images:
        return (1, *parameter.shape)
    return parameter.shape


def _released_names(parameter: Parameter, layout: Layout) -> tuple[str, ...]:
    tower, _, own = parameter.key.partition(".layers.")
    is_internlm2 = layout is Layout.INTERNVL_INTERNLM2
    path, of_vision, rest = _vision_names(layout)
    if parameter.layer is None:
        prefix, own = "", parameter.key
        names = rest | (_INTERNLM2_REST if is_internlm2 else _LLAMA_REST)
    elif tower == "vision":
        prefix, names = f"{path}.{parameter.layer}.", of_vision
    else:
        prefix = f"language_model.model.layers.{parameter.layer}."
        of_qwen3 = _STACKED_QWEN3 if layout.has_stacked_experts else _QWEN3
        names = _INTERNLM2 if is_internlm2 else of_qwen3
    module, part = (own, "") if own in names else own.rsplit(".", 1)
    if module.startswith(_DEEPSTACK):  # numbered and named like the projector
        there: str | tuple[str, ...] = module.replace(_DEEPSTACK, "visual.deepstack_merger_list", 1)
    else:
        there = names[module]
    modules = (there,) if isinstance(there, str) else there
    suffix = f".{part}" if part else ""
    if any("*" in name for name in modules):
        numbers = map(str, range(parameter.shape[0]))
        modules = tuple(name.replace("*", each) for each in numbers for name in modules)
    plain = tuple(f"{prefix}{name}{suffix}" for name in modules)
    if layout.is_text_only or layout in (Layout.QWEN2_VL, Layout.QWEN2_5_VL):
        return tuple(name.removeprefix("language_model.") for name in plain)
    return tuple(map(_prefixed, plain)) if layout.has_prefix else plain


def _vision_names(layout: Layout) -> tuple[str, _Names, _Names]:
    """Path of the vision tower's layers, names in a layer, and names outside layers."""
    if layout.is_original:
        return "vision_model.encoder.layers", _ORIGINAL_VISION, _ORIGINAL_REST
    if not layout.is_qwen_vl:
        return "vision_tower.encoder.layer", _TRANSFORMERS_VISION, _TRANSFORMERS_REST
    if layout.value.startswith("qwen3"):
        return "visual.blocks", _QWEN3_VL_VISION, _QWEN3_VL_REST
    layer = _QWEN2_5_VL_VISION if layout.has_gated_vision else _QWEN2_VL_VISION
    return "visual.blocks", layer, _QWEN2_VL_REST


def _prefixed(name: str) -> str:
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    return "model." + name.replace("language_model.model.", "language_model.", 1)


def has_stacked_experts(names: Collection[str]) -> bool:
    """Whether any name is of stacked experts."""
    return any(name.endswith(_STACKED) for name in names)
