"""A released model's folder: its `config.json`, its tensors' names, and the name of the model."""

from pathlib import Path

from pydantic import BaseModel

from omnibal.files import read_json_model

CONFIG_FILE = "config.json"
_INDEX_FILE = "model.safetensors.index.json"


class _Index(BaseModel):
    """Which file each tensor of a checkpoint is in; other fields are ignored."""

    weight_map: dict[str, str]


def stored_tensors(directory: Path) -> list[str] | None:
    """Names of the tensors of a checkpoint of several files; None where there is no list of them.

    Raises:
        UserError: the list is broken.
    """
    path = directory / _INDEX_FILE
    if not path.is_file():
        return None
    return list(read_json_model(_Index, path, "download it again").weight_map)


def model_name(directory: Path) -> str:
    """The folder's name, or in a cache of Hugging Face's hub, where that is a hash, the model's."""
    path = directory.resolve() if ".." in directory.parts else directory.absolute()
    in_hub = path.parent.name == "snapshots"
    return (path.parents[1].name.rpartition("--")[2] if in_hub else path.name).lower()
