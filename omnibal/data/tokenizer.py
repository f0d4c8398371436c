"""Text to token ids: a SentencePiece model with the chat and image pieces of InternVL."""

import hashlib
from pathlib import Path

from sentencepiece import SentencePieceProcessor, SetMinLogLevel

from omnibal.errors import UserError

IMAGE_START, IMAGE_CONTEXT, IMAGE_END = "<img>", "<IMG_CONTEXT>", "</img>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
_BOS = "<s>"
_FATAL = 3


class Tokenizer:
    """A SentencePiece model file, and the ids of the pieces that only the chat template writes.

    Raises:
        UserError: the file is missing, is no SentencePiece model, or lacks one of the pieces.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"{path}: no such tokenizer; pass a SentencePiece tokenizer.model")
        content = path.read_bytes()
        SetMinLogLevel(_FATAL)  # the library would log what is raised here as one error
        self._model = SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise UserError(
                f"{path}: not a SentencePiece model; pass the tokenizer.model of the language model"
            ) from error
        special = (_BOS, IMAGE_START, IMAGE_CONTEXT, IMAGE_END, TURN_START, TURN_END)
        missing = [piece for piece in special if self._model.IdToPiece(self._id(piece)) != piece]
        if missing:
            raise UserError(
                f"{path}: lacks the piece(s) {' '.join(missing)}; the chat template needs each as "
                "one token, so add them as user-defined symbols"
            )
        self.path = path
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = self._model.GetPieceSize()
        self.bos = self._id(_BOS)
        self.image_start = self._id(IMAGE_START)
        self.image_context = self._id(IMAGE_CONTEXT)
        self.image_end = self._id(IMAGE_END)
        self.turn_start = self._id(TURN_START)
        self.turn_end = self._id(TURN_END)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone: no begin or end token is added."""
        return self._model.EncodeAsIds(text)

    def decode(self, ids: list[int]) -> str:
        return self._model.DecodeIds(ids)

    def _id(self, piece: str) -> int:
        return self._model.PieceToId(piece)
