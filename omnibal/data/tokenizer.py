"""Tokenizers from SentencePiece models (as Hugging Face's slow ones) or `tokenizer.json`."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel, Field
from sentencepiece import SentencePieceProcessor, SetMinLogLevel
from tokenizers import AddedToken as FastAddedToken
from tokenizers import Tokenizer as FastModel

from omnibal.base.errors import UserError
from omnibal.base.files import read_json_model, read_text

IMAGE_START, IMAGE_CONTEXT, IMAGE_END = "<img>", "<IMG_CONTEXT>", "</img>"
# Audio tokens of Qwen2-Audio and Qwen2.5-Omni.
AUDIO_START, AUDIO_CONTEXT, AUDIO_END = "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"

FAST_FILE, _SENTENCEPIECE_FILE = "tokenizer.json", "tokenizer.model"
CONFIG_FILE, ADDED_FILE = "tokenizer_config.json", "added_tokens.json"
TEMPLATE_FILE, _OLD_TEMPLATE_FILE = "chat_template.jinja", "chat_template.json"
_BOS, _EOS, _UNKNOWN = "<s>", "</s>", "<unk>"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space
# `normalizer_spec.add_dummy_prefix = false`: the last value of a repeated protobuf field wins.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
# Special tokens that texts may have: places in images, and item marks (checked elsewhere).
_PLACE_PIECE = re.compile(
    r"<(/?(ref|box|quad)|image|video|audio|\|(object_ref|box|quad|\w+_of_box)(_\w+)?\|)>"
)
_MATCH_NOTHING = "(?!)"  # never matches
_FATAL_LEVEL = 3  # SentencePiece's level of logging


class Tokenizer(ABC):
    """Picklable text-to-ids interface."""

    vocab_size: int  # highest id + 1
    add_bos: bool  # whether the tokenizer's settings prepend `bos_piece`
    special_pieces: tuple[str, ...]  # special added tokens

    def __init__(self, path: Path, content: bytes, settings: "_Settings | None") -> None:
        """Take the tokenizer's model file, its content and the settings in its folder, if any."""
        self.path = path
        self.sha256 = _hash_files(content, settings)  # of model, added tokens and settings
        self._settings = settings or _Settings()
        self.bos_piece = self._settings.bos_piece
        self.named_pieces = self._settings.named_pieces  # by role, such as "eos_token"
        # Jinja chat template next to the tokenizer, not covered by `sha256`.
        self.template = _read_template(path, self._settings)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return ids of `text` without BOS or EOS; added tokens are recognized."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return text; unknown ids are skipped."""

    @abstractmethod
    def id_of(self, piece: str) -> int | None:
        """Return the id of a piece, or None if it is no token."""

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        """Return ids and the indices of their first characters. Raises UserError if unsupported."""
        raise UserError(
            f"{self.path}: has no character offsets of tokens, which loss by its own chat template "
            f"needs; save it as {FAST_FILE} (`save_pretrained` of a fast tokenizer)"
        )

    def require_id(self, piece: str) -> int:
        """Return the id of a piece; raises UserError if absent."""
        number = self.id_of(piece)
        if number is None:
            raise UserError(f"{self.path}: {lacking_pieces([piece])}")
        return number

    def check_text(self, text: str, where: str, pieces: Sequence[str], media: str) -> None:
        """Raise UserError if a text has `pieces`, or special tokens that are no `_PLACE_PIECE`."""
        match = _find_reserved(self.special_pieces, tuple(pieces)).search(text)
        if match is not None:
            raise UserError(
                f"{where}: has {match[0]!r} in its text, which only the chat template may write; "
                f"mark {media}, and spell or remove any other use"
            )

    @property
    def image_context(self) -> int:
        return self.require_id(IMAGE_CONTEXT)

    @property
    def audio_context(self) -> int:
        return self.require_id(AUDIO_CONTEXT)


@lru_cache(maxsize=64)
def _find_reserved(special: tuple[str, ...], pieces: tuple[str, ...]) -> re.Pattern[str]:
    found = {*special, *pieces} - {mark for mark in special if _PLACE_PIECE.fullmatch(mark)}
    return re.compile(
        "|".join(map(re.escape, sorted(found, key=len, reverse=True))) or _MATCH_NOTHING
    )


