"""Models by name (`--model`): presets, hub ids, TOML files, `config.json`."""

import re
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from omnibal.base.errors import UserError
from omnibal.base.files import read_toml_model
from omnibal.families.folder import CONFIG_FILE
from omnibal.families.hub import config_notes, read_hub_config
from omnibal.model.config import ModelConfig, config_file, load_model, preset_names

_IDS_FILE = Path(__file__).parents[1] / "presets" / "hub_ids.toml"
_SEPARATORS = re.compile("[-_.]")
HUB_ID = re.compile(
    r"\w[\w.-]*/\w[\w.-]*(?<!\.toml)(?<!\.json)"
)  # "org/name", not a path of a file


def named_model(name_or_path: str) -> ModelConfig:
    """Return a model by preset name ("Llama3_8B" too), hub id, TOML file, config.json or folder."""
    name = _preset_or_path(name_or_path)
    path = _hub_file(name)
    return load_model(name) if path is None else read_hub_config(path)


def named_model_file(name_or_path: str) -> Path:
    """Return the path of the file that `named_model` reads."""
    name = _preset_or_path(name_or_path)
    return _hub_file(name) or config_file("models", name)


def model_of_line(name: str) -> str | None:
    """Return `name` if it names a model, else the preset that begins it as a recipe, or None.

    Example:
        >>> model_of_line("llama31_8b_pretrain_config"), model_of_line("another_7b")
        ('llama3.1-8b', None)
    """
    with suppress(UserError):  # a hub id without preset
        if named_model_file(name).is_file():
            return name
    recipe = f"{name.lower().replace('_', '-')}-"
    presets = preset_names("models")
    matches = [preset for preset in presets if recipe.startswith(f"{preset.replace('.', '')}-")]
    return max(matches, key=len, default=None)


def model_notes(name_or_path: str) -> list[str]:
    """Return notes: ignored settings of a config.json, or the preset of another spelling."""
    name = _preset_or_path(name_or_path)
    path = _hub_file(name)
    if path is not None:
        return config_notes(path)
    return [] if name == name_or_path else [f"{name_or_path} is planned as the preset {name}"]


def hub_ids() -> dict[str, list[str]]:
    """Return Hugging Face ids by preset."""
    return read_toml_model(dict[str, list[str]], _IDS_FILE, "install omnibal again")


def _preset_or_path(given: str) -> str:
    """Return the preset of a hub id or spelling, else `given`. Raise for unknown hub ids."""
    if given in preset_names("models") or Path(given).exists():
        return given
    spelt = {_SEPARATORS.sub("", name): name for name in preset_names("models")}
    if HUB_ID.fullmatch(given) is None:
        return spelt.get(_SEPARATORS.sub("", given.lower()), given)
    presets = {hub_id.lower(): preset for preset, ids in hub_ids().items() for hub_id in ids}
    if given.lower() in presets:
        return presets[given.lower()]
    near = get_close_matches(given.lower(), presets, n=1)
    hint = f" (the nearest preset is {presets[near[0]]!r})" if near else ""
    raise UserError(
        f"{given!r} is neither a file nor a folder, nor the hub id of a preset{hint}; download its "
        "config.json into a folder, with its preprocessor_config.json and tokenizer's files "
        "(tokenizer.json, tokenizer_config.json), and pass it as --model and --tokenizer-model"
    )


def _hub_file(name_or_path: str) -> Path | None:
    # A folder may have the name of a preset, which comes first.
    path = Path(name_or_path)
    if name_or_path in preset_names("models"):
        return None
    if path.is_dir():
        return path / CONFIG_FILE
    return path if path.suffix == ".json" else None
