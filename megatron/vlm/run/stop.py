"""Stop requests by the scheduler, by a launcher, or at the terminal."""

import signal
from types import FrameType
from typing import Any, Self


class StopSignal:
    """Context in which SIGTERM and SIGINT (Ctrl-C) only set `requested`, for the training loop.

    Schedulers and launchers send SIGTERM more than once: no number of them interrupts a save, nor
    what the process still has to do afterwards. A second SIGINT ends the process, at once unless it
    waits for other ranks inside a library.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self.requested else handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            # No handler written in Python, as these run only between two Python instructions.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
