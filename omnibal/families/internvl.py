"""InternVL 1.5 to 3.5 as their config.json describes them, in both formats: the original one
(InternVLChatConfig) and that of Transformers (InternVLConfig).

The planner and the conversion of checkpoints read with this one implementation. What this project's
towers cannot be (features of an earlier layer, other activations, images padded to squares) is
refused by name. Releases carry the keys of many versions of the classes that wrote them, so that
none is refused for one that is not known.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from omnibal.families.folder import stored_tensors
from omnibal.families.hub_table import HubTable, as_table
from omnibal.families.text import LANGUAGES, SCALES_LATER, LanguageType, language_type
from omnibal.families.vision import LayersTable, Square, square
from omnibal.families.whole import WholeTable
from omnibal.model.config import ChatTemplate, ModelConfig
from omnibal.model.encoders import TilesEncoder, TilingConfig

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
    # Of language models: dropouts, and experts that a dense one has not.
    "embd_pdrop resid_pdrop router_aux_loss_coef num_local_experts num_experts_per_tok "
    "norm_topk_prob decoder_sparse_step mlp_only_layers output_router_logits use_deepep".split()
)
"""Keys of released files that are not read and change nothing of a training step."""
_HEADS = ("lm_head.weight", "language_model.output.weight")
"""Ends of the names that a head's tensor has."""


class _Vision(LayersTable):
    num_channels: Literal[3] = 3
    patch_size: Square = 14
    image_size: Square
    norm_type: Literal["layer_norm", "rms_norm"]
    layer_norm_eps: PositiveFloat = 1e-6
    qkv_bias: bool = False
    qk_norm: bool
    hidden_act: Literal["gelu"] = "gelu"
    layer_scale_init: float = 0.1

    def tower(self, downsample_ratio: float, tiling: TilingConfig) -> TilesEncoder:
        """The tower that the table describes."""
        return TilesEncoder(
            **self.layer_sizes,
            image_size=square(self.image_size, "image_size"),
            patch_size=square(self.patch_size, "patch_size"),
            normalization=NORMS[self.norm_type],
            norm_eps=self.layer_norm_eps,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            layer_scale_init=self.layer_scale_init,
            downsample_ratio=downsample_ratio,
            tiling=tiling,
        )


class _OriginalVision(_Vision):
    older_names: ClassVar[Mapping[str, str]] = {
        "qk_normalization": "qk_norm",
        "initializer_factor": "layer_scale_init",
    }


class _TransformersVision(_Vision):
    older_names: ClassVar[Mapping[str, str]] = {
        "use_qk_norm": "qk_norm",
        "attention_bias": "qkv_bias",
        "layer_scale_init_value": "layer_scale_init",
    }

    use_absolute_position_embeddings: Literal[True] = True
    use_mask_token: Literal[False] = False
    use_mean_pooling: Literal[True] = True

    @model_validator(mode="after")
    def _has_one_eps(self) -> "_TransformersVision":
        if self.qk_norm and self.layer_norm_eps != TRANSFORMERS_QK_NORM_EPS:
            raise ValueError(
                f"layer_norm_eps {self.layer_norm_eps} with use_qk_norm must be "
                f"{TRANSFORMERS_QK_NORM_EPS}, which q and k norms always have there"
            )
        return self


class _Whole(WholeTable):
    language_table: ClassVar[str] = "text_config"
    languages: ClassVar[tuple[LanguageType, ...]] = _TRANSFORMERS_LANGUAGES
    vision: ClassVar[type[_Vision]] = _TransformersVision

    downsample_ratio: float = 0.5

    @property
    def conversations(self) -> dict[str, Any]:
        """Fields of a ModelConfig: templates of all that were released in Transformers' format."""
        return {"chat_template": "internvl2_5"}

    def tiling(self, image_size: int) -> TilingConfig:
        """How images are cut into tiles, of which the file says nothing."""
        return TilingConfig()


class _Transformers(_Whole):
    projector_hidden_act: Literal["gelu"] = "gelu"
    vision_feature_layer: Literal[-1] = -1
    vision_feature_select_strategy: Literal["default"] = "default"


