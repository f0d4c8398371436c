"""Ranks that fail, die, hang or end: exit of all ranks and logs of each node."""

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
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.vlm.inputs.read_ahead import STOP_SIGNALS
from megatron.vlm.run.launch import RankLaunch, open_store
from megatron.vlm.run.stop import StopSignal
from megatron.vlm.run.watch import Pace, ending_together
from omnibal.base.errors import UserError

PACE = Pace(period_s=0.1, stale_s=2.0)
WORLD = 3
LIMIT_S = 300
SLOW_S = 3600
"""Waiting time of ranks, which only the watch can cut short."""
Connect = Callable[[int], dist.Store]


@dataclass(frozen=True)
class Ended:
    """Exit code (negative: a signal) and output of a rank's process."""

    code: int
    output: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


def store_of_launcher() -> Connect:
    """Return a connector as under torchrun: the server outlives the ranks."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def connect(rank: int) -> dist.Store:
        return dist.TCPStore(server.host, server.port, WORLD, is_master=False)

    return connect


def store_of_rank_0() -> Connect:
    """Return a connector as under srun: the store ends with rank 0."""
    listener = socket.create_server(("localhost", 0))

    def connect(rank: int) -> dist.Store:
        port = listener.getsockname()[1]
        if rank == 0:
            own = {"is_master": True, "master_listen_fd": listener.detach()}
            return dist.TCPStore("localhost", port, WORLD, **own)
        listener.close()
        return dist.TCPStore("localhost", port, WORLD, is_master=False)

    return connect


def end_ranks(
    folder: Path,
    work: Callable[[int], None],
    connect: Connect | None = None,
    same_node: bool = False,
    pace: Pace = PACE,
    codes: Sequence[int] = (1, 1, 1),
) -> list[Ended]:
    """Run `work(rank)` under watch in forked processes joined by gloo; assert exit codes within the
    limit. Each rank has an own node and log unless `same_node`."""
    connect = connect or store_of_launcher()
    started, processes = time.monotonic(), {}
    # No rank may use the store's server until all are forked: they would inherit locks held by its
    # threads.
    gate, opener = os.pipe()
    for rank in range(WORLD):
        process = os.fork()
        if process == 0:
            os.close(opener)
            os.read(gate, 1)  # closed once all are forked
            launch = RankLaunch(rank=rank, world_size=WORLD, local_rank=rank if same_node else 0)
            _rank(folder / f"{rank}.log", work, launch, connect, pace)
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
    logs = [(folder / f"{rank}.log").read_text() for rank in range(WORLD)]
    assert len(ended) == WORLD, ("did not end", [processes[p] for p in ended], logs)
    ranks = [Ended(ended[process], logs[rank]) for process, rank in processes.items()]
    assert [rank.code for rank in ranks] == [*codes], logs
    return ranks


def _rank(
    path: Path, work: Callable[[int], None], launch: RankLaunch, connect: Connect, pace: Pace
) -> None:
    log = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    try:
        store = connect(launch.rank)
        with ending_together(launch, store, pace):
            dist.init_process_group(
                "gloo", store=dist.PrefixStore("groups", store), rank=launch.rank,
                world_size=WORLD, timeout=timedelta(seconds=SLOW_S),
            )  # fmt: skip
            work(launch.rank)
        print("left", threading.active_count(), flush=True)
        os._exit(0)
    except BaseException as error:
        print("ESCAPED", repr(error), flush=True)
        os._exit(99)


def wait_in_collective() -> None:
    dist.all_reduce(torch.zeros(4))


def sleep(seconds: float = SLOW_S) -> None:
    time.sleep(seconds)


def fail(error: Exception, after_s: float = 0.0) -> None:
    time.sleep(after_s)
    raise error


def send_itself(number: int) -> None:
    os.kill(os.getpid(), number)


def freeze(wake: int, after_s: float) -> None:
    """Stop this process until a child without its connections sends it a signal."""
    if os.fork() == 0:
        os.closerange(0, 1000)
        time.sleep(after_s)
        os.kill(os.getppid(), wake)
        os._exit(0)
    send_itself(signal.SIGSTOP)


kill = partial(send_itself, signal.SIGKILL)
DEAD = -signal.SIGKILL


@dataclass(frozen=True)
class Failure:
    """Action of the failing ranks, action of all ranks after it, and the expected error."""

    ranks: tuple[int, ...]
    failing: Callable[[], None]
    said: str
    then: Callable[[], None] = sleep
    codes: tuple[int, ...] = (1, 1, 1)
    store: Callable[[], Connect] = store_of_launcher


LOST = "has lost the store of all ranks ("
FAILURES = {
    "an error": Failure(
        (1,), partial(fail, KeyError("no such tensor")),
        "rank 1 failed: KeyError: 'no such tensor'", then=wait_in_collective,
    ),
    "after others have ended": Failure(
        (2,), partial(fail, KeyError("late"), 0.5), "rank 2 failed: KeyError: 'late'",
        then=lambda: None,
    ),
    "of the rank with the store": Failure(
        (0,), partial(fail, KeyError("in rank 0")), "rank 0 failed: KeyError: 'in rank 0'",
        store=store_of_rank_0,
    ),
    "killed, others in a collective": Failure(
        (2,), kill, "rank 2 has not been heard of for 2 s", wait_in_collective, (1, 1, DEAD),
    ),
    "killed, others in a sleep": Failure(
        (2,), kill, "rank 2 has not been heard of for 2 s", codes=(1, 1, DEAD),
    ),
    # A node that went down, rather than one killed process.
    "a node": Failure(
        (1, 2), kill, "ranks 1 to 2 have not been heard of", codes=(1, DEAD, DEAD),
    ),
    # It must not continue when its node comes back.
    "frozen, and wakes": Failure(
        (1,), partial(freeze, signal.SIGCONT, 1.5 * PACE.stale_s), "rank 1 has not been heard of",
    ),
    "killed with the store": Failure(
        (0,), kill, f"{LOST}DistNetworkError", codes=(DEAD, 1, 1), store=store_of_rank_0,
    ),
    # As after a power failure, when there is never a reply.
    "frozen with the store": Failure(
        (0,), partial(freeze, signal.SIGKILL, PACE.patience_s + 1), f"{LOST}no answer for",
        codes=(DEAD, 1, 1), store=store_of_rank_0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES.values(), ids=FAILURES)
def test_failure_ends_all_and_is_told_by_every_node(tmp_path, case):
    """Prevents ranks that wait for a failed rank, and logs without its error."""

    def work(rank: int) -> None:
        if rank in case.ranks:
            case.failing()
        case.then()

    ranks = end_ranks(tmp_path, work, case.store(), codes=case.codes)
    for rank, ended in enumerate(ranks):
        if ended.code == 1:
            assert len(ended.errors) == 1 and case.said in ended.errors[0], ended.output
            raised = rank in case.ranks and " failed: " in case.said
            assert ("Traceback" in ended.output) == raised, ended.output


def test_user_error_is_told_once_a_node(tmp_path):
    """Prevents a user error printed by every rank or reported as a defect."""

    def work(rank: int) -> None:
        if rank != 0:
            raise UserError("no image; give one")
        wait_in_collective()

    ranks = end_ranks(tmp_path, work, same_node=True, codes=(2, 2, 2))
    assert [line for rank in ranks for line in rank.errors] == ["error: no image; give one"]
    assert not any("Traceback" in rank.output for rank in ranks)


@pytest.mark.parametrize("store", [store_of_launcher, store_of_rank_0])
def test_ranks_may_end_at_different_times(tmp_path, store):
    """Prevents treating ranks as dead because one rank evaluates longer."""
    ended = end_ranks(
        tmp_path, lambda rank: sleep(0.65 * PACE.stale_s * rank), store(), codes=(0, 0, 0)
    )
    # Only the main thread is left.
    assert [rank.output for rank in ended] == ["left 1\n"] * 3


@pytest.mark.parametrize("late_s", [0.8, 4.0], ids=["within the wait", "after the store"])
def test_rank_that_learns_late_of_the_end_succeeds(tmp_path, late_s):
    """Prevents reporting a lost store after success, if rank 0 closes the store too early."""

    def keep_lock() -> None:
        time.sleep(0.3)
        ctypes.PyDLL(None).usleep(int(late_s * 1e6))

    def work(rank: int) -> None:
        if rank == 1:
            threading.Thread(target=keep_lock).start()
        if rank == 2:
            time.sleep(0.5)

    pace = Pace(period_s=1.5, stale_s=20)
    ranks = end_ranks(tmp_path, work, store_of_rank_0(), pace=pace, codes=(0, 0, 0))
    if late_s < pace.linger_s:
        assert not any("DistNetworkError" in rank.output for rank in ranks)


@pytest.mark.parametrize(
    ("library", "stale_share"),
    [(ctypes.PyDLL, 0.4), (ctypes.CDLL, 1.2)],
    ids=["with lock", "without lock"],
)
def test_busy_rank_is_not_taken_for_dead(tmp_path, library, stale_share):
    """Prevents ending a healthy run during a long C call, with or without the GIL."""

    def work(rank: int) -> None:
        if rank == 1:
            library(None).usleep(int(stale_share * PACE.stale_s * 1e6))
        wait_in_collective()

    end_ranks(tmp_path, work, codes=(0, 0, 0))


def test_lost_connection_waits_for_its_reason(tmp_path):
    """Prevents 'Connection reset by peer' in every log and the reason in none.

    Rank 1 closes its connections, so that rank 0 fails at once, and reports later.
    """

    def work(rank: int) -> None:
        # Ranks finish joining independently. If a connection closes before, gloo prints a line that
        # this test would take for the watch's.
        wait_in_collective()
        if rank == 1:
            dist.destroy_process_group()
            fail(ValueError("the reason"), after_s=0.5)
        wait_in_collective()

    ranks = end_ranks(tmp_path, work)
    assert all("rank 1 failed: ValueError: the reason" in rank.errors[0] for rank in ranks)
    assert not any("gloo" in rank.output for rank in ranks)


def test_lost_connection_without_a_reason_is_reported(tmp_path):
    """Prevents waiting forever for a reason if only the network failed."""

    def work(rank: int) -> None:
        if rank == 1:
            dist.destroy_process_group()
            sleep()
        wait_in_collective()

    ranks = end_ranks(tmp_path, work, same_node=True)
    [line] = [line for rank in ranks for line in rank.errors]
    assert "gloo/transport" in line
    assert not any("Traceback" in rank.output for rank in ranks)


def test_handlers_are_restored():
    """Prevents a process that ignores signals after training."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignal() as stop:
        assert not stop.requested
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.parametrize(
    ("during", "after", "code"),
    [
        ([signal.SIGTERM, signal.SIGTERM], [signal.SIGTERM], 0),
        ([signal.SIGUSR1], [signal.SIGUSR1], 0),  # sbatch --signal, submitit
        ([signal.SIGHUP], [signal.SIGHUP, signal.SIGTERM], 0),  # a closed terminal
        ([signal.SIGINT], [signal.SIGINT], 0),
        ([signal.SIGINT, signal.SIGINT], [], -signal.SIGINT),  # at once
    ],
    ids=["terminated", "warned", "hung-up", "interrupted", "interrupted-twice"],
)
def test_stop_signal_is_remembered_to_the_end(during, after, code):
    """Prevents a save cut off by a second SIGTERM, an orderly stop failed by a late signal during
    interpreter exit, and a run that survives its closed terminal."""
    process = os.fork()
    if process == 0:
        with StopSignal() as stop:
            for number in during:
                send_itself(number)
        for number in after:
            send_itself(number)
        os._exit(0 if stop.requested else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == code


def test_nohup_keeps_a_run_from_ending_with_its_terminal():
    """Prevents a run under nohup from ending with its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            send_itself(signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ranks_that_cannot_meet_are_told_so(monkeypatch):
    """Prevents a traceback or endless waiting if launcher variables are missing."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match=r"rank 1 did not meet all 2 ranks .*MASTER_ADDR expected"):
        open_store(RankLaunch(rank=1, world_size=2, local_rank=1))
