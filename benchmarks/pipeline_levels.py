"""Chosen packing levels beside all that are enumerated, of six pipelines with long-tailed texts.

    python benchmarks/pipeline_levels.py [--jobs 6] [--most 2]

Every set of at most `--most` sizes, the longest halved, is simulated with every context-parallel
size that a rank's memory allows and that is not clearly slower, on the samples and the steps that
`omnibal plan --packing-levels auto` simulates its own sets on. Times are simulated, with costs
counted at the clusters' rates.
"""

import argparse
import time
from dataclasses import dataclass
from itertools import product

import numpy as np

from omnibal import training_job
from omnibal.base.errors import UserError
from omnibal.base.worker_pool import map_unordered, usable_cores
from omnibal.data.lengths import Lengths
from omnibal.job.plan_data import SampleData
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.search.level_estimates import LevelEstimates, top_caps
from omnibal.search.level_sets import LevelRequest, search_levels
from omnibal.search.level_trial import LevelTrial, LevelTrials


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A job of fixed sizes, and the distribution of its texts: lognormal, clipped."""

    model: str
    cluster: str
    sizes: tuple[int, int, int]
    """Tensor, pipeline and data size."""
    micro_batches: int
    mean: float
    """Mean of the lengths' logarithm."""
    spread: float
    longest: int

    def data(self) -> SampleData:
        """Made texts, and one of the longest."""
        rng = np.random.default_rng(1)
        tokens = np.clip(rng.lognormal(self.mean, self.spread, 30_000).round(), 30, self.longest)
        tokens = np.append(tokens, self.longest).astype(np.int32)
        lengths = Lengths(
            loss_tokens=(tokens // 2).astype(np.int32),
            items={},
            tokens=tokens,
            source=np.zeros(len(tokens), np.int32),
            source_names=("made",),
            origin=None,
            squares={},
        )
        return SampleData(
            lengths=lengths,
            levels=(Level(caps=top_caps(lengths, ["tokens"])),),
            packs_per_step=self.sizes[2] * self.micro_batches,
        )


JOBS = (
    Pipeline(
        model="llama3.1-70b",
        cluster="h200-141g",
        sizes=(8, 8, 4),
        micro_batches=8,
        mean=7.5,
        spread=1.3,
        longest=65_536,
    ),
    Pipeline(
        model="llama3.1-70b",
        cluster="h200-141g",
        sizes=(8, 8, 4),
        micro_batches=4,
        mean=7.5,
        spread=1.3,
        longest=65_536,
    ),
    Pipeline(
        model="llama3.1-70b",
        cluster="h100-80g",
        sizes=(8, 4, 8),
        micro_batches=8,
        mean=7.0,
        spread=1.2,
        longest=32_768,
    ),
    Pipeline(
        model="llama3.1-8b",
        cluster="h100-80g",
        sizes=(2, 4, 8),
        micro_batches=8,
        mean=6.5,
        spread=1.5,
        longest=131_072,
    ),
    Pipeline(
        model="llama3.1-8b",
        cluster="h100-80g",
        sizes=(1, 4, 16),
        micro_batches=16,
        mean=7.0,
        spread=1.2,
        longest=65_536,
    ),
    Pipeline(
        model="llama3.1-70b",
        cluster="h200-141g",
        sizes=(4, 8, 8),
        micro_batches=8,
        mean=6.5,
        spread=1.6,
        longest=65_536,
    ),
)


def words(levels: tuple) -> str:
    """Tokens and context-parallel size of every level."""
    return " ".join(f"{each.caps['tokens']}/{each.context}" for each in levels) or "one level"


def compare(job: Pipeline, most: int) -> None:
    """Print what is chosen, and the fastest of what is enumerated."""
    tensor, pipeline, data_size = job.sizes
    parallel = Parallel(
        tensor=tensor, pipeline=pipeline, data=data_size, sequence_parallel=tensor > 1
    )
    spec, data = training_job(job.model, job.cluster, parallel=parallel), job.data()
    start = time.perf_counter()
    request = LevelRequest(job=spec, data=data, may_lower=True)
    found = search_levels(request, lambda done: None, usable_cores())
    seconds = time.perf_counter() - start
    estimates = LevelEstimates.of(spec, data)
    trials = LevelTrials(
        job=spec,
        data=data,
        tokens_per_step=estimates.tokens_per_step,
        longest=data.least_caps(),
    ).drawn(12_000)
    every = {found.best}
    for caps in estimates.sets(None):
        if len(caps) <= most:
            lower: tuple[Caps | None, ...] = (None, *caps[:-1])
            forms = [estimates.forms(step) for step in zip(lower, caps, strict=True)]
            every |= {tuple(form.level for form in each) for each in product(*forms)}
    times = {}
    for levels, trial in map_unordered(trials, sorted(every, key=words), usable_cores()):
        if isinstance(trial, LevelTrial):
            times[levels] = trial.ms_per_sample
        elif not isinstance(trial, UserError):
            raise TypeError(trial)
    best = min(times, key=lambda levels: times[levels])
    print(
        f"{job.model} TP {tensor} PP {pipeline} DP {data_size}, {job.micro_batches} micro-batches, "
        f"to {job.longest:,}: chosen {words(found.best)} {times[found.best]:.3f} ms a sample in "
        f"{seconds:.0f} s; best of {len(times)} enumerated {words(best)} {times[best]:.3f} "
        f"({times[best] / times[found.best] - 1:+.2%})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=len(JOBS), help="first jobs of the list")
    parser.add_argument("--most", type=int, default=2, help="levels of a set that is enumerated")
    given = parser.parse_args()
    for job in JOBS[: given.jobs]:
        compare(job, given.most)


if __name__ == "__main__":
    main()
