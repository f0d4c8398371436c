"""Search for the data-parallel encoder placement together with the pipeline's stages.

Choices: encoding group size (divisors of DP), shards of encoder weights, items per pass (powers of
two), and items with kept activations (a grid, by time saved per byte). A choice fixes the
pipeline's waits, the update and the memory left for stages; `omnibal.pipeline.partition` then finds
split and recomputation. More encoder memory never speeds up the pipeline, so a bound holds for all
choices that leave no more memory. Choices are searched in order of their bounds until none can be
faster. Only choices on the grid are proven.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from omnibal.base.errors import DoesNotFit
from omnibal.cost.encoder_phase import EncodersCost
from omnibal.cost.model import CostModel
from omnibal.model.config import ModelConfig
from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.model.units import ENCODER_WAITS_MS
from omnibal.pipeline.encoder_waits import (
    ItemShares,
    features_exchange_ms,
    memory_of_encoders,
    pipeline_waits_ms,
    with_encoders,
)
from omnibal.pipeline.encoding import EncoderMemory
from omnibal.pipeline.least_peak import least_peak_of_splits
from omnibal.pipeline.partition import SearchResult, estimated_step_ms, sampled_steps, search_stages
from omnibal.pipeline.stage_memory import GIB, fits_cap
from omnibal.pipeline.workload import Workload

_KEPT_CHOICES = 12
"""Max numbers of kept items tried between none and all."""
_FEW_KEPT_CHOICES = 4
"""`_KEPT_CHOICES` for whole-sample encoders, which are slow to deal, in a reduced search; it also
tries every other pass size only."""
_MOST_ITEMS_OF_PASS = 64  # max pass size of encoders, tried by doubling
_CELLS_OF_PASS = 256
"""Whole-sample pass size per equal item: 1,024 patches of four, as in an InternVL tile."""
_MAX_SEARCHES = 48
"""Max choices with a stage search."""
_TOLERANCE = 1e-9  # relative gain required of a better choice
_DIGITS = 6
"""Decimals of item times in a plan."""
_DIGITS_OF_SQUARE = 12  # as `_DIGITS`, for squares of thousands of items per image


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacementProblem:
    """A pipeline without encoders, and costs of data-parallel encoders."""

    cost: CostModel
    """Costs of the pipeline's units (`omnibal.cost.encoder_phase.pipeline_cost`) at all levels,
    with the shortest encoder update."""
    features: tuple[str, ...]
    """Feature names of the workload."""
    model: ModelConfig
    """The pipeline's model, without encoders."""
    encoders: Mapping[int, EncodersCost]
    """Costs of encoders by the number of weight shards, otherwise equal."""
    workload: Workload
    memory_cap_bytes: float

    @property
    def stages(self) -> int:
        return self.any_encoders.parallel.pipeline

    @property
    def any_encoders(self) -> EncodersCost:
        """Encoder costs, for use independent of sharding."""
        return next(iter(self.encoders.values()))

    def with_encoders(self, beside: DataParallelEncoders) -> Workload:
        """Add data-parallel encoders to the workload."""
        encoders = self.encoders[beside.sharded]
        return with_encoders(self.workload, self.features, encoders, beside)

    def more_update_ms(self, sharded: int) -> float:
        """Return the extra update time if `sharded` ranks shard encoder weights."""
        shortest_ms = min(each.update_ms for each in self.encoders.values())
        return self.encoders[sharded].update_ms - shortest_ms

    def cost_beside(self, beside: DataParallelEncoders) -> CostModel:
        """Return the pipeline's costs including the encoders' update."""
        more_ms = self.more_update_ms(beside.sharded)
        return replace(self.cost, optimizer_ms_fixed=self.cost.optimizer_ms_fixed + more_ms)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderSearch:
    """The best choice found and its stage search."""

    beside: DataParallelEncoders
    search: SearchResult
    """Bound over all tried choices and their stages, on the grid of kept items."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Choice:
    """One way to run encoders."""

    beside: DataParallelEncoders
    encoder_memory: EncoderMemory
    waits_ms: np.ndarray
    """Pipeline waits before and after, with the longer update, [S, ranks, 2]."""

    def shortest_ms(self) -> float:
        """Mean step time with zero pipeline time."""
        return float(self.waits_ms.max(axis=1).sum(axis=1).mean())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Bound:
    """Lower bound for given encoder memory and waits."""

    encoder_memory: EncoderMemory
    waits_ms: np.ndarray
    step_ms: float
    """Lower bound on the step, infinite if no stages fit."""

    def of(self, choice: _Choice) -> float:
        """Return the lower bound for a choice, or 0 if none follows.

        A step shrinks at most by the reduction of its pipelines' waits. In lockstep it may begin
        with one pipeline's wait and end with another's.
        """
        if not self.encoder_memory.is_within(choice.encoder_memory):
            return 0.0
        less_ms = np.maximum(self.waits_ms - choice.waits_ms, 0).max(axis=1).sum(axis=1)
        return self.step_ms - float(less_ms.mean())


def search_encoders(problem: PlacementProblem, effort: float = 1.0) -> EncoderSearch:
    """Return the best choice and stages found, and the proven bound; `effort` is the share of the
    usual number of choices and of stage search work."""
    choices = _choices(problem, effort)
    best: EncoderSearch | None = None
    of_all, simulated = _bound_of_all(problem, choices, effort), 0
    proven_ms = np.array([of_all.of(choice) for choice in choices])
    is_open = np.ones(len(choices), bool)
    for searches in range(_MAX_SEARCHES):
        if best is not None and searches >= effort * _MAX_SEARCHES:
            break
        best_ms = np.inf if best is None else best.search.step_ms
        number = int(np.where(is_open, proven_ms, np.inf).argmin())
        if not is_open[number] or proven_ms[number] >= best_ms * (1 - _TOLERANCE):
            break
        choice, is_open[number] = choices[number], False
        found = _searched(problem, choice, effort)
        if found is not None:
            simulated += found.search.simulated
            best = found if found.search.step_ms < best_ms else best
        proven_ms[number] = np.inf if found is None else found.search.lower_bound_ms
        bound = _Bound(
            encoder_memory=choice.encoder_memory,
            waits_ms=choice.waits_ms,
            step_ms=proven_ms[number],
        )
        for other in np.flatnonzero(is_open):
            proven_ms[other] = max(proven_ms[other], bound.of(choices[other]))
    if best is None:
        raise _too_large(problem)
    search = replace(
        best.search,
        lower_bound_ms=min(float(proven_ms.min()), best.search.step_ms),
        simulated=simulated,
    )
    return replace(best, search=search)


def estimated_step_ms_beside(problem: PlacementProblem, effort: float) -> float:
    """Estimate the step with the shortest waits that leave memory for a split; proves nothing."""
    for choice in sorted(_choices(problem, effort), key=_Choice.shortest_ms):
        try:
            return estimated_step_ms(
                problem.cost_beside(choice.beside),
                problem.model,
                problem.with_encoders(choice.beside),
                problem.stages,
                problem.memory_cap_bytes,
                effort=effort,
            )
        except DoesNotFit:
            continue
    raise _too_large(problem)


def _searched(problem: PlacementProblem, choice: _Choice, effort: float) -> EncoderSearch | None:
    """Return the best stages for a choice, or None if none fit."""
    workload = problem.with_encoders(choice.beside)
    try:
        search = search_stages(
            problem.cost_beside(choice.beside),
            problem.model,
            workload,
            problem.stages,
            problem.memory_cap_bytes,
            effort=effort,
        )
    except DoesNotFit:
        return None
    return EncoderSearch(beside=choice.beside, search=search)


def _bound_of_all(problem: PlacementProblem, choices: Sequence[_Choice], effort: float) -> _Bound:
    """Return a bound for all choices, from their min memory and max waits."""
    names = [each.name for each in fields(EncoderMemory)]
    encoder_memory = EncoderMemory(
        **{name: min(getattr(choice.encoder_memory, name) for choice in choices) for name in names}
    )
    waits_ms = np.max([choice.waits_ms for choice in choices], axis=0)  # [S, ranks, 2]
    workload = problem.workload
    is_first = workload.slot == 0
    is_last = np.append(is_first[1:], True)
    sampled = np.isin(workload.step, sampled_steps(workload).step)
    place = np.cumsum(sampled & (np.diff(workload.step, prepend=-1) > 0)) - 1
    values, rank = workload.features.copy(), workload.dp_rank
    for column, (is_end, feature) in enumerate(
        zip((is_first, is_last), ENCODER_WAITS_MS, strict=True)
    ):
        rows = np.flatnonzero(sampled & is_end)
        index = problem.features.index(feature)
        values[rows, index] = waits_ms[place[rows], rank[rows], column]
    encoding = problem.with_encoders(next(_smallest(problem))).encoding
    assert encoding is not None
    search = search_stages(
        problem.cost,
        problem.model,
        replace(
            workload, features=values, encoding=replace(encoding, encoder_memory=encoder_memory)
        ),
        problem.stages,
        problem.memory_cap_bytes,
        effort=effort,
    )
    return _Bound(encoder_memory=encoder_memory, waits_ms=waits_ms, step_ms=search.lower_bound_ms)


def _too_large(problem: PlacementProblem) -> DoesNotFit:
    need, cap = least_peak_with_encoders(problem) / GIB, problem.memory_cap_bytes / GIB
    is_whole = [*problem.encoders] == [1]
    held, also = ("a whole copy", "give --sharding auto, ") if is_whole else ("a part", "")
    return DoesNotFit(
        f"{problem.model.name} on {problem.stages} pipeline stages with data-parallel encoders "
        f"needs {need:.2f} GiB per device at best, with recomputation where it helps: "
        f"{need - cap:.2f} GiB more than the memory cap of {cap:.2f} GiB, which must hold every "
        f"stage and {held} of the encoders",
        "raise the memory cap, use more pipeline stages or tensor parallelism, pack to smaller "
        f"caps, {also}or give --encoder pipeline",
    )


def least_peak_with_encoders(problem: PlacementProblem) -> float:
    """Return the min memory cap in bytes that some choice and split fit."""
    left = list[Workload]()
    for beside in _smallest(problem):
        workload = problem.with_encoders(beside)
        if not any(_taken(each).is_within(_taken(workload)) for each in left):
            left = [each for each in left if not _taken(workload).is_within(_taken(each))]
            left.append(workload)
    return min(
        least_peak_of_splits(problem.cost, problem.model, workload, problem.stages)
        for workload in left
    )


def _taken(workload: Workload) -> EncoderMemory:
    assert workload.encoding is not None
    return workload.encoding.encoder_memory


def _smallest(problem: PlacementProblem) -> Iterator[DataParallelEncoders]:
    """Yield the choice with min memory for every group size and sharding."""
    for pipelines in _group_sizes(problem):
        for sharded in problem.encoders:
            yield _beside(problem, pipelines, _sizes(problem, 1), sharded)


def _group_sizes(problem: PlacementProblem) -> list[int]:
    size = problem.workload.data_parallel_size
    return [pipelines for pipelines in range(1, size + 1) if size % pipelines == 0]


def _choices(problem: PlacementProblem, effort: float) -> list[_Choice]:
    """Return choices that leave memory for the pipeline; raise DoesNotFit if there are none."""
    are_few = effort < 1 and any(
        one.is_of_samples for one in problem.any_encoders.encoders.values()
    )
    workload = problem.with_encoders(next(_smallest(problem)))
    assert workload.encoding is not None
    # Pipeline features do not depend on the encoding ranks.
    features = EncoderMemory(features=_taken(workload).features)
    alone = replace(workload, encoding=replace(workload.encoding, encoder_memory=features))
    # The fullest stage without encoders, over all splits.
    least = least_peak_of_splits(problem.cost, problem.model, alone, problem.stages)
    choices = list(_choices_within(problem, least, are_few=are_few))
    if not choices:
        raise _too_large(problem)
    return choices


def _choices_within(
    problem: PlacementProblem, least_bytes: float, *, are_few: bool
) -> Iterator[_Choice]:
    """Yield choices that leave `least_bytes` for the pipeline, a subset if `are_few`."""
    most_kept, step = (_FEW_KEPT_CHOICES, 2) if are_few else (_KEPT_CHOICES, 1)
    cap_bytes = problem.memory_cap_bytes
    sample, any_encoders = sampled_steps(problem.workload), problem.any_encoders
    steps, place = np.unique(sample.step, return_inverse=True)
    has_rows = np.zeros((len(steps), sample.data_parallel_size, 1))
    has_rows[place, sample.dp_rank] = 1
    for pipelines in _group_sizes(problem):
        # Many groups exceed the cap by their buffers alone.
        ways = {
            sharded: encoders
            for sharded, encoders in problem.encoders.items()
            if fits_cap(
                encoders.state_bytes + encoders.buffers_bytes(pipelines) + least_bytes, cap_bytes
            )
        }
        if not ways:
            continue
        in_least_passes = _shares(problem, problem.workload, pipelines, _sizes(problem, 1))
        for largest in _passes(problem, in_least_passes)[::step]:
            sizes, shares = _sizes(problem, largest), in_least_passes
            if largest > 1:
                shares = _shares(problem, problem.workload, pipelines, sizes)
            of_sample = _shares(problem, sample, pipelines, sizes)
            exchanges_ms = {
                sharded: [features_exchange_ms(of_sample, each, is_back=b) for b in (False, True)]
                for sharded, each in ways.items()
            }
            for kept in kept_choices(any_encoders, shares.most(), most_kept):
                for sharded, encoders in ways.items():
                    beside = _beside(problem, pipelines, sizes, sharded, kept)
                    encoder_memory = memory_of_encoders(shares, encoders, beside)
                    besides = max(encoder_memory.encoding, least_bytes)
                    if fits_cap(encoder_memory.held + besides, cap_bytes):
                        exchange_ms = exchanges_ms[sharded]
                        waits_ms = pipeline_waits_ms(of_sample, encoders, beside, exchange_ms)
                        waits_ms *= has_rows
                        waits_ms[..., 1] += problem.more_update_ms(sharded)
                        yield _Choice(
                            beside=beside, encoder_memory=encoder_memory, waits_ms=waits_ms
                        )


def _shares(
    problem: PlacementProblem, workload: Workload, pipelines: int, items_per_pass: Mapping[str, int]
) -> ItemShares:
    """Return the shares of a workload's items, for any sharding."""
    beside = _beside(problem, pipelines, items_per_pass, 1)
    return ItemShares.of(workload, problem.features, problem.any_encoders, beside)


