"""LoongForge's manifest of samples in shards: names, media and token counts, in SQLite.

Its offline packing makes `sample_manifest.sqlite` of shards, with a table `samples`. Read in
tools/data_preprocess/vlm/offline_packing/wds_pack/manifest/sqlite.py at 7393697.
"""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnibal.base.errors import UserError

_OPENING = b"SQLite format 3\0"
_REMEDY = "give the sample_manifest.sqlite of `python -m wds_pack.cli.scan_manifest`"


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Samples in the order of the manifest's rows, which is that of the shards."""

    path: Path
    names: tuple[str, ...]
    media: tuple[str, ...]
    """Medium of every sample: text, image or video."""
    tokens: np.ndarray
    """Language tokens of every sample, int64 [samples]."""

    def __len__(self) -> int:
        return len(self.names)


def is_manifest(path: Path) -> bool:
    """Whether a file is a database of SQLite, and so no annotation file."""
    try:
        with path.open("rb") as file:
            return file.read(len(_OPENING)) == _OPENING
    except OSError:
        return False


def read_manifest(path: Path) -> Manifest:
    """Read the names, media and token counts of all samples.

    Raises:
        UserError: the database is damaged, or is no such manifest, or has no samples.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base:
            rows = base.execute(
                "SELECT sample_id, media_type, token_len FROM samples ORDER BY rowid"
            ).fetchall()
    except sqlite3.Error as error:
        why = f"cannot be read as LoongForge's manifest ({error})"
        raise UserError(f"{path}: {why}; {_REMEDY}") from error
    if not rows:
        raise UserError(f"{path}: has no samples; {_REMEDY}")
    names, media, tokens = zip(*rows, strict=True)
    if not all(isinstance(count, int) and count > 0 for count in tokens):
        raise UserError(f"{path}: a token_len is no whole number above 0; {_REMEDY}")
    return Manifest(
        path, tuple(map(str, names)), tuple(map(str, media)), np.array(tokens, np.int64)
    )
