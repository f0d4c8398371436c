"""Conversion of a released checkpoint's config.json to a ModelConfig and back.

Read are the original InternVLChatConfig, and Transformers' own InternVLConfig, LlamaConfig and
Qwen2Config. What this project's model cannot do (RoPE scaled in other ways than Llama 3.1's,
features of an earlier layer, biases it lacks) is refused by name. Defaults are those of the classes
that wrote the files, which leave them out.

What is written for Transformers was tried with its versions 4.57.3 and 5.23, which differ in where
they look for the RoPE base and the type of the tensors.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, PositiveInt, ValidationError

from megatron.vlm.conversion.tensor_map import Layout, head_name
from megatron.vlm.inputs.reader import PIXEL_MEAN, PIXEL_STD
from omnibal.config import ChatTemplate, LanguageConfig, ModelConfig
from omnibal.encoders import TilesEncoder, TilingConfig
from omnibal.errors import UserError
from omnibal.files import complaint, read_json_model

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
_MAX_POSITIONS = 32_768
"""Longest text of most released InternVL2, 2.5 and 3 models, for a ModelConfig without a limit.
Serving tools take it for the longest text; RoPE, unscaled here, does not depend on it."""
_BICUBIC = 3
"""Pillow's number of bicubic resampling."""
_STATED_DTYPE = re.compile(r'("(?:torch_)?dtype"\s*:\s*")(?:torch\.)?(?:bfloat16|float16|float32)"')
_NORMS: dict[str, Literal["LayerNorm", "RMSNorm"]] = {
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
}
_TRANSFORMERS_QK_NORM_EPS = 1e-6
_PREFIXED = "model.vision_tower."
_LANGUAGE_LAYOUTS = {
    "InternLM2ForCausalLM": Layout.INTERNVL_INTERNLM2,
    "LlamaForCausalLM": Layout.INTERNVL_LLAMA,
    "Qwen2ForCausalLM": Layout.INTERNVL_QWEN2,
}
_ARCHITECTURES = {layout: name for name, layout in _LANGUAGE_LAYOUTS.items()}
_TRANSFORMERS_LANGUAGES = ("qwen2", "llama")
_MODEL_TYPES = {
    Layout.INTERNVL_INTERNLM2: "internlm2",
    Layout.INTERNVL_LLAMA: "llama",
    Layout.INTERNVL_QWEN2: "qwen2",
    Layout.LLAMA: "llama",
    Layout.QWEN2: "qwen2",
}
_TEXT_ONLY: dict[str, tuple[str, Layout, ChatTemplate]] = {
    "llama": ("LlamaForCausalLM", Layout.LLAMA, "llama3"),
    "qwen2": ("Qwen2ForCausalLM", Layout.QWEN2, "qwen2.5"),
}
"""Architecture, layout and chat template of models without an encoder, by model_type."""


_SCALES_LATER, _SCALES_WAVES = "dynamic", "llama3"
"""Kinds of RoPE: unscaled up to max_position_embeddings, and Llama 3.1's."""


class _Rope(BaseModel):
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


class _Language(BaseModel):
    """Language configuration of Llama, Qwen2 and InternLM2, which share their names."""

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
    layer_types: list[str] | None = None
    partial_rotary_factor: float | None = None
    quantization_config: Any = None
    tie_word_embeddings: bool | None = None

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
    def is_qwen2(self) -> bool:
        return self.model_type == "qwen2" or self.architectures == ["Qwen2ForCausalLM"]

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
        if rope.kind == _SCALES_WAVES:
            return {
                "rope_scaling": {
                    "factor": rope.factor,
                    "low_frequency_factor": rope.low_freq_factor,
                    "high_frequency_factor": rope.high_freq_factor,
                    "original_positions": rope.original_max_position_embeddings,
                }
            }
        if rope.kind != _SCALES_LATER:
            return {}
        most = self.max_position_embeddings or (32_768 if self.is_qwen2 else 2048)
        return {"max_positions": most, "rope_factor": rope.factor}


class _TransformersLanguage(_Language):
    model_type: str = "qwen2"


class _OriginalVision(BaseModel):
    hidden_size: PositiveInt = 3200
    intermediate_size: PositiveInt = 12_800
    num_hidden_layers: PositiveInt = 48
    num_attention_heads: PositiveInt = 25
    num_channels: PositiveInt = 3
    patch_size: PositiveInt = 14
    image_size: PositiveInt = 224
    norm_type: str = "rms_norm"
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_normalization: bool = True
    hidden_act: str = "gelu"
    initializer_factor: float = 0.1


