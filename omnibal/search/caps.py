"""Search for pack caps, of items such as tiles (Qv) and of tokens (Qt), by predicted time.

Larger packs pay fixed costs less often; smaller packs mean more micro-batches, less bubble and less
recomputation. Candidates are planned by `make_plan` at equal samples per step: first a coarse grid
on few samples, then finer moves around the best on more.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import count

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths, draw_samples
from omnibal.job.plan_data import caps_of_tokens, least_caps, limited_features
from omnibal.model.levels import Level
from omnibal.model.limits import Caps, check_limits, in_canonical_order, words
from omnibal.packing.isf import pack_isf
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import Packs
from omnibal.search.engine import Trials, whole_progress
from omnibal.search.trial import Comparison, Trial, time_per_sample
from omnibal.steps.metrics import dist_ratio

_USUAL_SAMPLES_PER_PACK = 4.5  # middle of the paper's 4 to 5
_TIE = 0.003  # smaller caps win within this relative difference
_COARSE_SHARE = 8
"""Divisor of the sample count for the grid."""
_LEVELS = tuple(2 ** (step / 2) for step in range(5))
"""Token caps of the grid, relative to the minimum."""
_ITEM_SHARES = (0.75, 1.0)
"""Item caps of the grid, relative to the cap that fills together with tokens."""
_FIRST_ITEM_SHARES = (0.5, *_ITEM_SHARES)
"""Item caps at the minimum token cap, as only item caps can make packs smaller there."""
_CLEARLY_WORSE = 1.05  # relative time that ends the grid
_FINALISTS = 3  # of the coarse grid, compared again on all drawn samples
_MOVES = (2**0.25, 2**0.125)
"""Factors of the moves around the best, by round."""
_TOKEN_STEPS = 8
"""Min number of token steps, a power of two each, in the smallest token cap."""
_COMMON_SHARE = 1 / 8
"""Min share of all items for a per-sample count to be common."""

_PAPER_TOKENS = 4096  # start of OmniBal's public code
_PAPER_ALIGNMENT = 256  # its rounding of tokens
_PAPER_RANKS = 8  # ranks of its dist ratios
_PAPER_SAMPLES_PER_PACK = (4, 5)  # its target mean
_PAPER_CANDIDATES = 10  # shown with predicted times


class CapRule(StrEnum):
    TIME = "time"
    PAPER = "paper"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CapSearchRequest(Comparison):
    """Job, samples, and the rule that chooses caps."""

    rule: CapRule
    fixed: dict[str, int] = field(default_factory=dict)
    """Fixed caps by feature; only for the time rule."""

    def __post_init__(self) -> None:
        Comparison.__post_init__(self)
        model = self.job.model
        check_limits(self.limited, model.item_features, model.name)
        if self.rule is CapRule.PAPER and (self.limited != ["tiles", "tokens"] or self.fixed):
            raise UserError(
                "the paper's rule chooses the caps of tiles and tokens, both and no others, and "
                f"here {words(self.limited)} are limited, {len(self.fixed)} of them by --limit; "
                "choose caps by predicted time (--rule time)"
            )

    @property
    def limited(self) -> list[str]:
        return in_canonical_order({*limited_features(self.job.model), *self.fixed})


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Caps and their predictions."""

    caps: Caps
    samples_per_pack: float
    packs_per_step: int
    """Packs of all ranks: the multiple of the ranks nearest to the requested samples per step."""
    micro_batches: int
    """Micro-batches per rank and step. The next three fields are of the plan with this number."""
    recomputed_layers: int
    peak_gib: float
    """Peak memory per device of the fullest stage."""
    bubble_fraction: float
    """Idle share of device time, for any cause."""
    ms_per_sample: float
    """Predicted step time per sample, at exactly the requested samples per step."""
    samples_per_second: float

    def as_dict(self) -> dict[str, float]:
        """All fields by name, with caps as `max_<feature>`."""
        fields = asdict(self)
        return {**fields.pop("caps").model_dump(), **fields}


@dataclass(frozen=True, kw_only=True, slots=True)
class CapSearch:
    """Candidates in order, and infeasible caps."""

    candidates: tuple[Candidate, ...]
    """Trainable candidates, the chosen one first, in the order of the rule."""
    infeasible: dict[Caps, str]
    """Reasons why caps cannot be trained, in the order found."""
    is_largest: bool
    """Whether the chosen token cap is the largest tried. A larger one might be better."""

    @property
    def best(self) -> Caps:
        return self.candidates[0].caps


def max_candidates(request: CapSearchRequest) -> int:
    """Max candidates by time: for tiles and tokens 17 in the grid, 3 on more samples, 12 moves."""
    grid = len(_LEVELS) * (len(_ITEM_SHARES) + 1) + 2
    return grid + _FINALISTS + len(_MOVES) * (2 * len(request.limited) + 2)


