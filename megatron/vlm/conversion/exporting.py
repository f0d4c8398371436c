"""Export of a run's weights to safetensors, like a released checkpoint or in a layout."""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.vlm.checkpoint.identity import CheckpointIdentity, architecture_differences
from megatron.vlm.conversion.adapter_files import MergedWeights
from megatron.vlm.conversion.config_files import (
    PROCESSOR_FILE,
    configurations,
    json_text,
    replace_dtype,
)
from megatron.vlm.conversion.importing import ReleasedCheckpoint
from megatron.vlm.conversion.own_weights import StoredWeights
from megatron.vlm.conversion.released_config import check_exportable
from megatron.vlm.conversion.released_files import SINGLE_FILE, dtype_name, write_file, writing
from megatron.vlm.conversion.tensor_map import (
    Parameter,
    Shape,
    TensorLayout,
    embedding_parameter,
    find_released,
    head_name,
    parameters,
)
from megatron.vlm.conversion.tokenizer_files import list_tokenizer_files
from omnibal.base.errors import UserError
from omnibal.base.files import atomic_directory, check_room, read_text
from omnibal.data.chat import check_tokenizer
from omnibal.data.tokenizer import Tokenizer
from omnibal.families.folder import CONFIG_FILE, INDEX_FILE
from omnibal.model.config import ModelConfig

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json")


@dataclass(frozen=True, slots=True)
class _Piece:
    name: str
    parameter: Parameter
    position: int  # index among the parameter's released tensors
    shape: Shape
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    pieces: Sequence[_Piece]
    metadata: dict[str, str] | None

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class CheckpointExport:
    """Files of a checked export, not yet written."""

    stored: CheckpointIdentity
    model: ModelConfig
    layout: TensorLayout
    files: Sequence[_File]
    copied: Sequence[Path]  # files copied unchanged, such as the tokenizer
    made: Mapping[str, str]  # contents of generated files by name, such as configurations and index

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def plan_export_like(
    stored: CheckpointIdentity, like: ReleasedCheckpoint, dtype: torch.dtype | None
) -> CheckpointExport:
    """Return an export of the stored weights in the files and, without `dtype`, types of `like`."""
    place, model = f"in {like.directory / CONFIG_FILE}", stored.model
    if model.takes_audio and not like.model.takes_audio:
        # Leave out an audio encoder that `like` lacks, and its tokens.
        seeing = {name: tower for name, tower in model.encoders.items() if name != "audio"}
        words = min(model.language.vocab_size, like.model.language.vocab_size)
        model = model.model_copy(update={"encoders": seeing}).with_tower(
            "language", vocab_size=words
        )
    different = architecture_differences(model, like.model, place)
    if different:
        raise UserError(
            f"{stored.path}: is of another model than {like.directory}: {'; '.join(different)}; "
            "name the checkpoint that training started from"
        )
    tensors = like.files.tensors

    def dtype_of(name: str, parameter: Parameter) -> torch.dtype:
        return dtype or (tensors[name].dtype if name in tensors else like.dtype(parameter))

    has_head = head_name(like.layout) in tensors
    pieces = _list_tensors(like.model, like.layout, dtype_of, has_head=has_head)
    by_file: dict[str, list[_Piece]] = {}
    for piece in pieces:
        # A copy of a tied head that `like` lacks goes to the embedding's file.
        first = find_released(piece.parameter, like.model, like.layout).names[0]
        place = piece.name if piece.name in tensors else first
        by_file.setdefault(tensors[place].file, []).append(piece)
    files = [
        _File(name, pieces, like.files.header_metadata(name))
        for name, pieces in sorted(by_file.items())
    ]
    made = {}
    if dtype is not None:
        config = read_text(like.directory / CONFIG_FILE, "fetch it again")
        made[CONFIG_FILE] = replace_dtype(config, dtype_name(dtype))
    # The folder's index is copied unless types change or a tensor is added.
    names = {piece.name for piece in pieces}
    if like.files.index is not None and (dtype is not None or names != tensors.keys()):
        made[INDEX_FILE] = _index_text(like.files.index, files)
    copied = [
        path
        for path in sorted(like.directory.iterdir())
        if path.is_file()
        and path.name not in made
        and path.name != like.files.unread
        and (path.name == INDEX_FILE or not path.name.endswith(_WEIGHT_SUFFIXES))
    ]
    return CheckpointExport(stored, like.model, like.layout, files, copied, made)


