"""Import of Whisper's encoder from a Transformers checkpoint, and export into a copy of it.

An import adds the encoder to a released checkpoint. Its last norm becomes the first module of the
audio projector. The projector's linears and the embeddings of new audio tokens are initialized as
in training. Positions are sinusoids, which are computed and not stored.

Shapes: W new words, E embedding size.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from pydantic import PositiveInt

from megatron.vlm.checkpoint.identity import CheckpointIdentity, differences
from megatron.vlm.conversion.importing import Addition, ReleasedCheckpoint
from megatron.vlm.conversion.own_weights import StoredWeights
from megatron.vlm.conversion.released_files import ReleasedFiles, check_tensors, write_file, writing
from megatron.vlm.conversion.tensor_map import (
    HEAD,
    WORD_TABLE,
    Parameter,
    Shape,
    Sources,
    embedding_parameter,
    encoder_parameters,
    parameters,
    whisper_tensors,
)
from megatron.vlm.model.embeddings import sinusoids
from megatron.vlm.model.initialize import initial_values
from omnibal.base.errors import UserError
from omnibal.base.files import atomic_directory, check_room
from omnibal.data.tokenizer import AUDIO_CONTEXT, AUDIO_END, AUDIO_START
from omnibal.families.folder import CONFIG_FILE, config_errors, read_config_file
from omnibal.families.hub_table import HubTable, as_table
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ClipsEncoder

_MODEL_TYPE = "whisper"
_POSITIONS = "embed_positions.weight"
# Of WhisperForConditionalGeneration, WhisperModel and WhisperEncoder.
_PREFIXES = ("model.encoder.", "encoder.", "")
_WEIGHT_SUFFIX = ".safetensors"


class WhisperTable(HubTable):
    """Entries of Whisper's config.json that its encoder uses."""

    d_model: PositiveInt
    encoder_layers: PositiveInt
    encoder_attention_heads: PositiveInt
    encoder_ffn_dim: PositiveInt
    num_mel_bins: PositiveInt
    max_source_positions: PositiveInt


def is_whisper(directory: Path) -> bool:
    """Return whether a folder's config.json is Whisper's."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return False
    return read_config_file(path).get("model_type") == _MODEL_TYPE


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasedAudio:
    """A released Whisper with a complete and supported encoder."""

    directory: Path
    files: ReleasedFiles
    prefix: str  # of the names of the encoder's tensors
    encoder: ClipsEncoder

    def find_sources(self, parameter: Parameter) -> Sources | None:
        """Return the tensors of a parameter, or None if the checkpoint lacks it."""
        return whisper_tensors(parameter, self.encoder, self.prefix)


def open_audio(directory: Path, model: ModelConfig, positions_per_token: int) -> ReleasedAudio:
    """Open a released Whisper. UserError unless config.json describes its encoder's tensors."""
    files = ReleasedFiles(directory)
    encoder = _read_encoder(directory / CONFIG_FILE, positions_per_token)
    names = files.tensors.keys()
    prefix = next((root for root in _PREFIXES if f"{root}conv1.weight" in names), _PREFIXES[0])
    audio = ReleasedAudio(directory=directory, files=files, prefix=prefix, encoder=encoder)
    _check_encoder_tensors(audio, model)
    return audio


def _read_encoder(path: Path, positions_per_token: int) -> ClipsEncoder:
    if not is_whisper(path.parent):
        raise UserError(f"{path}: model_type must be {_MODEL_TYPE!r}; give a Whisper checkpoint")
    with config_errors(path):
        table = as_table(WhisperTable, read_config_file(path), str(path), lenient=True)
        frames = 2 * table.max_source_positions
        return ClipsEncoder(**table.parts, frames=frames, positions_per_token=positions_per_token)


def _check_encoder_tensors(audio: ReleasedAudio, model: ModelConfig) -> None:
    own = encoder_parameters(_add_encoder(model, audio.encoder), "audio")
    found = filter(None, map(audio.find_sources, own))
    expected = [("the encoder's tensors", sources) for sources in found]
    positions = f"{audio.prefix}{_POSITIONS}"
    tensors = {
        name: info
        for name, info in audio.files.tensors.items()
        if name.startswith(audio.prefix) and name != positions
    }
    check_tensors(audio.directory, expected, tensors, f"{CONFIG_FILE}'s encoder")
    stored = audio.files.tensors.get(positions)
    if stored is None:
        return
    sines = sinusoids(audio.encoder.positions_per_item, audio.encoder.hidden_size)
    tolerance = max(1e-3, torch.finfo(stored.dtype).eps)  # stored in the checkpoint's type
    if stored.shape != sines.shape or not torch.allclose(
        audio.files.read_tensor(positions).float(), sines, rtol=0, atol=tolerance
    ):
        raise UserError(
            f"{audio.directory}: {positions} are not Whisper's sinusoids, which are computed here: "
            "trained positions are not supported"
        )


