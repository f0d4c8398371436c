"""Stop requests of a scheduler, a launcher or a terminal."""

import signal
from types import FrameType
from typing import Any, Self

from megatron.vlm.inputs.read_ahead import STOP_SIGNALS


class StopSignal:
    """Context in which a signal to stop sets `requested`.

    Schedulers and launchers repeat signals: these never interrupt a save or cleanup. A second
    SIGINT (Ctrl-C) ends the process inside the context. Under nohup SIGHUP stays ignored.
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
            # The default handler, as Python's would wait for a blocking library call to return.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
