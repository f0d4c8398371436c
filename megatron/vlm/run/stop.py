"""Stop requests by the scheduler, by a launcher, or at the terminal."""

import signal
from types import FrameType
from typing import Any, Self


class StopSignal:
    """Set `requested` on SIGTERM and SIGINT (Ctrl-C), for the training loop.

    Repeated SIGTERMs, as schedulers and launchers send, never interrupt a save or cleanup. A second
    SIGINT ends the process, at once unless it blocks in a library.
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
            # Not a Python handler: it would run only between two Python instructions.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
