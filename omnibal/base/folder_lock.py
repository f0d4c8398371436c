"""Lock of a folder, by flock of its file .lock, for a single writing process."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from io import RawIOBase
from pathlib import Path

from omnibal.base.errors import UserError

_LOCK_POLL_S = 0.2


@contextlib.contextmanager
def lock_folder(option: str, folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Make a folder and lock it for this process and its children. Raise UserError if in use.

    `option` names the folder in errors. `say` prints why it waits, or that locks are missing.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / ".lock").open("ab+", buffering=0))
            os.set_inheritable(lock.fileno(), True)  # children keep the lock if this one is killed
            _wait_for(lock, option, folder, say)
            lock.truncate(0)
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            lock.write(f"{os.getpid()} {os.uname().nodename} {since}".encode())
        except OSError as error:
            message = f"{option} {folder}: {error.strerror}; give a writable directory"
            raise UserError(message) from error
        yield


def _wait_for(lock: RawIOBase, option: str, folder: Path, say: Callable[[str], None]) -> None:
    """Take the lock; wait for children of a dead holder. Raise UserError if it may be alive."""
    announced = list[str]()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            lock.seek(0)
        except OSError as error:  # some network file systems: go on without a lock
            say(f"{folder} has no locks ({error.strerror}): start only one run there")
            return
        holder = (lock.read() or b"").decode(errors="replace").split()
        if len(holder) == 3:  # else the holder has not yet written it
            process, node, since = holder
            if node != os.uname().nodename or Path("/proc", process).exists():
                user = f"process {process} on {node} since {since}"
                raise UserError(f"{folder}: in use by {user}; wait, or give another {option}")
            if holder != announced:
                say(f"{folder}: waiting for children of process {process}, which has ended")
            announced = holder
        time.sleep(_LOCK_POLL_S)
