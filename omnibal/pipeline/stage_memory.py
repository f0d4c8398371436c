"""Memory of pipeline stages: the one formula that search, plan, check and replay use.

A device of a stage holds the static state of its parameters, what the micro-batches in flight keep
for their backward, and the working memory of the unit that runs. The peak is looked for at every
pass of the schedule and at every kind of unit in it. While a unit runs backward, the units after
it have let go of what they kept of that micro-batch, so the head's working memory, for one, and a
recomputed layer's do not come together. A recomputed layer keeps only its input; the rest comes
back as working memory while its backward runs.

Links between stages hold tensors too: the input of the next micro-batch, and the gradient of its
output, have room while this one computes, and what was sent last has it until the next send. A
stage's output is free again after that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.pipeline.operation_graph import (
    held_in_passes,
    planned_graph,
    require_in_order,
    require_shortens,
)
from omnibal.pipeline.prediction import StageMemory
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_cost import trained_parameters
from omnibal.pipeline.units import (
    UnitRun,
    holds_both_ends,
    recomputed_counts,
    unit_counts,
    unit_runs,
)
from omnibal.units import HEAD, LANGUAGE, LANGUAGE_EMBED, UnitKind

GIB = 1024**3
_CAP_TOLERANCE = 1e-12
"""Relative tolerance; sums of the same bytes in another order differ by less."""
_KEPT_COUNTS = 8
"""Pairs of pipeline size and micro-batches whose in-flight counts are cached, as they repeat."""


def fits_cap(peak: np.ndarray | float, memory_cap: np.ndarray | float) -> np.ndarray:
    """Whether peaks are within a memory cap, to rounding: a cap that is a peak holds it. [...]"""
    return np.asarray(peak) <= np.asarray(memory_cap) * (1 + _CAP_TOLERANCE)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunningPasses:
    """Passes of a stage: the micro-batch that each runs, and what is held besides."""

    own: np.ndarray
    """Features of that micro-batch, [passes, features]."""
    others: np.ndarray
    """Summed features of the other micro-batches that are held meanwhile, [passes, features]."""
    links: np.ndarray
    """Whether each of `LINKS` is there meanwhile, 0 or 1, [passes, links]."""


LINKS = ("next input", "last input's gradient", "last output", "next gradient", "own gradient")
"""Tensors that a stage's links hold in a pass: of the cut before it, of the cut after it, and there
in a backward the gradient that it began with."""


def running_passes(
    features: np.ndarray, slot: np.ndarray, pipeline_size: int, stage: int
) -> RunningPasses:
    """Every forward of a stage in a run, in the packs' order, and then every backward.

    Args:
        features: [packs, features]; packs are sorted by step, rank and slot.
        slot: [packs]; slots count from 0 without gaps.
    """
    held = _held_besides(pipeline_size, int(slot.max()) + 1)[stage]
    return _passes(features, _running_sums(features), slot, held)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _HeldBesides:
    """Number of other micro-batches that a stage of the planned schedule holds in each pass; both
    [m], by the micro-batch that runs."""

    earlier_in_forward: np.ndarray
    later_in_backward: np.ndarray

    @property
    def key(self) -> bytes:
        """What distinguishes it from that of other stages."""
        return self.earlier_in_forward.tobytes() + self.later_in_backward.tobytes()


@lru_cache(maxsize=_KEPT_COUNTS)
def _held_besides(pipeline_size: int, micro_batches: int) -> tuple[_HeldBesides, ...]:
    graph = planned_graph(pipeline_size, micro_batches)
    require_in_order(graph)
    require_shortens(graph.schedule)
    held = []
    for stage in range(pipeline_size):
        passes = held_in_passes(graph, stage)
        own, forward = passes.micro_batch, passes.is_forward
        first, stop = passes.held[:, 0].T
        held.append(
            _HeldBesides(
                earlier_in_forward=(own - first)[forward],
                later_in_backward=(stop - 1 - own)[~forward],
            )
        )
    return tuple(held)


def _running_sums(features: np.ndarray) -> np.ndarray:
    """Sum of each feature over the packs before each one and over all. [packs + 1, features]"""
    total = np.zeros((len(features) + 1, features.shape[1]))
    np.cumsum(features, axis=0, out=total[1:])
    return total


def _passes(
    features: np.ndarray, total: np.ndarray, slot: np.ndarray, held: _HeldBesides
) -> RunningPasses:
    pack = np.arange(len(slot))
    # A step may have fewer micro-batches than others: what comes after its last is not held.
    ends = np.append(np.flatnonzero(slot == 0)[1:], len(slot))
    end = ends[np.cumsum(slot == 0) - 1]
    before = total[pack] - total[pack - held.earlier_in_forward[slot]]
    last = np.minimum(pack + 1 + held.later_in_backward[slot], end)
    after = total[last] - total[pack + 1]
    begun, ended = slot > 0, slot > held.earlier_in_forward[slot]
    # A step's first forward and its first backward are begun without the next one's tensor.
    in_forward = [begun & (pack + 1 < end), ended, begun, ended, 0 * pack]
    in_backward = [last < end, begun, 0 * pack + 1, begun & (pack + 1 < end), 0 * pack + 1]
    return RunningPasses(
        own=np.concatenate([features, features]),
        others=np.concatenate([before, after]),
        links=np.concatenate([np.stack(in_forward, 1), np.stack(in_backward, 1)]).astype(float),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryTable:
    """Bytes of passes by kind of unit. Methods take `counts` and `recomputed` [..., kinds]."""

    kinds: tuple[UnitKind, ...]
    state_bytes: np.ndarray
    """Bytes of weights, gradients and optimizer state, [kinds]."""
    tied_bytes: float
    """Part of the state that a stage with both language embed and head has once and not twice."""
    others_kept_bytes: np.ndarray
    """Kept of the other micro-batches that are held in a pass; this and the rest are [passes,
    kinds]."""
    others_input_bytes: np.ndarray
    """The same where the unit is recomputed."""
    own_kept_bytes: np.ndarray
    """Kept of the micro-batch that runs."""
    own_input_bytes: np.ndarray
    """The same where the unit is recomputed."""
    working_bytes: np.ndarray
    """Working memory of a unit of the micro-batch that runs."""
    passing_bytes: np.ndarray
    """What units without a backward hold of the micro-batch that runs, while one of them does."""
    first_bytes: np.ndarray
    """Tensors of the cut before a stage that begins with the unit."""
    last_bytes: np.ndarray
    """Tensors of the cut after a stage that ends with the unit."""
    own_gradient_bytes: np.ndarray
    """Gradient of the unit's output where the stage ends with it, there to the backward's end."""
    shared_bytes: np.ndarray
    """Room that all units of a kind share through the run, and the kinds too: the largest counts.
    [kinds]"""
    has_backward: np.ndarray
    """Whether the unit has a backward, [kinds]."""
    tied_gradient_bytes: np.ndarray
    """Gradients of the tied matrix besides its buffer, where a stage has both language embed and
    head, while a unit runs backward: the head's waits for the embed's, and then their sum. [kinds]
    """

    def activation_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Activations of all micro-batches that are held in every pass. [..., passes]"""
        kept = (counts - recomputed) @ (self.others_kept_bytes + self.own_kept_bytes).T
        return kept + recomputed @ (self.others_input_bytes + self.own_input_bytes).T

    def peak_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Peak memory of a stage, all kinds of memory together. [...]"""
        state = counts @ self.state_bytes - self.tied_bytes * holds_both_ends(self.kinds, counts)
        return state + self.pass_bytes(counts, recomputed).max(axis=-1)

    def pass_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Peak of every pass besides the state. [..., passes]

        Recomputing one layer more never raises it: of a kind's layers the earliest are recomputed,
        so that as long as one is not, it runs backward before them with more kept than they bring
        back. Layers of several kinds may follow one another in any order, so all of a tower's count
        as kept while one of them runs.
        """
        whole = counts - recomputed
        others = whole @ self.others_kept_bytes.T + recomputed @ self.others_input_bytes.T
        own, most, passing = (np.zeros_like(others) for _ in range(3))
        links, own_gradient = self._of_links(counts)
        last = _last_kind(counts)[..., None]
        tied = holds_both_ends(self.kinds, counts)[..., None]
        for kinds in _in_model_order(self.kinds):
            kept, inputs = self.own_kept_bytes[:, kinds], self.own_input_bytes[:, kinds]
            # Backward, what comes after these has let go of what it kept.
            own = own + whole[..., kinds] @ kept.T + recomputed[..., kinds] @ inputs.T
            for kind in kinds:
                whole_k, again_k = whole[..., kind, None], recomputed[..., kind, None]
                held = whole_k + again_k > 0
                passing = passing + held * self.passing_bytes[:, kind]
                brought_back = self.own_kept_bytes[:, kind] - self.own_input_bytes[:, kind]
                running = own + self.working_bytes[:, kind]
                running = running + ((whole_k == 0) & (again_k > 0)) * brought_back
                running = running + self._besides(kind, kind == last, passing, own_gradient)
                running = running + tied * self.tied_gradient_bytes[kind]
                most = np.where(held, np.maximum(most, running), most)
        return others + most + links

    def stage_bytes(self, runs: Sequence[UnitRun]) -> np.ndarray:
        """The same of one stage, whichever of its layers are recomputed. [passes]

        Args:
            runs: of the stage's units, in order.
        """
        counts, recomputed = np.zeros((2, len(self.kinds)), np.int64)
        own, others, most = np.zeros((3, len(self.working_bytes)))
        for run in runs:
            counts[run.kind] += run.number
            recomputed[run.kind] += run.number * run.recomputed
        links, own_gradient = self._of_links(counts)
        tied = holds_both_ends(self.kinds, counts)
        for run in runs:
            kind, kept, held = run.kind, self.own_kept_bytes, self.own_kept_bytes
            held_of_others = self.others_kept_bytes
            if run.recomputed:
                held, held_of_others = self.own_input_bytes, self.others_input_bytes
            own = own + run.number * held[:, kind]
            others = others + run.number * held_of_others[:, kind]
            # The last of these runs backward with most besides, and brings back what it dropped.
            running = own + (kept - held)[:, kind] + self.working_bytes[:, kind]
            running = running + tied * self.tied_gradient_bytes[kind]
            most = np.maximum(most, running + (kind != runs[-1].kind) * own_gradient)
        # With the earliest of each kind recomputed, what the search counts.
        return np.maximum(self.pass_bytes(counts, recomputed), others + most + links)

    def _of_links(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is held in every pass of tensors between stages, with what the stage's units share,
        and the gradient that its backward begins with. [..., passes] each"""
        first, last = (counts > 0).argmax(axis=-1), _last_kind(counts)
        links = self.first_bytes.T[first] + self.last_bytes.T[last]
        shared = ((counts > 0) * self.shared_bytes).max(axis=-1)
        return links + shared[..., None], self.own_gradient_bytes.T[last]

    def _besides(
        self, kind: int, is_last: np.ndarray | bool, passing: np.ndarray, gradient: np.ndarray
    ) -> np.ndarray:
        """What is there while a unit of the kind runs, besides what units keep and work with."""
        # The stage's last unit counts the gradient that it is given.
        return np.where(is_last, 0.0, gradient) if self.has_backward[kind] else passing

    def of_passes(self, chosen: np.ndarray) -> "MemoryTable":
        """The same of some of the passes."""
        return self._each(lambda of_passes: of_passes[chosen])

    def at_most(self) -> "MemoryTable":
        """One pass that needs at least as much as any, whatever the stage holds."""
        return self._each(lambda of_passes: of_passes.max(axis=0, keepdims=True))

    def _each(self, change: Callable[[np.ndarray], np.ndarray]) -> "MemoryTable":
        return replace(
            self,
            others_kept_bytes=change(self.others_kept_bytes),
            others_input_bytes=change(self.others_input_bytes),
            own_kept_bytes=change(self.own_kept_bytes),
            own_input_bytes=change(self.own_input_bytes),
            working_bytes=change(self.working_bytes),
            passing_bytes=change(self.passing_bytes),
            first_bytes=change(self.first_bytes),
            last_bytes=change(self.last_bytes),
            own_gradient_bytes=change(self.own_gradient_bytes),
        )


def _last_kind(counts: np.ndarray) -> np.ndarray:
    """Index of the last kind of unit that stages [..., kinds] hold. [...]"""
    return counts.shape[-1] - 1 - (counts[..., ::-1] > 0).argmax(axis=-1)


def _in_model_order(kinds: Sequence[UnitKind]) -> list[list[int]]:
    """Indices of kinds, those of a tower's layers together."""
    groups = groupby(enumerate(kinds), lambda each: each[1].is_layer or each[1].name)
    return [[index for index, _ in same] for _, same in groups]


def memory_tables(
    cost: CostModel, features: np.ndarray, slot: np.ndarray, pipeline_size: int
) -> list[MemoryTable]:
    """Memory tables of every stage of a pipeline, each with its own micro-batches in flight.

    Args:
        features: [packs, features]; packs are sorted by step, rank and slot.
        slot: [packs].
    """
    besides = _held_besides(pipeline_size, int(slot.max()) + 1)
    total = _running_sums(features)
    # Stages that hold the same micro-batches share a table.
    distinct = {held.key: held for held in besides}
    tables = {
        key: memory_table(cost, _largest(cost, _passes(features, total, slot, held)))
        for key, held in distinct.items()
    }
    return [tables[held.key] for held in besides]


def _largest(cost: CostModel, passes: RunningPasses) -> RunningPasses:
    """Those passes of which no other one needs as much memory for sure.

    Bytes never fall where a feature of either micro-batch grows.
    """
    units = cost.units.values()
    kept = np.array([[unit.activation_bytes, unit.boundary_bytes] for unit in units])
    grows = kept.max(axis=(0, 1)) > 0
    worked = [[*unit.transient_bytes, unit.passing_bytes, unit.shared_bytes] for unit in units]
    works = grows | (np.concatenate(worked).max(axis=0) > 0)
    columns = [passes.others[:, grows], passes.own[:, works], passes.links]
    found = undominated(np.concatenate(columns, axis=1))
    others, own = (np.zeros((len(found), len(grows))) for _ in range(2))
    splits = np.cumsum([grows.sum(), works.sum()])
    others[:, grows], own[:, works], links = np.split(found, splits, axis=1)
    return RunningPasses(own=own, others=others, links=links)


def memory_table(cost: CostModel, passes: RunningPasses) -> MemoryTable:
    """Memory of the given passes by kind of unit."""
    units = cost.units.values()
    activation = np.stack([unit.activation_bytes for unit in units], axis=1)
    boundary = np.stack([unit.boundary_bytes for unit in units], axis=1)
    passing = np.stack([unit.passing_bytes for unit in units], axis=1)
    working = [(passes.own @ unit.transient_bytes.T).max(axis=1) for unit in units]
    first_bytes, last_bytes, own_gradient_bytes = _link_bytes(cost, passes)
    state_bytes = [_state_bytes(cost, unit.parameters, unit.trained_parameters) for unit in units]
    return MemoryTable(
        kinds=cost.kinds,
        state_bytes=np.array(state_bytes),
        tied_bytes=_state_bytes(cost, cost.tied_parameters, cost.tied_trained_parameters),
        others_kept_bytes=passes.others @ activation,
        others_input_bytes=passes.others @ boundary,
        own_kept_bytes=passes.own @ activation,
        own_input_bytes=passes.own @ boundary,
        working_bytes=np.stack(working, axis=1),
        passing_bytes=passes.own @ passing,
        first_bytes=first_bytes,
        last_bytes=last_bytes,
        own_gradient_bytes=own_gradient_bytes,
        shared_bytes=np.array([_largest_bytes(unit.shared_bytes, passes) for unit in units]),
        has_backward=np.array([unit.has_backward for unit in units]),
        tied_gradient_bytes=_tied_gradient_bytes(cost),
    )


def _link_bytes(
    cost: CostModel, passes: RunningPasses
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tensors of the cuts before and after a stage that begins or ends with a unit of each kind,
    and the gradient of its output. [passes, kinds] each.

    Those of other micro-batches are as large as any: no more than a few hundredths of what a stage
    holds, where one more kind of passes would make many more of them.
    """
    next_input, input_gradient, output, next_gradient, own_gradient = passes.links.T[..., None]
    units = [*cost.units.values()]
    sent = np.array([_largest_bytes(unit.output_bytes, passes) for unit in units])
    back = np.array([_largest_bytes(unit.output_gradient_bytes, passes) for unit in units])
    # What comes to a unit has left a unit of its kind, or of the kind before it.
    came, back_to = np.append(0, sent[:-1]), np.append(0, back[:-1])
    first_bytes = next_input * came + input_gradient * back_to
    for index, (before, kind) in enumerate(zip(units, cost.kinds[1:], strict=False), 1):
        if before.output_gradient_bytes.any() and not (kind.is_layer or kind.name == HEAD):
            # Projectors and the language embed keep no input, but a stage does for its gradient.
            first_bytes[:, index] += (passes.own + passes.others) @ before.output_bytes
    return (
        first_bytes,
        output * sent + next_gradient * back,
        own_gradient * (passes.own @ np.stack([each.output_gradient_bytes for each in units], 1)),
    )


def _tied_gradient_bytes(cost: CostModel) -> np.ndarray:
    """Gradients of the tied matrix, besides the one that its unit works with. [kinds]"""
    matrix_bytes = cost.tied_trained_parameters * cost.weight_bytes_per_parameter
    number = {LANGUAGE_EMBED: 2, HEAD: 0}
    language = [kind.tower == LANGUAGE for kind in cost.kinds]
    return matrix_bytes * np.array(
        [number.get(kind.name, 1) * is_in for kind, is_in in zip(cost.kinds, language, strict=True)]
    )


def _largest_bytes(per_feature: np.ndarray, passes: RunningPasses) -> float:
    """Bytes of the largest micro-batch."""
    return float((passes.own @ per_feature).max())


def _state_bytes(cost: CostModel, parameters: int, trained: int) -> float:
    trained_bytes = cost.gradient_bytes_per_parameter + cost.optimizer_bytes_per_parameter
    return parameters * cost.weight_bytes_per_parameter + trained * trained_bytes


def stage_memories(
    cost: CostModel, stages: Sequence[Stage], slot: np.ndarray, features: np.ndarray
) -> list[StageMemory]:
    """Peak memory of one device of every stage, over all packs of a run.

    Args:
        slot: [packs]; packs are sorted by step, rank and slot.
        features: [packs, features].
    """
    tables = memory_tables(cost, features, slot, len(stages))
    return [stage_memory(cost, *each) for each in zip(stages, tables, strict=True)]


def stage_memory(cost: CostModel, stage: Stage, table: MemoryTable) -> StageMemory:
    """Peak memory of one device of the stage over the passes of its table."""
    kinds = cost.kinds
    counts, recomputed = unit_counts(kinds, stage), recomputed_counts(kinds, stage)
    parameters = sum(
        number * unit.parameters
        for unit, number in zip(cost.units.values(), counts.tolist(), strict=True)
    )
    parameters -= cost.tied_parameters * int(holds_both_ends(kinds, counts))
    trained = float(trained_parameters(cost, [stage])[0])
    activation_bytes = float(table.activation_bytes(counts, recomputed).max())
    running_bytes = float(table.stage_bytes(unit_runs(kinds, stage)).max())
    return StageMemory(
        weights_gib=parameters * cost.weight_bytes_per_parameter / GIB,
        gradients_gib=trained * cost.gradient_bytes_per_parameter / GIB,
        optimizer_gib=trained * cost.optimizer_bytes_per_parameter / GIB,
        activations_gib=activation_bytes / GIB,
        transient_gib=(running_bytes - activation_bytes) / GIB,
    )


def undominated(rows: np.ndarray) -> np.ndarray:
    """The distinct rows [n, k] that no other row equals or exceeds in every column."""
    columns = np.ascontiguousarray(rows.T)
    sums = (1 / np.maximum(columns.max(axis=1), 1)) @ columns
    found = []
    while len(sums):
        # A row with the largest scaled sum is dominated by no other.
        top = columns[:, sums.argmax()]
        found.append(top)
        left = np.zeros(len(sums), bool)
        for column, value in zip(columns, top, strict=True):
            left |= column > value
        columns, sums = columns[:, left], sums[left]
    return np.array(found)
