"""Stage memory: the one formula that search, plan, check and replay use.

A device holds weights, gradients and optimizer state, the activations of micro-batches in flight,
P2P buffers and the working memory of the running unit. The peak is the maximum over all passes and
kinds of unit. In a backward, later units have already freed their activations. A recomputed layer
keeps only its input until its backward. Costs, features and recompute counts are per level,
concatenated (`omnibal.pipeline.level_costs`); unit counts are not.
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
from omnibal.pipeline.operation_graph import others_in_flight
from omnibal.pipeline.prediction import StageMemory
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_cost import trained_expert_parameters, trained_parameters
from omnibal.pipeline.unit_runs import UnitRun, counts_of_runs, holds_both_ends, unit_runs
from omnibal.pipeline.workload import Workload

GIB = 1024**3  # bytes
_CAP_TOLERANCE = 1e-12
"""Relative tolerance; sums of the same bytes in another order differ by less."""
_PASSES_AT_ONCE = 4_096
"""Passes per chunk of memory computation."""
_LOOKED_AT = 9
"""Max stages per pipeline searched for their heaviest passes."""
_DRAWN_STAGES, _DRAWN_OF_LEVELS = 8, 32
"""Random stage contents drawn for a table of one level, and of several."""
_RECOMPUTING_ALL = 4
"""Every n-th drawn stage recomputes all layers."""
_MOST_LAYERS = (4, 24)
"""Max layers per kind in drawn stages: shallow and deep."""


def fits_cap(peak: np.ndarray | float, memory_cap: np.ndarray | float) -> np.ndarray:
    """Return whether peaks fit a memory cap, to rounding: equal peaks fit. [...]"""
    return np.asarray(peak) <= np.asarray(memory_cap) * (1 + _CAP_TOLERANCE)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunningPasses:
    """Passes of a stage: running micro-batch, other micro-batches in flight and P2P tensors."""

    own: np.ndarray
    """Features of the running micro-batch, [passes, features]."""
    others: np.ndarray
    """Summed features of the other micro-batches in flight, [passes, features]."""
    links: np.ndarray
    """1 if the tensor in `LINKS` is live in the pass, else 0, [passes, links]."""
    largest: np.ndarray
    """Maximum of each feature over all micro-batches, [features]."""

    def take(self, chosen: np.ndarray | slice) -> "RunningPasses":
        """Select passes."""
        return rows_of(self, chosen, "largest")


LINKS = ("next input", "last input's gradient", "last output", "next gradient", "own gradient")
"""P2P tensors of the cuts before and after a stage; in a backward also its output's gradient."""


