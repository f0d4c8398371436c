"""Time, proven gap and gain of the search of split and recomputed layers.

    python benchmarks/search.py [--quick] [--levels] [--average-layer]

InternVL-Chat 1.5 and larger versions on A100s, TP 4, DP 2, 32 micro-batches of up to 9 tiles and
4,096 tokens, synthetic or equal, with ample memory and multiples of the min peak of all splits. The
gain is over the optimal split for mean micro-batches in the steady state, `(m - 1) max + sum`.

With `--levels`, packs of two to four levels: Llama 3.1 70B on H100s, TP 8, 16 packs per rank of
100,000 samples of the mixture `tulu3-longcite`, with and without proof.

With `--average-layer`, Qwen3.5 on 64 H100s, whose layers are of two kinds: plans searched as if
all layers were the average layer, simulated with the true costs.
"""

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from goals import Job
from rich.console import Console
from rich.table import Table

from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel
from omnibal.cost.setting import CostSetting
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.levels import CutRule, Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.units import unit_names
from omnibal.packing.features import pack_features
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import Packs
from omnibal.packing.steps import deal_steps, draw_steps
from omnibal.pipeline.least_peak import min_peak_of_splits
from omnibal.pipeline.partition import sampled_steps, search_stages
from omnibal.pipeline.recompute import useful_sets
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_cost import model_ms
from omnibal.pipeline.stage_memory import GIB, pareto_tables, stage_memories
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import layer_kinds, stages_from_cuts, unit_counts
from omnibal.pipeline.workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.make_lengths import make_lengths

DATA_PARALLEL = 2
MICRO_BATCHES = 32
SIZES = ((45, 48, 4), (45, 80, 8), (70, 130, 16))  # vision layers, language layers, stages
LEVELS = (  # context size by tokens of a pack
    {8_192: 1, 131_072: 8},
    {8_192: 1, 32_768: 4, 131_072: 8},
    {8_192: 1, 16_384: 2, 65_536: 4, 131_072: 8},
)
LEVEL_STAGES = (1, 2, 4, 8)
LEVEL_RANKS = 8
LEVEL_PACKS = 16  # per rank and step
LEVEL_CAP_FACTOR = 1.25
AVERAGE_LAYER_SIZES = {  # TP, PP, DP, EP by model and tokens of a pack
    ("qwen3.5-27b", 8_192): ((4, 4, 4, 1), (2, 8, 4, 1)),
    ("qwen3.5-27b", 131_072): ((4, 4, 4, 1), (4, 8, 2, 1)),
    ("qwen3.5-35b-a3b", 8_192): ((1, 4, 16, 8), (1, 8, 8, 8)),
    ("qwen3.5-35b-a3b", 131_072): ((2, 4, 8, 8), (2, 8, 4, 8)),
}
AVERAGE_LAYER_TAILS = {8_192: 1.3, 131_072: 2.0}  # `Job.tail`
PLENTY_GIB = 1_000.0
CAP_FACTORS = (1.6, 1.25, 1.05)  # of the min peak of all splits


def real_packs(cost: CostModel, model: ModelConfig, lengths: Lengths) -> Workload:
    """Return an epoch, packed and matched as by `omnibal plan`."""
    levels = [Level(caps=Caps.of(tiles=9, tokens=4096))]

    def load(packs: Packs) -> np.ndarray:
        return model_ms(cost, model, pack_features(packs, lengths, cost.features))

    steps = draw_steps(
        lengths,
        PackSettings(),
        levels,
        load,
        packs_per_step=DATA_PARALLEL * MICRO_BATCHES,
        packs_per_row=DATA_PARALLEL,
    )
    scheduled = deal_steps(steps, lengths, load, DATA_PARALLEL, levels)
    return Workload(
        features=pack_features(scheduled.packs, lengths, cost.features),
        step=scheduled.step,
        dp_rank=scheduled.dp_rank,
        slot=scheduled.slot,
        data_parallel_size=DATA_PARALLEL,
    )


