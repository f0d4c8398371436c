"""Search for the caps of a pack, of items such as tiles (Qv) and of tokens (Qt), by predicted time.

Larger packs pay fixed costs less often; smaller ones leave more micro-batches to a step of the same
samples, so less bubble, and need less memory, so less recomputation. Each candidate is therefore
packed, planned by `make_plan` and compared in predicted time per sample, all at the same number of
samples per step. The search has two parts: a coarse grid on few of the samples, from small caps to
large ones until they are clearly worse or do not fit, then finer moves around the best on more.
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
from omnibal.search.engine import Trials
from omnibal.search.trial import Comparison, Trial, time_per_sample
from omnibal.steps.metrics import dist_ratio

_USUAL_SAMPLES_PER_PACK = 4.5  # the middle of the 4 to 5 of the paper's rule
_TIE = 0.003  # times so near count as equal, and smaller caps win
_COARSE_SHARE = 8
"""Divisor of the samples that the grid is evaluated on."""
_LEVELS = tuple(2 ** (step / 2) for step in range(5))
"""Token caps of the grid, relative to the least."""
_ITEM_SHARES = (0.75, 1.0)
"""Item caps of the grid, relative to where items and tokens fill up together."""
_FIRST_ITEM_SHARES = (0.5, *_ITEM_SHARES)
"""Item caps of the grid at the least token cap, where only item caps can make packs smaller."""
_CLEARLY_WORSE = 1.05  # from where larger caps are not tried
_FINALISTS = 3  # of the coarse grid, compared again on all samples that are drawn
_MOVES = (2**0.25, 2**0.125)
"""Factors of the moves around the best, in the first round and in the second."""
_TOKEN_STEPS = 8
"""Least number of token steps, a power of two each, in the smallest token cap."""
_COMMON_SHARE = 1 / 8
"""Share of all items from which a count of them in a sample is common."""

_PAPER_TOKENS = 4096  # where OmniBal's public code begins
_PAPER_ALIGNMENT = 256  # to which it rounds tokens up
_PAPER_RANKS = 8  # that its dist ratios are of
_PAPER_SAMPLES_PER_PACK = (4, 5)  # that it wants in a pack, on average
_PAPER_CANDIDATES = 10  # that are shown with predicted times


class CapRule(StrEnum):
    """Rule by which caps are chosen."""

    TIME = "time"
    PAPER = "paper"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CapSearchRequest(Comparison):
    """A job, its samples, and the rule that chooses its caps."""

    rule: CapRule
    fixed: dict[str, int] = field(default_factory=dict)
    """Caps that are not searched for, by feature; only where they are chosen by time."""

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
        """Names of the features that are limited."""
        return in_canonical_order({*limited_features(self.job.model), *self.fixed})


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Caps, and what is predicted under them."""

    caps: Caps
    samples_per_pack: float
    packs_per_step: int
    """Packs of all ranks: the multiple of the ranks nearest to the requested samples per step."""
    micro_batches: int
    """Micro-batches per rank and step; the next three fields are of the plan with this number."""
    recomputed_layers: int
    """Recomputed layers of all stages."""
    peak_gib: float
    """Peak memory of one device of the fullest stage."""
    bubble_fraction: float
    """Idle share of device time, for any cause."""
    ms_per_sample: float
    """Predicted step time per sample, at exactly the requested samples per step."""
    samples_per_second: float

    def as_dict(self) -> dict[str, float]:
        """All fields by name, with each cap as `max_` and its feature."""
        fields = asdict(self)
        return {**fields.pop("caps").model_dump(), **fields}


@dataclass(frozen=True, kw_only=True, slots=True)
class CapSearch:
    """Result of a cap search: the candidates in order, and those that cannot be used."""

    candidates: tuple[Candidate, ...]
    """Candidates that can be trained: the chosen one, then the others in the order of the rule."""
    infeasible: dict[Caps, str]
    """Reasons why other caps cannot be trained, in the order in which they were found."""
    is_largest: bool
    """Whether the chosen token cap is the largest that is tried; a larger one might be better."""

    @property
    def best(self) -> Caps:
        """The chosen caps."""
        return self.candidates[0].caps


