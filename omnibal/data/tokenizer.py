"""Tokenizers from SentencePiece (InternVL, as Hugging Face's slow ones) or `tokenizer.json`."""

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
from omnibal.base.files import read_json_model

IMAGE_START, IMAGE_CONTEXT, IMAGE_END = "<img>", "<IMG_CONTEXT>", "</img>"
AUDIO_START, AUDIO_CONTEXT, AUDIO_END = "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"
"""Audio tokens of Qwen2-Audio and Qwen2.5-Omni."""

FAST_FILE, _SENTENCEPIECE_FILE = "tokenizer.json", "tokenizer.model"
CONFIG_FILE, ADDED_FILE = "tokenizer_config.json", "added_tokens.json"
TEMPLATE_FILE, _OLD_TEMPLATE_FILE = "chat_template.jinja", "chat_template.json"
_BOS, _EOS, _UNKNOWN = "<s>", "</s>", "<unk>"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space
# `normalizer_spec.add_dummy_prefix = false`: the last value of a repeated protobuf field wins.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
_PLACE = re.compile(
    r"<(/?(ref|box|quad)|image|video|audio|\|(object_ref|box|quad|\w+_of_box)(_\w+)?\|)>"
)
"""Tokens of places in an image, which answers have, and marks of items, checked elsewhere."""
_NEVER = "(?!)"  # never matches
_FATAL = 3  # SentencePiece's level of logging


class Tokenizer(ABC):
    """Picklable text-to-ids interface."""

    path: Path
    """Tokenizer model file."""
    sha256: str
    """SHA-256 of model, added tokens and settings."""
    vocab_size: int
    """Highest id + 1."""
    add_bos: bool
    """Whether the tokenizer's settings prepend `bos_piece`."""
    bos_piece: str
    template: str | None
    """Jinja chat template next to the tokenizer, not covered by `sha256`."""
    named_pieces: dict[str, str]
    """Pieces by role, such as "eos_token"."""
    special_pieces: tuple[str, ...]
    """Special added tokens."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return ids of `text` without BOS or EOS; added tokens are recognized."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return text; unknown ids are skipped."""

    @abstractmethod
    def id_of(self, piece: str) -> int | None:
        """Id of a single-token piece, None if absent."""

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of `text` and the first character of each."""
        raise UserError(
            f"{self.path}: does not tell which characters a token is of, which loss by the "
            f"tokenizer's own chat template needs; save it as {FAST_FILE} (save_pretrained of a "
            "fast tokenizer does)"
        )

    def require_id(self, piece: str) -> int:
        """Id of a piece; raises UserError if absent."""
        found = self.id_of(piece)
        if found is None:
            raise UserError(f"{self.path}: {lacking_pieces([piece])}")
        return found

    def check_text(self, text: str, where: str, pieces: Sequence[str], media: str) -> None:
        """Raise UserError if a text has special tokens, or others of these pieces.

        Tokens that mark places in an image are no control tokens.
        """
        found = _find_reserved(self.special_pieces, tuple(pieces)).search(text)
        if found is not None:
            raise UserError(
                f"{where}: has {found[0]!r} in its text, which only the chat template may write; "
                f"mark {media}, and spell or remove any other use"
            )

    @property
    def image_context(self) -> int:
        """Id replaced by vision embeddings."""
        return self.require_id(IMAGE_CONTEXT)

    @property
    def audio_context(self) -> int:
        """Id replaced by audio embeddings."""
        return self.require_id(AUDIO_CONTEXT)


@lru_cache(maxsize=64)
def _find_reserved(special: tuple[str, ...], pieces: tuple[str, ...]) -> re.Pattern[str]:
    found = {*special, *pieces} - {mark for mark in special if _PLACE.fullmatch(mark)}
    return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))) or _NEVER)


def lacking_pieces(pieces: Sequence[str]) -> str:
    """Error message for missing pieces."""
    return (
        f"lacks the piece(s) {' '.join(pieces)}; the chat template needs each as one token: pass "
        "the tokenizer of the released checkpoint, with its tokenizer_config.json or "
        "added_tokens.json beside it, add them to it, or choose another chat_template"
    )


def tokenizer_files(path: Path) -> list[Path]:
    """Files that `open_tokenizer` may read, existing or not."""
    folder = path if path.is_dir() else path.parent
    names = (CONFIG_FILE, ADDED_FILE, TEMPLATE_FILE, _OLD_TEMPLATE_FILE)
    beside = [folder / name for name in names]
    models = [folder / FAST_FILE, folder / _SENTENCEPIECE_FILE] if path.is_dir() else [path]
    return [*models, *beside]


def open_tokenizer(path: Path) -> Tokenizer:
    """Open tokenizer.json, tokenizer.model, or a folder with one of them, the first preferred.

    Settings come from tokenizer_config.json, otherwise added_tokens.json, in the same folder.
    """
    if path.is_dir():
        held = [at for at in (path / FAST_FILE, path / _SENTENCEPIECE_FILE) if at.is_file()]
        if not held:
            raise UserError(
                f"{path}: holds neither {FAST_FILE} nor {_SENTENCEPIECE_FILE}; pass a folder with "
                f"one, or save the tokenizer as {FAST_FILE} (save_pretrained of a fast tokenizer "
                "does)"
            )
        path = held[0]
    if not path.is_file():
        raise UserError(
            f"{path}: no such tokenizer; pass a SentencePiece {_SENTENCEPIECE_FILE}, a "
            f"{FAST_FILE}, or the folder of a checkpoint with one of them"
        )
    content, settings = path.read_bytes(), _read_settings(path)
    if path.suffix == ".json":
        return _Fast(path, content, settings or _Settings())
    return _SentencePiece(path, content, settings)


class AddedToken(BaseModel):
    """Added token in Hugging Face's format."""

    content: str = Field(min_length=1)
    lstrip: bool = False
    """Whether spaces before the token are removed."""
    rstrip: bool = False
    """Whether spaces after the token are removed."""
    normalized: bool = False
    special: bool = False
    single_word: bool = False
    """Whether the token is matched only at word boundaries."""


