"""Ranks that fail, die, hang or end: what the others do, and what each node's log says."""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.vlm.run.launch import Launch, open_store
from megatron.vlm.run.stop import StopSignal
from megatron.vlm.run.watch import Pace, ending_together
from omnibal.base.errors import UserError

PACE = Pace(period_s=0.1, stale_s=2.0)
WORLD = 3
LIMIT_S = 300
SLOW_S = 3600
"""Of the ranks that would wait, so that only the watch can have ended them in time."""


@dataclass(frozen=True)
class Ended:
    """One rank's process: exit code (negative of a signal) and output."""

    code: int
    output: str


def own_node(rank: int) -> Launch:
    """Each rank is the only one of its node, so that each has a log of its own."""
    return Launch(rank=rank, world_size=WORLD, local_rank=0)


def one_node(rank: int) -> Launch:
    return Launch(rank=rank, world_size=WORLD, local_rank=rank)


def store_of_launcher() -> Callable[[int], dist.Store]:
    """As under torchrun: a server that outlives the ranks."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def connect(rank: int) -> dist.Store:
        return dist.TCPStore(server.host, server.port, WORLD, is_master=False)

    return connect


def store_of_rank_0() -> Callable[[int], dist.Store]:
    """As under srun: the store ends with rank 0."""
    listener = socket.create_server(("localhost", 0))

    def connect(rank: int) -> dist.Store:
        port = listener.getsockname()[1]
        if rank == 0:
            descriptor = listener.detach()
            return dist.TCPStore(
                "localhost", port, WORLD, is_master=True, master_listen_fd=descriptor
            )
        listener.close()
        return dist.TCPStore("localhost", port, WORLD, is_master=False)

    return connect


def end_ranks(
    tmp_path: Path,
    work: Callable[[int], None],
    launch_of: Callable[[int], Launch] = own_node,
    connect: Callable[[int], dist.Store] | None = None,
    pace: Pace = PACE,
    codes: Sequence[int] | None = None,
) -> list[Ended]:
    """`work(rank)` under watch in forked processes joined by gloo, which end with these codes; none
    may outlive the limit."""
    connect = connect or store_of_launcher()
    started = time.monotonic()
    processes = {}
    # No rank may talk to the store's server while others are forked: they would inherit locks that
    # its threads hold at that moment.
    gate, opener = os.pipe()
    for rank in range(WORLD):
        process = os.fork()
        if process == 0:
            os.close(opener)
            os.read(gate, 1)  # its end, once all are forked
            _rank(tmp_path, work, launch_of(rank), connect, pace)
        processes[process] = rank
    os.close(opener)
    os.close(gate)
    ended = {}
    try:
        while len(ended) < WORLD and time.monotonic() < started + LIMIT_S:
            time.sleep(0.02)
            for process in set(processes) - set(ended):
                reaped, status = os.waitpid(process, os.WNOHANG)
                if reaped:
                    ended[process] = os.waitstatus_to_exitcode(status)
    finally:
        for process in set(processes) - set(ended):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(WORLD)]
    assert len(ended) == WORLD, ("did not end", [processes[p] for p in ended], logs)
    ranks = [Ended(ended[process], logs[rank]) for process, rank in processes.items()]
    assert codes is None or [rank.code for rank in ranks] == codes, logs
    return ranks


def _rank(
    tmp_path: Path,
    work: Callable[[int], None],
    launch: Launch,
    connect: Callable[[int], dist.Store],
    pace: Pace,
) -> None:
    log = os.open(tmp_path / f"{launch.rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    try:
        store = connect(launch.rank)
        with ending_together(launch, store, pace):
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("groups", store),
                rank=launch.rank,
                world_size=WORLD,
                timeout=timedelta(seconds=SLOW_S),
            )
            work(launch.rank)
        print("left", threading.active_count(), flush=True)
        os._exit(0)
    except BaseException as error:
        print("ESCAPED", repr(error), flush=True)
        os._exit(99)


def errors_of(ended: Ended) -> list[str]:
    return [line for line in ended.output.splitlines() if line.startswith("error: ")]


def wait_in_collective() -> None:
    dist.all_reduce(torch.zeros(4))


def test_error_of_one_rank_ends_all_with_it(tmp_path):
    """Prevents: ranks that wait for a failed one, and logs in which its error is not found."""

    def work(rank: int) -> None:
        if rank == 1:
            raise KeyError("no such tensor")
        wait_in_collective()

    ranks = end_ranks(tmp_path, work, codes=[1, 1, 1])
    for rank in ranks:
        assert len(errors_of(rank)) == 1, rank.output
        assert "rank 1 failed: KeyError: 'no such tensor'" in errors_of(rank)[0]
    assert ["Traceback" in rank.output for rank in ranks] == [False, True, False]


def test_user_error_is_told_once_a_node(tmp_path):
    """Prevents: the same mistake printed by every rank, or taken for a defect."""

    def work(rank: int) -> None:
        if rank != 0:
            raise UserError("no image; give one")
        wait_in_collective()

    ranks = end_ranks(tmp_path, work, one_node, codes=[2, 2, 2])
    lines = [line for rank in ranks for line in errors_of(rank)]
    assert lines == ["error: no image; give one"]
    assert not any("Traceback" in rank.output for rank in ranks)


@pytest.mark.parametrize(
    "wait", [wait_in_collective, lambda: time.sleep(SLOW_S)], ids=["in a collective", "in a sleep"]
)
def test_killed_rank_is_named_and_ends_all(tmp_path, wait):
    """Prevents: a run that hangs, with no word why, after the kernel killed a process."""

    def work(rank: int) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        wait()

    ranks = end_ranks(tmp_path, work, codes=[1, 1, -signal.SIGKILL])
    for rank in ranks[:2]:
        assert len(errors_of(rank)) == 1, rank.output
        assert "rank 2 has not been heard of for 2 s" in errors_of(rank)[0]
        assert "Traceback" not in rank.output


def test_all_dead_ranks_are_named(tmp_path):
    """Prevents: a node that went down looking like one process that was killed."""

    def work(rank: int) -> None:
        if rank != 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SLOW_S)

    ranks = end_ranks(tmp_path, work)
    assert "ranks 1 to 2 have not been heard of" in errors_of(ranks[0])[0]


def test_frozen_rank_ends_too_when_it_wakes(tmp_path):
    """Prevents: a rank given up by the others that goes on by itself when its node comes back."""

    def work(rank: int) -> None:
        if rank == 1 and os.fork() == 0:
            time.sleep(1.5 * PACE.stale_s)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(SLOW_S)

    ranks = end_ranks(tmp_path, work, codes=[1, 1, 1])
    assert all("rank 1 has not been heard of" in errors_of(rank)[0] for rank in ranks)


@pytest.mark.parametrize("store", [store_of_launcher, store_of_rank_0])
def test_ranks_may_end_at_different_times(tmp_path, store):
    """Prevents: the end of a long evaluation on one rank mistaken for the death of the others."""

    def work(rank: int) -> None:
        time.sleep(1.3 * PACE.stale_s * rank / (WORLD - 1))

    ranks = end_ranks(tmp_path, work, connect=store(), codes=[0, 0, 0])
    # The main thread is the one that is left.
    assert [rank.output for rank in ranks] == ["left 1\n"] * 3


@pytest.mark.parametrize("late_s", [0.8, 4.0], ids=["within the wait", "after the store"])
def test_rank_that_learns_late_of_the_end_succeeds(tmp_path, late_s):
    """Prevents: success told as a lost store, because rank 0 took the store with it too early."""

    def keep_lock() -> None:
        time.sleep(0.3)
        ctypes.PyDLL(None).usleep(int(late_s * 1e6))

    def work(rank: int) -> None:
        if rank == 1:
            threading.Thread(target=keep_lock).start()
        if rank == 2:
            time.sleep(0.5)

    pace = Pace(period_s=1.5, stale_s=20)
    ranks = end_ranks(tmp_path, work, connect=store_of_rank_0(), pace=pace, codes=[0, 0, 0])
    if late_s < pace.linger_s:
        assert not any("DistNetworkError" in rank.output for rank in ranks)


def test_failure_after_others_have_ended_is_theirs_too(tmp_path):
    """Prevents: a launcher that is told of success by most ranks of a failed run."""

    def work(rank: int) -> None:
        if rank == 2:
            time.sleep(0.5)
            raise KeyError("late")

    ranks = end_ranks(tmp_path, work, codes=[1, 1, 1])
    assert all("rank 2 failed: KeyError: 'late'" in errors_of(rank)[0] for rank in ranks)


@pytest.mark.parametrize("library", [ctypes.PyDLL, ctypes.CDLL], ids=["with lock", "without lock"])
def test_busy_rank_is_not_taken_for_dead(tmp_path, library):
    """Prevents: a healthy run ended by one long call into C, whether it keeps Python's lock."""
    busy_s = {ctypes.PyDLL: 0.4 * PACE.stale_s, ctypes.CDLL: 1.2 * PACE.stale_s}[library]

    def work(rank: int) -> None:
        if rank == 1:
            library(None).usleep(int(busy_s * 1e6))
        wait_in_collective()

    end_ranks(tmp_path, work, codes=[0, 0, 0])


