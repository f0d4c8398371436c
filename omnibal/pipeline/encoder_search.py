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
from omnibal.cost.encoder_phase_costs import EncodersCost
from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.model.units import ENCODER_WAITS_MS
from omnibal.pipeline.encoder_loads import EncoderMemory
from omnibal.pipeline.encoder_waits import (
    ItemShares,
    features_exchange_ms,
    memory_of_encoders,
    pipeline_waits_ms,
    waits_at_ends,
    with_encoders,
)
from omnibal.pipeline.least_peak import min_peak_of_splits
from omnibal.pipeline.partition import SearchResult, estimated_step_ms, sampled_steps, search_stages
from omnibal.pipeline.split_task import SplitTask, memory_error
from omnibal.pipeline.stage_memory import fits_cap
from omnibal.pipeline.workload import Workload

_MAX_KEPT_CHOICES = 12  # max numbers of kept items tried besides none
_MAX_FEW_KEPT_CHOICES = 4  # in a reduced search of whole-sample encoders, which are slow to deal
_MAX_ITEMS_OF_PASS = 64  # max pass size of encoders, tried by doubling
_CELLS_OF_PASS = 256  # cells of 4 patches per equal item: 1,024 patches, an InternVL tile
_MAX_SEARCHES = 48  # max choices with a stage search
_MIN_CHOICE_GAIN = 1e-9  # relative gain required of a better choice
_ITEM_MS_DECIMALS = 6  # decimals of item times in a plan
_SQUARE_MS_DECIMALS = 12  # as `_ITEM_MS_DECIMALS`, for squares of thousands of items per image


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacementProblem:
    """A pipeline without encoders, and costs of data-parallel encoders."""

    # Costs are of the pipeline's units (`omnibal.cost.encoder_phase_costs.pipeline_cost`), with the
    # shortest encoder update.
    task: SplitTask
    features: tuple[str, ...]  # feature names of the workload
    encoders: Mapping[int, EncodersCost]  # by the number of weight shards, otherwise equal

    @property
    def any_encoders(self) -> EncodersCost:
        """Encoder costs, for use independent of sharding."""
        return next(iter(self.encoders.values()))

    def with_encoders(self, dp_encoders: DataParallelEncoders) -> Workload:
        """Return the workload with data-parallel encoders."""
        encoders = self.encoders[dp_encoders.sharded]
        return with_encoders(self.task.workload, self.features, encoders, dp_encoders)

    def more_update_ms(self, sharded: int) -> float:
        """Return the extra update time if `sharded` ranks shard encoder weights."""
        shortest_ms = min(cost.update_ms for cost in self.encoders.values())
        return self.encoders[sharded].update_ms - shortest_ms

    def make_stage_task(self, dp_encoders: DataParallelEncoders) -> SplitTask:
        """Return the stage search with the encoders' update, waits and memory."""
        cost = self.task.cost
        update_ms = cost.optimizer_ms_fixed + self.more_update_ms(dp_encoders.sharded)
        cost = replace(cost, optimizer_ms_fixed=update_ms)
        return replace(self.task, cost=cost, workload=self.with_encoders(dp_encoders))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Choice:
    """A way to run encoders, or bounds of memory and waits of several."""

    dp_encoders: DataParallelEncoders
    encoder_memory: EncoderMemory
    waits_ms: np.ndarray  # pipeline waits before and after, with the longer update, [S, ranks, 2]

    def bound_ms(self, step_ms: float, other: "_Choice") -> float:
        """Return a lower bound on the step of another choice, given that of this one (infinite if
        no stages fit), or 0 if none follows.

        A step shrinks at most by the reduction of its pipelines' waits. In lockstep it may begin
        with one pipeline's wait and end with another's.
        """
        if not self.encoder_memory.is_within(other.encoder_memory):
            return 0.0
        less_ms = np.maximum(self.waits_ms - other.waits_ms, 0).max(axis=1).sum(axis=1)  # [S]
        return step_ms - float(less_ms.mean())


