"""Tables of vision-language models: outer tables, and towers of native-resolution images."""

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, PositiveInt

from omnibal.families.hub_table import HubTable, as_table
from omnibal.families.processor import read_processor, read_video_processor
from omnibal.families.text import TextTable
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import Encoder, ImagesEncoder, VideoConfig


def _read_side(sides: Any) -> Any:
    """Return the side of a square given by both sides. Other values are checked as one side."""
    if not isinstance(sides, list):
        return sides
    if len(sides) != 2 or sides[0] != sides[1] or isinstance(sides[0], bool):
        raise ValueError(f"{sides} must be a square")
    return sides[0]


Side = Annotated[PositiveInt, BeforeValidator(_read_side)]
_PILLOW_BICUBIC = 3


class WholeTable(HubTable):
    """Outer table of a config.json: tables of language model and tower, and head tying."""

    text_config: dict[str, Any] | None = None
    vision_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None


class Tower(HubTable):
    """Vision tower of a family."""

    output_key: ClassVar[str | None] = None  # key with the projector's output width

    def encoder(self, whole: Any, path: Path) -> Encoder:
        """Return the encoder, with pixel limits of processor files next to `path`."""
        raise NotImplementedError

    def output_size(self, text: TextTable) -> int:
        """Return the projector's output width, by default the language model's."""
        stated = None if self.output_key is None else dict(self)[self.output_key]
        return stated or text.hidden_size


class LayersTable(Tower):
    """Keys of a tower's layers, named like language models'."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt


class DepthTable(Tower):
    """Keys of Qwen2-VL's tower and later."""

    reads_video: ClassVar[bool] = True  # whether a video processor's file changes `video`

    depth: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    patch_size: Side
    spatial_merge_size: PositiveInt = 2
    temporal_patch_size: PositiveInt = 2

    @property
    def video(self) -> VideoConfig | None:
        """Video settings of the releases in tables.toml, None if absent."""
        video = self.section().parts.get("video")
        return None if video is None else VideoConfig.model_validate(video)

    def encoder(self, whole: WholeTable, path: Path) -> ImagesEncoder:
        fields, video = self.parts, self.video
        if video is not None and self.reads_video:
            # Pixel limits in the file are per frame (Qwen2-VL) or for all frames.
            changes = read_video_processor(path).changes(per_frame=not video.counts_frames)
            video = VideoConfig.model_validate({**video.model_dump(), **changes})
        fields |= _processor_fields(path, fields) | {"video": video}
        return ImagesEncoder(**fields)


class VisionTable(DepthTable):
    """Keys of Qwen2.5-VL's tower and later."""

    intermediate_size: PositiveInt


def _processor_fields(config: Path, tower: dict[str, Any]) -> dict[str, Any]:
    """Return ImagesEncoder fields set by the image processor's file. Raise if unsupported."""
    processor = read_processor(config, tower)
    if not (processor.do_rescale and processor.do_normalize):
        raise ValueError("do_rescale and do_normalize of the image processor must be true")
    if processor.resample not in (None, _PILLOW_BICUBIC):
        raise ValueError(f"resample {processor.resample} must be bicubic: {_PILLOW_BICUBIC}")
    return processor.fields("min_pixels", "max_pixels", "pixel_mean", "pixel_std", "pixel_scale")


def read_vision_language(
    vision: type[Tower],
    text: type[TextTable],
    given: dict[str, Any],
    name: str,
    path: Path,
    *,
    kind: type[WholeTable] = WholeTable,
) -> ModelConfig:
    """Return the model of config.json `given`, read as `kind`, `vision` and `text` tables."""
    whole = as_table(kind, given, str(path))
    tower = as_table(vision, whole.vision_config, f"{path}: vision_config")
    language = as_table(text, whole.text_config, f"{path}: text_config")
    language.check_rope()
    encoder = tower.encoder(whole, path)
    width = tower.output_size(language)
    if width != language.hidden_size:
        raise ValueError(f"projector width {width} must be hidden_size {language.hidden_size}")
    return ModelConfig(
        name=name,
        encoders={"vision": encoder},
        language=language.language(tied_head=language.is_tied(whole.tie_word_embeddings)),
        chat_template="tokenizer",
    )
