"""Import of a released checkpoint as a run directory: weights, model and tokenizer.

RUN/iter_0000000/    weights, for `pretrain_vlm.py --load RUN --finetune`
RUN/model.toml       model, for `omnibal plan --model RUN/model.toml`
RUN/tokenizer/       tokenizer, for --tokenizer-model RUN/tokenizer
"""

import math
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.vlm.conversion.added_pieces import add_pieces
from megatron.vlm.conversion.own_weights import write_weights
from megatron.vlm.conversion.released_config import read_config
from megatron.vlm.conversion.released_files import (
    ReleasedFiles,
    TensorInfo,
    check_tensors,
    dtype_name,
    writing,
)
from megatron.vlm.conversion.slow_tokenizer import fast_tokenizer, is_slow
from megatron.vlm.conversion.tensor_map import (
    Layout,
    Parameter,
    Released,
    embedding_parameter,
    head_name,
    parameters,
    released,
)
from omnibal.base.errors import UserError
from omnibal.base.files import atomic_directory, check_room
from omnibal.data.chat import check_tokenizer
from omnibal.data.tokenizer import FAST_FILE, Tokenizer, open_tokenizer
from omnibal.model.adapters import AdapterConfig
from omnibal.model.config import ModelConfig, config_toml
from omnibal.model.units import LANGUAGE

MODEL_FILE = "model.toml"
TOKENIZER_FOLDER = "tokenizer"
_TOKENIZER_FILES = (
    "tokenizer.model",
    FAST_FILE,
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "tokenization_*.py",
)


class ImportSource(ABC):
    """Source of a run's directory: a released checkpoint, possibly with additions."""

    directory: Path
    model: ModelConfig
    adapters: AdapterConfig | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(
            math.prod(one.shape) * self.dtype(one).itemsize for one in parameters(self.model)
        )

    @abstractmethod
    def dtype(self, parameter: Parameter) -> torch.dtype:
        """Type to write the parameter in."""

    @abstractmethod
    def read(self, parameter: Parameter) -> torch.Tensor:
        """Read the values of the parameter."""

    @abstractmethod
    def file_order(self) -> list[Parameter]:
        """All parameters in file order, so that each file is read once."""

    @abstractmethod
    def found_tokenizer(self) -> "FoundTokenizer | None":
        """The tokenizer to copy, if any."""


@dataclass(frozen=True, kw_only=True)
class ReleasedCheckpoint(ImportSource):
    """A released checkpoint that is complete and supported."""

    directory: Path
    files: ReleasedFiles
    model: ModelConfig
    layout: Layout

    def dtype(self, parameter: Parameter) -> torch.dtype:
        return self.files.tensors[self._released(parameter).names[0]].dtype

    def read(self, parameter: Parameter) -> torch.Tensor:
        return self.files.joined(self._released(parameter), parameter)

    def found_tokenizer(self) -> "FoundTokenizer | None":
        """Return the tokenizer, checked against the model, or None if unusable."""
        folder = self.directory
        files = tuple(tokenizer_files(folder))
        if {"tokenizer.model", FAST_FILE} & {path.name for path in files}:
            check_tokenizer(self.model, open_tokenizer(folder))
            return FoundTokenizer(files=files, made=None)
        made = fast_tokenizer(folder) if is_slow(folder) else None
        if made is None:
            return None
        found = FoundTokenizer(files=files, made=made)
        tokenizer = found.opened()
        tokenizer.path = folder / FAST_FILE  # path for error messages
        check_tokenizer(self.model, tokenizer)
        return found

    def file_order(self) -> list[Parameter]:
        return sorted(
            parameters(self.model),
            key=lambda one: self.files.tensors[self._released(one).names[0]].file,
        )

    def _released(self, parameter: Parameter) -> Released:
        return released(parameter, self.model, self.layout)


def open_released(directory: Path) -> ReleasedCheckpoint:
    """Open a released checkpoint and check that all its tensors are known.

    Transformers 5 leaves a head untied if its tensor differs from the embedding, regardless of
    config.json, and saves such models; so in its layout the tensors decide.
    """
    files = ReleasedFiles(directory)
    model, layout = read_config(directory, files.tensors.keys())
    if layout.has_turned_experts and not _are_turned(model, layout, files.tensors):
        layout = Layout.QWEN3_VL_MOE_STACKED
    _check_tensors(directory, model, layout, files.tensors)
    checkpoint = ReleasedCheckpoint(directory=directory, files=files, model=model, layout=layout)
    head = head_name(layout)
    if model.language.tied_head and head in files.tensors:
        embedding = checkpoint.read(embedding_parameter(model))
        if not torch.equal(files.read(head), embedding):
            if layout.is_original:
                raise UserError(
                    f"{directory}: config.json ties the head to the token embedding, but {head} is "
                    "another matrix; set tie_word_embeddings to false there"
                )
            return replace(checkpoint, model=model.with_tower(LANGUAGE, tied_head=False))
    return checkpoint


