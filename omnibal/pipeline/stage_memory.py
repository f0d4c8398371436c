"""Stage memory: the one formula that search, plan, check and replay use, for any schedule.

A device holds weights, gradients and optimizer state, the activations of micro-batches in flight,
P2P buffers and the working memory of the running unit. The peak is the maximum over all passes and
kinds of unit. In a backward, later units have already freed their activations. A recomputed layer
keeps only its input until its backward. Costs, features and recompute counts are per level,
concatenated (`omnibal.cost.model.side_by_side`); unit counts are not. Passes, with their
micro-batches in flight, are in `omnibal.pipeline.passes`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from omnibal.cost.model import CostModel, UnitCost
from omnibal.model.units import HEAD, LANGUAGE, LANGUAGE_EMBED, UnitKind
from omnibal.pipeline.encoder_loads import NO_ENCODERS, EncoderMemory
from omnibal.pipeline.passes import (
    LinkBuffers,
    Passes,
    all_passes,
    join_passes,
    largest_pass,
    link_buffers,
    stage_passes,
)
from omnibal.pipeline.prediction import StageMemory
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, Pass, PipelineSchedule
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import UnitRun, count_ends, counts_of_runs, layer_kinds, unit_runs
from omnibal.pipeline.workload import Workload

GIB = 1024**3  # bytes
_CAP_TOLERANCE = 1e-12  # relative tolerance; sums of the same bytes in another order differ by less
_MAX_SAMPLED_STAGES = 9  # max stages per pipeline searched for their heaviest passes
_DRAWN_STAGES, _DRAWN_STAGES_OF_LEVELS = 8, 32  # random stages for a table of one level, of several
_FULL_RECOMPUTE_PERIOD = 4  # every n-th drawn stage recomputes all layers
_DRAWN_CONTENTS = 24  # random contents of several chunks
_MAX_DRAWN_LAYERS = (4, 24)  # max layers per kind in drawn stages: shallow and deep


def fits_cap(peak: np.ndarray | float, memory_cap: np.ndarray | float) -> np.ndarray:
    """Return whether peaks are at most a memory cap, but for rounding. bool [...]"""
    return np.asarray(peak) <= np.asarray(memory_cap) * (1 + _CAP_TOLERANCE)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryTable:
    """Bytes per unit of each kind and level, in passes that run one chunk of a stage.

    Methods take `counts` [..., chunks * kinds] and `recomputed` [..., chunks * levels * kinds] of
    all chunks of a stage.
    """

    kinds: tuple[UnitKind, ...]
    chunk: int  # chunk of the running micro-batch
    state_bytes: np.ndarray  # weights, gradients and optimizer state, [kinds]
    tied_bytes: float  # state shared by language embed and head in a stage with both
    cut_bytes: np.ndarray  # `CUT_TENSORS` of the largest micro-batch, [4, kinds]
    link_buffers: LinkBuffers
    # Buffers allocated once per stage, of the kind that needs most: shared by units, for expert
    # parallelism, and of the trainer's library. [kinds, buffers]
    once_bytes: np.ndarray
    has_backward: np.ndarray  # [kinds]
    tied_gradient_bytes: np.ndarray  # extra in backwards of stages with embed and head, [kinds]
    encoder_memory: EncoderMemory  # memory of data-parallel encoders on every device
    largest_working_bytes: np.ndarray  # of a unit on the largest micro-batch, [kinds]
    # Activations of other micro-batches in flight, [passes, chunks * levels * kinds].
    others_kept_bytes: np.ndarray  # if units keep them
    others_input_bytes: np.ndarray  # if units are recomputed
    # Activations of the running micro-batch, [passes, levels * kinds].
    own_kept_bytes: np.ndarray
    own_input_bytes: np.ndarray
    own_late_bytes: np.ndarray  # made by an input backward for the weight backward
    working_bytes: np.ndarray  # of a unit on the running micro-batch, [passes, kinds]
    passing_bytes: np.ndarray  # held by units without a backward while they run, [passes, kinds]
    # Input that a chunk beginning with the kind keeps, if its unit does not.
    entered_bytes: np.ndarray  # [passes, chunks * kinds]
    own_gradient_bytes: np.ndarray  # of the output, until the backward ends, [passes, kinds]
    links: np.ndarray  # 1 if the P2P buffer is in use, else 0, [passes, buffers]
    is_forward: np.ndarray  # 1 in a forward, else 0, [passes, 1]

    @property
    def levels(self) -> int:
        return self.own_kept_bytes.shape[1] // len(self.kinds)

    def _by_chunk(self, counts: np.ndarray) -> np.ndarray:
        """Reshape units or recomputed units [..., chunks * n] to [..., chunks, n]."""
        chunks = self.entered_bytes.shape[1] // len(self.kinds)
        return counts.reshape(*counts.shape[:-1], chunks, -1)

    def _at_levels(self, counts: np.ndarray) -> np.ndarray:
        """Repeat `counts` for every level. [..., chunks * levels * kinds]"""
        at_levels = np.tile(self._by_chunk(counts), self.levels)
        return at_levels.reshape(*counts.shape[:-1], -1)

    def activation_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return the activations of all micro-batches in flight, per pass. [..., passes]"""
        kept = self._at_levels(counts) - recomputed
        others = kept @ self.others_kept_bytes.T + recomputed @ self.others_input_bytes.T
        # The running micro-batch is in one chunk: [..., levels * kinds].
        kept, again = (self._by_chunk(units)[..., self.chunk, :] for units in (kept, recomputed))
        return others + kept @ self.own_kept_bytes.T + again @ self.own_input_bytes.T

    def peak_bytes(
        self, counts: np.ndarray, recomputed: np.ndarray, running: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the peak memory with state, given `running_bytes` if computed before. [...]"""
        if running is None:
            running = self.running_bytes(counts, recomputed)
        peak = (running + self._in_flight_bytes(counts, recomputed)).max(axis=-1)
        counts = self._by_chunk(counts).sum(axis=-2)  # [..., kinds]
        # Embed and head of one stage share the tied matrix.
        state = counts @ self.state_bytes - self.tied_bytes * (count_ends(self.kinds, counts) == 2)
        return state + self.with_encoders(counts, peak)

    def with_encoders(self, counts: np.ndarray, peak: np.ndarray) -> np.ndarray:
        """Add data-parallel encoders' memory to the `peak` [...] over passes, without state, of
        stages with `counts` [..., kinds]. [...]"""
        embeds = counts[..., [kind.name for kind in self.kinds].index(LANGUAGE_EMBED)] > 0
        encoders = self.encoder_memory
        # Features arrive before the first forward, and encoding ends before that: peaks of both
        # do not add to the passes'. Features themselves stay.
        passes = np.maximum(peak, encoders.arrival * embeds) + encoders.features * embeds
        in_step = encoders.resident + np.maximum(passes, encoders.encoding)
        if not encoders.whole:  # an evaluation takes less than a step
            return in_step
        # Evaluation runs forward only, with less working memory than a backward.
        working = (self.largest_working_bytes * (counts > 0)).max(axis=-1)
        evaluating = encoders.evaluating + np.maximum(working, encoders.evaluation)
        return np.where(embeds, np.maximum(in_step, evaluating), in_step)

    def pass_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return every pass's memory without state and encoders. [..., passes]"""
        return self.running_bytes(counts, recomputed) + self._in_flight_bytes(counts, recomputed)

    def _in_flight_bytes(
        self, counts: np.ndarray, recomputed: np.ndarray, is_inside: Sequence[bool] | None = None
    ) -> np.ndarray:
        """Return bytes of other micro-batches in flight, P2P tensors and buffers. [..., passes]

        Args:
            is_inside: whether each chunk begins within a kind's layers, or None if unknown.
        """
        at_levels, by_chunk = self._at_levels(counts), self._by_chunk(counts)
        bytes_ = (at_levels - recomputed) @ self.others_kept_bytes.T  # [..., passes]
        bytes_ = bytes_ + recomputed @ self.others_input_bytes.T
        if self.own_late_bytes.any():
            bytes_ += self._by_chunk(at_levels)[..., self.chunk, :] @ self.own_late_bytes.T
        first = (by_chunk > 0).argmax(axis=-1)  # each chunk's first kind, [..., chunks]
        for chunk, entered in enumerate(np.split(self.entered_bytes, by_chunk.shape[-2], axis=1)):
            bytes_ += entered.T[first[..., chunk]]
        tensors = self._cut_tensors(by_chunk, is_inside)  # [4, ..., chunks]
        buffers = np.zeros((*counts.shape[:-1], len(self.link_buffers)))
        for buffer, group in enumerate(self.link_buffers):
            of_group = [tensors[tensor][..., chunk] for tensor, chunk in group]
            buffers[..., buffer] = np.max(of_group, axis=0)
        bytes_ += buffers @ self.links.T
        held = by_chunk.sum(axis=-2) > 0
        once = (held[..., None] * self.once_bytes).max(axis=-2).sum(axis=-1)
        return bytes_ + once[..., None]

    def _cut_tensors(self, counts: np.ndarray, is_inside: Sequence[bool] | None) -> np.ndarray:
        """Return `CUT_TENSORS` of the largest micro-batch for `counts` [..., kinds]. [4, ...]"""
        held = counts > 0
        first = held.argmax(axis=-1)
        # A chunk that begins with a kind receives from the kind before it (outer cut), or within
        # the kind's layers from the kind itself (inner cut).
        outer, after = self.cut_bytes[:2, first], self.cut_bytes[2:, _last_kind(counts)]
        # Counts imply the first unit, and so the tensors of the cut before it, except with one
        # kind, which takes the larger.
        inner = self.cut_bytes[2:, first]
        fewer = [
            kind.is_layer and kind.carried < last.carried for last, kind in pairwise(self.kinds)
        ]
        inner = np.where(np.array([False, *fewer])[first], inner, outer)
        if is_inside is None:
            of_kind = np.take_along_axis(counts, first[..., None], axis=-1)[..., 0]
            has_all = of_kind >= np.array([len(kind.places) for kind in self.kinds])[first]
            inner = np.where(held.sum(axis=-1) == 1, np.maximum(inner, outer), inner)
            is_inside = ~has_all
        return np.concatenate([np.where(is_inside, inner, outer), after])

    def running_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return the running micro-batch's max memory in every pass, by counts alone. [..., passes]

        Recomputing one more layer never raises it: a kind's earliest layers are recomputed, and a
        kept layer runs backward before them with more live activations. Kinds of a tower may be
        interleaved, so all of its layers count as kept while any runs.
        """
        units, again = (self._by_chunk(c)[..., self.chunk, :] for c in (counts, recomputed))
        in_order = [(kinds, units, again) for kinds in _in_model_order(self.kinds)]
        return self._running(units, in_order, _last_kind(units))

    def stage_bytes(self, runs_of: Sequence[Sequence[UnitRun]]) -> np.ndarray:
        """Return every pass's memory as `pass_bytes`, for units in a known order. [passes]"""
        counts, recomputed = contents_of(len(self.kinds), runs_of)
        runs = runs_of[self.chunk]
        in_order = [([run.kind], *counts_of_runs(len(self.kinds), [run])) for run in runs]
        in_flight = self._in_flight_bytes(counts, recomputed, [r[0].is_inside for r in runs_of])
        units, last = self._by_chunk(counts)[self.chunk], np.array(runs[-1].kind)
        return self._running(units, in_order, last, is_exact=True) + in_flight

    def _running(
        self,
        counts: np.ndarray,
        in_order: Iterable[tuple[Sequence[int], np.ndarray, np.ndarray]],
        last: np.ndarray,
        *,
        is_exact: bool = False,
    ) -> np.ndarray:
        """Return the running micro-batch's max memory in its chunk. [..., passes]

        Args:
            counts: the chunk's units, [..., kinds].
            in_order: kinds that run one after another, their units [..., kinds], and their
                recomputed units [..., levels * kinds].
            last: the chunk's last kind, [...].
            is_exact: whether `in_order` is the chunk's exact order, so that every other unit is
                known to be kept or freed while one runs.
        """
        # Activations kept so far, peak so far, and memory of units without a backward.
        live, peak, passing = np.zeros((3, *counts.shape[:-1], len(self.working_bytes)))
        first, alike = len(self.kinds) * np.arange(self.levels), _alike_kinds(self.kinds)
        own_gradient = self.own_gradient_bytes.T[last]
        tied = (count_ends(self.kinds, counts) == 2)[..., None]
        held_kinds = set(np.unique(np.nonzero(counts)[-1]).tolist())
        is_late = is_exact and self.own_late_bytes.any()
        passed = set[int]()
        for kinds, units, recomputed in in_order:
            columns = (first[:, None] + kinds).ravel()  # of every level
            of_units, again = np.tile(units[..., kinds], self.levels), recomputed[..., columns]
            kept, inputs = self.own_kept_bytes[:, columns], self.own_input_bytes[:, columns]
            # Units after these have freed their activations in the backward.
            added = (of_units - again) @ kept.T + again @ inputs.T
            if is_late:
                added = added - of_units @ self.own_late_bytes[:, columns].T
            live = live + added
            for kind in (kind for kind in kinds if kind in held_kinds):
                column = first + kind
                # If all layers are recomputed, the running layer's activations come back. If a
                # layer is kept, its own backward needs as much.
                all_again = recomputed[..., column] > 0  # [..., levels]
                for other in (kind, *alike[kind]):
                    all_again &= recomputed[..., first + other] == units[..., other, None]
                brought_back = self.own_kept_bytes[:, column] - self.own_input_bytes[:, column]
                running = live + self.working_bytes[:, kind] + all_again @ brought_back.T
                held = counts[..., kind, None] > 0
                if self.has_backward[kind]:
                    # The last unit's working memory includes this gradient.
                    running = running + (kind != last[..., None]) * own_gradient
                    running = running + tied * self.tied_gradient_bytes[kind]
                    if is_late:  # the run's first unit may need more than its last
                        number = units[..., kind, None]
                        running = np.maximum(running, running - added * (number - 1) / number)
                else:
                    if kind not in passed:
                        passing = passing + held * self.passing_bytes[:, kind]
                    passed.add(kind)
                    running = running + passing
                    running = running * self.is_forward[:, 0] if is_exact else running
                peak = np.where(held, np.maximum(peak, running), peak)
        return peak

    def join_passes(self, more: "MemoryTable") -> "MemoryTable":
        others = iter([getattr(more, name) for name in _PASS_FIELDS])
        return self._map_passes(lambda of_passes: np.concatenate([of_passes, next(others)]))

    def of_level(self, level: int) -> "MemoryTable":
        """Return a one-chunk table's passes with a micro-batch of `level`, plus an empty pass."""
        kept = self.own_kept_bytes.reshape(-1, self.levels, len(self.kinds))
        chosen = kept.sum(axis=2).argmax(axis=1) == level  # 0 if the micro-batch keeps nothing
        columns = slice(level * len(self.kinds), (level + 1) * len(self.kinds))
        at_levels = len(self.kinds) * self.levels

        def change(of_passes: np.ndarray) -> np.ndarray:
            of_own = of_passes[chosen]
            if of_passes.shape[1] == at_levels:
                of_own = of_own[:, columns]
            # The empty pass is for levels without micro-batches: the max over passes must exist.
            return np.concatenate([of_own, np.zeros((1, of_own.shape[1]))])

        return self._map_passes(change)

    def _map_passes(self, change: Callable[[np.ndarray], np.ndarray]) -> "MemoryTable":
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in _PASS_FIELDS}
        return replace(self, **changed)


