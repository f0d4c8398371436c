"""Figures of the OmniBal paper (arXiv 2407.20761, ICML 2025), and its jobs as predicted here.

Data are a synthetic mixture like InternVL-Chat 1.2's (`tools/make_lengths.py`, whose pad ratio,
dist ratios and samples per pack agree with the paper's), in steps of 128 micro-batches, the global
batch of the paper's published configuration. As in that system, the head computes logits for all
tokens, and text is padded to the longest sample of a micro-batch unless samples are packed.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel, pack_features
from omnibal.data.lengths import Lengths
from omnibal.model.config import ClusterConfig, ModelConfig, load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps, memory_cap_gib
from omnibal.model.parallel import Parallel
from omnibal.model.units import feature_names, unit_names
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule, baseline_stages
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.simulate import simulate_run
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_cost import model_ms
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.pipeline.workload import Workload
from omnibal.steps.pack_settings import PackSettings
from omnibal.steps.steps import deal_steps, draw_steps

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.make_lengths import make_lengths

CAPS = Caps.of(tiles=9, tokens=4096)
SAMPLES_PER_EPOCH = 1_267_819
SAMPLES_PER_BATCH = 4
"""Of a micro-batch that is not packed."""
MICRO_BATCHES_PER_STEP = 128
CLUSTER = str(Path(__file__).with_name("a100.toml"))
UNFUSED_MEMORY_EFFICIENCY = 0.141
"""Share of the memory's rate at which the published system would move what this project's fused
kernels move: the one constant that is calibrated on a published figure (`calibration.py`)."""
GB_PER_GIB = 1.073741824
_SIMULATED_STEPS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A row of the paper's Table 9."""

    model: str
    """Preset."""
    parallel: Parallel
    """As listed, but for `ABLATION_JOB`."""
    stage_layers: tuple[int, ...]
    """Vision plus language layers of every stage."""
    recomputed: tuple[int, ...]
    """Layers that every stage recomputes, counted from its front."""
    baseline_gpu_days: float
    gpu_days: float

    @property
    def speed_up(self) -> float:
        return self.baseline_gpu_days / self.gpu_days


def _job(
    model: str,
    sizes: tuple[int, int, int],
    stage_layers: tuple[int, ...],
    recomputed: tuple[int, ...],
    gpu_days: tuple[float, float],
) -> Job:
    tensor, pipeline, data = sizes
    return Job(
        model=model,
        parallel=Parallel(
            tensor=tensor, pipeline=pipeline, data=data, sequence_parallel=tensor > 1
        ),
        stage_layers=stage_layers,
        recomputed=recomputed,
        baseline_gpu_days=gpu_days[0],
        gpu_days=gpu_days[1],
    )