def _are_turned(model: ModelConfig, layout: Layout, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether stacked experts are stored transposed, by the shape of a non-square matrix."""
    for parameter in parameters(model):
        if ".experts." not in parameter.key or len(set(parameter.shape[1:])) == 1:
            continue
        [name] = released(parameter, model, layout).names
        if name in tensors:
            return tensors[name].shape != parameter.shape
    return True


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files in a folder, and their companions."""
    return [
        path for name in _TOKENIZER_FILES for path in sorted(folder.glob(name)) if path.is_file()
    ]


def _check_tensors(
    directory: Path, model: ModelConfig, layout: Layout, tensors: Mapping[str, TensorInfo]
) -> None:
    expected = [(one, released(one, model, layout)) for one in parameters(model)]
    shapes = {
        name: (parameter.key, shape)
        for parameter, made_of in expected
        for name, shape in zip(made_of.names, made_of.shapes, strict=True)
    }
    head = head_name(layout)
    if model.language.tied_head and head in tensors:
        shapes[head] = (head, embedding_parameter(model).shape)
    check_tensors(directory, shapes, tensors, f"config.json's model in layout {layout}")


def import_checkpoint(
    source: ImportSource, run: Path, on_written: Callable[[int], None]
) -> list[str]:
    """Write the run's directory; return user notes. `on_written` gets each parameter's bytes."""
    tokenizer = source.found_tokenizer()
    check_room(run, source.bytes)

    def read(parameter: Parameter) -> torch.Tensor:
        values = source.read(parameter)
        on_written(values.nbytes)
        return values

    order = source.file_order()
    dtypes = {parameter.key: source.dtype(parameter) for parameter in order}
    with atomic_directory(run) as folder, writing(run):
        (folder / MODEL_FILE).write_text(config_toml(source.model), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.write(folder / TOKENIZER_FOLDER)
        write_weights(folder, source.model, dtypes, order, read, source.adapters)
    types = ", ".join(sorted(set(map(dtype_name, dtypes.values()))))
    lines = [f"wrote {run / MODEL_FILE} and weights of type {types}"]
    experts = source.model.language.kinds[0].experts
    if experts is not None and not experts.auxiliary_loss:
        lines.append(
            f"note: the model trains without an auxiliary loss that evens its experts out; for one "
            f"set auxiliary_loss of its experts in {run / MODEL_FILE}"
        )
    if tokenizer is not None:
        lines.append(f"wrote {run / TOKENIZER_FOLDER}: {', '.join(tokenizer.names)}")
    elif is_slow(source.directory):
        lines.append(
            f"{source.directory} has a tokenizer without {FAST_FILE}, and it is not Qwen2's; "
            "make one with Transformers' AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER), and pass it as --tokenizer-model"
        )
    else:
        lines.append(f"{source.directory} has no tokenizer; pass your own as --tokenizer-model")
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundTokenizer:
    """Files for the run's tokenizer folder."""

    files: tuple[Path, ...]
    made: str | None
    """Generated tokenizer.json, if the source lacks it."""
    added: tuple[str, ...] = ()
    """Tokens to add to the source's tokenizer."""

    @property
    def names(self) -> list[str]:
        made = [] if self.made is None else [FAST_FILE]
        return [path.name for path in self.files] + made

    def write(self, target: Path) -> None:
        target.mkdir()
        for path in self.files:
            shutil.copyfile(path, target / path.name)
        if self.made is not None:
            (target / FAST_FILE).write_text(self.made, encoding="utf-8")
        if self.added:
            add_pieces(target, self.added)

    def opened(self) -> Tokenizer:
        """Open the tokenizer as in the run's folder."""
        with tempfile.TemporaryDirectory() as temporary:
            self.write(Path(temporary) / TOKENIZER_FOLDER)
            return open_tokenizer(Path(temporary) / TOKENIZER_FOLDER)
