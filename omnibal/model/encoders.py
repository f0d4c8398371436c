"""Encoders: towers that turn images or audio into tokens of the language model.

A sample counts its *items* (e.g. tiles). An encoder defines positions and tokens per item.
"""

import math
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, PositiveFloat, model_validator

from omnibal.base.frozen import Count, Frozen, Layers, Width, written_unless

MAX_TILES_OF_IMAGE = 1_000  # max tiles per image: all grids up to it are tried for each image size


class EncoderLayers(Frozen):
    """Equal pre-norm transformer layers of an encoder."""

    feature: ClassVar[str]  # item name, also its column in a lengths file
    of_images: ClassVar[bool] = False
    """Whether items are parts of images, which synthetic packs include."""

    layers: Layers
    hidden_size: Width
    heads: Width
    ffn_hidden_size: Width
    normalization: Literal["LayerNorm", "RMSNorm"]
    norm_eps: PositiveFloat = 1e-6
    qkv_bias: bool
    qk_norm: bool
    layer_scale_init: PositiveFloat | None = Field(
        default=None, description="of the scale that ends each branch; left out: there is none"
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> "EncoderLayers":
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of heads {self.heads}"
            )
        return self

    @property
    def head_width(self) -> int:
        """Width of one head of q, of k and of v."""
        return self.hidden_size // self.heads

    @property
    def squares(self) -> str | None:
        """Feature of full attention: sum over inputs of squared items, or None if attention is per
        item.

        If set, all items of a sample go to one data-parallel rank.
        """
        return None

    @property
    def deepstack_features(self) -> int:
        """Deepstack features per token, each for one language layer."""
        return 0


class TilingConfig(Frozen):
    """Dynamic tiling of InternVL 1.5: 1 to `max_dynamic_patch` square tiles per image."""

    min_dynamic_patch: Annotated[int, Field(ge=1, le=MAX_TILES_OF_IMAGE)] = 1
    max_dynamic_patch: Annotated[int, Field(ge=1, le=MAX_TILES_OF_IMAGE)] = 12
    use_thumbnail: bool = True
    max_frames_per_video: Count = 32
    by_processor: bool = written_unless(
        False, "whether Transformers tiles images: each to max_dynamic_patch, not a sample's all"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "TilingConfig":
        if self.min_dynamic_patch > self.max_dynamic_patch:
            raise ValueError(
                f"min_dynamic_patch {self.min_dynamic_patch} must not exceed "
                f"max_dynamic_patch {self.max_dynamic_patch}"
            )
        return self


class TilesEncoder(EncoderLayers):
    """InternViT or EVA-CLIP over square image tiles, with pixel shuffle and an MLP projector."""

    feature: ClassVar[str] = "tiles"
    of_images: ClassVar[bool] = True

    kind: Literal["tiles"] = "tiles"
    image_size: Annotated[int, Field(ge=1, le=65_536)]
    patch_size: Annotated[int, Field(ge=1, le=65_536)]
    downsample_ratio: Annotated[float, Field(ge=1e-3, le=1)] = 0.5
    tiling: TilingConfig = TilingConfig()

    @model_validator(mode="after")
    def _patches_divide(self) -> "TilesEncoder":
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} must be a multiple of patch_size {self.patch_size}"
            )
        if not math.isclose(self.pixel_shuffle_factor * self.downsample_ratio, 1, rel_tol=1e-6):
            raise ValueError(
                f"downsample_ratio {self.downsample_ratio} must be 1 / a whole number, such as 0.5"
            )
        if self.patches_per_side % self.pixel_shuffle_factor:
            raise ValueError(
                f"{self.patches_per_side} patches per side must be a multiple of "
                f"1 / downsample_ratio = {self.pixel_shuffle_factor}"
            )
        return self

    @property
    def patches_per_side(self) -> int:
        """Patches along one side of a tile."""
        return self.image_size // self.patch_size

    @property
    def positions_per_item(self) -> int:
        """Encoder sequence length of one tile: patches and class token."""
        return self.patches_per_side**2 + 1

    @property
    def pixel_shuffle_factor(self) -> int:
        """Patches per side folded into one token's channels."""
        return round(1 / self.downsample_ratio)

    @property
    def tokens_per_item(self) -> int:
        """Language tokens per tile (256 for 448-px tiles of 14-px patches)."""
        return (self.patches_per_side // self.pixel_shuffle_factor) ** 2

    @property
    def projector_input_size(self) -> int:
        """Width of a token before the projector's first product."""
        return self.hidden_size * self.pixel_shuffle_factor**2

    @property
    def values_per_item(self) -> int:
        """Colour values of a tile."""
        return 3 * self.image_size**2


class ClipsEncoder(EncoderLayers):
    """Whisper over clips of log-mel frames, with an MLP projector over neighbouring positions.

    Clips have a fixed length with padding (Radford et al. 2022, arXiv 2212.04356, section 2.2:
    3,000 frames of 10 ms, halved by the second convolution).
    """

    feature: ClassVar[str] = "clips"

    kind: Literal["clips"] = "clips"
    frames: Annotated[int, Field(ge=2, le=2**20, multiple_of=2)] = 3_000
    mel_bins: Annotated[int, Field(ge=1, le=4_096)] = 128
    positions_per_token: Annotated[int, Field(ge=1, le=4_096)] = Field(
        default=2, description="neighbouring positions that become one token of the language model"
    )

    @model_validator(mode="after")
    def _sizes_divide(self) -> "ClipsEncoder":
        if self.hidden_size % 2 or self.hidden_size < 4:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be even and at least 4: half of a position's "
                "numbers are sines and half cosines"
            )
        if self.positions_per_item % self.positions_per_token:
            raise ValueError(
                f"{self.positions_per_item} positions of a clip (half its frames) must be a "
                f"multiple of positions_per_token {self.positions_per_token}"
            )
        return self

    @property
    def positions_per_item(self) -> int:
        """Encoder sequence length of one clip."""
        return self.frames // 2

    @property
    def tokens_per_item(self) -> int:
        """Language tokens per clip."""
        return self.positions_per_item // self.positions_per_token

    @property
    def projector_input_size(self) -> int:
        """Width of a token before the projector's first product."""
        return self.hidden_size * self.positions_per_token

    @property
    def values_per_item(self) -> int:
        """Mel bins of all frames of a clip."""
        return self.frames * self.mel_bins


