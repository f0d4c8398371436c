"""The `balanced` packing on many shapes of data, at caps and sizes from tiny to a million.

    python benchmarks/packing.py --stress [--quick]

A row a case: packs against the proven lower bound and against `isf`. A case misses where there are
more packs than `isf` has, or more than max(1 pack, 0.5 %) above the bound. For at most twelve
samples the optimum is found by looking at all partitions, apart from the packing's own search.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from packing_shapes import SHAPES
from rich.console import Console
from rich.progress import track

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.isf import pack_isf
from omnibal.packing.pack_bound import naive_lower_bound, packs_lower_bound
from omnibal.packing.packing import PackingMethod, pack_samples

_MOST_ABOVE = 0.005
_SLOWEST = 3.0
_CAPS = ((9, 4096, 300), (9, 4096, 5000), (2, 256, 1000), (40, 16_384, 1000), (512, 131_072, 300))
"""Tiles, tokens and samples at which every shape is packed."""
_MIXTURES = (
    *((128, 32_768, n) for n in (2000, 20_000, 200_000)),
    *((256, 65_536, n) for n in (2000, 20_000)),
    *((512, 131_072, n) for n in (2000, 20_000)),
    (512, 1_048_576, 20_000),
    (9, 4096, 200_000),
)
_HANDFULS = 300
_MILLION = 1_000_000
_TIMED_CAPS = ((9, 4096), (2, 4096), (40, 16_384), (128, 32_768), (512, 131_072), (512, 1_048_576))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A shape of data at some caps."""

    shape: str
    max_tiles: int
    max_tokens: int
    samples: int
    seed: int = 0

    @property
    def caps(self) -> Caps:
        return Caps.of(tiles=self.max_tiles, tokens=self.max_tokens)

    def lengths(self) -> Lengths:
        """The samples that the case packs."""
        key = [self.seed, self.samples, self.max_tiles, self.max_tokens]
        tiles, tokens = SHAPES[self.shape](np.random.default_rng(key), self.samples, self.caps)
        return Lengths(
            items={"tiles": tiles.astype(np.int32)},
            tokens=tokens.astype(np.int32),
            loss_tokens=tokens.astype(np.int32),
            source=np.zeros(len(tiles), np.int32),
            source_names=(self.shape,),
            origin=None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came out of a case."""

    case: Case
    packs: int
    isf: int
    bound: int
    seconds: float

    @property
    def misses(self) -> bool:
        above = self.packs - self.bound
        return self.packs > self.isf or above > max(1, _MOST_ABOVE * self.bound)


def try_case(case: Case) -> Outcome:
    """Pack a case, check the packs, and prove how few there could be."""
    lengths, caps = case.lengths(), case.caps
    start = time.process_time()
    packs = pack_samples(lengths, caps, PackingMethod.BALANCED, case.seed)
    seconds = time.process_time() - start
    assert (np.bincount(packs.samples, minlength=len(lengths)) == 1).all(), case
    assert packs.sums(lengths.column("tiles")).max() <= caps["tiles"], case
    assert packs.sums(lengths.tokens).max() <= caps["tokens"], case
    return Outcome(
        case=case,
        packs=len(packs),
        isf=len(pack_isf(lengths, caps, case.seed)),
        bound=packs_lower_bound(lengths, caps, found=len(packs)),
        seconds=seconds,
    )


def fewest_packs(lengths: Lengths, caps: Caps) -> int:
    """The optimum for a handful of samples: each goes into any open pack or a new one."""
    sizes = sorted(
        zip(lengths.column("tiles").tolist(), lengths.tokens.tolist(), strict=True), reverse=True
    )

    def place(index: int, packs: list[tuple[int, int]], best: int) -> int:
        if len(packs) >= best or index == len(sizes):
            return min(len(packs), best)
        tiles, tokens = sizes[index]
        for number, (held_tiles, held_tokens) in enumerate(packs):
            after = (held_tiles + tiles, held_tokens + tokens)
            if after[0] <= caps["tiles"] and after[1] <= caps["tokens"]:
                best = place(index + 1, [*packs[:number], after, *packs[number + 1 :]], best)
        return place(index + 1, [*packs, sizes[index]], best)

    return place(0, [], len(sizes))


def try_handful(seed: int) -> tuple[int, int]:
    """Packs of at most ten samples, and the fewest there can be."""
    rng = np.random.default_rng(seed)
    shape = sorted(SHAPES)[seed % len(SHAPES)]
    max_tiles, max_tokens = ((9, 4096), (512, 131_072), (2, 256))[seed % 3]
    case = Case(
        shape=shape, max_tiles=max_tiles, max_tokens=max_tokens, samples=int(rng.integers(1, 11)),
        seed=seed,
    )  # fmt: skip
    lengths = case.lengths()
    packs = pack_samples(lengths, case.caps, PackingMethod.BALANCED, seed)
    return len(packs), fewest_packs(lengths, case.caps)


def cases() -> Iterator[Case]:
    """All cases but those of a million samples and the handfuls."""
    for max_tiles, max_tokens, samples in _MIXTURES:
        yield Case(shape="mixture", max_tiles=max_tiles, max_tokens=max_tokens, samples=samples)
    yield Case(shape="halves", max_tiles=2, max_tokens=4096, samples=1000)
    for shape in SHAPES:
        for max_tiles, max_tokens, samples in _CAPS:
            yield Case(shape=shape, max_tiles=max_tiles, max_tokens=max_tokens, samples=samples)


def time_million(max_tiles: int, max_tokens: int) -> tuple[float, int, int]:
    """CPU seconds to pack a million samples, packs, and what the sums of sizes need at least."""
    case = Case(shape="mixture", max_tiles=max_tiles, max_tokens=max_tokens, samples=_MILLION)
    lengths = case.lengths()
    start = time.process_time()
    packs = len(pack_samples(lengths, case.caps, PackingMethod.BALANCED, case.seed))
    seconds = time.process_time() - start
    return seconds, packs, naive_lower_bound(lengths, case.caps)


def stress(console: Console, *, quick: bool) -> bool:
    """Print the tables; whether no case misses."""
    outcomes = []
    console.print(
        "shape                caps                samples    bound    packs / bound      isf  CPU s"
    )
    with ProcessPoolExecutor(2) as pool:
        handfuls = pool.map(try_handful, range(_HANDFULS), chunksize=20)
        found = pool.map(try_case, cases())
        for outcome in track(found, "packing", total=sum(1 for _ in cases()), console=console):
            outcomes.append(outcome)
            console.print(_row(outcome), highlight=False)
        extra = sum(packs - fewest for packs, fewest in handfuls)
    misses = [outcome for outcome in outcomes if outcome.misses]
    worse = sum(outcome.packs > outcome.isf for outcome in outcomes)
    console.print(
        f"{len(outcomes)} cases: {worse} worse than isf, {len(misses)} more than max(1 pack, "
        f"0.5 %) above the proven bound; {_HANDFULS} of at most 10 samples: {extra} packs above "
        "the optimum"
    )
    slow = not quick and _time_millions(console)
    return not misses and not extra and not slow


def _row(outcome: Outcome) -> str:
    case = outcome.case
    mark = "  <" if outcome.misses else ""
    return (
        f"{case.shape:<20} {case.max_tiles:>4} / {case.max_tokens:>9,} {case.samples:>11,} "
        f"{outcome.bound:>8,} {outcome.packs:>8,} {outcome.packs / outcome.bound:.4f} "
        f"{outcome.isf:>8,} {outcome.seconds:>6.2f}{mark}"
    )


def _time_millions(console: Console) -> bool:
    """Print how long a million samples take; whether any caps take too long."""
    usual, ratios = 0.0, []
    for max_tiles, max_tokens in _TIMED_CAPS:
        seconds, packs, least = time_million(max_tiles, max_tokens)
        usual = usual or seconds
        ratios.append(seconds / usual)
        console.print(
            f"a million samples at {max_tiles} / {max_tokens:,}: {seconds:.1f} CPU s, "
            f"{ratios[-1]:.2f} times 9 / 4,096; {packs:,} packs, the sums need {least:,}"
        )
    return max(ratios) > _SLOWEST