def running_sums(features: np.ndarray) -> np.ndarray:
    """Return prefix sums of the packs' features. [packs + 1, features]"""
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
    """Return a stage's forwards in pack order, then its backwards.

    Args:
        features: [packs, features]; packs are sorted by step, rank and slot.
        slot: [packs]; slots count from 0 without gaps.
        chosen: increasing indices of the passes to return, or None for all.
    """
    earlier, later = others_in_flight(pipeline_size, int(slot.max()) + 1)[stage]
    packs, total = len(slot), running_sums(features)
    every = np.arange(2 * packs) if chosen is None else chosen
    forward, backward = every[every < packs], every[every >= packs] - packs
    # Steps may have fewer micro-batches: none are in flight past a step's last.
    ends = np.append(np.flatnonzero(slot == 0)[1:], packs)
    end = ends[np.cumsum(slot == 0) - 1]
    before = total[forward] - total[forward - earlier[slot[forward]]]
    last = np.minimum(backward + 1 + later[slot[backward]], end[backward])
    after = total[last] - total[backward + 1]
    begun, not_last = slot > 0, np.arange(packs) + 1 < end
    ended = (slot > earlier[slot])[forward]
    # A step's first forward and first backward begin without the next tensor.
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
    """Bytes per pass and kind of unit, separate for each level.

    Methods take `counts` [..., kinds] and `recomputed` [..., levels * kinds].
    """

    kinds: tuple[UnitKind, ...]
    state_bytes: np.ndarray
    """Weights, gradients and optimizer state, [kinds]."""
    tied_bytes: float
    """State shared by language embed and head in a stage with both."""
    others_kept_bytes: np.ndarray
    """Activations of the other micro-batches in flight, [passes, levels * kinds]."""
    others_input_bytes: np.ndarray
    """`others_kept_bytes` if the unit is recomputed, [passes, levels * kinds]."""
    own_kept_bytes: np.ndarray
    """Activations of the running micro-batch, [passes, levels * kinds]."""
    own_input_bytes: np.ndarray
    """`own_kept_bytes` if the unit is recomputed, [passes, levels * kinds]."""
    working_bytes: np.ndarray
    """Working memory of a unit on the running micro-batch, [passes, kinds]."""
    passing_bytes: np.ndarray
    """Memory held by units without a backward while they run, [passes, kinds]."""
    first_bytes: np.ndarray
    """P2P tensors before a stage beginning with the kind's first unit, [passes, kinds]."""
    inner_bytes: np.ndarray
    """P2P tensors before a stage beginning with a later unit; may be fewer, [passes, kinds]."""
    last_bytes: np.ndarray
    """P2P tensors after a stage ending with the unit, [passes, kinds]."""
    own_gradient_bytes: np.ndarray
    """Gradient of the stage's output, live until the backward ends, [passes, kinds]."""
    shared_bytes: np.ndarray
    """Buffer shared by all units and kinds (use the max), [kinds]."""
    buffer_bytes: np.ndarray
    """Trainer library buffers, allocated once per stage, [buffers]."""
    has_buffer: np.ndarray
    """1 if a stage with the kind has the buffer, else 0, [kinds, buffers]."""
    expert_bytes: np.ndarray
    """Expert-parallel communication buffers, allocated once per stage, [kinds]."""
    has_backward: np.ndarray
    encoder_memory: EncoderMemory
    """Memory of data-parallel encoders on every device."""
    tied_gradient_bytes: np.ndarray
    """Extra tied-matrix gradients in a backward, in a stage with embed and head. [kinds]"""

    @property
    def levels(self) -> int:
        return self.own_kept_bytes.shape[1] // len(self.kinds)

    def activation_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return the activations of all micro-batches in flight, per pass. [..., passes]"""
        whole = np.tile(counts, self.levels) - recomputed
        kept = whole @ (self.others_kept_bytes + self.own_kept_bytes).T
        return kept + recomputed @ (self.others_input_bytes + self.own_input_bytes).T

    def peak_bytes(
        self, counts: np.ndarray, recomputed: np.ndarray, running: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the peak memory with state, given `running_bytes` if known. [...]"""
        state = counts @ self.state_bytes - self.tied_bytes * holds_both_ends(self.kinds, counts)
        if running is None:
            running = self.running_bytes(counts, recomputed)
        pass_bytes = running + self._in_flight_bytes(counts, recomputed)
        return state + self.with_encoders(counts, pass_bytes)

    def with_encoders(self, counts: np.ndarray, pass_bytes: np.ndarray) -> np.ndarray:
        """Return the max over passes [..., passes], with data-parallel encoders' memory. [...]"""
        embeds = counts[..., [kind.name for kind in self.kinds].index(LANGUAGE_EMBED)] > 0
        taken = self.encoder_memory
        running = np.maximum(pass_bytes.max(axis=-1), taken.arrival * embeds)
        in_step = taken.held + np.maximum(running + taken.features * embeds, taken.encoding)
        if not taken.whole:  # an evaluation takes less than a step
            return in_step
        # Evaluation runs forward only, with less working memory than a backward.
        working = (self.working_bytes.max(axis=0) * (counts > 0)).max(axis=-1)
        evaluating = taken.evaluating + np.maximum(working, taken.evaluation)
        return np.where(embeds, np.maximum(in_step, evaluating), in_step)

    def pass_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return the memory of every pass without the state. [..., passes]"""
        return self.running_bytes(counts, recomputed) + self._in_flight_bytes(counts, recomputed)

    def _in_flight_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return the bytes of other micro-batches in flight and of P2P tensors. [..., passes]"""
        whole = np.tile(counts, self.levels) - recomputed
        others = whole @ self.others_kept_bytes.T + recomputed @ self.others_input_bytes.T
        return others + self.link_bytes(counts)

    def running_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return the running micro-batch's max memory in every pass, equal in all stages. [...,
        passes]

        Recomputing one more layer never raises it: a kind's earliest layers are recomputed, and a
        kept layer runs backward before them with more live activations. Kinds of a tower may be
        interleaved, so all of its layers count as kept while any runs.
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
            # Units after these have freed their activations in the backward.
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
                    # The last unit's working memory includes this gradient.
                    running = running + (kind != last[..., None]) * own_gradient
                    running = running + tied * self.tied_gradient_bytes[kind]
                else:
                    passing = passing + held * self.passing_bytes[:, kind]
                    running = running + passing
                most = np.where(held, np.maximum(most, running), most)
        return most

    def stage_bytes(self, runs: Sequence[UnitRun]) -> np.ndarray:
        """Return the max memory per pass of a stage's runs, in order. [passes]"""
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
            # The run's last layer goes backward first: all earlier activations are kept, its own
            # restored.
            running = own - held + kept.sum(axis=1) + self.working_bytes[:, run.kind]
            running = running + (run.kind != _last_kind(counts)) * own_gradient
            running = running + tied * self.tied_gradient_bytes[run.kind]
            most = np.maximum(most, self.has_backward[run.kind] * running)
        # As the search counts: the earliest layers of each kind are recomputed.
        return np.maximum(
            table.pass_bytes(counts, recomputed), others + most + table.link_bytes(counts)
        )

    def link_bytes(self, counts: np.ndarray) -> np.ndarray:
        """Return P2P tensors and shared buffers per pass. [..., passes]"""
        # Counts imply the stage's first unit, and so the tensors of the cut before it, except in
        # stages of one kind, which take the larger size.
        held = counts > 0
        first = held.argmax(axis=-1)
        outer, inner = self.first_bytes.T[first], self.inner_bytes.T[first]
        of_kind = np.take_along_axis(counts, first[..., None], axis=-1)
        has_all = of_kind >= np.array([len(kind.places) for kind in self.kinds])[first][..., None]
        is_alone = held.sum(axis=-1, keepdims=True) == 1
        before = np.where(has_all | is_alone & (outer > inner), outer, inner)
        links = before + self.last_bytes.T[_last_kind(counts)]
        return links + self.room_bytes(counts)[..., None]

    def room_bytes(self, counts: np.ndarray) -> np.ndarray:
        """Return the buffers that stages allocate once per run. [...]"""
        shared = ((counts > 0) * self.shared_bytes).max(axis=-1)
        shared = shared + ((counts > 0) * self.expert_bytes).max(axis=-1)
        if len(self.buffer_bytes):
            shared = shared + ((counts > 0) @ self.has_buffer > 0) @ self.buffer_bytes
        return shared

    def of_passes(self, chosen: np.ndarray) -> "MemoryTable":
        """Select passes."""
        return self._each(lambda of_passes: of_passes[chosen])

    def joined(self, more: "MemoryTable") -> "MemoryTable":
        """Concatenate the passes of two tables."""
        others = iter([getattr(more, name) for name in _OF_PASSES])
        return self._each(lambda of_passes: np.concatenate([of_passes, next(others)]))

    def at_most(self) -> "MemoryTable":
        """Return one pass per level, an upper bound of all its passes."""
        own = [self._own_level == level for level in np.unique(self._own_level)]
        return self._each(lambda of_passes: np.stack([of_passes[o].max(axis=0) for o in own]))

    def of_level(self, level: int) -> "MemoryTable":
        """Return passes that run a micro-batch of `level`, plus an empty pass."""
        chosen = self._own_level == level
        columns = slice(level * len(self.kinds), (level + 1) * len(self.kinds))

        def change(of_passes: np.ndarray) -> np.ndarray:
            is_working = of_passes.shape[1] == len(self.kinds)
            of_own = of_passes[chosen] if is_working else of_passes[chosen, columns]
            return np.concatenate([of_own, np.zeros((1, len(self.kinds)))])

        return self._each(change)

    @property
    def _own_level(self) -> np.ndarray:
        """Level of the running micro-batch, 0 if it keeps nothing. [passes]"""
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
"""Table fields with one row per pass."""


