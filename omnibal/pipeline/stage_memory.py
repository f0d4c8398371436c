"""Stage memory: the one formula that search, plan, check and replay use, for any schedule.

A device holds weights, gradients and optimizer state, the activations of micro-batches in flight,
P2P buffers and the working memory of the running unit. The peak is the maximum over all passes and
kinds of unit. In a backward, later units have already freed their activations. A recomputed layer
keeps only its input until its backward. Costs, features and recompute counts are per level,
concatenated (`omnibal.pipeline.level_costs`); unit counts are not. Passes, with their micro-batches
in flight, are in `omnibal.pipeline.passes`.
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
from omnibal.pipeline.encoder_loads import EncoderMemory
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.passes import (
    LinkBuffers,
    Passes,
    all_passes,
    join_passes,
    largest_pass,
    micro_batches_in,
    stage_passes,
)
from omnibal.pipeline.prediction import StageMemory
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, Pass, PipelineSchedule
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import (
    UnitRun,
    counts_of_runs,
    holds_both_ends,
    layer_kinds,
    unit_runs,
)
from omnibal.pipeline.workload import Workload

GIB = 1024**3  # bytes
_CAP_TOLERANCE = 1e-12
"""Relative tolerance; sums of the same bytes in another order differ by less."""
_PASSES_AT_ONCE = 4_096
"""Passes per chunk of memory computation."""
_MAX_SAMPLED_STAGES = 9
"""Max stages per pipeline searched for their heaviest passes."""
_DRAWN_STAGES, _DRAWN_STAGES_OF_LEVELS = 8, 32
"""Random stage contents drawn for a table of one level, and of several."""
_FULL_RECOMPUTE_PERIOD = 4
"""Every n-th drawn stage recomputes all layers."""
_DRAWN_CONTENTS = 24
"""Random contents of several chunks."""
_MAX_DRAWN_LAYERS = (4, 24)
"""Max layers per kind in drawn stages: shallow and deep."""


def fits_cap(peak: np.ndarray | float, memory_cap: np.ndarray | float) -> np.ndarray:
    """Return whether peaks fit a memory cap, to rounding: equal peaks fit. [...]"""
    return np.asarray(peak) <= np.asarray(memory_cap) * (1 + _CAP_TOLERANCE)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryTable:
    """Bytes per pass of one chunk and kind of unit, separate for each level.

    Methods take `counts` [..., chunks * kinds] and `recomputed` [..., chunks * levels * kinds] of
    all chunks of a stage.
    """

    kinds: tuple[UnitKind, ...]
    chunk: int
    """Chunk of the running micro-batch."""
    state_bytes: np.ndarray
    """Weights, gradients and optimizer state, [kinds]."""
    tied_bytes: float
    """State shared by language embed and head in a stage with both."""
    cut_bytes: np.ndarray
    """`CUT_TENSORS` of the largest micro-batch, [4, kinds]."""
    link_buffers: LinkBuffers
    shared_bytes: np.ndarray
    """Buffer shared by all units and kinds (use the max), [kinds]."""
    library_bytes: np.ndarray
    """Trainer library buffers, allocated once per stage, [buffers]."""
    has_library: np.ndarray
    """1 if a stage with the kind has the library buffer, else 0, [kinds, buffers]."""
    expert_bytes: np.ndarray
    """Expert-parallel communication buffers, allocated once per stage, [kinds]."""
    has_backward: np.ndarray
    tied_gradient_bytes: np.ndarray
    """Extra tied-matrix gradients in a backward, in a stage with embed and head. [kinds]"""
    encoder_memory: EncoderMemory
    """Memory of data-parallel encoders on every device."""
    largest_working_bytes: np.ndarray
    """Working memory of a unit on the largest micro-batch, [kinds]."""
    others_kept_bytes: np.ndarray
    """Activations of the other micro-batches in flight, [passes, chunks * levels * kinds]."""
    others_input_bytes: np.ndarray
    """`others_kept_bytes` if the unit is recomputed, [passes, chunks * levels * kinds]."""
    own_kept_bytes: np.ndarray
    """Activations of the running micro-batch, [passes, levels * kinds]."""
    own_input_bytes: np.ndarray
    """`own_kept_bytes` if the unit is recomputed, [passes, levels * kinds]."""
    own_late_bytes: np.ndarray
    """Tensors that an input backward makes for the weight backward, [passes, levels * kinds]."""
    working_bytes: np.ndarray
    """Working memory of a unit on the running micro-batch, [passes, kinds]."""
    passing_bytes: np.ndarray
    """Memory held by units without a backward while they run, [passes, kinds]."""
    entered_bytes: np.ndarray
    """Inputs kept by a chunk beginning with the kind, if its unit keeps none, [passes, chunks *
    kinds]."""
    own_gradient_bytes: np.ndarray
    """Gradient of the stage's output, live until the backward ends, [passes, kinds]."""
    links: np.ndarray
    """1 if the P2P buffer is in use, else 0, [passes, buffers]."""
    is_forward: np.ndarray
    """1 in a forward, else 0, [passes, 1]."""

    @property
    def levels(self) -> int:
        return self.own_kept_bytes.shape[1] // len(self.kinds)

    def _by_chunk(self, counts: np.ndarray) -> np.ndarray:
        """Return units or recomputed units [..., chunks * n] by chunk. [..., chunks, n]"""
        chunks = self.entered_bytes.shape[1] // len(self.kinds)
        return counts.reshape(*counts.shape[:-1], chunks, -1)

    def _at_levels(self, counts: np.ndarray) -> np.ndarray:
        """Repeat units for every level. [..., chunks * levels * kinds]"""
        at_levels = np.tile(self._by_chunk(counts), self.levels)
        return at_levels.reshape(*counts.shape[:-1], -1)

    def activation_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return the activations of all micro-batches in flight, per pass. [..., passes]"""
        whole = self._at_levels(counts) - recomputed
        others = whole @ self.others_kept_bytes.T + recomputed @ self.others_input_bytes.T
        own, again = (self._by_chunk(each)[..., self.chunk, :] for each in (whole, recomputed))
        return others + own @ self.own_kept_bytes.T + again @ self.own_input_bytes.T

    def peak_bytes(
        self, counts: np.ndarray, recomputed: np.ndarray, running: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the peak memory with state, given `running_bytes` if known. [...]"""
        if running is None:
            running = self.running_bytes(counts, recomputed)
        most = (running + self._in_flight_bytes(counts, recomputed)).max(axis=-1)
        counts = self._by_chunk(counts).sum(axis=-2)
        state = counts @ self.state_bytes - self.tied_bytes * holds_both_ends(self.kinds, counts)
        return state + self.with_encoders(counts, most)

    def with_encoders(self, counts: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Return the max over passes `most` [...] of stages with `counts` [..., kinds], with
        data-parallel encoders' memory. [...]"""
        embeds = counts[..., [kind.name for kind in self.kinds].index(LANGUAGE_EMBED)] > 0
        taken = self.encoder_memory
        running = np.maximum(most, taken.arrival * embeds)
        in_step = taken.resident + np.maximum(running + taken.features * embeds, taken.encoding)
        if not taken.whole:  # an evaluation takes less than a step
            return in_step
        # Evaluation runs forward only, with less working memory than a backward.
        working = (self.largest_working_bytes * (counts > 0)).max(axis=-1)
        evaluating = taken.evaluating + np.maximum(working, taken.evaluation)
        return np.where(embeds, np.maximum(in_step, evaluating), in_step)

    def pass_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return the memory of every pass without the state. [..., passes]"""
        return self.running_bytes(counts, recomputed) + self._in_flight_bytes(counts, recomputed)

    def _in_flight_bytes(
        self, counts: np.ndarray, recomputed: np.ndarray, is_inside: Sequence[bool] | None = None
    ) -> np.ndarray:
        """Return the bytes of other micro-batches in flight, of P2P tensors and of buffers.
        [..., passes]

        Args:
            is_inside: whether each chunk begins within a kind's layers, or None if unknown.
        """
        at_levels, by_chunk = self._at_levels(counts), self._by_chunk(counts)
        bytes_ = (at_levels - recomputed) @ self.others_kept_bytes.T
        bytes_ = bytes_ + recomputed @ self.others_input_bytes.T
        if self.own_late_bytes.any():
            own = self._by_chunk(at_levels)[..., self.chunk, :]
            bytes_ += own @ self.own_late_bytes.T
        first = (by_chunk > 0).argmax(axis=-1)
        for chunk, entered in enumerate(np.split(self.entered_bytes, by_chunk.shape[-2], axis=1)):
            bytes_ += entered.T[first[..., chunk]]
        tensors = self._cut_tensors(by_chunk, is_inside)
        live = np.zeros((*counts.shape[:-1], len(self.link_buffers)))
        for buffer, group in enumerate(self.link_buffers):
            of_group = [tensors[tensor][..., chunk] for tensor, chunk in group]
            live[..., buffer] = np.max(of_group, axis=0)
        bytes_ += live @ self.links.T
        held = by_chunk.sum(axis=-2) > 0
        once = (held * self.shared_bytes).max(axis=-1) + (held * self.expert_bytes).max(axis=-1)
        if len(self.library_bytes):
            once = once + (held @ self.has_library > 0) @ self.library_bytes
        return bytes_ + once[..., None]

    def _cut_tensors(self, counts: np.ndarray, is_inside: Sequence[bool] | None) -> np.ndarray:
        """Return `CUT_TENSORS` of the largest micro-batch for `counts` [..., kinds]. [4, ...]"""
        held = counts > 0
        first = held.argmax(axis=-1)
        outer, after = self.cut_bytes[:2, first], self.cut_bytes[2:, _last_kind(counts)]
        # Counts imply the first unit, and so the tensors of the cut before it, except with one
        # kind, which takes the larger.
        inner = self.cut_bytes[2:, first]
        fewer = [two.is_layer and one.carried > two.carried for one, two in pairwise(self.kinds)]
        inner = np.where(np.array([False, *fewer])[first], inner, outer)
        if is_inside is None:
            of_kind = np.take_along_axis(counts, first[..., None], axis=-1)[..., 0]
            has_all = of_kind >= np.array([len(kind.places) for kind in self.kinds])[first]
            inner = np.where(held.sum(axis=-1) == 1, np.maximum(inner, outer), inner)
            is_inside = ~has_all
        return np.concatenate([np.where(is_inside, inner, outer), after])

    def running_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return the running micro-batch's max memory in every pass, equal in all stages. [...,
        passes]

        Recomputing one more layer never raises it: a kind's earliest layers are recomputed, and a
        kept layer runs backward before them with more live activations. Kinds of a tower may be
        interleaved, so all of its layers count as kept while any runs.
        """
        own, again = (self._by_chunk(each)[..., self.chunk, :] for each in (counts, recomputed))
        in_order = [(kinds, own, again) for kinds in _in_model_order(self.kinds)]
        return self._running(own, in_order, _last_kind(own))

    def stage_bytes(self, runs_of: Sequence[Sequence[UnitRun]]) -> np.ndarray:
        """Return the max memory per pass of a stage with these units in every chunk, in order.
        [passes]"""
        counts, recomputed = contents_of(len(self.kinds), runs_of)
        own = self._by_chunk(counts)[self.chunk]
        runs = runs_of[self.chunk]
        in_order = [([run.kind], *counts_of_runs(len(self.kinds), [run])) for run in runs]
        in_flight = self._in_flight_bytes(counts, recomputed, [r[0].is_inside for r in runs_of])
        last = np.array(runs[-1].kind)
        return self._running(own, in_order, last, is_exact=True) + in_flight

    def _running(
        self,
        counts: np.ndarray,
        in_order: Iterable[tuple[Sequence[int], np.ndarray, np.ndarray]],
        last: np.ndarray,
        *,
        is_exact: bool = False,
    ) -> np.ndarray:
        """Return the running micro-batch's max memory in a chunk with `counts` [..., kinds]. [...,
        passes]

        Args:
            in_order: kinds that run one after another, their units [..., kinds], and their
                recomputed units [..., levels * kinds].
            last: the chunk's last kind, [...].
            is_exact: whether the order is the chunk's own, so that the state of every unit is known
                as it runs.
        """
        own, most, passing = np.zeros((3, *counts.shape[:-1], len(self.working_bytes)))
        first, alike = len(self.kinds) * np.arange(self.levels), _alike_kinds(self.kinds)
        own_gradient = self.own_gradient_bytes.T[last]
        tied = holds_both_ends(self.kinds, counts)[..., None]
        held_kinds = set(np.unique(np.nonzero(counts)[-1]).tolist())
        is_late = is_exact and self.own_late_bytes.any()
        passed = set[int]()
        for kinds, units, recomputed in in_order:
            columns = (first[:, None] + kinds).ravel()
            of_units, again = np.tile(units[..., kinds], self.levels), recomputed[..., columns]
            kept, inputs = self.own_kept_bytes[:, columns], self.own_input_bytes[:, columns]
            # Units after these have freed their activations in the backward.
            added = (of_units - again) @ kept.T + again @ inputs.T
            if is_late:
                added = added - of_units @ self.own_late_bytes[:, columns].T
            own = own + added
            for kind in (kind for kind in kinds if kind in held_kinds):
                column = first + kind
                every_again = recomputed[..., column] > 0
                for other in (kind, *alike[kind]):
                    others = recomputed[..., first + other] == units[..., other, None]
                    every_again = every_again & others
                brought_back = self.own_kept_bytes[:, column] - self.own_input_bytes[:, column]
                running = own + self.working_bytes[:, kind] + every_again @ brought_back.T
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
                most = np.where(held, np.maximum(most, running), most)
        return most

    def of_passes(self, chosen: np.ndarray) -> "MemoryTable":
        """Select passes."""
        return self._map_passes(lambda of_passes: of_passes[chosen])

    def join_passes(self, more: "MemoryTable") -> "MemoryTable":
        """Concatenate the passes of two tables."""
        others = iter([getattr(more, name) for name in _PASS_FIELDS])
        return self._map_passes(lambda of_passes: np.concatenate([of_passes, next(others)]))

    def at_most(self) -> "MemoryTable":
        """Return one pass per level, an upper bound of all its passes."""
        own = [self._own_level == level for level in np.unique(self._own_level)]
        return self._map_passes(lambda of_passes: np.stack([of_passes[o].max(axis=0) for o in own]))

    def of_level(self, level: int) -> "MemoryTable":
        """Return passes of one chunk that run a micro-batch of `level`, plus an empty pass."""
        chosen = self._own_level == level
        columns = slice(level * len(self.kinds), (level + 1) * len(self.kinds))
        at_levels = len(self.kinds) * self.levels

        def change(of_passes: np.ndarray) -> np.ndarray:
            of_own = of_passes[chosen]
            if of_passes.shape[1] == at_levels:
                of_own = of_own[:, columns]
            return np.concatenate([of_own, np.zeros((1, of_own.shape[1]))])

        return self._map_passes(change)

    @property
    def _own_level(self) -> np.ndarray:
        """Level of the running micro-batch, 0 if it keeps nothing. [passes]"""
        own = self.own_kept_bytes.reshape(-1, self.levels, len(self.kinds))
        return own.sum(axis=2).argmax(axis=1)

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


def build_table(
    cost: CostModel, passes: Passes, encoder_memory: EncoderMemory | None = None
) -> MemoryTable:
    """Return the memory of passes by kind of unit, with data-parallel encoders' memory."""
    units, buffers = [*cost.units.values()], cost.library_buffers
    activation, boundary, gradient, passing = (
        _coefficients(cost, f"{name}_bytes")
        for name in ("activation", "boundary", "output_gradient", "passing")
    )
    kept, late = np.split(passes.others, [passes.chunks], axis=1)
    kept_bytes, input_bytes = (_level_by_level(cost, kept, each) for each in (activation, boundary))
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
    # The largest micro-batch of every level.
    largest = np.repeat(np.eye(cost.levels), own.shape[1] // cost.levels, axis=1) * passes.largest
    return MemoryTable(
        kinds=cost.kinds,
        chunk=passes.chunk,
        state_bytes=np.array([unit_bytes(cost, unit) for unit in units]),
        tied_bytes=unit_bytes(cost, None),
        cut_bytes=_cut_bytes(cost, passes.largest),
        link_buffers=passes.link_buffers,
        shared_bytes=_largest_bytes(cost, "shared_bytes", passes.largest),
        library_bytes=np.array([buffer.bytes for buffer in buffers]),
        has_library=np.array([[n in buffer.kinds for buffer in buffers] for n in cost.units], int),
        expert_bytes=cost.expert_peer_bytes * cost.of_experts,
        has_backward=np.array([unit.has_backward for unit in units]),
        tied_gradient_bytes=_tied_gradient_bytes(cost),
        encoder_memory=encoder_memory or EncoderMemory(),
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


def _coefficients(cost: CostModel, name: str) -> np.ndarray:
    """Return coefficients of every kind of unit. [levels * features, kinds]"""
    return np.stack([getattr(unit, name) for unit in cost.units.values()], axis=1)


def _max_of_moments(features: np.ndarray, of_units: Sequence[np.ndarray]) -> np.ndarray:
    """Return the max over every unit's moments [moments, F] for `features` [n, F]. [n, kinds]"""
    return np.stack([(features @ of_unit.T).max(axis=1) for of_unit in of_units], axis=1)


def _level_by_level(cost: CostModel, features: np.ndarray, per_unit: np.ndarray) -> np.ndarray:
    """Return features [passes, chunks, levels * features] times coefficients [levels * features,
    kinds], per chunk and level. [passes, chunks * levels * kinds]"""
    flat = features.reshape(-1, features.shape[-1])
    blocks = zip(np.split(flat, cost.levels, axis=1), np.split(per_unit, cost.levels), strict=True)
    found = np.concatenate([of_level @ per_kind for of_level, per_kind in blocks], axis=1)
    return found.reshape(len(features), -1)


def _unkept_input(cost: CostModel) -> np.ndarray:
    """Return the input of a stage beginning with each kind, if the unit keeps none but the stage
    does for its gradient: projectors and the language embed. [kinds, features]"""
    units = [*cost.units.values()]
    inputs = np.zeros((len(units), len(cost.features)))
    for index, (before, kind) in enumerate(zip(units, cost.kinds[1:], strict=False), 1):
        if before.output_gradient_bytes.any() and not (kind.is_layer or kind.name == HEAD):
            inputs[index] = before.output_bytes
    return inputs


def _tied_gradient_bytes(cost: CostModel) -> np.ndarray:
    """Return gradients of the tied matrix beyond its unit's own, unsharded. [kinds]"""
    matrix_bytes = cost.tied_trained_parameters * cost.rates.weight_bytes
    matrix_bytes *= cost.weight_parts
    besides = {LANGUAGE_EMBED: 2, HEAD: 0}
    number = [besides.get(each.name, 1) * (each.tower == LANGUAGE) for each in cost.kinds]
    return matrix_bytes * np.array(number)


def _cut_bytes(cost: CostModel, largest: np.ndarray) -> np.ndarray:
    """Return `CUT_TENSORS` of the largest micro-batch. [4, kinds]"""
    sent, back = (
        _largest_bytes(cost, name, largest) for name in ("output_bytes", "output_gradient_bytes")
    )
    # A unit's input comes from its own kind or from the previous kind. If adapters begin with the
    # layers, only its own kind's has a gradient.
    is_layer = np.array([kind.is_layer for kind in cost.kinds])
    came, back_to = np.append(0, sent[:-1]), np.append(0, back[:-1])
    return np.stack([came, np.where(is_layer & (back_to == 0), back, back_to), sent, back])


def _largest_bytes(cost: CostModel, name: str, largest: np.ndarray) -> np.ndarray:
    """Return bytes of a micro-batch with the max of every feature, max over levels. [kinds]"""
    of_features = _coefficients(cost, name).T * largest
    return of_features.reshape(len(of_features), cost.levels, -1).sum(axis=2).max(axis=1)


def _state_bytes(cost: CostModel, unit: UnitCost | None = None) -> np.ndarray:
    """Return weights, gradients and optimizer state of a unit per device, or of the tied matrix.
    [3]"""
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


def unit_bytes(cost: CostModel, unit: UnitCost | None) -> float:
    """Return weights, gradients and optimizer state per device of a unit, or of the tied matrix if
    None."""
    return float(_state_bytes(cost, unit).sum())


def contents_of(kinds: int, runs_of: Sequence[Sequence[UnitRun]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the units of all chunks [chunks * kinds], and the recomputed units [chunks * levels *
    kinds]."""
    counts, recomputed = zip(*(counts_of_runs(kinds, runs) for runs in runs_of), strict=True)
    return np.concatenate(counts), np.concatenate(recomputed)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassBytes:
    """Stage memory without state in every pass of a run. [passes] each"""

    row: np.ndarray
    """Workload row of the running micro-batch."""
    kind: np.ndarray
    """`Pass` of each."""
    chunk: np.ndarray
    needed: np.ndarray
    """Total without state."""
    held: np.ndarray
    """Activations kept."""
    others: np.ndarray
    """Other micro-batches in flight, counted once per chunk."""


def bytes_of_passes(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    workload: Workload,
    schedule: PipelineSchedule,
    stage: int,
    features: np.ndarray,
) -> PassBytes:
    """Return one stage's memory in all passes of a run with `features` [rows, F], which may differ
    from the workload's own."""
    runs_of = stage_runs(cost, stages_at, schedule)[stage]
    content = contents_of(len(cost.kinds), runs_of)
    size, found = len(stages_at[0]) // schedule.chunks, []
    for passes in stage_passes(features, workload, schedule, size, stage):
        for first in range(0, len(passes.row), _PASSES_AT_ONCE):
            some = passes.take(slice(first, first + _PASSES_AT_ONCE))
            table = build_table(cost, some)
            needed, held = table.stage_bytes(runs_of), table.activation_bytes(*content)
            if schedule == ONE_FORWARD_ONE_BACKWARD:
                # As the search counts: the earliest layers of each kind are recomputed.
                needed = np.maximum(needed, table.pass_bytes(*content))
            others = micro_batches_in(cost, some.others).sum(axis=1)
            found.append((some.row, some.kind, 0 * some.row + some.chunk, needed, held, others))
    row, kind, chunk, needed, held, others = map(np.concatenate, zip(*found, strict=True))
    return PassBytes(row=row, kind=kind, chunk=chunk, needed=needed, held=held, others=others)


def stage_runs(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
) -> list[list[tuple[UnitRun, ...]]]:
    """Return the units of every chunk of every stage, in order."""
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
    """Return the peak memory per device of every stage, over all passes of a run."""
    features, memories = features_of(workload, cost), []
    table = build_table(cost, largest_pass(features, workload, 1, 0), encoder_memory_of(workload))
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
        table: of any passes, for the encoders' memory.
        needed: max bytes over all passes without the state.
        held: max activations of all micro-batches in flight.
    """
    state = np.stack([_state_bytes(cost, unit) for unit in cost.units.values()], axis=1) @ counts
    state -= _state_bytes(cost) * holds_both_ends(cost.kinds, counts)
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


def encoder_memory_of(workload: Workload) -> EncoderMemory:
    """Return data-parallel encoders' memory per device, or zero if there are none."""
    return EncoderMemory() if workload.encoding is None else workload.encoding.encoder_memory


def build_tables(
    cost: CostModel, workload: Workload, passes: Iterable[Passes]
) -> list[MemoryTable]:
    """Return the memory tables of each stage's passes."""
    return [build_table(cost, each, encoder_memory_of(workload)) for each in passes]


def heaviest_passes(
    cost: CostModel, workload: Workload, counts: np.ndarray, recomputed: np.ndarray
) -> list[int]:
    """Return the index of every stage's heaviest pass in 1F1B.

    Args:
        counts: [stages, kinds].
        recomputed: [stages, levels * kinds].
    """
    features, found = features_of(workload, cost), []
    for stage, content in enumerate(zip(counts, recomputed, strict=True)):
        passes = all_passes(features, workload, len(counts), stage)
        chunks = range(0, len(passes.row), _PASSES_AT_ONCE)
        some = (passes.take(slice(first, first + _PASSES_AT_ONCE)) for first in chunks)
        needed = [build_table(cost, each).pass_bytes(*content) for each in some]
        found.append(int(np.concatenate(needed).argmax()))
    return found


def pareto_tables(cost: CostModel, workload: Workload, stages: int) -> list[MemoryTable]:
    """Return every stage's memory table of one level in 1F1B, with each pass that may be the peak:
    the Pareto-maximal passes by memory features, as bytes never decrease with features."""
    units, features = cost.units.values(), features_of(workload, cost)
    kept = np.array([[unit.activation_bytes, unit.boundary_bytes] for unit in units])
    grows = kept.max(axis=(0, 1)) > 0
    worked = [[*unit.transient_bytes, unit.passing_bytes] for unit in units]
    works = grows | (np.concatenate(worked).max(axis=0) > 0)
    chosen = []
    for stage in range(stages):
        passes = all_passes(features, workload, stages, stage)
        others, backward = passes.others[:, 0, grows], passes.is_backward[:, None]
        columns = [others, passes.own[:, works], passes.links, backward]
        chosen.append(passes.take(pareto_maximal_rows(np.concatenate(columns, axis=1))))
    return build_tables(cost, workload, chosen)


def pareto_maximal_rows(rows: np.ndarray) -> np.ndarray:
    """Return indices of the distinct Pareto-maximal rows of [n, k]."""
    columns, left = np.ascontiguousarray(rows.T), np.arange(len(rows))
    sums = (1 / np.maximum(columns.max(axis=1), 1)) @ columns
    found = []
    while len(left):
        # A row with the largest scaled sum is Pareto-maximal.
        first = int(sums.argmax())
        found.append(left[first])
        larger = (columns > columns[:, first, None]).any(axis=0)
        columns, sums, left = columns[:, larger], sums[larger], left[larger]
    return np.array(found)


def often_heaviest_tables(cost: CostModel, workload: Workload, stages: int) -> list[MemoryTable]:
    """Return memory tables of 1F1B with the few passes that peak for most stage contents.

    Plans based on them must be checked in all passes (`heaviest_passes`). With many stages only
    some are sampled, and a stage between two samples has the passes of both.
    """
    features, last = features_of(workload, cost), stages - 1
    drawn = _drawn_stages(cost, features.max(axis=0))
    looked_at = np.linspace(0, last, min(stages, _MAX_SAMPLED_STAGES)).round().astype(np.int64)
    heaviest = [
        heaviest_for(drawn, all_passes(features, workload, stages, stage)) for stage in looked_at
    ]
    chosen = []
    for stage in range(stages):
        after = int(np.searchsorted(looked_at, stage))
        before = after if looked_at[after] == stage else after - 1
        found = np.union1d(heaviest[before], heaviest[after])
        chosen.append(all_passes(features, workload, stages, stage, found))
    return build_tables(cost, workload, chosen)


def heaviest_for(drawn: np.ndarray, passes: Passes) -> np.ndarray:
    """Return indices of the passes that are the peak of any drawn stage.

    Args:
        drawn: bytes per feature of each chunk's other micro-batches, of the running one, and of its
            backward in addition, and of each P2P tensor. [stages, columns]
    """
    most, found = np.full(len(drawn), -np.inf), np.zeros(len(drawn), np.int64)
    for first in range(0, len(passes.row), _PASSES_AT_ONCE):
        some = passes.take(slice(first, first + _PASSES_AT_ONCE))
        backward = some.own * some.is_backward[:, None]
        columns = [some.others.reshape(len(backward), -1), some.own, backward, some.links]
        bytes_ = drawn @ np.concatenate(columns, axis=1).T
        place = bytes_.argmax(axis=1)
        largest = bytes_[np.arange(len(drawn)), place]
        found = np.where(largest > most, first + place, found)
        most = np.maximum(largest, most)
    return np.unique(found)


def _drawn_stages(cost: CostModel, largest: np.ndarray) -> np.ndarray:
    """Return randomly drawn stages of one chunk while a unit of each kind runs, for `heaviest_for`.
    [stages * kinds * moments, columns]"""
    rng, levels, kinds = np.random.default_rng(0), cost.levels, len(cost.kinds)
    units = cost.units.values()
    is_layer = np.array([kind.is_layer for kind in cost.kinds])
    drawn = _DRAWN_STAGES if levels == 1 else _DRAWN_STAGES_OF_LEVELS
    shape = drawn, levels, kinds
    most = np.where(is_layer, rng.choice(_MAX_DRAWN_LAYERS, (drawn, 1)), 2)
    counts = rng.integers(0, most)
    # Most levels recompute nothing or everything, and some stages everything at all levels.
    share = np.clip(rng.uniform(-0.5, 1.5, shape), 0, 1)
    share[::_FULL_RECOMPUTE_PERIOD] = 1
    again = counts[:, None] * is_layer * share
    whole = np.repeat(counts[:, None] - again, len(cost.features) // levels, axis=1)
    recomputed = np.repeat(again, len(cost.features) // levels, axis=1)
    activation, boundary = (
        _coefficients(cost, f"{each}_bytes") for each in ("activation", "boundary")
    )
    kept = whole * activation + recomputed * boundary  # [stages, levels * features, kinds]
    back = np.where((whole == 0) & (recomputed > 0), activation - boundary, 0.0)
    # Units after the running one keep nothing.
    running = kept.cumsum(axis=2) + back
    first, last = (counts > 0).argmax(axis=1), _last_kind(counts)
    cuts = _cut_bytes(cost, largest)
    links = np.concatenate([cuts[:2, first], cuts[2:, last]]).T
    gradient = np.stack([unit.output_gradient_bytes for unit in units])[last]
    input_ = _unkept_input(cost)[first]
    found = []
    for kind, unit in enumerate(units):
        holds = counts[:, kind] > 0
        for working in unit.transient_bytes:
            own = running[:, :, kind] + input_ + working
            in_backward = gradient * (last != kind)[:, None]
            columns = [kept.sum(axis=2) + input_, own, in_backward, links]
            found.append(np.concatenate(columns, axis=1)[holds])
    return np.concatenate(found)


def heavy_tables(
    cost: CostModel, workload: Workload, schedule: PipelineSchedule, stages: int
) -> list[list[MemoryTable]]:
    """Return memory tables of every stage's chunks in any schedule, of the heaviest passes."""
    features = features_of(workload, cost)
    return [
        build_tables(
            cost, workload, _heavy_passes(cost, features, workload, schedule, stages, stage)
        )
        for stage in range(stages)
    ]


def _heavy_passes(
    cost: CostModel,
    features: np.ndarray,
    workload: Workload,
    schedule: PipelineSchedule,
    stages: int,
    stage: int,
) -> list[Passes]:
    """Return the passes of every chunk that are the heaviest of a kind for some drawn content."""
    found = defaultdict[int, dict[int, Passes]](dict)
    for each in stage_passes(features, workload, schedule, stages, stage):
        if len(each.row):
            kinds, kind = found[each.chunk], int(each.kind[0])
            both = join_passes([kinds[kind], each]) if kind in kinds else each
            drawn = _draw_contents(cost, schedule, both.links.shape[1])
            kinds[kind] = both.take(heaviest_for(drawn, both))
    return [join_passes([*kinds.values()]) for kinds in found.values()]


def _draw_contents(cost: CostModel, schedule: PipelineSchedule, buffers: int) -> np.ndarray:
    """Return random stage contents for `heaviest_for`, without terms equal in passes of one kind.
    [_DRAWN_CONTENTS, columns]"""
    rng, units = np.random.default_rng(0), [*cost.units.values()]
    kept = np.array([each.activation_bytes for each in units])
    inputs = np.array([each.boundary_bytes for each in units])
    late = np.array([each.late_bytes[:2].sum(axis=0) for each in units])
    moments = [each.two_part_bytes if schedule.in_two else each.transient_bytes for each in units]
    working = np.array([each.max(axis=0) for each in moments])
    layers = np.isin(np.arange(len(units)), layer_kinds(cost.kinds))
    number = rng.integers(0, 8, (_DRAWN_CONTENTS, schedule.chunks, len(units))) * layers
    again = number * (rng.random((_DRAWN_CONTENTS, 1, 1)) < 0.5)
    own = working[rng.integers(0, len(units), _DRAWN_CONTENTS)]
    held = (number - again) @ kept + again @ inputs
    held = np.concatenate([held, number @ late], axis=1) if schedule.in_two else held
    alike = np.zeros((_DRAWN_CONTENTS, len(cost.features) + buffers))
    return np.concatenate([held.reshape(_DRAWN_CONTENTS, -1), own, alike], axis=1)