class _Original(BaseModel):
    vision_config: _OriginalVision
    llm_config: _Language
    tie_word_embeddings: bool | None = None
    downsample_ratio: float = 0.5
    force_image_size: PositiveInt | None = None
    select_layer: int = -1
    ps_version: str = "v1"
    template: str | None = None
    system_message: str | None = None
    """System message of InternVL's `chat` alone; its training takes the template's."""
    pad2square: bool = False
    dynamic_image_size: bool = False
    use_thumbnail: bool = False
    min_dynamic_patch: int = 1
    max_dynamic_patch: int = 6


class _TransformersVision(BaseModel):
    hidden_size: PositiveInt = 1024
    intermediate_size: PositiveInt = 4096
    num_hidden_layers: PositiveInt = 24
    num_attention_heads: PositiveInt = 16
    num_channels: PositiveInt = 3
    patch_size: PositiveInt | list[PositiveInt] = 14
    image_size: PositiveInt | list[PositiveInt] = 448
    norm_type: str = "layer_norm"
    layer_norm_eps: float = 1e-6
    attention_bias: bool = False
    use_qk_norm: bool = False
    hidden_act: str = "gelu"
    layer_scale_init_value: float = 0.1
    use_absolute_position_embeddings: bool = True
    use_mask_token: bool = False
    use_mean_pooling: bool = True


class _Transformers(BaseModel):
    vision_config: _TransformersVision
    text_config: _TransformersLanguage
    tie_word_embeddings: bool | None = None
    downsample_ratio: float = 0.5
    projector_hidden_act: str = "gelu"
    vision_feature_layer: int | list[int] = -1
    vision_feature_select_strategy: str = "default"


class _Kind(BaseModel):
    model_type: str = ""
    architectures: list[str] | None = None


def read_config(directory: Path, names: Collection[str]) -> tuple[ModelConfig, Layout]:
    """Read the model in a released checkpoint's folder, and the layout of its tensors.

    Args:
        names: of the tensors there, which tell what config.json leaves open: whether they begin
            with `model.`, as some versions of Transformers wrote them, and where nothing else says
            it, whether the head is tied.

    Raises:
        UserError: there is no config.json, it is of another kind of model, or of a variant that
            this project's model does not have.
    """
    path = directory / CONFIG_FILE
    remedy = "pass the folder of a released checkpoint"
    kind = read_json_model(_Kind, path, remedy)
    name = _model_name(directory)
    try:
        if kind.architectures == ["InternVLChatModel"] or kind.model_type == "internvl_chat":
            return _from_original(read_json_model(_Original, path, remedy), name, names, path)
        if kind.model_type == "internvl":
            given = read_json_model(_Transformers, path, remedy)
            return _from_transformers(given, name, names, path)
        if kind.model_type in _TEXT_ONLY:
            return _from_text_only(read_json_model(_Language, path, remedy), name, names, path)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {place}: {complaint(first)}; {remedy}") from error
    raise UserError(
        f"{path}: is of a model of type {kind.model_type!r}; only InternVL's own "
        "(internvl_chat) and Transformers' (internvl), and text-only ones "
        f"({' and '.join(_TEXT_ONLY)}) are converted"
    )


def _model_name(directory: Path) -> str:
    """The folder's name, or in a cache of Hugging Face's hub, where that is a hash, the model's."""
    path = directory.resolve() if ".." in directory.parts else directory.absolute()
    in_hub = path.parent.name == "snapshots"
    return (path.parents[1].name.rpartition("--")[2] if in_hub else path.name).lower()


