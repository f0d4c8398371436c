"""Make a synthetic file of sample lengths, for planning and benchmarks where no data is at hand.

No length in it was measured, except those that --real brings in.

Three mixtures:

    internvl      The nine sources of InternVL-Chat-1.2's fine-tuning data. Their sizes are the real
                  ones; their lengths are assumed from what is known of each source, and tuned so
                  that the figures which OmniBal publishes for the whole (arXiv 2407.20761, Table 3)
                  come out.
    uncorrelated  Texts, pictures, documents and videos, in which tiles say nothing about tokens: a
                  stress for balancing, which copies no real dataset.
    tulu3-longcite  Texts of HBP's experiments (arXiv 2503.07680, section 5): Tulu3 up to 32K tokens
                  and 2,000 samples of LongCite up to 128K, tuned so that Table 3 comes out. They
                  have no tiles.

    python tools/make_lengths.py -o lengths.parquet [--mixture internvl] [--samples N] [--seed S]

Sources follow one another as in a meta file. The same arguments give the same bytes.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from omnibal.base.errors import UserError
from omnibal.base.files import is_stream
from omnibal.base.outputs import check_files
from omnibal.base.program import ArgumentParser, check_arguments, one_line_errors
from omnibal.data.lengths import Lengths, length_files, read_lengths, write_lengths

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.length_comparison import (
    HBP_TABLE_3,
    OMNIBAL_TABLE_3,
    comparison_table,
    measure_internvl,
    measure_tulu3,
)
from tools.length_mixtures import MIXTURES, TOKENS_PER_TILE, Mixture, MixtureName, Part, Source

MAX_SAMPLES = 100_000_000
"""Some 4 GiB of memory."""

MIN_COMPARED = 1000
"""Fewer samples make too few steps for a mean."""


def make_lengths(
    mixture: str, samples: int, seed: int, real: Mapping[str, Path] = MappingProxyType({})
) -> Lengths:
    """Synthetic lengths of `samples` samples, sources one after the other.

    Args:
        mixture: a `MixtureName`.
        samples: of all sources together; their shares stay those of the mixture.
        seed: each source is drawn from (seed, its name), so that none depends on the others.
        real: length files by source, whose samples stand for the assumed ones.

    Raises:
        UserError: a number is out of range, or a file of `real` is for no source of the mixture,
            cannot be read, or has a sample above the mixture's limits.
    """
    made_of = MIXTURES[MixtureName(mixture)]
    if not 1 <= samples <= MAX_SAMPLES:
        raise UserError(f"--samples {samples}: must be from 1 to {MAX_SAMPLES}")
    if seed < 0:
        raise UserError(f"--seed {seed}: must be at least 0")
    real_lengths = {name: _read_real(made_of, name, path) for name, path in real.items()}
    counts = apportion(samples, [source.count for source in made_of.sources.values()])
    drawn = []
    for (name, source), count in zip(made_of.sources.items(), counts, strict=True):
        rng = np.random.default_rng([seed, *name.encode()])
        if name in real_lengths:
            columns = _repeat_real(real_lengths[name], source, count, rng)
        else:
            columns = _draw_source(source, count, made_of.max_tokens, rng)
        drawn.append(columns[:, rng.permutation(count)])
    tiles, tokens, loss_tokens = np.concatenate(drawn, axis=1)
    return Lengths(
        items={"tiles": tiles} if made_of.max_tiles else {},
        tokens=tokens,
        loss_tokens=loss_tokens,
        source=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        source_names=tuple(made_of.sources),
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
        "--mixture",
        type=MixtureName,
        choices=list(MixtureName),
        default=MixtureName.INTERNVL,
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
        help="samples drawn to compare with the published figures (%(default)s)",
    )
    parser.add_argument("--no-compare", action="store_true", help="leave the comparison out")
    options = parser.parse_args(arguments)
    own_size = sum(source.count for source in MIXTURES[options.mixture].sources.values())
    samples = own_size if options.samples is None else options.samples
    if options.compare_samples < MIN_COMPARED:
        raise UserError(
            f"--compare-samples {options.compare_samples}: must be at least {MIN_COMPARED}; "
            "pass --no-compare to leave the comparison out"
        )
    real = _parse_real(options.real)
    _check_output(options.output, real)
    lengths = make_lengths(options.mixture, samples, options.seed, real)
    write_lengths(lengths, options.output)
    print(f"{options.output}: {samples:,} synthetic samples of mixture {options.mixture}")
    if options.no_compare or samples < MIN_COMPARED:
        return
    compared = min(samples, options.compare_samples)
    if options.mixture is MixtureName.INTERNVL:
        print(f"OmniBal's Table 3 beside {compared:,} of these synthetic samples:")
        print(comparison_table(OMNIBAL_TABLE_3, measure_internvl(lengths, compared, options.seed)))
    if options.mixture is MixtureName.TULU3_LONGCITE:
        print(f"HBP's Table 3 beside {compared:,} of these synthetic samples of Tulu3:")
        print(comparison_table(HBP_TABLE_3, measure_tulu3(lengths, compared, options.seed)))


if __name__ == "__main__":
    sys.exit(main())
