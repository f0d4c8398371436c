"""Plans of twenty jobs of users with required options alone, or compared with forced plans.

    python benchmarks/goals.py
    python benchmarks/goals.py --only "8B text, 32" --forced

A row a job: samples per step, layout, memory, predicted samples per second, and a published recipe
for the model. With `--forced` each job is planned again with levels of packs,
placement of encoders, sharding and parallel sizes forced, each alone, at the same samples per
step, so that no forced plan should be faster. All times are simulated, with costs counted at the
clusters' rates; "search" is the time of the free search on this machine.
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

SAMPLES = 8_000
PIPELINE, DATA_PARALLEL = EncoderPlacement


@dataclass(frozen=True, slots=True)
class Job:
    """A model on some devices, the lengths that it trains, and a published recipe."""

    name: str
    model: str
    cluster: str
    gpus: int
    trainer: str | None
    tail: float
    """Spread of the lengths: the deviation of their logarithm."""
    longest: int
    items: str | None
    """Feature of the encoder's items."""
    recipe: str

    def lengths(self, samples: int = SAMPLES) -> Lengths:
        """Lengths of made samples: lognormal texts, and an item for every part of half of them."""
        rng = np.random.default_rng(0)
        tokens = np.clip(rng.lognormal(6.8, self.tail, samples).round(), 32, self.longest)
        items = {}
        if self.items is not None:
            count = np.minimum(rng.integers(0, 7, samples), tokens // (2 * TOKENS_PER_ITEM))
            per = TOKENS_PER_ITEM if self.items == "image_tokens" else 1
            items = {self.items: (count * per).astype(np.int32)}
        return Lengths(
            loss_tokens=(tokens // 3).astype(np.int32),
            items=items,
            tokens=tokens.astype(np.int32),
            source=np.zeros(samples, np.int32),
            source_names=("made",),
            origin=None,
            squares={},
        )


TOKENS_PER_ITEM = 256
_ROWS = """
8B text, 8|llama3.1-8b|h100-80g|8|-|0.6|16384|-|128; ZeRO-3
8B text, 32|llama3.1-8b|h100-80g|32|-|1.3|65536|-|128; ZeRO-3
8B text, 8|qwen3-8b|h100-80g|8|megatron-lm|0.6|8192|-|32; TP 4
70B text, 64|llama3.1-70b|h200-141g|64|-|1.3|65536|-|512; TP 4 PP 2
InternVL 2B, 2|internvl3-2b|a100-80g|2|-|0.6|8192|tiles|128; ZeRO-1
InternVL 8B, 8|internvl3-8b|h100-80g|8|-|0.6|16384|tiles|128; ZeRO-1
InternVL 26B, 64|internvl2.5-26b|h100-80g|64|-|0.6|16384|tiles|256; ZeRO-3
InternVL 6B + 20B, 32|internvl-chat-1.5-6b-20b|a100-80g|32|-|0.6|4096|tiles|576; TP 2 PP 4
InternVL 78B, 128|internvl2.5-78b|h100-80g|128|-|0.6|16384|tiles|512; ZeRO-3
InternVL 8B long, 32|internvl3-8b|h100-80g|32|-|1.3|16384|tiles|128; ZeRO-1
InternVL 30B-A3B, 64|internvl3.5-30b-a3b|h100-80g|64|-|1.3|16384|tiles|512; ZeRO-3
8B, recordings, 32|internvl3-8b-whisper|h100-80g|32|-|0.6|16384|clips|-
Qwen2.5-VL 7B, 8|qwen2.5-vl-7b|h100-80g|8|-|0.6|16384|image_tokens|128; ZeRO-3
Qwen2.5-VL 72B, 32|qwen2.5-vl-72b|h100-80g|32|megatron-bridge|0.6|16384|image_tokens|32; TP 8 PP 4
Qwen3-VL 8B, 8|qwen3-vl-8b|h100-80g|8|ms-swift|0.6|16384|image_tokens|128; TP 2
Qwen3-VL 8B, 8|qwen3-vl-8b|h100-80g|8|xtuner|0.6|16384|image_tokens|128; FSDP
Qwen3-VL 32B, 64|qwen3-vl-32b|h200-141g|64|-|1.3|16384|image_tokens|256; ZeRO-3
30B-A3B, 16|qwen3-30b-a3b|h100-80g|16|ms-swift|0.6|8192|-|16 packs; PP 2 EP 8
30B-A3B, 16|qwen3-30b-a3b|h100-80g|16|megatron-bridge|0.6|8192|-|32 packs; EP 16
Qwen3-VL 30B-A3B, 32|qwen3-vl-30b-a3b|h100-80g|32|-|0.6|16384|image_tokens|128; PP 2 EP 8
"""
"""Fields of jobs. Those without a trainer are for this project's."""


def read_job(line: str) -> Job:
    """Read a line of `_ROWS`."""
    name, model, cluster, gpus, trainer, tail, longest, items, recipe = map(
        str.strip, line.split("|")
    )
    given = [None if word == "-" else word for word in (trainer, items)]
    return Job(
        name, model, cluster, int(gpus), given[0], float(tail), int(longest), given[1], recipe
    )


JOBS = tuple(map(read_job, _ROWS.strip().splitlines()))


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


def planned(job: Job, free: Free | None = None, samples_per_step: int | None = None) -> Planned:
    """The plan of a job with required options, or with some choices forced."""
    description = training_job(job.model, job.cluster, trainer=job.trainer)
    free = free or Free.everything(job.gpus)
    if not description.model.encoders:
        free = replace(free, placements=(PIPELINE,))
    data = Samples(lengths=job.lengths(), samples_per_step=samples_per_step)
    return plan(Goal(job=description, data=data, free=free))


def row(job: Job) -> tuple[str, ...]:
    """Cells of a job planned with required options."""
    start = time.perf_counter()
    best = planned(job)
    seconds, made = time.perf_counter() - start, best.result.plan
    assert best.strategies is not None
    peak_gib = max(stage.memory.peak_gib for stage in best.prediction.stages)
    step = str(best.strategies.samples_per_step)
    layout = f"{made.parallel.text}, {made.parallel.sharding}"
    return (
        job.name, job.trainer or "own", step, layout, f"{peak_gib:.0f}", f"{rate(best):,.2f}",
        job.recipe, f"{seconds:.0f} s",
    )  # fmt: skip


def compared(job: Job) -> Iterator[tuple[str, str, str, str]]:
    """Rows of a job: what is forced, samples per second, how much slower, and the plan."""
    best, free = planned(job), Free.everything(job.gpus)
    assert best.strategies is not None
    yield f"{job.name}: free", f"{rate(best):,.2f}", "", words(best)
    for name, goal in forced(free, best):
        try:
            found = planned(job, goal, best.strategies.samples_per_step)
        except UserError as error:
            yield f"  {name}", "-", "-", str(error)[:60]
        else:
            slower = rate(best) / rate(found) - 1
            yield f"  {name}", f"{rate(found):,.2f}", f"{slower:+.1%}", words(found)


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
    parser.add_argument("--forced", action="store_true", help="compare with forced choices")
    given = parser.parse_args()
    jobs = [job for job in JOBS if given.only in (None, job.name)][: given.jobs]
    for job in jobs:
        if not given.forced:
            print(f"| {' | '.join(row(job))} |", flush=True)
            continue
        for cells in compared(job):
            print("{:<38} {:>12} {:>8}  {}".format(*cells), flush=True)


if __name__ == "__main__":
    main()