def _sizes(problem: PlacementProblem, largest: int) -> dict[str, int]:
    """Return items per pass of every encoder for `largest` equal items."""
    return {
        name: largest * (_CELLS_OF_PASS if one.is_of_samples else 1)
        for name, one in problem.any_encoders.encoders.items()
    }


def _passes(problem: PlacementProblem, shares: ItemShares) -> list[int]:
    """Return pass sizes to try, from 1 to the max items of a rank."""
    one, most = _sizes(problem, 1), shares.most()
    largest = max([1, *(-(-most[name] // one[name]) for name in one)])
    sizes = [1]
    while sizes[-1] < min(largest, _MOST_ITEMS_OF_PASS):
        sizes.append(2 * sizes[-1])
    return sizes


def kept_choices(
    cost: EncodersCost, most: Mapping[str, int], choices: int = _KEPT_CHOICES
) -> list[dict[str, int]]:
    """Return at most `choices` numbers of kept items by encoder in addition to none, up to `most`,
    by time saved per byte."""
    trained = [name for name, one in cost.encoders.items() if one.is_trained]
    saved = {
        name: cost.encoders[name].again_ms[1] / max(cost.encoders[name].kept_bytes[1], 1.0)
        for name in trained
    }
    order = sorted(trained, key=lambda name: -saved[name])
    starts = dict(
        zip(order, np.cumsum([0, *(most[name] for name in order)]).tolist(), strict=False)
    )
    total = sum(most[name] for name in order)
    ends = np.unique(np.linspace(0, total, choices + 1).round().astype(int)).tolist()
    return [
        {
            name: min(max(end - starts[name], 0), most[name]) if name in starts else 0
            for name in cost.encoders
        }
        for end in ends
    ]


def _beside(
    problem: PlacementProblem,
    pipelines: int,
    items_per_pass: Mapping[str, int],
    sharded: int,
    kept_items: Mapping[str, int] | None = None,
) -> DataParallelEncoders:
    """Return a way to run encoders; keeps no items by default."""
    encoders = problem.any_encoders
    item_ms, square_ms = encoders.item_ms(items_per_pass), encoders.square_ms
    return DataParallelEncoders(
        pipelines=pipelines,
        items_per_pass=dict(items_per_pass),
        kept_items=dict(kept_items or dict.fromkeys(items_per_pass, 0)),
        item_ms={name: round(ms, _DIGITS) for name, ms in item_ms.items()},
        square_ms={name: round(ms, _DIGITS_OF_SQUARE) for name, ms in square_ms.items()},
        sharded=sharded,
    )
