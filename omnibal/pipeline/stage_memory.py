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

Micro-batches of several levels are in flight together, and each level recomputes layers of its own:
what is kept of each level is summed apart. Costs, features and counts of recomputed layers are then
of all levels, one after another (`omnibal.pipeline.level_costs`); counts of units are not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.cost.model import CostModel, UnitCost
from omnibal.model.units import HEAD, LANGUAGE, LANGUAGE_EMBED, UnitKind
from omnibal.pipeline.encoding import EncoderMemory
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.operation_graph import (
    held_in_passes,
    planned_graph,
    require_in_order,
    require_prefix_closed,
)
from omnibal.pipeline.prediction import StageMemory
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_cost import trained_expert_parameters, trained_parameters
from omnibal.pipeline.unit_runs import (
    UnitRun,
    counts_of_runs,
    holds_both_ends,
    recomputed_counts,
    unit_runs,
)
from omnibal.pipeline.workload import Workload

GIB = 1024**3  # bytes
_CAP_TOLERANCE = 1e-12
"""Relative tolerance; sums of the same bytes in another order differ by less."""
_KEPT_COUNTS = 8
"""Pairs of pipeline size and micro-batches whose in-flight counts are cached, as they repeat."""

_KEPT_KINDS = 8
"""Models whose order of kinds is cached."""

_PASSES_AT_ONCE = 4_096
"""Passes of which memory is computed at a time."""
_LOOKED_AT = 9
"""Most stages of a pipeline whose heaviest passes are looked for."""
_DRAWN_STAGES, _DRAWN_OF_LEVELS = 8, 32
"""Contents of a stage, drawn at random, whose heaviest passes a table of one level has, and one of
several."""
_RECOMPUTING_ALL = 4
"""Drawn stages for each one that recomputes every layer."""
_MOST_LAYERS = (4, 24)
"""Layers of a kind in these stages, of which there are few and many."""


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
    largest: np.ndarray
    """Most of each feature that any micro-batch of the run has, [features]."""

    def take(self, chosen: np.ndarray | slice) -> "RunningPasses":
        """Some of the passes."""
        return rows_of(self, chosen, "largest")


LINKS = ("next input", "last input's gradient", "last output", "next gradient", "own gradient")
"""Tensors that a stage's links hold in a pass: of the cut before it, of the cut after it, and there
in a backward the gradient that it began with."""


@lru_cache(maxsize=_KEPT_COUNTS)
def _others_in_flight(pipeline_size: int, micro_batches: int) -> np.ndarray:
    """Number of other micro-batches that each stage of the planned schedule holds in each forward,
    which are earlier, and in each backward, which are later. [p, 2, m]"""
    graph = planned_graph(pipeline_size, micro_batches)
    require_in_order(graph)
    require_prefix_closed(graph.schedule)
    held = np.empty((pipeline_size, 2, micro_batches), np.int64)
    for stage, of_stage in enumerate(held):
        passes = held_in_passes(graph, stage)
        own, forward = passes.micro_batch, passes.is_forward
        first, stop = passes.held[:, 0].T
        of_stage[:] = (own - first)[forward], (stop - 1 - own)[~forward]
    return held


def running_sums(features: np.ndarray) -> np.ndarray:
    """Sum of each feature over the packs before each one and over all. [packs + 1, features]"""
    total = np.zeros((len(features) + 1, features.shape[1]))
    np.cumsum(features, axis=0, out=total[1:])
    return total