def _index_text(index: Mapping[str, Any], files: Sequence[_File]) -> str:
    """Return the text of Transformers' index file, keeping other entries of `index`."""
    metadata = (index.get("metadata") or {}) | {"total_size": sum(file.bytes for file in files)}
    weight_map = {piece.name: file.name for file in files for piece in file.pieces}
    return json_text({**index, "metadata": metadata, "weight_map": weight_map})


def plan_export_as(
    stored: CheckpointIdentity,
    layout: TensorLayout,
    dtype: torch.dtype | None,
    tokenizer: Tokenizer | None,
    bytes_per_file: int,
) -> CheckpointExport:
    """Return an export in a layout, in files of at most `bytes_per_file` (or one tensor each)."""
    model = stored.model
    check_exportable(model, layout)
    weights = StoredWeights(stored.path)

    def dtype_of(_: str, parameter: Parameter) -> torch.dtype:
        return dtype or weights.dtype(parameter)

    pieces = _list_tensors(model, layout, dtype_of)
    groups, size = [list[_Piece]()], 0
    for piece in pieces:
        if groups[-1] and size + piece.bytes > bytes_per_file:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.bytes
    files = [
        _File(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group, {"format": "pt"})
        for number, group in enumerate(groups, 1)
    ]
    if len(files) == 1:
        files = [replace(files[0], name=SINGLE_FILE)]
    companions = list[Path]()
    if tokenizer is not None:
        check_tokenizer(model, tokenizer)
        companions = list_tokenizer_files(tokenizer.path.parent)
    made = configurations(model, layout, dtype_name(pieces[0].dtype), tokenizer)
    # A Qwen-VL's processor_config.json has the entries of generated files: not copied.
    replaced = [PROCESSOR_FILE] if layout.is_qwen_vl else []
    if len(files) > 1:
        made[INDEX_FILE] = _index_text({}, files)
    copied = [path for path in companions if path.name not in {*made, *replaced}]
    return CheckpointExport(stored, model, layout, files, copied, made)


def write_export(export: CheckpointExport, target: Path, on_written: Callable[[int], None]) -> None:
    """Write the folder `target`, with adapters merged; it is renamed to `target` when complete.

    One file is in memory at a time. `on_written` is called with the tensor bytes of every file.
    """
    companions = sum(path.stat().st_size for path in export.copied)
    check_room(target, export.bytes + companions + sum(map(len, export.made.values())))
    with atomic_directory(target) as folder, writing(target):
        for path in export.copied:
            shutil.copyfile(path, folder / path.name)
        for name, text in export.made.items():
            (folder / name).write_text(text, encoding="utf-8")
        weights = MergedWeights(export.stored)
        for file in export.files:
            # No local variable has the tensors, which are freed before the next file is read.
            write_file(folder / file.name, _read_file(export, file, weights), file.metadata)
            on_written(file.bytes)


def _list_tensors(
    model: ModelConfig,
    layout: TensorLayout,
    dtype_of: Callable[[str, Parameter], torch.dtype],
    *,
    has_head: bool = False,
) -> list[_Piece]:
    """Return all tensors of a layout; a tied head has a copy if `has_head` or in InternVL's own."""
    pieces = []
    for parameter in parameters(model):
        sources = find_released(parameter, model, layout)
        for position, (name, shape) in enumerate(zip(sources.names, sources.shapes, strict=True)):
            pieces.append(_Piece(name, parameter, position, shape, dtype_of(name, parameter)))
    # InternVL's code unties every head regardless of config.json, and would initialize it randomly.
    if model.language.tied_head and (has_head or layout.is_original):
        embedding, head = embedding_parameter(model), head_name(layout)
        tied = next(piece for piece in pieces if piece.parameter == embedding)
        pieces.append(replace(tied, name=head, dtype=dtype_of(head, embedding)))
    return pieces


def _read_file(
    export: CheckpointExport, file: _File, weights: MergedWeights
) -> dict[str, torch.Tensor]:
    wanted = list(dict.fromkeys(piece.parameter for piece in file.pieces))
    tensors_of = {
        parameter: find_released(parameter, export.model, export.layout).arrangement.divide(values)
        for parameter, values in zip(wanted, weights.read_parameters(wanted), strict=True)
    }
    return {
        piece.name: tensors_of[piece.parameter][piece.position].to(piece.dtype)
        for piece in file.pieces
    }
