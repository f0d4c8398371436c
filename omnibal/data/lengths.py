"""Sample lengths: what every sample costs, one row each, read from Parquet or OmniBal's JSON.

A row counts `tiles` (vision encoder inputs, thumbnail included), `tokens` (language tokens, image
tokens included) and `loss_tokens` (tokens that carry loss).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omnibal.config import Frozen, TilingConfig
from omnibal.errors import UserError

_METADATA_KEY = b"omnibal"


class LengthsOrigin(Frozen):
    """What a scan was made from; training refuses data or a tokenizer that differ from it."""

    data_sha256: str
    tokenizer_sha256: str
    image_size: int
    tokens_per_tile: int
    tiling: TilingConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lengths:
    """One entry per sample, in the order of the meta file; arrays are int32 of one length."""

    tiles: np.ndarray
    tokens: np.ndarray
    loss_tokens: np.ndarray
    source: np.ndarray
    """Index into `source_names`."""
    source_names: tuple[str, ...]
    origin: LengthsOrigin | None
    """None when the lengths did not come from a scan, so that no training data can be matched."""

    def __len__(self) -> int:
        return len(self.tiles)

    @property
    def sha256(self) -> str:
        """Hash of the columns; equal lengths give equal hashes whatever file they came from."""
        digest = hashlib.sha256("\0".join(self.source_names).encode())
        for column in (self.tiles, self.tokens, self.loss_tokens, self.source):
            digest.update(np.ascontiguousarray(column, dtype="<i4").tobytes())
        return digest.hexdigest()


def write_lengths(lengths: Lengths, path: Path) -> None:
    """Write Parquet with columns tiles, tokens, loss_tokens, source (dictionary of names)."""
    source = pa.DictionaryArray.from_arrays(
        pa.array(lengths.source, pa.int32()), pa.array(lengths.source_names, pa.string())
    )
    table = pa.table(
        {
            "tiles": pa.array(lengths.tiles, pa.int32()),
            "tokens": pa.array(lengths.tokens, pa.int32()),
            "loss_tokens": pa.array(lengths.loss_tokens, pa.int32()),
            "source": source,
        }
    )
    if lengths.origin is not None:
        table = table.replace_schema_metadata({_METADATA_KEY: lengths.origin.model_dump_json()})
    temporary = path.with_name(path.name + ".part")
    pq.write_table(table, temporary)
    temporary.replace(path)


def read_lengths(paths: Sequence[Path]) -> Lengths:
    """Read and join length files: Parquet, OmniBal's list of lengths, or its meta JSON of lists.

    Raises:
        UserError: a file is missing, is not what its name says, lacks a column, or holds no row.
    """
    if not paths:
        raise UserError("no lengths file was given; pass at least one Parquet or JSON file")
    parts = [part for path in paths for part in _read_file(path)]
    names = tuple(dict.fromkeys(name for part in parts for name in part.source_names))
    codes = [
        np.array([names.index(name) for name in part.source_names], np.int32)[part.source]
        for part in parts
    ]
    joined = Lengths(
        tiles=np.concatenate([part.tiles for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        loss_tokens=np.concatenate([part.loss_tokens for part in parts]),
        source=np.concatenate(codes),
        source_names=names,
        origin=parts[0].origin if len(parts) == 1 else None,
    )
    if not len(joined):
        raise UserError(
            f"{', '.join(map(str, paths))}: holds no sample; planning needs at least one"
        )
    _check_counts(joined, paths)
    return joined


def _check_counts(lengths: Lengths, paths: Sequence[Path]) -> None:
    bad = (lengths.tiles < 0) | (lengths.tokens < 1) | (lengths.loss_tokens < 0)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise UserError(
            f"{', '.join(map(str, paths))}: row {row} has tiles {lengths.tiles[row]}, tokens "
            f"{lengths.tokens[row]}, loss_tokens {lengths.loss_tokens[row]}; tiles and loss_tokens "
            "must be at least 0 and tokens at least 1; rebuild the file with `omnibal lengths`"
        )


def _read_file(path: Path) -> list[Lengths]:
    if not path.is_file():
        raise UserError(
            f"{path}: no such lengths file; make one with `omnibal lengths META -o {path}`"
        )
    if path.suffix == ".json":
        return _read_json(path)
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{path}: not a Parquet file ({error}); lengths are Parquet or .json"
        ) from error
    missing = {"tiles", "tokens", "loss_tokens", "source"} - set(table.column_names)
    if missing:
        raise UserError(
            f"{path}: lacks the column(s) {', '.join(sorted(missing))}; a lengths file has "
            "tiles, tokens, loss_tokens and source"
        )
    source = table.column("source").combine_chunks()
    if not pa.types.is_dictionary(source.type):
        source = source.dictionary_encode()
    metadata = (table.schema.metadata or {}).get(_METADATA_KEY)
    return [
        Lengths(
            tiles=table.column("tiles").to_numpy().astype(np.int32),
            tokens=table.column("tokens").to_numpy().astype(np.int32),
            loss_tokens=table.column("loss_tokens").to_numpy().astype(np.int32),
            source=source.indices.to_numpy(zero_copy_only=False).astype(np.int32),
            source_names=tuple(source.dictionary.to_pylist()),
            origin=LengthsOrigin.model_validate_json(metadata) if metadata else None,
        )
    ]


def _read_json(path: Path) -> list[Lengths]:
    content = _load_json(path)
    if not isinstance(content, dict):
        return [_from_records(content, path, path.stem)]
    parts = []
    for name, entry in content.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("token_lengths"), str):
            raise UserError(
                f'{path}: entry {name!r} has no "token_lengths"; a meta JSON of lengths maps '
                'each source name to {"token_lengths": "file.json"}'
            )
        # An absolute path stays what it is.
        part_path = path.parent / entry["token_lengths"]
        parts.append(_from_records(_load_json(part_path), part_path, name))
    return parts


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; correct the path") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: not a JSON file ({error}); lengths are Parquet or .json"
        ) from error


def _from_records(records: Any, path: Path, source_name: str) -> Lengths:
    """OmniBal's public format; it has no loss counts, which are therefore read as 0."""
    if not isinstance(records, list):
        raise UserError(
            f"{path}: holds a {type(records).__name__}; a lengths JSON is a list of "
            '{"vit_num", "token_num", "image_flags"}'
        )
    try:
        tiles = np.array([record["vit_num"] for record in records], np.int32)
        tokens = np.array([record["token_num"] for record in records], np.int32)
        flags = [record["image_flags"] for record in records]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f'{path}: a record does not fit ({error}); each must have the whole numbers "vit_num" '
            'and "token_num", and "image_flags"'
        ) from error
    has_image = np.array([np.sum(flag) > 0 for flag in flags], bool)
    tiles = np.where(has_image, tiles, 0).astype(np.int32)
    return Lengths(
        tiles=tiles,
        tokens=tokens,
        loss_tokens=np.zeros_like(tokens),
        source=np.zeros(len(records), np.int32),
        source_names=(source_name,),
        origin=None,
    )
