"""Append-only file: a text line, then binary records of size (u64), CRC-32 (u32) and content."""

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from omnibal.base.errors import UserError
from omnibal.base.files import check_ends, full_disk_errors

_RECORD_HEAD = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class RecordLog:
    """File of records, which exists from the first `append` until `remove`."""

    path: Path
    title: bytes  # begins the first line of all such files
    key: bytes  # rest of that line: records of another key are discarded

    @property
    def _header(self) -> bytes:
        return self.title + self.key + b"\n"

    def read(self, kind: str) -> tuple[list[memoryview], bool]:
        """Return the records before the first damaged one, and whether the file has another key.

        Raises:
            UserError: if the title differs. `kind` names the expected file in the message.
        """
        check_ends(self.path, "give the path of a file")
        content = self.path.read_bytes() if self.path.exists() else b""
        header = self._header
        # A crash may have left a part of the header.
        if not content.startswith(self.title) and not header.startswith(content):
            raise UserError(f"{self.path}: is not {kind}; move that file away or choose another")
        if not content.startswith(header):
            return [], len(content) > len(header)
        return _parse_records(memoryview(content)[len(header) :]), False

    def begin(self, records: list[memoryview]) -> None:
        """Prepare to append: truncate after `records` of `read`, or remove the file if none."""
        if records:
            # Records appended after a torn one would never be read.
            sizes = [_RECORD_HEAD.size + len(record) for record in records]
            os.truncate(self.path, len(self._header) + sum(sizes))
        else:
            self.remove()

    def append(self, record: bytes) -> None:
        with full_disk_errors(self.path), self.path.open("ab") as file:
            header = b"" if file.tell() else self._header
            file.write(header + _RECORD_HEAD.pack(len(record), _checksum(record)) + record)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _parse_records(content: memoryview) -> list[memoryview]:
    """Return the records before the first torn or corrupt one."""
    records: list[memoryview] = []
    start = 0
    while start + _RECORD_HEAD.size <= len(content):
        size, checksum = _RECORD_HEAD.unpack_from(content, start)
        record = content[start + _RECORD_HEAD.size :][:size]
        if len(record) < size or _checksum(record) != checksum:
            break
        records.append(record)
        start += _RECORD_HEAD.size + size
    return records


def _checksum(record: bytes | memoryview) -> int:
    # Covers the size, or zeros at the end of a file would pass for empty records.
    return zlib.crc32(record, zlib.crc32(len(record).to_bytes(8)))
