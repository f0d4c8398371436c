"""Settings of image and audio encoders. A sample has *items* (tiles, clips, cells), each with a
fixed number of positions (in the encoder) and of tokens (in the language model).
"""

import math
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, PositiveFloat, model_validator

from omnibal.base.errors import refuse_if
from omnibal.base.frozen import Count, Frozen, Layers, Width, written_unless

# GELU (arXiv 1606.08415) of feed-forwards: by erf, by tanh (Qwen3-VL), or by a sigmoid (Qwen2-VL)
Gelu = Literal["gelu", "gelu_tanh", "quick_gelu"]
MAX_TILES_OF_IMAGE = 1_000  # all grids up to it are tried for every image size


class EncoderLayers(Frozen):
    """Equal pre-norm transformer layers of an encoder."""

    feature: ClassVar[str]  # items per sample: name, and column of a lengths file
    of_images: ClassVar[bool] = False  # whether items are parts of images, not audio

    layers: Layers
    hidden_size: Width
    heads: Width
    ffn_hidden_size: Width
    normalization: Literal["LayerNorm", "RMSNorm"]
    norm_eps: PositiveFloat = 1e-6
    qkv_bias: bool
    qk_norm: bool
    # of the scale that ends each branch; left out: there is none
    layer_scale_init: PositiveFloat | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> "EncoderLayers":
        message = f"hidden_size {self.hidden_size} must be a multiple of heads {self.heads}"
        refuse_if(self.hidden_size % self.heads, message)
        return self

    @property
    def head_width(self) -> int:
        """Width of one head of q, of k and of v."""
        return self.hidden_size // self.heads

    @property
    def norm_vectors(self) -> int:
        """Weight vectors of a norm, and moments that it keeps per row."""
        return 1 if self.normalization == "RMSNorm" else 2

    @property
    def squares(self) -> str | None:
        """Name of the feature of full attention: items squared, summed over images and frames.

        None if attention is within items. Else a sample's items stay on one data-parallel rank.
        """
        return None

    @property
    def deepstack_features(self) -> int:
        """Number of deepstack outputs per token, each added in one language layer."""
        return 0


class TilingConfig(Frozen):
    """Dynamic tiling of InternVL 1.5: min and max square tiles of an image, without thumbnail."""

    min_dynamic_patch: Annotated[int, Field(ge=1, le=MAX_TILES_OF_IMAGE)] = 1
    max_dynamic_patch: Annotated[int, Field(ge=1, le=MAX_TILES_OF_IMAGE)] = 12
    use_thumbnail: bool = True
    max_frames_per_video: Count = 32
    # whether Transformers tiles images: each to max_dynamic_patch, not a sample's all
    by_processor: bool = written_unless(False)

    @model_validator(mode="after")
    def _min_is_below_max(self) -> "TilingConfig":
        low, high = self.min_dynamic_patch, self.max_dynamic_patch
        refuse_if(low > high, f"min_dynamic_patch {low} must not exceed max_dynamic_patch {high}")
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
        image, patch, ratio = self.image_size, self.patch_size, self.downsample_ratio
        refuse_if(image % patch, f"image_size {image} must be a multiple of patch_size {patch}")
        is_whole = math.isclose(self.pixel_shuffle_factor * ratio, 1, rel_tol=1e-6)
        refuse_if(not is_whole, f"downsample_ratio {ratio} must be 1 / a whole number, such as 0.5")
        side, factor = self.patches_per_side, self.pixel_shuffle_factor
        message = f"{side} patches per side must be a multiple of 1 / downsample_ratio = {factor}"
        refuse_if(side % factor, message)
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
    """Whisper (Radford et al. 2022, arXiv 2212.04356, section 2.2) with an MLP projector.

    Clips are padded to `frames` log-mel frames of 10 ms, which the second convolution halves.
    """

    feature: ClassVar[str] = "clips"

    kind: Literal["clips"] = "clips"
    frames: Annotated[int, Field(ge=2, le=2**20, multiple_of=2)] = 3_000
    mel_bins: Annotated[int, Field(ge=1, le=4_096)] = 128
    # neighbouring positions that become one token of the language model
    positions_per_token: Annotated[int, Field(ge=1, le=4_096)] = 2

    @model_validator(mode="after")
    def _sizes_divide(self) -> "ClipsEncoder":
        size, places, per_token = (
            self.hidden_size,
            self.positions_per_item,
            self.positions_per_token,
        )
        # half sines, half cosines
        refuse_if(size % 2 or size < 4, f"hidden_size {size} must be even and at least 4")
        message = f"frames / 2 = {places} must be a multiple of positions_per_token {per_token}"
        refuse_if(places % per_token, message)
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
        """Log-mel values of a clip: all bins of all frames."""
        return self.frames * self.mel_bins


