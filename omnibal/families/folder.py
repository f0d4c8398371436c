"""Folder of a released model: `config.json`, tensor names, model name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from omnibal.base.errors import UserError
from omnibal.base.files import read_json_model
from omnibal.families.hub_table import describe_error

CONFIG_FILE = "config.json"
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
INDEX_FILE = "model.safetensors.index.json"
_CONFIG_REMEDY = "pass a config.json of a model hub, or the folder of one"


class ShardIndex(BaseModel, extra="allow"):
    metadata: dict[str, Any] | None = None
    weight_map: dict[str, str]  # file name by tensor name


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the object in a `config.json`. Raise UserError if unreadable or not a JSON object."""
    return read_json_model(dict[str, Any], path, _CONFIG_REMEDY)


@contextmanager
def config_errors(path: Path) -> Iterator[None]:
    """Convert ValidationErrors and ValueErrors of a `config.json` to UserErrors with its path."""
    try:
        yield
    except UserError:
        raise
    except ValidationError as error:
        raise UserError(f"{path}{describe_error(error)}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def stored_tensors(directory: Path) -> list[str] | None:
    """Return the tensor names in a checkpoint's shard index, or None without index (one file)."""
    path = directory / INDEX_FILE
    if not path.is_file():
        return None
    return list(read_json_model(ShardIndex, path, "download it again").weight_map)


def has_chat_template(directory: Path) -> bool:
    """Return whether a checkpoint's folder has a chat template, as file or tokenizer setting."""
    if any((directory / name).is_file() for name in _TEMPLATE_FILES):
        return True
    settings = directory / "tokenizer_config.json"
    return settings.is_file() and read_config_file(settings).get("chat_template") is not None


def model_name(directory: Path) -> str:
    """Return the folder's name in lower case, or in a Hugging Face cache the model's (no ORG)."""
    # A link's own name counts; only ".." must be resolved.
    path = directory.resolve() if ".." in directory.parts else directory.absolute()
    in_cache = path.parent.name == "snapshots"  # models--ORG--NAME/snapshots/COMMIT
    return (path.parents[1].name.rpartition("--")[2] if in_cache else path.name).lower()
