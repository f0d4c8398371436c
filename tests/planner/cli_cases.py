"""The command line called in this process."""

import json
import os
import tempfile
from typing import Any

import pytest

from omnibal import cli

PLAN = "plan --model internvl-digits --cluster laptop-cpu --pp 2 --max-tiles 8 --max-tokens 512"


def words_of(command: str) -> list[str]:
    """Return words of a command. The temporary folder's path may contain spaces."""
    folder, mark = os.path.realpath(tempfile.gettempdir()), "\uffff"
    return [word.replace(mark, folder) for word in command.replace(folder, mark).split()]


def status(command: str, *arguments: object) -> int:
    """Return a command's exit status. `arguments` may contain spaces."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*words_of(command), *map(str, arguments)])
    return int(ended.value.code or 0)


def run(command: str, *arguments: object) -> None:
    """Run a command that must succeed."""
    assert status(command, *arguments) == 0


def printed(capsys: pytest.CaptureFixture[str], command: str, *arguments: object) -> str:
    """Return standard output of a command that must succeed."""
    capsys.readouterr()
    code, output = status(command, *arguments), capsys.readouterr()
    assert code == 0, output.err
    return output.out


def result(capsys: pytest.CaptureFixture[str], command: str, *arguments: object) -> Any:
    """Return JSON printed by a command that must succeed."""
    return json.loads(printed(capsys, command, *arguments, "--json"))


def failure(capsys: pytest.CaptureFixture[str], command: str, *arguments: object) -> str:
    """Return standard error of a command that must fail with a user error."""
    capsys.readouterr()
    assert status(command, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return output.err
