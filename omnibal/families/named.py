"""Models as `--model` names them: presets, files of their own, and a hub's `config.json`."""

from pathlib import Path

from omnibal.config import ModelConfig, load_model, model_file, preset_names
from omnibal.families.folder import CONFIG_FILE
from omnibal.families.hub import config_notes, read_hub_config


def named_model(name_or_path: str) -> ModelConfig:
    """Read the model preset of that name, the TOML file, or a hub's `config.json` or its folder.

    Raises:
        UserError: there is no such preset or file, or it is not a model that is understood.
    """
    path = _hub_file(name_or_path)
    return load_model(name_or_path) if path is None else read_hub_config(path)


def named_model_file(name_or_path: str) -> Path:
    """File that `named_model` reads."""
    return _hub_file(name_or_path) or model_file(name_or_path)


def model_notes(name_or_path: str) -> list[str]:
    """What a user should know of how a model that `named_model` has read is planned.

    Raises:
        UserError: its file cannot be read.
    """
    path = _hub_file(name_or_path)
    return [] if path is None else config_notes(path)


def _hub_file(name_or_path: str) -> Path | None:
    path = Path(name_or_path)
    if name_or_path in preset_names("models"):
        return None
    if path.is_dir():
        return path / CONFIG_FILE
    return path if path.suffix == ".json" else None