def running_passes(
    features: np.ndarray,
    slot: np.ndarray,
    pipeline_size: int,
    stage: int,
    chosen: np.ndarray | None = None,
) -> RunningPasses:
    """Every forward of a stage in a run, in the packs' order, and then every backward; or those of
    them that are chosen by their rising indices.

    Args:
        features: [packs, features]; packs are sorted by step, rank and slot.
        slot: [packs]; slots count from 0 without gaps.
    """
    earlier, later = _others_in_flight(pipeline_size, int(slot.max()) + 1)[stage]
    packs, total = len(slot), running_sums(features)
    every = np.arange(2 * packs) if chosen is None else chosen
    forward, backward = every[every < packs], every[every >= packs] - packs
    # A step may have fewer micro-batches than others: what comes after its last is not held.
    ends = np.append(np.flatnonzero(slot == 0)[1:], packs)
    end = ends[np.cumsum(slot == 0) - 1]
    before = total[forward] - total[forward - earlier[slot[forward]]]
    last = np.minimum(backward + 1 + later[slot[backward]], end[backward])
    after = total[last] - total[backward + 1]
    begun, not_last = slot > 0, np.arange(packs) + 1 < end
    ended = (slot > earlier[slot])[forward]
    # A step's first forward and its first backward are begun without the next one's tensor.
    both = begun & not_last
    in_forward = [both[forward], ended, begun[forward], ended, 0 * forward]
    one = np.ones_like(backward)
    in_backward = [last < end[backward], begun[backward], one, both[backward], one]
    return RunningPasses(
        own=features[np.concatenate([forward, backward])],
        others=np.concatenate([before, after]),
        links=np.concatenate([np.stack(in_forward, 1), np.stack(in_backward, 1)]).astype(float),
        largest=features.max(axis=0),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryTable:
    """Bytes of passes by kind of unit, of every level apart.

    Methods take `counts` [..., kinds] and `recomputed` [..., levels * kinds].
    """

    kinds: tuple[UnitKind, ...]
    state_bytes: np.ndarray
    """Bytes of weights, gradients and optimizer state, [kinds]."""
    tied_bytes: float
    """Part of the state that a stage with both language embed and head has once and not twice."""
    others_kept_bytes: np.ndarray
    """Kept of the other micro-batches that are held in a pass; this and the next three are
    [passes, levels * kinds]."""
    others_input_bytes: np.ndarray
    """Kept of the other micro-batches where the unit is recomputed."""
    own_kept_bytes: np.ndarray
    """Kept of the micro-batch that runs."""
    own_input_bytes: np.ndarray
    """Kept of the micro-batch that runs where the unit is recomputed."""
    working_bytes: np.ndarray
    """Working memory of a unit of the micro-batch that runs; this and the next five are [passes,
    kinds]."""
    passing_bytes: np.ndarray
    """What units without a backward hold of the micro-batch that runs, while one of them does."""
    first_bytes: np.ndarray
    """Tensors of the cut before a stage that begins with the first unit of the kind."""
    inner_bytes: np.ndarray
    """Tensors of the cut before a stage that begins with a later one, which may be fewer."""
    last_bytes: np.ndarray
    """Tensors of the cut after a stage that ends with the unit."""
    own_gradient_bytes: np.ndarray
    """Gradient of the unit's output where the stage ends with it, there to the backward's end."""
    shared_bytes: np.ndarray
    """Room that all units of a kind share through the run, and the kinds too: the largest counts.
    [kinds]"""
    buffer_bytes: np.ndarray
    """Each buffer of the trainer's libraries, which a stage has once, [buffers]."""
    has_buffer: np.ndarray
    """Whether a stage with a unit of a kind has the buffer, 0 or 1, [kinds, buffers]."""
    expert_bytes: np.ndarray
    """Buffers of the communication library for the ranks that share out experts, which a stage with
    any has once. [kinds]"""
    has_backward: np.ndarray
    """Whether the unit has a backward, [kinds]."""
    encoder_memory: EncoderMemory
    """What data-parallel encoders take of every device."""
    tied_gradient_bytes: np.ndarray
    """Gradients of the tied matrix besides its buffer, where a stage has both language embed and
    head, while a unit runs backward: the head's waits for the embed's, and then their sum. [kinds]
    """

    @property
    def levels(self) -> int:
        """Number of levels."""
        return self.own_kept_bytes.shape[1] // len(self.kinds)

    def activation_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Activations of all micro-batches that are held in every pass. [..., passes]"""
        whole = np.tile(counts, self.levels) - recomputed
        kept = whole @ (self.others_kept_bytes + self.own_kept_bytes).T
        return kept + recomputed @ (self.others_input_bytes + self.own_input_bytes).T

    def peak_bytes(
        self, counts: np.ndarray, recomputed: np.ndarray, running: np.ndarray | None = None
    ) -> np.ndarray:
        """Peak memory of a stage, all kinds of memory together. [...]

        Args:
            running: what `running_bytes` gives, where that is known. [..., passes]
        """
        state = counts @ self.state_bytes - self.tied_bytes * holds_both_ends(self.kinds, counts)
        if running is None:
            running = self.running_bytes(counts, recomputed)
        pass_bytes = running + self._in_flight_bytes(counts, recomputed)
        return state + self.with_encoders(counts, pass_bytes)

    def with_encoders(self, counts: np.ndarray, pass_bytes: np.ndarray) -> np.ndarray:
        """Largest of some passes [..., passes], with what data-parallel encoders take; what
        they take besides that while they run comes without any pass. [...]
        """
        embeds = counts[..., [kind.name for kind in self.kinds].index(LANGUAGE_EMBED)] > 0
        taken = self.encoder_memory
        running = np.maximum(pass_bytes.max(axis=-1), taken.arrival * embeds)
        in_step = taken.held + np.maximum(running + taken.features * embeds, taken.encoding)
        if not taken.whole:  # then an evaluation takes less than a step
            return in_step
        # Held-out data runs forward alone, in less than its units work with in a backward.
        working = (self.working_bytes.max(axis=0) * (counts > 0)).max(axis=-1)
        evaluating = taken.evaluating + np.maximum(working, taken.evaluation)
        return np.where(embeds, np.maximum(in_step, evaluating), in_step)

    def pass_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Peak of every pass besides the state. [..., passes]"""
        return self.running_bytes(counts, recomputed) + self._in_flight_bytes(counts, recomputed)

    def _in_flight_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """What the other micro-batches in flight and links hold in every pass. [..., passes]"""
        whole = np.tile(counts, self.levels) - recomputed
        others = whole @ self.others_kept_bytes.T + recomputed @ self.others_input_bytes.T
        return others + self.link_bytes(counts)

    def running_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Most that the micro-batch that runs holds in every pass, with the working memory of the
        unit that runs. It is the same in all stages. [..., passes]

        Recomputing one layer more never raises it: of a kind's layers the earliest are recomputed,
        so that as long as one is not, it runs backward before them with more kept than they bring
        back. Layers of several kinds may follow one another in any order, so all of a tower's count
        as kept while one of them runs.
        """
        whole = np.tile(counts, self.levels) - recomputed
        own, most, passing = np.zeros((3, *counts.shape[:-1], len(self.working_bytes)))
        first, alike = len(self.kinds) * np.arange(self.levels), _alike(self.kinds)
        last = _last_kind(counts)
        own_gradient = self.own_gradient_bytes.T[last]
        tied = holds_both_ends(self.kinds, counts)[..., None]
        held_kinds = set(np.unique(np.nonzero(counts)[-1]).tolist())
        for kinds in _in_model_order(self.kinds):
            columns = (first[:, None] + kinds).ravel()
            kept, inputs = self.own_kept_bytes[:, columns], self.own_input_bytes[:, columns]
            # Backward, what comes after these has let go of what it kept.
            own = own + whole[..., columns] @ kept.T + recomputed[..., columns] @ inputs.T
            for kind in (kind for kind in kinds if kind in held_kinds):
                column = first + kind
                every_again = (whole[..., column] == 0) & (recomputed[..., column] > 0)
                for other in alike[kind]:
                    every_again &= whole[..., first + other] == 0
                brought_back = self.own_kept_bytes[:, column] - self.own_input_bytes[:, column]
                running = own + self.working_bytes[:, kind] + every_again @ brought_back.T
                held = counts[..., kind, None] > 0
                if self.has_backward[kind]:
                    # The stage's last unit works with the gradient that it is given.
                    running = running + (kind != last[..., None]) * own_gradient
                    running = running + tied * self.tied_gradient_bytes[kind]
                else:
                    passing = passing + held * self.passing_bytes[:, kind]
                    running = running + passing
                most = np.where(held, np.maximum(most, running), most)
        return most

    def stage_bytes(self, runs: Sequence[UnitRun]) -> np.ndarray:
        """Most bytes of one stage in every pass, whichever of its layers are recomputed. [passes]

        Args:
            runs: of the stage's units, in order.
        """
        counts, recomputed = counts_of_runs(len(self.kinds), runs)
        others, own, most = np.zeros((3, len(self.working_bytes)))
        own_gradient = self.own_gradient_bytes.T[_last_kind(counts)]
        tied = holds_both_ends(self.kinds, counts)
        begun = self.inner_bytes if runs[0].is_inside else self.first_bytes
        table = replace(self, first_bytes=begun, inner_bytes=begun)
        for run in runs:
            column = len(self.kinds) * np.arange(self.levels) + run.kind
            again = np.array(run.recomputed)
            kept, inputs = self.own_kept_bytes[:, column], self.own_input_bytes[:, column]
            held = np.where(again, inputs, kept).sum(axis=1)
            of_others = np.where(
                again, self.others_input_bytes[:, column], self.others_kept_bytes[:, column]
            )
            own, others = own + run.number * held, others + run.number * of_others.sum(axis=1)
            # The last of these runs backward with most besides, and brings back what it dropped.
            running = own - held + kept.sum(axis=1) + self.working_bytes[:, run.kind]
            running = running + (run.kind != _last_kind(counts)) * own_gradient
            running = running + tied * self.tied_gradient_bytes[run.kind]
            most = np.maximum(most, self.has_backward[run.kind] * running)
        # With the earliest of each kind recomputed, what the search counts.
        return np.maximum(
            table.pass_bytes(counts, recomputed), others + most + table.link_bytes(counts)
        )

    def link_bytes(self, counts: np.ndarray) -> np.ndarray:
        """What is held in every pass of tensors between stages, with what the stage's units share.
        [..., passes]"""
        links = self._first_link_bytes(counts) + self.last_bytes.T[_last_kind(counts)]
        return links + self.room_bytes(counts)[..., None]

    def room_bytes(self, counts: np.ndarray) -> np.ndarray:
        """What the units of stages share through the run. [...]"""
        shared = ((counts > 0) * self.shared_bytes).max(axis=-1)
        shared = shared + ((counts > 0) * self.expert_bytes).max(axis=-1)
        if len(self.buffer_bytes):
            shared = shared + ((counts > 0) @ self.has_buffer > 0) @ self.buffer_bytes
        return shared

    def _first_link_bytes(self, counts: np.ndarray) -> np.ndarray:
        """Tensors of the cut before a stage. [..., passes]

        Where it begins follows from its counts, but for stages of one kind, which count the larger.
        """
        held = counts > 0
        first = held.argmax(axis=-1)
        outer, inner = self.first_bytes.T[first], self.inner_bytes.T[first]
        of_kind = np.take_along_axis(counts, first[..., None], axis=-1)
        has_all = of_kind >= np.array([len(kind.places) for kind in self.kinds])[first][..., None]
        is_alone = held.sum(axis=-1, keepdims=True) == 1
        return np.where(has_all | is_alone & (outer > inner), outer, inner)

    def of_passes(self, chosen: np.ndarray) -> "MemoryTable":
        """A table of some of the passes."""
        return self._each(lambda of_passes: of_passes[chosen])

    def joined(self, more: "MemoryTable") -> "MemoryTable":
        """A table with the passes of another one besides."""
        others = iter([getattr(more, name) for name in _OF_PASSES])
        return self._each(lambda of_passes: np.concatenate([of_passes, next(others)]))

    def at_most(self) -> "MemoryTable":
        """One pass for every level, which needs at least as much as any of that level's, whatever
        the stage holds."""
        own = [self._own_level == level for level in np.unique(self._own_level)]
        return self._each(lambda of_passes: np.stack([of_passes[o].max(axis=0) for o in own]))

    def of_level(self, level: int) -> "MemoryTable":
        """Passes whose own micro-batch is of one level, as if there were no other levels, and one
        that needs nothing."""
        chosen = self._own_level == level
        columns = slice(level * len(self.kinds), (level + 1) * len(self.kinds))

        def change(of_passes: np.ndarray) -> np.ndarray:
            is_working = of_passes.shape[1] == len(self.kinds)
            of_own = of_passes[chosen] if is_working else of_passes[chosen, columns]
            return np.concatenate([of_own, np.zeros((1, len(self.kinds)))])

        return self._each(change)

    @property
    def _own_level(self) -> np.ndarray:
        """Level of every pass's own micro-batch; 0 where it keeps nothing. [passes]"""
        own = self.own_kept_bytes.reshape(-1, self.levels, len(self.kinds))
        return own.sum(axis=2).argmax(axis=1)

    def _each(self, change: Callable[[np.ndarray], np.ndarray]) -> "MemoryTable":
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in _OF_PASSES}
        return replace(self, **changed)


