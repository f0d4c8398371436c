"""Memory of stages with several parts of the model, and the recomputation needed to fit.

As `omnibal.pipeline.schedule_memory`, for many stage contents at once, in the heaviest passes of
random contents (tables of `omnibal.pipeline.stage_memory` per chunk). Results must be checked in
all passes. A stage that does not fit recomputes as needed, in an order of
`omnibal.pipeline.part_recompute`.

Shapes: n stages' contents, c chunks, K kinds of unit, L kinds of layer, f features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.model.units import UnitKind
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.part_recompute import Contents, LayerNumbers, LayerOrders, RecomputeWays
from omnibal.pipeline.recompute import fewest_that_fit
from omnibal.pipeline.schedule_memory import (
    ChunkPasses,
    link_bytes,
    link_rooms,
    micro_batches_in,
    schedule_passes,
)
from omnibal.pipeline.schedules import Pass, PipelineSchedule
from omnibal.pipeline.stage_memory import (
    LINKS,
    MemoryTable,
    RunningPasses,
    encoder_memory_of,
    fits_cap,
    memory_table,
)
from omnibal.pipeline.unit_runs import holds_both_ends, layer_kinds
from omnibal.pipeline.workload import Workload

_DRAWN = 24
"""Random stage contents used to find heavy passes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ChunkTable:
    """The heaviest passes of one chunk, by the stage's contents."""

    running: MemoryTable
    """Passes as if the stage held only this chunk."""
    besides: tuple[MemoryTable, ...]
    """Activations of every chunk meanwhile."""
    late_bytes: np.ndarray
    """Bytes kept for weight gradients per unit of each chunk, [passes, c, K]."""
    product_bytes: np.ndarray
    """Extra working memory of one product of a unit, [passes, K]."""

    def bytes(self, chunk: int, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return a stage's memory in every pass, without shared buffers, for `counts` [n, c, K] and
        `recomputed` [n, c, levels * K]. [n, passes]"""
        own = counts[:, chunk]
        needed = self.running.pass_bytes(own, recomputed[:, chunk])
        needed = needed - self.running.room_bytes(own)[:, None]
        needed = needed + ((own > 0)[:, None] * self.product_bytes).max(axis=-1)
        needed = needed + np.einsum("nck,pck->np", counts, self.late_bytes)
        for other, kept in enumerate(self.besides):
            if other != chunk:
                first = (counts[:, other] > 0).argmax(axis=-1)
                needed = needed + kept.first_bytes.T[first]
                needed += kept.activation_bytes(counts[:, other], recomputed[:, other])
        return needed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartMemory:
    """Memory of one stage of a schedule, by its chunks' contents."""

    chunks: tuple[_ChunkTable, ...]
    link_bytes: Callable[[np.ndarray], np.ndarray]
    """P2P buffer bytes of stages with units [n, c, K]. [n]"""
    ways: RecomputeWays
    """Recomputation orders."""
    cap_bytes: float

    @classmethod
    def of_stages(
        cls,
        cost: CostModel,
        workload: Workload,
        schedule: PipelineSchedule,
        stages: int,
        cap_bytes: float,
        numbers: LayerNumbers | None = None,
    ) -> "list[PartMemory]":
        """Return the memory of every stage in its heaviest passes of the run."""
        if schedule.in_two:
            units = cost.units.items()
            working = {name: replace(u, transient_bytes=u.two_part_bytes) for name, u in units}
            cost = replace(cost, units=working)
        features = features_of(workload, cost)
        drawn, mean, every = _drawn(cost, schedule.chunks), features.mean(axis=0), []
        for stage in range(stages):
            found: dict[tuple[int, Pass], list[tuple[float, ChunkPasses]]] = {}
            for each in schedule_passes(features, workload, schedule, stages, stage):
                place = each.chunk, each.kind
                found[place] = _heavier(drawn, found.get(place, []), each)
            passes = [each for heaviest in found.values() for _, each in heaviest]
            by_chunk = [
                [each for each in passes if each.chunk == c] for c in range(schedule.chunks)
            ]
            held = np.max([micro_batches_in(cost, each.kept[0]) for each in passes], axis=0)
            every.append(
                cls(
                    chunks=tuple(_chunk_table(cost, workload, each) for each in by_chunk),
                    link_bytes=partial(
                        link_bytes,
                        cost,
                        features.max(axis=0),
                        rooms=link_rooms(schedule, stages, stage),
                    ),
                    ways=numbers or LayerOrders.of(cost, mean, held),
                    cap_bytes=cap_bytes,
                )
            )
        return every

    @property
    def kinds(self) -> tuple[UnitKind, ...]:
        return self.chunks[0].running.kinds

    def peak_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return the peak per device for `counts` [n, c, K] with `recomputed` units. [n]"""
        first, whole = self.chunks[0].running, counts.sum(axis=1)
        at_levels = np.tile(recomputed, first.levels)
        passes = [table.bytes(chunk, counts, at_levels) for chunk, table in enumerate(self.chunks)]
        rooms = self.link_bytes(counts) + first.room_bytes(whole)
        state = whole @ first.state_bytes - first.tied_bytes * holds_both_ends(first.kinds, whole)
        return state + first.with_encoders(whole, np.concatenate(passes, axis=-1) + rooms[:, None])

    def least(self, contents: Contents, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the min number in each stage's `order` [n], and whether it fits."""

        def fit(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
            some = contents.some(rows)
            again = self.ways.recomputed(some, order[rows], number)
            return fits_cap(self.peak_bytes(some.counts, again), self.cap_bytes)

        every, most = np.arange(len(contents)), self.ways.most(contents)
        most = np.where(fit(every, 0 * most), 0, most)
        fits = (most == 0) | fit(every, most)
        return fewest_that_fit(fit, np.where(fits, 0, most), most), fits


def _heavier(
    drawn: np.ndarray, most: list[tuple[float, ChunkPasses]], passes: ChunkPasses
) -> list[tuple[float, ChunkPasses]]:
    """Return the heaviest pass for each drawn content over old and new passes, with its bytes;
    `drawn` has bytes of kept, late and running micro-batches, [drawn, c + c + 1, f]."""
    if not len(passes.own):
        return most
    held = np.concatenate([passes.kept, passes.late, passes.own[:, None]], axis=1)
    needed = drawn.reshape(len(drawn), -1) @ held.reshape(len(held), -1).T
    places = needed.argmax(axis=1)
    found = [
        (float(of_content[at]), passes.take(np.array([at])))
        for of_content, at in zip(needed, places, strict=True)
    ]
    return [max(pair, key=lambda each: each[0]) for pair in zip(most or found, found, strict=True)]


def _chunk_table(cost: CostModel, workload: Workload, passes: Sequence[ChunkPasses]) -> _ChunkTable:
    """Return a table of passes of one chunk."""
    own, kept, late = (
        np.concatenate([getattr(each, name) for each in passes]) for name in ("own", "kept", "late")
    )
    kind = np.array([each.kind for each in passes])
    # Passes that are heaviest for several contents are counted once.
    rows = np.column_stack([kind, own, kept.reshape(len(own), -1), late.reshape(len(own), -1)])
    _, once = np.unique(rows, axis=0, return_index=True)
    own, kept, late, kind = own[once], kept[once], late[once], kind[once]
    is_weight, chunk = kind == Pass.BACKWARD_WEIGHT, passes[0].chunk
    largest = features_of(workload, cost).max(axis=0)
    links = np.zeros((len(own), len(LINKS)))
    links[:, -1] = (kind != Pass.FORWARD) & ~is_weight  # the output gradient

    def table(own: np.ndarray, others: np.ndarray) -> MemoryTable:
        passes = RunningPasses(own=own, others=others, links=links, largest=largest)
        return memory_table(cost, passes, encoder_memory_of(workload))

    units = [*cost.units.values()]
    for_weights = np.stack([each.late_bytes[:2].sum(axis=0) for each in units], axis=1)
    product = np.stack([each.late_bytes[2] for each in units], axis=1)
    # The input backward also creates the tensors for the weight backward.
    late[:, chunk] += own * ((kind == Pass.BACKWARD_INPUT) | is_weight)[:, None]
    return _ChunkTable(
        running=table(own * ~is_weight[:, None], kept[:, chunk]),
        besides=tuple(table(0 * own, kept[:, each]) for each in range(kept.shape[1])),
        late_bytes=late @ for_weights,
        product_bytes=(own * is_weight[:, None]) @ product,
    )


def _drawn(cost: CostModel, chunks: int) -> np.ndarray:
    """Return kept, late and running micro-batches' bytes at random. [drawn, c + c + 1, f]"""
    rng, units = np.random.default_rng(0), [*cost.units.values()]
    kept = np.array([each.activation_bytes for each in units])
    inputs = np.array([each.boundary_bytes for each in units])
    late = np.array([each.late_bytes[:2].sum(axis=0) for each in units])
    working = np.array([each.transient_bytes.max(axis=0) for each in units])
    layers = np.isin(np.arange(len(units)), layer_kinds(cost.kinds))
    number = rng.integers(0, 8, (_DRAWN, chunks, len(units))) * layers
    again = number * (rng.random((_DRAWN, 1, 1)) < 0.5)
    own = working[rng.integers(0, len(units), _DRAWN)]
    held = (number - again) @ kept + again @ inputs
    return np.concatenate([held, number @ late, own[:, None]], axis=1)
