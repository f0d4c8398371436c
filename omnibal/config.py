"""Model and cluster descriptions, read from TOML as frozen typed values.

Sizes follow the published models' own config files; every derived number (tokens per tile,
parameters) is computed here once.
"""

import json
import math
from collections.abc import Sequence
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

from omnibal.errors import UserError
from omnibal.files import read_toml_model

Precision = Literal["fp32", "bf16"]
ChatTemplate = Literal["internlm2-chat", "Hermes-2", "phi3-chat", "internvl2_5"]
"""Chat templates, named as `template` in InternVL's released configs."""
MAX_LAYERS = 1_000
"""Most layers of one tower: with more, the search takes many minutes, then too much memory."""
MAX_TILES_OF_IMAGE = 1_000
"""Most tiles of an image: all grids of as many are tried for each image size."""
MAX_COUNT = 2**31 - 1
"""Largest count of anything, as arrays hold 32-bit numbers."""
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Width = Annotated[int, Field(ge=1, le=2**24)]
"""Width of a matrix; the product of two widths and all layers stays exact."""
Rate = Annotated[float, Field(ge=1e-9, le=1e18)]
"""Rate of a device, a link or a kernel; times and their sums over a run stay finite."""
Share = Annotated[float, Field(ge=1e-9, le=1)]
T = TypeVar("T", bound="Frozen")
_PRESETS = Path(__file__).parent / "presets"


class Part(StrEnum):
    """Part of the model that is trained or frozen as a whole."""

    VISION = "vision"
    PROJECTOR = "projector"
    LANGUAGE = "language"


def frozen_mistake(frozen: Sequence[Part]) -> str | None:
    """Error message for a choice of frozen parts; None if it is valid."""
    if len(set(frozen)) == len(frozen) < len(Part):
        return None
    return (
        f"frozen names {', '.join(frozen)}; it must name each part at most once and leave one to "
        "train"
    )


