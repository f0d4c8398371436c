"""Stages on a pretended device; each check runs in a process that has prepared no other."""

from pathlib import Path

import pytest
from commands import launcher

CASES = Path(__file__).with_name("pretended_cases.py")


def succeed(*command: object, **environment: str) -> str:
    ended = launcher().run(*command, **environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("case", ["memory", "attention", "refusals", "host_reads", "counts"])
def test_what_is_counted(case):
    """Prevents: bytes, launches, host reads or refusals other than those counted by hand."""
    assert f"passed {case}" in succeed(CASES, case)