def add_audio(
    released: ReleasedCheckpoint, directory: Path, positions_per_token: int, seed: int
) -> ReleasedCheckpoint:
    """Return the checkpoint with Whisper's encoder added; `seed` draws other new weights."""
    audio = open_audio(directory, released.model, positions_per_token)
    tokenizer = released.find_tokenizer()
    if tokenizer is None:
        raise UserError(
            f"{released.directory} has no tokenizer to add audio tokens to; put the model's own "
            "there"
        )
    model = _add_encoder(released.model, audio.encoder)
    opened = tokenizer.open()
    needed = (AUDIO_START, AUDIO_CONTEXT, AUDIO_END)
    added = tuple(piece for piece in needed if opened.id_of(piece) is None)
    words = max(model.language.vocab_size, opened.vocab_size + len(added))
    model = model.with_tower("language", vocab_size=words)
    additions = {
        addition.parameter.name: addition
        for addition in _list_audio_additions(released, audio, model, seed)
    }
    return replace(
        released,
        model=model.model_copy(update={"name": f"{model.name}-whisper"}),
        additions=additions,
        tokenizer=replace(tokenizer, added=added),
    )


def _list_audio_additions(
    released: ReleasedCheckpoint, audio: ReleasedAudio, model: ModelConfig, seed: int
) -> Iterator[Addition]:
    """Yield all audio parameters, and embedding and head with rows of new tokens."""

    def draw(name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return initial_values(model, name, shape, seed).to(dtype)

    def read_with_new_rows(old: Parameter, rows: int, dtype: torch.dtype) -> torch.Tensor:
        new_WE = draw(old.name, (rows, old.shape[1]), dtype)
        return torch.cat([released.read_parameter(old), new_WE])

    default = released.dtype(embedding_parameter(model))
    for parameter in encoder_parameters(model, "audio"):
        sources, dtype = audio.find_sources(parameter), default
        read = partial(draw, parameter.name, parameter.shape, default)
        if sources is not None:
            dtype = audio.files.tensors[sources.names[0]].dtype
            read = partial(audio.files.read_parameter, sources)
        yield Addition(parameter=parameter, dtype=dtype, read=read)
    words = model.language.vocab_size
    rows = words - released.model.language.vocab_size
    for old in parameters(released.model):
        if rows and old.key in (WORD_TABLE, HEAD):
            dtype = released.dtype(old)
            yield Addition(
                parameter=replace(old, shape=(words, old.shape[1])),
                dtype=dtype,
                read=partial(read_with_new_rows, old, rows, dtype),
            )


def _add_encoder(model: ModelConfig, encoder: ClipsEncoder) -> ModelConfig:
    return model.model_copy(update={"encoders": model.encoders | {"audio": encoder}})


def export_audio(
    stored: CheckpointIdentity, like: ReleasedAudio, target: Path, on_written: Callable[[int], None]
) -> None:
    """Write a copy of `like`, decoder included, with the stored encoder; report bytes by file."""
    weights, tensors = StoredWeights(stored.path), like.files.tensors
    origins: dict[str, tuple[Parameter, Sources, int]] = {}
    for parameter in encoder_parameters(stored.model, "audio"):
        sources = like.find_sources(parameter)
        if sources is not None:
            origins |= {name: (parameter, sources, i) for i, name in enumerate(sources.names)}

    def read_tensor(name: str) -> torch.Tensor:
        if name not in origins:
            return like.files.read_tensor(name)
        parameter, sources, place = origins[name]
        [values] = weights.read_parameters([parameter])
        return sources.arrangement.divide(values)[place].to(tensors[name].dtype)

    others = [path for path in sorted(like.directory.iterdir()) if path.is_file()]
    check_room(target, sum(path.stat().st_size for path in others))
    with atomic_directory(target) as folder, writing(target):
        for path in others:
            if path.suffix != _WEIGHT_SUFFIX:
                shutil.copyfile(path, folder / path.name)
        for file in sorted({info.file for info in tensors.values()}):
            names = [name for name, info in tensors.items() if info.file == file]
            values_of_file = {name: read_tensor(name) for name in names}
            write_file(folder / file, values_of_file, like.files.header_metadata(file))
            on_written(sum(tensor.nbytes for tensor in values_of_file.values()))


def check_same_encoder(stored: CheckpointIdentity, like: ReleasedAudio) -> None:
    """Raise UserError unless the stored audio encoder has the released encoder's sizes."""
    unreleased = {"positions_per_token", "layer_scale_init"}
    own, there = (
        encoder.model_dump(exclude=unreleased) for encoder in (stored.model.audio, like.encoder)
    )
    different = differences(own, there, f"in {like.directory / CONFIG_FILE}")
    if different:
        raise UserError(
            f"{stored.path}: has another audio encoder than {like.directory}: "
            f"{'; '.join(different)}; name the Whisper that it was made from"
        )