def _last_kind(counts: np.ndarray) -> np.ndarray:
    """Return the index of the last kind that stages [..., kinds] hold. [...]"""
    return counts.shape[-1] - 1 - (counts[..., ::-1] > 0).argmax(axis=-1)


@lru_cache(maxsize=8)  # an entry per model
def _alike(kinds: tuple[UnitKind, ...]) -> list[list[int]]:
    """Return other kinds that differ from a kind only in P2P tensors. While any such layer is kept,
    recomputing this kind needs no more memory than before."""
    return [
        [index for index, each in enumerate(kinds) if index != kind and each.is_like(own)]
        for kind, own in enumerate(kinds)
    ]


@lru_cache(maxsize=8)  # an entry per model
def _in_model_order(kinds: tuple[UnitKind, ...]) -> list[list[int]]:
    """Return kind indices in model order, grouped by tower."""
    groups = groupby(enumerate(kinds), lambda each: each[1].is_layer or each[1].name)
    return [[index for index, _ in same] for _, same in groups]


def memory_tables(cost: CostModel, workload: Workload, pipeline_size: int) -> list[MemoryTable]:
    """Return every stage's memory table of one level, with each pass that may be the peak."""
    of_stages = passes_of_stages(cost, workload, pipeline_size)
    encoder_memory = encoder_memory_of(workload)
    # Stages with equal micro-batches in flight share a table.
    distinct = {id(passes): passes for passes in of_stages}
    tables = {
        key: memory_table(cost, _largest(cost, passes), encoder_memory)
        for key, passes in distinct.items()
    }
    return [tables[id(passes)] for passes in of_stages]