def search_encoders(
    problem: PlacementProblem, effort: float = 1.0
) -> tuple[DataParallelEncoders, SearchResult]:
    """Return the best choice and its stages, with a bound over all choices on the grid; `effort` is
    the share of the usual number of choices and of stage search work. Raise DoesNotFit if no choice
    fits."""
    choices = _make_choices(problem, effort)
    best: tuple[DataParallelEncoders, SearchResult] | None = None
    proven_ms = _first_bounds_ms(problem, choices, effort)
    is_open = np.ones(len(choices), bool)
    for searches in range(_MAX_SEARCHES):
        if best is not None and searches >= effort * _MAX_SEARCHES:
            break
        best_ms = np.inf if best is None else best[1].step_ms
        number = int(np.where(is_open, proven_ms, np.inf).argmin())
        if not is_open[number] or proven_ms[number] >= best_ms * (1 - _MIN_CHOICE_GAIN):
            break
        choice, is_open[number] = choices[number], False
        try:
            search = search_stages(problem.make_stage_task(choice.dp_encoders), effort=effort)
        except DoesNotFit:
            proven_ms[number] = np.inf
        else:
            proven_ms[number] = search.lower_bound_ms
            if search.step_ms < best_ms:
                best = choice.dp_encoders, search
        for other in np.flatnonzero(is_open):
            bound_ms = choice.bound_ms(proven_ms[number], choices[other])
            proven_ms[other] = max(proven_ms[other], bound_ms)
    if best is None:
        raise _no_placement_error(problem)
    dp_encoders, search = best
    lower_bound_ms = min(float(proven_ms.min()), search.step_ms)
    return dp_encoders, replace(search, lower_bound_ms=lower_bound_ms)


def estimate_placement(
    problem: PlacementProblem, effort: float
) -> tuple[DataParallelEncoders, float]:
    """Return the encoders with the shortest waits whose memory fits, and the estimated step ms."""
    choices = _make_choices(problem, effort)
    waits_ms = [choice.waits_ms.max(axis=1).sum(axis=1).mean() for choice in choices]
    for index in np.argsort(waits_ms, kind="stable").tolist():
        dp_encoders = choices[index].dp_encoders
        try:
            return dp_encoders, estimated_step_ms(problem.make_stage_task(dp_encoders), effort)
        except DoesNotFit:
            continue
    raise _no_placement_error(problem)


def _first_bounds_ms(
    problem: PlacementProblem, choices: Sequence[_Choice], effort: float
) -> np.ndarray:
    """Return a lower bound for every choice, from the min memory and max waits of all. [choices]"""
    names = [column.name for column in fields(EncoderMemory)]
    encoder_memory = EncoderMemory(
        **{name: min(getattr(choice.encoder_memory, name) for choice in choices) for name in names}
    )
    waits_ms = np.max([choice.waits_ms for choice in choices], axis=0)  # [S, ranks, 2]
    dp_encoders = next(_smallest_choices(problem))
    workload = problem.with_encoders(dp_encoders)
    assert workload.encoding is not None
    values, steps = workload.features.copy(), np.unique(sampled_steps(workload).step)
    columns = [problem.features.index(name) for name in ENCODER_WAITS_MS]
    values[:, columns] = waits_at_ends(workload, steps, waits_ms)
    encoding = replace(workload.encoding, encoder_memory=encoder_memory)
    bounding = replace(workload, features=values, encoding=encoding)
    search = search_stages(replace(problem.task, workload=bounding), effort=effort)
    of_all = _Choice(dp_encoders=dp_encoders, encoder_memory=encoder_memory, waits_ms=waits_ms)
    return np.array([of_all.bound_ms(search.lower_bound_ms, choice) for choice in choices])


