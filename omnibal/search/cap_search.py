"""`omnibal caps`: the search for caps at one layout, by time or by OmniBal's public code."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Literal

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths, draw_samples
from omnibal.model.limits import Caps, check_limits, words
from omnibal.packing.balance_metrics import dist_ratio
from omnibal.packing.isf import pack_isf
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import Packs
from omnibal.search.bounded import BoundedTrials
from omnibal.search.caps import MOST_IN_GRID, cap_space
from omnibal.search.engine import whole_progress
from omnibal.search.memory_need import gib_text
from omnibal.search.strategy import Setting, Sizing, Strategy, StrategyRequest
from omnibal.search.strategy_search import unusable

CapRule = Literal["time", "paper"]

_MOVE_FACTORS = (2**0.25, 2**0.125)  # factors of the moves around the best caps, by round
_PAPER_TOKENS = 4096  # start of OmniBal's public code
_PAPER_ALIGNMENT = 256  # its rounding of tokens
_PAPER_RANKS = 8  # ranks of its dist ratios
_PAPER_SAMPLES_PER_PACK = (4, 5)  # its target mean
_PAPER_CANDIDATES = 10  # shown with predicted times


@dataclass(frozen=True, kw_only=True, slots=True)
class CapCandidate:
    """Caps with the predictions of their plan."""

    strategy: Strategy
    samples_per_pack: float

    @property
    def caps(self) -> Caps:
        return self.strategy.caps

    @property
    def packs_per_step(self) -> int:
        """Packs of all ranks: the multiple of the ranks nearest to the requested samples."""
        return self.strategy.micro_batches * self.strategy.parallel.data

    def as_dict(self) -> dict[str, float]:
        """All figures by name, with caps as `max_<feature>`."""
        return {
            **self.caps.model_dump(),
            "samples_per_pack": self.samples_per_pack,
            "packs_per_step": self.packs_per_step,
            "micro_batches": self.strategy.micro_batches,
            "recomputed_layers": self.strategy.recomputed_layers,
            "peak_gib": self.strategy.peak_gib,
            "bubble_fraction": self.strategy.bubble_fraction,
            "ms_per_sample": self.strategy.ms_per_sample,
            "samples_per_second": self.strategy.samples_per_second,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CapSearch:
    """Candidates in order, and caps that do not fit."""

    candidates: tuple[CapCandidate, ...]
    """Candidates that fit, the chosen one first, in the order of the rule."""
    infeasible: dict[Caps, str]  # reasons why caps cannot be trained, in the order found
    is_largest: bool
    """Whether the chosen token cap is the largest tried. A larger one might be better."""

    @property
    def best(self) -> Caps:
        return self.candidates[0].caps


def most_candidates(request: StrategyRequest, rule: CapRule) -> int:
    """Return the max number of caps to plan, the total of `search_caps`'s progress."""
    if rule == "paper":
        return _PAPER_CANDIDATES
    return MOST_IN_GRID + len(_MOVE_FACTORS) * (2 * len(request.limited_features) + 2)


def search_caps(
    request: StrategyRequest,
    rule: CapRule,
    on_progress: Callable[[int], None],
    processes: int = 1,
) -> CapSearch:
    """Return caps of one layout by predicted time per sample, or in the order of the paper's rule.

    Every sample fits them. Raises UserError if no caps can be trained, or the rule does not apply.
    """
    limited, model, space = request.limited_features, request.job.model, cap_space(request)
    check_limits(limited, model.item_features, model.name)
    if rule == "paper" and (limited != ["tiles", "tokens"] or request.fixed_caps):
        raise UserError(
            "the paper's rule chooses the caps of tiles and tokens, both and no others, and "
            f"here {words(limited)} are limited, {len(request.fixed_caps)} of them by --limit; "
            "choose caps by predicted time (--rule time)"
        )
    setting, sizing = Setting(request=request.draw_samples(), packs={}), Sizing(request.layouts[0])
    with whole_progress(most_candidates(request, rule), on_progress) as advance:
        trials = BoundedTrials(setting=setting, processes=processes, advance=advance)
        if rule == "paper":
            in_order = paper_caps(
                setting.request.lengths, space.smallest_caps, request.settings.seed
            )
            choices = [(sizing, caps) for caps in in_order[:_PAPER_CANDIDATES]]
            trials.plan_all(choices)
            ranked = [trials.planned[choice] for choice in choices if choice in trials.planned]
        else:
            trials.plan_all([(sizing, caps) for caps in space.grid()])
            for factor in _MOVE_FACTORS if trials.planned else ():
                best = min(
                    trials.planned.values(), key=lambda strategy: strategy.ms_per_sample
                ).caps
                trials.plan_all([(sizing, caps) for caps in space.moves(best, factor)])
            ranked = sorted(trials.planned.values(), key=lambda strategy: strategy.ms_per_sample)
    if not ranked:
        raise unusable(trials, [sizing])
    cap_gib, packs = request.job.memory_cap_gib, trials.setting.packs
    samples, tokens = len(trials.setting.request.lengths), ranked[0].caps["tokens"]
    tried = [caps["tokens"] for _, caps in trials.least_ms]
    least, largest = min(tried), max(tried)
    return CapSearch(
        candidates=tuple(
            CapCandidate(strategy=strategy, samples_per_pack=samples / len(packs[strategy.caps]))
            for strategy in ranked
        ),
        infeasible={
            caps: f"needs {gib_text(gib)} GiB per device at best, more than the memory cap of "
            f"{gib_text(cap_gib)} GiB"
            for (_, caps), gib in trials.need_gib.items()
        },
        is_largest=rule == "time" and least < tokens == largest,
    )