def _from_original(
    given: _Original, name: str, names: Collection[str], path: Path
) -> tuple[ModelConfig, Layout]:
    vision = given.vision_config
    _refuse(
        path,
        (given.select_layer != -1, f"select_layer {given.select_layer}", "-1, the last layer"),
        (given.ps_version != "v2", f"ps_version {given.ps_version!r}", "'v2'"),
        (given.pad2square, "pad2square true", "false, as images are stretched here, not padded,"),
        (vision.num_channels != 3, f"num_channels {vision.num_channels}", "3"),
        (vision.hidden_act != "gelu", f"vision hidden_act {vision.hidden_act!r}", "'gelu'"),
        (vision.norm_type not in _NORMS, f"norm_type {vision.norm_type!r}", " or ".join(_NORMS)),
        (
            given.template not in (None, *get_args(ChatTemplate)),
            f"template {given.template!r}",
            " or ".join(get_args(ChatTemplate)),
        ),
    )
    if given.force_image_size not in (None, vision.image_size):
        raise UserError(
            f"{path}: has force_image_size {given.force_image_size}, but position embeddings for "
            f"tiles of {vision.image_size} pixels (vision_config.image_size); set it to "
            f"{vision.image_size} there to train on such tiles, or else resize them by InternVL's "
            f"vision_model.resize_pos_embeddings and save them with both sizes set to "
            f"{given.force_image_size}"
        )
    architecture = (given.llm_config.architectures or [""])[0]
    layout = _LANGUAGE_LAYOUTS.get(architecture)
    if layout is None:
        raise UserError(
            f"{path}: its language model is {architecture or 'not named'}; it must be one of "
            f"{', '.join(_LANGUAGE_LAYOUTS)}"
        )
    tiles = given.max_dynamic_patch if given.dynamic_image_size else 1
    template = {} if given.template is None else {"chat_template": given.template}
    model = ModelConfig(
        name=name,
        encoders={
            "vision": _vision(
                vision,
                image_size=vision.image_size,
                patch_size=vision.patch_size,
                qkv_bias=vision.qkv_bias,
                qk_norm=vision.qk_normalization,
                layer_scale_init=vision.initializer_factor,
                downsample_ratio=given.downsample_ratio,
                tiling=TilingConfig(
                    min_dynamic_patch=min(given.min_dynamic_patch, tiles),
                    max_dynamic_patch=tiles,
                    use_thumbnail=given.use_thumbnail,
                ),
            )
        },
        language=_language(
            given.llm_config,
            _is_tied(given.llm_config, given.tie_word_embeddings, layout, names),
            path,
        ),
        chat_system_message=given.system_message,
        **template,
    )
    return model, layout


def _from_transformers(
    given: _Transformers, name: str, names: Collection[str], path: Path
) -> tuple[ModelConfig, Layout]:
    prefixed = any(name.startswith(_PREFIXED) for name in names)
    layout = Layout.TRANSFORMERS_PREFIXED if prefixed else Layout.TRANSFORMERS
    vision = given.vision_config
    image, patch = _square(vision.image_size, path), _square(vision.patch_size, path)
    strategy, text = given.vision_feature_select_strategy, given.text_config
    _refuse(
        path,
        (
            text.model_type not in _TRANSFORMERS_LANGUAGES,
            f"a language model of type {text.model_type!r}",
            " or ".join(_TRANSFORMERS_LANGUAGES),
        ),
        (given.vision_feature_layer != -1, "vision_feature_layer", "-1, the last layer"),
        (strategy != "default", f"vision_feature_select_strategy {strategy!r}", "'default'"),
        (given.projector_hidden_act != "gelu", "projector_hidden_act", "'gelu'"),
        (vision.num_channels != 3, f"num_channels {vision.num_channels}", "3"),
        (vision.hidden_act != "gelu", f"vision hidden_act {vision.hidden_act!r}", "'gelu'"),
        (vision.norm_type not in _NORMS, f"norm_type {vision.norm_type!r}", " or ".join(_NORMS)),
        (not vision.use_absolute_position_embeddings, "no position embeddings", "learned ones"),
        (vision.use_mask_token, "a mask token", "no mask token"),
        (not vision.use_mean_pooling, "use_mean_pooling false", "true: no norm after the encoder"),
        (
            vision.use_qk_norm and vision.layer_norm_eps != _TRANSFORMERS_QK_NORM_EPS,
            f"layer_norm_eps {vision.layer_norm_eps} with use_qk_norm",
            f"{_TRANSFORMERS_QK_NORM_EPS}, which q and k norms always have there",
        ),
    )
    model = ModelConfig(
        name=name,
        encoders={
            "vision": _vision(
                vision,
                image_size=image,
                patch_size=patch,
                qkv_bias=vision.attention_bias,
                qk_norm=vision.use_qk_norm,
                layer_scale_init=vision.layer_scale_init_value,
                downsample_ratio=given.downsample_ratio,
                tiling=TilingConfig(),
            )
        },
        language=_language(text, _is_tied(text, given.tie_word_embeddings, layout, names), path),
        # The file says nothing of conversations; all that were released in this layout have these.
        chat_template="internvl2_5",
    )
    return model, layout


