"""Search for how data-parallel encoders run, together with the pipeline's stages.

Choices are the size of encoding groups (every divisor of the data-parallel size), the ranks that
divide the encoders' weights (of the costs that are given), the items of a pass (powers of two) and
the items whose activations are kept (a grid from none to all). A choice decides what every pipeline
waits for, the update of weights, and the memory that is left to its stages, for which
`omnibal.pipeline.partition` then finds the best split and recomputation. Of several encoders, items
that save most time for their memory are kept first.

The more memory a choice takes the slower the pipeline can only be. So a pipeline's bound beside one
choice holds beside all that leave no more memory, and with a choice's own waits and update it
bounds the step.
Choices are searched in the order of these bounds until none is left that may be faster. What is
proven is of the choices on the grid: a number of kept items between two of them may be faster.
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
from omnibal.pipeline.encoder_waits import ItemShares, memory_of_encoders, with_encoders
from omnibal.pipeline.encoding import EncoderMemory
from omnibal.pipeline.least_peak import least_peak_of_splits
from omnibal.pipeline.partition import (
    SearchResult,
    estimated_step_ms,
    sampled_steps,
    search_stages,
)
from omnibal.pipeline.stage_memory import GIB, fits_cap
from omnibal.pipeline.workload import Workload

_KEPT_CHOICES = 12
"""Most numbers of kept items that are tried between none and all."""
_FEW_KEPT_CHOICES = 4
"""Most numbers of kept items between none and all, of encoders that take whole samples, which take
long to deal, in a search of less than the usual effort; it tries every other size of a pass too."""
_MOST_ITEMS_OF_PASS = 64  # tried as the size of a pass of encoders, by doubling
_CELLS_OF_PASS = 256
"""Items of whole samples for one of equal items in the size of a pass: 1,024 patches of four, which
is what a tile of InternVL has."""
_MAX_SEARCHES = 48
"""Most choices for which stages are searched."""
_TOLERANCE = 1e-9  # relative, by which a choice must be better
_DIGITS = 6
"""Decimals of an item's time in a plan."""
_DIGITS_OF_SQUARE = 12  # of thousands of items in an image, the same decimals of their time


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacementProblem:
    """A pipeline without encoders, and what data-parallel encoders cost."""

    cost: CostModel
    """Costs of the pipeline's units (`omnibal.cost.encoder_phase.pipeline_cost`), of all levels,
    with the shortest of the updates of encoders' weights."""
    features: tuple[str, ...]
    """Names of the workload's features."""
    model: ModelConfig
    """The model whose units the pipeline runs, without encoders."""
    encoders: Mapping[int, EncodersCost]
    """Costs of encoders by how many ranks divide their weights, as many as may be chosen; they
    differ in nothing else."""
    workload: Workload
    """Without encoders."""
    memory_cap_bytes: float

    @property
    def stages(self) -> int:
        """Pipeline size."""
        return self.any_encoders.parallel.pipeline

    @property
    def any_encoders(self) -> EncodersCost:
        """Costs of encoders, for what does not depend on who holds their weights."""
        return next(iter(self.encoders.values()))

    def with_encoders(self, beside: DataParallelEncoders) -> Workload:
        """The workload with data-parallel encoders."""
        encoders = self.encoders[beside.sharded]
        return with_encoders(self.workload, self.features, encoders, beside)

    def more_update_ms(self, sharded: int) -> float:
        """Time by which the update takes longer than the shortest where so many ranks divide the
        weights of encoders."""
        shortest_ms = min(each.update_ms for each in self.encoders.values())
        return self.encoders[sharded].update_ms - shortest_ms

    def cost_beside(self, beside: DataParallelEncoders) -> CostModel:
        """Costs of the pipeline's units, with the update of encoders that are so divided."""
        more_ms = self.more_update_ms(beside.sharded)
        return replace(self.cost, optimizer_ms_fixed=self.cost.optimizer_ms_fixed + more_ms)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderSearch:
    """The best choice that was found, with the search for its stages."""

    beside: DataParallelEncoders
    search: SearchResult
    """Its bound is over all choices that are tried, and all their stages: of the items that are
    kept, over `_KEPT_CHOICES` + 1 numbers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Choice:
    """A way to run encoders."""

    beside: DataParallelEncoders
    encoder_memory: EncoderMemory
    waits_ms: np.ndarray
    """Waits of every pipeline before and after it in the sampled steps, [S, ranks, 2]; what comes
    after it with the longer update, as if it were a wait."""

    def shortest_ms(self) -> float:
        """Mean time of a step whose pipelines took none."""
        return float(self.waits_ms.max(axis=1).sum(axis=1).mean())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Bound:
    """What is proven of all stages beside encoders that take this memory and wait so long."""

    encoder_memory: EncoderMemory
    waits_ms: np.ndarray
    step_ms: float
    """Lower bound on the step; infinite where no stages fit."""

    def of(self, choice: _Choice) -> float:
        """Lower bound on the step of a choice; 0 where nothing follows for it.

        A step is shortened by no more than what its pipelines wait less; in lockstep it may begin
        with the wait of one and end with that of another.
        """
        if not self.encoder_memory.is_within(choice.encoder_memory):
            return 0.0
        less_ms = np.maximum(self.waits_ms - choice.waits_ms, 0).max(axis=1).sum(axis=1)
        return self.step_ms - float(less_ms.mean())


def search_encoders(problem: PlacementProblem, effort: float = 1.0) -> EncoderSearch:
    """The choice and stages of least simulated step time, and what is proven of them.

    Args:
        effort: share of the usual choices that are searched, and of the search for their stages.
    """
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
    """Simulated step time of a good split beside the choice of shortest waits that leaves room for
    one, in a fraction of what `search_encoders` takes: nothing is proven."""
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
    """The best stages beside a choice; None if none fit."""
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
    """A bound for all choices: the pipeline beside one that takes as little memory as any, and
    waits as long as any."""
    names = [each.name for each in fields(EncoderMemory)]
    encoder_memory = EncoderMemory(
        **{name: min(getattr(choice.encoder_memory, name) for choice in choices) for name in names}
    )
    waits_ms = np.max([choice.waits_ms for choice in choices], axis=0)
    search = search_stages(
        problem.cost,
        problem.model,
        _with_waits(problem, encoder_memory, waits_ms),
        problem.stages,
        problem.memory_cap_bytes,
        effort=effort,
    )
    return _Bound(encoder_memory=encoder_memory, waits_ms=waits_ms, step_ms=search.lower_bound_ms)


def _with_waits(
    problem: PlacementProblem, encoder_memory: EncoderMemory, waits_ms: np.ndarray
) -> Workload:
    """The workload with waits of its sampled steps, [S, ranks, 2], and memory that is taken."""
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
    return replace(
        workload, features=values, encoding=replace(encoding, encoder_memory=encoder_memory)
    )


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
    """Bytes of the smallest memory cap that some choice and split fit."""
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
    """For every size of groups and way to hold weights, the choice that takes least memory."""
    for pipelines in _group_sizes(problem):
        for sharded in problem.encoders:
            yield _beside(problem, pipelines, _sizes(problem, 1), sharded)


def _group_sizes(problem: PlacementProblem) -> list[int]:
    size = problem.workload.data_parallel_size
    return [pipelines for pipelines in range(1, size + 1) if size % pipelines == 0]


def _choices(problem: PlacementProblem, effort: float) -> list[_Choice]:
    """All choices that leave room for the pipeline, as far as what they hold alone tells; raises
    DoesNotFit without any."""
    are_few = effort < 1 and any(
        one.is_of_samples for one in problem.any_encoders.encoders.values()
    )
    choices = list(_choices_within(problem, _least_beside(problem), are_few=are_few))
    if not choices:
        raise _too_large(problem)
    return choices


def _least_beside(problem: PlacementProblem) -> float:
    """Bytes that the fullest stage takes at least besides what encoders hold, over all splits."""
    workload = problem.with_encoders(next(_smallest(problem)))
    assert workload.encoding is not None
    # A pipeline has as many features whoever encodes its items.
    features = EncoderMemory(features=_taken(workload).features)
    alone = replace(workload, encoding=replace(workload.encoding, encoder_memory=features))
    return least_peak_of_splits(problem.cost, problem.model, alone, problem.stages)


def _choices_within(
    problem: PlacementProblem, least_bytes: float, *, are_few: bool
) -> Iterator[_Choice]:
    """Choices that leave room for so many bytes besides what they hold; if few, some of the usual
    ones."""
    most_kept, step = (_FEW_KEPT_CHOICES, 2) if are_few else (_KEPT_CHOICES, 1)
    cap_bytes = problem.memory_cap_bytes
    sample, any_encoders = sampled_steps(problem.workload), problem.any_encoders
    for pipelines in _group_sizes(problem):
        # Many groups are too large for their buffers alone.
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
            for kept in kept_choices(any_encoders, shares.most(), most_kept):
                for sharded, encoders in ways.items():
                    beside = _beside(problem, pipelines, sizes, sharded, kept)
                    encoder_memory = memory_of_encoders(shares, encoders, beside)
                    besides = max(encoder_memory.encoding, least_bytes)
                    if fits_cap(encoder_memory.held + besides, cap_bytes):
                        waits_ms = _waits_of(problem, sample, beside, of_sample)
                        yield _Choice(
                            beside=beside, encoder_memory=encoder_memory, waits_ms=waits_ms
                        )


def _shares(
    problem: PlacementProblem, workload: Workload, pipelines: int, items_per_pass: Mapping[str, int]
) -> ItemShares:
    """Shares of a workload's items, whoever holds weights."""
    beside = _beside(problem, pipelines, items_per_pass, 1)
    return ItemShares.of(workload, problem.features, problem.any_encoders, beside)


