"""Journal of a scan on disk, from which a scan that was killed resumes.

The file is a line of text with the key of all that the counts depend on, then binary
records: number of samples, CRC-32, samples.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnibal.base.errors import UserError

_COUNTS = ("tiles", "clips", "image_tokens", "tokens", "loss_tokens")
_SQUARES = ("squared_image_tokens",)
COUNTED = np.dtype(
    [
        ("index", "<i8"),
        *((name, "<i8") for name in _SQUARES),
        *((name, "<i4") for name in _COUNTS),
    ]
)
"""A scanned sample: its index in the annotations, and its counts."""

_TITLE = b"omnibal scan journal "
_FORM = b"3 "
"""Version of what the records hold; a journal of another form is discarded."""
_PREFIX = struct.Struct("<II")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScanJournal:
    """The samples that an earlier scan finished, and the file to which more are added.

    The file exists from the first `append` on, until `remove`.
    """

    path: Path
    key: str
    finished: np.ndarray
    """Finished samples, COUNTED [samples], ascending by index, each once."""
    discarded: bool
    """Whether an earlier scan of other data or with other settings was discarded."""

    @classmethod
    def open(cls, path: Path, key: str) -> "ScanJournal":
        """Read what an earlier scan with this key finished, up to the first torn record.

        Raises:
            UserError: the file is something else than a journal.
        """
        content = path.read_bytes() if path.exists() else b""
        header = _header(key)
        if not content.startswith(_TITLE) and not header.startswith(content):
            raise UserError(
                f"{path}: is not a journal of `omnibal lengths`, which keeps there what it has "
                "finished; move that file away or choose another -o"
            )
        records: list[np.ndarray] = []
        if content.startswith(header):
            records = list(_records(content, len(header)))
            # Records added after a torn one would never be read.
            os.truncate(path, len(header) + sum(_PREFIX.size + rows.nbytes for rows in records))
        else:
            path.unlink(missing_ok=True)
        finished = np.concatenate([np.empty(0, COUNTED), *records])
        _, first = np.unique(finished["index"], return_index=True)
        return cls(
            path=path,
            key=key,
            finished=finished[first],
            discarded=len(content) > len(header) and not content.startswith(header),
        )

    def notes(self, samples: int) -> list[str]:
        """Lines that tell the user what a scan of `samples` samples resumes or discards."""
        notes = []
        if self.discarded:
            notes.append(f"note: {self.path} is of other data or settings; the scan begins anew")
        if len(self.finished):
            finished = f"{len(self.finished):,} of {samples:,}"
            notes.append(f"resumed: {finished} samples were already scanned")
        return notes

    def append(self, rows: np.ndarray) -> None:
        """Add one record of COUNTED samples."""
        data = rows.tobytes()
        with self.path.open("ab") as file:
            header = b"" if file.tell() else _header(self.key)
            file.write(header + _PREFIX.pack(len(rows), _checksum(len(rows), data)) + data)

    def remove(self) -> None:
        """Delete the file, of which nothing is needed any more."""
        self.path.unlink(missing_ok=True)


def _header(key: str) -> bytes:
    return _TITLE + _FORM + key.encode() + b"\n"


def _records(content: bytes, start: int) -> Iterator[np.ndarray]:
    """The rows of every record from `start` on, up to the first that is not as it was written."""
    while start + _PREFIX.size <= len(content):
        samples, checksum = _PREFIX.unpack_from(content, start)
        start += _PREFIX.size
        data = content[start : start + samples * COUNTED.itemsize]
        if _checksum(samples, data) != checksum:
            return
        yield np.frombuffer(data, COUNTED)
        start += len(data)


def _checksum(samples: int, data: bytes) -> int:
    # Includes the number of samples, as a tail of zeros would else pass for empty records.
    return zlib.crc32(samples.to_bytes(4) + data)