_OF_PASSES = (
    *("others_kept_bytes", "others_input_bytes", "own_kept_bytes", "own_input_bytes"),
    *("working_bytes", "passing_bytes", "first_bytes", "inner_bytes", "last_bytes"),
    "own_gradient_bytes",
)
"""Fields of a table that have a row for each of its passes."""


def _last_kind(counts: np.ndarray) -> np.ndarray:
    """Index of the last kind of unit that stages [..., kinds] hold. [...]"""
    return counts.shape[-1] - 1 - (counts[..., ::-1] > 0).argmax(axis=-1)


@lru_cache(maxsize=_KEPT_KINDS)
def _alike(kinds: tuple[UnitKind, ...]) -> list[list[int]]:
    """Indices of other kinds of layer that differ from each only in what they carry over cuts: as
    long as one of theirs is kept, its own bring back no more than was kept before."""
    return [
        [index for index, each in enumerate(kinds) if index != kind and each.is_like(own)]
        for kind, own in enumerate(kinds)
    ]


@lru_cache(maxsize=_KEPT_KINDS)
def _in_model_order(kinds: tuple[UnitKind, ...]) -> list[list[int]]:
    """Indices of kinds, those of a tower's layers together."""
    groups = groupby(enumerate(kinds), lambda each: each[1].is_layer or each[1].name)
    return [[index for index, _ in same] for _, same in groups]