class _Original(_Whole):
    older_names: ClassVar[Mapping[str, str]] = {"llm_config": "text_config"}
    language_table: ClassVar[str] = "llm_config"
    languages: ClassVar[tuple[LanguageType, ...]] = get_args(LanguageType)
    vision: ClassVar[type[_Vision]] = _OriginalVision

    force_image_size: PositiveInt | None = None
    select_layer: Literal[-1] = -1
    ps_version: Literal["v2"] = Field(default="v1", validate_default=True)
    template: ChatTemplate | None = None
    system_message: str | None = None
    """System message of InternVL's `chat` alone; its training takes the template's."""
    pad2square: Literal[False] = False
    dynamic_image_size: bool = False
    use_thumbnail: bool = False
    min_dynamic_patch: int = 1
    max_dynamic_patch: int = 6

    @property
    def conversations(self) -> dict[str, Any]:
        """Fields of a ModelConfig about conversations."""
        template = {} if self.template is None else {"chat_template": self.template}
        return {"chat_system_message": self.system_message, **template}

    def tiling(self, image_size: int) -> TilingConfig:
        """How images are cut into tiles."""
        if self.force_image_size not in (None, image_size):
            raise ValueError(
                f"has force_image_size {self.force_image_size}, but position embeddings for "
                f"tiles of {image_size} pixels (vision_config.image_size); set it to {image_size} "
                "there to train on such tiles, or else resize them by InternVL's "
                "vision_model.resize_pos_embeddings and save them with both sizes set to "
                f"{self.force_image_size}"
            )
        tiles = self.max_dynamic_patch if self.dynamic_image_size else 1
        return TilingConfig(
            min_dynamic_patch=min(self.min_dynamic_patch, tiles),
            max_dynamic_patch=tiles,
            use_thumbnail=self.use_thumbnail,
        )


def read_internvl(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """InternVL; names of a checkpoint's tensors beside the file tell whether there is a head."""
    names = stored_tensors(path.parent)
    has_head = None if names is None else any(name.endswith(_HEADS) for name in names)
    return internvl_model(given, name, path, has_head)


def internvl_model(
    given: dict[str, Any], name: str, path: Path, has_head: bool | None
) -> ModelConfig:
    """The model that a config.json of InternVL describes.

    Args:
        has_head: whether there is a tensor of the head beside the file; None where nobody
            looked, and the file alone says whether the head is tied.
    """
    whole = as_table(_kind(given), given, str(path), lenient=True)
    kind = LANGUAGES[internvl_language(given)]
    place = f"{path}: {whole.language_table}"
    text = as_table(kind, whole.text_config, place, lenient=True)
    vision = as_table(whole.vision, whole.vision_config, f"{path}: vision_config", lenient=True)
    tied = is_tied(
        text.tie_word_embeddings,
        whole.tie_word_embeddings,
        original=is_original(given),
        has_head=has_head,
    )
    tiling = whole.tiling(square(vision.image_size, "image_size"))
    tower = vision.tower(whole.downsample_ratio, tiling)
    text.check_trained()
    language = text.language(tied_head=tied)
    if text.rope.kind != SCALES_LATER:
        # Where RoPE is not scaled from there on, serving tools alone take it for the longest text.
        language = language.model_copy(update={"max_positions": None})
    return ModelConfig(
        name=name,
        encoders={"vision": tower},
        language=language,
        **whole.conversations,
    )


def is_internvl(given: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json is of an InternVL."""
    return is_original(given) or given.get("model_type") == "internvl"


def is_original(given: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json is in InternVL's own format."""
    kind, classes = given.get("model_type"), given.get("architectures")
    return kind == "internvl_chat" or classes == ["InternVLChatModel"]


def internvl_language(given: Mapping[str, Any]) -> LanguageType:
    """Kind of the language model of an InternVL, by the content of its config.json."""
    whole = _kind(given)
    table = given.get(whole.language_table)
    stated = table if isinstance(table, dict) else {}
    usual = {} if whole is _Original else {"model_type": "qwen2"}
    return language_type(usual | stated, whole.languages)


def unread_keys(given: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json of InternVL that are on, not read, and of no known release.

    A key that does change the model is planned without.

    Returns:
        Names, behind that of their table and a dot where they are in one.
    """
    whole = _kind(given)
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
        if key not in _DUMPED and (table or {})[key]
    ]


def _kind(given: Mapping[str, Any]) -> type[_Whole]:
    return _Original if is_original(given) else _Transformers


def is_tied(
    inner: bool | None, outer: bool | None, *, original: bool, has_head: bool | None
) -> bool:
    """Whether the head is tied to the token embedding.

    InternVL's own class goes by the language model's configuration (`inner`), from which it sets
    the whole model's (`outer`). Transformers 5 builds what the whole model's says, and unties a
    head that a checkpoint has; a missing head is tied if either says so.

    Args:
        original: whether the file is in InternVL's own format.
    """
    if original or has_head:
        stated = outer if inner is None else inner
        return has_head is False if stated is None else stated
    if has_head is None:
        return bool(inner if outer is None else outer)
    return bool(inner or outer) or (inner is None and outer is None)
