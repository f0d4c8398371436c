"""Samples as ms-swift's rows: `messages` and media files.

A message has a role, a text, and for an assistant's `loss`; other keys are silently dropped
(ms-swift 4.6.0, swift/dataset/preprocessor/core.py, `RowPreprocessor`).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.data.sample import IMAGE, Sample, Turn
from omnibal.data.stored_files import StoredFile

# Hugging Face's JSON reader infers column types from these first bytes (datasets 4.8.4,
# packaged_modules/json/json.py): columns absent there crash the run later.
_TYPED_BYTES = 10 << 20
_LOSS = "loss"
SwiftRow = dict[str, Any]


def write_rows(
    annotations: Annotations, samples: np.ndarray, path: Path, *, of_tiles: bool = False
) -> None:
    """Write a row per sample, in order; `of_tiles` if the model tiles images, as InternVL does."""
    begins: dict[str, int] = {}  # first byte of the rows with an optional key
    with path.open("wb") as file:
        for sample in samples.tolist():
            row = row_of(annotations[sample], of_tiles=of_tiles)
            line = annotations.read_stored(sample).content.strip()
            # A record in this form is copied, with its own order of keys and escapes.
            if b"\n" in line or json.loads(line) != row:
                line = json.dumps(row, ensure_ascii=False).encode()
            has_loss = any(_LOSS in message for message in row["messages"])
            for key in [*(row.keys() - {"messages"}), *[_LOSS] * has_loss]:
                begins.setdefault(key, file.tell())
            file.write(line + b"\n")
    late = [key for key, byte in begins.items() if byte >= _TYPED_BYTES]
    if late:
        raise UserError(
            f'the first row with "{late[0]}" begins {begins[late[0]] / 2**20:.1f} MiB into '
            f"{path.name}, behind the {_TYPED_BYTES >> 20} MiB of types: plan with another --seed"
        )


def row_of(sample: Sample, *, of_tiles: bool = False) -> SwiftRow:
    """Return a sample as ms-swift's row, with absolute paths. Raise if ms-swift cannot read it."""
    if sample.greeting is not None:
        raise UserError(f"{sample.where} begins with the assistant; ms-swift needs a question")
    if of_tiles and any(video.file is None for video in sample.videos):
        raise UserError(f"{sample.where} has a video of frames; ms-swift reads files: leave it out")
    messages: list[SwiftRow] = []
    if sample.system is not None:
        messages.append({"role": "system", "content": sample.system})
    for turn in sample.turns:
        messages += _messages_of(turn)
    if of_tiles:
        # ms-swift's InternVL template adds a line break after every image
        # (swift/template/templates/internvl.py, `replace_tag`), and the question has one already.
        for message in messages:
            message["content"] = message["content"].replace(f"{IMAGE}\n", IMAGE)
    row: SwiftRow = {"messages": messages}
    if sample.videos:
        row["videos"] = [
            _paths(sample, video.frames) if video.file is None else _paths(sample, [video.file])[0]
            for video in sample.videos
        ]
    if sample.images:
        row["images"] = _paths(sample, sample.images)
    if sample.recordings:
        row["audios"] = _paths(sample, sample.recordings)
    return row if sample.tools is None else row | {"tools": sample.tools}


def _messages_of(turn: Turn) -> list[SwiftRow]:
    """Return messages of a turn: its question or tool results, then its answer and tool calls."""
    inputs = [{"role": "tool", "content": result} for result in turn.results]
    inputs = inputs or [{"role": "user", "content": turn.question}]
    outputs = []
    if turn.answer or not turn.calls:
        thought = "" if turn.reasoning is None else f"<think>\n{turn.reasoning}\n</think>\n\n"
        outputs = [{"role": "assistant", "content": thought + turn.answer}]
    outputs += [{"role": "tool_call", "content": call} for call in turn.calls]
    return inputs + [message if turn.learned else {**message, _LOSS: False} for message in outputs]


def _paths(sample: Sample, files: Sequence[StoredFile]) -> list[str]:
    for file in files:
        if file.name is not None:
            raise UserError(
                f"{sample.where}: {file.name} is in a tar shard, and ms-swift reads single files; "
                "unpack the shards with `tar -xf`, name the files in JSONL, scan and plan again"
            )
    return [str(file.path.absolute()) for file in files]
