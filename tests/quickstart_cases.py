"""What a quickstart's script would start, with stand-ins for all programs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import typer
from commands import REPOSITORY

from omnibal import cli


def script_commands(script: Path, folder: Path, *arguments: str) -> tuple[int, list[list], str]:
    """Status of the script, the commands that it has started in `folder` so far, and its errors."""
    programs, log = folder / "bin", folder / "started"
    (folder / "scripts").mkdir(exist_ok=True)
    programs.mkdir(exist_ok=True)
    for one in (script, script.with_name("quickstart_steps.sh")):
        (folder / "scripts" / one.name).write_text(one.read_text())
    # `refuse` is as environment.sh has it; what makes .venv is left out.
    environment = (REPOSITORY / "scripts" / "environment.sh").read_text()
    refuse = re.search(r"^refuse\(\) \{.*?^\}", environment, re.MULTILINE | re.DOTALL)
    assert refuse is not None
    (folder / "scripts" / "environment.sh").write_text(
        f'cd "$(dirname "${{BASH_SOURCE[0]}}")/.."\n{refuse[0]}\nPATH="{programs}:$PATH"\n'
    )
    if not (interpreter := programs / "stand-in-python").exists():
        interpreter.symlink_to(sys.executable)
    for name in ("python", "omnibal", "torchrun"):
        program = programs / name
        program.write_text(
            # Through env, as the kernel ends an interpreter's path at its first space.
            "#!/usr/bin/env stand-in-python\nimport json, sys, os\n"
            f"print(json.dumps([{name!r}, *sys.argv[1:]]), file=open({str(log)!r}, 'a'))\n"
            "made = [sys.argv[i + 1] for i, w in enumerate(sys.argv) if w in ('--save',)]\n"
            "[os.makedirs(one, exist_ok=True) for one in made]\n"
        )
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", str(folder / "scripts" / script.name), *arguments],
        text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    started = log.read_text().splitlines() if log.exists() else []
    return done.returncode, list(map(json.loads, started)), done.stderr


def unknown_options(commands: list[list[str]]) -> set[str]:
    """Options that commands of `omnibal` are given and do not have."""
    group, unknown = typer.main.get_command(cli.app), set()
    for command in commands:
        if command[0] == "omnibal":
            known = {flag for option in group.commands[command[1]].params for flag in option.opts}
            given = {word for word in command[2:] if re.fullmatch("--?[a-z].*", word)}
            unknown |= given - known
    return unknown