def equal_packs(packs: Workload) -> Workload:
    """Return a step of mean micro-batches."""
    dp_rank, slot = (axis.ravel() for axis in np.indices((DATA_PARALLEL, MICRO_BATCHES)))
    return Workload(
        features=np.tile(packs.features.mean(axis=0), (len(slot), 1)),
        step=np.zeros_like(slot),
        dp_rank=dp_rank,
        slot=slot,
        data_parallel_size=DATA_PARALLEL,
    )


def simulated_ms(cost: CostModel, stages: tuple[Stage, ...], packs: Workload) -> float:
    """Return the mean step time of the run."""
    return float(simulate_levels(cost, [stages], packs).step_ms.mean())


def steady_state_stages(
    cost: CostModel, model: ModelConfig, packs: Workload, stages: int, cap_bytes: float
) -> tuple[Stage, ...]:
    """Return the split with min `(m - 1) max + sum` of stage times of the mean micro-batch."""
    sequence, mean = unit_names(model), packs.features.mean(axis=0)
    kinds = np.array([[unit == kind for kind in cost.units] for unit in sequence], np.int64)
    before = np.concatenate([np.zeros((1, len(cost.units)), np.int64), kinds.cumsum(axis=0)])
    counts = before - before[:, None]  # units of each kind in a run, [start, end, kinds]
    layers = layer_kinds(cost.kinds)
    start, end = np.nonzero(counts[..., layers].sum(axis=-1) > 0)
    forward = np.array([unit.forward_ms @ mean for unit in cost.units.values()])
    backward = np.array([unit.backward_ms @ mean for unit in cost.units.values()])
    layers_ms = forward[layers]
    run_ms = np.full((stages, len(before), len(before)), np.inf)
    recomputed = np.zeros((*run_ms.shape, len(layers)), np.int64)
    for stage, table in enumerate(pareto_tables(cost, packs, stages)):
        extreme_ms = np.stack([layers_ms, layers_ms])
        sets, _ = useful_sets(table, counts[start, end], extreme_ms, cap_bytes)
        place = stage, start[sets.stage], end[sets.stage]
        layer_counts = recomputed[place] = sets.layers
        run_ms[place] = counts[place[1:]] @ (forward + backward) + layer_counts @ layers_ms
    # For each value of max, the min sum is a shortest path over runs below it: lower the limit on
    # runs to the longest stage of the last path until there is none.
    best_ms, best, limit = np.inf, [0], np.inf
    while (edges := shortest_path(np.where(run_ms < limit, run_ms, np.inf))) is not None:
        times = run_ms[np.arange(stages), edges[:-1], edges[1:]]
        total_ms = (MICRO_BATCHES - 1) * times.max() + times.sum()
        if total_ms < best_ms:
            best_ms, best = total_ms, edges
        limit = times.max()
    chosen = [recomputed[stage, a, b] for stage, (a, b) in enumerate(pairwise(best))]
    return stages_from_cuts(model, best[1:-1], [layers.tolist() for layers in chosen])


def shortest_path(run_ms: np.ndarray) -> list[int] | None:
    """Return the edges of the split with the min sum of `run_ms` [stages, start, end], or None."""
    reached = np.where(np.arange(run_ms.shape[1]) == 0, 0.0, np.inf)  # min sum up to each edge
    previous = []
    for stage_ms in run_ms:
        total = reached[:, None] + stage_ms
        previous.append(total.argmin(axis=0))
        reached = total.min(axis=0)
    if not np.isfinite(reached[-1]):
        return None
    edges = [len(reached) - 1]
    for start in reversed(previous):
        edges.append(int(start[edges[-1]]))
    return edges[::-1]


