"""Import of Whisper's encoder from a checkpoint of Transformers, and export into a copy of it.

An import adds it to a released checkpoint, and initializes the audio projector's linears and the
embeddings of new audio tokens as the trainer does.

Its last norm is the first module of the audio projector. The rest of the projector is in no
released checkpoint. Its positions are sinusoids, computed and not stored.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, PositiveInt, ValidationError

from megatron.vlm.checkpoint.identity import CheckpointIdentity, differences
from megatron.vlm.conversion.importing import Addition, ReleasedCheckpoint
from megatron.vlm.conversion.own_weights import StoredWeights
from megatron.vlm.conversion.released_files import (
    ReleasedFiles,
    TensorInfo,
    check_tensors,
    write_file,
    writing,
)
from megatron.vlm.conversion.tensor_map import (
    Parameter,
    Released,
    Shape,
    audio_parameters,
    embedding_parameter,
    parameters,
    whisper_tensors,
)
from megatron.vlm.model.embeddings import sinusoids
from megatron.vlm.model.initialize import initial_values
from omnibal.base.errors import UserError
from omnibal.base.files import atomic_directory, check_room, complaint, read_json_model
from omnibal.data.tokenizer import AUDIO_CONTEXT, AUDIO_END, AUDIO_START
from omnibal.families.folder import CONFIG_FILE
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ClipsEncoder

_MODEL_TYPE = "whisper"
_POSITIONS = "embed_positions.weight"
_PREFIXES = ("model.encoder.", "encoder.", "")
"""Tensor prefixes: WhisperForConditionalGeneration, WhisperModel, WhisperEncoder alone."""
_NORM_EPS = 1e-5  # torch's default; absent in Whisper's config
_WEIGHT_SUFFIX = ".safetensors"


class _Config(BaseModel):
    """Entries of Whisper's config.json used by its encoder."""

    model_type: str = ""
    d_model: PositiveInt
    encoder_layers: PositiveInt
    encoder_attention_heads: PositiveInt
    encoder_ffn_dim: PositiveInt
    num_mel_bins: PositiveInt
    max_source_positions: PositiveInt
    activation_function: str = "gelu"


