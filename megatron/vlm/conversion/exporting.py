"""The weights of a run as a checkpoint that other tools load.

What is written is like a given released checkpoint, file by file, or of a layout that is asked for,
with a config.json made from the model.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.vlm.checkpoint_identity import CheckpointIdentity, architecture_differences
from megatron.vlm.conversion.importing import TOKENIZER_FILES, ReleasedCheckpoint
from megatron.vlm.conversion.own_weights import StoredWeights
from megatron.vlm.conversion.released_config import CONFIG_FILE, check_exportable, write_config
from megatron.vlm.conversion.released_files import (
    INDEX_FILE,
    SINGLE_FILE,
    write_file,
    write_index,
    writing,
)
from megatron.vlm.conversion.tensor_map import (
    Layout,
    Parameter,
    Shape,
    embedding_parameter,
    head_name,
    parameters,
    released,
)
from omnibal.config import ModelConfig
from omnibal.data.chat import check_tokenizer
from omnibal.data.tokenizer import Tokenizer
from omnibal.errors import UserError
from omnibal.files import atomic_directory

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """One tensor to write."""

    name: str
    parameter: Parameter
    position: int
    """Among the tensors that the parameter is made of."""
    shape: Shape
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    name: str
    pieces: tuple[_Piece, ...]
    metadata: dict[str, str] | None

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What is to be written, found to be possible."""

    stored: CheckpointIdentity
    model: ModelConfig
    layout: Layout
    files: tuple[_File, ...]
    index_metadata: dict[str, int | float | str] | None
    """None: no index is written."""
    copied: tuple[Path, ...]
    """Files that go along as they are."""
    config_dtype: torch.dtype | None
    """Of a config.json that is made from the model; None where one is copied."""
    image_token_id: int | None

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(file.bytes for file in self.files)


def plan_export_like(
    stored: CheckpointIdentity, like: ReleasedCheckpoint, dtype: torch.dtype | None
) -> Export:
    """A copy of the released checkpoint `like` with the stored weights in place of its own: the
    same files, names and, unless `dtype` is given, types.

    Raises:
        UserError: the models differ.
    """
    different = architecture_differences(stored.model, like.model)
    if different:
        raise UserError(
            f"{stored.path}: is of another model than {like.directory}: {'; '.join(different)}; "
            "name the checkpoint that training started from"
        )
    pieces = list(_pieces(like.model, like.layout))
    head = head_name(like.layout)
    if like.model.language.tied_head and head in like.files.tensors:
        embedding = embedding_parameter(like.model)
        tied = next(piece for piece in pieces if piece.parameter == embedding)
        pieces.append(replace(tied, name=head))
    by_file: dict[str, list[_Piece]] = {}
    for piece in pieces:
        info = like.files.tensors[piece.name]
        piece = replace(piece, dtype=dtype or info.dtype)
        by_file.setdefault(info.file, []).append(piece)
    files = [
        _File(name=name, pieces=tuple(pieces), metadata=like.files.header_metadata(name))
        for name, pieces in sorted(by_file.items())
    ]
    copied = [
        path
        for path in sorted(like.directory.iterdir())
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES)
    ]
    return Export(
        stored=stored,
        model=like.model,
        layout=like.layout,
        files=tuple(files),
        index_metadata=like.files.index_metadata,
        copied=tuple(copied),
        config_dtype=None,
        image_token_id=None,
    )


def plan_export_as(
    stored: CheckpointIdentity,
    layout: Layout,
    dtype: torch.dtype | None,
    tokenizer: Tokenizer | None,
    bytes_per_file: int,
) -> Export:
    """The stored weights in a layout, with a config.json made from the model.

    Args:
        dtype: of the tensors; None for the stored type.
        tokenizer: whose files go along.
        bytes_per_file: at most, unless a single tensor has more.

    Raises:
        UserError: the layout cannot hold the model, the tokenizer does not go with it, or the
            checkpoint cannot be read.
    """
    model = stored.model
    check_exportable(model, layout)
    weights = StoredWeights(stored.path)
    pieces = [
        replace(piece, dtype=dtype or weights.dtype(piece.parameter))
        for piece in _pieces(model, layout)
    ]
    files = _dealt(pieces, bytes_per_file)
    copied: list[Path] = []
    if tokenizer is not None:
        check_tokenizer(model, tokenizer)
        beside = tokenizer.path.parent
        copied = [beside / name for name in TOKENIZER_FILES if (beside / name).is_file()]
    return Export(
        stored=stored,
        model=model,
        layout=layout,
        files=tuple(files),
        index_metadata={} if len(files) > 1 else None,
        copied=tuple(copied),
        config_dtype=pieces[0].dtype,
        image_token_id=None if tokenizer is None else tokenizer.image_context,
    )


def write_export(export: Export, target: Path, on_written: Callable[[int], None]) -> None:
    """Write the folder `target`, a file's tensors in memory at a time.

    It gets its name when all in it is written.

    Args:
        on_written: called after each file with the bytes of its tensors.

    Raises:
        UserError: the target exists, or a file cannot be read or written.
    """
    with atomic_directory(target) as folder, writing(target):
        for path in export.copied:
            shutil.copyfile(path, folder / path.name)
        if export.config_dtype is not None:
            type_name = str(export.config_dtype).removeprefix("torch.")
            write_config(
                export.model, export.layout, type_name, export.image_token_id, folder / CONFIG_FILE
            )
        weights = StoredWeights(export.stored.path)
        for file in export.files:
            write_file(folder / file.name, _tensors(export, file, weights), file.metadata)
            on_written(file.bytes)
        if export.index_metadata is not None:
            weight_map = {piece.name: file.name for file in export.files for piece in file.pieces}
            total = {"total_size": export.bytes}
            write_index(folder / INDEX_FILE, weight_map, export.index_metadata | total)


def _pieces(model: ModelConfig, layout: Layout) -> Iterator[_Piece]:
    """All tensors of the layout, of a type that the caller replaces."""
    for parameter in parameters(model):
        made_of = released(parameter, model, layout)
        for position, (name, shape) in enumerate(zip(made_of.names, made_of.shapes, strict=True)):
            yield _Piece(
                name=name,
                parameter=parameter,
                position=position,
                shape=shape,
                dtype=torch.float32,
            )


def _dealt(pieces: Sequence[_Piece], bytes_per_file: int) -> list[_File]:
    """Pieces in order over files of no more than so many bytes."""
    groups: list[list[_Piece]] = [[]]
    size = 0
    for piece in pieces:
        if groups[-1] and size + piece.bytes > bytes_per_file:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.bytes
    names = [
        f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number in range(1, len(groups) + 1)
    ]
    return [
        _File(name=name, pieces=tuple(group), metadata={"format": "pt"})
        for name, group in zip(names if len(groups) > 1 else [SINGLE_FILE], groups, strict=True)
    ]


def _tensors(export: Export, file: _File, weights: StoredWeights) -> dict[str, torch.Tensor]:
    wanted = list(dict.fromkeys(piece.parameter for piece in file.pieces))
    split = {
        parameter: released(parameter, export.model, export.layout).arrangement.split(values)
        for parameter, values in zip(wanted, weights.read(wanted), strict=True)
    }
    return {
        piece.name: split[piece.parameter][piece.position].to(piece.dtype) for piece in file.pieces
    }
