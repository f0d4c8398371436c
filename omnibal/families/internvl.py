"""InternVL 1.5 to 3.5, in its own (InternVLChatConfig) and Transformers' format (InternVLConfig).

Tables are read leniently, as releases carry many unused keys.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from omnibal.families.folder import has_chat_template, stored_tensors
from omnibal.families.hub_table import SECTIONS, HubTable, as_table
from omnibal.families.processor import read_processor
from omnibal.families.text import LANGUAGES, SCALES_LATER, LanguageType, language_type
from omnibal.families.vision import LayersTable, Side, WholeTable
from omnibal.model.config import ChatTemplateName, ModelConfig
from omnibal.model.encoders import TilesEncoder, TilingConfig

NORMS: dict[str, Literal["LayerNorm", "RMSNorm"]] = {
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
}
TRANSFORMERS_QK_NORM_EPS = 1e-6  # fixed in Transformers' vision tower
_TRANSFORMERS_LANGUAGES: tuple[LanguageType, ...] = ("qwen2", "llama", "qwen3", "qwen3_moe")
_INERT_RELEASE_KEYS = SECTIONS["InternVL"].ignored
_HEADS = ("lm_head.weight", "language_model.output.weight")  # ends of the head's tensor name


class VisionTower(LayersTable):
    """Tower of InternVL, in either format."""

    patch_size: Side = 14
    image_size: Side
    norm_type: Literal["layer_norm", "rms_norm"]
    layer_norm_eps: PositiveFloat = 1e-6

    @property
    def parts(self) -> dict[str, Any]:
        return super().parts | {"normalization": NORMS[self.norm_type]}


class OriginalVision(VisionTower):
    """Tower in InternVL's own format."""

    qkv_bias: bool = False
    qk_normalization: bool
    initializer_factor: float = 0.1


class TransformersVision(VisionTower):
    """Tower in the format of Transformers."""

    attention_bias: bool = False
    use_qk_norm: bool
    layer_scale_init_value: float = 0.1

    @model_validator(mode="after")
    def _has_one_eps(self) -> "TransformersVision":
        if self.use_qk_norm and self.layer_norm_eps != TRANSFORMERS_QK_NORM_EPS:
            raise ValueError(f"layer_norm_eps with use_qk_norm must be {TRANSFORMERS_QK_NORM_EPS}")
        return self


class TransformersTable(WholeTable):
    """Outer table in the format of Transformers."""

    language_table: ClassVar[str] = "text_config"
    languages: ClassVar[tuple[LanguageType, ...]] = _TRANSFORMERS_LANGUAGES
    vision: ClassVar[type[VisionTower]] = TransformersVision

    downsample_ratio: float = 0.5

    def conversations(self, path: Path) -> dict[str, Any]:
        """Return ModelConfig fields: the tokenizer's chat template if present, else internvl2_5."""
        return {"chat_template": "tokenizer" if has_chat_template(path.parent) else "internvl2_5"}

    def tiling(self, image_size: int, path: Path) -> TilingConfig:
        """Return the tiling of the image processor's file, or the default."""
        limits = read_processor(path, {}).fields("min_dynamic_patch", "max_dynamic_patch")
        return TilingConfig(**limits, by_processor=has_chat_template(path.parent))


class OriginalTable(TransformersTable):
    """Outer table in InternVL's own format."""

    language_table = "llm_config"
    languages = get_args(LanguageType)
    vision = OriginalVision

    force_image_size: PositiveInt | None = None
    ps_version: Literal["v2"] = Field(default="v1", validate_default=True)
    template: ChatTemplateName | None = None
    system_message: str | None = None
    dynamic_image_size: bool = False
    use_thumbnail: bool = False
    min_dynamic_patch: int = 1
    max_dynamic_patch: int = 6

    def conversations(self, path: Path) -> dict[str, Any]:
        template = {} if self.template is None else {"chat_template": self.template}
        # InternVL's `chat` uses the table's message; its training uses the template's.
        return {"chat_system_message": self.system_message, **template}

    def tiling(self, image_size: int, path: Path) -> TilingConfig:
        if self.force_image_size not in (None, image_size):
            raise ValueError(
                f"has force_image_size {self.force_image_size}, but position embeddings for "
                f"tiles of {image_size} pixels; set it to {image_size}, or resize them by "
                "InternVL's vision_model.resize_pos_embeddings, and image_size of vision_config"
            )
        tiles = self.max_dynamic_patch if self.dynamic_image_size else 1
        return TilingConfig(
            min_dynamic_patch=min(self.min_dynamic_patch, tiles),
            max_dynamic_patch=tiles,
            use_thumbnail=self.use_thumbnail,
        )


