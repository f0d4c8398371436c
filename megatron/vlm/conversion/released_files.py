"""A released checkpoint's safetensors files: read a tensor at a time, written a file at a time.

model-00001-of-00004.safetensors    ..., or a single model.safetensors
model.safetensors.index.json        file of each tensor; absent for a single file
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException

from megatron.vlm.checkpoint.identity import raise_no_failure, reason
from megatron.vlm.conversion.tensor_map import Parameter, Released, Shape
from omnibal.base.errors import UserError
from omnibal.base.files import read_json_model

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_OPEN_FILES = 2
"""Maximum open files: a parameter's tensors may be in two neighbouring files."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LISTED = 5  # max names in a message


class _Index(BaseModel, extra="allow"):
    metadata: dict[str, Any] | None = None
    weight_map: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Header entry of a tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class ReleasedFiles:
    """The tensors of one checkpoint folder; keeps at most two files open."""

    def __init__(self, directory: Path, single_file: str = SINGLE_FILE) -> None:
        if not directory.is_dir():
            raise UserError(
                f"{directory}: no such folder; pass that of a released checkpoint, which holds "
                f"config.json and safetensors files"
            )
        self._directory = directory
        self._opened = lru_cache(_OPEN_FILES)(
            lambda file: safe_open(directory / file, framework="pt")
        )
        index = directory / INDEX_FILE
        self.index: dict[str, Any] | None = None
        """Content of the index. None if a single file needs none."""
        # As Transformers: a whole file goes before an index.
        is_whole = (directory / single_file).is_file()
        self.unread = INDEX_FILE if is_whole and index.is_file() else None
        """File of the folder that names weights which are not read. None if there is none."""
        if index.is_file() and not is_whole:
            listed = read_json_model(_Index, index, "fetch it again")
            self.index = listed.model_dump(exclude_unset=True)
            for name, file in listed.weight_map.items():
                if Path(file).name != file:
                    raise UserError(
                        f"{index}: has {name} in {file!r}; a tensor must be in a file of the "
                        "index's own folder: fetch the index again"
                    )
            tensors = self._headers(sorted(set(listed.weight_map.values())))
            _check_index(index, listed.weight_map, tensors)
        else:
            if not is_whole:
                raise UserError(
                    f"{directory}: holds neither {INDEX_FILE} nor {single_file}; only safetensors "
                    "are read: save pickled weights anew with `save_pretrained`"
                )
            tensors = self._headers([single_file])
        self.tensors: Mapping[str, TensorInfo] = tensors

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor, memory-mapped."""
        file = self.tensors[name].file
        try:
            return self._opened(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _broken(self._directory / file, error) from error

    def joined(self, made_of: Released, parameter: Parameter) -> torch.Tensor:
        """Read a parameter's tensors and join them."""
        return made_of.arrangement.join(list(map(self.read, made_of.names)), parameter.shape)

    def header_metadata(self, file: str) -> dict[str, str] | None:
        return self._opened(file).metadata()

    def _headers(self, files: list[str]) -> dict[str, TensorInfo]:
        headers: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in _header(self._directory / file):
                if name in headers:
                    raise UserError(
                        f"{self._directory}: {name} is in both {headers[name].file} and {file}; "
                        "fetch the files again"
                    )
                headers[name] = info
        return headers


def _header(path: Path) -> Iterator[tuple[str, TensorInfo]]:
    if not path.is_file():
        raise UserError(f"{path}: no such file, but the index names it; fetch it again")
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise UserError(
                        f"{path}: {name} is of type {part.get_dtype()}; it must be one of "
                        f"{', '.join(_DTYPES)}, so pass an unquantized checkpoint"
                    )
                shape = tuple(part.get_shape())
                yield name, TensorInfo(file=path.name, shape=shape, dtype=dtype)
    except (SafetensorError, OSError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: is truncated or broken ({error}); fetch it again")


def _check_index(index: Path, listed: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    unlisted = sorted(tensors.keys() - listed.keys())
    if unlisted:
        raise UserError(
            f"{index}: does not name {shorten_list(unlisted)}, which the files hold; fetch it again"
        )
    for name, file in listed.items():
        if name not in tensors or tensors[name].file != file:
            raise UserError(f"{index}: {name} is not in {file}; fetch both again")


def check_tensors(
    directory: Path,
    expected: Mapping[str, tuple[str, Shape]],
    tensors: Mapping[str, TensorInfo],
    whose: str,
) -> None:
    """Raise UserError unless the tensors are exactly a model's.

    `expected` has the part (of uniform type) and shape by name; `whose` names the model in errors.
    """
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        flaws = [f"lacks {shorten_list(missing)}"] if missing else []
        flaws += [f"has {shorten_list(unknown)}, which the model does not"] if unknown else []
        raise UserError(f"{directory}: {' and '.join(flaws)}; the tensors must be those of {whose}")
    wrong = [
        f"{name} is {list(tensors[name].shape)} and not {list(shape)}"
        for name, (_, shape) in expected.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise UserError(
            f"{directory}: config.json and the tensors disagree: {shorten_list(wrong)}; fetch both "
            "again"
        )
    dtypes: dict[str, set[torch.dtype]] = {}
    for name, (whole, _) in expected.items():
        dtypes.setdefault(whole, set()).add(tensors[name].dtype)
    mixed = sorted(whole for whole, found_types in dtypes.items() if len(found_types) > 1)
    if mixed:
        raise UserError(
            f"{directory}: {shorten_list(mixed)} are stored in several types; save the checkpoint "
            "in one"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a type in Transformers, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def shorten_list(names: list[str]) -> str:
    """Join the first names and the number of further names."""
    listed = ", ".join(names[:_LISTED])
    return listed if len(names) <= _LISTED else f"{listed} and {len(names) - _LISTED} more"


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Convert any failure while writing `target` to one UserError."""
    try:
        yield
    except UserError:
        raise
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        raise_no_failure(error)
        raise UserError(
            f"{target}: cannot be written: {reason(error)}; see that there is room, or write "
            "elsewhere"
        ) from error


def write_file(path: Path, tensors: dict[str, torch.Tensor], metadata: dict | None) -> None:
    """Write one safetensors file; deterministic."""
    apart: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        # A tied head shares the embedding's memory, and the library refuses shared memory.
        whole = tensor.contiguous()
        apart[name] = whole.clone() if whole.data_ptr() in seen else whole
        seen.add(whole.data_ptr())
    save_file(apart, path, metadata)
