"""Import of a released checkpoint as a run directory: weights, model and tokenizer.

RUN/iter_0000000/    weights, for `pretrain_vlm.py --load RUN --finetune`
RUN/model.toml       model, for `omnibal plan --model RUN/model.toml`
RUN/tokenizer/       tokenizer, for --tokenizer-model RUN/tokenizer
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megatron.vlm.conversion.own_weights import write_weights
from megatron.vlm.conversion.released_config import read_config
from megatron.vlm.conversion.released_files import (
    ReleasedFiles,
    TensorInfo,
    check_tensors,
    dtype_name,
    writing,
)
from megatron.vlm.conversion.tensor_map import (
    HEAD,
    PREDICTION_PREFIX,
    Parameter,
    TensorLayout,
    embedding_parameter,
    find_released,
    head_name,
    parameters,
)
from megatron.vlm.conversion.tokenizer_files import (
    TOKENIZER_FOLDER,
    FoundTokenizer,
    find_tokenizer,
    is_slow,
)
from omnibal.base.errors import UserError
from omnibal.base.files import atomic_directory, check_room
from omnibal.data.tokenizer import FAST_FILE
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.config import ModelConfig, config_toml
from omnibal.model.units import LANGUAGE

MODEL_FILE = "model.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Addition:
    """A parameter that a released checkpoint lacks or has in another shape."""

    parameter: Parameter
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ReleasedCheckpoint:
    """A complete and supported released checkpoint, with additions if any."""

    directory: Path
    files: ReleasedFiles
    model: ModelConfig
    layout: TensorLayout
    # By parameter name: of adapters, or of an audio encoder with embedding and head of new words.
    additions: Mapping[str, Addition] = field(default_factory=dict)
    adapters: AdapterConfig | None = None
    tokenizer: FoundTokenizer | None = None  # with added tokens; None for the directory's

    @property
    def bytes(self) -> int:
        """Return the bytes of all parameters, without adapters."""
        return sum(
            math.prod(parameter.shape) * self.dtype(parameter).itemsize
            for parameter in parameters(self.model)
        )

    def dtype(self, parameter: Parameter) -> torch.dtype:
        added = self.additions.get(parameter.name)
        return self._first_tensor(parameter).dtype if added is None else added.dtype

    def read_parameter(self, parameter: Parameter) -> torch.Tensor:
        added = self.additions.get(parameter.name)
        if added is not None:
            return added.read()
        return self.files.read_parameter(find_released(parameter, self.model, self.layout))

    def file_order(self) -> list[Parameter]:
        """Return additions, then all others in file order, so that each file is read once."""
        added = {name: addition.parameter for name, addition in self.additions.items()}
        stored = (parameter for parameter in parameters(self.model) if parameter.name not in added)
        ordered = sorted(stored, key=lambda parameter: self._first_tensor(parameter).file)
        return [*added.values(), *ordered]

    def find_tokenizer(self) -> FoundTokenizer | None:
        """Return the tokenizer to copy, if any."""
        return self.tokenizer or find_tokenizer(self.directory, self.model)

    def _first_tensor(self, parameter: Parameter) -> TensorInfo:
        return self.files.tensors[find_released(parameter, self.model, self.layout).names[0]]


def open_released(directory: Path) -> ReleasedCheckpoint:
    """Open a released checkpoint. UserError unless its tensors are exactly the model's.

    Without `mtp_num_hidden_layers` or its tensors, which Transformers does not save, the model has
    no prediction layer.
    """
    files = ReleasedFiles(directory)
    model, layout = read_config(directory, files.tensors.keys())
    predicting = {name for name in files.tensors if name.startswith(PREDICTION_PREFIX)}
    if not predicting:
        model = model.with_tower(LANGUAGE, prediction_layers=0)
    if layout.experts == "transposed" and not _are_transposed(model, layout, files.tensors):
        layout = TensorLayout.QWEN3_VL_MOE_STACKED
    head, expected = head_name(layout), list(parameters(model))
    has_copy = model.language.tied_head and head in files.tensors
    if has_copy:
        expected.append(replace(embedding_parameter(model), key=HEAD))
    left_out = set() if model.language.prediction_layers or not layout.is_hybrid else predicting
    tensors = {name: info for name, info in files.tensors.items() if name not in left_out}
    sources = [(own.key, find_released(own, model, layout)) for own in expected]
    check_tensors(directory, sources, tensors, f"config.json's model in layout {layout}")
    checkpoint = ReleasedCheckpoint(directory=directory, files=files, model=model, layout=layout)
    if has_copy:
        embedding = checkpoint.read_parameter(embedding_parameter(model))
        if not torch.equal(files.read_tensor(head), embedding):
            if layout.is_original:
                raise UserError(
                    f"{directory}: config.json ties the head to the token embedding, but {head} is "
                    "another matrix; set tie_word_embeddings to false there"
                )
            # Transformers 5 unties such a head regardless of config.json, and saves such models.
            return replace(checkpoint, model=model.with_tower(LANGUAGE, tied_head=False))
    return checkpoint


def _are_transposed(
    model: ModelConfig, layout: TensorLayout, tensors: Mapping[str, TensorInfo]
) -> bool:
    """Return whether stacked experts are transposed, or have only square matrices."""
    for parameter in parameters(model):
        if ".experts." not in parameter.key or len(set(parameter.shape[1:])) == 1:
            continue
        [name] = find_released(parameter, model, layout).names
        if name in tensors:
            return tensors[name].shape != parameter.shape
    return True


def import_checkpoint(
    source: ReleasedCheckpoint, run: Path, on_written: Callable[[int], None]
) -> list[str]:
    """Write the run's directory; return lines to print. `on_written` gets a parameter's bytes."""
    tokenizer = source.find_tokenizer()
    check_room(run, source.bytes)

    def read_and_count(parameter: Parameter) -> torch.Tensor:
        values = source.read_parameter(parameter)
        on_written(values.nbytes)
        return values

    order = source.file_order()
    dtypes = {parameter.key: source.dtype(parameter) for parameter in order}
    with atomic_directory(run) as folder, writing(run):
        (folder / MODEL_FILE).write_text(config_toml(source.model), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.write(folder / TOKENIZER_FOLDER)
        write_weights(folder, source.model, dtypes, order, read_and_count, source.adapters)
    types = ", ".join(sorted(set(map(dtype_name, dtypes.values()))))
    lines = [f"wrote {run / MODEL_FILE} and weights of type {types}"]
    experts = source.model.language.kinds[0].experts
    if experts is not None and not experts.auxiliary_loss:
        lines.append(
            "note: experts train without an auxiliary loss for load balance; set auxiliary_loss in "
            f"{run / MODEL_FILE} to add one"
        )
    if tokenizer is not None:
        lines.append(f"wrote {run / TOKENIZER_FOLDER}: {', '.join(tokenizer.names)}")
    elif is_slow(source.directory):
        lines.append(
            f"{source.directory} has a tokenizer without {FAST_FILE}, and it is not Qwen2's; "
            "make one with Transformers' AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER), and give it as --tokenizer-model"
        )
    else:
        lines.append(f"{source.directory} has no tokenizer; give your own as --tokenizer-model")
    return lines