_Named = str | AddedToken | None
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class _Settings(BaseModel):
    """Settings from tokenizer_config.json; other fields are ignored."""

    added_tokens_decoder: dict[int, AddedToken] | None = None
    additional_special_tokens: list[str | AddedToken] | None = None
    extra_special_tokens: list[str | AddedToken] | dict[str, str | AddedToken] | None = None
    bos_token: _Named = None
    eos_token: _Named = None
    unk_token: _Named = None
    sep_token: _Named = None
    pad_token: _Named = None
    cls_token: _Named = None
    mask_token: _Named = None
    add_bos_token: bool | None = None
    tokenizer_class: str | None = None
    legacy: bool | None = None
    add_prefix_space: bool | None = None

    @property
    def bos_piece(self) -> str:
        return _name(self.bos_token) or _BOS

    @property
    def unknown_piece(self) -> str:
        return _name(self.unk_token) or _UNKNOWN

    @property
    def named_pieces(self) -> dict[str, str]:
        pieces = {role: _name(vars(self)[role]) for role in _ROLES}
        return {role: piece for role, piece in pieces.items() if piece is not None}

    @property
    def special_tokens(self) -> list[AddedToken]:
        """Special tokens in Hugging Face's order of new ids: roles first."""
        others = self.extra_special_tokens or self.additional_special_tokens or []
        others = list(others.values()) if isinstance(others, dict) else others
        given = (*(vars(self)[role] for role in _ROLES), *others)
        tokens = [AddedToken(content=t) if isinstance(t, str) else t for t in given if t]
        return [token.model_copy(update={"special": True}) for token in tokens]

    @property
    def special_pieces(self) -> list[str]:
        """Special tokens, with default pieces for required roles."""
        usual = (self.bos_piece, self.unknown_piece, _name(self.eos_token) or _EOS)
        return [*usual, *(token.content for token in self.special_tokens)]


class _NamedTemplate(BaseModel):
    name: str
    template: str


class _TemplateHolder(BaseModel):
    """Chat templates in a JSON file; other fields are ignored."""

    chat_template: str | list[_NamedTemplate] | None = None

    @property
    def text(self) -> str | None:
        """Chat template, or the default if several."""
        if not isinstance(self.chat_template, list):
            return self.chat_template
        return {named.name: named.template for named in self.chat_template}.get("default")


def _read_template(path: Path) -> str | None:
    """First chat template found, in Transformers' order."""
    alone = path.with_name(TEMPLATE_FILE)
    if alone.is_file():
        try:
            return alone.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{alone}: cannot be read ({error}); restore it") from error
    for name in (CONFIG_FILE, _OLD_TEMPLATE_FILE):
        file = path.with_name(name)
        if file.is_file():
            held = read_json_model(_TemplateHolder, file, f"restore the checkpoint's own {name}")
            if held.text is not None:
                return held.text
    return None


def _name(token: _Named) -> str | None:
    return token.content if isinstance(token, AddedToken) else token


