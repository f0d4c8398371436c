"""Energon's index of its shards, written by `energon prepare`.

    NAME.tar.idx            uint64: first byte of every sample, then the end of the last
    .nv-meta/index.sqlite   key of every sample; name, offset and size of its files

Read in Energon 7.4.1, flavors/webdataset: itar.py, indexing.py, prepare.py (older: no files).
"""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from omnibal.base.errors import UserError
from omnibal.base.remote_path import RemotePath

META = ".nv-meta"
_INFO, _DATABASE = ".info.json", "index.sqlite"
_FILES = (
    "SELECT s.sample_key, s.byte_offset, p.part_name, p.content_byte_offset, p.content_byte_size "
    "FROM samples s JOIN sample_parts p USING (tar_file_id, sample_index) WHERE tar_file_id = ? "
    "ORDER BY sample_index, p.content_byte_offset"
)


TAR_BLOCK = 512
"""Tar block size in bytes."""


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    header: int
    """Byte offset of its tar header; in Energon's index, of its sample."""
    offset: int
    size: int

    @property
    def end(self) -> int:
        """Byte offset after its last tar block."""
        return self.offset + -(-self.size // TAR_BLOCK) * TAR_BLOCK

    @property
    def suffix(self) -> str:
        """Name after the key and its dot, such as json or 0.jpg, empty without a key."""
        stem, _, suffix = self.name.rpartition("/")[2].partition(".")
        return suffix.lower() if stem else ""


Samples = list[tuple[str, list[Member]]]
"""Key and members of each sample of a shard, in order."""


@dataclass(frozen=True, slots=True)
class EnergonIndex:
    """Energon's index of a shard."""

    database: Path
    number: int
    """Shard number in the dataset."""

    def of(self, shard: Path) -> tuple[Samples, int]:
        """Unchecked samples of the shard, and the end of its last entry."""
        offsets = shard.with_suffix(".tar.idx")
        try:
            borders = np.frombuffer(offsets.read_bytes(), "<u8").tolist()
            with _open_database(self.database) as database:
                rows = database.execute(_FILES, (self.number,))
                found = [
                    (key, [Member(f"{key}.{suffix}", start, *at) for _, _, suffix, *at in files])
                    for (key, start), files in groupby(rows, key=lambda row: row[:2])
                ]
        except (OSError, ValueError, sqlite3.Error) as error:
            raise UserError(
                f"{offsets} and {self.database}: cannot be read ({error}); run `energon prepare` "
                "again"
            ) from error
        if not borders or borders[:-1] != [members[0].header for _, members in found]:
            raise stale_error(shard, "its .tar.idx has samples at other places than index.sqlite")
        return found, borders[-1]


def _open_database(database: Path) -> closing[sqlite3.Connection]:
    # Read-only and immutable: locks are slow or missing on network file systems.
    name = f"{database.absolute().as_uri()}?mode=ro&immutable=1"
    return closing(sqlite3.connect(name, uri=True))


def energon_indexes(folder: Path, shards: Sequence[str]) -> list[EnergonIndex | None]:
    """Energon's index per shard, None if it lists no files or the shard is remote."""
    nothing: list[EnergonIndex | None] = [None] * len(shards)
    database = folder / META / _DATABASE
    if isinstance(folder, RemotePath) or not database.is_file():
        return nothing
    try:
        counts = json.loads((folder / META / _INFO).read_text())["shard_counts"]
        with _open_database(database) as opened:
            opened.execute(f"{_FILES} LIMIT 1", (0,))
    except (OSError, ValueError, KeyError, sqlite3.Error):  # earlier versions
        return nothing
    numbers = {name: number for number, name in enumerate(counts)}
    return [
        EnergonIndex(database, numbers[name])
        if name in numbers and (folder / name).with_suffix(".tar.idx").is_file()
        else None
        for name in shards
    ]


def stale_error(shard: Path, why: str) -> UserError:
    return UserError(
        f"{shard}: is not what Energon's index says of it ({why}); run `energon prepare` again"
    )
