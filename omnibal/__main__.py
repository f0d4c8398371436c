"""The command `omnibal`, also as `python -m omnibal`."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line."""
    # Ctrl-C during imports, about a second, would print a traceback.
    signal.signal(signal.SIGINT, _end)
    from omnibal.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
