"""Make a synthetic file of sample lengths, for planning and benchmarks where no data is at hand.

No length in it was measured, except those that --real brings in.

Two mixtures:

    internvl      The nine sources of InternVL-Chat-1.2's fine-tuning data. Their sizes are the real
                  ones; their lengths are assumed from what is known of each source, and tuned so
                  that the figures which OmniBal publishes for the whole (arXiv 2407.20761, Table 3)
                  come out.
    uncorrelated  Texts, pictures, documents and videos, in which tiles say nothing about tokens: a
                  stress for balancing, which copies no real dataset.

    python tools/make_lengths.py -o lengths.parquet [--kind internvl] [--samples N] [--seed S]

Sources follow one another as in a meta file. The same arguments give the same bytes.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import numpy as np

from omnibal.data.lengths import Lengths, length_files, read_lengths, write_lengths
from omnibal.data.metrics import dist_ratio, pad_ratio
from omnibal.data.packing import pack_isf
from omnibal.data.tiling import tile_count
from omnibal.encoders import TilingConfig
from omnibal.errors import UserError
from omnibal.files import is_stream
from omnibal.limits import Caps
from omnibal.outputs import check_files
from omnibal.program import ArgumentParser, check_arguments, one_line_errors

TILING = TilingConfig(max_dynamic_patch=4)
"""At most 4 tiles and a thumbnail: the real files hold vit_num 1, 3, 4 and 5 only."""
IMAGE_SIZE = 448
TOKENS_PER_TILE = 256
SHORTEST_TEXT = 30
"""Tokens of a template around a question and an answer of a few words."""
MAX_SAMPLES = 100_000_000
"""Some 4 GiB of memory."""

CAPS = Caps.of(tiles=9, tokens=4096)
"""Qv and Qt of Table 3."""
DP = 8
MICRO_BATCH = 4
"""Samples of a device in the random baseline."""
MIN_COMPARED = 1000
"""Fewer samples make too few steps for a mean."""

Weights = tuple[tuple[int, float], ...]
"""Values with their weights, which need not sum to 1."""


class Kind(StrEnum):
    """Mixtures that can be made."""

    INTERNVL = "internvl"
    UNCORRELATED = "uncorrelated"


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

MIXTURES: Mapping[Kind, Mixture] = {Kind.INTERNVL: INTERNVL, Kind.UNCORRELATED: UNCORRELATED}


def make_lengths(
    kind: str, samples: int, seed: int, real: Mapping[str, Path] = MappingProxyType({})
) -> Lengths:
    """Synthetic lengths of `samples` samples, sources one after the other.

    Args:
        kind: a `Kind`.
        samples: of all sources together; their shares stay those of the mixture.
        seed: each source is drawn from (seed, its name), so that none depends on the others.
        real: length files by source, whose samples stand for the assumed ones.

    Raises:
        UserError: a number is out of range, or a file of `real` is for no source of the mixture,
            cannot be read, or has a sample above the mixture's limits.
    """
    mixture = MIXTURES[Kind(kind)]
    if not 1 <= samples <= MAX_SAMPLES:
        raise UserError(f"--samples {samples}: must be from 1 to {MAX_SAMPLES}")
    if seed < 0:
        raise UserError(f"--seed {seed}: must be at least 0")
    real_lengths = {name: _read_real(mixture, name, path) for name, path in real.items()}
    counts = apportion(samples, [source.count for source in mixture.sources.values()])
    drawn = []
    for (name, source), count in zip(mixture.sources.items(), counts, strict=True):
        rng = np.random.default_rng([seed, *name.encode()])
        if name in real_lengths:
            columns = _repeat_real(real_lengths[name], source, count, rng)
        else:
            columns = _draw_source(source, count, mixture.max_tokens, rng)
        drawn.append(columns[:, rng.permutation(count)])
    tiles, tokens, loss_tokens = np.concatenate(drawn, axis=1)
    return Lengths(
        items={"tiles": tiles},
        tokens=tokens,
        loss_tokens=loss_tokens,
        source=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        source_names=tuple(mixture.sources),
        origin=None,
    )


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that sum to `total`, each within 1 of its share: by largest remainder."""
    shares = np.array(weights, np.float64) * total / sum(weights)
    counts = np.floor(shares).astype(np.int64)
    largest_first = np.argsort(counts - shares, kind="stable")
    counts[largest_first[: total - counts.sum()]] += 1
    return counts.tolist()


def _draw_source(
    source: Source, count: int, max_tokens: int, rng: np.random.Generator
) -> np.ndarray:
    """Rows tiles, tokens, loss_tokens of a source's samples, part after part; int32."""
    counts = apportion(count, [part.weight for part in source.parts])
    parts = [
        draw_part(part, part_count, max_tokens, rng)
        for part, part_count in zip(source.parts, counts, strict=True)
    ]
    return np.concatenate(parts, axis=1)


