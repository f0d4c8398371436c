"""Published figures of a dataset beside those of a synthetic mixture that stands for it."""

from dataclasses import dataclass, fields, replace

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.packing import pack_isf
from omnibal.steps.metrics import dist_ratio, pad_ratio

CAPS = Caps.of(tiles=9, tokens=4096)
"""Qv and Qt of OmniBal's Table 3."""
DP = 8
MICRO_BATCH = 4
"""Samples of a device in OmniBal's random baseline."""
_KILO = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class InternvlFigures:
    """What OmniBal's Table 3 says about its data, packed in two ways."""

    random_pad_ratio: float
    random_dist_ratio_vision: float
    random_dist_ratio_language: float
    isf_samples_per_pack: float
    isf_dist_ratio_vision: float
    isf_dist_ratio_language: float


OMNIBAL_TABLE_3 = InternvlFigures(
    random_pad_ratio=0.31,
    random_dist_ratio_vision=0.34,
    random_dist_ratio_language=0.30,
    isf_samples_per_pack=4.6,
    isf_dist_ratio_vision=0.02,
    isf_dist_ratio_language=0.14,
)


def measure_internvl(lengths: Lengths, samples: int, seed: int) -> InternvlFigures:
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
    return InternvlFigures(
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


def _dist_ratio_of(loads: np.ndarray, ranks: int = DP) -> float:
    """Of micro-batches taken in order, one a rank; an incomplete last step is left out."""
    return dist_ratio(loads[: len(loads) // ranks * ranks].reshape(-1, ranks).astype(np.float64))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tulu3Figures:
    """What HBP's Table 3 says about Tulu3 as it comes, and sorted by length.

    Tokens are thousands of a device in an iteration, without padding.
    """

    random_4k_dist_ratio: float
    random_4k_pad_ratio: float
    random_4k_kilotokens: float
    random_32k_dist_ratio: float
    random_32k_kilotokens: float
    random_128k_dist_ratio: float
    sorted_32k_kilotokens: float
    sorted_128k_kilotokens: float


HBP_TABLE_3 = Tulu3Figures(
    random_4k_dist_ratio=0.54,
    random_4k_pad_ratio=0.416,
    random_4k_kilotokens=2.4,
    random_32k_dist_ratio=0.64,
    random_32k_kilotokens=0.8,
    random_128k_dist_ratio=0.639,
    sorted_32k_kilotokens=30.2,
    sorted_128k_kilotokens=125,
)
"""arXiv 2503.07680, Table 3."""
_GROUPS = {4: 32, 32: 8, 128: 4}
"""Ranks with a sequence of their own among the paper's 32 devices, by thousands of tokens."""
_SAMPLES_AT_4K = 3


def measure_tulu3(lengths: Lengths, samples: int, seed: int) -> Tulu3Figures:
    """Figures of at most `samples` of the mixture's Tulu3, in an order drawn by `seed`."""
    tulu3 = lengths.tokens[lengths.source == lengths.source_names.index("tulu3")]
    tokens = np.random.default_rng(seed).permutation(tulu3)[:samples].astype(np.float64)
    short = tokens[tokens <= 4 * _KILO]
    short = short[: len(short) // _SAMPLES_AT_4K * _SAMPLES_AT_4K]
    threes = short.reshape(-1, _SAMPLES_AT_4K).sum(axis=1)
    return Tulu3Figures(
        random_4k_dist_ratio=_dist_ratio_of(threes, _GROUPS[4]),
        random_4k_pad_ratio=pad_ratio(short, np.arange(0, len(short) + 1, _SAMPLES_AT_4K)),
        random_4k_kilotokens=float(threes.mean()) / 1000,
        random_32k_dist_ratio=_dist_ratio_of(tokens, _GROUPS[32]),
        random_32k_kilotokens=float(tokens.mean()) / 1000,
        random_128k_dist_ratio=_dist_ratio_of(tokens, _GROUPS[128]),
        sorted_32k_kilotokens=_sorted_tokens(tokens, 32 * _KILO) / 1000,
        sorted_128k_kilotokens=_sorted_tokens(tokens, 128 * _KILO) / 1000,
    )


def _sorted_tokens(tokens: np.ndarray, cap: int) -> float:
    """Mean tokens of batches of samples of like length, as many as fit `cap` when padded."""
    descending = np.sort(tokens)[::-1]
    batches, first = 0, 0
    while first < len(descending):
        first += max(1, int(cap // descending[first]))
        batches += 1
    return float(tokens.sum()) / batches


def comparison_table(
    published: InternvlFigures | Tulu3Figures, made: InternvlFigures | Tulu3Figures
) -> str:
    """Lines of published | this file | difference."""
    lines = [f"{'':<28}{'published':>10}{'this file':>11}{'difference':>12}"]
    for field in fields(published):
        theirs, ours = (float(getattr(one, field.name)) for one in (published, made))
        label = field.name.replace("_", " ")
        lines.append(f"{label:<28}{theirs:>10.2f}{ours:>11.3f}{ours - theirs:>+12.3f}")
    return "\n".join(lines)