def add_rows(table: Table, size: tuple[int, int, int], lengths: Lengths) -> None:
    vision, language, stages = size
    base = load_model("internvl-chat-1.5-6b-20b")
    model = base.with_layers(vision=vision, language=language)
    parallel = Parallel(tensor=4, pipeline=stages, data=DATA_PARALLEL)
    cost = analytic_cost(CostSetting(model, load_cluster("a100-80g"), parallel, "bf16"))
    packs = real_packs(cost, model, lengths)
    for name, workload in (("real", packs), ("equal", equal_packs(packs))):
        min_gib = min_peak_of_splits(SplitTask(cost, model, workload, stages)) / GIB
        for cap_gib in (PLENTY_GIB, *(factor * min_gib for factor in CAP_FACTORS)):
            start = time.perf_counter()
            result = search_stages(SplitTask(cost, model, workload, stages, cap_gib * GIB))
            seconds = time.perf_counter() - start
            searched_ms = simulated_ms(cost, result.stages, workload)
            steady = steady_state_stages(cost, model, workload, stages, cap_gib * GIB)
            steady_ms = simulated_ms(cost, steady, workload)
            table.add_row(
                f"{vision}+{language} x{stages}",
                name,
                "plenty" if cap_gib == PLENTY_GIB else f"{cap_gib:.1f}",
                f"{seconds:.2f}",
                f"{len(np.unique(sampled_steps(workload).step))} of "
                f"{len(np.unique(workload.step))}",
                f"{result.step_ms / result.lower_bound_ms - 1:.1e}",
                f"{result.step_ms:,.1f}",
                f"{searched_ms:,.1f}",
                f"{steady_ms:,.1f}",
                f"{100 * (steady_ms / searched_ms - 1):.2f}%",
            )


def level_workload(
    job: JobSpec, lengths: Lengths, sizes: dict[int, int]
) -> tuple[Workload, tuple[Level, ...]]:
    """Return the levels, and packs of them as made by `omnibal plan`."""
    levels = tuple(
        Level(caps=Caps.of(tokens=tokens), context=context, cut=CutRule.ZIGZAG)
        for tokens, context in sizes.items()
    )
    data = SampleData(
        settings=PackSettings(packing=PackingMethod.ISF),
        lengths=lengths,
        packs_per_step=LEVEL_PACKS * LEVEL_RANKS,
        levels=levels,
    )
    packs, lengths = data.schedule(job)
    return job.workload(packs, lengths, levels), levels


def level_table(lengths: Lengths) -> Table:
    table = Table(title="Packs of several levels; costs counted, not measured")
    columns = "levels", "stages", "shares", "cap GiB", "proof", "seconds", "gap", "ms"
    for column in columns:
        table.add_column(column, justify="right")
    model, cluster = load_model("llama3.1-70b"), load_cluster("h100-80g")
    for stages, sizes in product(LEVEL_STAGES, LEVELS):
        parallel = Parallel(tensor=8, pipeline=stages, data=LEVEL_RANKS, sequence_parallel=True)
        job = JobSpec(model=model, cluster=cluster, parallel=parallel, precision="bf16")
        packs, levels = level_workload(job, lengths, sizes)
        cost = job.cost_of_all(levels)
        task = SplitTask(cost, model, packs, stages)
        cap_bytes = LEVEL_CAP_FACTOR * min_peak_of_splits(task)
        capped = SplitTask(cost, model, packs, stages, cap_bytes)
        for prove in (False, True):
            start = time.process_time()
            result = search_stages(capped, prove=prove)
            seconds = time.process_time() - start
            table.add_row(
                " ".join(f"{tokens // 1024}K/{context}" for tokens, context in sizes.items()),
                f"{stages}",
                f"{len(packs):,}",
                f"{cap_bytes / GIB:.1f}",
                "yes" if prove else "no",
                f"{seconds:.2f}",
                f"{result.gap:.1e}",
                f"{result.step_ms:,.0f}",
            )
    return table


def with_average_layer(cost: CostModel, model: ModelConfig) -> CostModel:
    """Return costs with every language layer's time and memory at the mean of all."""
    sequence, first = unit_names(model), model.language.kinds[0].name
    numbers = {kind.name: sequence.count(kind.name) for kind in cost.kinds if kind.layer}
    units = [cost.units[name] for name in numbers]
    means: dict[str, Any] = {}
    for field in fields(units[0]):
        values = [getattr(unit, field.name) for unit in units]
        if field.name in ("transient_bytes", "two_part_bytes"):  # [moments, features]
            values = [value.max(axis=0, keepdims=True) for value in values]
        if not isinstance(values[0], tuple | None):
            means[field.name] = np.average(values, axis=0, weights=[*numbers.values()])
    average = replace(cost.units[first], **means)
    return replace(cost, units=cost.units | dict.fromkeys(numbers, average))


