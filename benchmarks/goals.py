"""Free plans beside forced ones, of twelve jobs: text, images, experts and recordings.

    python benchmarks/goals.py --jobs 3
    python benchmarks/goals.py --only "8B text, 32"

Every job is planned with all free, and with levels of packs (one or any), the placement of
encoders, the sharding of weights and parallel sizes forced, each alone and levels and placement
together. What is forced is searched for as well as what is free, so that no forced plan should be
faster. All times are simulated, with costs counted at the clusters' rates; "search" is the time of
the free search on this machine.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from omnibal import Free, Goal, Planned, Samples, plan, training_job
from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.parallel import WeightSharding
from omnibal.search.level_estimates import LevelRule

SAMPLES = 20_000
PIPELINE, DATA_PARALLEL = EncoderPlacement


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A model on some devices, and the lengths that it trains."""

    name: str
    model: str
    cluster: str
    gpus: int
    tail: float
    """Spread of the lengths: the deviation of their logarithm."""
    items: str | None = None
    """Feature of the encoder's items."""
    tokens_per_item: int = 256
    longest: int = 16_384

    def lengths(self) -> Lengths:
        """Lengths of made samples: lognormal texts, and an item for every part of half of them."""
        rng = np.random.default_rng(0)
        tokens = np.clip(rng.lognormal(6.8, self.tail, SAMPLES).round(), 32, self.longest)
        items = {}
        if self.items is not None:
            count = np.minimum(rng.integers(0, 7, SAMPLES), tokens // (2 * self.tokens_per_item))
            per = self.tokens_per_item if self.items == "image_tokens" else 1
            items = {self.items: (count * per).astype(np.int32)}
        return Lengths(
            loss_tokens=(tokens // 3).astype(np.int32),
            items=items,
            tokens=tokens.astype(np.int32),
            source=np.zeros(SAMPLES, np.int32),
            source_names=("made",),
            origin=None,
            squares={},
        )


SHORT, LONG = 0.6, 1.3
JOBS = (
    Job(name="8B text, 8", model="llama3.1-8b", cluster="h100-80g", gpus=8, tail=SHORT),
    Job(
        name="8B text, 32",
        model="llama3.1-8b",
        cluster="h100-80g",
        gpus=32,
        tail=LONG,
        longest=65_536,
    ),
    Job(
        name="70B text, 64",
        model="llama3.1-70b",
        cluster="h200-141g",
        gpus=64,
        tail=LONG,
        longest=65_536,
    ),
    Job(
        name="InternVL 8B, 8",
        model="internvl2.5-8b",
        cluster="h100-80g",
        gpus=8,
        tail=SHORT,
        items="tiles",
    ),
    Job(
        name="InternVL 26B, 64",
        model="internvl2.5-26b",
        cluster="h100-80g",
        gpus=64,
        tail=SHORT,
        items="tiles",
    ),
    Job(
        name="InternVL 78B, 512",
        model="internvl2.5-78b",
        cluster="h100-80g",
        gpus=512,
        tail=SHORT,
        items="tiles",
    ),
    Job(
        name="InternVL 8B long, 32",
        model="internvl3-8b",
        cluster="h100-80g",
        gpus=32,
        tail=LONG,
        items="tiles",
    ),
    Job(
        name="Qwen2.5-VL 7B, 8",
        model="qwen2.5-vl-7b",
        cluster="h100-80g",
        gpus=8,
        tail=SHORT,
        items="image_tokens",
    ),
    Job(
        name="Qwen3-VL 32B, 64",
        model="qwen3-vl-32b",
        cluster="h200-141g",
        gpus=64,
        tail=LONG,
        items="image_tokens",
    ),
    Job(
        name="Qwen3-VL 30B-A3B, 32",
        model="qwen3-vl-30b-a3b",
        cluster="h100-80g",
        gpus=32,
        tail=SHORT,
        items="image_tokens",
    ),
    Job(
        name="InternVL3.5 30B-A3B, 64",
        model="internvl3.5-30b-a3b",
        cluster="h100-80g",
        gpus=64,
        tail=LONG,
        items="tiles",
    ),
    Job(
        name="8B with recordings, 32",
        model="internvl3-8b-whisper",
        cluster="h100-80g",
        gpus=32,
        tail=SHORT,
        items="clips",
    ),
)


def forced(free: Free, best: Planned) -> Iterator[tuple[str, Free]]:
    """What is forced, by name."""
    one = LevelRule(count=1)
    yield "one level", replace(free, levels=one)
    for placement in free.placements:
        yield placement.option, replace(free, placements=(placement,))
        yield f"{placement.option}, one level", replace(free, placements=(placement,), levels=one)
    for way in WeightSharding:
        yield f"weights {way}", replace(free, shardings=(way,))
    assert free.sizes is not None and best.strategies is not None
    others = [each.parallel for each in best.strategies.ranking[1:4]]
    for sizes in dict.fromkeys([best.result.plan.parallel, *others]):
        fixed = replace(
            free.sizes, tensor=sizes.tensor, pipeline=sizes.pipeline, expert=sizes.expert
        )
        yield sizes.text, replace(free, sizes=fixed)


def rate(planned: Planned) -> float:
    """Samples per second of all devices."""
    per_device = planned.prediction.samples_per_second_per_gpu
    assert per_device is not None
    return per_device * planned.result.plan.parallel.world_size


def compared(job: Job) -> list[tuple[str, str, str, str]]:
    """Rows of a job: what is forced, samples per second, how much slower, and the plan."""
    description = training_job(job.model, job.cluster)
    free = Free.everything(job.gpus)
    if not description.model.encoders:
        free = replace(free, placements=(PIPELINE,))
    data = Samples(lengths=job.lengths())
    start = time.perf_counter()
    best = plan(Goal(job=description, data=data, free=free))
    seconds = time.perf_counter() - start
    rows = [(f"{job.name}: free", f"{rate(best):,.2f}", f"{seconds:.0f} s", words(best))]
    for name, goal in forced(free, best):
        try:
            found = plan(Goal(job=description, data=data, free=goal))
        except UserError as error:
            rows.append((f"  {name}", "-", "-", str(error)[:60]))
        else:
            slower = rate(best) / rate(found) - 1
            rows.append((f"  {name}", f"{rate(found):,.2f}", f"{slower:+.1%}", words(found)))
    return rows


def words(planned: Planned) -> str:
    """Sizes, placement and packs of a plan."""
    made = planned.result.plan
    assert made.data is not None
    packs = " ".join(f"{each.caps['tokens']}/{each.context}" for each in made.levels)
    return f"{made.parallel.text}; {planned.placement.chosen.option}; {packs or made.data.caps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=len(JOBS), help="first jobs of the list")
    parser.add_argument("--only", help="name of one job")
    given = parser.parse_args()
    jobs = [job for job in JOBS if given.only in (None, job.name)][: given.jobs]
    for job in jobs:
        for row in compared(job):
            print("{:<38} {:>12} {:>8}  {}".format(*row), flush=True)


if __name__ == "__main__":
    main()