def _from_text_only(
    given: _Language, name: str, names: Collection[str], path: Path
) -> tuple[ModelConfig, Layout]:
    architecture, layout, template = _TEXT_ONLY[given.model_type]
    architectures = given.architectures or [architecture]
    _refuse(
        path,
        (architectures != [architecture], f"architectures {architectures}", f"[{architecture!r}]"),
    )
    language = _language(given, _is_tied(given, None, layout, names), path)
    if language.max_positions is None:
        most = given.max_position_embeddings
        language = language.model_copy(update={"max_positions": most})
    # The file says nothing of conversations; these are those of the newest releases.
    return ModelConfig(name=name, language=language, chat_template=template), layout


def _vision(
    given: _OriginalVision | _TransformersVision,
    *,
    image_size: int,
    patch_size: int,
    qkv_bias: bool,
    qk_norm: bool,
    layer_scale_init: float,
    downsample_ratio: float,
    tiling: TilingConfig,
) -> TilesEncoder:
    """Vision configuration from fields that both classes share and from those that differ."""
    return TilesEncoder(
        layers=given.num_hidden_layers,
        hidden_size=given.hidden_size,
        heads=given.num_attention_heads,
        ffn_hidden_size=given.intermediate_size,
        image_size=image_size,
        patch_size=patch_size,
        normalization=_NORMS[given.norm_type],
        norm_eps=given.layer_norm_eps,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        layer_scale_init=layer_scale_init,
        downsample_ratio=downsample_ratio,
        tiling=tiling,
    )


def _is_tied(
    language: _Language, outer: bool | None, layout: Layout, names: Collection[str]
) -> bool:
    """Whether the head is tied to the token embedding.

    The language model's own configuration takes precedence over the whole model's, which InternVL's
    class sets from it. Transformers 5 goes by the latter, so a missing head is tied in its
    layout if either says so.
    """
    inner = language.tie_word_embeddings
    lacks_head = head_name(layout) not in names
    if lacks_head and not layout.is_original:
        return bool(inner or outer) or (inner is None and outer is None)
    stated = outer if inner is None else inner
    return lacks_head if stated is None else stated


def _language(given: _Language, tied_head: bool, path: Path) -> LanguageConfig:
    rope_base, rope_kind = given.rope
    kv_heads = given.num_key_value_heads or given.num_attention_heads
    head_size = given.hidden_size // given.num_attention_heads
    _refuse(
        path,
        (
            rope_kind not in ("default", _SCALES_LATER, _SCALES_WAVES),
            f"RoPE of type {rope_kind!r}",
            "unscaled, or scaled as Llama 3.1's",
        ),
        (
            None in (given.scaling.get("rope_scaling") or {}).values(),
            f"RoPE of type {rope_kind!r} without all of its numbers",
            "one with all of them",
        ),
        (
            given.scaling.get("rope_factor", 1.0) is None,
            f"RoPE of type {rope_kind!r} without a factor",
            "one with a factor",
        ),
        (
            given.has_two_ropes,
            "a rope_scaling and rope_parameters that differ",
            "one of them, or both alike,",
        ),
        (given.rotary_share != 1, f"partial_rotary_factor {given.rotary_share}", "1"),
        (
            bool(set(given.layer_types or ()) - {"full_attention"}),
            f"layer_types {sorted(set(given.layer_types or ()))}",
            "full_attention in all layers",
        ),
        (given.quantization_config is not None, "a quantization_config", "unquantized"),
        (not rope_base.is_integer(), f"rope_theta {rope_base}", "a whole number"),
        (given.head_dim not in (None, head_size), f"head_dim {given.head_dim}", str(head_size)),
        (given.hidden_act != "silu", f"hidden_act {given.hidden_act!r}", "'silu'"),
        (
            given.bias or given.attention_bias or given.mlp_bias,
            "biases in the language model",
            "none, but for Qwen2's of q, k and v",
        ),
        (given.use_sliding_window, "use_sliding_window true", "false"),
    )
    return LanguageConfig(
        layers=given.num_hidden_layers,
        hidden_size=given.hidden_size,
        heads=given.num_attention_heads,
        kv_heads=kv_heads,
        ffn_hidden_size=given.intermediate_size,
        vocab_size=given.vocab_size,
        qkv_bias=given.is_qwen2,
        norm_eps=given.rms_norm_eps,
        rope_base=int(rope_base),
        **given.scaling,
        tied_head=tied_head,
    )