class ImageText(Frozen):
    """Text of an image or video in a conversation: a placeholder per token, text around them."""

    before: str = "<|vision_start|>"
    each: str = Field(default="<|image_pad|>", min_length=1)  # of every token
    after: str = "<|vision_end|>"

    @property
    def text(self) -> str:
        """Text of an image of one token."""
        return self.before + self.each + self.after


class VideoConfig(Frozen):
    """Video sampling: number and size of frames, and the text between them."""

    frames_per_second: PositiveFloat = 2.0  # sampling rate, and rate of the frames in a folder
    max_frames: Count = 768
    min_frames: Count = written_unless(4)  # sampled from a video file, if it has as many
    # of a file's frames: steps: equal steps from the first, whole patches (Qwen2-VL); ends:
    # evenly, with the first and the last (Qwen3-VL)
    sampling: Literal["steps", "ends"] = written_unless("steps")
    min_pixels: Count = 128 * 28 * 28
    max_pixels: Count = 768 * 28 * 28
    # pixel limits are for all frames together (Qwen3-VL, GLM-4.5V), or per frame
    counts_frames: bool = False
    text: ImageText = ImageText(each="<|video_pad|>")
    # none: all tokens within one text; before: one text for the frames of every patch, after their
    # time such as <1.5 seconds> (Qwen3-VL); after: the time in whole seconds behind it (GLM-4.5V)
    times: Literal["none", "before", "after"] = "none"
    # RoPE time positions per second (Qwen2.5-VL); left out: one per patch of frames
    positions_per_second: PositiveFloat | None = written_unless(None)
    around: tuple[str, str] = ("", "")  # text before and after a video


class ImageRule(Frozen):
    """Settings that determine the tokens of an image or video."""

    patch_size: Annotated[int, Field(ge=1, le=65_536)]
    merge_size: Annotated[int, Field(ge=1, le=256)] = 2
    # consecutive video frames in a patch; an image is repeated
    frames_per_patch: Annotated[int, Field(ge=1, le=256)] = 1
    min_pixels: Count = 56 * 56
    max_pixels: Count = 28 * 28 * 1280
    # smart: to whole cells, area within min_pixels and max_pixels (Qwen2-VL); repeated: same, of
    # an image whose pixels count for each of frames_per_patch (GLM-4.5V); fixed: to a square of
    # max_pixels (Gemma 3); padded: shrunk to max_pixels and padded to whole cells (Kimi-VL)
    resize: Literal["smart", "repeated", "fixed", "padded"] = "smart"
    max_side_pixels: Count | None = None  # max side of a padded image (Kimi-K2.5)
    image_text: ImageText = ImageText()
    video: VideoConfig | None = None  # left out: frames of a video are images

    @model_validator(mode="after")
    def _images_have_whole_cells(self) -> Self:
        low, high, cell = self.min_pixels, self.max_pixels, self.cell_pixels
        refuse_if(low > high, f"min_pixels {low} must not exceed max_pixels {high}")
        is_cut = self.resize == "fixed" and self.tokens_of_fixed_image is None
        refuse_if(is_cut, f"resize fixed: max_pixels {high} must be a square of {cell}-pixel cells")
        return self

    @property
    def cell_pixels(self) -> int:
        """Side of a cell in pixels."""
        return self.patch_size * self.merge_size

    @property
    def tokens_of_fixed_image(self) -> int | None:
        """Tokens of a square image of `max_pixels`, or None if its side is no multiple of cells."""
        cells = math.isqrt(self.max_pixels) // self.cell_pixels
        return cells**2 if (cells * self.cell_pixels) ** 2 == self.max_pixels else None


