"""Journal of a scan on disk, from which a scan that was killed resumes.

It is a log under the key of all that the counts depend on. Its records: numbers of samples and of
their images, samples, images.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from omnibal.base.record_log import RecordLog
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
_FORM = b"5 "
"""Version of what the records hold; a journal of another form is discarded."""
_NAMED = "a journal of `omnibal lengths`, which keeps there what it has finished"
_NUMBERS = struct.Struct("<II")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScanJournal:
    """The samples that an earlier scan finished, and the file to which more are added.

    The file exists from the first `append` on, until `remove`.
    """

    log: RecordLog
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
        log = RecordLog(path, _TITLE, _FORM + key.encode())
        records, discarded = log.read(_NAMED)
        log.begin(records)
        return cls(log=log, finished=Counted.joined(list(map(_read, records))), discarded=discarded)

    @property
    def path(self) -> Path:
        """The file."""
        return self.log.path

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
        self.log.append(_written(samples))

    def remove(self) -> None:
        """Delete the file, of which nothing is needed any more."""
        self.log.remove()


def _written(samples: Counted) -> bytes:
    """A record, as it stands in the file."""
    rows, sizes = samples.rows, samples.image_sizes
    numbers = _NUMBERS.pack(len(rows), len(sizes.images))
    return numbers + rows.tobytes() + sizes.counts.astype("<i8").tobytes() + sizes.images.tobytes()


def _read(record: memoryview) -> Counted:
    samples, images = _NUMBERS.unpack_from(record)
    sizes = (_NUMBERS.size, samples * COUNTED.itemsize, 8 * samples, images * IMAGE.itemsize)
    rows, counts, shown = (record[first:stop] for first, stop in pairwise(np.cumsum(sizes)))
    return Counted(
        rows=np.frombuffer(rows, COUNTED),
        image_sizes=ImageSizes(
            images=np.frombuffer(shown, IMAGE), counts=np.frombuffer(counts, "<i8")
        ),
    )
