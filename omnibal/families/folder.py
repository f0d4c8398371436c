"""A released model's folder: its `config.json`, and the name that it gives the model."""

from pathlib import Path

CONFIG_FILE = "config.json"


def model_name(directory: Path) -> str:
    """The folder's name, or in a cache of Hugging Face's hub, where that is a hash, the model's."""
    path = directory.resolve() if ".." in directory.parts else directory.absolute()
    in_hub = path.parent.name == "snapshots"
    return (path.parents[1].name.rpartition("--")[2] if in_hub else path.name).lower()