class ImagesEncoder(EncoderLayers, ImageRule):
    """Vision transformer over images at their native resolution (Qwen2-VL and later).

    `resize` fits an image to cells of `merge_size` x `merge_size` patches. A cell is an item and
    becomes one token. Attention is within an image, a temporal patch of frames, or a window.
    """

    feature: ClassVar[str] = "image_tokens"
    of_images: ClassVar[bool] = True

    kind: Literal["images"] = "images"
    head_size: Width | None = None  # left out: hidden_size / heads
    gated: bool = False  # SwiGLU feed-forwards
    activation: Gelu = written_unless("gelu")  # of ungated feed-forwards
    # value = (colour x pixel_scale - pixel_mean) / pixel_std, with colours from 0 to 255
    # of red, green and blue, scaled by pixel_scale
    pixel_mean: tuple[float, float, float] = written_unless((0.5, 0.5, 0.5))
    # divides red, green and blue
    pixel_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = written_unless((0.5, 0.5, 0.5))
    pixel_scale: PositiveFloat = written_unless(1 / 255)  # factor of colours from 0 to 255
    bias: bool = True  # of layers' linears except q, k and v
    patch_bias: bool = True  # of the patch embedding
    # an additional position per image with its own embedding and rotation
    # (LLaVA-OneVision-1.5); costs leave it out, as it is one of thousands
    class_token: bool = False
    embed_norm: bool = False  # a norm before the first layer
    final_norm: bool = False  # a norm after the last layer, before the projector's
    # number of learned embeddings, interpolated to images; 0: RoPE only
    learned_positions: Annotated[int, Field(ge=0, le=2**24)] = 0
    # side of an attention window; left out: all layers attend fully
    window_pixels: Count | None = None
    # layers with full attention despite window_pixels
    full_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    # layers with a deepstack projector; the i-th feeds language layer i (Qwen3-VL)
    deepstack_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    # mlp: norm, folding of cells, two linears; pooled: average of cells, norm, one linear
    # without bias (Gemma 3); gated: a linear that folds cells, another, norm and gated MLP,
    # with the first bias only (GLM-4.5V)
    projector: Literal["mlp", "pooled", "gated"] = "mlp"
    # inside the projector; left out: the width of a folded cell
    projector_hidden_size: Width | None = None

    @model_validator(mode="after")
    def _layers_and_windows_fit(self) -> "ImagesEncoder":
        numbers, pixels = range(self.layers), self.window_pixels
        for name in ("full_layers", "deepstack_layers"):
            layers = getattr(self, name)
            is_wrong = [number for number in numbers if number in layers] != [*layers]
            message = f"{name} {layers} must be different layers below {self.layers}, in order"
            refuse_if(is_wrong, message)
        refuse_if(self.full_layers and pixels is None, "full_layers need window_pixels")
        is_small = pixels is not None and pixels < self.cell_pixels
        refuse_if(is_small, f"window_pixels {pixels} must hold a cell of {self.cell_pixels}")
        return self

    @property
    def image_rule(self) -> ImageRule:
        """The settings that determine tokens, without the encoder's."""
        return ImageRule.model_validate(self.model_dump(include=set(ImageRule.model_fields)))

    @property
    def window_positions(self) -> int:
        """Positions of a full window. Only with windows."""
        assert self.window_pixels is not None
        return (self.window_pixels // self.cell_pixels * self.merge_size) ** 2

    def is_windowed(self, layer: int) -> bool:
        return self.window_pixels is not None and layer not in self.full_layers

    @property
    def head_width(self) -> int:
        """Width of one head of q, of k and of v."""
        return self.head_size or self.hidden_size // self.heads

    @property
    def deepstack_features(self) -> int:
        return len(self.deepstack_layers)

    @property
    def squares(self) -> str:
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
        return 1

    @property
    def projector_input_size(self) -> int:
        """Channels of all patches of a cell, which the projector folds or averages."""
        return self.hidden_size * self.merge_size**2


def squares_of(feature: str) -> str:
    """Return the name of the feature: items squared, summed over images and frames."""
    return f"squared_{feature}"


Encoder = Annotated[TilesEncoder | ClipsEncoder | ImagesEncoder, Field(discriminator="kind")]
_ENCODER_TYPES: tuple[type[EncoderLayers], ...] = get_args(get_args(Encoder)[0])
ENCODER_KINDS = tuple(encoder.model_fields["kind"].default for encoder in _ENCODER_TYPES)
# Columns of a lengths file.
ITEM_FEATURES = tuple(sorted({encoder.feature for encoder in _ENCODER_TYPES}))
SQUARED_FEATURES = (squares_of(ImagesEncoder.feature),)