def is_whisper(directory: Path) -> bool:
    """Whether a folder's config.json is Whisper's."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return False
    given = read_json_model(dict[str, Any], path, "fetch it again")
    return given.get("model_type") == _MODEL_TYPE


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasedAudio:
    """A released Whisper with a complete and supported encoder."""

    directory: Path
    files: ReleasedFiles
    prefix: str
    encoder: ClipsEncoder

    def tensors_of(self, parameter: Parameter) -> Released | None:
        """The tensors of a parameter. None if not in the checkpoint."""
        return whisper_tensors(parameter, self.encoder, self.prefix)

    def first_tensor(self, parameter: Parameter) -> TensorInfo | None:
        made_of = self.tensors_of(parameter)
        return None if made_of is None else self.files.tensors[made_of.names[0]]

    def read(self, parameter: Parameter) -> torch.Tensor:
        """Read the values of a parameter that is in the checkpoint."""
        made_of = self.tensors_of(parameter)
        assert made_of is not None
        return self.files.joined(made_of, parameter)


def open_audio(directory: Path, model: ModelConfig, positions_per_token: int) -> ReleasedAudio:
    """Open a released Whisper, and check its encoder for `model`."""
    files = ReleasedFiles(directory)
    encoder = _encoder(directory / CONFIG_FILE, positions_per_token)
    names = files.tensors.keys()
    prefix = next((root for root in _PREFIXES if f"{root}conv1.weight" in names), _PREFIXES[0])
    audio = ReleasedAudio(directory=directory, files=files, prefix=prefix, encoder=encoder)
    _check_tensors(audio, model)
    _check_positions(audio)
    return audio


def _encoder(path: Path, positions_per_token: int) -> ClipsEncoder:
    config = read_json_model(_Config, path, "it must be the config.json of a Whisper checkpoint")
    if config.model_type != _MODEL_TYPE or config.activation_function != "gelu":
        raise UserError(
            f"{path}: has model_type {config.model_type!r} and activation_function "
            f"{config.activation_function!r}; both must be Whisper's, {_MODEL_TYPE!r} and 'gelu'"
        )
    try:
        return ClipsEncoder(
            layers=config.encoder_layers,
            hidden_size=config.d_model,
            heads=config.encoder_attention_heads,
            ffn_hidden_size=config.encoder_ffn_dim,
            normalization="LayerNorm",
            norm_eps=_NORM_EPS,
            qkv_bias=True,
            qk_norm=False,
            frames=2 * config.max_source_positions,
            mel_bins=config.num_mel_bins,
            positions_per_token=positions_per_token,
        )
    except ValidationError as error:
        [first, *_] = error.errors()
        raise UserError(
            f"{path}: {complaint(first)}; give other --positions-per-token, or another Whisper"
        ) from error


def _check_tensors(audio: ReleasedAudio, model: ModelConfig) -> None:
    made = map(audio.tensors_of, audio_parameters(_with_audio(model, audio.encoder)))
    expected = {
        name: ("the encoder's tensors", shape)
        for made_of in made
        if made_of is not None
        for name, shape in zip(made_of.names, made_of.shapes, strict=True)
    }
    positions = f"{audio.prefix}{_POSITIONS}"
    tensors = {
        name: info
        for name, info in audio.files.tensors.items()
        if name.startswith(audio.prefix) and name != positions
    }
    check_tensors(audio.directory, expected, tensors, f"{CONFIG_FILE}'s encoder")


def _check_positions(audio: ReleasedAudio) -> None:
    """Raise UserError if stored positions differ from sinusoids."""
    name = f"{audio.prefix}{_POSITIONS}"
    stored: TensorInfo | None = audio.files.tensors.get(name)
    if stored is None:
        return
    tower = audio.encoder
    expected = sinusoids(tower.positions_per_item, tower.hidden_size)
    tolerance = max(1e-3, torch.finfo(stored.dtype).eps)
    if stored.shape != expected.shape or not torch.allclose(
        audio.files.read(name).float(), expected, rtol=0, atol=tolerance
    ):
        raise UserError(
            f"{audio.directory}: {name} are not Whisper's sinusoids, which are computed here; a "
            "model with trained positions is not supported"
        )


def add_audio(
    released: ReleasedCheckpoint, directory: Path, positions_per_token: int, seed: int
) -> ReleasedCheckpoint:
    """Add a released Whisper as an encoder of a released checkpoint."""
    audio = open_audio(directory, released.model, positions_per_token)
    tokenizer = released.found_tokenizer()
    if tokenizer is None:
        raise UserError(
            f"{released.directory} has no tokenizer, to which the words for recordings would be "
            "added; put the model's own there"
        )
    model = _with_audio(released.model, audio.encoder)
    known = tokenizer.opened()
    needed = (AUDIO_START, AUDIO_CONTEXT, AUDIO_END)
    added = tuple(piece for piece in needed if known.id_of(piece) is None)
    words = max(model.language.vocab_size, known.vocab_size + len(added))
    model = model.with_tower("language", vocab_size=words)
    additions = {
        addition.parameter.name: addition for addition in _additions(released, audio, model, seed)
    }
    return replace(
        released,
        model=model.model_copy(update={"name": f"{model.name}-whisper"}),
        additions=additions,
        tokenizer=replace(tokenizer, added=added),
    )


def _additions(
    released: ReleasedCheckpoint, audio: ReleasedAudio, model: ModelConfig, seed: int
) -> Iterator[Addition]:
    """Yield Whisper's parameters, other audio parameters, and matrices with rows of new tokens."""

    def draw(name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return initial_values(model, name, shape, seed).to(dtype)

    def read_with_new_rows(old: Parameter, rows: int, dtype: torch.dtype) -> torch.Tensor:
        new_WE = draw(old.name, (rows, old.shape[1]), dtype)
        return torch.cat([released.read(old), new_WE])

    default = released.dtype(embedding_parameter(model))
    for parameter in audio_parameters(model):
        first = audio.first_tensor(parameter)
        read = partial(draw, parameter.name, parameter.shape, default)
        if first is not None:
            read = partial(audio.read, parameter)
        yield Addition(
            parameter=parameter, dtype=default if first is None else first.dtype, read=read
        )
    words = model.language.vocab_size
    rows = words - released.model.language.vocab_size
    for old in parameters(released.model):
        if rows and old.key in ("embedding.word_embeddings.weight", "head.weight"):
            dtype = released.dtype(old)
            yield Addition(
                parameter=replace(old, shape=(words, old.shape[1])),
                dtype=dtype,
                read=partial(read_with_new_rows, old, rows, dtype),
            )


def _with_audio(model: ModelConfig, encoder: ClipsEncoder) -> ModelConfig:
    """Return the model with an audio encoder after its others."""
    return model.model_copy(update={"encoders": model.encoders | {"audio": encoder}})


def export_audio(
    stored: CheckpointIdentity, like: ReleasedAudio, target: Path, on_written: Callable[[int], None]
) -> None:
    """Write a copy of a released Whisper, decoder included, with the stored encoder weights."""
    weights, tensors = StoredWeights(stored.path), like.files.tensors
    makers: dict[str, tuple[Parameter, Released, int]] = {}
    for parameter in audio_parameters(stored.model):
        made_of = like.tensors_of(parameter)
        if made_of is not None:
            makers |= {name: (parameter, made_of, k) for k, name in enumerate(made_of.names)}

    def value_of(name: str) -> torch.Tensor:
        if name not in makers:
            return like.files.read(name)
        parameter, made_of, place = makers[name]
        [values] = weights.read([parameter])
        return made_of.arrangement.split(values)[place].to(tensors[name].dtype)

    others = [path for path in sorted(like.directory.iterdir()) if path.is_file()]
    check_room(target, sum(path.stat().st_size for path in others))
    with atomic_directory(target) as folder, writing(target):
        for path in others:
            if path.suffix != _WEIGHT_SUFFIX:
                shutil.copyfile(path, folder / path.name)
        for file in sorted({info.file for info in tensors.values()}):
            held = {name: value_of(name) for name, info in tensors.items() if info.file == file}
            write_file(folder / file, held, like.files.header_metadata(file))
            on_written(sum(tensor.nbytes for tensor in held.values()))


def check_same_encoder(stored: CheckpointIdentity, like: ReleasedAudio) -> None:
    """Raise UserError unless the stored audio encoder has the released encoder's sizes."""
    other = {"positions_per_token", "layer_scale_init"}
    own, there = (
        encoder.model_dump(exclude=other) for encoder in (stored.model.audio, like.encoder)
    )
    different = differences(own, there, f"in {like.directory / CONFIG_FILE}")
    if different:
        raise UserError(
            f"{stored.path}: has another audio encoder than {like.directory}: "
            f"{'; '.join(different)}; name the Whisper that it was made from"
        )
