"""An equal part of the machine's cores for each process of a benchmark.

Processes on fewer cores do not wait as devices do: who waits leaves its core to the others. Where
Linux control groups (version 1) can be made, each process gets one with a quota of processor time,
so that it is as fast whatever the others do: a device of its own.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PERIOD_US = 4_000
_GROUPS = Path("/sys/fs/cgroup/cpu")


@contextmanager
def own_cores(rank: int, processes: int) -> Iterator[bool]:
    """Give this process its part of the cores; yields whether the system lets it.

    Args:
        rank: of the process among `processes`, which one parent has started; those of one rank
            have one part.
    """
    group = _GROUPS / f"omnibal_benchmark_{os.getppid()}_{rank}"
    quota_us = PERIOD_US * len(os.sched_getaffinity(0)) // processes
    try:
        group.mkdir(exist_ok=True)  # by another process of the rank
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        (_GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        with suppress(OSError):  # the rank's other process is in it, or has removed it
            group.rmdir()


def own_cores_in_words(processes: int, *, are_devices: bool) -> str:
    """Say how many cores each process had, or that they were shared."""
    cores = len(os.sched_getaffinity(0)) / processes
    return f"{cores:g} core each" if are_devices else "no control group: cores are shared"
