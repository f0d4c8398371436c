"""Byte ranges of records: JSONL lines or JSON array elements, read again on each access."""

import hashlib
import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnibal.base.errors import UserError
from omnibal.base.remote_path import version_of
from omnibal.data.forms import FORMS

_CHUNK_BYTES = 1 << 24  # large enough that reading dominates
_MAX_LINE = 1 << 28  # max bytes read to distinguish a record from a meta
_OPENING_BYTES = 80  # of a line, enough to see an array begin
_NEWLINE = ord("\n")
_BLANK = re.compile(r"[ \t\r\n]*")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_JSON_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, eq=False)
class RecordIndex:
    """Byte ranges of a file's records; for Parquet, row numbers and sizes of 1. int64 [records]"""

    path: Path
    version: str  # changes with the file (`version_of`)
    start: np.ndarray
    size: np.ndarray
    digest: bytes  # SHA-256 of the file; for a tar shard, one per sample, concatenated

    def __len__(self) -> int:
        return len(self.start)


def is_array(path: Path) -> bool:
    """Return whether a file is a .json that holds an array (LLaVA), not lines."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(_CHUNK_BYTES).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"["


def holds_records(path: Path) -> bool:
    """Return whether a file holds records, not a meta, by name or first line; UserError if gzip."""
    if path.suffix.lower() in (".jsonl", ".parquet") or is_array(path):
        return True
    with path.open("rb") as file:
        if file.read(len(_GZIP)) == _GZIP:
            raise UserError(f"{path}: is compressed; decompress it, as with `gunzip {path.name}`")
        file.seek(0)
        first = file.readline(_MAX_LINE).removeprefix(_BYTE_ORDER_MARK)
    # A meta's values are objects. A record has a list, as of messages, or a form's question.
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return False
    if not isinstance(record, dict):
        return False
    is_form = any(form.asked in record for form in FORMS)
    return is_form or any(isinstance(value, list) for value in record.values())


def index_lines(path: Path) -> RecordIndex:
    """Return the index of lines that are not blank. UserError if none, or if they are an array."""
    if not path.is_file():
        raise UserError(f"{path}: no such annotation file, or a pipe; correct the meta's path")
    version = version_of(path)
    digest = hashlib.sha256()
    starts, firsts = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
    size, begins = 0, True  # bytes read, whether a line begins there
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            codes = np.frombuffer(chunk, np.uint8)
            places = np.flatnonzero(np.append(begins, codes == _NEWLINE))  # first bytes of lines
            places = places[places < len(codes)]
            starts.append(places + size)
            firsts.append(codes[places])
            size, begins = size + len(chunk), codes[-1] == _NEWLINE
        start = np.concatenate(starts)
        end = np.append(start[1:], size)[: len(start)]
        file.seek(0)
        if file.readline(_OPENING_BYTES).removeprefix(_BYTE_ORDER_MARK).strip() == b"[":
            raise UserError(f"{path}: is a JSON array of several lines; name it .json")
        # Only a line that begins with white space may be blank.
        kept = np.ones(len(start), bool)
        for line in np.flatnonzero(np.isin(np.concatenate(firsts), list(b" \t\r\n"))):
            file.seek(start[line])
            kept[line] = bool(file.read(end[line] - start[line]).strip())
    if not kept.any():
        raise UserError(f"{path}: is empty; an annotation file holds one JSON sample a line")
    start = start[kept]
    return RecordIndex(path, version, start, end[kept] - start, digest.digest())


def index_array(path: Path) -> RecordIndex:
    """Return the index of array elements. Takes memory of twice the file; UserError if invalid."""
    version = version_of(path)
    with path.open("rb") as file:
        content = file.read()
    digest = hashlib.sha256(content).digest()
    # latin-1 maps each byte to a character, so text positions are byte offsets. JSON's syntax is
    # ASCII, which is never part of a longer UTF-8 character.
    text = str(content, "latin-1")
    del content
    starts, ends = array("q"), array("q")
    try:
        for start, end in _iterate_elements(text):
            starts.append(start)
            ends.append(end)
    except json.JSONDecodeError as error:
        line = text.count("\n", 0, error.pos) + 1
        raise UserError(
            f"{path}: not a JSON array of samples: {error.msg} at byte {error.pos}, line {line}; "
            "mend it there, or write a sample per line as .jsonl, to leave out bad samples"
        ) from None
    if not starts:
        raise UserError(f"{path}: is an empty array; it must hold at least one sample")
    start_of, end_of = (np.frombuffer(places, np.int64) for places in (starts, ends))
    return RecordIndex(path, version, start_of, end_of - start_of, digest)


def _iterate_elements(text: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each array element; raises JSONDecodeError."""
    place = _skip_blank(text, text.index("[") + 1)
    more = text[place : place + 1] != "]"
    while more:
        try:
            end = _JSON_DECODER.raw_decode(text, place)[1]
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:  # huge numbers, deep nesting
            raise json.JSONDecodeError(str(error), text, place) from None
        yield place, end
        place = _skip_blank(text, end)
        more = text[place : place + 1] == ","
        if more:
            place = _skip_blank(text, place + 1)
    if text[place : place + 1] != "]":
        raise json.JSONDecodeError("expecting ',' or ']'", text, place)
    place = _skip_blank(text, place + 1)
    if place < len(text):
        raise json.JSONDecodeError("extra data", text, place)


def _skip_blank(text: str, place: int) -> int:
    blank = _BLANK.match(text, place)
    return blank.end() if blank else place