def often_heaviest_tables(
    cost: CostModel, workload: Workload, pipeline_size: int
) -> list[MemoryTable]:
    """Return memory tables with the few passes that peak for most stage contents.

    Plans based on them must be checked in all passes (`heaviest_passes`). With many stages only
    some are sampled, and a stage between two samples has the passes of both.
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
    """Return every pass of every stage, or the passes at increasing indices `chosen`.

    Index i is the same pass of the same micro-batch in all stages. Stages with equal micro-batches
    in flight share an object.
    """
    features, slot = features_of(workload, cost), workload.slot
    others = others_in_flight(pipeline_size, int(slot.max()) + 1).reshape(pipeline_size, -1)
    _, first, same = np.unique(others, axis=0, return_index=True, return_inverse=True)
    passes = [running_passes(features, slot, pipeline_size, each, chosen) for each in first]
    return [passes[each] for each in same]


def most_of_stages(cost: CostModel, workload: Workload, pipeline_size: int) -> list[RunningPasses]:
    """Return one pass per stage that bounds all of its passes, as bytes grow with features."""
    largest = features_of(workload, cost).max(axis=0)
    most = others_in_flight(pipeline_size, int(workload.slot.max()) + 1).max(axis=(1, 2))
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
    """Return a table per stage with its peak pass and the pass that keeps the most activations.

    Args:
        counts: [stages, kinds].
        recomputed: [stages, levels * kinds].
        runs_of: units of every stage, or None if the earliest layers of every kind are recomputed.
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
    """Return memory without state, and activations kept, of every pass, in chunks. [passes] each

    Args:
        counts: [kinds].
        recomputed: [levels * kinds].
        runs: units of the stage, or empty if the earliest layers of every kind are recomputed.
    """
    needed, kept = [], []
    for first in range(0, len(passes.own), _PASSES_AT_ONCE):
        table = memory_table(cost, passes.take(slice(first, first + _PASSES_AT_ONCE)))
        needed.append(table.stage_bytes(runs) if runs else table.pass_bytes(counts, recomputed))
        kept.append(table.activation_bytes(counts, recomputed))
    return np.concatenate(needed), np.concatenate(kept)