def read_internvl(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Return an InternVL model; tensors stored next to `path` count in whether its head is tied."""
    names = stored_tensors(path.parent)
    has_head = None if names is None else any(name.endswith(_HEADS) for name in names)
    return internvl_model(given, name, path, has_head)


def internvl_model(
    given: dict[str, Any], name: str, path: Path, has_head: bool | None
) -> ModelConfig:
    """Return the model of an InternVL config.json.

    `has_head`: whether the checkpoint has a head tensor, None if unknown.
    """
    whole = as_table(_outer_type(given), given, str(path), lenient=True)
    text_type = LANGUAGES[internvl_language(given)]
    place = f"{path}: {whole.language_table}"
    text = as_table(text_type, whole.text_config, place, lenient=True)
    vision = as_table(whole.vision, whole.vision_config, f"{path}: vision_config", lenient=True)
    tied = is_tied(
        text.tie_word_embeddings,
        whole.tie_word_embeddings,
        original=is_original(given),
        has_head=has_head,
    )
    tiling = whole.tiling(vision.image_size, path)
    tower = TilesEncoder(**vision.parts, downsample_ratio=whole.downsample_ratio, tiling=tiling)
    text.check_trained()
    language = text.language(tied_head=tied)
    if text.rope.kind != SCALES_LATER:
        # Without dynamic scaling, only serving tools use max_position_embeddings.
        language = language.model_copy(update={"max_positions": None})
    return ModelConfig(
        name=name, encoders={"vision": tower}, language=language, **whole.conversations(path)
    )


def is_internvl(given: Mapping[str, Any]) -> bool:
    """Return whether a config.json is an InternVL's, in either format."""
    return is_original(given) or given.get("model_type") == "internvl"


def is_original(given: Mapping[str, Any]) -> bool:
    """Return whether a config.json is in InternVL's own format."""
    kind, classes = given.get("model_type"), given.get("architectures")
    return kind == "internvl_chat" or classes == ["InternVLChatModel"]


def internvl_language(given: Mapping[str, Any]) -> LanguageType:
    """Return the language model type of an InternVL config.json."""
    whole = _outer_type(given)
    table = given.get(whole.language_table)
    stated = table if isinstance(table, dict) else {}
    default = {} if whole is OriginalTable else {"model_type": "qwen2"}  # InternVLConfig's
    return language_type(default | stated, whole.languages)


def unread_keys(given: Mapping[str, Any]) -> list[str]:
    """Return unknown keys of an InternVL config.json with non-empty values, as "table.key"."""
    whole = _outer_type(given)
    language = LANGUAGES[internvl_language(given)]
    tables: list[tuple[type[HubTable], str, Any]] = [
        (language, f"{whole.language_table}.", given.get(whole.language_table)),
        (whole.vision, "vision_config.", given.get("vision_config")),
        (whole, "", given),
    ]
    return [
        place + key
        for kind, place, table in tables
        for key in kind.unknown_keys(table or {})
        if key not in _INERT_RELEASE_KEYS and (table or {})[key]
    ]


def _outer_type(given: Mapping[str, Any]) -> type[TransformersTable]:
    return OriginalTable if is_original(given) else TransformersTable


def is_tied(
    inner: bool | None, outer: bool | None, *, original: bool, has_head: bool | None
) -> bool:
    """Return whether the head is tied to the token embedding.

    `inner`, `outer`: tie_word_embeddings of the language model's and the outer table.
    """
    # InternVL's class follows the inner table. Transformers 5 does so for a head that is stored.
    if original or has_head:
        stated = outer if inner is None else inner
        return has_head is False if stated is None else stated
    if has_head is None:
        return bool(inner if outer is None else outer)
    # A head that is not stored is tied if a table says so, or if neither says anything.
    return bool(inner or outer) or (inner is None and outer is None)
