"""InternVL's training data, a meta JSON that names JSONL files, as a lazy sequence of samples.

    {source: {"root": image folder, "annotation": file.jsonl, "repeat_time": 1, ...}}

Relative paths in the meta start at its folder. Only the byte offsets of the lines stay in memory;
a sample's line is read and parsed each time it is asked for.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from omnibal.config import Frozen
from omnibal.data.tokenizer import IMAGE_CONTEXT, IMAGE_END, IMAGE_START, TURN_END, TURN_START
from omnibal.errors import UserError
from omnibal.files import read_json_model

IMAGE = "<image>"
_RESERVED = (IMAGE_START, IMAGE_CONTEXT, IMAGE_END, TURN_START, TURN_END)
_CHUNK_BYTES = 1 << 24
_NEWLINE = ord("\n")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, in which each `<image>` stands for one image, and its reference answer."""

    question: str
    answer: str
    kind: str | None
    """What accuracy is reported by; from the line's optional "kinds"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One conversation about any number of images."""

    identity: str
    """Source name and the line's "id" (its line number where it has none)."""
    source: str
    where: str
    """Annotation file and line, for error messages."""
    images: tuple[Path, ...]
    turns: tuple[Turn, ...]
    augment: bool = False
    """The meta's `data_augment`: in training, its tiles are degraded at random."""


class _SourceMeta(Frozen):
    root: str
    annotation: str
    data_augment: bool = False
    repeat_time: PositiveFloat = 1
    length: PositiveInt | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    name: str
    root: Path
    annotation: Path
    augment: bool


class _Invalid(ValueError):
    """What a line lacks; the caller adds file and line number."""


class Annotations:
    """Samples of every source in the order of the meta file, repeats included.

    Safe to share between processes: a file is opened for each access.
    """

    def __init__(
        self,
        sources: list[_Source],
        source: np.ndarray,
        line: np.ndarray,
        line_start: np.ndarray,
        sha256: str,
    ) -> None:
        self._sources = sources
        self._line = line
        self._line_start = line_start
        self.source = source
        """int32 index into `sources` of every sample."""
        self.sources = tuple(entry.name for entry in sources)
        self.sha256 = sha256
        """Covers source names, repeats and annotation bytes; neither folders, pixels nor
        `data_augment`."""
        self.roots = tuple(entry.root for entry in sources)
        """Image folder of every source."""
        self.augmented = tuple(entry.name for entry in sources if entry.augment)
        """Sources whose tiles are augmented in training."""

    @classmethod
    def open(cls, meta_path: Path) -> "Annotations":
        """Index every annotation file of the meta; lines are checked when they are asked for.

        Raises:
            UserError: the meta is missing, malformed or leaves no sample, or an annotation file
                is missing, empty, or not of the length that the meta states.
        """
        entries = _read_meta(meta_path)
        digest = hashlib.sha256()
        sources, lines, line_starts = [], [], []
        for name, entry in entries.items():
            annotation = meta_path.parent / entry.annotation
            starts, file_sha256 = _index_lines(annotation)
            if entry.length not in (None, len(starts)):
                raise UserError(
                    f"{annotation}: holds {len(starts)} lines, but {meta_path} states length "
                    f"{entry.length} for {name!r}; complete the file or correct the length"
                )
            root = meta_path.parent / entry.root
            sources.append(_Source(name, root, annotation, entry.data_augment))
            lines.append(_repeated(len(starts), entry.repeat_time))
            line_starts.append(starts[lines[-1]])
            # Without data_augment: it changes no length, so lengths and plans stay good when it is
            # switched. That a resumed run keeps it is for the trainer to see to, by `augmented`.
            digest.update(json.dumps([name, entry.repeat_time, file_sha256]).encode())
        source = np.repeat(np.arange(len(sources), dtype=np.int32), [len(part) for part in lines])
        if not len(source):
            raise UserError(f"{meta_path}: leaves no sample; raise a repeat_time or add a source")
        line, line_start = np.concatenate(lines), np.concatenate(line_starts)
        return cls(sources, source, line, line_start, digest.hexdigest())

    def __len__(self) -> int:
        return len(self._line)

    def take(self, indices: np.ndarray) -> "Annotations":
        """The samples at `indices` alone, in that order: little to hand to another process."""
        return Annotations(
            self._sources,
            self.source[indices],
            self._line[indices],
            self._line_start[indices],
            self.sha256,
        )

    def where(self, index: int) -> str:
        """Annotation file and line of a sample, with which each of its errors begins."""
        return f"{self._sources[self.source[index]].annotation}: line {self._line[index] + 1}"

    def __getitem__(self, index: int) -> Sample:
        """Read, parse and check one line.

        Raises:
            UserError: the line is not a well-formed sample; names its file and number.
        """
        source, where = self._sources[self.source[index]], self.where(index)
        with source.annotation.open("rb") as file:
            file.seek(int(self._line_start[index]))
            content = file.readline()
        try:
            record = json.loads(content)
            if not isinstance(record, dict):
                raise _Invalid(f"is a JSON {type(record).__name__}; it must be an object")
            images = _images(record)
            return Sample(
                identity=f"{source.name}/{record.get('id', self._line[index] + 1)}",
                source=source.name,
                where=where,
                images=tuple(source.root / image for image in images),
                turns=_turns(record, len(images)),
                augment=source.augment,
            )
        except _Invalid as error:
            raise UserError(f"{where} {error}") from None
        except (ValueError, RecursionError) as error:  # also too long a number, too deep a nesting
            raise UserError(f"{where} is not JSON ({error}); mend or remove the line") from error