_PASS_FIELDS = (
    *("others_kept_bytes", "others_input_bytes", "own_kept_bytes", "own_input_bytes"),
    *("own_late_bytes", "working_bytes", "passing_bytes", "entered_bytes", "own_gradient_bytes"),
    *("links", "is_forward"),
)
"""Table fields with one row per pass."""


def _last_kind(counts: np.ndarray) -> np.ndarray:
    """Return the index of the last kind that stages [..., kinds] hold. [...]"""
    return counts.shape[-1] - 1 - (counts[..., ::-1] > 0).argmax(axis=-1)


@lru_cache(maxsize=8)  # an entry per model
def _alike_kinds(kinds: tuple[UnitKind, ...]) -> list[list[int]]:
    """Return, by kind, indices of the other kinds that differ from it only in P2P tensors."""
    return [
        [index for index, other in enumerate(kinds) if index != i and other.is_like(kind)]
        for i, kind in enumerate(kinds)
    ]


@lru_cache(maxsize=8)  # an entry per model
def _in_model_order(kinds: tuple[UnitKind, ...]) -> list[list[int]]:
    """Return kind indices in model order, grouped by tower."""
    groups = groupby(enumerate(kinds), lambda pair: pair[1].is_layer or pair[1].name)
    return [[index for index, _ in group] for _, group in groups]


