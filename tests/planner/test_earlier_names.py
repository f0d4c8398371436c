"""Earlier option names are still accepted on the command line."""

import pytest
from typer.main import get_command

from omnibal.cli import app
from omnibal.cli.earlier_names import with_current_names

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("plan --levels 2 -o out", "plan --packing-levels 2 -o out"),
        ("plan --levels=hbp", "plan --packing-levels=hbp"),
        ("plan --encoder beside", "plan --encoder data-parallel"),
        ("plan --encoder=beside", "plan --encoder=data-parallel"),
        ("plan --encoder auto --lengths beside", "plan --encoder auto --lengths beside"),
        ("lengths beside --levels", "lengths beside --levels"),
    ],
)
def test_earlier_names_are_read(given, expected):
    """Prevents an old script failing with `no such option`, and other arguments changed."""
    assert with_current_names(given.split()) == expected.split()


def test_help_names_the_options_of_today():
    """Prevents help that shows two names for an option, or only the earlier one."""
    names = {name for one in get_command(app).commands["plan"].params for name in one.opts}
    assert "--packing-levels" in names and "--levels" not in names
