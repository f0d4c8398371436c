"""Watch over all ranks: if one fails, all end within a minute, with the reason in every node's log.

NCCL's watchdog aborts at the process group's timeout or at a broken network connection, but misses
a dead peer behind NVLink or shared memory; gloo may wait for the timeout too. Launchers end only
their own node's ranks, and every survivor prints a traceback.

Here a thread per rank increments its heartbeat in the rendezvous store, reads the next rank's, and
reads the record of the first failure: three small requests per period. If living ranks wait for
each other in a collective, the process group's timeout ends them.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch.distributed as dist

from megatron.vlm.run.launch import RankLaunch
from omnibal.base.errors import EXIT_USER_ERROR, UserError
from omnibal.base.printable import printable

_EXIT_FAILURE = 1
_EXIT_INTERRUPTED = 130
_LAST_PERIOD_S = 0.2  # maximum time between polls while ranks end


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Intervals that determine how soon a failure is detected.

    Detection must take less than 30 s: then torchrun kills a failed rank's node, with its store.
    """

    period_s: float = 2.0  # seconds between two polls of the store
    stale_s: float = 20.0  # without a heartbeat until a rank is dead: more than the GIL blocks

    @property
    def scan_s(self) -> float:
        """Return the seconds between two scans of all ranks; every living rank beats in between."""
        return 1.5 * self.period_s

    @property
    def linger_s(self) -> float:
        """Return the seconds to keep the store alive at the end, for ranks that still read it."""
        return 2 * self.period_s

    @property
    def patience_s(self) -> float:
        """Return the seconds to wait for a failure's record or the store; detection takes less."""
        return 1.5 * self.stale_s + self.scan_s


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure. The first that is recorded in the store ends all ranks."""

    reporter: int  # rank that records it
    node: int  # the reporter's
    message: str
    exit_code: int
    readers: int  # number of living ranks, which read the record


def is_consequence(error: BaseException | None) -> bool:
    """Return whether torch.distributed or gloo raised the error, as when another rank ends."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and "gloo/transport/" in str(error):
            return True
        error = error.__cause__
    return False


@contextlib.contextmanager
def ending_together(
    launch: RankLaunch, store: dist.Store, pace: Pace | None = None
) -> Iterator[None]:
    """Run the body and wait until all ranks have run it, or end every process if a rank fails.

    The exit code is 2 for a UserError, 130 for Ctrl-C, else 1. The failing rank prints its error,
    every other node one line about it.
    """
    watch = Watch(store, launch, pace or Pace()) if launch.world_size > 1 else None
    try:
        yield
    except BaseException as error:
        if watch is not None:
            watch.fail(error)
        _print_error(error, launch.rank)
        _end_process(_exit_code_of(error))
    if watch is not None:
        watch.stop()