def _read_settings(path: Path) -> _Settings | None:
    """Settings next to the model, None if absent."""
    config, added = path.with_name(CONFIG_FILE), path.with_name(ADDED_FILE)
    settings = None
    if config.is_file():
        remedy = f"restore the checkpoint's own {CONFIG_FILE}"
        settings = read_json_model(_Settings, config, remedy)
    told = settings is not None and settings.added_tokens_decoder is not None
    if told or not added.is_file():
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
        self.path = path
        self.sha256 = _sha256(content, settings)
        self._settings = settings or _Settings()
        # Llama's `legacy: false`: text begins with a single space.
        llama = self._settings.tokenizer_class in ("LlamaTokenizer", "LlamaTokenizerFast")
        self._keeps_first_space = llama and self._settings.legacy is False
        self._model = _load(path, content + _NO_DUMMY_PREFIX * self._keeps_first_space)
        self._pieces: int = self._model.GetPieceSize()
        self._added = {} if settings is None else self._added_tokens()
        self._content_of = {number: piece for piece, (number, _) in self._added.items()}
        longest_first = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._borders = re.compile(f"({'|'.join(longest_first) or _NEVER})")
        self.vocab_size = max([self._pieces - 1, *self._content_of]) + 1
        self.bos_piece = self._settings.bos_piece
        self.add_bos = self._settings.add_bos_token is not False
        self.template = _read_template(path)
        self.named_pieces = self._settings.named_pieces
        special = (piece for piece, (_, token) in self._added.items() if token.special)
        self.special_pieces = tuple(special)

    def encode(self, text: str) -> list[int]:
        if not (self._added or self._keeps_first_space):
            return self._model.EncodeAsIds(text)
        first_space = self._keeps_first_space and text != ""
        if first_space:
            text = text.replace(_SPACE, " ")
            text = text if self._settings.add_prefix_space is False else _SPACE + text
        parts = self._parts(text)
        encoded = [
            [self._added[part][0]] if part in self._added else self._run(part) for part in parts
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

    def _added_tokens(self) -> dict[str, tuple[int, AddedToken]]:
        """Id and flags of added and built-in special tokens, by content."""
        own = {piece: self._model.PieceToId(piece) for piece in self._settings.special_pieces}
        added = {
            piece: (number, AddedToken(content=piece, special=True))
            for piece, number in own.items()
            if self._model.IdToPiece(number) == piece
        }
        given = self._settings.added_tokens_decoder or {}
        single = [token.content for token in given.values() if token.single_word]
        if single:
            raise UserError(
                f"{self.path.with_name(CONFIG_FILE)}: has {single[0]} as a single_word token, "
                f"which is followed beside a {FAST_FILE} alone; save the tokenizer as one"
            )
        return added | {token.content: (number, token) for number, token in given.items()}

    def _parts(self, text: str) -> list[str]:
        """Split text into added tokens and runs between them."""
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

    def _run(self, text: str) -> list[int]:
        if not (self._keeps_first_space and text.startswith((_SPACE, " "))):
            return self._model.EncodeAsIds(text)
        # The model would strip leading spaces, except after a piece.
        unknown = self._settings.unknown_piece
        return self._model.EncodeAsIds(unknown + text)[len(self._model.EncodeAsIds(unknown)) :]


def _load(path: Path, content: bytes) -> SentencePieceProcessor:
    SetMinLogLevel(_FATAL)  # otherwise the library logs the error too
    model = SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise UserError(
            f"{path}: not a SentencePiece model; pass the {_SENTENCEPIECE_FILE} of the language "
            f"model, or a {FAST_FILE}"
        ) from error
    return model


class _Fast(Tokenizer):
    """Hugging Face tokenizer.json with tokens from tokenizer_config.json."""

    def __init__(self, path: Path, content: bytes, settings: _Settings) -> None:
        self.path = path
        self.sha256 = _sha256(content, settings)
        try:
            self._model = FastModel.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception
            raise UserError(
                f"{path}: not a Hugging Face tokenizer ({error}); pass the {FAST_FILE} of the "
                f"language model, or a SentencePiece {_SENTENCEPIECE_FILE}"
            ) from error
        self._model.no_truncation()
        self._model.no_padding()
        self._add(settings)
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_piece = settings.bos_piece
        self.add_bos = settings.add_bos_token is True
        self.template = _read_template(path)
        self.named_pieces = settings.named_pieces
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

    def _add(self, settings: _Settings) -> None:
        """Add missing tokens and set flags of existing tokens."""
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
            found = self._model.token_to_id(token.content)
            if found != number:
                raise UserError(
                    f"{self.path}: has {token.content} as token {found}, but {CONFIG_FILE} or "
                    f"{ADDED_FILE} beside it as {number}; both must be of one checkpoint: restore "
                    "them"
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


def _sha256(content: bytes, settings: _Settings | None) -> str:
    digest = hashlib.sha256(content)
    if settings is not None:
        # Sorted, so that the order of added tokens does not change the hash.
        stated = settings.model_dump(mode="json", exclude_unset=True)
        digest.update(json.dumps(stated, sort_keys=True).encode())
    return digest.hexdigest()