class ImageText(Frozen):
    """Text a chat template writes around the tokens of an image or video."""

    before: str = "<|vision_start|>"
    each: str = Field(default="<|image_pad|>", min_length=1, description="of every token")
    after: str = "<|vision_end|>"

    @property
    def text(self) -> str:
        """Text with the token to repeat once."""
        return self.before + self.each + self.after


class VideoConfig(Frozen):
    """Video sampling: frames, their size, and the text between them."""

    frames_per_second: PositiveFloat = Field(
        default=2.0, description="that are seen, and of the frames in a folder"
    )
    max_frames: Count = 768
    min_frames: Count = written_unless(4, "that are seen of a video in a file, if it has as many")
    sampling: Literal["steps", "ends"] = written_unless(
        "steps",
        "of the frames of a file: steps: by equal steps from the first one, whole "
        "patches of them (Qwen2-VL); ends: evenly, with the first and the last (Qwen3-VL)",
    )
    min_pixels: Count = 128 * 28 * 28
    max_pixels: Count = 768 * 28 * 28
    counts_frames: bool = Field(
        default=False,
        description="whether pixels are of all frames together (Qwen3-VL, GLM-4.5V), or of one",
    )
    text: ImageText = ImageText(each="<|video_pad|>")
    times: Literal["none", "before", "after"] = Field(
        default="none",
        description="none: all tokens within one text; before: one text for the frames of every "
        "patch, after their time such as <1.5 seconds> (Qwen3-VL); after: the time in whole "
        "seconds behind it (GLM-4.5V)",
    )
    positions_per_second: PositiveFloat | None = written_unless(
        None, "by which tokens' times count (Qwen2.5-VL); left out: one a patch of frames"
    )
    around: tuple[str, str] = Field(default=("", ""), description="before and after all of it")