def lacking_pieces(pieces: Sequence[str]) -> str:
    return (
        f"lacks the piece(s) {' '.join(pieces)} of the chat template; pass the folder of the "
        "released checkpoint, with its tokenizer_config.json or added_tokens.json"
    )


def list_tokenizer_files(path: Path) -> list[Path]:
    """List the files that `open_tokenizer` may read, existing or not."""
    folder = path if path.is_dir() else path.parent
    names = (CONFIG_FILE, ADDED_FILE, TEMPLATE_FILE, _OLD_TEMPLATE_FILE)
    models = [folder / FAST_FILE, folder / _SENTENCEPIECE_FILE] if path.is_dir() else [path]
    return [*models, *(folder / name for name in names)]


def open_tokenizer(path: Path) -> Tokenizer:
    """Open tokenizer.json, tokenizer.model, or a folder with either, the first preferred.

    Settings are from tokenizer_config.json, added tokens from added_tokens.json if it has none.
    """
    if path.is_dir():
        models = [at for at in (path / FAST_FILE, path / _SENTENCEPIECE_FILE) if at.is_file()]
        if not models:
            raise UserError(
                f"{path}: holds neither {FAST_FILE} nor {_SENTENCEPIECE_FILE}; pass a folder with "
                "one, or save the tokenizer by `save_pretrained` of a fast tokenizer"
            )
        path = models[0]
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer; pass {FAST_FILE} or {_SENTENCEPIECE_FILE}")
    content, settings = path.read_bytes(), read_settings(path)
    if path.suffix == ".json":
        return _Fast(path, content, settings or _Settings())
    return _SentencePiece(path, content, settings)


class AddedToken(BaseModel):
    content: str = Field(min_length=1)
    lstrip: bool = False  # whether spaces before the token are removed
    rstrip: bool = False  # whether spaces after the token are removed
    normalized: bool = False
    special: bool = False
    single_word: bool = False  # whether the token is matched only at word boundaries


class _NamedTemplate(BaseModel):
    name: str
    template: str


_TokenSetting = str | AddedToken | None
_TOKEN_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class _Settings(BaseModel):
    """Settings from tokenizer_config.json; other fields are ignored."""

    added_tokens_decoder: dict[int, AddedToken] | None = None
    additional_special_tokens: list[str | AddedToken] | None = None
    extra_special_tokens: list[str | AddedToken] | dict[str, str | AddedToken] | None = None
    bos_token: _TokenSetting = None
    eos_token: _TokenSetting = None
    unk_token: _TokenSetting = None
    sep_token: _TokenSetting = None
    pad_token: _TokenSetting = None
    cls_token: _TokenSetting = None
    mask_token: _TokenSetting = None
    add_bos_token: bool | None = None
    tokenizer_class: str | None = None
    legacy: bool | None = None
    add_prefix_space: bool | None = None
    chat_template: str | list[_NamedTemplate] | None = Field(default=None, exclude=True)

    @property
    def template(self) -> str | None:
        """Chat template, or of several the default, or None if absent."""
        if not isinstance(self.chat_template, list):
            return self.chat_template
        return {named.name: named.template for named in self.chat_template}.get("default")

    @property
    def bos_piece(self) -> str:
        return _content_of_setting(self.bos_token) or _BOS

    @property
    def unknown_piece(self) -> str:
        return _content_of_setting(self.unk_token) or _UNKNOWN

    @property
    def named_pieces(self) -> dict[str, str]:
        pieces = {role: _content_of_setting(vars(self)[role]) for role in _TOKEN_ROLES}
        return {role: piece for role, piece in pieces.items() if piece is not None}

    @property
    def special_tokens(self) -> list[AddedToken]:
        """Special tokens in Hugging Face's order of new ids: roles first."""
        others = self.extra_special_tokens or self.additional_special_tokens or []
        others = list(others.values()) if isinstance(others, dict) else others
        given = (*(vars(self)[role] for role in _TOKEN_ROLES), *others)
        tokens = [AddedToken(content=t) if isinstance(t, str) else t for t in given if t]
        return [token.model_copy(update={"special": True}) for token in tokens]

    @property
    def special_pieces(self) -> list[str]:
        usual = (self.bos_piece, self.unknown_piece, _content_of_setting(self.eos_token) or _EOS)
        return [*usual, *(token.content for token in self.special_tokens)]