def test_lost_connection_waits_for_its_reason(tmp_path):
    """Prevents: 'Connection reset by peer' in every log and the reason in none.

    Rank 1 closes its connections, by which rank 0 fails at once, and reports only later.
    """

    def work(rank: int) -> None:
        # Joining ends for each rank by itself. Gloo prints a line of its own for a rank that is
        # still joining when a connection is closed, which here would be mistaken for the watch's.
        wait_in_collective()
        if rank == 1:
            dist.destroy_process_group()
            time.sleep(0.5)
            raise ValueError("the reason")
        wait_in_collective()

    ranks = end_ranks(tmp_path, work, codes=[1, 1, 1])
    assert all("rank 1 failed: ValueError: the reason" in errors_of(rank)[0] for rank in ranks)
    assert not any("gloo" in rank.output for rank in ranks)


def test_lost_connection_without_a_reason_is_reported(tmp_path):
    """Prevents: a run that waits for ever for a reason when only the network failed."""

    def work(rank: int) -> None:
        if rank == 1:
            dist.destroy_process_group()
            time.sleep(SLOW_S)
        wait_in_collective()

    ranks = end_ranks(tmp_path, work, one_node, codes=[1, 1, 1])
    lines = [line for rank in ranks for line in errors_of(rank)]
    assert len(lines) == 1 and "gloo/transport" in lines[0]
    assert not any("Traceback" in rank.output for rank in ranks)