_Drawn = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Result of `_drawn_stages`."""


def _heaviest_for(drawn: _Drawn, passes: RunningPasses) -> np.ndarray:
    """Return indices of the passes that are the peak of any drawn stage."""
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
    """Return bytes per feature in randomly drawn stages while a unit of each kind runs: of other
    micro-batches, of the running one, and of its backward in addition, [stages * kinds * moments,
    levels * features] each; and of each of `LINKS` except the last, [stages * kinds * moments,
    links - 1]."""
    rng, levels, kinds = np.random.default_rng(0), cost.levels, len(cost.kinds)
    units = cost.units.values()
    is_layer = np.array([kind.is_layer for kind in cost.kinds])
    drawn = _DRAWN_STAGES if levels == 1 else _DRAWN_OF_LEVELS
    shape = drawn, levels, kinds
    most = np.where(is_layer, rng.choice(_MOST_LAYERS, (drawn, 1)), 2)
    counts = rng.integers(0, most)
    # Most levels recompute nothing or everything, and some stages everything at all levels.
    share = np.clip(rng.uniform(-0.5, 1.5, shape), 0, 1)
    share[::_RECOMPUTING_ALL] = 1
    again = counts[:, None] * is_layer * share
    whole = np.repeat(counts[:, None] - again, len(cost.features) // levels, axis=1)
    recomputed = np.repeat(again, len(cost.features) // levels, axis=1)
    activation, boundary = (_of_units(cost, f"{each}_bytes") for each in ("activation", "boundary"))
    kept = whole * activation + recomputed * boundary  # [stages, levels * features, kinds]
    back = np.where((whole == 0) & (recomputed > 0), activation - boundary, 0.0)
    # Units after the running one keep nothing.
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
    """Return the Pareto-maximal passes by memory features: bytes never decrease with features."""
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
    """Return data-parallel encoders' memory per device, or zero if there are none."""
    return EncoderMemory() if workload.encoding is None else workload.encoding.encoder_memory


_NO_ENCODERS = EncoderMemory()


def memory_table(
    cost: CostModel, passes: RunningPasses, encoder_memory: EncoderMemory = _NO_ENCODERS
) -> MemoryTable:
    """Return the memory of passes by kind of unit, with encoders' memory."""
    units = cost.units.values()
    activation, boundary = (_of_units(cost, f"{each}_bytes") for each in ("activation", "boundary"))
    working = [(passes.own @ unit.transient_bytes.T).max(axis=1) for unit in units]
    shared = [_largest_bytes(cost, unit.shared_bytes, passes.largest) for unit in units]
    # Other micro-batches' tensors on the cuts are bounded by the largest: they are a few
    # thousandths of a stage, and exact sizes would need four more feature columns.
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
    """Return the input of a stage beginning with each kind, if the unit keeps none but the stage
    does for its gradient: projectors and the language embed. [kinds, features]"""
    units = [*cost.units.values()]
    inputs = np.zeros((len(units), len(cost.features)))
    for index, (before, kind) in enumerate(zip(units, cost.kinds[1:], strict=False), 1):
        if before.output_gradient_bytes.any() and not (kind.is_layer or kind.name == HEAD):
            inputs[index] = before.output_bytes
    return inputs


def tied_gradient_bytes(cost: CostModel) -> np.ndarray:
    """Return gradients of the tied matrix beyond its unit's own, unsharded. [kinds]"""
    matrix_bytes = cost.tied_trained_parameters * cost.rates.weight_bytes
    matrix_bytes *= cost.weight_parts
    besides = {LANGUAGE_EMBED: 2, HEAD: 0}
    number = [besides.get(each.name, 1) * (each.tower == LANGUAGE) for each in cost.kinds]
    return matrix_bytes * np.array(number)


def _cut_bytes(cost: CostModel, largest: np.ndarray) -> np.ndarray:
    """Return the largest P2P tensors: input, its gradient, output, its gradient. [4, kinds]"""
    units = cost.units.values()
    sent = np.array([_largest_bytes(cost, unit.output_bytes, largest) for unit in units])
    back = np.array([_largest_bytes(cost, unit.output_gradient_bytes, largest) for unit in units])
    # A unit's input comes from its own kind or from the previous kind. If adapters begin with the
    # layers, only its own kind's has a gradient.
    is_layer = np.array([kind.is_layer for kind in cost.kinds])
    came, back_to = np.append(0, sent[:-1]), np.append(0, back[:-1])
    return np.stack([came, np.where(is_layer & (back_to == 0), back, back_to), sent, back])