class Watch:
    """Threads that watch the other ranks, until `stop` or the end of the process."""

    def __init__(self, store: dist.Store, launch: RankLaunch, pace: Pace) -> None:
        self._launch, self._pace = launch, pace
        self._neighbour = (launch.rank + 1) % launch.world_size
        self._exchanges = 0
        self._finishing = threading.Event()
        self._over = threading.Event()
        # Never released: the thread that has it ends the process.
        self._ending = threading.Lock()
        # Daemons, which cannot keep the interpreter alive.
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._watch, "watch"), (self._guard, "watch guard"))
        ]
        watch, guard = self._threads
        guard.start()  # first, as the new connection may hang
        # A connection of its own: a request on the shared one may block for minutes.
        try:
            self._store = dist.PrefixStore("watch", store.clone())
        except RuntimeError as error:
            self._end_without_store(_summarize(error))
        watch.start()

    def stop(self) -> None:
        """Wait until all ranks have called it, then end the threads."""
        # A barrier, as the store may end with the first rank that leaves.
        self._finishing.set()
        for thread in self._threads:
            thread.join()

    def fail(self, error: BaseException) -> NoReturn:
        """End all ranks for this rank's error, or for the recorded failure that caused it."""
        if is_consequence(error):
            time.sleep(self._pace.patience_s)  # the watch ends this process if it finds the reason
        self._ending.acquire()
        message = f"rank {self._launch.rank} failed: {_summarize(error)}"
        self._end_all(message, _exit_code_of(error), self._launch.world_size, error)

    def _end_all(
        self, message: str, exit_code: int, readers: int, error: BaseException | None = None
    ) -> NoReturn:
        """End all ranks for a failure, this rank's `error` if given, or for one recorded before."""
        launch = self._launch
        first = own = _Failure(launch.rank, launch.node, message, exit_code, readers)
        text = json.dumps(asdict(own), sort_keys=True)
        with contextlib.suppress(RuntimeError):  # the store is gone
            first = _Failure(**json.loads(self._store.compare_set("failure", "", text)))
        if first == own and error is not None:
            _print_error(error, launch.rank)
        elif first == own:
            self._print_failure(own)
        self._leave_because_of(first)

    def _watch(self) -> None:
        """Poll the store, in a thread, until all ranks have finished."""
        silence = _Silence()
        pause_s = self._pace.period_s
        try:
            while not self._exchange(silence, pause_s):
                self._exchanges += 1
                if self._finishing.is_set():
                    pause_s = min(_LAST_PERIOD_S, self._pace.period_s)
                    time.sleep(pause_s)
                else:
                    self._finishing.wait(pause_s)
        except RuntimeError as error:
            # If this rank has finished, the store may have ended with the last other rank.
            if not self._finishing.is_set():
                self._end_without_store(_summarize(error))
        self._over.set()

    def _exchange(self, silence: "_Silence", pause_s: float) -> bool:
        """Poll the store once, `pause_s` after the last poll; return whether all have finished."""
        self._store.add(f"beat/{self._launch.rank}", 1)
        if self._store.check(["failure"]):
            self._ending.acquire()
            self._leave_because_of(_Failure(**json.loads(self._store.get("failure"))))
        if self._finishing.is_set():
            own = self._store.add(f"finished/{self._launch.rank}", 1)
            # Count this rank once; later polls add 0, to read the count.
            if self._store.add("finished", 1 if own == 1 else 0) == self._launch.world_size:
                # Rank 0 may host the store, so it leaves last.
                if self._launch.rank != 0:
                    self._store.add("parted", 1)
                else:
                    self._linger("parted", self._launch.world_size - 1)
                return True
        beat = self._store.add(f"beat/{self._neighbour}", 0)
        if silence.after(beat, pause_s) >= self._pace.stale_s:
            self._report_silent_ranks()
        return False

    def _linger(self, key: str, count: int) -> None:
        """Wait until the counter `key` reaches `count`, at most `linger_s`."""
        deadline = time.monotonic() + self._pace.linger_s
        while self._store.add(key, 0) < count and time.monotonic() < deadline:
            time.sleep(min(_LAST_PERIOD_S, self._pace.period_s))

    def _report_silent_ranks(self) -> None:
        """End all ranks if any but this is silent, with a failure that names all silent ranks."""
        # Scan all: a node dies with all its ranks, and NCCL may kill a dead rank's peers.
        before = self._read_beats()
        time.sleep(self._pace.scan_s)
        silent = [
            rank
            for rank, (old, new) in enumerate(zip(before, self._read_beats(), strict=True))
            if old == new and rank != self._launch.rank
        ]
        if not silent:
            return
        self._ending.acquire()
        ranks = f"rank {silent[0]} has"
        if len(silent) > 1:
            are_all = silent == list(range(silent[0], silent[-1] + 1))
            named = f"{silent[0]} to {silent[-1]}" if are_all else ", ".join(map(str, silent))
            ranks = f"ranks {named} have"
        message = (
            f"{ranks} not been heard of for {self._pace.stale_s:g} s (killed, out of memory, "
            "or the node is gone)"
        )
        self._end_all(message, _EXIT_FAILURE, self._launch.world_size - len(silent))

    def _read_beats(self) -> list[int]:
        return [self._store.add(f"beat/{rank}", 0) for rank in range(self._launch.world_size)]

    def _leave_because_of(self, failure: _Failure) -> NoReturn:
        """Print the failure once per node, and end the process."""
        with contextlib.suppress(RuntimeError):  # the store may end at any time from here on
            self._store.add("read", 1)
            if (
                failure.node != self._launch.node
                and self._store.add(f"told/{self._launch.node}", 1) == 1
            ):
                self._print_failure(failure)
            # The first node has the store, in rank 0 or in a launcher that ends with its ranks.
            if self._launch.node == 0:
                self._linger("read", failure.readers)
        _end_process(failure.exit_code)

    def _print_failure(self, failure: _Failure) -> None:
        _print_line(f"error: {failure.message}; rank {self._launch.rank} stops, as all others do")

    def _guard(self) -> None:
        """End the process if the store does not answer for `patience_s`; runs in a thread."""
        silence = _Silence()
        while not self._over.wait(self._pace.period_s):
            if silence.after(self._exchanges, self._pace.period_s) >= self._pace.patience_s:
                self._end_without_store(f"no answer for {self._pace.patience_s:g} s")

    def _end_without_store(self, reason: str) -> NoReturn:
        # Without the lock: the thread that has it may be waiting for the store. Two ranks per node
        # print, as one may be dead.
        if self._launch.local_rank <= 1:
            _print_line(
                f"error: rank {self._launch.rank} has lost the store of all ranks ({reason}): rank "
                "0 or its launcher was killed, or its node is gone; all ranks stop"
            )
        _end_process(_EXIT_FAILURE)


class _Silence:
    """Seconds since a counter last changed, as a sum of pauses between polls.

    By a clock, a process that was suspended would find all others silent when it wakes.
    """

    def __init__(self) -> None:
        self._value: int | None = None
        self._silent_s = 0.0

    def after(self, value: int, pause_s: float) -> float:
        """Return the seconds of silence, given the counter's value and the pause before it."""
        self._silent_s = self._silent_s + pause_s if value == self._value else 0.0
        self._value = value
        return self._silent_s


def _summarize(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _exit_code_of(error: BaseException) -> int:
    if isinstance(error, UserError):
        return EXIT_USER_ERROR
    return _EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else _EXIT_FAILURE


def _print_error(error: BaseException, rank: int) -> None:
    if isinstance(error, UserError):
        _print_line(f"error: {error}")
        return
    if not (is_consequence(error) or isinstance(error, KeyboardInterrupt)):
        traceback.print_exception(error)
    _print_line(f"error: rank {rank} failed: {_summarize(error)}")


def _print_line(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _end_process(exit_code: int) -> NoReturn:
    # No sys.exit: interpreter shutdown would wait for transfers that never complete.
    os._exit(exit_code)