def memory_tables(cost: CostModel, workload: Workload, pipeline_size: int) -> list[MemoryTable]:
    """Memory tables of every stage of a pipeline, each with its own micro-batches in flight.

    Of one level they have every pass that may be a stage's peak; of several levels these are too
    many, and they are `often_heaviest_tables`.
    """
    if cost.levels > 1:
        return often_heaviest_tables(cost, workload, pipeline_size)
    of_stages = passes_of_stages(cost, workload, pipeline_size)
    encoder_memory = encoder_memory_of(workload)
    # Stages that hold the same micro-batches share a table.
    distinct = {id(passes): passes for passes in of_stages}
    tables = {
        key: memory_table(cost, _largest(cost, passes), encoder_memory)
        for key, passes in distinct.items()
    }
    return [tables[id(passes)] for passes in of_stages]


def often_heaviest_tables(
    cost: CostModel, workload: Workload, pipeline_size: int
) -> list[MemoryTable]:
    """Memory tables with the few passes that are the peak of a wide choice of stages and recomputed
    layers: what is found by them must be looked at in all passes (`heaviest_passes`).

    Of many stages some are looked at; between two of these a stage has both ones' passes.
    """
    of_stages = passes_of_stages(cost, workload, pipeline_size)
    encoder_memory = encoder_memory_of(workload)
    drawn = _drawn_stages(cost, of_stages[0].largest)
    last = pipeline_size - 1
    looked_at = np.linspace(0, last, min(pipeline_size, _LOOKED_AT)).round().astype(np.int64)
    heaviest = [_heaviest_for(drawn, of_stages[stage]) for stage in looked_at]
    tables = []
    for stage, passes in enumerate(of_stages):
        after = int(np.searchsorted(looked_at, stage))
        before = after if looked_at[after] == stage else after - 1
        found = np.union1d(heaviest[before], heaviest[after])
        tables.append(memory_table(cost, passes.take(found), encoder_memory))
    return tables