TABLE_9 = (
    _job("internvit-6b-llama3-8b", (1, 4, 8), (16, 17, 20, 24), (8, 7, 10, 24), (27.7, 13.8)),
    _job("internvl-chat-1.5-6b-20b", (4, 4, 2), (22, 23, 24, 24), (0, 0, 0, 0), (61.8, 21.3)),
    _job("internvl-chat-1.5-6b-34b", (4, 4, 2), (28, 29, 24, 24), (3, 2, 0, 0), (75.4, 30.5)),
    _job(
        "internvit-6b-llama3-70b",
        (4, 8, 2),
        (22, 23, 13, 14, 14, 14, 13, 12),
        (11, 12, 8, 5, 3, 2, 0, 0),
        (129.0, 52.5),
    ),
    _job(
        "internvit-6b-qwen1.5-110b",
        (8, 8, 1),
        (21, 22, 13, 13, 14, 14, 14, 14),
        (6, 9, 1, 3, 0, 0, 0, 0),
        (243.0, 75.2),
    ),
)
ABLATION_JOB = TABLE_9[1]
"""Listed with tensor 2 and data 4, but the released configuration has tensor 4, and only that, with
the optimizer's state whole on every rank, explains the memory of Table 5 (`table5.py`). Times
do not depend on it; it is sharded here, without which the first job of Table 9 does not fit."""
TABLE_7 = {"none": 61.8, "data": 51.9, "data + model": 29.0, "data + model + memory": 21.3}
"""GPU days with so much balanced."""
_FEATURES = feature_names(load_model("internvl-chat-1.5-6b-20b"))
TABLE_3_MODEL_ONLY = 42.2
"""GPU days of random data on a balanced model."""
TABLE_5 = {
    "data + model": (58.2, 56.2, 32.5, 32.7),
    "data + model + memory": (12.3, 21.7, 24.7, 30.0),
}
"""GB that are left of each stage's 80 GB, of `ABLATION_JOB`."""
FIGURE_2_STAGE_MS = (900.0, 300.0, 260.0, 270.0)
"""Forward of 9 tiles and 4K tokens (DP-1, T-0) on the parameter partition of `ABLATION_JOB`."""
TABLE_4 = {
    PartitionMethod.PARAMETER: (0.03, 13.4, 93.6, 0.0, 42.2),
    PartitionMethod.LAYER: (0.64, 1.2, 20.1, 8.2, 30.6),
    PartitionMethod.PROFILE: (0.85, 2.1, 6.5, 16.6, 30.9),
    PartitionMethod.BMP: (0.83, 1.5, 12.2, -21.0, 29.0),
}
"""Spread of parameters (billions), layers and forward ms over stages, MiB sent more than by the
parameter partition, GPU days."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Epoch:
    """Micro-batches in the order they are trained, and how many samples each stands for."""

    features: np.ndarray
    """[packs, 5]."""
    samples: int
    matched: Workload | None = None
    """Steps and ranks of the micro-batches, where they are not as they come."""

    def workload(self, data_parallel: int) -> Workload:
        """Full steps, dealt to ranks in the order given unless they are matched."""
        if self.matched is not None:
            return self.matched
        per_rank = MICRO_BATCHES_PER_STEP // data_parallel
        packs = len(self.features) // MICRO_BATCHES_PER_STEP * MICRO_BATCHES_PER_STEP
        index = np.arange(packs)
        return Workload(
            features=self.features[:packs],
            step=index // MICRO_BATCHES_PER_STEP,
            dp_rank=index % MICRO_BATCHES_PER_STEP // per_rank,
            slot=index % per_rank,
            data_parallel_size=data_parallel,
        )

    @property
    def samples_per_pack(self) -> float:
        return self.samples / len(self.features)


class Data:
    """The paper's data, random or balanced, and this project's packing of it."""

    def __init__(self, samples: int, seed: int) -> None:
        made = make_lengths("internvl", samples, seed)
        self.lengths: Lengths = replace(made, loss_tokens=made.tokens)
        self.seed = seed

    @cached_property
    def random(self) -> Epoch:
        """Four samples at a time in random order, their text padded to the longest of them."""
        order = np.random.default_rng(self.seed).permutation(len(self.lengths))
        batches = order[: len(order) // SAMPLES_PER_BATCH * SAMPLES_PER_BATCH]
        batches = batches.reshape(-1, SAMPLES_PER_BATCH)
        longest = self.lengths.tokens[batches].max(axis=1).astype(np.float64)
        features = np.stack(
            [
                np.ones(len(batches)),
                self.lengths.column("tiles")[batches].sum(axis=1),
                SAMPLES_PER_BATCH * longest,
                SAMPLES_PER_BATCH * longest**2,
                SAMPLES_PER_BATCH * longest,
            ],
            axis=1,
        )
        return Epoch(features=features, samples=batches.size)

    @cached_property
    def isf(self) -> Epoch:
        """Iterative sampling and filtering, packs in random order."""
        packs = pack_samples(self.lengths, CAPS, PackingMethod.ISF, self.seed)
        order = np.random.default_rng(self.seed).permutation(len(packs))
        features = pack_features(packs, self.lengths, _FEATURES)[order]
        return Epoch(features=features, samples=len(self.lengths))

    def balanced(self, cost: CostModel, model: ModelConfig, data_parallel: int) -> Epoch:
        """This project's packs, matched into steps by predicted time."""

        def load(packs):
            return model_ms(cost, model, pack_features(packs, self.lengths, _FEATURES))

        levels = [Level(caps=CAPS)]
        steps = draw_steps(
            self.lengths,
            PackSettings(seed=self.seed),
            levels,
            load,
            packs_per_step=MICRO_BATCHES_PER_STEP,
            packs_per_row=data_parallel,
        )
        packs = deal_steps(steps, self.lengths, load, data_parallel, levels)
        features = pack_features(packs.packs, self.lengths, _FEATURES)
        # One step of the epoch, anywhere in it, takes what is over.
        full = np.bincount(packs.step)[packs.step] == MICRO_BATCHES_PER_STEP
        matched = Workload(
            features=features[full],
            step=packs.step[full],
            dp_rank=packs.dp_rank[full],
            slot=packs.slot[full],
            data_parallel_size=data_parallel,
        )
        return Epoch(features=features, samples=len(self.lengths), matched=matched)


