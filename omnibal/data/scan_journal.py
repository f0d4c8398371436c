"""Journal of a scan on disk, from which a scan that was killed resumes.

The file is a line of text with the key of all that the counts depend on, then binary
records: numbers of samples and of their images, CRC-32, samples, images.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.image_sizes import IMAGE, ImageSizes

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Counted:
    """Scanned samples."""

    rows: np.ndarray
    """COUNTED [samples]."""
    image_sizes: ImageSizes
    """Sizes of their images and videos at their native resolution."""

    @classmethod
    def joined(cls, parts: Sequence["Counted"]) -> "Counted":
        """Join the samples of several, ascending by index, each once."""
        rows = np.concatenate([np.empty(0, COUNTED), *(part.rows for part in parts)])
        _, first = np.unique(rows["index"], return_index=True)
        sizes = ImageSizes.joined([part.image_sizes for part in parts])
        return cls(rows=rows[first], image_sizes=sizes.take(first))

    def __len__(self) -> int:
        return len(self.rows)


_TITLE = b"omnibal scan journal "
_FORM = b"4 "
"""Version of what the records hold; a journal of another form is discarded."""
_PREFIX = struct.Struct("<III")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScanJournal:
    """The samples that an earlier scan finished, and the file to which more are added.

    The file exists from the first `append` on, until `remove`.
    """

    path: Path
    key: str
    finished: Counted
    """Finished samples, ascending by index, each once."""
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
        records: list[Counted] = []
        if content.startswith(header):
            records = list(_records(content, len(header)))
            # Records added after a torn one would never be read.
            os.truncate(path, len(header) + sum(len(_written(each)) for each in records))
        else:
            path.unlink(missing_ok=True)
        return cls(
            path=path,
            key=key,
            finished=Counted.joined(records),
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

    def append(self, samples: Counted) -> None:
        """Add one record."""
        with self.path.open("ab") as file:
            header = b"" if file.tell() else _header(self.key)
            file.write(header + _written(samples))

    def remove(self) -> None:
        """Delete the file, of which nothing is needed any more."""
        self.path.unlink(missing_ok=True)


def _header(key: str) -> bytes:
    return _TITLE + _FORM + key.encode() + b"\n"


def _written(samples: Counted) -> bytes:
    """A record, as it stands in the file."""
    rows, sizes = samples.rows, samples.image_sizes
    data = rows.tobytes() + sizes.counts.astype("<i8").tobytes() + sizes.images.tobytes()
    numbers = len(rows), len(sizes.images)
    return _PREFIX.pack(*numbers, _checksum(*numbers, data)) + data


def _records(content: bytes, start: int) -> Iterator[Counted]:
    """Every record from `start` on, up to the first that is not as it was written."""
    while start + _PREFIX.size <= len(content):
        samples, images, checksum = _PREFIX.unpack_from(content, start)
        start += _PREFIX.size
        borders = np.cumsum([0, samples * COUNTED.itemsize, 8 * samples, images * IMAGE.itemsize])
        data = content[start : start + borders[-1]]
        if _checksum(samples, images, data) != checksum:
            return
        rows, counts, sizes = (data[first:stop] for first, stop in pairwise(borders))
        yield Counted(
            rows=np.frombuffer(rows, COUNTED),
            image_sizes=ImageSizes(
                images=np.frombuffer(sizes, IMAGE), counts=np.frombuffer(counts, "<i8")
            ),
        )
        start += len(data)


def _checksum(samples: int, images: int, data: bytes) -> int:
    # Includes the numbers, as a tail of zeros would else pass for empty records.
    return zlib.crc32(samples.to_bytes(4) + images.to_bytes(4) + data)