def passes_of_stages(
    cost: CostModel, workload: Workload, pipeline_size: int, chosen: np.ndarray | None = None
) -> list[RunningPasses]:
    """Every pass of every stage of a pipeline, or those chosen by their rising indices; stages that
    hold the same micro-batches share them.

    Those of two stages at one index are the same pass of the same micro-batch.
    """
    features, slot = features_of(workload, cost), workload.slot
    others = _others_in_flight(pipeline_size, int(slot.max()) + 1).reshape(pipeline_size, -1)
    _, first, same = np.unique(others, axis=0, return_index=True, return_inverse=True)
    passes = [running_passes(features, slot, pipeline_size, each, chosen) for each in first]
    return [passes[each] for each in same]


def most_of_stages(cost: CostModel, workload: Workload, pipeline_size: int) -> list[RunningPasses]:
    """For every stage of a pipeline one pass that needs at least as much as any: bytes never fall
    where features grow."""
    largest = features_of(workload, cost).max(axis=0)
    most = _others_in_flight(pipeline_size, int(workload.slot.max()) + 1).max(axis=(1, 2))
    links = np.ones((1, len(LINKS)))
    return [
        RunningPasses(
            own=largest[None], others=others * largest[None], links=links, largest=largest
        )
        for others in most
    ]


def heaviest_passes(
    cost: CostModel,
    workload: Workload,
    counts: np.ndarray,
    recomputed: np.ndarray,
    runs_of: Sequence[Sequence[UnitRun]] | None = None,
) -> list[MemoryTable]:
    """The pass of every stage that needs the most memory of all, and that which keeps the most, as
    a table of these two.

    Args:
        counts: [stages, kinds].
        recomputed: [stages, levels * kinds].
        runs_of: of every stage's units; None for the earliest of every kind recomputed.
    """
    features, tables = features_of(workload, cost), []
    for stage, of_stage in enumerate(zip(counts, recomputed, strict=True)):
        passes = running_passes(features, workload.slot, len(counts), stage)
        both = bytes_in_passes(cost, passes, *of_stage, runs_of[stage] if runs_of else ())
        heaviest = passes.take(np.array([each.argmax() for each in both]))
        tables.append(memory_table(cost, heaviest, encoder_memory_of(workload)))
    return tables


