"""InternVL 1.5 to 3.5 as their config.json describes them, in both formats: the original one
(InternVLChatConfig) and that of Transformers (InternVLConfig).

The planner and the conversion of checkpoints read with this one implementation. What this project's
towers cannot be (features of an earlier layer, other activations, images padded to squares) is
refused by name. Defaults are those of the classes that wrote the files, which leave them out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, PositiveInt, ValidationError

from omnibal.config import ChatTemplate, LanguageConfig, ModelConfig
from omnibal.encoders import TilesEncoder, TilingConfig
from omnibal.errors import UserError
from omnibal.families.folder import CONFIG_FILE, model_name, stored_tensors
from omnibal.families.hub_table import is_without_effect
from omnibal.families.released_language import (
    Case,
    LanguageType,
    ReleasedLanguage,
    invalid,
    known_type,
    language_config,
    refuse,
)
from omnibal.files import read_json_model
from omnibal.frozen import Numbered

NORMS: dict[str, Literal["LayerNorm", "RMSNorm"]] = {
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
}
"""Norms of the vision tower, by the names that the files have for them."""
TRANSFORMERS_QK_NORM_EPS = 1e-6
"""What q and k norms of Transformers' vision tower always have."""
_TRANSFORMERS_LANGUAGES: tuple[LanguageType, ...] = ("qwen2", "llama", "qwen3", "qwen3_moe")
_DUMPED = frozenset(
    # Of the whole model: sizes that its parts have too, and what InternVL's own training tuned.
    "hidden_size num_hidden_layers image_fold image_seq_length use_backbone_lora use_llm_lora "
    # Of the tower: dropouts, kernels, and all that only `use_moe` turns on.
    "dropout drop_path_rate attention_dropout hidden_dropout_prob projection_dropout "
    "use_flash_attn capacity_factor eval_capacity_factor laux_allreduce moe_coeff_ratio "
    "moe_intermediate_size moe_output_scale noisy_gate_policy num_experts num_routed_experts "
    "num_shared_experts shared_expert_intermediate_size use_residual use_rts "
    "use_weighted_residual "
    # Of language models: dropouts, windows that are off, the other name of num_experts.
    "embd_pdrop resid_pdrop max_window_layers original_max_position_embeddings "
    "router_aux_loss_coef num_local_experts use_deepep".split()
)
"""Keys of released files that are not read and change nothing of a training step."""
_HEADS = ("lm_head.weight", "language_model.output.weight")
"""Ends of the names that a head's tensor has."""
_REMEDY = "pass the config.json of a released InternVL, or its folder"


class _OriginalVision(Numbered):
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


class _Original(Numbered):
    vision_config: _OriginalVision
    llm_config: ReleasedLanguage
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


class _TransformersLanguage(ReleasedLanguage):
    model_type: str = "qwen2"


class _TransformersVision(Numbered):
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


class _Transformers(Numbered):
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


@dataclass(frozen=True, kw_only=True, slots=True)
class InternVLFile:
    """A config.json of an InternVL, read but not yet found to be a model that can be built."""

    path: Path
    given: _Original | _Transformers

    @property
    def is_original(self) -> bool:
        """Whether it is InternVL's own format."""
        return isinstance(self.given, _Original)

    @property
    def language(self) -> ReleasedLanguage:
        """The part about the language model."""
        given = self.given
        return given.llm_config if isinstance(given, _Original) else given.text_config

    @property
    def language_type(self) -> LanguageType:
        """Kind of the language model.

        Raises:
            UserError: it is another one.
        """
        known = get_args(LanguageType) if self.is_original else _TRANSFORMERS_LANGUAGES
        return known_type(self.language, self.path, known)

    def model(self, has_head: bool | None = None) -> ModelConfig:
        """The model.

        Args:
            has_head: whether there is a tensor of the head beside the file; None where nobody
                looked, and the file alone says whether the head is tied.

        Raises:
            UserError: it is a variant that this project's model is not; the message names it.
        """
        given, path = self.given, self.path
        try:
            language = self._language(has_head)
            if isinstance(given, _Original):
                return _from_original(given, language, path)
            return _from_transformers(given, language, path)
        except ValidationError as error:
            raise invalid(path, error) from error

    def _language(self, has_head: bool | None) -> LanguageConfig:
        language, outer = self.language, self.given.tie_word_embeddings
        tied = is_tied(language, outer, self.is_original, has_head)
        return language_config(language, self.language_type, tied, self.path)


def read_internvl(path: Path) -> ModelConfig:
    """Read the model that a config.json of InternVL, or the one in a folder, describes.

    Where the names of a checkpoint's tensors are beside it, they tell whether there is a head.

    Raises:
        UserError: the file is broken, of no InternVL, or of a variant that this project's model is
            not; the message names it.
    """
    path = path / CONFIG_FILE if path.is_dir() else path
    file = open_internvl(path)
    if file is None:
        raise UserError(f"{path}: is of no InternVL; {_REMEDY}")
    names = stored_tensors(path.parent)
    return file.model(has_head=None if names is None else any(n.endswith(_HEADS) for n in names))


