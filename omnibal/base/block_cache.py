"""Disk cache of remote file blocks, bounded in size and shared by a node's processes."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from omnibal.base.errors import UserError, refuse_if

_LEDGER = "bytes"  # file with the cache's size; its lock serializes writers
_FOLDER_DIGITS = 2  # of the hash: 256 folders, as a million files in a folder are slow
_LEDGER_DIGITS = 20  # fixed width, to overwrite in place
_EVICT_TO = 0.9  # of the max size, so that eviction runs rarely


@dataclass(frozen=True, slots=True)
class BlockCache:
    """LRU cache of named blocks in files, of at most `max_bytes`."""

    folder: Path
    max_bytes: int

    @classmethod
    def open(cls, folder: Path, gib: float) -> "BlockCache":
        """Return the cache in a folder, which is made if absent.

        Raises:
            UserError: for an unwritable folder, or one with other files, as eviction removes files.
        """
        ledger = folder / _LEDGER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            refuse_if(
                any(folder.iterdir()) and not ledger.is_file(),
                f"{folder}: holds other files, which a cache would remove; give a new folder",
            )
            ledger.open("a").close()
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be a cache ({error.strerror}); give a folder on a local disk"
            ) from error
        return cls(folder, int(gib * 2**30))

    def block(self, name: str, size: int, fetch: Callable[[], bytes]) -> bytes:
        """Return a block of `size` bytes, from `fetch` if absent."""
        digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
        path = self.folder / digest[:_FOLDER_DIGITS] / digest[_FOLDER_DIGITS:]
        with suppress(OSError):
            content = path.read_bytes()
            os.utime(path)  # the file's time is its last use
            if len(content) == size:  # else the machine crashed during the write
                return content
        content = fetch()
        # A full disk or removed folder only costs time.
        with suppress(OSError):
            self._write_block(path, content)
        return content

    def _write_block(self, path: Path, content: bytes) -> None:
        if len(content) > self.max_bytes:
            return
        part = path.with_name(f"{path.name}.part")
        with self._lock_ledger() as ledger:
            # Counted before writing: the next eviction corrects the count if the write fails.
            size = int(os.pread(ledger, _LEDGER_DIGITS, 0) or 0) + len(content)
            if size > self.max_bytes:
                size = self._evict(int(self.max_bytes * _EVICT_TO) - len(content)) + len(content)
            os.pwrite(ledger, f"{size:{_LEDGER_DIGITS}}".encode(), 0)
            path.parent.mkdir(exist_ok=True)
            try:
                part.write_bytes(content)
                part.replace(path)
            except OSError:
                part.unlink(missing_ok=True)
                raise

    @contextmanager
    def _lock_ledger(self) -> Iterator[int]:
        ledger = os.open(self.folder / _LEDGER, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            yield ledger
        finally:
            os.close(ledger)  # releases the lock

    def _evict(self, max_bytes: int) -> int:
        """Remove least recently used blocks down to `max_bytes`; return the bytes left."""
        blocks = []  # (last use, size, path), partial files too
        for group in filter(Path.is_dir, self.folder.iterdir()):
            for entry in os.scandir(group):
                state = entry.stat()
                blocks.append((state.st_mtime_ns, state.st_size, entry.path))
        total = sum(size for _, size, _ in blocks)
        for _, size, path in sorted(blocks):
            if total <= max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total
