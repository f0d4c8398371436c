"""Disk cache of remote file blocks, bounded in size and shared by a node's processes."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from omnibal.base.errors import UserError

_LEDGER = "bytes"
_FOLDERS = 2  # name digits per folder: 256 folders, as a million files in a folder are slow
_DIGITS = 20  # of the ledger's number
_KEPT = 0.9  # share of the size left after eviction, so that it runs rarely


@dataclass(frozen=True, slots=True)
class BlockCache:
    """LRU cache of named blocks, atomic. A lock serializes writers to stay within `most_bytes`."""

    folder: Path
    most_bytes: int

    @classmethod
    def open(cls, folder: Path, gib: float) -> "BlockCache":
        """Open or create a cache folder."""
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
        """Return a block of `size` bytes, fetched if absent."""
        digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
        path = self.folder / digest[:_FOLDERS] / digest[_FOLDERS:]
        with suppress(OSError):
            content = path.read_bytes()
            os.utime(path)  # used now
            if len(content) == size:  # otherwise the machine crashed during the write
                return content
        content = fetch()
        # A full disk or removed folder only costs time.
        with suppress(OSError):
            self._keep(path, content)
        return content

    def _keep(self, path: Path, content: bytes) -> None:
        if len(content) > self.most_bytes:
            return
        part = path.with_name(f"{path.name}.part")
        with self._ledger() as ledger:
            # Counted before writing: the next eviction corrects the count if the write fails.
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
        """Ledger file, locked for this process."""
        ledger = os.open(self.folder / _LEDGER, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            yield ledger
        finally:
            os.close(ledger)

    def _shrunk(self, most: int) -> int:
        """Evict least recently used blocks down to `most` bytes, and return the bytes left."""
        found = sorted(_blocks(self.folder))
        held = sum(size for _, size, _ in found)
        for _, size, path in found:
            if held <= most:
                break
            Path(path).unlink(missing_ok=True)
            held -= size
        return held


def _blocks(folder: Path) -> Iterator[tuple[int, int, str]]:
    """Last use, size and path of each block, including partial files."""
    for group in folder.iterdir():
        if group.is_dir():
            for entry in os.scandir(group):
                found = entry.stat()
                yield found.st_mtime_ns, found.st_size, entry.path