def _read_template(path: Path, settings: _Settings) -> str | None:
    """Return the first chat template in Transformers' order of files, or None if absent."""
    alone, old = path.with_name(TEMPLATE_FILE), path.with_name(_OLD_TEMPLATE_FILE)
    if alone.is_file():
        return read_text(alone, "restore it")
    if settings.template is None and old.is_file():
        settings = read_json_model(_Settings, old, f"restore the checkpoint's own {old.name}")
    return settings.template


def _content_of_setting(token: _TokenSetting) -> str | None:
    return token.content if isinstance(token, AddedToken) else token


def read_settings(path: Path) -> _Settings | None:
    """Return the settings in the folder of the model file `path`, or None if absent."""
    config, added = path.with_name(CONFIG_FILE), path.with_name(ADDED_FILE)
    settings = None
    if config.is_file():
        remedy = f"restore the checkpoint's own {CONFIG_FILE}"
        settings = read_json_model(_Settings, config, remedy)
    has_tokens = settings is not None and settings.added_tokens_decoder is not None
    if has_tokens or not added.is_file():
        return settings
    settings = settings or _Settings()
    ids = read_json_model(dict[str, int], added, f"restore the checkpoint's own {ADDED_FILE}")
    special = {token.content for token in settings.special_tokens}
    tokens = {
        number: AddedToken(content=content, special=True)
        if content in special
        else AddedToken(content=content)
        for content, number in ids.items()
    }
    return settings.model_copy(update={"added_tokens_decoder": tokens})


class _SentencePiece(Tokenizer):
    """SentencePiece model; text is split at added tokens, which take precedence over its pieces."""

    def __init__(self, path: Path, content: bytes, settings: _Settings | None) -> None:
        super().__init__(path, content, settings)
        # Llama with `legacy: false`: one space before the text, none after added tokens.
        llama = self._settings.tokenizer_class in ("LlamaTokenizer", "LlamaTokenizerFast")
        self._keeps_first_space = llama and self._settings.legacy is False
        SetMinLogLevel(_FATAL_LEVEL)  # otherwise the library logs the error too
        self._model = SentencePieceProcessor()
        try:
            suffix = _NO_DUMMY_PREFIX * self._keeps_first_space
            self._model.LoadFromSerializedProto(content + suffix)
        except RuntimeError as error:
            raise UserError(
                f"{path}: not a SentencePiece model; pass {_SENTENCEPIECE_FILE} or {FAST_FILE}"
            ) from error
        self._pieces: int = self._model.GetPieceSize()
        self._added = {} if settings is None else self._list_added_tokens()
        self._content_of = {number: piece for piece, (number, _) in self._added.items()}
        longest_first = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._borders = re.compile(f"({'|'.join(longest_first) or _MATCH_NOTHING})")
        self.vocab_size = max([self._pieces - 1, *self._content_of]) + 1
        self.add_bos = self._settings.add_bos_token is not False
        special = (piece for piece, (_, token) in self._added.items() if token.special)
        self.special_pieces = tuple(special)

    def encode(self, text: str) -> list[int]:
        first_space = self._keeps_first_space and text != ""
        if first_space:
            text = text.replace(_SPACE, " ")
            text = text if self._settings.add_prefix_space is False else _SPACE + text
        parts = self._split_added(text)
        encoded = [
            [self._added[part][0]] if part in self._added else self._encode_run(part)
            for part in parts
        ]
        if first_space and parts[1:] and parts[1] in self._settings.special_pieces:
            # Llama's tokenizer removes that space again, but only before these pieces.
            if encoded[0] == [self._model.PieceToId(_SPACE)]:
                del encoded[0]
        return [number for ids in encoded for number in ids]

    def decode(self, ids: Sequence[int]) -> str:
        texts = []
        for added, run in groupby(ids, self._content_of.__contains__):
            if added:
                texts += [self._content_of[number] for number in run]
            else:
                texts.append(self._model.DecodeIds([n for n in run if n < self._pieces]))
        return "".join(texts)

    def id_of(self, piece: str) -> int | None:
        if piece in self._added:
            return self._added[piece][0]
        number = self._model.PieceToId(piece)
        return number if self._model.IdToPiece(number) == piece else None

    def _list_added_tokens(self) -> dict[str, tuple[int, AddedToken]]:
        """Return id and flags by content, of added tokens and of special pieces of the model."""
        numbers = {piece: self._model.PieceToId(piece) for piece in self._settings.special_pieces}
        special = {
            piece: (number, AddedToken(content=piece, special=True))
            for piece, number in numbers.items()
            if self._model.IdToPiece(number) == piece
        }
        added = self._settings.added_tokens_decoder or {}
        single = [token.content for token in added.values() if token.single_word]
        if single:
            raise UserError(
                f"{self.path.with_name(CONFIG_FILE)}: has {single[0]} as a single_word token, "
                f"which only a {FAST_FILE} supports; save the tokenizer as {FAST_FILE}"
            )
        return special | {token.content: (number, token) for number, token in added.items()}

    def _split_added(self, text: str) -> list[str]:
        """Split text into added tokens and runs between them, stripped as the tokens' flags say."""
        parts = list(filter(None, self._borders.split(text)))
        for place, part in enumerate(parts):
            if part not in self._added:
                continue
            token = self._added[part][1]
            if token.rstrip and place + 1 < len(parts):
                parts[place + 1] = parts[place + 1].lstrip()
            if token.lstrip and place > 0:
                parts[place - 1] = parts[place - 1].rstrip()
        return parts

    def _encode_run(self, text: str) -> list[int]:
        if not (self._keeps_first_space and text.startswith((_SPACE, " "))):
            return self._model.EncodeAsIds(text)
        # The model would strip leading spaces, except after a piece.
        unknown = self._settings.unknown_piece
        return self._model.EncodeAsIds(unknown + text)[len(self._model.EncodeAsIds(unknown)) :]