def max_candidates(request: CapSearchRequest) -> int:
    """Most candidates of a search by time, which are these with tiles and tokens:

    17 of the grid, the best 3 on more samples, and 12 in two rounds of moves.
    """
    grid = len(_LEVELS) * (len(_ITEM_SHARES) + 1) + 2
    return grid + _FINALISTS + len(_MOVES) * (2 * len(request.limited) + 2)


def usual_samples_per_step(data_parallel: int, micro_batches: int) -> int:
    """Samples per step at 4.5 samples per pack, the middle of the range of the paper's rule."""
    return round(_USUAL_SAMPLES_PER_PACK * micro_batches * data_parallel)


def search_caps(
    request: CapSearchRequest, on_progress: Callable[[int], None], processes: int = 1
) -> CapSearch:
    """The caps of the least predicted time per sample, or those of the paper's rule.

    Of caps whose times differ by less than 0.3 % the smallest are chosen. Every sample fits.
    """
    space = cap_space(request, request.limited, request.fixed)
    left = max_candidates(request)

    def advance(done: int) -> None:
        nonlocal left
        left -= done
        on_progress(done)

    def trials(share: int) -> _CapTrials:
        drawn = request.drawn(share)
        work = partial(_evaluated, drawn)
        return _CapTrials(work=work, processes=processes, on_done=advance, lengths=drawn.lengths)

    if request.rule is CapRule.PAPER:
        search = _search_by_paper(request, trials(1), space.least)
    else:
        search = _search_by_time(trials(_COARSE_SHARE), trials(1), space)
    on_progress(left)
    if not search.candidates:
        raise UserError(_unusable(search.infeasible, space.least))
    return search


def notes(request: CapSearchRequest, search: CapSearch) -> list[str]:
    """Warnings about the caps that were found; a sentence each."""
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
    """Warning for packing by ISF where its default 10 iterations make more packs than 1; else None.

    ISF keeps packs that fill a cap and draws the rest again. Where few sets of samples fill a cap,
    they take the small samples that others would have needed, and what is left packs worse.
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
    """Caps by the rule of OmniBal's public code (arXiv 2407.20761), the best first.

    The tokens that go with a tile are estimated from the mean lengths (tokens rounded up to 256).
    From 4096 tokens and as many tiles as go with them, both caps move by one tile and its tokens,
    for as long as packs by ISF hold 4 to 5 samples on average. What is found is ranked by pad ratio
    plus dist ratios of vision and language over 8 ranks, one pack each. A pack is not padded, so
    its pad ratio is 0. Where nothing on the way has 4 to 5 samples, what comes nearest is all.
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
    """Sum of the vision and language dist ratios, with the packs in random order on every rank."""
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
    """Pack the drawn samples and predict the time at exactly the requested samples per step; why
    the caps cannot be used if they do not fit, or make fewer packs than ranks."""
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
    """Candidates evaluated on the same samples; those larger than caps that failed fail untried."""

    lengths: Lengths
    """Samples of the trials."""

    def ranked(self) -> list[Candidate]:
        """Candidates that can be used, the fastest first."""
        return sorted(self.found.values(), key=lambda candidate: candidate.ms_per_sample)

    @property
    def infeasible(self) -> dict[Caps, str]:
        """Why caps cannot be used, in the order in which that was found."""
        return {caps: str(error) for caps, error in self.failed.items()}

    def known(self, caps: Caps) -> UserError | None:
        for failed, reason in self.failed.items():
            if (caps.values >= failed.values).all():
                return reason
        return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CapSpace:
    """All caps that a search by time may come to; every sample fits the least of them."""

    items: dict[str, "_ItemAxis"]
    """Caps of every limited feature but tokens."""
    tokens: np.ndarray
    """Token caps, int64, ascending multiples of a power of two, up to 4 times the least."""
    of_tokens: Callable[[int], Caps] | None = None
    """Completes a cap of tokens, where that is the only one that limits packs."""

    @classmethod
    def of(
        cls, lengths: Lengths, names: Sequence[str], fixed: Mapping[str, int] | None = None
    ) -> "CapSpace":
        """Caps of these features that suit the samples of these lengths, and fixed caps of some."""
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
        """The smallest caps of the space."""
        return self._caps({name: int(caps[0]) for name, caps in self._axes().items()})

    def level(self, factor: float) -> list[Caps]:
        """The grid's caps with `factor` times the least tokens."""
        tokens = _nearest(self.tokens, factor * self.tokens[0])
        is_first = factor == _LEVELS[0]
        tried = [axis.level(tokens, is_first=is_first) for axis in self.items.values()]
        # All items move together: each alone would be too many.
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
    """All caps of these features that suit a comparison's samples and what its packs may be."""
    if not request.rules.tokens_alone:
        return CapSpace.of(request.lengths, names, fixed)
    of_tokens = partial(caps_of_tokens, request.lengths, names)
    return replace(CapSpace.of(request.lengths, ["tokens"], fixed), of_tokens=of_tokens)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ItemAxis:
    """Caps of one kind of items, such as tiles."""

    caps: np.ndarray
    """Caps, int64, ascending: the most items of a sample, and larger sums of common counts."""
    per_token: float
    """Items per token of all samples together."""
    main: int
    """Count of items whose samples have the most items in all; 1 without any."""

    @classmethod
    def of(cls, lengths: Lengths, name: str, most_tokens: int) -> "_ItemAxis":
        """Caps that suit the samples, at token caps up to `most_tokens`."""
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
        """Caps to try with a token cap, equally many for all kinds of items."""
        matched = tokens * self.per_token
        shares = _FIRST_ITEM_SHARES if is_first else _ITEM_SHARES
        wanted = [share * matched for share in shares]
        wanted.append(round(matched / self.main) * self.main)
        if is_first:
            wanted.append(self.caps[0])
        return [_nearest(self.caps, value) for value in wanted]


