"""What dealing like packs to ranks that share out experts gains, by simulation.

    python benchmarks/expert_dealing.py lengths.parquet --model MODEL [--cluster h100-80g]

Packs of every step are dealt as to ranks that wait for each other at a step's end alone, and as to
ranks that run every slot in lockstep (`omnibal.steps.deal`). Both are simulated on the same
stages, with ranks in lockstep. Costs are counted for the cluster preset: nothing here was measured.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from omnibal.data.lengths import Lengths, read_lengths
from omnibal.job.job import JobSpec
from omnibal.model.config import load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.pipeline.lost_time import lost_time
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.simulate import simulate_run
from omnibal.steps.pack_settings import PackSettings
from omnibal.steps.steps import deal_steps, draw_steps

SIZES = ((1, 2, 8, 4), (1, 2, 8, 8), (2, 2, 8, 8), (1, 4, 16, 16), (1, 1, 32, 32))
"""Tensor, pipeline, data and expert sizes."""
MICRO_BATCHES = 8


def compared(job: JobSpec, lengths: Lengths, caps: Caps) -> tuple[float, float, float, float]:
    """Mean step and its wait for experts' ranks in ms, as dealt apart and as dealt in lockstep."""
    sizes = job.parallel
    levels = [Level(caps=caps)]
    steps = draw_steps(
        lengths,
        PackSettings(),
        levels,
        lambda packs: job.load_ms(packs, lengths),
        packs_per_step=sizes.data * MICRO_BATCHES,
        packs_per_row=sizes.data,
    )
    found, stages = [], None
    for in_step in (1, sizes.lockstep_ranks):
        scheduled = deal_steps(
            steps,
            lengths,
            lambda packs: job.load_ms(packs, lengths),
            sizes.data,
            levels,
            lockstep_ranks=in_step,
        )
        workload = job.workload(scheduled, lengths, levels)
        if stages is None:
            search = search_stages(
                job.cost, job.model, workload, sizes.pipeline, np.inf, prove=False
            )
            stages = search.stages
        step_ms = float(simulate_run(job.cost, stages, workload).step_ms.mean())
        found += [step_ms, lost_time(job.cost, [stages], workload, step_ms).expert_wait_ms]
    return found[0], found[1], found[2], found[3]


def main(
    lengths: list[Path],
    model: Annotated[str, typer.Option(help="with a mixture of experts")],
    cluster: str = "h100-80g",
    max_tiles: int = 24,
    max_tokens: int = 8192,
) -> None:
    """Print a line for every choice of parallel sizes."""
    samples, first = read_lengths(lengths), Parallel(pipeline=1)
    job = JobSpec(
        model=load_model(model), cluster=load_cluster(cluster), parallel=first, precision="bf16"
    )
    caps = Caps.of(tiles=max_tiles, tokens=max_tokens)
    print("TP  PP  DP  EP   step apart   waits   step in lockstep   waits    gain")
    for tensor, pipeline, data, expert in SIZES:
        parallel = Parallel(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            expert=expert,
            sequence_parallel=tensor > 1,
        )
        apart, waits, in_step, left = compared(replace(job, parallel=parallel), samples, caps)
        sizes = f"{tensor:>2}  {pipeline:>2}  {data:>2}  {expert:>2}"
        print(
            f"{sizes}   {apart:>7,.1f} ms  {waits:>6.1f}   {in_step:>9,.1f} ms  {left:>6.1f}  "
            f"{1 - in_step / apart:>6.2%}"
        )


if __name__ == "__main__":
    typer.run(main)
