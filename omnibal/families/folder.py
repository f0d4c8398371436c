"""A released model's folder: its `config.json`, its tensors' names, and the name of the model."""

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
_INDEX_FILE = "model.safetensors.index.json"
_REMEDY = "pass a config.json of a model hub, or the folder of one"


class _Index(BaseModel):
    """File that each tensor of a checkpoint is in; other fields are ignored."""

    weight_map: dict[str, str]


def read_config_file(path: Path) -> dict[str, Any]:
    """The content of a `config.json`."""
    text = read_text(path, _REMEDY)
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}; {_REMEDY}") from error
    if not isinstance(given, dict):
        raise UserError(f"{path}: must be a table of keys and values; {_REMEDY}")
    return given


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make what is wrong with the content of a `config.json` a user's error that names the file."""
    try:
        yield
    except UserError:
        raise
    except ValidationError as error:
        raise UserError(f"{path}{what_is_wrong(error)}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def stored_tensors(directory: Path) -> list[str] | None:
    """Names of the tensors of a checkpoint of several files; None without a list of them."""
    path = directory / _INDEX_FILE
    if not path.is_file():
        return None
    return list(read_json_model(_Index, path, "download it again").weight_map)


def model_name(directory: Path) -> str:
    """The folder's name, or in a cache of Hugging Face's hub, where that is a hash, the model's."""
    path = directory.resolve() if ".." in directory.parts else directory.absolute()
    in_hub = path.parent.name == "snapshots"
    return (path.parents[1].name.rpartition("--")[2] if in_hub else path.name).lower()
