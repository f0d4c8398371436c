"""Mixtures of training data whose lengths `make_lengths.py` makes: what is known and assumed.

No length here was measured: sizes of sources are the published ones, lengths are distributions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from omnibal.data.tiling import tile_count
from omnibal.model.encoders import TilingConfig

TILING = TilingConfig(max_dynamic_patch=4)
"""At most 4 tiles and a thumbnail: the real files hold vit_num 1, 3, 4 and 5 only."""
IMAGE_SIZE = 448
TOKENS_PER_TILE = 256
SHORTEST_TEXT = 30
"""Tokens of a template around a question and an answer of a few words."""
Weights = tuple[tuple[int, float], ...]
"""Values with their weights, which need not sum to 1."""


class MixtureName(StrEnum):
    """Mixtures that can be made."""

    INTERNVL = "internvl"
    UNCORRELATED = "uncorrelated"
    TULU3_LONGCITE = "tulu3-longcite"


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Tokens of a sample beside those of its tiles: lognormal, rounded, moved into the bounds."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    shortest: int = SHORTEST_TEXT
    longest: float = math.inf
    """The mixture's cap on a sample's tokens holds besides."""
    answers: float
    """Share of the tokens that the loss counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Samples of one source that look alike."""

    weight: float
    """Relative to the other parts of the source."""
    tiles: Weights
    text: Text
    tokens_per_tile: int = TOKENS_PER_TILE


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    count: int
    """Samples when the mixture has its own size."""
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    sources: Mapping[str, Source]
    max_tiles: int
    """Of a sample."""
    max_tokens: int
    """Of a sample, image tokens included."""


def tiles_of(*sizes: tuple[int, int, float]) -> Weights:
    """Tile counts of images, from (width, height, weight) of typical ones."""
    return tuple((tile_count(w, h, TILING, IMAGE_SIZE), weight) for w, h, weight in sizes)


def one_part(count: int, tiles: Weights, text: Text) -> Source:
    """A source whose samples are all alike."""
    return Source(count=count, parts=(Part(weight=1, tiles=tiles, text=text),))


# What is assumed, and why. Known are: the sizes of the sources; that mix665k has the parts of
# LLaVA-1.5's mixture (arXiv 2310.03744, Table 7; the weights are thousands of samples); the mean
# tiles and tokens of ai2d (2.49; 691), chartqa (4.75; 1,305), docvqa (4.62; 1,465) and synthdog_en
# (3.84; 1,103), which come out; and the rule that makes tile counts of image sizes. Typical image
# sizes, tokens of text (the template's included) and shares of answers are assumptions from what
# each dataset is.
#
# Tuned, within what is plausible, until Table 3 came out: the weights of image sizes that give 3
# and 5 tiles, and the medians of all texts but those of the four sources with known means and of
# TextCaps; of the sigmas, ShareGPT's only.

# Mostly 640 pixels on the long side. 4:3 and 3:2 give one tile; upright pictures, and those wider
# than 3:2, give two and a thumbnail.
_COCO = tiles_of(
    (640, 480, 0.42), (640, 427, 0.20), (500, 375, 0.05), (480, 640, 0.12), (427, 640, 0.09),
    (640, 426, 0.09), (640, 360, 0.02), (640, 640, 0.01),
)  # fmt: skip
# Also GQA's. As COCO and Flickr have them, some large enough for 2 x 2 tiles.
_VISUAL_GENOME = tiles_of(
    (500, 375, 0.36), (640, 480, 0.18), (375, 500, 0.08), (500, 333, 0.09), (333, 500, 0.05),
    (800, 600, 0.11), (1024, 768, 0.11), (768, 1024, 0.02),
)  # fmt: skip
_BOOK_COVERS = tiles_of((333, 500, 0.78), (388, 500, 0.22))
_OPEN_IMAGES = tiles_of((1024, 768, 0.50), (1024, 683, 0.30), (683, 1024, 0.20))
# Half of them COCO, a fifth small pictures of the web, the rest SAM's of several megapixels.
_CAPTIONED = tiles_of(
    (640, 480, 0.30), (640, 426, 0.10), (480, 640, 0.12), (336, 336, 0.20), (2250, 1500, 0.18),
    (1500, 2250, 0.10),
)  # fmt: skip

_MIX665K = (
    # LLaVA-Instruct: conversations, descriptions, reasoning.
    Part(weight=158, tiles=_COCO, text=Text(median=225, sigma=0.35, answers=0.7)),
    # ShareGPT: no image, conversations cut to 2,048 tokens.
    Part(
        weight=40,
        tiles=((0, 1),),
        text=Text(median=780, sigma=0.6, longest=2048, answers=0.75),
    ),
    # VQAv2: five questions or so on an image, answered in a word.
    Part(weight=83, tiles=_COCO, text=Text(median=165, sigma=0.45, answers=0.1)),
    # GQA: a dozen short questions, answered in a word.
    Part(weight=72, tiles=_VISUAL_GENOME, text=Text(median=220, sigma=0.35, answers=0.1)),
    # OKVQA and A-OKVQA: one question, mostly with choices.
    Part(weight=75, tiles=_COCO, text=Text(median=100, sigma=0.2, answers=0.05)),
    # OCR-VQA: a few questions, answered by title, author or genre.
    Part(weight=80, tiles=_BOOK_COVERS, text=Text(median=115, sigma=0.2, answers=0.2)),
    # TextCaps: one short caption.
    Part(weight=22, tiles=_OPEN_IMAGES, text=Text(median=60, sigma=0.2, answers=0.25)),
    # RefCOCO: several phrases or boxes; a box takes some 20 tokens.
    Part(weight=48, tiles=_COCO, text=Text(median=250, sigma=0.4, answers=0.4)),
    # Visual Genome: up to ten regions and boxes.
    Part(weight=86, tiles=_VISUAL_GENOME, text=Text(median=330, sigma=0.4, answers=0.4)),
)

INTERNVL = Mixture(
    max_tiles=5,
    max_tokens=4096,
    sources={
        # One description of some 160 words.
        "sharegpt4v-100k": one_part(102_025, _CAPTIONED, Text(median=210, sigma=0.3, answers=0.75)),
        # LLaVA-Instruct in Chinese: conversations, descriptions, reasoning.
        "llava_zh": Source(
            count=157_712,
            parts=(
                Part(weight=58, tiles=_COCO, text=Text(median=280, sigma=0.35, answers=0.6)),
                Part(weight=23, tiles=_COCO, text=Text(median=165, sigma=0.35, answers=0.65)),
                Part(weight=77, tiles=_COCO, text=Text(median=195, sigma=0.35, answers=0.65)),
            ),
        ),
        "mix665k": Source(count=665_058, parts=_MIX665K),
        # A dozen long questions on a bar chart of 448 x 448 pixels, answered in a word.
        "dvqa": one_part(
            200_000, tiles_of((448, 448, 1)), Text(median=380, sigma=0.25, answers=0.1)
        ),
        # One question on a chart.
        "chartqa": one_part(
            18_317,
            tiles_of((850, 600, 0.875), (600, 1000, 0.125)),
            Text(median=85, sigma=0.3, answers=0.05),
        ),
        # One question with choices on a diagram.
        "ai2d": one_part(
            12_413,
            tiles_of((500, 400, 0.465), (600, 350, 0.30), (900, 300, 0.05), (800, 700, 0.185)),
            Text(median=53, sigma=0.2, answers=0.05),
        ),
        # Questions on a scanned page.
        "docvqa": one_part(
            10_211,
            tiles_of((1700, 2200, 0.81), (1200, 2000, 0.19)),
            Text(median=223, sigma=0.7, longest=1300, answers=0.3),
        ),
        # A problem with a small diagram, and its solution.
        "geoqa+": one_part(
            72_318,
            tiles_of((200, 150, 0.65), (300, 150, 0.35)),
            Text(median=190, sigma=0.4, answers=0.45),
        ),
        # The words of a rendered page.
        "synthdog_en": one_part(
            29_765,
            tiles_of((1024, 768, 0.42), (640, 960, 0.58)),
            Text(median=112, sigma=0.4, answers=0.6),
        ),
    },
)

# Free inventions, with extremes in both directions at once: much text without tiles, many tiles
# with little text. Shares and medians are set so that the correlation of tiles and tokens is 0.
UNCORRELATED = Mixture(
    max_tiles=40,
    max_tokens=16_000,
    sources={
        # Heavy tailed, and cut to 4,000 tokens.
        "text": one_part(
            250_000, ((0, 1),), Text(median=1500, sigma=1.2, longest=4000, answers=0.75)
        ),
        # Chats on one tile.
        "picture": one_part(
            350_000,
            ((1, 1),),
            Text(median=400, sigma=0.9, shortest=50, longest=2000, answers=0.6),
        ),
        # A page of up to 12 tiles and a thumbnail, and a short question.
        "document": one_part(
            200_000,
            tuple((tiles, 1) for tiles in range(5, 14)),
            Text(median=80, sigma=0.5, longest=400, answers=0.1),
        ),
        # A frame is a tile, pooled to the fewer tokens the more there are; some have transcripts.
        "video": Source(
            count=200_000,
            parts=(
                Part(
                    weight=1,
                    tiles=tuple((frames, 1) for frames in range(4, 17)),
                    text=Text(median=190, sigma=1.3, longest=14_000, answers=0.3),
                    tokens_per_tile=64,
                ),
                Part(
                    weight=1,
                    tiles=tuple((frames, 1) for frames in range(17, 41)),
                    text=Text(median=190, sigma=1.3, longest=14_000, answers=0.3),
                    tokens_per_tile=16,
                ),
            ),
        ),
    },
)

# Texts of HBP (arXiv 2503.07680, section 5): Tulu3, up to 32K tokens, and some 2,000 samples of
# LongCite, up to 128K. Known are: the size of Tulu3's mixture; of its samples as they come, one a
# device, the mean tokens (table 3: .8K and .9K at two caps, three samples 2.4K at 4K) and how
# unequal they are. Assumed, until these came out: one lognormal for all of Tulu3; three samples a
# device at 4K on 32 devices, and one on 8 at 32K (4 ranks share a sequence; the paper does not
# say); and that samples above a cap are left out.
#
# Of LongCite's lengths the paper gives the maximum alone. Assumed is a mean of some 70K, since 168
# minutes (table 20) at 2.75 s (table 14) are 3,665 iterations of 512K tokens, which are two epochs
# of Tulu3 and 2,000 samples of this mean. Shares of answers are assumptions too: LongCite's are a
# few hundred tokens on a whole document.
TULU3_LONGCITE = Mixture(
    max_tiles=0,
    max_tokens=131_072,
    sources={
        "tulu3": one_part(
            939_344, ((0, 1),), Text(median=525, sigma=1.0, longest=32_768, answers=0.6)
        ),
        "longcite": one_part(
            2_000,
            ((0, 1),),
            Text(median=65_536, sigma=0.5, shortest=8_192, longest=131_072, answers=0.01),
        ),
    },
)

MIXTURES: Mapping[MixtureName, Mixture] = {
    MixtureName.INTERNVL: INTERNVL,
    MixtureName.UNCORRELATED: UNCORRELATED,
    MixtureName.TULU3_LONGCITE: TULU3_LONGCITE,
}