def cap_notes(request: StrategyRequest, search: CapSearch) -> list[str]:
    """Return warnings about the caps found, one sentence each."""
    notes: list[str | None] = []
    if search.is_largest:
        notes.append(
            f"the best token cap, {search.best['tokens']:,}, is the largest that was tried; larger "
            "ones may be better still"
        )
    if request.settings.packing is PackingMethod.ISF:
        drawn = draw_samples(request.lengths, request.samples, request.settings.seed)
        notes.append(isf_note(drawn, search.best, request.settings.seed))
    return [note for note in notes if note is not None]


def isf_note(lengths: Lengths, caps: Caps, seed: int) -> str | None:
    """Return a warning if ISF makes more packs in its default 10 iterations than in 1, else None.

    ISF keeps packs that fill a cap and redraws the rest. If few sets of samples fill a cap, these
    use up the small samples and the remainder packs worse.
    """
    once = len(pack_isf(lengths, caps, seed, iterations=1))
    by_default = len(pack_isf(lengths, caps, seed))
    if by_default <= once:
        return None
    return (
        f"ISF makes {by_default:,} packs of {len(lengths):,} samples in 10 iterations and "
        f"{once:,} in 1: the caps of {caps} do not suit these sizes, so "
        "that its filtering does harm; use --packing balanced or other caps"
    )


def paper_caps(lengths: Lengths, least: Caps, seed: int) -> list[Caps]:
    """Return caps by the rule of OmniBal's public code (arXiv 2407.20761), best first.

    Tokens per tile come from mean lengths (tokens rounded up to 256). From 4096 tokens both caps
    move by one tile and its tokens while ISF packs hold 4 to 5 samples on average. Caps are ranked
    by the dist ratios of vision and language (pad ratio is 0: packs are not padded) over 8 ranks,
    one pack each. If no caps reach 4 to 5 samples, the nearest are returned. Raises UserError if no
    sample has tiles.
    """
    mean_tiles = float(lengths.column("tiles").mean())
    if not mean_tiles:
        raise UserError(
            "the paper's rule needs to know how many tokens go with an image tile, and none of "
            f"{len(lengths)} samples has a tile; choose caps by predicted time (--rule time)"
        )
    aligned = -(-lengths.tokens.astype(np.int64) // _PAPER_ALIGNMENT) * _PAPER_ALIGNMENT
    per_tile = max(int((float(aligned.mean()) // mean_tiles + 1) // 16) * 16, 16)
    start_tiles = _PAPER_TOKENS // per_tile
    first = max(least["tiles"] - start_tiles, -(-(least["tokens"] - _PAPER_TOKENS) // per_tile))
    packed: dict[Caps, Packs] = {}

    def samples_per_pack(moves: int) -> float:
        caps = Caps.of(tiles=start_tiles + moves, tokens=_PAPER_TOKENS + moves * per_tile)
        packed[caps] = pack_isf(lengths, caps, seed)
        return len(lengths) / len(packed[caps])

    fewest, most = _PAPER_SAMPLES_PER_PACK
    start = max(first, 0)  # every sample must fit
    for moves in range(start, first - 1, -1):
        if samples_per_pack(moves) < fewest:
            break
    for moves in count(start + 1):
        average = samples_per_pack(moves)
        if average > most or average == len(lengths):
            break

    def distance(caps: Caps) -> float:
        average = len(lengths) / len(packed[caps])
        return max(fewest - average, average - most, 0.0)

    nearest = min(map(distance, packed))
    found = [caps for caps in packed if distance(caps) == nearest]
    return sorted(  # fewest tokens of equal dist ratios
        found, key=lambda caps: (_dist_ratios(packed[caps], lengths, seed), caps["tokens"])
    )


def _dist_ratios(packs: Packs, lengths: Lengths, seed: int) -> float:
    """Return the sum of vision and language dist ratios, packs in random order on every rank."""
    ranks = min(_PAPER_RANKS, len(packs))
    shares = np.arange(len(packs) // ranks * ranks).reshape(ranks, -1)
    # [steps, ranks] of pack numbers
    by_step = np.random.default_rng(seed).permuted(shares, axis=1).T
    vision, language = packs.sums(lengths.column("tiles")), packs.sums(lengths.tokens)  # [packs]
    return dist_ratio(vision[by_step]) + dist_ratio(language[by_step])
