"""Earlier option names are still accepted on the command line."""

import json

import pytest
from cli_cases import PLAN, status
from typer.main import get_command

from omnibal.cli import app
from omnibal.cli.earlier_names import with_current_names

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("plan --levels 2 -o out", "plan --packing-levels 2 -o out"),
        ("plan --levels=hbp", "plan --packing-levels=hbp"),
        ("plan --encoder=beside", "plan --encoder=data-parallel"),
        ("plan --encoder auto --lengths beside", "plan --encoder auto --lengths beside"),
        ("lengths beside --levels", "lengths beside --levels"),
        ("pack l.parquet --method isf", "pack l.parquet --packing isf"),
    ],
)
def test_earlier_names_are_read(given, expected):
    """Prevents an old script failing with `no such option`, and other arguments changed."""
    assert with_current_names(given.split())[0] == expected.split()


def test_earlier_names_are_answered_with_the_current_ones(capsys, tmp_path):
    """Prevents scripts kept with names that the next release refuses, and JSON with a note."""
    words = ("--levels", "1", "--encoder", "beside", "--json", "-o", tmp_path / "plan")
    assert status(PLAN, *words) == 0
    printed, notes = capsys.readouterr()
    assert json.loads(printed)["encoder"]["placement"] == "data-parallel"
    assert notes.startswith("note: --levels is now --packing-levels\nnote: --encoder beside is now")


def test_help_names_the_options_of_today():
    """Prevents help that shows two names for an option, or only the earlier one."""
    names = {name for one in get_command(app).commands["plan"].params for name in one.opts}
    assert "--packing-levels" in names and "--levels" not in names