def _sizes(problem: PlacementProblem, largest: int) -> dict[str, int]:
    """Items of a pass of every encoder, where one of equal items has so many."""
    return {
        name: largest * (_CELLS_OF_PASS if one.is_of_samples else 1)
        for name, one in problem.any_encoders.encoders.items()
    }


def _passes(problem: PlacementProblem, shares: ItemShares) -> list[int]:
    """Sizes of a pass that are tried, from 1 up to what any rank has."""
    one, most = _sizes(problem, 1), shares.most()
    largest = max([1, *(-(-most[name] // one[name]) for name in one)])
    sizes = [1]
    while sizes[-1] < min(largest, _MOST_ITEMS_OF_PASS):
        sizes.append(2 * sizes[-1])
    return sizes


def kept_choices(
    cost: EncodersCost, most: Mapping[str, int], choices: int = _KEPT_CHOICES
) -> list[dict[str, int]]:
    """Numbers of kept items by encoder that are tried, at most `choices` besides none: up to all
    that a rank may have. Items that save the most time for their memory come first."""
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
    """A way to run encoders; without kept items, one that keeps none."""
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


def _waits_of(
    problem: PlacementProblem, sample: Workload, beside: DataParallelEncoders, shares: ItemShares
) -> np.ndarray:
    """Waits of every pipeline of the sampled steps before and after it, and for the longer update,
    [S, ranks, 2]."""
    encoders, features = problem.encoders[beside.sharded], problem.features
    workload = with_encoders(sample, features, encoders, beside, shares)
    columns = [features.index(name) for name in ENCODER_WAITS_MS]
    _, step = np.unique(workload.step, return_inverse=True)
    waits_ms = np.zeros((int(step[-1]) + 1, workload.data_parallel_size, len(columns)))
    np.add.at(waits_ms, (step, workload.dp_rank), workload.features[:, columns])
    waits_ms[..., 1] += problem.more_update_ms(beside.sharded)
    return waits_ms
