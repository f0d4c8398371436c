"""The command line called in this process."""

import pytest

from omnibal import cli

PLAN = "plan --model internvl-digits --cluster laptop-cpu --pp 2 --max-tiles 8 --max-tokens 512"


def run(command: str, *arguments: object) -> None:
    """Run a command that must succeed."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), *map(str, arguments)])
    assert ended.value.code in (0, None)


def failure(capsys, command: str, *arguments: object) -> str:
    """Standard error of a command that must fail as a user's mistake."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), *map(str, arguments)])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err