def bytes_in_passes(
    cost: CostModel,
    passes: RunningPasses,
    counts: np.ndarray,
    recomputed: np.ndarray,
    runs: Sequence[UnitRun] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """What a stage needs besides its state in every pass, and what it keeps in it, of a table of
    some of them at a time. [passes] each

    Args:
        counts: [kinds].
        recomputed: [levels * kinds].
        runs: of the stage's units; none for the earliest of every kind recomputed.
    """
    needed, kept = [], []
    for first in range(0, len(passes.own), _PASSES_AT_ONCE):
        table = memory_table(cost, passes.take(slice(first, first + _PASSES_AT_ONCE)))
        needed.append(table.stage_bytes(runs) if runs else table.pass_bytes(counts, recomputed))
        kept.append(table.activation_bytes(counts, recomputed))
    return np.concatenate(needed), np.concatenate(kept)


_Drawn = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""What `_drawn_stages` gives."""


def _heaviest_for(drawn: _Drawn, passes: RunningPasses) -> np.ndarray:
    """Indices of the passes that are the heaviest for some of the stages that were drawn."""
    others, own, own_backward, links = drawn
    chunks = range(0, len(passes.own), _PASSES_AT_ONCE)
    most, found = np.full(len(others), -np.inf), np.zeros(len(others), np.int64)
    for chunk in (slice(first, first + _PASSES_AT_ONCE) for first in chunks):
        bytes_ = others @ passes.others[chunk].T + own @ passes.own[chunk].T
        bytes_ += links @ passes.links[chunk, :-1].T
        bytes_ += (own_backward @ passes.own[chunk].T) * passes.links[chunk, -1]
        place = bytes_.argmax(axis=1)
        largest = bytes_[np.arange(len(others)), place]
        found = np.where(largest > most, chunk.start + place, found)
        most = np.maximum(largest, most)
    return np.unique(found)


def _drawn_stages(cost: CostModel, largest: np.ndarray) -> _Drawn:
    """What a unit of each feature takes in stages that are drawn at random, while a unit of each
    kind runs in them: of the other micro-batches, of the running one, and of that in a backward
    besides, [stages * kinds * moments, levels * features] each; and what each of `LINKS` but the
    last takes, [stages * kinds * moments, links - 1]."""
    rng, levels, kinds = np.random.default_rng(0), cost.levels, len(cost.kinds)
    units = cost.units.values()
    is_layer = np.array([kind.is_layer for kind in cost.kinds])
    drawn = _DRAWN_STAGES if levels == 1 else _DRAWN_OF_LEVELS
    shape = drawn, levels, kinds
    most = np.where(is_layer, rng.choice(_MOST_LAYERS, (drawn, 1)), 2)
    counts = rng.integers(0, most)
    # Most levels recompute nothing or all they can, and some stages all of every level.
    share = np.clip(rng.uniform(-0.5, 1.5, shape), 0, 1)
    share[::_RECOMPUTING_ALL] = 1
    again = counts[:, None] * is_layer * share
    whole = np.repeat(counts[:, None] - again, len(cost.features) // levels, axis=1)
    recomputed = np.repeat(again, len(cost.features) // levels, axis=1)
    activation, boundary = (_of_units(cost, f"{each}_bytes") for each in ("activation", "boundary"))
    kept = whole * activation + recomputed * boundary  # [stages, levels * features, kinds]
    back = np.where((whole == 0) & (recomputed > 0), activation - boundary, 0.0)
    # While a unit runs, those after it keep nothing.
    running = kept.cumsum(axis=2) + back
    of_cuts = cut_bytes(cost, largest, counts)
    first, last = (counts > 0).argmax(axis=1), _last_kind(counts)
    gradient = np.stack([unit.output_gradient_bytes for unit in units])[last]
    input_ = unkept_input(cost)[first]
    others, own, own_backward, links = [], [], [], []
    for kind, unit in enumerate(units):
        holds = counts[:, kind] > 0
        for working in unit.transient_bytes:
            others.append((kept.sum(axis=2) + input_)[holds])
            own.append((running[:, :, kind] + input_)[holds] + working)
            own_backward.append((gradient * (last != kind)[:, None])[holds])
            links.append(of_cuts.T[holds])
    found = (np.concatenate(each) for each in (others, own, own_backward, links))
    return next(found), next(found), next(found), next(found)


def _largest(cost: CostModel, passes: RunningPasses) -> RunningPasses:
    """Passes of which no other one needs as much memory for sure.

    Bytes never fall where a feature of either micro-batch grows.
    """
    units = cost.units.values()
    kept = np.array([[unit.activation_bytes, unit.boundary_bytes] for unit in units])
    grows = kept.max(axis=(0, 1)) > 0
    worked = [[*unit.transient_bytes, unit.passing_bytes] for unit in units]
    works = grows | (np.concatenate(worked).max(axis=0) > 0)
    columns = [passes.others[:, grows], passes.own[:, works], passes.links]
    found = undominated(np.concatenate(columns, axis=1))
    others, own = (np.zeros((len(found), len(grows))) for _ in range(2))
    splits = np.cumsum([grows.sum(), works.sum()])
    others[:, grows], own[:, works], links = np.split(found, splits, axis=1)
    return RunningPasses(own=own, others=others, links=links, largest=passes.largest)


def encoder_memory_of(workload: Workload) -> EncoderMemory:
    """What data-parallel encoders take of every device; nothing where there are none."""
    return EncoderMemory() if workload.encoding is None else workload.encoding.encoder_memory


_NO_ENCODERS = EncoderMemory()


def memory_table(
    cost: CostModel, passes: RunningPasses, encoder_memory: EncoderMemory = _NO_ENCODERS
) -> MemoryTable:
    """Memory of the given passes by kind of unit, beside what encoders take."""
    units = cost.units.values()
    activation, boundary = (_of_units(cost, f"{each}_bytes") for each in ("activation", "boundary"))
    working = [(passes.own @ unit.transient_bytes.T).max(axis=1) for unit in units]
    shared = [_largest_bytes(cost, unit.shared_bytes, passes.largest) for unit in units]
    # Tensors of other micro-batches on the cuts are as large as any: they are no more than some
    # thousandths of what a stage holds, and a pass would have four micro-batches' features more.
    next_input, input_gradient, output, next_gradient, own_gradient = passes.links.T[..., None]
    came, back_to, sent, back = _cut_bytes(cost, passes.largest)
    first_bytes = next_input * came + input_gradient * back_to
    first_bytes = first_bytes + (passes.own + passes.others) @ unkept_input(cost).T
    fewer_come = [two.is_layer and one.carried > two.carried for one, two in pairwise(cost.kinds)]
    inner_bytes = np.where(
        [False, *fewer_come], next_input * sent + input_gradient * back, first_bytes
    )
    state_bytes = [unit_bytes(cost, unit) for unit in units]
    return MemoryTable(
        kinds=cost.kinds,
        state_bytes=np.array(state_bytes),
        tied_bytes=tied_state_bytes(cost),
        others_kept_bytes=_level_by_level(passes.others, activation, cost.levels),
        others_input_bytes=_level_by_level(passes.others, boundary, cost.levels),
        own_kept_bytes=_level_by_level(passes.own, activation, cost.levels),
        own_input_bytes=_level_by_level(passes.own, boundary, cost.levels),
        working_bytes=np.stack(working, axis=1),
        passing_bytes=passes.own @ _of_units(cost, "passing_bytes"),
        first_bytes=first_bytes,
        inner_bytes=inner_bytes,
        last_bytes=output * sent + next_gradient * back,
        own_gradient_bytes=own_gradient * (passes.own @ _of_units(cost, "output_gradient_bytes")),
        shared_bytes=np.array(shared),
        buffer_bytes=np.array([buffer.bytes for buffer in cost.library_buffers]),
        has_buffer=np.array(
            [[name in buffer.kinds for buffer in cost.library_buffers] for name in cost.units], int
        ),
        expert_bytes=cost.expert_peer_bytes * cost.of_experts,
        has_backward=np.array([unit.has_backward for unit in units]),
        encoder_memory=encoder_memory,
        tied_gradient_bytes=tied_gradient_bytes(cost),
    )


def unkept_input(cost: CostModel) -> np.ndarray:
    """Input of a stage that begins with a unit of each kind, where the unit keeps none but the
    stage does for its gradient: projectors and the language embed. [kinds, features]"""
    units = [*cost.units.values()]
    inputs = np.zeros((len(units), len(cost.features)))
    for index, (before, kind) in enumerate(zip(units, cost.kinds[1:], strict=False), 1):
        if before.output_gradient_bytes.any() and not (kind.is_layer or kind.name == HEAD):
            inputs[index] = before.output_bytes
    return inputs


def tied_gradient_bytes(cost: CostModel) -> np.ndarray:
    """Gradients of the tied matrix, besides the one that its unit works with. [kinds]

    They are whole, however weights are divided.
    """
    matrix_bytes = cost.tied_trained_parameters * cost.rates.weight_bytes
    matrix_bytes *= cost.weight_parts
    besides = {LANGUAGE_EMBED: 2, HEAD: 0}
    number = [besides.get(each.name, 1) * (each.tower == LANGUAGE) for each in cost.kinds]
    return matrix_bytes * np.array(number)


def _cut_bytes(cost: CostModel, largest: np.ndarray) -> np.ndarray:
    """Tensors of the largest micro-batch on the cuts before and after a unit of each kind: what
    comes to it, the gradient of that, what it sends, the gradient of that. [4, kinds]"""
    units = cost.units.values()
    sent = np.array([_largest_bytes(cost, unit.output_bytes, largest) for unit in units])
    back = np.array([_largest_bytes(cost, unit.output_gradient_bytes, largest) for unit in units])
    # What comes to a unit has left a unit of its kind, or of the kind before it: where adapters
    # begin with the layers, only the former has a gradient.
    is_layer = np.array([kind.is_layer for kind in cost.kinds])
    came, back_to = np.append(0, sent[:-1]), np.append(0, back[:-1])
    return np.stack([came, np.where(is_layer & (back_to == 0), back, back_to), sent, back])


def cut_bytes(cost: CostModel, largest: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Tensors of the largest micro-batch on the cuts before and after stages of so many units
    [..., kinds], in the same order. [4, ...]"""
    first, last = (counts > 0).argmax(axis=-1), _last_kind(counts)
    came, back_to, sent, back = _cut_bytes(cost, largest)
    return np.stack([came[first], back_to[first], sent[last], back[last]])


def _largest_bytes(cost: CostModel, per_feature: np.ndarray, largest: np.ndarray) -> float:
    """Bytes of a micro-batch with the most of every feature, at the level where they are most."""
    return float((per_feature * largest).reshape(cost.levels, -1).sum(axis=1).max())


def _of_units(cost: CostModel, name: str) -> np.ndarray:
    """Coefficients of every kind of unit. [levels * features, kinds]"""
    return np.stack([getattr(unit, name) for unit in cost.units.values()], axis=1)


def _level_by_level(features: np.ndarray, per_unit: np.ndarray, levels: int) -> np.ndarray:
    """Product of features [passes, levels * features] and coefficients [levels * features, kinds]
    within every level. [passes, levels * kinds]"""
    blocks = zip(np.split(features, levels, axis=1), np.split(per_unit, levels), strict=True)
    return np.concatenate([of_level @ per_kind for of_level, per_kind in blocks], axis=1)


def unit_bytes(cost: CostModel, unit: UnitCost) -> float:
    """Bytes of weights, gradients and optimizer state of a unit on one device."""
    trained = unit.trained_parameters, unit.trained_expert_parameters
    weight_bytes = cost.of_parameters("weight_bytes", unit.parameters, unit.expert_parameters)
    trained_bytes = cost.of_parameters("gradient_bytes", *trained) + cost.of_parameters(
        "optimizer_bytes", *trained
    )
    return weight_bytes + trained_bytes + unit.weight_copy_bytes


def tied_state_bytes(cost: CostModel) -> float:
    """Bytes of weights, gradients and optimizer state of the tied matrix on one device."""
    trained = cost.tied_trained_parameters, 0
    trained_bytes = cost.of_parameters("gradient_bytes", *trained) + cost.of_parameters(
        "optimizer_bytes", *trained
    )
    return cost.of_parameters("weight_bytes", cost.tied_parameters, 0) + trained_bytes


def stage_memories(
    cost: CostModel, stages_at: Sequence[Sequence[Stage]], workload: Workload
) -> list[StageMemory]:
    """Peak memory of one device of every stage, over all passes of a run."""
    runs_of = [unit_runs(cost.kinds, at_levels) for at_levels in zip(*stages_at, strict=True)]
    held = zip(*(counts_of_runs(len(cost.kinds), runs) for runs in runs_of), strict=True)
    counts, recomputed = map(np.stack, held)
    tables = heaviest_passes(cost, workload, counts, recomputed, runs_of)
    return [stage_memory(cost, runs, table) for runs, table in zip(runs_of, tables, strict=True)]


def recomputed_at_levels(
    kinds: Sequence[UnitKind], stages_at: Sequence[Sequence[Stage]]
) -> np.ndarray:
    """Units that every stage recomputes at each level. [stages, levels * kinds]"""
    return np.stack(
        [
            np.concatenate([recomputed_counts(kinds, stage) for stage in at_levels])
            for at_levels in zip(*stages_at, strict=True)
        ]
    )


def stage_memory(cost: CostModel, runs: Sequence[UnitRun], table: MemoryTable) -> StageMemory:
    """Peak memory of one device of a stage of these runs of units, over the passes of its table."""
    counts, recomputed = counts_of_runs(len(cost.kinds), runs)
    held_bytes = float(table.activation_bytes(counts, recomputed).max())
    pass_bytes = table.stage_bytes(runs)
    return memory_of_stage(cost, counts, table, held_bytes=held_bytes, pass_bytes=pass_bytes)


def memory_of_stage(
    cost: CostModel,
    counts: np.ndarray,
    table: MemoryTable,
    *,
    held_bytes: float,
    pass_bytes: np.ndarray,
) -> StageMemory:
    """Memory of one device of a stage of so many units of each kind [kinds].

    Args:
        held_bytes: most activations of all micro-batches that are held.
        pass_bytes: what the stage needs besides its state in every pass, [passes].
    """
    held, of_held, copies = counts @ np.array(
        [
            (unit.parameters, unit.expert_parameters, unit.weight_copy_bytes)
            for unit in cost.units.values()
        ]
    )
    held -= cost.tied_parameters * int(holds_both_ends(cost.kinds, counts))
    weights_bytes = float(cost.of_parameters("weight_bytes", held, of_held) + copies)
    trained = float(trained_parameters(cost, counts[None])[0])
    of_experts = float(trained_expert_parameters(cost, counts[None])[0])
    encoder_memory = table.encoder_memory
    embeds = bool(counts[[kind.name for kind in cost.kinds].index(LANGUAGE_EMBED)])
    beside_bytes = float(table.with_encoders(counts, pass_bytes))
    running_bytes = beside_bytes - encoder_memory.held - encoder_memory.features * embeds
    return StageMemory(
        weights_gib=(weights_bytes + encoder_memory.weights) / GIB,
        gradients_gib=(
            cost.of_parameters("gradient_bytes", trained, of_experts) + encoder_memory.gradients
        )
        / GIB,
        optimizer_gib=(
            cost.of_parameters("optimizer_bytes", trained, of_experts) + encoder_memory.optimizer
        )
        / GIB,
        activations_gib=(held_bytes + encoder_memory.kept + encoder_memory.features * embeds) / GIB,
        transient_gib=(running_bytes - held_bytes + encoder_memory.buffers) / GIB,
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