def _read_meta(path: Path) -> dict[str, _SourceMeta]:
    if not path.is_file():
        raise UserError(f"{path}: no such meta file; pass the JSON that names the annotation files")
    entries = read_json_model(
        dict[str, _SourceMeta],
        path,
        "a meta maps each source name to "
        '{"root", "annotation", "data_augment": false, "repeat_time", "length"}',
    )
    if not entries:
        raise UserError(f"{path}: names no source; at least one must be given")
    return entries


def _index_lines(path: Path) -> tuple[np.ndarray, str]:
    """Byte offset of every line (int64), and the SHA-256 of the file, in one pass."""
    if not path.is_file():
        raise UserError(f"{path}: no such annotation file; correct the meta's annotation path")
    digest = hashlib.sha256()
    starts = [np.zeros(1, np.int64)]
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            newlines = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE)
            starts.append(newlines.astype(np.int64) + size + 1)
            size += len(chunk)
    if not size:
        raise UserError(f"{path}: is empty; an annotation file holds one JSON sample a line")
    joined = np.concatenate(starts)
    return joined[joined < size], digest.hexdigest()


def _repeated(lines: int, repeat_time: float) -> np.ndarray:
    """Line indices: all of them as often as the whole part says, then the first of them for the
    rest; int64.

    Example:
        >>> _repeated(4, 1.5).tolist()
        [0, 1, 2, 3, 0, 1]
    """
    whole, rest = divmod(repeat_time, 1)
    return np.concatenate([np.tile(np.arange(lines), int(whole)), np.arange(round(rest * lines))])


def _images(record: dict[str, Any]) -> list[str]:
    if "video" in record:
        raise _Invalid('has a "video"; only images and text can be trained on: remove the line')
    images = record.get("image") or []
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise _Invalid('has an odd "image"; it must be a path, a list of paths, or absent')
    return images


def _turns(record: dict[str, Any], images: int) -> tuple[Turn, ...]:
    values = _conversation_values(record)
    questions, answers = values[::2], values[1::2]
    if any(IMAGE in answer for answer in answers):
        raise _Invalid(f"has {IMAGE} in an answer; it may stand only in a question")
    placeholders = sum(question.count(IMAGE) for question in questions)
    if images == 1 and placeholders == 0:
        questions[0] = f"{IMAGE}\n{questions[0]}"
        placeholders = 1
    if placeholders != images:
        raise _Invalid(
            f"has {placeholders} {IMAGE} for {images} image(s); write one {IMAGE} for each image"
        )
    kinds = record.get("kinds", [None] * len(questions))
    named = isinstance(kinds, list) and all(isinstance(kind, str | None) for kind in kinds)
    if not named or len(kinds) != len(questions):
        raise _Invalid(f'must have in "kinds" one name for each of its {len(questions)} turn(s)')
    return tuple(Turn(*fields) for fields in zip(questions, answers, kinds, strict=True))


def _conversation_values(record: dict[str, Any]) -> list[str]:
    """The texts of the conversation: question, answer, question, answer, ..."""
    messages = record.get("conversations")
    well_formed = (
        isinstance(messages, list)
        and all(isinstance(message, dict) for message in messages)
        and all(isinstance(message.get("value"), str) for message in messages)
    )
    if not messages or not well_formed:
        raise _Invalid('must have "conversations": a list of {"from", "value"}')
    speakers = [message.get("from") for message in messages]
    if speakers != ["human", "gpt"] * (len(messages) // 2):
        raise _Invalid(
            f'has "conversations" from {", ".join(map(str, speakers))}; human and gpt must '
            "alternate, human first and gpt last"
        )
    values = [message["value"] for message in messages]
    try:
        "".join(values).encode()
    except UnicodeEncodeError as error:
        raise _Invalid(
            f"has text that is not Unicode ({error.reason}); mend its \\u escapes"
        ) from error
    for piece in _RESERVED:
        if any(piece in value for value in values):
            raise _Invalid(
                f"has {piece!r} in its text, which only the chat template may write; mark an image "
                f"with {IMAGE}, and spell or remove any other use"
            )
    return values
