"""Blocks of remote files kept in a folder of bounded size, which processes of a node share."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from omnibal.base.errors import UserError

_LEDGER = "bytes"
_FOLDERS = 2  # digits of a name that are its folder: 256 folders, as one of a million files is slow
_DIGITS = 20  # of the ledger's number, in bytes
_KEPT = 0.9  # of the size, after blocks were removed: the next ones come without a search


@dataclass(frozen=True, slots=True)
class BlockCache:
    """Blocks by their names; those that were not used for longest are removed first.

    A block appears whole, under its name, or not at all. One process of the node writes at a time,
    so that there is never more than `most_bytes`; all read whenever they like.
    """

    folder: Path
    most_bytes: int

    @classmethod
    def open(cls, folder: Path, gib: float) -> "BlockCache":
        """A cache in a folder, which is made, or is one already."""
        ledger = folder / _LEDGER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()) and not ledger.is_file():
                raise UserError(
                    f"{folder}: holds other files, and a cache removes what it finds; give an "
                    "empty folder, or one to be made"
                )
            ledger.open("a").close()
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be a cache ({error.strerror}); give a folder on a local disk"
            ) from error
        return cls(folder, int(gib * 2**30))

    def block(self, name: str, size: int, fetch: Callable[[], bytes]) -> bytes:
        """A block of so many bytes, fetched if it is not there."""
        digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
        path = self.folder / digest[:_FOLDERS] / digest[_FOLDERS:]
        with suppress(OSError):
            content = path.read_bytes()
            os.utime(path)  # used now
            if len(content) == size:  # else the machine went down before all was on disk
                return content
        content = fetch()
        # A disk that is full, or of which the folder was removed, costs time alone.
        with suppress(OSError):
            self._keep(path, content)
        return content

    def _keep(self, path: Path, content: bytes) -> None:
        if len(content) > self.most_bytes:
            return
        part = path.with_name(f"{path.name}.part")
        with self._ledger() as ledger:
            # Counted first: what is never written is found out when blocks are next removed.
            held = int(os.pread(ledger, _DIGITS, 0) or 0) + len(content)
            if held > self.most_bytes:
                held = self._shrunk(int(self.most_bytes * _KEPT) - len(content)) + len(content)
            os.pwrite(ledger, f"{held:{_DIGITS}}".encode(), 0)
            path.parent.mkdir(exist_ok=True)
            try:
                part.write_bytes(content)
                part.replace(path)
            except OSError:
                part.unlink(missing_ok=True)
                raise

    @contextmanager
    def _ledger(self) -> Iterator[int]:
        """The ledger, for one process of the node at a time."""
        ledger = os.open(self.folder / _LEDGER, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            yield ledger
        finally:
            os.close(ledger)

    def _shrunk(self, most: int) -> int:
        """Remove what was not used for longest until no more than so many bytes are left; these."""
        found = sorted(_blocks(self.folder))
        held = sum(size for _, size, _ in found)
        for _, size, path in found:
            if held <= most:
                break
            Path(path).unlink(missing_ok=True)
            held -= size
        return held


def _blocks(folder: Path) -> Iterator[tuple[int, int, str]]:
    """When each block was last used, its size and its path; also what was left half written."""
    for each in folder.iterdir():
        if each.is_dir():
            for entry in os.scandir(each):
                found = entry.stat()
                yield found.st_mtime_ns, found.st_size, entry.path
