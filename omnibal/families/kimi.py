"""Kimi-VL (arXiv 2504.07491) and Kimi-K2.5: MoonViT and a DeepSeek-V3 language model."""

from pathlib import Path
from typing import ClassVar

from pydantic import PositiveInt

from omnibal.families.processor import read_processor
from omnibal.families.vision import LayersTable, Side, WholeTable
from omnibal.model.encoders import ImagesEncoder, ImageText


class KimiTable(WholeTable):
    projection_hidden_size: PositiveInt | None = None


class MoonVit(LayersTable):
    """Tower of Kimi-VL. Video frames are planned as images."""

    output_key = "text_hidden_size"
    max_patches: ClassVar[int] = 4096  # of an image, by the release's processor
    max_side: ClassVar[int | None] = None  # in patches, None if unlimited
    start: ClassVar[str] = "media_start"  # token before an image

    patch_size: PositiveInt = 14
    merge_kernel_size: Side = 2
    pos_emb_height: PositiveInt = 64
    pos_emb_width: PositiveInt = 64
    mm_hidden_size: PositiveInt | None = None
    text_hidden_size: PositiveInt | None = None

    def encoder(self, whole: KimiTable, path: Path) -> ImagesEncoder:
        for width in (whole.projection_hidden_size, self.mm_hidden_size):
            if width not in (None, self.hidden_size):
                raise ValueError(f"projector width {width} must be the tower's {self.hidden_size}")
        max_patches = read_processor(path, self.parts).max_image_patches or self.max_patches
        text = ImageText(
            before=f"<|{self.start}|>image<|media_content|>",
            each="<|media_pad|>",
            after="<|media_end|>",
        )
        return ImagesEncoder(
            **self.parts,
            learned_positions=self.pos_emb_height * self.pos_emb_width,
            min_pixels=1,
            max_pixels=max_patches * self.patch_size**2,
            max_side_pixels=None if self.max_side is None else self.max_side * self.patch_size,
            image_text=text,
        )


class MoonVit3d(MoonVit):
    """Tower of Kimi-K2.5. Its pooling over four video frames is not planned."""

    max_patches = 16_384
    max_side = 512
    start = "media_begin"
