"""Safetensors files of a released checkpoint: reading by tensor, writing by file.

model-00001-of-00004.safetensors    ..., or a single model.safetensors
model.safetensors.index.json        file of each tensor; absent for a single file
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException

from megatron.vlm.checkpoint.identity import raise_interrupts, reason
from megatron.vlm.conversion.tensor_map import Shape, Sources
from omnibal.base.errors import UserError
from omnibal.base.files import read_json_model
from omnibal.families.folder import INDEX_FILE, ShardIndex

SINGLE_FILE = "model.safetensors"
_MAX_OPEN_FILES = 2  # a parameter's tensors may be in two neighbouring files
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MAX_NAMES = 5  # in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Header entry of a tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class ReleasedFiles:
    """Reader of the tensors in one checkpoint folder; keeps at most two files open."""

    def __init__(self, directory: Path, single_file: str = SINGLE_FILE) -> None:
        if not directory.is_dir():
            raise UserError(
                f"{directory}: no such folder; give that of a released checkpoint, with "
                "config.json and safetensors files"
            )
        self._directory = directory
        self._opened = lru_cache(_MAX_OPEN_FILES)(
            lambda file: safe_open(directory / file, framework="pt")
        )
        index = directory / INDEX_FILE
        self.index: dict[str, Any] | None = None
        """Content of the index, or None if a single file needs none."""
        is_single = (directory / single_file).is_file()
        self.unread = INDEX_FILE if is_single and index.is_file() else None
        """Index that is ignored, if any: Transformers prefers a single file too."""
        if not (is_single or index.is_file()):
            raise UserError(
                f"{directory}: holds neither {INDEX_FILE} nor {single_file}; only safetensors "
                "are read: save pickled weights again with `save_pretrained`"
            )
        self.tensors: Mapping[str, TensorInfo]
        if is_single:
            self.tensors = self._headers([single_file])
            return
        listed = read_json_model(ShardIndex, index, "fetch it again")
        self.index, file_of = listed.model_dump(exclude_unset=True), listed.weight_map
        files = sorted(set(file_of.values()))
        outside = [file for file in files if Path(file).name != file]
        if outside:
            raise UserError(
                f"{index}: names {outside[0]!r}; files must be in its folder: fetch it again"
            )
        self.tensors = self._headers(files)
        found = {name: info.file for name, info in self.tensors.items()}
        if found != file_of:
            wrong = sorted({name for name, _ in found.items() ^ file_of.items()})
            raise UserError(f"{index}: {shorten_list(wrong)} are in other files; fetch both again")

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, memory-mapped. UserError if its file is broken."""
        file = self.tensors[name].file
        try:
            return self._opened(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _make_error(self._directory / file, error) from error

    def read_parameter(self, sources: Sources) -> torch.Tensor:
        """Return a parameter made of its released tensors."""
        return sources.arrangement.join(list(map(self.read_tensor, sources.names)), sources.own)

    def header_metadata(self, file: str) -> dict[str, str] | None:
        return self._opened(file).metadata()

    def _headers(self, files: list[str]) -> dict[str, TensorInfo]:
        headers: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in _read_header(self._directory / file):
                if name in headers:
                    raise UserError(
                        f"{self._directory}: {name} is in both {headers[name].file} and {file}; "
                        "fetch the files again"
                    )
                headers[name] = info
        return headers


def _read_header(path: Path) -> Iterator[tuple[str, TensorInfo]]:
    if not path.is_file():
        raise UserError(f"{path}: no such file, but the index names it; fetch it again")
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise UserError(
                        f"{path}: {name} is of type {part.get_dtype()}; types must be "
                        f"{', '.join(_DTYPES)}: give an unquantized checkpoint"
                    )
                shape = tuple(part.get_shape())
                yield name, TensorInfo(file=path.name, shape=shape, dtype=dtype)
    except (SafetensorError, OSError) as error:
        raise _make_error(path, error) from error


def _make_error(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: is truncated or broken ({error}); fetch it again")


def check_tensors(
    directory: Path,
    expected: Iterable[tuple[str, Sources]],
    tensors: Mapping[str, TensorInfo],
    owner: str,
) -> None:
    """Raise UserError unless the tensors are exactly a model's.

    Args:
        expected: groups and their tensors. All tensors of a group have one type.
        owner: name of the model in errors.
    """
    shapes, groups = dict[str, Shape](), dict[str, list[str]]()
    for group, sources in expected:
        shapes |= zip(sources.names, sources.shapes, strict=True)
        groups.setdefault(group, []).extend(sources.names)
    missing = sorted(shapes.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - shapes.keys())
    if missing or unknown:
        flaws = [f"lacks {shorten_list(missing)}"] if missing else []
        flaws += [f"has {shorten_list(unknown)}, which the model does not"] if unknown else []
        raise UserError(f"{directory}: {' and '.join(flaws)}; the tensors must be those of {owner}")
    wrong = [
        f"{name} is {list(tensors[name].shape)} and not {list(shape)}"
        for name, shape in shapes.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise UserError(
            f"{directory}: config.json and the tensors disagree: {shorten_list(wrong)}; fetch both "
            "again"
        )
    mixed = sorted(
        group for group, names in groups.items() if len({tensors[name].dtype for name in names}) > 1
    )
    if mixed:
        raise UserError(
            f"{directory}: {shorten_list(mixed)} are stored in several types; save the checkpoint "
            "in one"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type in Transformers, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def shorten_list(names: list[str]) -> str:
    """Return text of at most five names, and the number of other names."""
    listed = ", ".join(names[:_MAX_NAMES])
    return listed if len(names) <= _MAX_NAMES else f"{listed} and {len(names) - _MAX_NAMES} more"


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Convert a failure while writing `target` to UserError."""
    try:
        yield
    except UserError:
        raise
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        raise_interrupts(error)
        raise UserError(
            f"{target}: cannot be written: {reason(error)}; free some space, or write elsewhere"
        ) from error


def write_file(path: Path, tensors: dict[str, torch.Tensor], metadata: dict | None) -> None:
    """Write one safetensors file; deterministic."""
    separate: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        # A tied head shares the embedding's memory, which the library refuses.
        values = tensor.contiguous()
        separate[name] = values.clone() if values.data_ptr() in seen else values
        seen.add(values.data_ptr())
    save_file(separate, path, metadata)
