"""Plans of twenty jobs with only the required options, or compared with restricted searches.

    python benchmarks/goals.py
    python benchmarks/goals.py --only "8B text, 32" --forced

Prints a row per job: samples per step, layout, peak memory, predicted samples per second, a
published recipe for the model, and the search's time on this machine. With `--forced`, each job is
planned again with one restriction at a time (one level, encoder placement, sharding, parallel
sizes) at the same samples per step: no such plan should be faster. Times are simulated, with
counted costs.
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
    """A model, its devices, the distribution of its samples, and a published recipe."""

    name: str
    model: str
    cluster: str
    gpus: int
    trainer: str | None
    tail: float  # standard deviation of the logarithm of lengths
    longest: int
    items: str | None  # feature of the encoder's items
    recipe: str

    def lengths(self, samples: int = SAMPLES) -> Lengths:
        """Return synthetic lengths: lognormal tokens, up to half of them from encoder items."""
        rng = np.random.default_rng(0)
        tokens = np.clip(rng.lognormal(6.8, self.tail, samples).round(), 32, self.longest)
        items = {}
        if self.items is not None:
            count = np.minimum(rng.integers(0, 7, samples), tokens // (2 * TOKENS_PER_ITEM))
            # Images at native resolution are counted by tokens, other items by number.
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
# Fields of `Job`. Without a trainer ("-"), the plan is for this project's.
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


def read_job(line: str) -> Job:
    name, model, cluster, gpus, trainer, tail, longest, items, recipe = line.split("|")
    return Job(
        name, model, cluster, int(gpus), None if trainer == "-" else trainer, float(tail),
        int(longest), None if items == "-" else items, recipe,
    )  # fmt: skip


JOBS = tuple(map(read_job, _ROWS.strip().splitlines()))


def restrict_search(free: Free, best: Planned) -> Iterator[tuple[str, Free]]:
    """Yield restricted searches by name."""
    one_level = LevelRule(count=1)
    yield "one level", replace(free, levels=one_level)
    for placement in free.placements:
        placed = replace(free, placements=(placement,))
        yield placement.value, placed
        yield f"{placement.value}, one level", replace(placed, levels=one_level)
    for sharding in WeightSharding:
        yield f"weights {sharding}", replace(free, shardings=(sharding,))
    assert free.sizes is not None and best.strategies is not None
    # The chosen sizes, and the next three of the ranking.
    others = [strategy.parallel for strategy in best.strategies.ranking[1:4]]
    for sizes in dict.fromkeys([best.result.plan.parallel, *others]):
        fixed = replace(
            free.sizes, tensor=sizes.tensor, pipeline=sizes.pipeline, expert=sizes.expert
        )
        yield str(sizes), replace(free, sizes=fixed)


def samples_per_second(planned: Planned) -> float:
    """Return the predicted rate of all devices."""
    per_device = planned.prediction.samples_per_second_per_gpu
    assert per_device is not None
    return per_device * planned.result.plan.parallel.world_size


def plan_job(job: Job, free: Free | None = None, samples_per_step: int | None = None) -> Planned:
    """Return the best plan of a job, by default of all choices."""
    description = training_job(job.model, job.cluster, trainer=job.trainer)
    free = free or Free.everything(job.gpus)
    if not description.model.encoders:  # then placements are the same
        free = replace(free, placements=(PIPELINE,))
    data = Samples(lengths=job.lengths(), samples_per_step=samples_per_step)
    return plan(Goal(job=description, data=data, free=free))


def job_row(job: Job) -> tuple[str, ...]:
    """Return the cells of a job planned with only the required options."""
    start = time.perf_counter()
    best = plan_job(job)
    seconds, parallel = time.perf_counter() - start, best.result.plan.parallel
    assert best.strategies is not None
    peak_gib = max(stage.memory.peak_gib for stage in best.prediction.stages)
    step, rate = str(best.strategies.samples_per_step), samples_per_second(best)
    return (
        job.name, job.trainer or "own", step, f"{parallel}, {parallel.sharding}",
        f"{peak_gib:.0f}", f"{rate:,.2f}", job.recipe, f"{seconds:.0f} s",
    )  # fmt: skip


def compare_restricted(job: Job) -> Iterator[tuple[str, str, str, str]]:
    """Yield rows: restriction, samples per second, slowdown, plan."""
    best, free = plan_job(job), Free.everything(job.gpus)
    assert best.strategies is not None
    best_rate = samples_per_second(best)
    yield f"{job.name}: free", f"{best_rate:,.2f}", "", describe_plan(best)
    for name, restricted in restrict_search(free, best):
        try:
            planned = plan_job(job, restricted, best.strategies.samples_per_step)
        except UserError as error:
            yield f"  {name}", "-", "-", str(error)[:60]
        else:
            rate = samples_per_second(planned)
            slowdown = f"{best_rate / rate - 1:+.1%}"
            yield f"  {name}", f"{rate:,.2f}", slowdown, describe_plan(planned)


def describe_plan(planned: Planned) -> str:
    """Return sizes, encoder placement and levels (tokens / context size) of a plan."""
    plan = planned.result.plan
    assert plan.data is not None
    levels = " ".join(f"{level.caps['tokens']}/{level.context}" for level in plan.levels)
    return f"{plan.parallel}; {planned.placement.chosen.value}; {levels or plan.data.caps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=len(JOBS), help="number of jobs")
    parser.add_argument("--only", help="name of a job")
    parser.add_argument("--forced", action="store_true", help="compare with restricted searches")
    given = parser.parse_args()
    jobs = [job for job in JOBS if given.only in (None, job.name)][: given.jobs]
    for job in jobs:
        if not given.forced:
            print(f"| {' | '.join(job_row(job))} |", flush=True)
            continue
        for cells in compare_restricted(job):
            print("{:<38} {:>12} {:>8}  {}".format(*cells), flush=True)


if __name__ == "__main__":
    main()