class ImageRule(Frozen):
    """Parameters that determine the token count of an image or video."""

    patch_size: Annotated[int, Field(ge=1, le=65_536)]
    merge_size: Annotated[int, Field(ge=1, le=256)] = 2
    frames_per_patch: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1, description="neighbouring frames of a video in a patch; an image is repeated"
    )
    min_pixels: Count = 56 * 56
    max_pixels: Count = 28 * 28 * 1280
    resize: Literal["smart", "repeated", "fixed", "padded"] = Field(
        default="smart",
        description="smart: to whole cells, area within min_pixels and max_pixels (Qwen2-VL); "
        "repeated: the same, of an image whose pixels count for each of frames_per_patch "
        "(GLM-4.5V); fixed: to a square of max_pixels (Gemma 3); padded: shrunk to max_pixels and "
        "padded to whole cells (Kimi-VL)",
    )
    max_side_pixels: Count | None = Field(
        default=None, description="longest side of an image that is padded (Kimi-K2.5)"
    )
    image_text: ImageText = ImageText()
    video: VideoConfig | None = Field(
        default=None, description="left out: frames of a video are images"
    )

    @model_validator(mode="after")
    def _images_have_whole_cells(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels {self.min_pixels} must not exceed max_pixels {self.max_pixels}"
            )
        if self.resize == "fixed" and self.tokens_of_fixed_image is None:
            raise ValueError(
                f"max_pixels {self.max_pixels} must be a square of whole cells of "
                f"{self.cell_pixels} pixels, as resize is fixed"
            )
        return self

    @property
    def cell_pixels(self) -> int:
        """Side of a cell in pixels."""
        return self.patch_size * self.merge_size

    @property
    def tokens_of_fixed_image(self) -> int | None:
        """Tokens per image of `max_pixels` squares, or None if not a multiple of cells."""
        cells = math.isqrt(self.max_pixels) // self.cell_pixels
        return cells**2 if (cells * self.cell_pixels) ** 2 == self.max_pixels else None