def _no_placement_error(problem: PlacementProblem) -> DoesNotFit:
    also = "give --sharding auto, " if [*problem.encoders] == [1] else ""
    return memory_error(
        problem.task,
        "with data-parallel encoders ",
        min_peak_with_encoders(problem)[0],
        "raise the memory cap, use more pipeline stages or tensor parallelism, pack to smaller "
        f"caps, {also}or give --encoder pipeline",
    )


def min_peak_with_encoders(problem: PlacementProblem) -> tuple[float, DataParallelEncoders]:
    """Return the min memory cap in bytes that some choice and split fit, and that choice."""
    # Search splits for the Pareto-minimal choices by encoder memory only.
    minimal = list[tuple[EncoderMemory, Workload, DataParallelEncoders]]()
    for dp_encoders in _smallest_choices(problem):
        workload = problem.with_encoders(dp_encoders)
        memory = workload.encoder_memory
        if not any(other.is_within(memory) for other, *_ in minimal):
            minimal = [choice for choice in minimal if not memory.is_within(choice[0])]
            minimal.append((memory, workload, dp_encoders))
    peaks = (
        (min_peak_of_splits(replace(problem.task, workload=workload)), dp_encoders)
        for _, workload, dp_encoders in minimal
    )
    return min(peaks, key=lambda pair: pair[0])


def _smallest_choices(problem: PlacementProblem) -> Iterator[DataParallelEncoders]:
    """Yield the choice with min memory for every group size and sharding."""
    for pipelines in _group_sizes(problem):
        for sharded in problem.encoders:
            yield _make_encoders(problem, pipelines, _items_per_pass(problem, 1), sharded)


def _group_sizes(problem: PlacementProblem) -> list[int]:
    size = problem.task.workload.data_parallel_size
    return [pipelines for pipelines in range(1, size + 1) if size % pipelines == 0]


def _make_choices(problem: PlacementProblem, effort: float) -> list[_Choice]:
    """Return choices that leave memory for the pipeline; raise DoesNotFit if there are none."""
    costs = problem.any_encoders.encoders.values()
    are_few = effort < 1 and any(cost.is_of_samples for cost in costs)
    workload = problem.with_encoders(next(_smallest_choices(problem)))
    assert workload.encoding is not None
    # Pipeline features do not depend on the encoding ranks.
    features = EncoderMemory(features=workload.encoder_memory.features)
    alone = replace(workload, encoding=replace(workload.encoding, encoder_memory=features))
    # The fullest stage without encoders, over all splits.
    min_bytes = min_peak_of_splits(replace(problem.task, workload=alone))
    choices = list(_yield_choices(problem, min_bytes, are_few=are_few))
    if not choices:
        raise _no_placement_error(problem)
    return choices


