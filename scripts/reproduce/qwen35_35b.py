"""NVIDIA's recipe for Qwen3.5-35B-A3B on 16 H100s: its cut of the pipeline beside planned ones.

    python scripts/reproduce/qwen35_35b.py

Megatron-Bridge's recipe (recipes/qwen_vl/h100/qwen35_vl.py, August 2026; Qwen3.6 has the same) sets
TP 1, PP 2, EP 8, the encoder and 17 language layers on the first stage, 23 on the last, 512 samples
of 4,096 tokens a step in micro-batches of one, and nothing recomputed. Here packs of one shape are
run on its cut, on the best cut that leaves the whole encoder on the first stage, which is all that
Megatron-Bridge can run, and on the one that `omnibal plan` finds among all cuts: without room for
memory, so that nothing is recomputed, and in the 72 GiB that a plan may fill.

Simulated, with counted costs at the fitted rates of the cluster h100-80g.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Self

import numpy as np
from paper import print_table

from omnibal.base.errors import DoesNotFit
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import MockData
from omnibal.model.config import load_cluster, load_model
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.units import HEAD, LANGUAGE_EMBED, unit_names
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.simulate import simulate_run
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_memory import GIB, MemoryTable, fits_cap, memory_tables
from omnibal.pipeline.unit_runs import (
    encoders_stage,
    layer_kinds,
    recomputed_counts,
    stages_from_cuts,
    unit_counts,
)
from omnibal.pipeline.workload import Workload

MODEL = "qwen3.5-35b-a3b"
CLUSTER = "h100-80g"
SIZES = Parallel(tensor=1, pipeline=2, data=8, expert=8)
MICRO_BATCHES = 512 // SIZES.data
"""Packs of a rank in a step: 512 samples, one in each."""
FIRST_LAYERS = 17
"""Language layers of the recipe's first stage."""
LARGEST_IMAGE = 1024
"""Tokens of an image, or all of a pack's where these are fewer."""
SHAPES = (
    (4096, 196),
    *((tokens, tokens * quarters // 4) for tokens in (4096, 8192) for quarters in (1, 2, 3)),
)
"""Tokens of a pack and those that are images'. The first has one image of 28 x 28 patches, the most
that the recipe's graphs of the encoder take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Two stages and what is predicted of them."""

    stages: tuple[Stage, ...]
    step_ms: float
    peaks_gib: tuple[float, ...]

    @property
    def words(self) -> str:
        """Layers of the first and of the last stage, the encoder's before the language model's."""
        return " | ".join(
            "+".join(
                str(len(layers))
                for layers in (stage.layers("vision"), stage.layers("language"))
                if layers
            )
            for stage in self.stages
        )

    @property
    def recomputed(self) -> str:
        """Layers that each stage recomputes, of both towers together."""
        towers = ("vision", "language")
        return " ".join(
            str(sum(len(stage.recomputed(tower)) for tower in towers)) for stage in self.stages
        )


@dataclass(frozen=True)
class Shape:
    """A job on packs that are all alike.

    As they are, what takes a stage the least time takes the step the least.
    """

    job: JobSpec
    workload: Workload

    @classmethod
    def of(cls, tokens: int, image_tokens: int, predicts: bool) -> Self:
        """Packs of so many tokens, and a model with or without its layer that predicts ahead."""
        model = load_model(MODEL)
        if not predicts:
            model = model.with_tower("language", prediction_layers=0)
        job = JobSpec(model=model, cluster=load_cluster(CLUSTER), parallel=SIZES, precision="bf16")
        data = MockData(
            caps=Caps.of(tokens=tokens, image_tokens=image_tokens),
            micro_batches_per_step=MICRO_BATCHES,
            image_tokens=min(image_tokens, LARGEST_IMAGE),
        )
        return cls(job, job.workload(*data.schedule(job), data.levels))

    @cached_property
    def tables(self) -> list[MemoryTable]:
        """Memory of what both stages may hold."""
        return memory_tables(self.job.cost, self.workload, SIZES.pipeline)

    def predicted(self, stages: tuple[Stage, ...]) -> Cut:
        """Simulate a step on these stages."""
        peaks = [
            table.peak_bytes(unit_counts(table.kinds, each), recomputed_counts(table.kinds, each))
            for table, each in zip(self.tables, stages, strict=True)
        ]
        step_ms = simulate_run(self.job.cost, stages, self.workload).step_ms.mean()
        return Cut(
            stages=stages,
            step_ms=float(step_ms),
            peaks_gib=tuple(float(peak) / GIB for peak in peaks),
        )

    def at(self, cut: int, cap_gib: float) -> Cut | None:
        """Cut after so many units; each stage recomputes what takes the least time of what fits.

        None where nothing does.
        """
        chosen = []
        for table, stage in zip(self.tables, stages_from_cuts(self.job.model, [cut]), strict=True):
            layers = layer_kinds(table.kinds)
            counts = unit_counts(table.kinds, stage)
            sets = np.zeros((int(np.prod(counts[layers] + 1)), len(counts)), np.int64)
            sets[:, layers] = list(product(*(range(count + 1) for count in counts[layers])))
            sets = sets[fits_cap(table.peak_bytes(counts, sets), cap_gib * GIB)]
            if not len(sets):
                return None
            chosen.append(sets[(sets @ self._recompute_ms).argmin(), layers].tolist())
        return self.predicted(stages_from_cuts(self.job.model, [cut], chosen))

    @cached_property
    def _recompute_ms(self) -> np.ndarray:
        """Time of recomputing a unit of each kind for one pack. [kinds]"""
        units = self.job.cost.units.values()
        return np.array([unit.recompute_ms for unit in units]) @ self.workload.features[0]

    @property
    def first_cut(self) -> int:
        """The cut after the encoder and the embedding of tokens."""
        model = self.job.model
        return sum(map(len, encoders_stage(model).units)) + 1

    def recipe(self, cap_gib: float) -> Cut | None:
        """The recipe's cut."""
        return self.at(self.first_cut + FIRST_LAYERS, cap_gib)

    def held(self, cap_gib: float) -> Cut | None:
        """The best cut within the language layers."""
        layers = range(1, self.job.model.language.layers)
        cuts = (self.at(self.first_cut + count, cap_gib) for count in layers)
        return min((cut for cut in cuts if cut), key=lambda cut: cut.step_ms, default=None)

    def planned(self, cap_gib: float) -> Cut | None:
        """The best of all cuts, as `omnibal plan` finds it."""
        job = self.job
        try:
            found = search_stages(job.cost, job.model, self.workload, SIZES.pipeline, cap_gib * GIB)
        except DoesNotFit:
            return None
        return self.predicted(found.stages)

    def layers_worth(self) -> tuple[float, float]:
        """Time of what the first and the last stage have besides language layers, in mean ones."""
        units, features = self.job.cost.units, self.workload.features[0]
        times = {
            name: float((unit.forward_ms + unit.backward_ms) @ features)
            for name, unit in units.items()
        }
        names = unit_names(self.job.model)
        first = names.index(LANGUAGE_EMBED) + 1
        of_layer = float(np.mean([times[name] for name in names[first:] if name != HEAD]))
        return sum(times[name] for name in names[:first]) / of_layer, times[HEAD] / of_layer


def row(tokens: int, image_tokens: int, predicts: bool, has_cap: bool) -> Iterator[str]:
    """One line of the table."""
    shape = Shape.of(tokens, image_tokens, predicts)
    cap_gib = shape.job.memory_cap_gib if has_cap else np.inf
    yield f"{tokens:,}"
    yield f"{image_tokens / tokens:.0%}"
    yield "yes" if predicts else "no"
    yield "-".join(f"{worth:.1f}" for worth in shape.layers_worth())
    recipe = shape.recipe(cap_gib)
    yield from _cells(recipe)
    held, planned = shape.held(cap_gib), shape.planned(cap_gib)
    yield held.words if held else ""
    yield from _cells(held)
    yield f"{recipe.step_ms / held.step_ms - 1:+.1%}" if recipe and held else ""
    yield planned.words if planned else ""
    yield _cells(planned)[0]


def _cells(cut: Cut | None) -> tuple[str, ...]:
    if cut is None:
        return "does not fit", "", ""
    peaks = " ".join(f"{peak:.0f}" for peak in cut.peaks_gib)
    return f"{cut.step_ms / 1e3:.2f}", peaks, cut.recomputed


def main() -> None:
    """Print a table without and one with a limit of memory."""
    of_cut = ("step s", "GiB", "again")
    columns = (
        "tokens", "images", "predicts", "ends", *of_cut,
        "held", *of_cut, "gain", "free", "step s",
    )  # fmt: skip
    sizes = f"{MODEL}, TP 1 x PP 2 x DP 8, EP 8, {CLUSTER}"
    for title, has_cap in (("memory without limit", False), ("memory of a device", True)):
        rows = [[*row(*shape, predicts, has_cap)] for predicts in (True, False) for shape in SHAPES]
        print_table(f"{sizes}, {title}", columns, rows)


if __name__ == "__main__":
    main()
