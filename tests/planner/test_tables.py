"""Tables on a narrow terminal: every word that a wide terminal shows."""

import shlex
from io import StringIO

import pytest
from cli_cases import run
from cost_cases import model_of
from rich.console import Console

from omnibal.model.config import config_toml
from omnibal.report.table import Facts, Table

pytestmark = pytest.mark.quick

NAME = "a-model-with-many-encoders-and-a-name-of-letters-by-the-dozen"
CAPS = "--limit clips=12 --max-tiles 1234 --max-tokens 123456 --memory-gib 123456"


@pytest.fixture(scope="module")
def commands(tmp_path_factory, lengths_file) -> list[str]:
    """Return commands with tables of a long-named model and large numbers."""
    folder = tmp_path_factory.mktemp("wide")
    model, plan = folder / f"{NAME}.toml", folder / "plan"
    towers = model_of("vision audio language", 30, 20, 40)
    model.write_text(config_toml(towers.model_copy(update={"name": NAME})))
    given = f"--model {model} --cluster laptop-cpu"
    run(f"plan {given} {CAPS} --pp 4 --precision fp32 -o {plan}")
    digits = "--model internvl-digits --cluster laptop-cpu"
    job = f"{digits} --lengths {lengths_file} --max-tiles 8 --max-tokens 512 --for xtuner"
    line = "-ng 16 -tp 1 -pp 4 -ep 2 -mb 1 -gb 512 -sl 4096"
    return [
        *("presets", f"simulate {plan}", f"check {plan}"),
        f"plan {given} {CAPS} --pp 4 --precision fp32 -o {folder / 'again'}",
        f"plan {job} --gpus 2 --no-compare -o {folder / 'searched'}",
        f"pack {lengths_file} {digits} --max-tiles 8 --max-tokens 512 --dp 2 --no-bound",
        f"lint '{line}' --model qwen3-vl-30b-a3b",
    ]


def render(part: Table | Facts | str, width: int) -> str:
    """Return the part as shown on a terminal, without rules."""
    console = Console(width=width, file=StringIO())
    console.print(part, markup=False, soft_wrap=isinstance(part, str))
    return console.file.getvalue().replace("\N{BOX DRAWINGS LIGHT HORIZONTAL}", "")


def test_narrow_terminals_show_all_words(commands, monkeypatch):
    """Prevents cut cells, and broken words or numbers, at 80 columns."""
    parts: list[Table | Facts | str] = []
    monkeypatch.setattr(Console, "print", lambda _, part, **__: parts.append(part))
    for command in commands:
        run("", *shlex.split(command))
    monkeypatch.undo()
    tables = [part for part in parts if not isinstance(part, str)]
    assert len(tables) > 15
    for part in tables:
        narrow = render(part, 80)
        assert set(narrow.split()) == set(render(part, 1000).split())
        assert max(map(len, narrow.splitlines())) <= 80, narrow


@pytest.mark.parametrize("width", [80, 60])
def test_any_table_shows_all_words(width):
    """Prevents a column that is cut in tables other than the commands' above."""
    words = [[f"{row}{column:02}{'w' * column}" for column in range(24)] for row in range(3)]
    table = Table.of_rows(
        "Wide", map("column {}".format, range(24)), *[[row] for row in words], keys=3
    )
    facts = Facts("Facts", [("a name of words", f"{'long' * 9} value {'of' * 11} many words")] * 3)
    for part in (table, facts):
        narrow = render(part, width)
        assert set(narrow.split()) == set(render(part, 1000).split())
        assert max(map(len, narrow.splitlines())) <= width