def _yield_choices(
    problem: PlacementProblem, min_bytes: float, *, are_few: bool
) -> Iterator[_Choice]:
    """Yield choices that leave `min_bytes` for the pipeline, a subset if `are_few`."""
    max_kept, step = (_MAX_FEW_KEPT_CHOICES, 2) if are_few else (_MAX_KEPT_CHOICES, 1)
    workload, cap_bytes = problem.task.workload, problem.task.memory_cap_bytes
    sample, any_encoders = sampled_steps(workload), problem.any_encoders
    steps, place = np.unique(sample.step, return_inverse=True)
    has_rows = np.zeros((len(steps), sample.data_parallel_size, 1))
    has_rows[place, sample.dp_rank] = 1
    for pipelines in _group_sizes(problem):
        # Many groups exceed the cap by their buffers alone.
        shardings = {
            sharded: encoders
            for sharded, encoders in problem.encoders.items()
            if fits_cap(
                encoders.state_bytes + encoders.buffers_bytes(pipelines) + min_bytes, cap_bytes
            )
        }
        if not shardings:
            continue
        smallest = _share_items(problem, workload, pipelines, _items_per_pass(problem, 1))
        for largest in _pass_sizes(problem, smallest)[::step]:
            sizes, shares = _items_per_pass(problem, largest), smallest
            if largest > 1:
                shares = _share_items(problem, workload, pipelines, sizes)
            # Memory counts all steps, times only sampled steps.
            of_sample = _share_items(problem, sample, pipelines, sizes)
            exchanges_ms = {
                sharded: [features_exchange_ms(of_sample, cost, is_back=b) for b in (False, True)]
                for sharded, cost in shardings.items()
            }
            for kept in kept_choices(any_encoders, shares.max_items(), max_kept):
                for sharded, encoders in shardings.items():
                    dp_encoders = _make_encoders(problem, pipelines, sizes, sharded, kept)
                    encoder_memory = memory_of_encoders(shares, encoders, dp_encoders)
                    # Encoding ends before the pipeline's first pass.
                    later_bytes = max(encoder_memory.encoding, min_bytes)
                    if fits_cap(encoder_memory.resident + later_bytes, cap_bytes):
                        exchange_ms = exchanges_ms[sharded]
                        waits_ms = pipeline_waits_ms(of_sample, encoders, dp_encoders, exchange_ms)
                        waits_ms *= has_rows
                        waits_ms[..., 1] += problem.more_update_ms(sharded)
                        yield _Choice(
                            dp_encoders=dp_encoders,
                            encoder_memory=encoder_memory,
                            waits_ms=waits_ms,
                        )


def _share_items(
    problem: PlacementProblem, workload: Workload, pipelines: int, items_per_pass: Mapping[str, int]
) -> ItemShares:
    """Return the shares of a workload's items, for any sharding."""
    dp_encoders = _make_encoders(problem, pipelines, items_per_pass, 1)
    return ItemShares.build(workload, problem.features, problem.any_encoders, dp_encoders)


def _items_per_pass(problem: PlacementProblem, largest: int) -> dict[str, int]:
    """Return items per pass of every encoder for `largest` equal items."""
    return {
        name: largest * (_CELLS_OF_PASS if cost.is_of_samples else 1)
        for name, cost in problem.any_encoders.encoders.items()
    }


def _pass_sizes(problem: PlacementProblem, shares: ItemShares) -> list[int]:
    """Return pass sizes to try, from 1 to the max items of a rank."""
    smallest, items = _items_per_pass(problem, 1), shares.max_items()
    largest = max([1, *(-(-items[name] // smallest[name]) for name in smallest)])
    doublings = (min(largest, _MAX_ITEMS_OF_PASS) - 1).bit_length()
    return [2**power for power in range(doublings + 1)]


def kept_choices(
    cost: EncodersCost, max_items: Mapping[str, int], choices: int = _MAX_KEPT_CHOICES
) -> list[dict[str, int]]:
    """Return at most `choices` numbers of kept items by encoder in addition to none, up to
    `max_items`, by time saved per byte."""
    trained = [name for name, encoder in cost.encoders.items() if encoder.is_trained]
    saved = {
        name: cost.encoders[name].again_ms[1] / max(cost.encoders[name].kept_bytes[1], 1.0)
        for name in trained
    }
    order = sorted(trained, key=lambda name: -saved[name])
    # All encoders' items in a row, most time saved per byte first: a prefix is kept.
    edges = np.cumsum([0, *(max_items[name] for name in order)]).tolist()
    starts = dict(zip(order, edges, strict=False))
    ends = np.unique(np.linspace(0, edges[-1], choices + 1).round().astype(int)).tolist()
    return [
        {
            name: min(max(end - starts[name], 0), max_items[name]) if name in starts else 0
            for name in cost.encoders
        }
        for end in ends
    ]


def _make_encoders(
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
        item_ms={name: round(ms, _ITEM_MS_DECIMALS) for name, ms in item_ms.items()},
        square_ms={name: round(ms, _SQUARE_MS_DECIMALS) for name, ms in square_ms.items()},
        sharded=sharded,
    )
