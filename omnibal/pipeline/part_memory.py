"""Memory of a stage that holds several parts of the model, and what it recomputes so as to fit.

A pass of one chunk needs what `omnibal.pipeline.stage_memory` counts for a stage of that chunk
alone, and what the stage's other chunks keep of the micro-batches that they hold meanwhile.

A stage of which not all fits recomputes layers in an order, the fewest that fit: by what a layer
saves for the time that it costs, where an earlier chunk saves more, as it holds more micro-batches;
or by kind of layer or chunk first, in any order of the kinds, which the search tries.

Shapes: n stages' contents, c chunks, K kinds of unit, L kinds of layer, f features.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.operation_graph import OperationGraph, held_in_passes
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
"""Contents of a stage, drawn at random, whose heaviest passes are looked at."""
_PASSES_AT_ONCE = 50_000
"""Passes of which the heaviest are looked for at a time: bounds memory."""
_MOST_KINDS = 3
"""Kinds of layer of which all orders are tried; of more, model order and its reverse."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Passes:
    """Passes of one chunk of a stage."""

    own: np.ndarray
    """Features of the micro-batch that runs, [passes, f]."""
    held: np.ndarray
    """Summed features of the micro-batches that every chunk holds, the running one included,
    [passes, c, f]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartMemory:
    """Memory of one stage of a schedule, by what its chunks hold."""

    running: tuple[MemoryTable, ...]
    """Passes of every chunk, as if the stage held nothing else."""
    besides: tuple[tuple[MemoryTable, ...], ...]
    """What every chunk keeps in these passes."""
    orders: np.ndarray
    """Orders in which layers are recomputed, of places in [c * L], [orders, c * L]."""
    buffers: MemoryTable
    """What libraries keep of a stage, whatever its chunks."""
    cap_bytes: float

    @classmethod
    def of_stages(
        cls,
        cost: CostModel,
        workload: Workload,
        schedule: PipelineSchedule,
        stages: int,
        cap_bytes: float,
    ) -> "list[PartMemory]":
        """Memory of every stage in its heaviest passes of the run."""
        return [
            cls._of_stage(cost, workload, schedule, (stage, stages), cap_bytes)
            for stage in range(stages)
        ]

    @classmethod
    def _of_stage(
        cls,
        cost: CostModel,
        workload: Workload,
        schedule: PipelineSchedule,
        place: tuple[int, int],
        cap_bytes: float,
    ) -> "PartMemory":
        features = features_of(workload, cost)
        largest = features.max(axis=0)
        # What libraries keep is counted of the whole stage.
        bare = replace(cost, library_buffers=())
        running, besides = [], []
        most = np.zeros(schedule.chunks)
        for chunk in range(schedule.chunks):
            passes = _heaviest_passes(cost, workload, schedule, place, chunk)
            most = np.maximum(most, (passes.held[..., 0]).max(axis=0))
            links = np.ones((len(passes.own), len(LINKS)))
            others = passes.held[:, chunk] - passes.own
            own = RunningPasses(own=passes.own, others=others, links=links, largest=largest)
            running.append(memory_table(bare, own, encoder_memory_of(workload)))
            besides.append(
                tuple(
                    memory_table(
                        bare,
                        RunningPasses(
                            own=np.zeros_like(others),
                            others=passes.held[:, other],
                            links=links,
                            largest=largest,
                        ),
                    )
                    for other in range(schedule.chunks)
                )
            )
        return cls(
            running=tuple(running),
            besides=tuple(besides),
            orders=_orders(cost, features.mean(axis=0), most),
            buffers=memory_table(cost, own),
            cap_bytes=cap_bytes,
        )

    def peak_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Peak of a device with these units, [n, c, K], of which so many are recomputed. [n]"""
        first, whole = self.running[0], counts.sum(axis=1)
        peaks = []
        for chunk, (table, besides) in enumerate(zip(self.running, self.besides, strict=True)):
            pass_bytes = table.pass_bytes(counts[:, chunk], recomputed[:, chunk])
            for other, kept in enumerate(besides):
                if other != chunk:
                    pass_bytes = pass_bytes + kept.activation_bytes(
                        counts[:, other], recomputed[:, other]
                    )
            peaks.append(pass_bytes)
        state = whole @ first.state_bytes - first.tied_bytes * holds_both_ends(first.kinds, whole)
        if len(self.buffers.buffer_bytes):
            has = (whole > 0) @ self.buffers.has_buffer > 0
            state = state + has @ self.buffers.buffer_bytes
        return state + first.with_encoders(whole, np.concatenate(peaks, axis=-1))

    def recomputed(self, counts: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The fewest layers in an order that make stages fit, and whether any do.

        Args:
            counts: units of every chunk, [n, c, K].
            order: index of the order of each, [n].

        Returns:
            [n, c, K] and [n].
        """
        layers = layer_kinds(self.running[0].kinds)
        held = counts[..., layers].reshape(len(counts), -1)
        order = self.orders[order]
        in_order = np.take_along_axis(held, order, axis=1)
        before = in_order.cumsum(axis=1) - in_order

        def again(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
            some = np.clip(number[:, None] - before[rows], 0, in_order[rows])
            placed = np.empty_like(some)
            np.put_along_axis(placed, order[rows], some, axis=1)
            found = np.zeros((len(rows), *counts.shape[1:]), np.int64)
            found[..., layers] = placed.reshape(len(rows), counts.shape[1], -1)
            return found

        def fit(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
            return fits_cap(self.peak_bytes(counts[rows], again(rows, number)), self.cap_bytes)

        low, high = np.zeros(len(counts), np.int64), held.sum(axis=1)
        every = np.arange(len(counts))
        high = np.where(fit(every, low), 0, high)
        fits = (high == 0) | fit(every, high)
        while (rows := np.flatnonzero(fits & (low < high))).size:
            middle = (low[rows] + high[rows]) // 2
            enough = fit(rows, middle)
            low[rows] = np.where(enough, low[rows], middle + 1)
            high[rows] = np.where(enough, middle, high[rows])
        return again(every, high), fits


def _orders(cost: CostModel, mean: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Orders of the layers of chunks that hold at most so many micro-batches, [c].
    [orders, c * L]"""
    units = [*cost.units.values()]
    layers = [units[kind] for kind in layer_kinds(cost.kinds)]
    saved = np.array([(each.activation_bytes - each.boundary_bytes) @ mean for each in layers])
    spent = np.array([each.recompute_ms @ mean for each in layers])
    price = spent / np.maximum(saved, 1e-9)
    # What saves nothing comes last.
    by_price = np.where(saved > 0, price / np.maximum(most[:, None], 1), np.inf)
    chunks = np.argsort(-most, kind="stable").tolist()
    kinds = [kind for kind in range(len(layers)) if saved[kind] > 0]
    idle = [kind for kind in range(len(layers)) if saved[kind] <= 0]
    many = len(kinds) > _MOST_KINDS
    ways = [tuple(kinds), tuple(kinds[::-1])] if many else list(permutations(kinds))
    orders = [np.argsort(by_price, axis=None, kind="stable").tolist()]
    for way in ways:
        full = [*way, *idle]
        orders.append([chunk * len(layers) + kind for kind in full for chunk in chunks])
        orders.append([chunk * len(layers) + kind for chunk in chunks for kind in full])
    return np.array(list(dict.fromkeys(map(tuple, orders))), np.int64)


def _heaviest_passes(
    cost: CostModel,
    workload: Workload,
    schedule: PipelineSchedule,
    place: tuple[int, int],
    chunk: int,
) -> _Passes:
    """Passes of a stage's chunk that are the heaviest for some of the contents that are drawn."""
    drawn_held, drawn_own = _drawn(cost, schedule.chunks)
    most = np.full(len(drawn_own), -np.inf)
    best: list[_Passes | None] = [None] * len(drawn_own)
    for passes in _every_pass(cost, workload, schedule, place, chunk):
        held = passes.held.reshape(len(passes.own), -1)
        needed = held @ drawn_held.T + passes.own @ drawn_own.T
        for row in np.flatnonzero(needed.max(axis=0) > most):
            at = int(needed[:, row].argmax())
            most[row] = needed[at, row]
            best[row] = _Passes(own=passes.own[[at]], held=passes.held[[at]])
    found = [each for each in best if each is not None]
    own = np.concatenate([each.own for each in found])
    held = np.concatenate([each.held for each in found])
    _, first = np.unique(
        np.column_stack([own, held.reshape(len(own), -1)]), axis=0, return_index=True
    )
    return _Passes(own=own[first], held=held[first])


def _drawn(cost: CostModel, chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of held and of running micro-batches in contents that are drawn at random.
    [drawn, c * f] and [drawn, f]"""
    rng, units = np.random.default_rng(0), [*cost.units.values()]
    kept = np.array([each.activation_bytes for each in units])
    inputs = np.array([each.boundary_bytes for each in units])
    working = np.array([each.transient_bytes.max(axis=0) for each in units])
    layers = np.isin(np.arange(len(units)), layer_kinds(cost.kinds))
    number = rng.integers(0, 8, (_DRAWN, chunks, len(units))) * layers
    again = number * (rng.random((_DRAWN, 1, 1)) < 0.5)
    held = (number - again) @ kept + again @ inputs
    own = working[rng.integers(0, len(units), _DRAWN)]
    return held.reshape(_DRAWN, -1), own


def _every_pass(
    cost: CostModel,
    workload: Workload,
    schedule: PipelineSchedule,
    place: tuple[int, int],
    chunk: int,
) -> Iterator[_Passes]:
    """Passes of a stage's chunk in every step of every rank."""
    stage, stages = place
    features = features_of(workload, cost)
    first = np.flatnonzero(workload.slot == 0)
    lengths = np.diff(np.append(first, len(workload)))
    for count in np.unique(lengths).tolist():
        graph = OperationGraph.of(schedule.rule(stages, schedule.chunks, count))
        held = held_in_passes(graph, stage)
        own = graph.of_stage(stage)
        kind = graph.kind[own]
        is_pass = (kind == Pass.FORWARD) | (kind == Pass.BACKWARD) | (kind == Pass.BACKWARD_WEIGHT)
        of_chunk = graph.part[own][is_pass] == graph.schedule.part(stage, chunk)
        begun, ended = held.held[of_chunk, :, 0], held.held[of_chunk, :, 1]
        rows = first[lengths == count]
        at_once = max(_PASSES_AT_ONCE // len(begun), 1)
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once, None] + np.arange(count)
            of_rows = features[some]  # [rows, m, f]
            total = np.concatenate([np.zeros_like(of_rows[:, :1]), of_rows.cumsum(axis=1)], axis=1)
            sums = total[:, ended] - total[:, begun]
            yield _Passes(
                own=of_rows[:, held.micro_batch[of_chunk]].reshape(-1, features.shape[1]),
                held=sums.reshape(-1, schedule.chunks, features.shape[1]),
            )
