"""Make tokenizer.json for Qwen2 tokenizers without it (InternVL2-1B's), as Transformers does."""

from pathlib import Path

from pydantic import BaseModel
from tokenizers import AddedToken as FastAddedToken
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from omnibal.base.errors import UserError
from omnibal.base.files import read_json_model
from omnibal.data.tokenizer import ADDED_FILE, CONFIG_FILE, FAST_FILE, AddedToken

_VOCABULARY_FILE, _MERGES_FILE = "vocab.json", "merges.txt"
_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_REMEDY = "fetch it again"
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pre-tokenization pattern."""


class _Config(BaseModel):
    """Settings from tokenizer_config.json."""

    tokenizer_class: str | None = None
    add_prefix_space: bool | None = None
    added_tokens_decoder: dict[int, AddedToken] | None = None


def is_slow(folder: Path) -> bool:
    """Whether there is a byte-level vocabulary without tokenizer.json."""
    is_there = [(folder / name).is_file() for name in (_VOCABULARY_FILE, _MERGES_FILE)]
    return all(is_there) and not (folder / FAST_FILE).is_file()


def fast_tokenizer(folder: Path) -> str | None:
    """Text of the tokenizer.json. None unless the tokenizer is Qwen2's."""
    path = folder / CONFIG_FILE
    config = read_json_model(_Config, path, _REMEDY) if path.is_file() else _Config()
    if config.tokenizer_class not in _CLASSES or config.add_prefix_space:
        return None
    files = folder / _VOCABULARY_FILE, folder / _MERGES_FILE
    try:
        model = models.BPE.from_file(*map(str, files))
    except Exception as error:  # the library raises nothing more specific
        raise UserError(
            f"{folder}: {_VOCABULARY_FILE} and {_MERGES_FILE} are not of one tokenizer ({error}); "
            "fetch both again"
        ) from error
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = config.added_tokens_decoder
    _add(tokenizer, _listed(folder) if added is None else added, folder)
    return tokenizer.to_str(pretty=True)


def _listed(folder: Path) -> dict[int, AddedToken]:
    """Added tokens by id, from the file of older Transformers versions."""
    path = folder / ADDED_FILE
    if not path.is_file():
        return {}
    ids = read_json_model(dict[str, int], path, _REMEDY)
    return {number: AddedToken(content=content, special=True) for content, number in ids.items()}


def _add(tokenizer: Tokenizer, tokens: dict[int, AddedToken], folder: Path) -> None:
    for number, token in sorted(tokens.items()):
        added = FastAddedToken(**token.model_dump())
        if token.special:
            tokenizer.add_special_tokens([added])
        else:
            tokenizer.add_tokens([added])
        found = tokenizer.token_to_id(token.content)
        if found != number:
            raise UserError(
                f"{folder}: {token.content} is token {number} there, but comes {found} behind "
                f"{_VOCABULARY_FILE}; fetch the tokenizer's files again"
            )