def draw_part(part: Part, count: int, max_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Rows tiles, tokens, loss_tokens of `count` samples; no sample exceeds `max_tokens`. int32"""
    values, weights = np.array(part.tiles).T
    tiles = rng.choice(values.astype(np.int32), size=count, p=weights / weights.sum())
    image_tokens = tiles * part.tokens_per_tile
    text = part.text
    drawn = rng.lognormal(math.log(text.median), text.sigma, size=count)
    text_tokens = np.rint(
        np.clip(drawn, text.shortest, np.minimum(text.longest, max_tokens - image_tokens))
    )
    loss_tokens = _loss_tokens(text_tokens, text.answers)
    return np.stack([tiles, image_tokens + text_tokens, loss_tokens]).astype(np.int32)


def _loss_tokens(text_tokens: np.ndarray, answers: float) -> np.ndarray:
    """At least the one that ends the answer."""
    return np.maximum(np.rint(text_tokens * answers), 1)


def _read_real(mixture: Mixture, name: str, path: Path) -> Lengths:
    if name not in mixture.sources:
        raise UserError(
            f"--real {name}={path}: no source of that name; must be one of "
            f"{', '.join(mixture.sources)}"
        )
    real = read_lengths([path])
    most_tiles, most_tokens = int(real.column("tiles").max()), int(real.tokens.max())
    if most_tiles > mixture.max_tiles or most_tokens > mixture.max_tokens:
        raise UserError(
            f"--real {name}={path}: has samples of up to {most_tiles} tiles and {most_tokens} "
            f"tokens; must be at most {mixture.max_tiles} and {mixture.max_tokens}; pass lengths "
            "that were made under these limits"
        )
    return real


def _repeat_real(real: Lengths, source: Source, count: int, rng: np.random.Generator) -> np.ndarray:
    """Each real sample equally often, or once more: the histogram is the file's.

    OmniBal's public files have no loss tokens; the source's mean share of the text is assumed.
    """
    repeats, rest = divmod(count, len(real))
    rows = np.concatenate(
        [
            np.tile(np.arange(len(real)), repeats),
            rng.choice(len(real), size=rest, replace=False),
        ]
    )
    loss_tokens = real.loss_tokens
    if not loss_tokens.any():
        text_tokens = np.maximum(real.tokens - TOKENS_PER_TILE * real.column("tiles"), 0)
        weights = [part.weight for part in source.parts]
        answers = np.average([part.text.answers for part in source.parts], weights=weights)
        loss_tokens = _loss_tokens(text_tokens, float(answers)).astype(np.int32)
    return np.stack([real.column("tiles"), real.tokens, loss_tokens])[:, rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What OmniBal's Table 3 says about its data, packed in two ways."""

    random_pad_ratio: float
    random_dist_ratio_vision: float
    random_dist_ratio_language: float
    isf_samples_per_pack: float
    isf_dist_ratio_vision: float
    isf_dist_ratio_language: float


PUBLISHED = Figures(
    random_pad_ratio=0.31,
    random_dist_ratio_vision=0.34,
    random_dist_ratio_language=0.30,
    isf_samples_per_pack=4.6,
    isf_dist_ratio_vision=0.02,
    isf_dist_ratio_language=0.14,
)


def measure(lengths: Lengths, samples: int, seed: int) -> Figures:
    """Figures of a random subset of at most `samples`, drawn, ordered and packed by `seed`.

    A sample without an image counts as one tile here, as in the files that the table was computed
    from: their trainer gives it an empty image, so that the vision layers always have an input.
    """
    subset_seed, packing_seed, order_seed = np.random.SeedSequence(seed).spawn(3)
    order = np.random.default_rng(subset_seed).permutation(len(lengths))[:samples]
    subset = replace(
        lengths,
        items={"tiles": np.maximum(lengths.column("tiles")[order], 1)},
        tokens=lengths.tokens[order],
        loss_tokens=lengths.loss_tokens[order],
        source=lengths.source[order],
    )
    packs = pack_isf(subset, CAPS, packing_seed)
    packs = packs.take(np.random.default_rng(order_seed).permutation(len(packs)))
    pad, vision, language = random_ratios(subset.column("tiles"), subset.tokens)
    return Figures(
        random_pad_ratio=pad,
        random_dist_ratio_vision=vision,
        random_dist_ratio_language=language,
        isf_samples_per_pack=len(subset) / len(packs),
        isf_dist_ratio_vision=_dist_ratio_of(packs.sums(subset.column("tiles"))),
        isf_dist_ratio_language=_dist_ratio_of(packs.sums(subset.tokens)),
    )


def random_ratios(tiles: np.ndarray, tokens: np.ndarray) -> tuple[float, float, float]:
    """Pad ratio, and dist ratio of vision and of language, of mini-batches in the order given.

    A device's tokens are padded to its longest sample; tiles need no padding.
    """
    whole = len(tiles) // (MICRO_BATCH * DP) * (MICRO_BATCH * DP)
    tiles, tokens = tiles[:whole], tokens[:whole]
    padded = MICRO_BATCH * tokens.reshape(-1, MICRO_BATCH).max(axis=1)
    return (
        pad_ratio(tokens, np.arange(0, whole + 1, MICRO_BATCH)),
        _dist_ratio_of(tiles.reshape(-1, MICRO_BATCH).sum(axis=1)),
        _dist_ratio_of(padded),
    )


def _dist_ratio_of(loads: np.ndarray) -> float:
    """Of micro-batches taken in order, one a rank; an incomplete last step is left out."""
    return dist_ratio(loads[: len(loads) // DP * DP].reshape(-1, DP).astype(np.float64))


def comparison_table(figures: Figures) -> str:
    """Lines of published | this file | difference."""
    lines = [f"{'':<28}{'published':>10}{'this file':>11}{'difference':>12}"]
    for field in fields(Figures):
        published, made = getattr(PUBLISHED, field.name), getattr(figures, field.name)
        label = field.name.replace("_", " ")
        lines.append(f"{label:<28}{published:>10.2f}{made:>11.3f}{made - published:>+12.3f}")
    return "\n".join(lines)


def _parse_real(entries: Sequence[str]) -> dict[str, Path]:
    real: dict[str, Path] = {}
    for entry in entries:
        name, _, path = entry.partition("=")
        if not name or not path:
            raise UserError(f"--real {entry}: must be NAME=FILE, such as ai2d=ai2d.json")
        if name in real:
            raise UserError(f"--real {entry}: {name} is given twice; pass one file a source")
        real[name] = Path(path)
    return real


def _check_output(path: Path, real: Mapping[str, Path]) -> None:
    check_files({"-o": path}, length_files(list(real.values())))
    if path.suffix != ".parquet" and not is_stream(path):
        raise UserError(f"-o {path}: is written as Parquet; let its name end in .parquet")
    if not path.parent.is_dir():
        raise UserError(f"-o {path}: {path.parent} is no folder; make it or pass another path")


def main(arguments: list[str] | None = None) -> int:
    with one_line_errors():
        _run(sys.argv[1:] if arguments is None else arguments)
    return 0


def _run(arguments: list[str]) -> None:
    check_arguments(arguments)
    parser = ArgumentParser(description=" ".join(__doc__.split("\n\n")[:2]))
    parser.add_argument("-o", "--output", type=Path, required=True, help="Parquet file to write")
    parser.add_argument(
        "--kind",
        type=Kind,
        choices=list(Kind),
        default=Kind.INTERNVL,
        help="synthetic mixture to make (%(default)s)",
    )
    parser.add_argument(
        "--samples", type=int, help="of all sources together (the mixture's own size)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument(
        "--real",
        metavar="NAME=FILE",
        action="append",
        default=[],
        help="length file whose samples stand for those assumed of source NAME; repeatable",
    )
    parser.add_argument(
        "--compare-samples",
        type=int,
        default=100_000,
        help="samples drawn to compare with the published figures of internvl (%(default)s)",
    )
    parser.add_argument("--no-compare", action="store_true", help="leave the comparison out")
    options = parser.parse_args(arguments)
    own_size = sum(source.count for source in MIXTURES[options.kind].sources.values())
    samples = own_size if options.samples is None else options.samples
    if options.compare_samples < MIN_COMPARED:
        raise UserError(
            f"--compare-samples {options.compare_samples}: must be at least {MIN_COMPARED}; "
            "pass --no-compare to leave the comparison out"
        )
    real = _parse_real(options.real)
    _check_output(options.output, real)
    lengths = make_lengths(options.kind, samples, options.seed, real)
    write_lengths(lengths, options.output)
    print(f"{options.output}: {samples:,} synthetic samples of mixture {options.kind}")
    if options.kind is Kind.INTERNVL and not options.no_compare and samples >= MIN_COMPARED:
        compared = min(samples, options.compare_samples)
        print(f"OmniBal's Table 3 beside {compared:,} of these synthetic samples:")
        print(comparison_table(measure(lengths, compared, options.seed)))


if __name__ == "__main__":
    sys.exit(main())