def build_table(
    cost: CostModel, passes: Passes, encoder_memory: EncoderMemory = NO_ENCODERS
) -> MemoryTable:
    """Return the memory table of passes, with data-parallel encoders' memory, by default none."""
    units = [*cost.units.values()]
    activation, boundary, gradient, passing = (
        cost.of_units(f"{name}_bytes").T
        for name in ("activation", "boundary", "output_gradient", "passing")
    )
    kept, late = np.split(passes.others, [passes.chunks], axis=1)
    kept_bytes, input_bytes = (_level_by_level(cost, kept, per) for per in (activation, boundary))
    own, working = passes.own, [unit.transient_bytes for unit in units]
    own_late_bytes = np.zeros((len(own), cost.levels * len(units)))
    working_bytes = _max_of_moments(own, working)
    if passes.in_two:
        # A weight backward has only the tensors made for it, and one product at a time.
        is_weight = (passes.kind == Pass.BACKWARD_WEIGHT)[:, None]
        working = [unit.two_part_bytes for unit in units]
        products = [unit.late_bytes[2:] for unit in units]
        working_bytes = np.where(
            is_weight, _max_of_moments(own, products), _max_of_moments(own, working)
        )
        for_weights = np.stack([unit.late_bytes[:2].sum(axis=0) for unit in units], axis=1)
        late = late.copy()
        late[:, passes.chunk] += own * is_weight
        late_bytes = _level_by_level(cost, late, for_weights)
        kept_bytes, input_bytes = kept_bytes + late_bytes, input_bytes + late_bytes
        is_input = (passes.kind == Pass.BACKWARD_INPUT)[:, None]
        own_late_bytes = _level_by_level(cost, own * is_input, for_weights)
        own = own * ~is_weight
    entered = kept.copy()
    entered[:, passes.chunk] += own
    entered_bytes = entered.reshape(-1, own.shape[1]) @ _unkept_input(cost).T
    # The largest micro-batch of every level, [levels, F].
    largest = np.repeat(np.eye(cost.levels), own.shape[1] // cost.levels, axis=1) * passes.largest
    # Gradients of the tied matrix beyond its unit's own, unsharded: a backward of the embed holds
    # two, of the head none, of other language units one.
    extra = {LANGUAGE_EMBED: 2, HEAD: 0}
    tied = [extra.get(kind.name, 1) * (kind.tower == LANGUAGE) for kind in cost.kinds]
    matrix_bytes = cost.tied_trained_parameters * cost.rates.weight_bytes
    once = [_largest_bytes(cost, "shared_bytes", passes.largest)]
    once.append(cost.expert_peer_bytes * cost.of_experts)
    once += [
        buffer_bytes * np.isin([*cost.units], [*kinds])
        for buffer_bytes, kinds in cost.library_buffers
    ]
    return MemoryTable(
        kinds=cost.kinds,
        chunk=passes.chunk,
        state_bytes=np.array([state_bytes(cost, unit).sum() for unit in units]),
        tied_bytes=float(state_bytes(cost).sum()),
        cut_bytes=_cut_bytes(cost, passes.largest),
        link_buffers=passes.link_buffers,
        once_bytes=np.stack(once, axis=1),
        has_backward=cost.of_units("has_backward"),
        tied_gradient_bytes=matrix_bytes * cost.weight_parts * np.array(tied),
        encoder_memory=encoder_memory,
        largest_working_bytes=_max_of_moments(largest, working).max(axis=0),
        others_kept_bytes=kept_bytes,
        others_input_bytes=input_bytes,
        own_kept_bytes=_level_by_level(cost, own[:, None], activation),
        own_input_bytes=_level_by_level(cost, own[:, None], boundary),
        own_late_bytes=own_late_bytes,
        working_bytes=working_bytes,
        passing_bytes=own @ passing,
        entered_bytes=entered_bytes.reshape(len(own), -1),
        own_gradient_bytes=passes.is_backward[:, None] * (own @ gradient),
        links=passes.links,
        is_forward=(passes.kind == Pass.FORWARD)[:, None],
    )


def _max_of_moments(features: np.ndarray, of_units: Sequence[np.ndarray]) -> np.ndarray:
    """Return the max over every unit's moments [moments, F] for `features` [n, F]. [n, kinds]"""
    return np.stack([(features @ of_unit.T).max(axis=1) for of_unit in of_units], axis=1)


def _level_by_level(cost: CostModel, features: np.ndarray, per_unit: np.ndarray) -> np.ndarray:
    """Return features [passes, chunks, levels * features] times coefficients [levels * features,
    kinds], per chunk and level. [passes, chunks * levels * kinds]"""
    flat = features.reshape(-1, features.shape[-1])  # [passes * chunks, ...]
    blocks = zip(np.split(flat, cost.levels, axis=1), np.split(per_unit, cost.levels), strict=True)
    products = np.concatenate([of_level @ per_kind for of_level, per_kind in blocks], axis=1)
    return products.reshape(len(features), -1)


def _unkept_input(cost: CostModel) -> np.ndarray:
    """Return the input of a stage beginning with each kind, if the unit keeps no input but the
    stage does for its gradient: projectors and the language embed. [kinds, features]"""
    units = [*cost.units.values()]
    inputs = np.zeros((len(units), len(cost.features)))
    for index, (before, kind) in enumerate(zip(units, cost.kinds[1:], strict=False), 1):
        if before.output_gradient_bytes.any() and not (kind.is_layer or kind.name == HEAD):
            inputs[index] = before.output_bytes
    return inputs


def _cut_bytes(cost: CostModel, largest: np.ndarray) -> np.ndarray:
    """Return `CUT_TENSORS` of the largest micro-batch. [4, kinds]"""
    sent, back = (
        _largest_bytes(cost, name, largest) for name in ("output_bytes", "output_gradient_bytes")
    )
    # A unit's input comes from its own kind or from the previous kind. If adapters begin with the
    # layers, only its own kind's has a gradient.
    is_layer = np.array([kind.is_layer for kind in cost.kinds])
    received, returned = np.append(0, sent[:-1]), np.append(0, back[:-1])
    returned = np.where(is_layer & (returned == 0), back, returned)
    return np.stack([received, returned, sent, back])


def _largest_bytes(cost: CostModel, name: str, largest: np.ndarray) -> np.ndarray:
    """Return bytes of a micro-batch with the max of every feature, max over levels. [kinds]"""
    of_features = cost.of_units(name) * largest
    return of_features.reshape(len(of_features), cost.levels, -1).sum(axis=2).max(axis=1)


def state_bytes(cost: CostModel, unit: UnitCost | None = None) -> np.ndarray:
    """Return weights, gradients and optimizer state of a unit per device, or of the tied matrix if
    None. [3]"""
    if unit is None:
        held, trained = (cost.tied_parameters, 0), (cost.tied_trained_parameters, 0)
    else:
        held = unit.parameters, unit.expert_parameters
        trained = unit.trained_parameters, unit.trained_expert_parameters
    copies = 0.0 if unit is None else unit.weight_copy_bytes
    return np.array(
        [
            cost.of_parameters("weight_bytes", *held) + copies,
            cost.of_parameters("gradient_bytes", *trained),
            cost.of_parameters("optimizer_bytes", *trained),
        ]
    )


def contents_of(kinds: int, runs_of: Sequence[Sequence[UnitRun]]) -> tuple[np.ndarray, np.ndarray]:
    """Return a stage's unit counts [chunks * kinds], and recomputed units [chunks * levels *
    kinds], given its chunks' runs."""
    counts, recomputed = zip(*(counts_of_runs(kinds, runs) for runs in runs_of), strict=True)
    return np.concatenate(counts), np.concatenate(recomputed)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassBytes:
    """A stage's bytes in every pass of a run, without state and encoders. Fields are [passes]."""

    row: np.ndarray  # workload row of the running micro-batch
    kind: np.ndarray  # `Pass`
    chunk: np.ndarray
    needed: np.ndarray  # total
    held: np.ndarray  # activations of all micro-batches in flight
    others: np.ndarray  # number of other micro-batches in flight, counted once per chunk


def bytes_of_passes(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    workload: Workload,
    schedule: PipelineSchedule,
    stage: int,
    features: np.ndarray,
) -> PassBytes:
    """Return one stage's memory in all passes of a run, for stages `stages_at` [level][part] and
    `features` [rows, F], which may differ from the workload's own."""
    runs_of = stage_runs(cost, stages_at, schedule)[stage]
    content = contents_of(len(cost.kinds), runs_of)
    size, batches = len(stages_at[0]) // schedule.chunks, []
    for passes in stage_passes(features, workload, schedule, size, stage):
        for some in passes.batches():
            table = build_table(cost, some)
            needed, held = table.stage_bytes(runs_of), table.activation_bytes(*content)
            if schedule == ONE_FORWARD_ONE_BACKWARD:
                # As the search counts: the earliest layers of each kind are recomputed.
                needed = np.maximum(needed, table.pass_bytes(*content))
            # The first feature of every level is 1.
            others = some.others[..., :: len(cost.features) // cost.levels].sum(axis=(1, 2))
            batches.append((some.row, some.kind, 0 * some.row + some.chunk, needed, held, others))
    row, kind, chunk, needed, held, others = map(np.concatenate, zip(*batches, strict=True))
    return PassBytes(row=row, kind=kind, chunk=chunk, needed=needed, held=held, others=others)


def stage_runs(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
) -> list[list[tuple[UnitRun, ...]]]:
    """Return runs of units in order, [stage][chunk], for stages `stages_at` [level][part]."""
    return [
        [unit_runs(cost.kinds, [stages[part] for stages in stages_at]) for part in parts]
        for parts in schedule.parts_of(len(stages_at[0]))
    ]


def stage_memories(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    workload: Workload,
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
) -> list[StageMemory]:
    """Return every stage's peak memory per device over all passes, with state and encoders."""
    features, memories = workload.features_of(cost), []
    table = build_table(cost, largest_pass(features, workload, 1, 0), workload.encoder_memory)
    for stage, runs_of in enumerate(stage_runs(cost, stages_at, schedule)):
        passes = bytes_of_passes(cost, stages_at, workload, schedule, stage, features)
        counts, _ = contents_of(len(cost.kinds), runs_of)
        counts = counts.reshape(len(runs_of), -1).sum(axis=0)
        memories.append(stage_memory(cost, counts, table, passes.needed.max(), passes.held.max()))
    return memories


def stage_memory(
    cost: CostModel, counts: np.ndarray, table: MemoryTable, needed: float, held: float
) -> StageMemory:
    """Return the memory of a stage with `counts` units [kinds].

    Args:
        table: of any passes. Only encoders and largest working memory are used.
        needed: max `PassBytes.needed` over all passes.
        held: max `PassBytes.held` over all passes.
    """
    state = np.stack([state_bytes(cost, unit) for unit in cost.units.values()], axis=1) @ counts
    state -= state_bytes(cost) * (count_ends(cost.kinds, counts) == 2)
    encoders = table.encoder_memory
    embeds = counts[[kind.name for kind in cost.kinds].index(LANGUAGE_EMBED)] > 0
    features = encoders.features * embeds
    running = float(table.with_encoders(counts, np.asarray(needed))) - encoders.resident - features
    weights, gradients, optimizer = state.tolist()
    return StageMemory(
        weights_gib=(weights + encoders.weights) / GIB,
        gradients_gib=(gradients + encoders.gradients) / GIB,
        optimizer_gib=(optimizer + encoders.optimizer) / GIB,
        activations_gib=(held + encoders.kept + features) / GIB,
        transient_gib=(running - held + encoders.buffers) / GIB,
    )


def build_tables(
    cost: CostModel, workload: Workload, passes: Iterable[Passes]
) -> list[MemoryTable]:
    """Return a memory table for each of `passes`, of stages or chunks."""
    return [build_table(cost, of_chunk, workload.encoder_memory) for of_chunk in passes]


def heaviest_passes(
    cost: CostModel, workload: Workload, counts: np.ndarray, recomputed: np.ndarray
) -> list[int]:
    """Return the index of each stage's heaviest pass in 1F1B, for stages with `counts` [stages,
    kinds] and `recomputed` [stages, levels * kinds]."""
    features, heaviest = workload.features_of(cost), []
    for stage, content in enumerate(zip(counts, recomputed, strict=True)):
        passes = all_passes(features, workload, len(counts), stage)
        needed = [build_table(cost, some).pass_bytes(*content) for some in passes.batches()]
        heaviest.append(int(np.concatenate(needed).argmax()))
    return heaviest


def pareto_tables(cost: CostModel, workload: Workload, stages: int) -> list[MemoryTable]:
    """Return every stage's memory table of one level in 1F1B, with each pass that may be the peak:
    the Pareto-maximal passes by memory features, as bytes never decrease with features."""
    units, features = cost.units.values(), workload.features_of(cost)
    kept = np.maximum(cost.of_units("activation_bytes"), cost.of_units("boundary_bytes"))
    grows = kept.max(axis=0) > 0  # features that activations grow with
    worked = [[*unit.transient_bytes, unit.passing_bytes] for unit in units]
    works = grows | (np.concatenate(worked).max(axis=0) > 0)  # ... or working memory
    chosen = []
    for stage in range(stages):
        passes = all_passes(features, workload, stages, stage)
        others, backward = passes.others[:, 0, grows], passes.is_backward[:, None]
        columns = [others, passes.own[:, works], passes.links, backward]
        chosen.append(passes.take(pareto_maximal_rows(np.concatenate(columns, axis=1))))
    return build_tables(cost, workload, chosen)


def pareto_maximal_rows(rows: np.ndarray) -> np.ndarray:
    """Return indices of the distinct Pareto-maximal rows of [n, k], by falling sum."""
    columns, left = np.ascontiguousarray(rows.T), np.arange(len(rows))
    sums = (1 / np.maximum(columns.max(axis=1), 1)) @ columns
    maximal = []
    while len(left):
        # A row with the largest scaled sum is Pareto-maximal.
        first = int(sums.argmax())
        maximal.append(left[first])
        larger = (columns > columns[:, first, None]).any(axis=0)
        columns, sums, left = columns[:, larger], sums[larger], left[larger]
    return np.array(maximal)


def often_heaviest_tables(cost: CostModel, workload: Workload, stages: int) -> list[MemoryTable]:
    """Return every stage's 1F1B memory table with the passes that peak for random contents.

    Plans based on them must be checked in all passes (`heaviest_passes`). With many stages only
    some are sampled, and a stage between two samples has the passes of both.
    """
    features, last = workload.features_of(cost), stages - 1
    drawn = _draw_stages(cost, features.max(axis=0))
    sampled = np.linspace(0, last, min(stages, _MAX_SAMPLED_STAGES)).round().astype(np.int64)
    heaviest = [
        heaviest_for(drawn, all_passes(features, workload, stages, stage)) for stage in sampled
    ]
    chosen = []
    for stage in range(stages):
        after = int(np.searchsorted(sampled, stage))
        before = after if sampled[after] == stage else after - 1
        # In 1F1B an index is the same pass of the same micro-batch on every stage.
        indices = np.union1d(heaviest[before], heaviest[after])
        chosen.append(all_passes(features, workload, stages, stage, indices))
    return build_tables(cost, workload, chosen)


def heaviest_for(drawn: np.ndarray, passes: Passes) -> np.ndarray:
    """Return indices of the passes that are the peak of some drawn stage.

    Args:
        drawn: bytes per feature of each chunk's other micro-batches, of the running micro-batch, of
            its backward in addition, and of each P2P tensor. [stages, columns]
    """
    peaks, heaviest, first = np.full(len(drawn), -np.inf), np.zeros(len(drawn), np.int64), 0
    for some in passes.batches():
        backward = some.own * some.is_backward[:, None]
        columns = [some.others.reshape(len(backward), -1), some.own, backward, some.links]
        bytes_ = drawn @ np.concatenate(columns, axis=1).T  # [stages, passes]
        place = bytes_.argmax(axis=1)
        largest = bytes_[np.arange(len(drawn)), place]
        heaviest = np.where(largest > peaks, first + place, heaviest)
        peaks, first = np.maximum(largest, peaks), first + len(some.row)
    return np.unique(heaviest)


def _draw_stages(cost: CostModel, largest: np.ndarray) -> np.ndarray:
    """Draw stages of one chunk for `heaviest_for`, a row for every moment of a unit of each kind
    that a stage holds. [rows, columns]"""
    rng, levels, kinds = np.random.default_rng(0), cost.levels, len(cost.kinds)
    units = cost.units.values()
    is_layer = np.array([kind.is_layer for kind in cost.kinds])
    drawn = _DRAWN_STAGES if levels == 1 else _DRAWN_STAGES_OF_LEVELS
    shape = drawn, levels, kinds
    counts = rng.integers(0, np.where(is_layer, rng.choice(_MAX_DRAWN_LAYERS, (drawn, 1)), 2))
    # Most levels recompute nothing or everything, and some stages everything at all levels.
    share = np.clip(rng.uniform(-0.5, 1.5, shape), 0, 1)
    share[::_FULL_RECOMPUTE_PERIOD] = 1
    again = counts[:, None] * is_layer * share
    whole = np.repeat(counts[:, None] - again, len(cost.features) // levels, axis=1)
    recomputed = np.repeat(again, len(cost.features) // levels, axis=1)
    activation, boundary = (cost.of_units(f"{n}_bytes").T for n in ("activation", "boundary"))
    kept = whole * activation + recomputed * boundary  # [stages, levels * features, kinds]
    back = np.where((whole == 0) & (recomputed > 0), activation - boundary, 0.0)
    # Units after the running unit keep nothing.
    running = kept.cumsum(axis=2) + back
    first, last = (counts > 0).argmax(axis=1), _last_kind(counts)
    cuts = _cut_bytes(cost, largest)
    links = np.concatenate([cuts[:2, first], cuts[2:, last]]).T
    gradient = cost.of_units("output_gradient_bytes")[last]
    input_ = _unkept_input(cost)[first]
    stages = []
    for kind, unit in enumerate(units):
        holds = counts[:, kind] > 0
        for working in unit.transient_bytes:
            own = running[:, :, kind] + input_ + working
            in_backward = gradient * (last != kind)[:, None]
            columns = [kept.sum(axis=2) + input_, own, in_backward, links]
            stages.append(np.concatenate(columns, axis=1)[holds])
    return np.concatenate(stages)


def heavy_tables(
    cost: CostModel, workload: Workload, schedule: PipelineSchedule, stages: int
) -> list[list[MemoryTable]]:
    """Return memory tables in any schedule, [stage][chunk], with the passes that are the heaviest
    of their kind for some drawn stage."""
    features, tables = workload.features_of(cost), []
    for stage in range(stages):
        drawn = _draw_contents(cost, schedule, len(link_buffers(schedule, stages, stage)))
        heaviest = defaultdict[int, dict[int, Passes]](dict)  # by chunk and kind of pass
        for passes in stage_passes(features, workload, schedule, stages, stage):
            if len(passes.row):
                kinds, kind = heaviest[passes.chunk], int(passes.kind[0])
                both = join_passes([kinds[kind], passes]) if kind in kinds else passes
                kinds[kind] = both.take(heaviest_for(drawn, both))
        chunks = [join_passes([*kinds.values()]) for kinds in heaviest.values()]
        tables.append(build_tables(cost, workload, chunks))
    return tables


def _draw_contents(cost: CostModel, schedule: PipelineSchedule, buffers: int) -> np.ndarray:
    """Draw stages for `heaviest_for`, without terms that are equal in all passes of one kind.
    [_DRAWN_CONTENTS, columns]"""
    rng, units = np.random.default_rng(0), [*cost.units.values()]
    kept, inputs = cost.of_units("activation_bytes"), cost.of_units("boundary_bytes")  # [kinds, F]
    late = np.array([unit.late_bytes[:2].sum(axis=0) for unit in units])
    moments = [unit.two_part_bytes if schedule.in_two else unit.transient_bytes for unit in units]
    working = np.array([of_unit.max(axis=0) for of_unit in moments])
    layers = np.isin(np.arange(len(units)), layer_kinds(cost.kinds))
    number = rng.integers(0, 8, (_DRAWN_CONTENTS, schedule.chunks, len(units))) * layers
    again = number * (rng.random((_DRAWN_CONTENTS, 1, 1)) < 0.5)
    own = working[rng.integers(0, len(units), _DRAWN_CONTENTS)]
    held = (number - again) @ kept + again @ inputs  # [_DRAWN_CONTENTS, chunks, F]
    held = np.concatenate([held, number @ late], axis=1) if schedule.in_two else held
    # Backwards' extra bytes and P2P buffers are equal in all passes of one kind.
    equal = np.zeros((_DRAWN_CONTENTS, len(cost.features) + buffers))
    return np.concatenate([held.reshape(_DRAWN_CONTENTS, -1), own, equal], axis=1)