class ImagesEncoder(EncoderLayers, ImageRule):
    """Vision transformer over images at their native resolution (Qwen2-VL and later).

    `resize` fits an image to whole cells of `merge_size` x `merge_size` patches. A cell is an item
    and becomes one token. Attention is within an image, a temporal patch of frames, or a window.
    """

    feature: ClassVar[str] = "image_tokens"
    of_images: ClassVar[bool] = True

    kind: Literal["images"] = "images"
    head_size: Width | None = Field(default=None, description="left out: hidden_size / heads")
    gated: bool = Field(default=False, description="whether feed-forwards have a gate (SwiGLU)")
    activation: Literal["gelu", "gelu_tanh", "quick_gelu"] = written_unless(
        "gelu",
        "of feed-forwards without a gate: by the error function, by its approximation "
        "with tanh (Qwen3-VL), or by a sigmoid (Qwen2-VL)",
    )
    pixel_mean: tuple[float, float, float] = written_unless(
        (0.5, 0.5, 0.5), "of red, green and blue, taken from colours that are scaled by pixel_scale"
    )
    pixel_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = written_unless(
        (0.5, 0.5, 0.5), "by which they are then divided"
    )
    pixel_scale: PositiveFloat = written_unless(
        1 / 255, "by which colours of 0 to 255 are multiplied first"
    )
    bias: bool = Field(default=True, description="of layers' linears but q, k and v")
    patch_bias: bool = Field(default=True, description="of the product that embeds patches")
    class_token: bool = Field(
        default=False,
        description="a position more in every image, with an embedding and a rotation of its own "
        "(LLaVA-OneVision-1.5); its time is not counted, as it is one in thousands",
    )
    embed_norm: bool = Field(default=False, description="a norm before the first layer")
    final_norm: bool = Field(
        default=False, description="a norm after the last layer, besides the projector's"
    )
    learned_positions: Annotated[int, Field(ge=0, le=2**24)] = Field(
        default=0, description="learned embeddings, interpolated to an image; 0: RoPE alone"
    )
    window_pixels: Count | None = Field(
        default=None, description="side of an attention window; left out: all layers attend fully"
    )
    full_layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="layers that attend to all of their image despite window_pixels"
    )
    deepstack_layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(),
        description="layers whose outputs a projector of their own takes to the first language "
        "layers, one each (Qwen3-VL)",
    )
    projector: Literal["mlp", "pooled", "gated"] = Field(
        default="mlp",
        description="mlp: positions normed, cells folded, two products; pooled: cells averaged and "
        "normed, one product without bias (Gemma 3); gated: a product that folds cells, another, a "
        "norm and a gated MLP, without biases but the first (GLM-4.5V)",
    )
    projector_hidden_size: Width | None = Field(
        default=None, description="inside the projector; left out: the width of a folded cell"
    )

    @model_validator(mode="after")
    def _layers_and_windows_fit(self) -> "ImagesEncoder":
        for name, layers in (
            ("full_layers", self.full_layers),
            ("deepstack_layers", self.deepstack_layers),
        ):
            if any(layer >= self.layers for layer in layers) or sorted(set(layers)) != [*layers]:
                raise ValueError(
                    f"{name} {layers} must be different layers below {self.layers}, in order"
                )
        if self.full_layers and self.window_pixels is None:
            raise ValueError("full_layers are apart from windows; give window_pixels too")
        if self.window_pixels is not None and self.window_pixels < self.cell_pixels:
            raise ValueError(
                f"window_pixels {self.window_pixels} must hold a cell of {self.cell_pixels}"
            )
        return self

    @property
    def image_rule(self) -> ImageRule:
        """Only the parameters of image token counts."""
        return ImageRule.model_validate(self.model_dump(include=set(ImageRule.model_fields)))

    @property
    def window_positions(self) -> int | None:
        """Positions of a full window, or None if all layers attend fully."""
        if self.window_pixels is None:
            return None
        return (self.window_pixels // self.cell_pixels * self.merge_size) ** 2

    def is_windowed(self, layer: int) -> bool:
        """Whether layer `layer` attends within windows."""
        return self.window_pixels is not None and layer not in self.full_layers

    @property
    def head_width(self) -> int:
        """Width of one head of q, of k and of v."""
        return self.head_size or self.hidden_size // self.heads

    @property
    def deepstack_features(self) -> int:
        """Deepstack features per cell."""
        return len(self.deepstack_layers)

    @property
    def squares(self) -> str:
        """Feature of full attention: sum over images and frames of squared tokens."""
        return squares_of(self.feature)

    @property
    def values_per_patch(self) -> int:
        """Colour values of a patch, over all its frames."""
        return 3 * self.frames_per_patch * self.patch_size**2

    @property
    def values_per_item(self) -> int:
        """Colour values of a cell, over all its frames."""
        return self.values_per_patch * self.positions_per_item

    @property
    def positions_per_item(self) -> int:
        """Patches per cell."""
        return self.merge_size**2

    @property
    def tokens_per_item(self) -> int:
        """Language tokens per cell: one."""
        return 1

    @property
    def projector_input_size(self) -> int:
        """Width of a cell before the projector's first product."""
        return self.hidden_size * self.merge_size**2


def squares_of(feature: str) -> str:
    """Name of the feature that sums squared items per image or frame."""
    return f"squared_{feature}"


Encoder = Annotated[TilesEncoder | ClipsEncoder | ImagesEncoder, Field(discriminator="kind")]
"""Any kind of encoder, discriminated by `kind`."""
_CLASSES: tuple[type[EncoderLayers], ...] = get_args(get_args(Encoder)[0])
ENCODER_KINDS = tuple(each.model_fields["kind"].default for each in _CLASSES)  # all encoder kinds
ITEM_FEATURES = tuple(sorted({each.feature for each in _CLASSES}))
"""Item features, each a column of a lengths file."""
SQUARED_FEATURES = (squares_of(ImagesEncoder.feature),)  # squared features of a lengths file
