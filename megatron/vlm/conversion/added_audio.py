"""Import of a released checkpoint with a released Whisper as its audio encoder.

Initialized as by the trainer: the audio projector's linears, and embeddings of new audio tokens.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.vlm.conversion.importing import FoundTokenizer, ImportSource, ReleasedCheckpoint
from megatron.vlm.conversion.tensor_map import Parameter, audio_parameters, embedding_parameter
from megatron.vlm.conversion.whisper import ReleasedAudio, open_audio, with_audio
from megatron.vlm.model.initialize import initial_values
from omnibal.base.errors import UserError
from omnibal.data.tokenizer import AUDIO_CONTEXT, AUDIO_END, AUDIO_START
from omnibal.model.config import ModelConfig

_OF_WORDS = ("embedding.word_embeddings.weight", "head.weight")


@dataclass(frozen=True, kw_only=True)
class CheckpointWithAudio(ImportSource):
    """A released checkpoint with Whisper's encoder added."""

    directory: Path
    released: ReleasedCheckpoint
    audio: ReleasedAudio
    model: ModelConfig
    tokenizer: FoundTokenizer
    seed: int

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """Type to write: that of the parameter's tensors, or of the embedding."""
        if not self._is_audio(parameter):
            return self.released.dtype(parameter)
        first = self.audio.first_tensor(parameter)
        return first.dtype if first else self.released.dtype(embedding_parameter(self.model))

    def read(self, parameter: Parameter) -> torch.Tensor:
        if not self._is_audio(parameter):
            return self._with_new_words(parameter)
        if self.audio.tensors_of(parameter) is not None:
            return self.audio.read(parameter)
        return self._drawn(parameter, parameter.shape)

    def file_order(self) -> list[Parameter]:
        firsts = [(each, self.audio.first_tensor(each)) for each in audio_parameters(self.model)]
        heard = [each for each, _ in sorted(firsts, key=lambda one: one[1].file if one[1] else "")]
        return [*heard, *(self._in_model(one) for one in self.released.file_order())]

    def found_tokenizer(self) -> FoundTokenizer:
        return self.tokenizer

    def _is_audio(self, parameter: Parameter) -> bool:
        return parameter.key.startswith("audio")

    def _in_model(self, parameter: Parameter) -> Parameter:
        """The parameter with the model's vocabulary size."""
        if parameter.key not in _OF_WORDS:
            return parameter
        return replace(parameter, shape=(self.model.language.vocab_size, parameter.shape[1]))

    def _with_new_words(self, parameter: Parameter) -> torch.Tensor:
        known = self.released.model.language.vocab_size
        new = self.model.language.vocab_size - known
        if parameter.key not in _OF_WORDS or not new:
            return self.released.read(parameter)
        width = parameter.shape[1]
        old_WE = self.released.read(replace(parameter, shape=(known, width)))
        return torch.cat([old_WE, self._drawn(parameter, (new, width))])

    def _drawn(self, parameter: Parameter, shape: tuple[int, ...]) -> torch.Tensor:
        values = initial_values(self.model, parameter.name, shape, self.seed)
        return values.to(self.dtype(parameter))


def add_audio(
    released: ReleasedCheckpoint, directory: Path, positions_per_token: int, seed: int
) -> CheckpointWithAudio:
    """Add a released Whisper as an encoder of a released checkpoint."""
    audio = open_audio(directory, released.model, positions_per_token)
    found = released.found_tokenizer()
    if found is None:
        raise UserError(
            f"{released.directory} has no tokenizer, to which the words for recordings would be "
            "added; put the model's own there"
        )
    model = with_audio(released.model, audio.encoder)
    known = found.opened()
    needed = (AUDIO_START, AUDIO_CONTEXT, AUDIO_END)
    added = tuple(piece for piece in needed if known.id_of(piece) is None)
    words = max(model.language.vocab_size, known.vocab_size + len(added))
    model = model.with_tower("language", vocab_size=words)
    return CheckpointWithAudio(
        directory=released.directory,
        released=released,
        audio=audio,
        model=model.model_copy(update={"name": f"{model.name}-whisper"}),
        tokenizer=replace(found, added=added),
        seed=seed,
    )