class _Fast(Tokenizer):
    """Hugging Face tokenizer.json with added tokens and flags from the settings."""

    def __init__(self, path: Path, content: bytes, settings: _Settings) -> None:
        super().__init__(path, content, settings)
        try:
            self._model = FastModel.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception
            raise UserError(
                f"{path}: not a tokenizer ({error}); pass {FAST_FILE} or {_SENTENCEPIECE_FILE}"
            ) from error
        self._model.no_truncation()
        self._model.no_padding()
        self._add_missing_tokens(settings)
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        self.add_bos = settings.add_bos_token is True
        added = self._model.get_added_tokens_decoder().values()
        self.special_pieces = tuple(token.content for token in added if token.special)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        encoded = self._model.encode(text, add_special_tokens=False)
        return encoded.ids, [first for first, _ in encoded.offsets]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids), skip_special_tokens=False)

    def id_of(self, piece: str) -> int | None:
        return self._model.token_to_id(piece)

    def _add_missing_tokens(self, settings: _Settings) -> None:
        """Add settings' tokens, or set known tokens' flags. Raise UserError if ids differ."""
        decoder = self._model.get_added_tokens_decoder()
        names = [name for name in AddedToken.model_fields if name != "content"]
        flags_of = {
            token.content: {name: getattr(token, name) for name in names}
            for token in decoder.values()
        }
        for number, token in sorted((settings.added_tokens_decoder or {}).items()):
            stated = _stated_flags(token)
            known = flags_of.get(token.content)
            flags = stated if known is None else known | stated
            if flags != known:
                self._add_token(token.content, flags)
            flags_of[token.content] = flags
            own_number = self._model.token_to_id(token.content)
            if own_number != number:
                raise UserError(
                    f"{self.path}: has {token.content} as token {own_number}, but {CONFIG_FILE} or "
                    f"{ADDED_FILE} in its folder as {number}; restore the files of one checkpoint"
                )
        for token in settings.special_tokens:
            if token.content not in flags_of:
                flags_of[token.content] = _stated_flags(token)
                self._add_token(token.content, flags_of[token.content])

    def _add_token(self, content: str, flags: dict[str, bool]) -> None:
        token = FastAddedToken(content, **flags)
        add: Callable = self._model.add_special_tokens if token.special else self._model.add_tokens
        add([token])


def _stated_flags(token: AddedToken) -> dict[str, bool]:
    return token.model_dump(exclude={"content"}, exclude_unset=True)


def _hash_files(content: bytes, settings: _Settings | None) -> str:
    digest = hashlib.sha256(content)
    if settings is not None:
        # Sorted, so that the order of added tokens does not change the hash.
        stated = settings.model_dump(mode="json", exclude_unset=True)
        digest.update(json.dumps(stated, sort_keys=True).encode())
    return digest.hexdigest()
