"""Windows of a stream on data-parallel ranks: as read, packed whole and dealt, and balanced.

    python benchmarks/windows.py

20,000 made-up samples of InternVL2-8B, counted for H100s: predicted time of the busiest rank's
pipeline, of equal stages, summed over all windows, relative to the balanced one; not simulated.
"""

import sys
import time

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import StreamData
from omnibal.model.config import load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.steps.steps import Steps, deal_steps

CAPS = Caps.of(tiles=12, tokens=4096)
SAMPLES = 20_000
SETTINGS = ((1, 8, 64), (1, 8, 256), (4, 8, 256), (8, 8, 512), (1, 32, 1024), (4, 32, 2048))
"""Pipeline stages, data-parallel ranks, samples of a window."""


def made_up_lengths() -> Lengths:
    """Most samples have an image or none, one in twenty up to twelve tiles; texts are lognormal."""
    rng = np.random.default_rng(0)
    pages = (rng.random(SAMPLES) < 0.05) * rng.integers(0, 12, SAMPLES)
    tiles = np.minimum(rng.geometric(0.4, SAMPLES) - 1 + pages, CAPS["tiles"]).astype(np.int32)
    text = np.exp(rng.normal(5, 1, SAMPLES))
    tokens = np.minimum(tiles * 256 + text, CAPS["tokens"]).astype(np.int32)
    return Lengths(
        items={"tiles": tiles}, tokens=tokens, loss_tokens=tokens // 2,
        source=np.zeros(SAMPLES, np.int32), source_names=("made up",), origin=None,
    )  # fmt: skip


def packed_whole(lengths: Lengths, job: JobSpec, window: int) -> ScheduledPacks:
    """Every window packed into few packs, which are dealt as shuffled steps are."""
    parts, step = [], []
    for number, first in enumerate(range(0, len(lengths), window)):
        members = np.arange(first, min(first + window, len(lengths)))
        packs = pack_samples(lengths.take(members), CAPS, PackingMethod.BALANCED, 0, thorough=False)
        parts.append(Packs(samples=members[packs.samples], offsets=packs.offsets))
        step.append(np.full(len(packs), number))
    joined = Packs.join(parts)
    steps = Steps.of(joined, np.concatenate(step), np.zeros(len(joined), np.int32))
    levels = [Level(caps=CAPS)]
    return deal_steps(steps, lengths, lambda p: job.load_ms(p, lengths), job.parallel.data, levels)


def as_planned(
    lengths: Lengths, job: JobSpec, window: int, *, is_dispatched: bool
) -> ScheduledPacks:
    """Windows as `omnibal plan --window` has them."""
    stream = StreamData(
        lengths=lengths, caps=CAPS, window=window, is_dispatched=is_dispatched, epochs=1
    )
    return stream.schedule(job)[0]


def busiest_ms(packs: ScheduledPacks, lengths: Lengths, job: JobSpec) -> float:
    """The busiest rank's packs, and its longest once more for each other stage; of all steps."""
    ranks, stages = job.parallel.data, job.parallel.pipeline
    load_ms = job.load_ms(packs.packs, lengths)
    place = packs.step * ranks + packs.dp_rank
    sums = np.bincount(place, load_ms, packs.steps * ranks)
    longest = np.zeros(packs.steps * ranks)
    np.maximum.at(longest, place, load_ms)
    times = (sums + (stages - 1) * longest) / stages
    return float(times.reshape(-1, ranks).max(axis=1).sum())


def main() -> int:
    lengths = made_up_lengths()
    print("stages ranks window   as read  whole  balanced   seconds: whole  balanced")
    for stages, ranks, window in SETTINGS:
        job = JobSpec(
            model=load_model("internvl2-8b"), cluster=load_cluster("h100-80g"),
            parallel=Parallel(pipeline=stages, data=ranks), precision="bf16",
        )  # fmt: skip
        found_ms, seconds = [], []
        for way in ("as read", "whole", "balanced"):
            start = time.process_time()
            if way == "whole":
                packs = packed_whole(lengths, job, window)
            else:
                packs = as_planned(lengths, job, window, is_dispatched=way == "balanced")
            seconds.append(time.process_time() - start)
            found_ms.append(busiest_ms(packs, lengths, job))
        as_read, whole, balanced = (one / found_ms[-1] for one in found_ms)
        print(
            f"{stages:6} {ranks:5} {window:6} {as_read:9.3f} {whole:6.3f} {balanced:9.3f}"
            f" {seconds[1]:16.1f} {seconds[2]:9.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