def _sums(parts: Sequence[int], most: int) -> np.ndarray:
    """All sums up to `most` of parts that may repeat, int64, ascending from 0."""
    reached = np.zeros(most + 1, bool)
    reached[0] = True
    for part in parts:
        times = part
        while times <= most:
            # So many of the part, and as many as before besides: after it, up to twice as many.
            reached[times:] |= reached[:-times]
            times *= 2
    return np.flatnonzero(reached)


def _nearest(axis: np.ndarray, value: float) -> int:
    return int(axis[np.abs(axis - value).argmin()])


def _moved(axis: np.ndarray, value: int, factor: float) -> int:
    """Entry nearest to `factor` times `value`, other than `value` unless that is the last."""
    old, new = (int(np.abs(axis - near).argmin()) for near in (value, value * factor))
    new = max(new, old + 1) if factor > 1 else min(new, old - 1)
    return int(axis[min(max(new, 0), len(axis) - 1)])


def _search_by_time(coarse: _CapTrials, fine: _CapTrials, space: CapSpace) -> CapSearch:
    _try_grid(coarse, space)
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


def _try_grid(trials: _CapTrials, space: CapSpace) -> None:
    """Try small caps first; stop where larger ones do not fit or take clearly longer."""
    best_ms = math.inf
    for factor in _LEVELS:
        level = space.level(factor)
        trials.run(level)
        level_ms = [trials.found[caps].ms_per_sample for caps in level if caps in trials.found]
        if not level_ms or min(level_ms) > _CLEARLY_WORSE * best_ms:
            return
        best_ms = min(best_ms, *level_ms)


def _smallest_tie_first(ranked: list[Candidate], least: Caps) -> list[Candidate]:
    """Candidates with the smallest of those that tie with the best moved to the front."""

    def size(candidate: Candidate) -> float:
        return sum(candidate.caps[name] / least[name] for name in least.names)

    ties = [each for each in ranked if each.ms_per_sample <= (1 + _TIE) * ranked[0].ms_per_sample]
    chosen = min(ties, key=size)
    return [chosen, *(each for each in ranked if each is not chosen)]


def _search_by_paper(request: CapSearchRequest, trials: _CapTrials, least: Caps) -> CapSearch:
    """Candidates of the paper's rule, in its order; predicted times are for information only."""
    ranked = paper_caps(trials.lengths, least, request.settings.seed)[:_PAPER_CANDIDATES]
    trials.run(ranked)
    candidates = tuple(trials.found[caps] for caps in ranked if caps in trials.found)
    return CapSearch(candidates=candidates, infeasible=trials.infeasible, is_largest=False)