def usual_samples_per_step(data_parallel: int, micro_batches: int) -> int:
    """Samples per step at 4.5 samples per pack, the middle of the paper's range."""
    return round(_USUAL_SAMPLES_PER_PACK * micro_batches * data_parallel)


def search_caps(
    request: CapSearchRequest, on_progress: Callable[[int], None], processes: int = 1
) -> CapSearch:
    """Return caps with minimal predicted time per sample, or by the paper's rule.

    Among caps within 0.3 % the smallest win. Every sample fits.
    """
    space = cap_space(request, request.limited, request.fixed)
    with whole_progress(max_candidates(request), on_progress) as advance:

        def trials(share: int) -> _CapTrials:
            drawn = request.drawn(share)
            work, lengths = partial(_evaluated, drawn), drawn.lengths
            return _CapTrials(work=work, processes=processes, on_done=advance, lengths=lengths)

        if request.rule is CapRule.PAPER:
            # Candidates in the order of the rule; predicted times are informative only.
            all_data = trials(1)
            ranked = paper_caps(all_data.lengths, space.least, request.settings.seed)
            all_data.run(ranked[:_PAPER_CANDIDATES])
            found = (all_data.found.get(caps) for caps in ranked[:_PAPER_CANDIDATES])
            search = CapSearch(
                candidates=tuple(each for each in found if each is not None),
                infeasible=all_data.infeasible,
                is_largest=False,
            )
        else:
            search = _search_by_time(trials(_COARSE_SHARE), trials(1), space)
    if not search.candidates:
        raise UserError(_unusable(search.infeasible, space.least))
    return search


def notes(request: CapSearchRequest, search: CapSearch) -> list[str]:
    """Warnings about the caps found, one sentence each."""
    found: list[str | None] = []
    if search.is_largest:
        found.append(
            f"the best token cap is {_LEVELS[-1]:.0f} times what the longest sample needs; larger "
            "ones, which are not tried, may be better still"
        )
    if request.settings.packing is PackingMethod.ISF:
        drawn = draw_samples(request.lengths, request.samples, request.settings.seed)
        found.append(isf_note(drawn, search.best, request.settings.seed))
    return [note for note in found if note is not None]