def open_internvl(path: Path) -> InternVLFile | None:
    """Read a config.json of InternVL; None if it is of another kind of model.

    Raises:
        UserError: the file cannot be read, or lacks a size.
    """
    kind = read_json_model(_Kind, path, _REMEDY)
    if kind.architectures == ["InternVLChatModel"] or kind.model_type == "internvl_chat":
        return InternVLFile(path=path, given=read_json_model(_Original, path, _REMEDY))
    if kind.model_type == "internvl":
        return InternVLFile(path=path, given=read_json_model(_Transformers, path, _REMEDY))
    return None


def unread_keys(given: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json of InternVL that are on, not read, and of no known release.

    Releases carry the keys of many versions of the classes that wrote them, so that none is refused
    for one; a key that does change the model is planned without.

    Args:
        given: the file's content, of which `read_internvl` has made a model.

    Returns:
        Names, behind that of their table and a dot where they are in one.
    """
    is_original = given.get("model_type") != "internvl"
    return _unread(_Original if is_original else _Transformers, given, "")


def _unread(kind: type[BaseModel], given: Mapping[str, Any], place: str) -> list[str]:
    names: list[str] = []
    for key, value in given.items():
        field = kind.model_fields.get(key)
        inner = None if field is None else field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names += _unread(inner, value, f"{key}.")
        elif field is None and value and key not in _DUMPED and not is_without_effect(key):
            names.append(place + key)
    return names


def is_tied(
    language: ReleasedLanguage, outer: bool | None, is_original: bool, has_head: bool | None
) -> bool:
    """Whether the head is tied to the token embedding.

    InternVL's own class goes by the language model's configuration, from which it sets the whole
    model's. Transformers 5 builds what the whole model's says, and unties a head that a checkpoint
    has; a missing head is tied if either says so.
    """
    inner = language.tie_word_embeddings
    if is_original or has_head:
        stated = outer if inner is None else inner
        return has_head is False if stated is None else stated
    if has_head is None:
        return bool(inner if outer is None else outer)
    return bool(inner or outer) or (inner is None and outer is None)


def _from_original(given: _Original, language: LanguageConfig, path: Path) -> ModelConfig:
    vision, templates = given.vision_config, get_args(ChatTemplate)
    refuse(
        path,
        (given.select_layer != -1, f"select_layer {given.select_layer}", "-1, the last layer"),
        (given.ps_version != "v2", f"ps_version {given.ps_version!r}", "'v2'"),
        (given.pad2square, "pad2square true", "false, as images are stretched here, not padded"),
        *_vision_cases(vision),
        (
            given.template not in (None, *templates),
            f"template {given.template!r}",
            " or ".join(templates),
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
    tiles = given.max_dynamic_patch if given.dynamic_image_size else 1
    template = {} if given.template is None else {"chat_template": given.template}
    tower = _vision(
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
    return ModelConfig(
        name=model_name(path.parent),
        encoders={"vision": tower},
        language=language,
        chat_system_message=given.system_message,
        **template,
    )


def _from_transformers(given: _Transformers, language: LanguageConfig, path: Path) -> ModelConfig:
    vision = given.vision_config
    image, patch = _square(vision.image_size, path), _square(vision.patch_size, path)
    strategy = given.vision_feature_select_strategy
    refuse(
        path,
        (given.vision_feature_layer != -1, "vision_feature_layer", "-1, the last layer"),
        (strategy != "default", f"vision_feature_select_strategy {strategy!r}", "'default'"),
        (given.projector_hidden_act != "gelu", "projector_hidden_act", "'gelu'"),
        *_vision_cases(vision),
        (
            not vision.use_absolute_position_embeddings,
            "no position embeddings",
            "with learned ones",
        ),
        (vision.use_mask_token, "a mask token", "without one"),
        (not vision.use_mean_pooling, "use_mean_pooling false", "true: no norm after the encoder"),
        (
            vision.use_qk_norm and vision.layer_norm_eps != TRANSFORMERS_QK_NORM_EPS,
            f"layer_norm_eps {vision.layer_norm_eps} with use_qk_norm",
            f"{TRANSFORMERS_QK_NORM_EPS}, which q and k norms always have there",
        ),
    )
    tower = _vision(
        vision,
        image_size=image,
        patch_size=patch,
        qkv_bias=vision.attention_bias,
        qk_norm=vision.use_qk_norm,
        layer_scale_init=vision.layer_scale_init_value,
        downsample_ratio=given.downsample_ratio,
        tiling=TilingConfig(),
    )
    # The file says nothing of conversations; all that were released in this format have these.
    return ModelConfig(
        name=model_name(path.parent),
        encoders={"vision": tower},
        language=language,
        chat_template="internvl2_5",
    )


def _vision_cases(vision: _OriginalVision | _TransformersVision) -> list[Case]:
    return [
        (vision.num_channels != 3, f"num_channels {vision.num_channels}", "3"),
        (vision.hidden_act != "gelu", f"vision hidden_act {vision.hidden_act!r}", "'gelu'"),
        (vision.norm_type not in NORMS, f"norm_type {vision.norm_type!r}", " or ".join(NORMS)),
    ]


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
        normalization=NORMS[given.norm_type],
        norm_eps=given.layer_norm_eps,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        layer_scale_init=layer_scale_init,
        downsample_ratio=downsample_ratio,
        tiling=tiling,
    )


def _square(sides: int | list[int], path: Path) -> int:
    if isinstance(sides, int):
        return sides
    if len(set(sides)) != 1:
        raise UserError(f"{path}: has images or patches of {sides}; they must be squares")
    return sides[0]
