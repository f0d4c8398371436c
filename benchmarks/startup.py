"""Time and memory that a rank's process groups take as ranks become many, without the other ranks.

    python benchmarks/startup.py [--ranks 8 64 512]

Each number of ranks is tried in a process of its own, on torch's fake process group, which connects
nobody: what is measured is what rank 0 does by itself, all groups of Megatron-core and of this
project in their order. Groups on the host (gloo), which a run makes too, and what NCCL takes to
connect, only a cluster can tell.
"""

import argparse
import resource
import subprocess
import sys
import time

from omnibal.model.parallel import Parallel

_MIB = 1 << 10
"""Units of `ru_maxrss`, which is in KiB, in a MiB."""


def sizes_of(ranks: int) -> Parallel:
    """Parallel sizes of so many ranks, a power of two: up to 8 of a kind, data-parallel last."""
    tensor = min(ranks, 8)
    pipeline = min(ranks // tensor, 8)
    data = ranks // tensor // pipeline
    return Parallel(tensor=tensor, pipeline=pipeline, data=data, sequence_parallel=tensor > 1)


def measure(ranks: int) -> None:
    """Print what starting as rank 0 of so many takes beyond the imports."""
    from torch.distributed import distributed_c10d

    from megatron.vlm.measure.replay import standing_in
    from megatron.vlm.model.groups import create_context_groups

    parallel = sizes_of(ranks)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    with standing_in(parallel, 0):
        contexts = [size for size in (2, 4, 8) if parallel.data % size == 0]
        create_context_groups(parallel, contexts)
        seconds = time.perf_counter() - start
        groups = len(distributed_c10d._world.pg_map)
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"{ranks:>6,}  {parallel!s:<42}  {groups:>6,}  {seconds:>8.2f}  {more / _MIB:>8.1f}",
        flush=True,
    )


def main() -> None:
    """Measure every number of ranks in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--alone", action="store_true", help="measure in this process")
    arguments = parser.parse_args()
    if arguments.alone:
        measure(*arguments.ranks)
        return
    print(
        f"{'ranks':>6}  {'sizes':<42}  {'groups':>6}  {'seconds':>8}  {'more MiB':>8}", flush=True
    )
    for ranks in arguments.ranks:
        command = [sys.executable, "-W", "ignore", __file__, "--alone", "--ranks", str(ranks)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
