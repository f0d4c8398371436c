"""Folder of a released model: `config.json`, tensor names, model name."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from omnibal.base.errors import UserError
from omnibal.base.files import read_json_model, read_text
from omnibal.families.hub_table import what_is_wrong

CONFIG_FILE = "config.json"
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_INDEX_FILE = "model.safetensors.index.json"
_REMEDY = "pass a config.json of a model hub, or the folder of one"


class _Index(BaseModel):
    """File that each tensor of a checkpoint is in; other fields are ignored."""

    weight_map: dict[str, str]


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a `config.json`."""
    text = read_text(path, _REMEDY)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:  # including huge numbers and deep nesting
        raise UserError(f"{path}: not JSON: {error}; {_REMEDY}") from error
    if not isinstance(given, dict):
        raise UserError(f"{path}: must be a table of keys and values; {_REMEDY}")
    return given


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Convert errors in a `config.json` to user errors that name the file."""
    try:
        yield
    except UserError:
        raise
    except ValidationError as error:
        raise UserError(f"{path}{what_is_wrong(error)}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def stored_tensors(directory: Path) -> list[str] | None:
    """Tensor names of a sharded checkpoint, None without an index."""
    path = directory / _INDEX_FILE
    if not path.is_file():
        return None
    return list(read_json_model(_Index, path, "download it again").weight_map)


def has_chat_template(directory: Path) -> bool:
    """Whether a checkpoint's folder has a chat template."""
    if any((directory / name).is_file() for name in _TEMPLATE_FILES):
        return True
    settings = directory / "tokenizer_config.json"
    return settings.is_file() and read_config_file(settings).get("chat_template") is not None


def model_name(directory: Path) -> str:
    """Folder name, or the model's name in a Hugging Face cache."""
    path = directory.resolve() if ".." in directory.parts else directory.absolute()
    in_hub = path.parent.name == "snapshots"
    return (path.parents[1].name.rpartition("--")[2] if in_hub else path.name).lower()