class Frozen(BaseModel):
    """Base of every configuration: immutable; an unknown key is an error, and so is NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class VisionConfig(Frozen):
    """InternViT or EVA-CLIP: pre-norm layers over `image_size`-pixel square tiles."""

    layers: Layers
    hidden_size: Width
    heads: Width
    ffn_hidden_size: Width
    image_size: Annotated[int, Field(ge=1, le=65_536)]
    patch_size: Annotated[int, Field(ge=1, le=65_536)]
    normalization: Literal["LayerNorm", "RMSNorm"]
    norm_eps: PositiveFloat = 1e-6
    qkv_bias: bool
    qk_norm: bool
    layer_scale_init: PositiveFloat | None = Field(
        default=None, description="of the scale that ends each branch; left out: there is none"
    )

    @model_validator(mode="after")
    def _sizes_divide(self) -> "VisionConfig":
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of heads {self.heads}"
            )
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} must be a multiple of patch_size {self.patch_size}"
            )
        return self

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def positions_per_tile(self) -> int:
        """Sequence length of one tile inside the encoder: its patches and the class token."""
        return self.patches_per_side**2 + 1


class LanguageConfig(Frozen):
    """InternLM2, Llama or Qwen2: RMSNorm, grouped-query attention, RoPE, SwiGLU."""

    layers: Layers
    hidden_size: Width
    heads: Width
    kv_heads: Width
    ffn_hidden_size: Width
    vocab_size: Width
    qkv_bias: bool = False
    norm_eps: PositiveFloat = 1e-5
    rope_base: Annotated[int, Field(ge=1, le=10**15)] = 1_000_000
    max_positions: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None,
        description="tokens of the longest sample; left out: any number",
    )
    rope_factor: PositiveFloat | None = Field(
        default=None,
        description="of the dynamic scaling that a released model's RoPE has beyond max_positions; "
        "kept for exports, as no sample is longer",
    )
    tied_head: bool = Field(
        default=False, description="the head's matrix is the token embedding (small Qwen2 models)"
    )

    @model_validator(mode="after")
    def _sizes_divide(self) -> "LanguageConfig":
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of heads {self.heads}, "
                f"and heads a multiple of kv_heads {self.kv_heads}"
            )
        return self

    @model_validator(mode="after")
    def _scales_beyond_a_limit(self) -> "LanguageConfig":
        if self.rope_factor is not None and self.max_positions is None:
            raise ValueError(
                f"rope_factor {self.rope_factor} scales RoPE beyond max_positions, so that must be "
                "given too"
            )
        return self


class TilingConfig(Frozen):
    """Dynamic tiling of InternVL 1.5: an image becomes 1 to `max_dynamic_patch` square tiles."""

    min_dynamic_patch: Annotated[int, Field(ge=1, le=MAX_TILES_OF_IMAGE)] = 1
    max_dynamic_patch: Annotated[int, Field(ge=1, le=MAX_TILES_OF_IMAGE)] = 12
    use_thumbnail: bool = True
    max_frames_per_video: Count = 32

    @model_validator(mode="after")
    def _ordered(self) -> "TilingConfig":
        if self.min_dynamic_patch > self.max_dynamic_patch:
            raise ValueError(
                f"min_dynamic_patch {self.min_dynamic_patch} must not exceed "
                f"max_dynamic_patch {self.max_dynamic_patch}"
            )
        return self


class ModelConfig(Frozen):
    """A vision-language model: encoder, pixel shuffle with MLP projector, language model."""

    name: str
    downsample_ratio: Annotated[float, Field(ge=1e-3, le=1)] = 0.5
    vision: VisionConfig
    language: LanguageConfig
    tiling: TilingConfig = TilingConfig()
    chat_template: ChatTemplate = "internlm2-chat"
    system_message: str | None = Field(
        default=None,
        description="of conversations without their own; empty: none, left out: the template's",
    )
    chat_system_message: str | None = Field(
        default=None,
        description="of tools/chat.py instead; empty: an empty turn, left out: as in training",
    )

    @model_validator(mode="after")
    def _pixel_shuffle_divides(self) -> "ModelConfig":
        if not math.isclose(self.pixel_shuffle_factor * self.downsample_ratio, 1, rel_tol=1e-6):
            raise ValueError(
                f"downsample_ratio {self.downsample_ratio} must be 1 / a whole number, such as 0.5"
            )
        if self.vision.patches_per_side % self.pixel_shuffle_factor:
            raise ValueError(
                f"{self.vision.patches_per_side} patches per side must be a multiple of "
                f"1 / downsample_ratio = {self.pixel_shuffle_factor}"
            )
        return self

    @property
    def pixel_shuffle_factor(self) -> int:
        """Patches per side that pixel shuffle folds into one token's channels."""
        return round(1 / self.downsample_ratio)

    @property
    def tokens_per_tile(self) -> int:
        """Language tokens that one tile becomes (256 for 448-px tiles of 14-px patches)."""
        return (self.vision.patches_per_side // self.pixel_shuffle_factor) ** 2

    @property
    def projector_input_size(self) -> int:
        return self.vision.hidden_size * self.pixel_shuffle_factor**2


class ClusterConfig(Frozen):
    """Devices and links that the analytic cost model counts with; bandwidths are per device."""

    name: str
    device: str
    memory_gib: Rate
    gpus_per_node: Annotated[int, Field(ge=1, le=1_024)]
    peak_tflops: dict[Precision, Rate] = Field(description="dense matrix rate by precision")
    matmul_efficiency: Share = Field(description="share of the peak that layers reach")
    memory_gb_per_s: Rate
    memory_efficiency: Share = Field(
        description="share of that rate that element-wise kernels reach"
    )
    kernel_us: Rate = Field(description="of each kernel, besides its work")
    intra_node_gb_per_s: Rate
    inter_node_gb_per_s: Rate
    link_efficiency: Share = Field(description="share of both rates that transfers reach")
    link_latency_us: Rate

    def tflops(self, precision: Precision) -> float:
        """Peak of a device, dense.

        Raises:
            UserError: the description has none for this precision.
        """
        if precision not in self.peak_tflops:
            known = ", ".join(self.peak_tflops) or "none"
            raise UserError(
                f"cluster {self.name}: peak_tflops has no rate for {precision} (it has {known}); "
                f"add {precision} to peak_tflops, or choose a --precision that it has"
            )
        return self.peak_tflops[precision]


def load_model(name_or_path: str) -> ModelConfig:
    """Read the model preset of that name, or the TOML file at that path."""
    return _load("models", name_or_path, ModelConfig)


def model_toml(model: ModelConfig) -> str:
    """The TOML text that `load_model` reads as this model."""
    fields = model.model_dump(mode="json", exclude_none=True)
    tables = {name: value for name, value in fields.items() if isinstance(value, dict)}
    lines = [_toml_line(name, fields[name]) for name in fields if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(_toml_line(*entry) for entry in table.items())]
    return "\n".join(lines) + "\n"


def _toml_line(name: str, value: str | int | float | bool) -> str:
    # JSON writes text, numbers and truth values as TOML does, but for one control character.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{name} = {text}"


def load_cluster(name_or_path: str) -> ClusterConfig:
    """Read the cluster preset of that name, or the TOML file at that path."""
    return _load("clusters", name_or_path, ClusterConfig)


def preset_names(kind: str) -> list[str]:
    """Names of the shipped presets of `kind` ("models" or "clusters")."""
    return sorted(path.stem for path in (_PRESETS / kind).glob("*.toml"))


def model_file(name_or_path: str) -> Path:
    """File that `load_model` reads."""
    return _file("models", name_or_path)


def cluster_file(name_or_path: str) -> Path:
    """File that `load_cluster` reads."""
    return _file("clusters", name_or_path)


def _file(kind: str, name_or_path: str) -> Path:
    preset = name_or_path in preset_names(kind)
    return _PRESETS / kind / f"{name_or_path}.toml" if preset else Path(name_or_path)


def _load(kind: str, name_or_path: str, config_type: type[T]) -> T:
    names, path = preset_names(kind), _file(kind, name_or_path)
    if not path.is_file():
        near = get_close_matches(name_or_path, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"{name_or_path!r} is neither a file nor a preset{hint} "
            f"(presets of omnibal/presets/{kind}: {', '.join(names)})"
        )
    remedy = f"compare with a preset, such as {_PRESETS / kind / names[0]}.toml"
    return read_toml_model(config_type, path, remedy)
