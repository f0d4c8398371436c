"""Stop requests by the scheduler, by a launcher, or at the terminal."""

import signal
from types import FrameType
from typing import Any, Self

from megatron.vlm.inputs.read_ahead import STOP_SIGNALS


class StopSignal:
    """Set `requested` on a signal to stop, for the training loop.

    Repeated signals, as schedulers and launchers send, never interrupt a save or cleanup, but a
    second SIGINT (Ctrl-C) ends the process, at once unless it blocks in a library. Under nohup
    SIGHUP stays ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
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