def cut_bytes(cost: CostModel, largest: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the largest micro-batch's P2P tensors for stages with `counts` units [..., kinds];
    order as in `_cut_bytes`. [4, ...]"""
    first, last = (counts > 0).argmax(axis=-1), _last_kind(counts)
    came, back_to, sent, back = _cut_bytes(cost, largest)
    return np.stack([came[first], back_to[first], sent[last], back[last]])


def _largest_bytes(cost: CostModel, per_feature: np.ndarray, largest: np.ndarray) -> float:
    """Return bytes of a micro-batch with the max of every feature, max over levels."""
    return float((per_feature * largest).reshape(cost.levels, -1).sum(axis=1).max())


def _of_units(cost: CostModel, name: str) -> np.ndarray:
    """Return coefficients of every kind of unit. [levels * features, kinds]"""
    return np.stack([getattr(unit, name) for unit in cost.units.values()], axis=1)


def _level_by_level(features: np.ndarray, per_unit: np.ndarray, levels: int) -> np.ndarray:
    """Return features [passes, levels * features] times coefficients [levels * features, kinds],
    per level. [passes, levels * kinds]"""
    blocks = zip(np.split(features, levels, axis=1), np.split(per_unit, levels), strict=True)
    return np.concatenate([of_level @ per_kind for of_level, per_kind in blocks], axis=1)


def unit_bytes(cost: CostModel, unit: UnitCost) -> float:
    """Return weights, gradients and optimizer state of a unit per device."""
    held = unit.parameters, unit.expert_parameters
    trained = unit.trained_parameters, unit.trained_expert_parameters
    return _state_bytes(cost, held, trained) + unit.weight_copy_bytes


def tied_state_bytes(cost: CostModel) -> float:
    """Return weights, gradients and optimizer state of the tied matrix per device."""
    return _state_bytes(cost, (cost.tied_parameters, 0), (cost.tied_trained_parameters, 0))


def _state_bytes(cost: CostModel, held: tuple[int, int], trained: tuple[int, int]) -> float:
    """Return the state of parameters and expert parameters, held and trained."""
    gradients = cost.of_parameters("gradient_bytes", *trained)
    optimizer = cost.of_parameters("optimizer_bytes", *trained)
    return cost.of_parameters("weight_bytes", *held) + (gradients + optimizer)


def stage_memories(
    cost: CostModel, stages_at: Sequence[Sequence[Stage]], workload: Workload
) -> list[StageMemory]:
    """Return the peak memory per device of every stage, over all passes of a run."""
    runs_of, counts, recomputed = units_of_stages(cost.kinds, stages_at)
    tables = heaviest_passes(cost, workload, counts, recomputed, runs_of)
    return [stage_memory(cost, runs, table) for runs, table in zip(runs_of, tables, strict=True)]


def units_of_stages(
    kinds: Sequence[UnitKind], stages_at: Sequence[Sequence[Stage]]
) -> tuple[list[tuple[UnitRun, ...]], np.ndarray, np.ndarray]:
    """Return the runs of every stage, its units [stages, kinds], and its recomputed units at every
    level [stages, levels * kinds]."""
    runs_of = [unit_runs(kinds, at_levels) for at_levels in zip(*stages_at, strict=True)]
    counts, recomputed = zip(*(counts_of_runs(len(kinds), runs) for runs in runs_of), strict=True)
    return runs_of, np.stack(counts), np.stack(recomputed)


def stage_memory(cost: CostModel, runs: Sequence[UnitRun], table: MemoryTable) -> StageMemory:
    """Return the peak memory of a stage over the passes of its table."""
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
    """Return the memory of a stage with `counts` units [kinds].

    Args:
        held_bytes: max activations of all micro-batches in flight.
        pass_bytes: memory of every pass without the state, [passes].
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
    """Return the distinct Pareto-maximal rows of [n, k]."""
    columns = np.ascontiguousarray(rows.T)
    sums = (1 / np.maximum(columns.max(axis=1), 1)) @ columns
    found = []
    while len(sums):
        # A row with the largest scaled sum is Pareto-maximal.
        top = columns[:, sums.argmax()]
        found.append(top)
        left = np.zeros(len(sums), bool)
        for column, value in zip(columns, top, strict=True):
            left |= column > value
        columns, sums = columns[:, left], sums[left]
    return np.array(found)
