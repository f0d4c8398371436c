"""Append-only record file: a text line, then binary records (size, CRC-32, content)."""

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from omnibal.base.errors import UserError
from omnibal.base.files import check_ends, naming_file

_PREFIX = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class RecordLog:
    """File of records, present from the first `append` until `remove`."""

    path: Path
    title: bytes  # start of every such file
    key: bytes  # rest of the first line

    @property
    def _header(self) -> bytes:
        return self.title + self.key + b"\n"

    def read(self, named: str) -> tuple[list[memoryview], bool]:
        """Complete records, and whether a log of another key was discarded."""
        check_ends(self.path, "give the path of a file")
        content = self.path.read_bytes() if self.path.exists() else b""
        header = self._header
        if not content.startswith(self.title) and not header.startswith(content):
            raise UserError(f"{self.path}: is not {named}; move that file away or choose another")
        if not content.startswith(header):
            return [], len(content) > len(header)
        return _records(memoryview(content)[len(header) :]), False

    def begin(self, records: list[memoryview]) -> None:
        """Prepare for `append`: truncate after these records, or to nothing."""
        if records:
            # Records after a torn record would never be read.
            sizes = [_PREFIX.size + len(record) for record in records]
            os.truncate(self.path, len(self._header) + sum(sizes))
        else:
            self.remove()

    def append(self, record: bytes) -> None:
        with naming_file(self.path), self.path.open("ab") as file:
            header = b"" if file.tell() else self._header
            file.write(header + _PREFIX.pack(len(record), _checksum(record)) + record)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _records(content: memoryview) -> list[memoryview]:
    """Records up to the first corrupt record."""
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
    # Includes the size, as trailing zeros would pass for empty records.
    return zlib.crc32(record, zlib.crc32(len(record).to_bytes(8)))
