"""Make a file of synthetic sample lengths, for planning and benchmarks without data.

Lengths are assumed. Two mixtures:

    internvl        The nine sources of InternVL-Chat-1.2's fine-tuning data, with their real sizes.
                    Lengths are assumed by source, and tuned to reproduce OmniBal's Table 3 (arXiv
                    2407.20761) for the mixture.
    tulu3-longcite  Texts of HBP's experiments (arXiv 2503.07680, section 5): Tulu3 up to 32K tokens
                    and 2,000 samples of LongCite up to 128K, tuned to reproduce Table 3.

    python tools/make_lengths.py -o lengths.parquet [--mixture internvl] [--samples N] [--seed S]

Sources are in order, as in a meta file. Equal arguments give equal bytes.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import numpy as np
import typer

from omnibal.base.errors import UserError
from omnibal.base.files import is_stream, read_toml_model
from omnibal.base.frozen import Count, Frozen
from omnibal.base.outputs import check_files
from omnibal.base.program import run_app
from omnibal.data.lengths import Lengths, write_lengths
from omnibal.data.mixture import split_by_weight
from omnibal.data.tiling import tile_count
from omnibal.model.encoders import TilingConfig

MAX_SAMPLES = 100_000_000  # about 4 GiB of memory
TILING = TilingConfig(max_dynamic_patch=4)  # the real files have vit_num 1, 3, 4 and 5
IMAGE_SIZE = 448
TOKENS_PER_TILE = 256
MixtureName = Literal["internvl", "tulu3-longcite"]
ImageSizes = tuple[tuple[int, int, float], ...]  # width, height, weight; not normalized


class Text(Frozen):
    """Text tokens of a sample: lognormal, rounded, clipped."""

    median: float
    sigma: float
    shortest: int = 30  # a template with a question and an answer of a few words
    longest: Count | None = None  # besides the mixture's max_tokens
    answers: float  # share of tokens with loss


class Part(Frozen):
    """Similar samples of a source."""

    weight: float = 1  # relative to the source's other parts
    images: str | ImageSizes = ()  # sizes, or their name in the file; empty without images
    text: Text


class Source(Frozen):
    count: Count  # samples at the mixture's own size
    parts: tuple[Part, ...]


class Mixture(Frozen):
    sources: dict[str, Source]
    max_tiles: int  # per sample
    max_tokens: int  # per sample, image tokens included


class MixtureFile(Frozen):
    mixtures: dict[MixtureName, Mixture]
    images: dict[str, ImageSizes]


FILE = read_toml_model(MixtureFile, Path(__file__).with_name("length_mixtures.toml"), "")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def make_lengths(mixture: MixtureName, samples: int, seed: int) -> Lengths:
    """Return `samples` synthetic lengths in the mixture's proportions, source by source."""
    described = FILE.mixtures[mixture]
    if not 1 <= samples <= MAX_SAMPLES:
        raise UserError(f"--samples must be from 1 to {MAX_SAMPLES}, got {samples}")
    if seed < 0:
        raise UserError(f"--seed must be at least 0, got {seed}")
    counts = apportion(samples, [source.count for source in described.sources.values()])
    columns = []
    for (name, source), count in zip(described.sources.items(), counts, strict=True):
        # Seeded by source: one source's settings do not change the others' lengths.
        rng = np.random.default_rng([seed, *name.encode()])
        part_counts = apportion(count, [part.weight for part in source.parts])
        parts = [
            draw_part(part, part_count, described.max_tokens, rng)
            for part, part_count in zip(source.parts, part_counts, strict=True)
        ]
        columns.append(np.concatenate(parts, axis=1)[:, rng.permutation(count)])
    tiles, tokens, loss_tokens = np.concatenate(columns, axis=1)
    return Lengths(
        items={"tiles": tiles} if described.max_tiles else {},
        tokens=tokens,
        loss_tokens=loss_tokens,
        source=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        source_names=tuple(described.sources),
    )


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Return integers proportional to the weights with sum `total`: largest remainder method."""
    unlimited = np.full(len(weights), np.inf)
    return split_by_weight(total, np.array(weights, float), unlimited).astype(int).tolist()


def draw_part(part: Part, count: int, max_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Return tiles, tokens and loss tokens, int32 [3, count], with at most `max_tokens` tokens."""
    sizes = FILE.images[part.images] if isinstance(part.images, str) else part.images
    numbers = [tile_count(width, height, TILING, IMAGE_SIZE) for width, height, _ in sizes] or [0]
    weights = np.array([weight for *_, weight in sizes] or [1])
    tiles = rng.choice(np.array(numbers, np.int32), size=count, p=weights / weights.sum())
    image_tokens = tiles * TOKENS_PER_TILE
    text = part.text
    lognormal = rng.lognormal(math.log(text.median), text.sigma, size=count)
    longest = np.minimum(text.longest or math.inf, max_tokens - image_tokens)
    text_tokens = np.rint(np.clip(lognormal, text.shortest, longest))
    # At least the token that ends the answer has loss.
    loss_tokens = np.maximum(np.rint(text_tokens * text.answers), 1)
    return np.stack([tiles, image_tokens + text_tokens, loss_tokens]).astype(np.int32)


@app.command(help=" ".join(__doc__.split("\n\n")[:2]))
def write(
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write")],
    mixture: Annotated[MixtureName, typer.Option(help="synthetic mixture to make")] = "internvl",
    samples: Annotated[
        int | None, typer.Option(help="number of samples (default: the mixture's own size)")
    ] = None,
    seed: int = 0,
) -> None:
    if samples is None:
        samples = sum(source.count for source in FILE.mixtures[mixture].sources.values())
    check_files({"-o": output}, [])
    if output.suffix != ".parquet" and not is_stream(output):
        raise UserError(f"-o {output}: must end in .parquet")
    if not output.parent.is_dir():
        raise UserError(f"-o {output}: {output.parent} is no folder; make it or give another path")
    write_lengths(make_lengths(mixture, samples, seed), output)
    print(f"{output}: {samples:,} synthetic samples of mixture {mixture}")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    run_app(app, "make_lengths.py", arguments)


if __name__ == "__main__":
    main()
