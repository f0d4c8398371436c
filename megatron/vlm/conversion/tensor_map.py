"""Map from each parameter of this project to the released tensors that it is made of.

    parameters(model)            every parameter of the whole model, with its shape
    released(parameter, layout)  the released tensors it is made of, and how

Both layouts of InternVL are known: the original one, whose language model is InternLM2's, Llama's,
Qwen2's or Qwen3's, and the one of Transformers' own InternVLForConditionalGeneration; of models
without an encoder, those of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM and
Qwen3MoeForCausalLM, which name their tensors alike. Experts have matrices of their own in every
released file; Transformers 5 has those of a layer in one tensor, and writes them so when asked to.
An audio tower is Whisper's, from a checkpoint of its own (`whisper_tensors`). What is rearranged is
rows of matrices, never values, so that a round trip gives the same bits.

Shapes: R rows (any trailing axes stay), N heads, G key/value heads, Q = N / G heads of a group,
D head size, X experts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from megatron.vlm.model.vision import IMAGE_CHANNELS
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.encoders import ClipsEncoder, EncoderLayers

Shape = tuple[int, ...]

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
    """Transformers' layout with the names that some versions wrote: `model.vision_tower...`"""
    TRANSFORMERS_STACKED = "transformers-stacked"
    """Transformers 5's own names: `transformers` with a layer's experts in one tensor."""
    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3-moe"
    QWEN3_MOE_STACKED = "qwen3-moe-stacked"
    """With a layer's experts in one tensor."""

    @property
    def is_original(self) -> bool:
        """Whether it is InternVL's own."""
        return self.value.startswith("internvl")

    @property
    def is_text_only(self) -> bool:
        """Whether it is of a model without an encoder."""
        return not (self.is_original or self.value.startswith("transformers"))

    @property
    def has_prefix(self) -> bool:
        """Whether names begin with `model.`, in a layout of Transformers' InternVL."""
        return self in (Layout.TRANSFORMERS_PREFIXED, Layout.TRANSFORMERS_STACKED)

    @property
    def has_stacked_experts(self) -> bool:
        """Whether all experts of a layer are one tensor."""
        return self in (Layout.TRANSFORMERS_STACKED, Layout.QWEN3_MOE_STACKED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of the whole model, over all pipeline stages and tensor-parallel ranks."""

    key: str
    """Key in this project's checkpoints, where the layers of a tower are one stacked tensor."""
    shape: Shape
    """Shape of one layer's parameter."""
    layer: int | None = None
    """Number of the layer, from 0; None outside the towers' layers."""
    layers: int | None = None
    """Number of layers of the tower."""

    @property
    def name(self) -> str:
        """Name as `initialize.global_parameter_name` gives it."""
        if self.layer is None:
            return self.key
        return self.key.replace(".layers.", f".layers.{self.layer}.", 1)


class Arrangement(ABC):
    """How a parameter lies in the released tensors that it is made of."""

    @abstractmethod
    def shapes(self, own: Shape) -> tuple[Shape, ...]:
        """Shapes of the released tensors that make a parameter of shape `own`."""

    @abstractmethod
    def join(self, pieces: Sequence[torch.Tensor], own: Shape) -> torch.Tensor:
        """Make a parameter of shape `own` of its released tensors."""

    @abstractmethod
    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Make the released tensors of a parameter; the inverse of `join`."""


@dataclass(frozen=True, slots=True)
class Parts(Arrangement):
    """Tensors of one shape, one below the other: gate and up of SwiGLU, or each expert's matrices.

    A single one has the parameter's values with its axes counted differently.
    """

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
    """Whether the released checkpoint has them in one tensor too."""

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


@dataclass(frozen=True, slots=True)
class QueryValueBias(Arrangement):
    """Biases of queries and of values; here with zeros between them: Whisper's keys have none."""

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
    """The released tensors that one parameter is made of."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    arrangement: Arrangement


# Modules by their name here, or a tensor without a part of its own; a tuple stands for several
# released tensors, and `*` for the number of every expert.
_Names = dict[str, str | tuple[str, ...]]

_ORIGINAL_VISION: _Names = {
    "input_layernorm": "norm1",
    "self_attention.linear_qkv": "attn.qkv",
    "self_attention.linear_proj": "attn.proj",
    "self_attention.q_layernorm": "attn.q_norm",
    "self_attention.k_layernorm": "attn.k_norm",
    "self_attn_bda.scale": "ls1",
    "pre_mlp_layernorm": "norm2",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
    "mlp_bda.scale": "ls2",
}
_TRANSFORMERS_VISION: _Names = {
    "input_layernorm": "layernorm_before",
    "self_attention.linear_qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "self_attention.linear_proj": "attention.projection_layer",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "self_attn_bda.scale": "lambda_1",
    "pre_mlp_layernorm": "layernorm_after",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
    "mlp_bda.scale": "lambda_2",
}
_WHISPER: _Names = {
    "input_layernorm": "self_attn_layer_norm",
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": "self_attn.out_proj",
    "pre_mlp_layernorm": "final_layer_norm",
    "mlp.linear_fc1": "fc1",
    "mlp.linear_fc2": "fc2",
}
_WHISPER_REST: _Names = {
    "audio_embedding.conv1": "conv1",
    "audio_embedding.conv2": "conv2",
    "audio_projector.norm": "layer_norm",
}
_INTERNLM2: _Names = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "attention.wqkv",
    "self_attention.linear_proj": "attention.wo",
    "pre_mlp_layernorm": "ffn_norm",
    "mlp.linear_fc1": ("feed_forward.w1", "feed_forward.w3"),
    "mlp.linear_fc2": "feed_forward.w2",
}
_LLAMA: _Names = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": "mlp.down_proj",
}
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
_INTERNLM2_REST: _Names = {
    "embedding.word_embeddings": "language_model.model.tok_embeddings",
    "language.final_layernorm": "language_model.model.norm",
    "head": "language_model.output",
}
_LLAMA_REST: _Names = {
    "embedding.word_embeddings": "language_model.model.embed_tokens",
    "language.final_layernorm": "language_model.model.norm",
    "head": "language_model.lm_head",
}


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Yield every parameter once, in the order of the forward pass."""
    if model.takes_images:
        yield from _image_parameters(model)
    if model.takes_audio:
        yield from audio_parameters(model)
    language, width = model.language, model.language.hidden_size
    yield Parameter(key="embedding.word_embeddings.weight", shape=(language.vocab_size, width))
    yield from _stacked("language", language.layers, dict(_language_layer(language)))
    yield Parameter(key="language.final_layernorm.weight", shape=(width,))
    if not language.tied_head:
        yield Parameter(key="head.weight", shape=(language.vocab_size, width))


def _image_parameters(model: ModelConfig) -> Iterator[Parameter]:
    vision, own, width = model.vision, model.vision.hidden_size, model.language.hidden_size
    patch_values = IMAGE_CHANNELS * vision.patch_size**2
    yield from _single(
        *_linear("vision_embedding.patch_projection", own, patch_values),
        ("vision_embedding.class_token", (own,)),
        ("vision_embedding.positions", (vision.positions_per_item, own)),
    )
    yield from _stacked("vision", vision.layers, dict(_encoder_layer(vision)))
    yield from _single(
        *_linear("projector.norm", vision.projector_input_size),
        *_linear("projector.linear_fc1", width, vision.projector_input_size),
        *_linear("projector.linear_fc2", width, width),
    )


def audio_parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Yield the parameters of the audio encoder and its projector."""
    audio, own, width = model.audio, model.audio.hidden_size, model.language.hidden_size
    yield from _single(
        *_linear("audio_embedding.conv1", own, audio.mel_bins, _TAPS),
        *_linear("audio_embedding.conv2", own, own, _TAPS),
    )
    yield from _stacked("audio", audio.layers, dict(_encoder_layer(audio)))
    yield from _single(
        *_linear("audio_projector.norm", own, bias=audio.normalization == "LayerNorm"),
        *_linear("audio_projector.linear_fc1", width, audio.projector_input_size),
        *_linear("audio_projector.linear_fc2", width, width),
    )


_Named = tuple[str, Shape]


def _linear(name: str, rows: int, *inner: int, bias: bool = True) -> Iterator[_Named]:
    """Weight and bias of a linear, a convolution or, without `inner`, a norm."""
    yield f"{name}.weight", (rows, *inner)
    if bias:
        yield f"{name}.bias", (rows,)


def _single(*named: _Named) -> Iterator[Parameter]:
    return (Parameter(key=key, shape=shape) for key, shape in named)


def _stacked(tower: str, layers: int, shapes: dict[str, Shape]) -> Iterator[Parameter]:
    for layer in range(layers):
        for name, shape in shapes.items():
            yield Parameter(key=f"{tower}.layers.{name}", shape=shape, layer=layer, layers=layers)


def _encoder_layer(tower: EncoderLayers) -> Iterator[_Named]:
    width, inner = tower.hidden_size, tower.ffn_hidden_size
    for norm in ("input_layernorm", "pre_mlp_layernorm"):
        yield from _linear(norm, width, bias=tower.normalization == "LayerNorm")
    yield from _linear("self_attention.linear_qkv", 3 * width, width, bias=tower.qkv_bias)
    if tower.qk_norm:
        yield "self_attention.q_layernorm.weight", (width,)
        yield "self_attention.k_layernorm.weight", (width,)
    yield from _linear("self_attention.linear_proj", width, width)
    yield from _linear("mlp.linear_fc1", inner, width)
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
    """The tensors of a released checkpoint that `parameter` is made of."""
    arrangement = _arrangement(parameter, model, layout)
    return Released(
        names=_released_names(parameter, layout),
        shapes=arrangement.shapes(parameter.shape),
        arrangement=arrangement,
    )


def whisper_tensors(parameter: Parameter, audio: ClipsEncoder, prefix: str) -> Released | None:
    """The tensors of Whisper's encoder that a parameter of the audio tower is made of.

    Args:
        prefix: of the encoder's tensors.

    Returns:
        None for those that Whisper has not: all of the projector but its norm.
    """
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
    """The head's tensor, which a model with a tied head may hold as a copy of its embedding."""
    return _released_names(Parameter(key="head.weight", shape=()), layout)[0]


def embedding_parameter(model: ModelConfig) -> Parameter:
    """The token embedding, and the head where that is tied."""
    return next(one for one in parameters(model) if one.key == "embedding.word_embeddings.weight")


def _arrangement(parameter: Parameter, model: ModelConfig, layout: Layout) -> Arrangement:
    tower, _, rest = parameter.key.partition(".layers.")
    if tower == "vision" and rest.startswith("self_attention.linear_qkv"):
        heads = model.vision.heads
        return QueryKeyValue(heads=heads, kv_heads=heads, is_fused=layout.is_original)
    if layout is not Layout.INTERNVL_INTERNLM2 and rest.startswith("self_attention.linear_qkv"):
        language = model.language
        return QueryKeyValue(heads=language.heads, kv_heads=language.kv_heads, is_fused=False)
    rows, *inner = parameter.shape
    if tower == "language" and rest.startswith("mlp.linear_fc1"):
        return Parts((rows // 2, *inner), 2)
    if rest.startswith("mlp.experts.") and not layout.has_stacked_experts:
        parts = 2 if "linear_fc1" in rest else 1
        return Parts((inner[0] // parts, *inner[1:]), rows * parts)
    return Parts(_released_shape(parameter, model))


def _released_shape(parameter: Parameter, model: ModelConfig) -> Shape:
    if parameter.key == "vision_embedding.patch_projection.weight":
        patch = model.vision.patch_size
        return (parameter.shape[0], IMAGE_CHANNELS, patch, patch)
    if parameter.key == "vision_embedding.class_token":
        return (1, 1, *parameter.shape)
    if parameter.key == "vision_embedding.positions":
        return (1, *parameter.shape)
    return parameter.shape


def _released_names(parameter: Parameter, layout: Layout) -> tuple[str, ...]:
    tower, _, rest = parameter.key.partition(".layers.")
    if parameter.layer is None:
        prefix, names, own = "", _rest_names(layout), parameter.key
    elif tower == "vision" and layout.is_original:
        prefix = f"vision_model.encoder.layers.{parameter.layer}."
        names, own = _ORIGINAL_VISION, rest
    elif tower == "vision":
        prefix = f"vision_tower.encoder.layer.{parameter.layer}."
        names, own = _TRANSFORMERS_VISION, rest
    else:
        prefix = f"language_model.model.layers.{parameter.layer}."
        names, own = _language_names(layout), rest
    module, part = (own, "") if own in names else own.rsplit(".", 1)
    there = names[module]
    modules = (there,) if isinstance(there, str) else there
    suffix = f".{part}" if part else ""
    if any("*" in name for name in modules):
        numbers = map(str, range(parameter.shape[0]))
        modules = tuple(name.replace("*", each) for each in numbers for name in modules)
    plain = tuple(f"{prefix}{name}{suffix}" for name in modules)
    if layout.is_text_only:
        return tuple(name.removeprefix("language_model.") for name in plain)
    return tuple(map(_prefixed, plain)) if layout.has_prefix else plain


def _language_names(layout: Layout) -> _Names:
    if layout is Layout.INTERNVL_INTERNLM2:
        return _INTERNLM2
    return _STACKED_QWEN3 if layout.has_stacked_experts else _QWEN3


def _rest_names(layout: Layout) -> _Names:
    language = _INTERNLM2_REST if layout is Layout.INTERNVL_INTERNLM2 else _LLAMA_REST
    return (_ORIGINAL_REST if layout.is_original else _TRANSFORMERS_REST) | language


def _prefixed(name: str) -> str:
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    return "model." + name.replace("language_model.model.", "language_model.", 1)


def elements(parameter: Parameter) -> int:
    """Number of values in the parameter, one layer of it."""
    return math.prod(parameter.shape)
