"""Tokenizer files of a run and of an export: copied, generated or extended.

A Qwen2 tokenizer without tokenizer.json (InternVL2-1B's) gets one, as Transformers makes it.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken as FastAddedToken
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastModel

from omnibal.base.errors import UserError
from omnibal.base.files import read_json_model
from omnibal.data.chat import check_tokenizer
from omnibal.data.tokenizer import (
    ADDED_FILE,
    CONFIG_FILE,
    FAST_FILE,
    Tokenizer,
    open_tokenizer,
    read_settings,
)
from omnibal.model.config import ModelConfig

TOKENIZER_FOLDER = "tokenizer"
_TOKENIZER_FILES = (
    *("tokenizer.model", FAST_FILE, "tokenizer_config.json", "added_tokens.json"),
    *("special_tokens_map.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "tokenization_*.py"),
)
_VOCABULARY_FILE, _MERGES_FILE = "vocab.json", "merges.txt"
_QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# Qwen2's pre-tokenization pattern.
_PIECE_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ADDED_TOKENS = "added_tokens_decoder"
_TOKEN_FLAGS = ("lstrip", "normalized", "rstrip", "single_word")


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundTokenizer:
    """Contents of a run's tokenizer folder, before they are written."""

    files: tuple[Path, ...]  # of the source, to copy
    made: str | None  # generated tokenizer.json, or None if the source has one
    added: tuple[str, ...] = ()  # tokens to add to the source's tokenizer

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
            _add_pieces(target, self.added)

    def open(self) -> Tokenizer:
        """Return the tokenizer as written, from a temporary folder."""
        with tempfile.TemporaryDirectory() as temporary:
            self.write(Path(temporary) / TOKENIZER_FOLDER)
            return open_tokenizer(Path(temporary) / TOKENIZER_FOLDER)


def list_tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder's tokenizer, chat template and processors."""
    return [
        path for name in _TOKENIZER_FILES for path in sorted(folder.glob(name)) if path.is_file()
    ]


def find_tokenizer(folder: Path, model: ModelConfig) -> FoundTokenizer | None:
    """Return a folder's tokenizer, or None without a usable one. Raise if unfit for the model."""
    files = tuple(list_tokenizer_files(folder))
    if {"tokenizer.model", FAST_FILE} & {path.name for path in files}:
        check_tokenizer(model, open_tokenizer(folder))
        return FoundTokenizer(files=files, made=None)
    made = make_fast_tokenizer(folder) if is_slow(folder) else None
    if made is None:
        return None
    found = FoundTokenizer(files=files, made=made)
    tokenizer = found.open()
    tokenizer.path = folder / FAST_FILE  # for error messages: it was opened in a temporary folder
    check_tokenizer(model, tokenizer)
    return found


def _add_pieces(folder: Path, pieces: Sequence[str]) -> None:
    """Append special tokens to the vocabulary in a folder's tokenizer files."""
    first = open_tokenizer(folder).vocab_size
    ids = {piece: first + place for place, piece in enumerate(pieces)}
    config, fast, added = folder / CONFIG_FILE, folder / FAST_FILE, folder / ADDED_FILE
    settings = _read_entries(config)
    if _ADDED_TOKENS in settings:
        flags = dict.fromkeys(_TOKEN_FLAGS, False) | {"special": True}
        decoder = {str(number): {"content": piece} | flags for piece, number in ids.items()}
        _write_entries(config, settings | {_ADDED_TOKENS: settings[_ADDED_TOKENS] | decoder})
    elif not fast.is_file():
        _write_entries(added, _read_entries(added) | ids)
    if fast.is_file():
        model = FastModel.from_file(str(fast))
        model.add_special_tokens(list(pieces))
        model.save(str(fast), pretty=True)


def _read_entries(path: Path) -> dict[str, Any]:
    """Return the entries of a JSON file, empty if it is absent."""
    remedy = f"restore the checkpoint's own {path.name}"
    return read_json_model(dict[str, Any], path, remedy) if path.is_file() else {}


def _write_entries(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def is_slow(folder: Path) -> bool:
    """Return whether a folder has vocab.json and merges.txt, but no tokenizer.json."""
    has_files = all((folder / name).is_file() for name in (_VOCABULARY_FILE, _MERGES_FILE))
    return has_files and not (folder / FAST_FILE).is_file()


def make_fast_tokenizer(folder: Path) -> str | None:
    """Return a tokenizer.json made from vocab.json and merges.txt, or None if it is not Qwen2's."""
    files = folder / _VOCABULARY_FILE, folder / _MERGES_FILE
    settings = read_settings(files[0])
    if settings is None or settings.tokenizer_class not in _QWEN2_CLASSES:
        return None
    if settings.add_prefix_space:
        return None
    try:
        model = models.BPE.from_file(*map(str, files))
    except Exception as error:  # the library raises nothing more specific
        raise UserError(
            f"{folder}: {_VOCABULARY_FILE} and {_MERGES_FILE} are not of one tokenizer ({error}); "
            "fetch both again"
        ) from error
    tokenizer = FastModel(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # By id: the library numbers added tokens in order, after the vocabulary.
    for number, token in sorted((settings.added_tokens_decoder or {}).items()):
        added = FastAddedToken(**token.model_dump())
        if token.special:
            tokenizer.add_special_tokens([added])
        else:
            tokenizer.add_tokens([added])
        given = tokenizer.token_to_id(token.content)
        if given != number:
            raise UserError(
                f"{folder}: {token.content} is token {number} there, but token {given} after "
                f"{_VOCABULARY_FILE}; fetch the tokenizer's files again"
            )
    return tokenizer.to_str(pretty=True)