def _refuse(path: Path, *cases: tuple[bool, str, str]) -> None:
    """Raise for the first case that holds: what was given, and what it must be."""
    for holds, given, must_be in cases:
        if holds:
            raise UserError(f"{path}: has {given}; it must be {must_be} to be converted")


def _square(sides: int | list[int], path: Path) -> int:
    if isinstance(sides, int):
        return sides
    if len(set(sides)) != 1:
        raise UserError(f"{path}: has images or patches of {sides}; they must be squares")
    return sides[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenIds:
    """Token ids that configurations state of a model's tokenizer."""

    image: int | None
    """Id of `<IMG_CONTEXT>`; None for a model that takes no images."""
    begin: int | None
    """Id that begins a text; None where the tokenizer has none."""
    end: int
    """Id that closes an answer."""


def configurations(
    model: ModelConfig, layout: Layout, dtype: str, ids: TokenIds | None
) -> dict[str, str]:
    """Texts of the configuration files of an exported model, by file name.

    Transformers' preprocessor always adds a thumbnail to several tiles, whatever
    `tiling.use_thumbnail` is, and where two grids of equally many tiles are equally near to an
    image's shape it may take another than InternVL does. Else its tiles are the same.

    Args:
        dtype: as Transformers names it, such as "bfloat16".
        ids: None where no tokenizer goes with the model.
    """
    files: dict[str, dict[str, Any]] = {}
    if layout.is_text_only:
        language = files[CONFIG_FILE] = _text_only(model, layout, dtype)
        if ids is not None:
            language["bos_token_id"] = ids.begin
    elif layout.is_original:
        files[CONFIG_FILE] = _original(model, layout, dtype)
        language = files[CONFIG_FILE]["llm_config"]
    else:
        files[CONFIG_FILE] = _transformers(model, dtype, ids)
        language = files[CONFIG_FILE]["text_config"]
        files[PREPROCESSOR_FILE] = _preprocessor(model)
    if ids is not None:
        language["eos_token_id"] = ids.end
        files[GENERATION_FILE] = {"eos_token_id": ids.end, "pad_token_id": ids.end}
    return {
        name: json.dumps(content, indent=2, sort_keys=True) + "\n"
        for name, content in files.items()
    }


def with_dtype(config: str, dtype: str) -> str:
    """The text of a config.json in which every type of tensors is `dtype`, and all else stays."""
    return _STATED_DTYPE.sub(rf'\g<1>{dtype}"', config)


def _preprocessor(model: ModelConfig) -> dict[str, Any]:
    """Settings of Transformers' image processor: tiles and pixel values as in training."""
    size, tiling = model.vision.image_size, model.vision.tiling
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "crop_to_patches": tiling.max_dynamic_patch > 1,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(PIXEL_MEAN),
        "image_std": list(PIXEL_STD),
        "max_patches": tiling.max_dynamic_patch,
        "min_patches": tiling.min_dynamic_patch,
        "processor_class": "InternVLProcessor",
        "resample": _BICUBIC,
        "rescale_factor": 1 / 255,
        "size": {"height": size, "width": size},
    }


def _original(model: ModelConfig, layout: Layout, dtype: str) -> dict[str, Any]:
    vision, tiling = model.vision, model.vision.tiling
    scaling = _rope_scaling(model.language) or {}
    # Of the two names of the kind, InternVL's own code reads this one.
    scaling = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
    message = model.chat_system_message
    message = model.system_message if message is None else message
    system = {} if message is None else {"system_message": message}
    return system | {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "downsample_ratio": model.vision.downsample_ratio,
        "dynamic_image_size": tiling.max_dynamic_patch > 1,
        "force_image_size": vision.image_size,
        "llm_config": {"architectures": [_ARCHITECTURES[layout]], "bias": False}
        | _text(model.language, _MODEL_TYPES[layout])
        | {"rope_theta": float(model.language.rope_base)}
        | ({"rope_scaling": scaling} if scaling else {}),
        "max_dynamic_patch": tiling.max_dynamic_patch,
        "min_dynamic_patch": tiling.min_dynamic_patch,
        "ps_version": "v2",
        "select_layer": -1,
        "template": model.chat_template,
        "tie_word_embeddings": model.language.tied_head,
        "torch_dtype": dtype,
        "use_thumbnail": tiling.use_thumbnail,
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "model_type": "intern_vit_6b",
            "hidden_act": "gelu",
            "hidden_size": vision.hidden_size,
            "image_size": vision.image_size,
            "initializer_factor": vision.layer_scale_init,
            "intermediate_size": vision.ffn_hidden_size,
            "layer_norm_eps": vision.norm_eps,
            "norm_type": _norm_name(vision),
            "num_attention_heads": vision.heads,
            "num_hidden_layers": vision.layers,
            "patch_size": vision.patch_size,
            "qk_normalization": vision.qk_norm,
            "qkv_bias": vision.qkv_bias,
        },
    }


