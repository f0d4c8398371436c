"""Shapes of data that packing is tried on, drawn for any caps and any number of samples.

Each shape is a function of (rng, samples, caps) to tiles and tokens, int64 [samples] each, clipped
to the caps, so that every sample fits a pack alone.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from omnibal.model.limits import Caps

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.make_lengths import make_lengths

Sizes = tuple[np.ndarray, np.ndarray]
Shape = Callable[[np.random.Generator, int, Caps], Sizes]


def _clipped(tiles: np.ndarray, tokens: np.ndarray, caps: Caps) -> Sizes:
    return (
        np.clip(np.asarray(tiles), 0, caps["tiles"]).astype(np.int64),
        np.clip(np.asarray(tokens), 1, caps["tokens"]).astype(np.int64),
    )


def mixture(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """InternVL's fine-tuning mixture, synthetic."""
    lengths = make_lengths("internvl", samples, seed=int(rng.integers(1 << 30)))
    return _clipped(lengths.column("tiles"), lengths.tokens, caps)


def mixture_rounded(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """The mixture, its tokens rounded up to multiples of 256."""
    tiles, tokens = mixture(rng, samples, caps)
    return _clipped(tiles, -(-tokens // 256) * 256, caps)


def uncorrelated(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Texts, pictures, documents and videos whose tiles say nothing about tokens."""
    lengths = make_lengths("uncorrelated", samples, seed=int(rng.integers(1 << 30)))
    return _clipped(lengths.column("tiles"), lengths.tokens, caps)


def halves(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    return _parts(samples, caps, 2)


def thirds(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    return _parts(samples, caps, 3)


def quarters(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    return _parts(samples, caps, 4)


def _parts(samples: int, caps: Caps, parts: int) -> Sizes:
    return _clipped(
        np.full(samples, caps["tiles"] // parts), np.full(samples, caps["tokens"] // parts), caps
    )


def over_half(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Half of the samples just over half a pack, half just under."""
    large = rng.random(samples) < 0.5
    spread = rng.integers(0, max(caps["tokens"] // 100, 2), samples)
    tokens = np.where(large, caps["tokens"] // 2 + 1 + spread, caps["tokens"] // 2 - spread)
    return _clipped(rng.integers(0, caps["tiles"] // 2 + 1, samples), tokens, caps)


def over_third(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Sizes around a third of a pack."""
    spread = rng.normal(0, caps["tokens"] / 60, samples)
    tiles = caps["tiles"] / 3 + rng.normal(0, caps["tiles"] / 30, samples)
    return _clipped(tiles, caps["tokens"] / 3 + spread, caps)


def uniform(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Tiles and tokens uniform from nothing to the caps, apart from each other."""
    return _clipped(
        rng.integers(0, caps["tiles"] + 1, samples),
        rng.integers(1, caps["tokens"] + 1, samples),
        caps,
    )


def uniform_tokens(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Text alone, uniform up to the cap."""
    return _clipped(np.zeros(samples), rng.integers(1, caps["tokens"] + 1, samples), caps)


def uniform_small(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Uniform up to a fifth of the caps."""
    return _clipped(
        rng.integers(0, caps["tiles"] // 5 + 1, samples),
        rng.integers(1, caps["tokens"] // 5 + 2, samples),
        caps,
    )


def uniform_middle(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Uniform from a fifth to a half of the caps."""
    share = rng.uniform(0.2, 0.5, (2, samples))
    return _clipped(share[0] * caps["tiles"], share[1] * caps["tokens"], caps)


def text(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Text alone, log-normal, a few thousandths of it cut at the cap."""
    return _clipped(np.zeros(samples), caps["tokens"] / 12 * rng.lognormal(0, 1, samples), caps)


def heavy_tail(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Pareto lengths; many are cut at the cap."""
    size = rng.pareto(1.1, samples) / 50
    return _clipped(
        size * caps["tiles"] * rng.uniform(0.3, 1.2, samples), size * caps["tokens"], caps
    )


def tiny(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Hundreds of samples a pack."""
    return _clipped(
        rng.random(samples) < 0.3, rng.integers(1, max(caps["tokens"] // 150, 3), samples), caps
    )


def giant(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """One sample at the caps among small ones."""
    tiles, tokens = tiny(rng, samples, caps)
    tiles[0], tokens[0] = caps["tiles"], caps["tokens"]
    return tiles, tokens


def giants(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """A tenth of the samples over half a pack, the others small."""
    large = rng.random(samples) < 0.1
    share = np.where(large, rng.uniform(0.5, 1, samples), rng.uniform(0, 0.1, samples))
    tiles = share * caps["tiles"] * rng.uniform(0.5, 1, samples)
    return _clipped(tiles, share * caps["tokens"], caps)


def opposites(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Half of the samples all tiles, half all tokens."""
    seen = rng.random(samples) < 0.5
    share = rng.uniform(0.05, 0.6, samples)
    return _clipped(
        np.where(seen, share, 0.02) * caps["tiles"],
        np.where(seen, 0.02, share) * caps["tokens"],
        caps,
    )


def anticorrelated(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """The more tiles the fewer tokens."""
    share = rng.beta(1, 3, samples)
    return _clipped(share * caps["tiles"], (0.4 - 0.4 * share) * caps["tokens"], caps)


def opposed(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """What a sample lacks of one cap it takes of the other."""
    share = rng.random(samples)
    return _clipped(share * caps["tiles"], (1 - share) * caps["tokens"], caps)


def texts_and_giants(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Short texts, a few samples at the token cap and a few at the tile cap."""
    tiles = np.where(rng.random(samples) < 0.02, caps["tiles"], 0)
    short = rng.integers(1, max(caps["tokens"] // 100, 2), samples)
    return _clipped(tiles, np.where(rng.random(samples) < 0.02, caps["tokens"], short), caps)


def correlated(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Tokens are tiles times what a tile takes, and some text; both caps bind."""
    tiles = np.clip(rng.geometric(8 / caps["tiles"] if caps["tiles"] > 8 else 1, samples), 1, None)
    share = tiles / caps["tiles"]
    return _clipped(tiles, share * caps["tokens"] * rng.normal(1, 0.1, samples), caps)


def tiles_bind(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Tokens are next to nothing."""
    return _clipped(rng.integers(1, caps["tiles"] // 2 + 2, samples), np.full(samples, 1), caps)


def one_kind(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """All alike, with a remainder that nothing fits."""
    return _clipped(
        np.full(samples, -(-caps["tiles"] // 5)), np.full(samples, -(-caps["tokens"] // 7)), caps
    )


def few_kinds(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Five sizes."""
    kinds = rng.uniform(0.05, 0.6, (2, 5))
    kind = rng.integers(0, 5, samples)
    return _clipped(kinds[0, kind] * caps["tiles"], kinds[1, kind] * caps["tokens"], caps)


def pairs(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Pairs that fill a pack to the last token, taken apart."""
    tokens = rng.integers(1, caps["tokens"], -(-samples // 2))
    tiles = rng.integers(0, caps["tiles"] + 1, len(tokens))
    return _clipped(
        np.concatenate([tiles, caps["tiles"] - tiles])[:samples],
        np.concatenate([tokens, caps["tokens"] - tokens])[:samples],
        caps,
    )


def triplets(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Threes that fill a pack to the last token (Falkenauer 1996), taken apart."""
    packs = -(-samples // 3)
    first = rng.integers(int(0.38 * caps["tokens"]), int(0.49 * caps["tokens"]) + 1, packs)
    rest = caps["tokens"] - first
    second = (rest * rng.uniform(0.42, 0.5, packs)).astype(np.int64)
    tokens = np.concatenate([first, second, rest - second])[:samples]
    return _clipped(np.minimum(rng.integers(0, 2, samples), caps["tiles"] // 3), tokens, caps)


def cut_packs(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Full packs cut at random into about eight samples; no waste is needed."""
    packs = -(-samples // 8)
    cuts = np.sort(rng.integers(1, caps["tokens"], (packs, 7)), axis=1)
    tokens = np.diff(cuts, axis=1, prepend=0, append=caps["tokens"]).ravel()[:samples]
    cuts = np.sort(rng.integers(0, caps["tiles"] + 1, (packs, 7)), axis=1)
    tiles = np.diff(cuts, axis=1, prepend=0, append=caps["tiles"]).ravel()[:samples]
    return _clipped(tiles, tokens, caps)


def powers(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Powers of two, as buckets have them."""
    tokens = 1 << rng.integers(0, max(caps["tokens"].bit_length() - 1, 1), samples)
    tiles = (1 << rng.integers(0, caps["tiles"].bit_length(), samples)) >> 1
    return _clipped(tiles, tokens, caps)


def at_the_cap(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """A third of the samples was cut at the token cap."""
    tokens = np.where(rng.random(samples) < 1 / 3, 1.0, rng.beta(1, 4, samples)) * caps["tokens"]
    return _clipped(rng.integers(0, max(caps["tiles"] // 10, 1) + 1, samples), tokens, caps)


def videos(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Frames of equal tokens, 1 to the tile cap, and short questions."""
    frames = np.clip(rng.lognormal(np.log(caps["tiles"] / 6 + 1), 0.8, samples), 1, caps["tiles"])
    frames = frames.astype(np.int64)
    per_frame = caps["tokens"] * 0.9 / caps["tiles"]
    return _clipped(frames, frames * int(per_frame) + rng.integers(20, 200, samples), caps)


def documents(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Five tiles or three, in narrow ranges of tokens."""
    tiles = np.minimum(rng.choice([3, 5], samples, p=[0.2, 0.8]), caps["tiles"])
    tokens = (
        caps["tokens"] / 16 * tiles
        + caps["tokens"] / 80
        + rng.gamma(2, caps["tokens"] / 40, samples)
    )
    return _clipped(tiles, tokens, caps)


def bimodal(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Short chats and long documents."""
    long = rng.random(samples) < 0.15
    share = np.where(long, rng.normal(0.45, 0.08, samples), rng.lognormal(-4.5, 0.7, samples))
    return _clipped(
        long * caps["tiles"] * rng.uniform(0.1, 0.5, samples), share * caps["tokens"], caps
    )


def all_tiles_differ(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """As many tile counts as the cap allows, apart from the tokens."""
    share = rng.beta(1, 6, samples)
    return _clipped(rng.beta(1, 6, samples) * caps["tiles"], share * caps["tokens"], caps)


def primes(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Three odd sizes near a seventh of the cap: sums fill it in one way alone."""
    base = caps["tokens"] / 7
    kind = rng.integers(0, 3, samples)
    tokens = np.array([base - 1, base, base + 1])[kind]
    return _clipped(np.minimum(kind, caps["tiles"] // 7), tokens, caps)


def sorted_by_length(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Log-normal and in order: nothing may depend on it."""
    tiles, tokens = text(rng, samples, caps)
    return tiles, np.sort(tokens)


def nearly_full(rng: np.random.Generator, samples: int, caps: Caps) -> Sizes:
    """Nine tenths of a pack and the tenths that go with them."""
    large = rng.random(samples) < 0.5
    share = np.where(large, rng.uniform(0.85, 0.95, samples), rng.uniform(0.05, 0.15, samples))
    return _clipped(np.where(large, 1, 0), share * caps["tokens"], caps)


SHAPES: dict[str, Shape] = {
    shape.__name__.replace("_", " "): shape
    for shape in (
        mixture, mixture_rounded, uncorrelated, halves, thirds, quarters, over_half, over_third,
        uniform, uniform_tokens, uniform_small, uniform_middle, text, heavy_tail, tiny, giant,
        giants, opposites, anticorrelated, opposed, texts_and_giants, correlated, tiles_bind,
        one_kind, few_kinds, pairs,
        triplets, cut_packs, powers, at_the_cap, videos, documents, bimodal, all_tiles_differ,
        primes, sorted_by_length, nearly_full,
    )
}  # fmt: skip