def isf_note(lengths: Lengths, caps: Caps, seed: int) -> str | None:
    """Warn if ISF's default 10 iterations make more packs than 1. None otherwise.

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
    by pad ratio (0, as packs are not padded) plus dist ratios of vision and language over 8 ranks,
    one pack each. If no caps reach 4 to 5 samples, the nearest are returned.
    """
    per_tile = _paper_tokens_per_tile(lengths)
    start_tiles = _PAPER_TOKENS // per_tile
    first = max(least["tiles"] - start_tiles, -(-(least["tokens"] - _PAPER_TOKENS) // per_tile))
    packed: dict[Caps, Packs] = {}

    def samples_per_pack(moves: int) -> float:
        caps = Caps.of(tiles=start_tiles + moves, tokens=_PAPER_TOKENS + moves * per_tile)
        packed[caps] = pack_isf(lengths, caps, seed)
        return len(lengths) / len(packed[caps])

    fewest, most = _PAPER_SAMPLES_PER_PACK
    start = max(first, 0)
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
    return sorted(
        found, key=lambda caps: (_dist_ratios(packed[caps], lengths, seed), caps["tokens"])
    )


def _paper_tokens_per_tile(lengths: Lengths) -> int:
    mean_tiles = float(lengths.column("tiles").mean())
    if not mean_tiles:
        raise UserError(
            "the paper's rule needs to know how many tokens go with an image tile, and none of "
            f"{len(lengths)} samples has a tile; choose caps by predicted time (--rule time)"
        )
    aligned = -(-lengths.tokens.astype(np.int64) // _PAPER_ALIGNMENT) * _PAPER_ALIGNMENT
    # At least 16, even with many tiles and few tokens.
    return max(int((float(aligned.mean()) // mean_tiles + 1) // 16) * 16, 16)


def _dist_ratios(packs: Packs, lengths: Lengths, seed: int) -> float:
    """Sum of vision and language dist ratios, with packs in random order on every rank."""
    ranks = min(_PAPER_RANKS, len(packs))
    shares = np.arange(len(packs) // ranks * ranks).reshape(ranks, -1)
    by_step = np.random.default_rng(seed).permuted(shares, axis=1).T
    vision, language = packs.sums(lengths.column("tiles")), packs.sums(lengths.tokens)
    return dist_ratio(vision[by_step]) + dist_ratio(language[by_step])


def _unusable(infeasible: dict[Caps, str], least: Caps) -> str:
    caps, reason = next(iter(infeasible.items()))
    return (
        f"no caps can be used: at {words([f'{key} {cap}' for key, cap in caps.root.items()])}, "
        f"{reason}; every sample must fit, so for caps below {least} the largest must be split or "
        "dropped"
    )


def _evaluated(request: CapSearchRequest, caps: Caps) -> tuple[Caps, Candidate | UserError]:
    """Predict the time at the requested samples per step, or return why caps do not fit."""
    job, lengths = request.job, request.lengths
    try:
        data = request.sample_data((Level(caps=caps),))
        (packs,) = packed = data.packed(job)
        timed = time_per_sample(Trial(job=job, data=data, packed=packed), request.samples_per_step)
    except UserError as error:
        return caps, error
    prediction = timed.plan.predicted
    return caps, Candidate(
        caps=caps,
        samples_per_pack=len(lengths) / len(packs),
        packs_per_step=timed.micro_batches * job.parallel.data,
        micro_batches=timed.micro_batches,
        recomputed_layers=sum(stage.recomputed_layers for stage in timed.plan.stages),
        peak_gib=max(stage.memory.peak_gib for stage in prediction.stages),
        bubble_fraction=prediction.bubble_fraction,
        ms_per_sample=timed.ms_per_sample,
        samples_per_second=1e3 / timed.ms_per_sample,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _CapTrials(Trials[Caps, Candidate]):
    """Candidates on the same samples. Caps above failed caps fail without a trial."""

    lengths: Lengths

    def ranked(self) -> list[Candidate]:
        """Usable candidates, fastest first."""
        return sorted(self.found.values(), key=lambda candidate: candidate.ms_per_sample)

    @property
    def infeasible(self) -> dict[Caps, str]:
        """Reasons why caps cannot be used, in the order found."""
        return {caps: str(error) for caps, error in self.failed.items()}

    def known(self, caps: Caps) -> UserError | None:
        for failed, reason in self.failed.items():
            if (caps.values >= failed.values).all():
                return reason
        return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CapSpace:
    """Caps that a search by time may reach. Every sample fits the smallest."""

    items: dict[str, "_ItemAxis"]
    """Caps of every limited feature except tokens."""
    tokens: np.ndarray
    """Token caps, int64, ascending multiples of a power of two, up to 4 times the minimum."""
    of_tokens: Callable[[int], Caps] | None = None
    """Completes a token cap if tokens alone limit packs."""

    @classmethod
    def of(
        cls, lengths: Lengths, names: Sequence[str], fixed: Mapping[str, int] | None = None
    ) -> "CapSpace":
        """Return the cap space of these features for these lengths, with some caps fixed."""
        least = least_caps(lengths, names)
        unit = 1 << max((least["tokens"] // _TOKEN_STEPS).bit_length() - 1, 0)
        first = -(-least["tokens"] // unit) * unit
        tokens = np.arange(first, _LEVELS[-1] * first + 1, unit, dtype=np.int64)
        items = {
            name: _ItemAxis.of(lengths, name, int(tokens[-1]))
            for name in least.names
            if name != "tokens"
        }
        for name, cap in (fixed or {}).items():
            if name == "tokens":
                tokens = np.array([cap])
            else:
                items[name] = replace(items[name], caps=np.array([cap]))
        return cls(items=items, tokens=tokens)

    @property
    def least(self) -> Caps:
        return self._caps({name: int(caps[0]) for name, caps in self._axes().items()})

    def level(self, factor: float) -> list[Caps]:
        """Caps of the grid with `factor` times the minimum tokens."""
        tokens = _nearest(self.tokens, factor * self.tokens[0])
        is_first = factor == _LEVELS[0]
        tried = [axis.level(tokens, is_first=is_first) for axis in self.items.values()]
        # Items move together: separate moves would be too many.
        together = sorted(set(zip(*tried, strict=True))) if tried else [()]
        return [
            self._caps({**dict(zip(self.items, caps, strict=True)), "tokens": tokens})
            for caps in together
        ]

    def moves(self, caps: Caps, factor: float) -> list[Caps]:
        """Neighbours of `caps`: one or all caps smaller or larger by about the factor."""
        less, more = (
            {name: _moved(axis, caps[name], by) for name, axis in self._axes().items()}
            for by in (1 / factor, factor)
        )
        now = {name: caps[name] for name in less}
        around = [
            less,
            *({**now, name: cap} for name, cap in less.items()),
            *({**now, name: cap} for name, cap in more.items()),
            more,
        ]
        return [self._caps(moved) for moved in around]

    def _caps(self, of_axes: Mapping[str, int]) -> Caps:
        if self.of_tokens is not None:
            return self.of_tokens(of_axes["tokens"])
        return Caps.of(**of_axes)

    def _axes(self) -> dict[str, np.ndarray]:
        return {**{name: axis.caps for name, axis in self.items.items()}, "tokens": self.tokens}


def cap_space(
    request: Comparison, names: Sequence[str], fixed: Mapping[str, int] | None = None
) -> CapSpace:
    """Cap space of these features for a comparison's samples and pack rules."""
    if not request.rules.tokens_alone:
        return CapSpace.of(request.lengths, names, fixed)
    of_tokens = partial(caps_of_tokens, request.lengths, names)
    return replace(CapSpace.of(request.lengths, ["tokens"], fixed), of_tokens=of_tokens)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ItemAxis:
    """Caps of one item kind, such as tiles."""

    caps: np.ndarray
    """Caps, int64, ascending: the max items of a sample, and larger sums of common counts."""
    per_token: float
    """Mean items per token."""
    main: int
    """Per-sample count that covers the most items; 1 if there are no items."""

    @classmethod
    def of(cls, lengths: Lengths, name: str, most_tokens: int) -> "_ItemAxis":
        """Return caps for these samples, at token caps up to `most_tokens`."""
        column = lengths.column(name)
        least = max(int(column.max()), 1)
        held = np.bincount(column) * np.arange(int(column.max()) + 1)
        per_token = float(held.sum() / lengths.tokens.sum(dtype=np.int64))
        common = np.flatnonzero(held >= max(_COMMON_SHARE * held.sum(), 1)).tolist()
        sums = _sums(common or [1], math.ceil(max(_LEVELS[-1] * least, per_token * most_tokens)))
        return cls(
            caps=np.concatenate([[least], sums[sums > least]]),
            per_token=per_token,
            main=max(int(held.argmax()), 1),
        )

    def level(self, tokens: int, *, is_first: bool) -> list[int]:
        """Caps to try with a token cap, equally many for all item kinds."""
        matched = tokens * self.per_token
        shares = _FIRST_ITEM_SHARES if is_first else _ITEM_SHARES
        wanted = [share * matched for share in shares]
        wanted.append(round(matched / self.main) * self.main)
        if is_first:
            wanted.append(self.caps[0])
        return [_nearest(self.caps, value) for value in wanted]


def _sums(parts: Sequence[int], most: int) -> np.ndarray:
    """All sums up to `most` of repeatable parts, int64, ascending from 0."""
    reached = np.zeros(most + 1, bool)
    reached[0] = True
    for part in parts:
        times = part
        while times <= most:
            # Doubling: the reachable multiples of `part` double in each round.
            reached[times:] |= reached[:-times]
            times *= 2
    return np.flatnonzero(reached)


def _nearest(axis: np.ndarray, value: float) -> int:
    return int(axis[np.abs(axis - value).argmin()])


def _moved(axis: np.ndarray, value: int, factor: float) -> int:
    """Entry nearest to `factor` times `value`, different from `value` unless it is the last."""
    old, new = (int(np.abs(axis - near).argmin()) for near in (value, value * factor))
    new = max(new, old + 1) if factor > 1 else min(new, old - 1)
    return int(axis[min(max(new, 0), len(axis) - 1)])


def _search_by_time(coarse: _CapTrials, fine: _CapTrials, space: CapSpace) -> CapSearch:
    """Try a grid in ascending order until larger caps fail or are clearly slower, then refine."""
    best_ms = math.inf
    for factor in _LEVELS:
        level = space.level(factor)
        coarse.run(level)
        level_ms = [coarse.found[caps].ms_per_sample for caps in level if caps in coarse.found]
        if not level_ms or min(level_ms) > _CLEARLY_WORSE * best_ms:
            break
        best_ms = min(best_ms, *level_ms)
    if len(fine.lengths) == len(coarse.lengths):
        fine = coarse
    fine.failed.update(coarse.failed)
    fine.run(candidate.caps for candidate in coarse.ranked()[:_FINALISTS])
    if not fine.found:
        # More samples can need more memory.
        fine.run([space.least])
    if not fine.found:
        return CapSearch(candidates=(), infeasible=fine.infeasible, is_largest=False)
    for factor in _MOVES:
        fine.run(space.moves(fine.ranked()[0].caps, factor))
    candidates = _smallest_tie_first(fine.ranked(), space.least)
    return CapSearch(
        candidates=tuple(candidates),
        infeasible=fine.infeasible,
        is_largest=bool(space.tokens[0] < candidates[0].caps["tokens"] == space.tokens[-1]),
    )


def _smallest_tie_first(ranked: list[Candidate], least: Caps) -> list[Candidate]:
    """Candidates, with the smallest that ties with the best moved to the front."""

    def size(candidate: Candidate) -> float:
        return sum(candidate.caps[name] / least[name] for name in least.names)

    ties = [each for each in ranked if each.ms_per_sample <= (1 + _TIE) * ranked[0].ms_per_sample]
    chosen = min(ties, key=size)
    return [chosen, *(each for each in ranked if each is not chosen)]