@pytest.mark.parametrize(
    ("signal_", "reason"),
    [(signal.SIGKILL, "DistNetworkError"), (signal.SIGSTOP, "no answer for")],
    ids=["killed", "frozen"],
)
def test_store_that_is_gone_ends_all(tmp_path, signal_, reason):
    """Prevents: a hang when the first node dies, or its power: then nothing is ever answered."""

    def work(rank: int) -> None:
        if rank == 0:
            if os.fork() == 0:  # ends the frozen one, without holding its connections
                os.closerange(0, 1000)
                time.sleep(PACE.patience_s + 1)
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            os.kill(os.getpid(), signal_)
        time.sleep(SLOW_S)

    ranks = end_ranks(tmp_path, work, connect=store_of_rank_0(), codes=[-signal.SIGKILL, 1, 1])
    for rank in ranks[1:]:
        assert len(errors_of(rank)) == 1, rank.output
        assert f"has lost the store of all ranks ({reason}" in errors_of(rank)[0]


def test_error_of_the_rank_with_the_store_reaches_all(tmp_path):
    """Prevents: a store that ends with the error of rank 0 before the others have read it."""

    def work(rank: int) -> None:
        if rank == 0:
            raise KeyError("in rank 0")
        time.sleep(SLOW_S)

    ranks = end_ranks(tmp_path, work, connect=store_of_rank_0())
    assert all("rank 0 failed: KeyError: 'in rank 0'" in errors_of(rank)[0] for rank in ranks)


def test_handlers_are_restored():
    """Prevents: a process that is deaf to signals after training."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with StopSignal() as stop:
        assert not stop.requested
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_is_remembered_to_the_end(number):
    """Prevents: a save that a second SIGTERM cuts off, or an orderly stop that a late one makes a
    failure: the interpreter takes seconds to end."""
    process = os.fork()
    if process == 0:
        with StopSignal() as stop:
            os.kill(os.getpid(), number)
            if number == signal.SIGTERM:
                os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        os._exit(0 if stop.requested else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_second_interrupt_ends_a_process_at_once():
    """Prevents: a terminal that does not get rid of a run."""
    process = os.fork()
    if process == 0:
        with StopSignal():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(SLOW_S)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGINT


def test_ranks_that_cannot_meet_are_told_so(monkeypatch):
    """Prevents: a traceback, or endless waiting, for variables that a launcher would have set."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match=r"rank 1 did not meet all 2 ranks .*MASTER_ADDR expected"):
        open_store(Launch(rank=1, world_size=2, local_rank=1))