def recompute_again(
    cost: CostModel, model: ModelConfig, packs: Workload, stages: tuple[Stage, ...], cap: float
) -> tuple[Stage, ...]:
    """Return the stages with the recomputed layers that take least on the mean micro-batch."""
    mean, layers = packs.features.mean(axis=0), layer_kinds(cost.kinds)
    layer_ms = np.array([unit.recompute_ms @ mean for unit in cost.units.values()])[layers]
    recomputed = []
    for table, stage in zip(pareto_tables(cost, packs, len(stages)), stages, strict=True):
        counts = unit_counts(cost.kinds, stage.units)[None]
        sets = useful_sets(table, counts, np.stack([layer_ms, layer_ms]), cap)[0].layers
        recomputed.append(sets[(sets @ layer_ms).argmin()].tolist())
    cuts = np.cumsum([sum(map(len, stage.units)) for stage in stages])[:-1].tolist()
    return stages_from_cuts(model, cuts, recomputed)


def average_layer_rows() -> Iterator[tuple[str, ...]]:
    """Yield model, tokens, sizes, steps of the plan and of the average layer's plan, with its own
    and with new recomputed layers, and its peak memory."""
    for ((name, tokens), sizes_of), index in product(AVERAGE_LAYER_SIZES.items(), (0, 1)):
        tensor, pipeline, data, expert = sizes_of[index]
        parallel = Parallel(
            tensor=tensor, pipeline=pipeline, data=data, expert=expert, sequence_parallel=tensor > 1
        )
        tail = AVERAGE_LAYER_TAILS[tokens]
        made = Job(name, name, "h100-80g", 64, None, tail, tokens, "image_tokens", "-")
        levels = (Level(caps=Caps.of(tokens=tokens, image_tokens=tokens // 2)),)
        packed = SampleData(
            lengths=made.lengths(), settings=PackSettings(), levels=levels, packs_per_step=16 * data
        )
        model, cluster = load_model(name), load_cluster(made.cluster)
        job = JobSpec(model=model, cluster=cluster, parallel=parallel, precision="bf16")
        packs, cost = job.workload(*packed.schedule(job), levels), job.cost
        cap = job.memory_cap_gib * GIB
        task = SplitTask(cost, model, packs, pipeline, cap)
        average = replace(task, cost=with_average_layer(cost, model))
        best, found = (search_stages(one).stages for one in (task, average))
        again = recompute_again(cost, model, packs, found, cap)
        peak = max(memory.peak_gib for memory in stage_memories(cost, [found], packs))
        best_ms = simulated_ms(cost, best, packs)
        slower = [f"{simulated_ms(cost, s, packs) / best_ms - 1:+.1%}" for s in (found, again)]
        fits = f"{peak:.1f} of {job.memory_cap_gib:.1f}"
        yield name, f"{tokens // 1024}K", f"{parallel}", f"{best_ms / 1e3:.2f}", *slower, fits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the smallest model")
    parser.add_argument("--levels", action="store_true", help="search packs of several levels")
    parser.add_argument("--average-layer", action="store_true", help="Qwen3.5's two layer kinds")
    arguments = parser.parse_args()
    if arguments.average_layer:
        print("model, tokens, sizes, step s, average layer: slower, recomputed again, peak GiB")
        for row in average_layer_rows():
            print(f"| {' | '.join(row)} |", flush=True)
        return
    if arguments.levels:
        lengths = make_lengths("tulu3-longcite", 100_000, seed=0)
        Console(width=120).print(level_table(lengths))
        return
    table = Table(title="Simulated step times in ms; costs counted, not measured")
    columns = ("layers", "packs", "cap GiB", "seconds", "steps", "gap", "search")
    for column in (*columns, "all steps", "steady state", "gain"):
        table.add_column(column, justify="right")
    lengths = make_lengths("internvl", 60_000, seed=0)
    for size in SIZES[:1] if arguments.quick else SIZES:
        add_rows(table, size, lengths)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    Console(width=120).print(table, f"peak memory {peak_gib:.2f} GiB")


if __name__ == "__main__":
    main()