def _transformers(model: ModelConfig, dtype: str, ids: TokenIds | None) -> dict[str, Any]:
    vision, language = model.vision, model.language
    image_token = {} if ids is None else {"image_token_id": ids.image}
    return image_token | {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "downsample_ratio": model.vision.downsample_ratio,
        "dtype": dtype,
        "torch_dtype": dtype,
        "image_seq_length": model.vision.tokens_per_item,
        "text_config": _text(language, "qwen2" if language.qkv_bias else "llama")
        | _rope_entries(language),
        "tie_word_embeddings": language.tied_head,
        "vision_config": {
            "model_type": "internvl_vision",
            "attention_bias": vision.qkv_bias,
            "hidden_size": vision.hidden_size,
            "image_size": [vision.image_size, vision.image_size],
            "intermediate_size": vision.ffn_hidden_size,
            "layer_norm_eps": vision.norm_eps,
            "layer_scale_init_value": vision.layer_scale_init,
            "norm_type": _norm_name(vision),
            "num_attention_heads": vision.heads,
            "num_hidden_layers": vision.layers,
            "patch_size": [vision.patch_size, vision.patch_size],
            "use_qk_norm": vision.qk_norm,
        },
    }


def _text_only(model: ModelConfig, layout: Layout, dtype: str) -> dict[str, Any]:
    language, model_type = model.language, _MODEL_TYPES[layout]
    return {
        "architectures": [_TEXT_ONLY[model_type][0]],
        "dtype": dtype,
        "torch_dtype": dtype,
        **_text(language, model_type),
        **_rope_entries(language),
    }


def _rope_entries(language: LanguageConfig) -> dict[str, Any]:
    """RoPE's base and scaling under the names of Transformers 4 and of 5, which differ."""
    base, scaling = {"rope_theta": float(language.rope_base)}, _rope_scaling(language)
    if scaling is None:
        return base | {"rope_parameters": base | {"rope_type": "default"}}
    return base | {"rope_parameters": base | scaling, "rope_scaling": scaling}


def _rope_scaling(language: LanguageConfig) -> dict[str, Any] | None:
    scaling = language.rope_scaling
    if scaling is not None:
        return {
            "rope_type": _SCALES_WAVES,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    if language.rope_factor is not None:
        return {"rope_type": _SCALES_LATER, "factor": language.rope_factor}
    return None


def _text(language: LanguageConfig, model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": language.hidden_size,
        "intermediate_size": language.ffn_hidden_size,
        "max_position_embeddings": language.max_positions or _MAX_POSITIONS,
        "num_attention_heads": language.heads,
        "num_hidden_layers": language.layers,
        "num_key_value_heads": language.kv_heads,
        "rms_norm_eps": language.norm_eps,
        "tie_word_embeddings": language.tied_head,
        "vocab_size": language.vocab_size,
    }


def _norm_name(vision: TilesEncoder) -> str:
    return next(name for name, norm in _NORMS.items() if norm == vision.normalization)


def check_exportable(model: ModelConfig, layout: Layout) -> None:
    """Raise UserError if the layout cannot describe the model."""
    qkv_bias = model.language.qkv_bias
    obstacles = [
        (layout.is_text_only and bool(model.encoders), "an encoder"),
        (not (layout.is_text_only or model.encoders), "no encoder"),
        (model.takes_audio, "an audio encoder"),
        (
            (layout.is_original or layout.is_text_only)
            and qkv_bias != (layout in (Layout.INTERNVL_QWEN2, Layout.QWEN2)),
            f"qkv_bias {str(qkv_bias).lower()}",
        ),
    ]
    for vision in (model.vision,) if model.takes_images else ():
        eps_differs = vision.norm_eps != _TRANSFORMERS_QK_NORM_EPS
        obstacles += [
            (vision.layer_scale_init is None, "no layer scale"),
            (
                not layout.is_original and vision.qk_norm and eps_differs,
                f"q and k norms with norm_eps {vision.norm_eps}",
            ),
        ]
    for holds, what in obstacles:
        if holds:
            raise UserError(
                f"{model.name} has {what}, which layout {layout} cannot hold; choose another one"
            )
