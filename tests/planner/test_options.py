"""Groups of options: declared once, and parsed for each command that shares them."""

import inspect
import re
import shlex
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated

import pytest
import typer
from cli_cases import printed

from omnibal import cli
from omnibal.cli.caps_command import caps
from omnibal.cli.help_groups import with_groups
from omnibal.cli.lengths_command import lengths
from omnibal.cli.pack_command import pack
from omnibal.cli.plan_command import plan
from omnibal.cli.profile_command import profile

pytestmark = pytest.mark.quick

COMMANDS = {function.__name__: function for function in (lengths, pack, caps, profile, plan)}
OWN = {
    "lengths": "an argument, or an option that may be repeated",
    "output": "another file",
    "processes": "other work",
    "samples_per_step": "of caps, or of strategies",
    "model": "of what is trained, or of packs alone, where there is a default",
    "cluster": "likewise",
    "micro_batches": "of steps that may be named by their samples instead",
    "dp": "needed where nothing else is divided",
    "max_tiles": "searched for where that is possible",
    "max_tokens": "likewise",
    "precision": "fp8 is planned and not profiled",
}
"""Options with another meaning in each command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    tp: Annotated[int, typer.Option(min=1, help="tensor")]
    pp: Annotated[int, typer.Option(min=1, help="pipeline")] = 1


def test_a_group_is_given_what_was_typed(capsys) -> None:
    """Prevents options that are parsed and then lost, or get another default."""
    app = typer.Typer()

    @app.command()
    @with_groups
    def show(sizes: Sizes, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        """Show sizes."""
        print(sizes, loud)

    for words in ("--tp 2", "--pp 3 --loud --tp 1"):
        app(words.split(), standalone_mode=False)
    assert capsys.readouterr().out == "Sizes(tp=2, pp=1) False\nSizes(tp=1, pp=3) True\n"
    for wrong in ("--pp 3", "--tp 0"):
        with pytest.raises(Exception, match=r"Missing|greater"):
            app(wrong.split(), standalone_mode=False)


def options_of(command: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(with_groups(COMMANDS[command])).parameters)


def test_an_option_of_several_commands_is_declared_once() -> None:
    """Prevents an option with different ranges, defaults or help in two commands."""
    shared = 0
    for first, second in combinations(COMMANDS, 2):
        one, other = options_of(first), options_of(second)
        for name in (one.keys() & other.keys()) - OWN.keys():
            assert one[name].annotation == other[name].annotation, (first, second, name)
            assert one[name].default == other[name].default, (first, second, name)
            shared += 1
    assert shared > 20


def test_names_of_their_own_are_that() -> None:
    """Prevents the test above from skipping a name that could be declared once."""
    for name in OWN:
        found = [options_of(command)[name] for command in COMMANDS if name in options_of(command)]
        assert len(found) > 1
        assert any(one.annotation != found[0].annotation for one in found), name


@pytest.mark.parametrize("columns", [80, 60])
def test_help_has_every_option_and_whole_words(columns, monkeypatch, capsys) -> None:
    """Prevents an option without help, a truncated word, and a line wider than requested."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, command in typer.main.get_command(cli.app).commands.items():
        is_long = any("--help-all" in option.opts for option in command.params)
        page = printed(capsys, f"{name} {'--help-all' if is_long else '--help'}")
        words = set(page.split())
        for option in command.params:
            assert option.help and words.issuperset(option.help.split()), (name, option.name)
            assert words & {*option.opts, option.metavar}, option
        above, _, below = page.partition("Examples:\n")
        example, _, rest = below.partition("\n\n")
        assert max(map(len, f"{above}\n{rest}".splitlines())) <= columns, name
        assert not example or max(map(len, example.splitlines())) <= 80, name


def test_help_of_plan_begins_with_what_everyone_needs(monkeypatch, capsys) -> None:
    """Prevents a help page with --output and --gpus after rarely used options."""
    monkeypatch.setenv("COLUMNS", "80")
    page = printed(capsys, "plan --help")
    names = re.findall(r"^  (?:-o, )?(--[a-z-]+)", page, re.MULTILINE)
    assert names[:4] == ["--model", "--cluster", "--gpus", "--lengths"]
    assert set(names[4:7]) == {"--samples-per-step", "--for", "--output"}
    assert len(page.splitlines()) <= 80 and page.count("  omnibal plan ") == 2
    for examples in cli.EXAMPLES.values():
        for line in examples.replace("\\\n", " ").strip().splitlines():
            command, *words = shlex.split(line)[1:]
            typer.main.get_command(cli.app).commands[command].make_context(command, words)
