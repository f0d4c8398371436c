"""Write model presets from `config.json` files of a model hub.

    python scripts/hub_presets.py tests/planner/hub_configs omnibal/presets/models

The first folder has `sources.json`, the hub's model id by preset, and a folder per preset with its
`config.json` and, if its limits of pixels are not the family's, `preprocessor_config.json`.
"""

from pathlib import Path
from typing import Annotated

import typer

from omnibal.base.files import atomic, read_json_model
from omnibal.base.program import run_app
from omnibal.families.hub import read_hub_config
from omnibal.model.config import config_toml

SOURCES_FILE = "sources.json"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def preset_texts(folder: Path) -> dict[str, str]:
    """Return the text of every preset's file, by name; raise UserError for unreadable files."""
    remedy = f"give a folder with a {SOURCES_FILE}, ids of models by preset"
    sources = read_json_model(dict[str, str], folder / SOURCES_FILE, remedy)
    return {
        name: f"# {source}, by scripts/hub_presets.py of its config.json.\n"
        + config_toml(read_hub_config(folder / name))
        for name, source in sources.items()
    }


@app.command(help=__doc__)
def main(
    folder: Annotated[Path, typer.Argument(help="folder with sources.json")],
    output: Annotated[Path, typer.Argument(help="folder to write NAME.toml into")],
) -> None:
    for name, text in preset_texts(folder).items():
        with atomic(output / f"{name}.toml") as temporary:
            temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_app(app, "hub_presets.py")