class Predicted:
    """One job on one cluster."""

    def __init__(self, job: Job, cluster: ClusterConfig) -> None:
        self.job, self.cluster = job, cluster
        self.model = load_model(job.model)
        self.cost = analytic_cost(self.model, cluster, job.parallel, "bf16")
        self.cap_bytes = memory_cap_gib(cluster) * GIB

    def paper_stages(self, recomputed: Sequence[int]) -> tuple[Stage, ...]:
        """The paper's split, with so many layers recomputed from the front of every stage."""
        cuts = self._paper_cuts()
        counts = [len(stage.layers("vision")) for stage in stages_from_cuts(self.model, cuts)]
        both = [(min(n, v), max(n - v, 0)) for n, v in zip(recomputed, counts, strict=True)]
        return stages_from_cuts(self.model, cuts, both)

    def _paper_cuts(self) -> list[int]:
        """Before the first layer of every stage but the first."""
        sequence = unit_names(self.model)
        layers = ("vision_layer", "language_layer")
        positions = [at for at, unit in enumerate(sequence) if unit in layers]
        return [positions[n] for n in np.cumsum(self.job.stage_layers[:-1])]

    def stages(
        self, method: PartitionMethod, rule: RecomputeRule, epoch: Epoch, capped: bool = True
    ) -> tuple[Stage, ...]:
        """By a method and a rule; memory that the paper had in fact need not fit this model's."""
        workload = epoch.workload(self.job.parallel.data)
        cap_bytes = self.cap_bytes if capped else np.inf
        pipeline = self.job.parallel.pipeline
        if method is PartitionMethod.OMNIBAL:
            return search_stages(self.cost, self.model, workload, pipeline, cap_bytes).stages
        return baseline_stages(method, rule, self.cost, self.model, workload, pipeline, cap_bytes)

    def step_ms(self, stages: Sequence[Stage], epoch: Epoch) -> float:
        """Mean over steps of `MICRO_BATCHES_PER_STEP` micro-batches."""
        workload = epoch.workload(self.job.parallel.data).some_steps(_SIMULATED_STEPS)
        return float(simulate_run(self.cost, stages, workload).step_ms.mean())

    def gpu_days(self, stages: Sequence[Stage], epoch: Epoch) -> float:
        """Of an epoch of the paper's data."""
        samples_per_step = MICRO_BATCHES_PER_STEP * epoch.samples_per_pack
        steps = SAMPLES_PER_EPOCH / samples_per_step
        return steps * self.step_ms(stages, epoch) / 86.4e6 * self.job.parallel.world_size


def layer_counts(stages: Sequence[Stage]) -> list[int]:
    """Layers of both towers of every stage."""
    return [stage.layer_count for stage in stages]


def described(stages: Sequence[Stage]) -> str:
    """Vision+language layers of every stage, recomputed ones in parentheses."""
    parts = []
    for stage in stages:
        recomputed = f" ({stage.recomputed_layers})" if stage.recomputed_layers else ""
        vision, language = (len(stage.layers(tower)) for tower in ("vision", "language"))
        parts.append(f"{vision}+{language}{recomputed}")
    return " | ".join(parts)


def furthest_boundary(ours: Sequence[int], paper: Sequence[int]) -> int:
    """Layers by which the boundary that differs most is elsewhere."""
    return int(np.abs(np.cumsum(ours) - np.cumsum(paper)).max())


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--samples", type=int, default=60_000, help="of the mixture to simulate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cluster", default=CLUSTER, help="preset or TOML file")
    return parser.parse_args()


def cluster_of(given: argparse.Namespace) -> ClusterConfig:
    return published_system(load_cluster(given.cluster))


def published_system(cluster: ClusterConfig) -> ClusterConfig:
    """The cluster as the published system ran on it, with its unfused element-wise work."""
    return cluster.model_copy(update={"memory_efficiency": UNFUSED_MEMORY_EFFICIENCY})


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Wide rather than folded, also where the output is a file."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=200).print(table)
