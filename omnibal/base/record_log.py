"""A file to which records are added one by one, and of which a kill leaves all that were whole.

It is a line of text, by which the file is known, then binary records: size, CRC-32, content.
"""

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from omnibal.base.errors import UserError

_PREFIX = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class RecordLog:
    """A file of records, which exists from the first `append` on, until `remove`."""

    path: Path
    title: bytes
    """What every such file begins with, whatever it is of."""
    key: bytes
    """What the rest of its first line must be."""

    @property
    def _header(self) -> bytes:
        return self.title + self.key + b"\n"

    def read(self, named: str) -> tuple[list[memoryview], bool]:
        """The whole records, and whether there were others, of another key, that are of no use."""
        content = self.path.read_bytes() if self.path.exists() else b""
        header = self._header
        if not content.startswith(self.title) and not header.startswith(content):
            raise UserError(f"{self.path}: is not {named}; move that file away or choose another")
        if not content.startswith(header):
            return [], len(content) > len(header)
        return _records(memoryview(content)[len(header) :]), False

    def begin(self, records: list[memoryview]) -> None:
        """Make ready for `append`: remove what is behind these records, or all where none is."""
        if records:
            # Records added after a torn one would never be read.
            sizes = [_PREFIX.size + len(record) for record in records]
            os.truncate(self.path, len(self._header) + sum(sizes))
        else:
            self.remove()

    def append(self, record: bytes) -> None:
        """Add one record."""
        with self.path.open("ab") as file:
            header = b"" if file.tell() else self._header
            file.write(header + _PREFIX.pack(len(record), _checksum(record)) + record)

    def remove(self) -> None:
        """Delete the file, of which nothing is needed any more."""
        self.path.unlink(missing_ok=True)


def _records(content: memoryview) -> list[memoryview]:
    """Every record, up to the first that is not as it was written."""
    found: list[memoryview] = []
    start = 0
    while start + _PREFIX.size <= len(content):
        size, checksum = _PREFIX.unpack_from(content, start)
        record = content[start + _PREFIX.size :][:size]
        if len(record) < size or _checksum(record) != checksum:
            break
        found.append(record)
        start += _PREFIX.size + size
    return found


def _checksum(record: bytes | memoryview) -> int:
    # Includes the size, as a tail of zeros would else pass for empty records.
    return zlib.crc32(record, zlib.crc32(len(record).to_bytes(8)))
