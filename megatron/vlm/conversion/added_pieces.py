"""Special tokens added at the end of a tokenizer's vocabulary."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastModel

from omnibal.base.files import read_json_model
from omnibal.data.tokenizer import ADDED_FILE, CONFIG_FILE, FAST_FILE, open_tokenizer

_DECODER = "added_tokens_decoder"
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word")


def add_pieces(folder: Path, pieces: Sequence[str]) -> None:
    """Append absent special tokens to the vocabulary in a folder's tokenizer files."""
    first = open_tokenizer(folder).vocab_size
    ids = {piece: first + place for place, piece in enumerate(pieces)}
    config, fast = folder / CONFIG_FILE, folder / FAST_FILE
    settings = _read(config) if config.is_file() else {}
    if _DECODER in settings or not fast.is_file():
        _add_beside(folder, settings, ids)
    if fast.is_file():
        model = FastModel.from_file(str(fast))
        model.add_special_tokens(list(pieces))
        model.save(str(fast), pretty=True)


def _add_beside(folder: Path, settings: dict[str, Any], ids: dict[str, int]) -> None:
    if _DECODER in settings:
        flags = dict.fromkeys(_FLAGS, False) | {"special": True}
        settings[_DECODER] |= {
            str(number): {"content": piece} | flags for piece, number in ids.items()
        }
        _write(folder / CONFIG_FILE, settings)
        return
    added = folder / ADDED_FILE
    known = _read(added) if added.is_file() else {}
    _write(added, known | ids)


def _read(path: Path) -> dict[str, Any]:
    return read_json_model(dict[str, Any], path, f"restore the checkpoint's own {path.name}")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
