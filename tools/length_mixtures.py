"""Mixtures of `make_lengths.py`: published sizes of sources, assumed distributions of lengths."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from omnibal.data.tiling import tile_count
from omnibal.model.encoders import TilingConfig

TILING = TilingConfig(max_dynamic_patch=4)
"""At most 4 tiles and a thumbnail: the real files have vit_num 1, 3, 4 and 5 only."""
IMAGE_SIZE = 448
TOKENS_PER_TILE = 256
SHORTEST_TEXT = 30
"""Tokens of a template around a question and an answer of a few words."""
Weights = tuple[tuple[int, float], ...]
"""Values with weights, not normalized."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Text tokens of a sample: lognormal, rounded, clipped."""

    median: float
    sigma: float
    shortest: int = SHORTEST_TEXT
    longest: float = math.inf
    """Maximum. The mixture's cap on a sample's tokens also applies."""
    answers: float
    """Share of the tokens that the loss counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Similar samples of one source."""

    weight: float
    """Relative to the source's other parts."""
    tiles: Weights
    text: Text


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    count: int
    """Samples at the mixture's own size."""
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    sources: Mapping[str, Source]
    max_tiles: int
    """Per sample."""
    max_tokens: int
    """Per sample, image tokens included."""


def tiles_of(*sizes: tuple[int, int, float]) -> Weights:
    """Tile counts of images, from (width, height, weight) of typical images."""
    return tuple((tile_count(w, h, TILING, IMAGE_SIZE), weight) for w, h, weight in sizes)


def one_part(count: int, tiles: Weights, text: Text) -> Source:
    """A source of one part."""
    return Source(count=count, parts=(Part(weight=1, tiles=tiles, text=text),))


# Known: the sizes of the sources; the parts of mix665k, from LLaVA-1.5's mixture (arXiv 2310.03744,
# Table 7; weights are thousands of samples); the mean tiles and tokens of ai2d (2.49; 691), chartqa
# (4.75; 1,305), docvqa (4.62; 1,465) and synthdog_en (3.84; 1,103), which are reproduced; the
# tiling rule. Assumed from each dataset's content: image sizes, text tokens with the template, and
# shares of answers.
#
# Tuned to reproduce Table 3, within plausible limits: the weights of image sizes with 3 and 5
# tiles, the medians of all texts except TextCaps and the four sources above, and ShareGPT's sigma.

# Mostly 640 pixels on the long side. 4:3 and 3:2 give one tile; portraits and panoramas two and a
# thumbnail.
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
# Half COCO, a fifth small web pictures, the rest SAM's of several megapixels.
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
    # VQAv2: about five questions on an image, answered in a word.
    Part(weight=83, tiles=_COCO, text=Text(median=165, sigma=0.45, answers=0.1)),
    # GQA: a dozen short questions, answered in a word.
    Part(weight=72, tiles=_VISUAL_GENOME, text=Text(median=220, sigma=0.35, answers=0.1)),
    # OKVQA and A-OKVQA: one question, mostly with choices.
    Part(weight=75, tiles=_COCO, text=Text(median=100, sigma=0.2, answers=0.05)),
    # OCR-VQA: a few questions, answered by title, author or genre.
    Part(weight=80, tiles=_BOOK_COVERS, text=Text(median=115, sigma=0.2, answers=0.2)),
    # TextCaps: one short caption.
    Part(weight=22, tiles=_OPEN_IMAGES, text=Text(median=60, sigma=0.2, answers=0.25)),
    # RefCOCO: several phrases or boxes. A box takes about 20 tokens.
    Part(weight=48, tiles=_COCO, text=Text(median=250, sigma=0.4, answers=0.4)),
    # Visual Genome: up to ten regions and boxes.
    Part(weight=86, tiles=_VISUAL_GENOME, text=Text(median=330, sigma=0.4, answers=0.4)),
)

INTERNVL = Mixture(
    max_tiles=5,
    max_tokens=4096,
    sources={
        # One description of about 160 words.
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

# Texts of HBP (arXiv 2503.07680, section 5): Tulu3, up to 32K tokens, and about 2,000 samples of
# LongCite, up to 128K. Known: Tulu3's size; its mean tokens, one sample per device (table 3: .8K
# and .9K at two caps, three samples 2.4K at 4K), and their imbalance. Assumed to reproduce them:
# one lognormal for Tulu3; three samples per device at 4K on 32 devices, one on 8 at 32K
# (context-parallel size 4, unstated in the paper); samples above a cap are left out.
#
# LongCite: the paper gives only the maximum. A mean of about 70K is assumed, since 168 minutes
# (table 20) at 2.75 s (table 14) are 3,665 iterations of 512K tokens, two epochs of Tulu3 and 2,000
# such samples. Shares of answers are assumed: LongCite's are a few hundred tokens per document.
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

MIXTURES = {"internvl": INTERNVL, "tulu3-longcite": TULU3_LONGCITE}
