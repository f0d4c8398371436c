"""docs/python.md runs as written, and `import omnibal` exports the names it lists."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from plan_cases import example_lengths

import omnibal
from omnibal.base.errors import UserError

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "python.md"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str]]:
    """Return every Python block of the page, and the output that the page shows for it."""
    blocks = [*_BLOCK.findall(PAGE.read_text()), ("text", "")]
    return [
        (block, printed if kind_after == "text" else "")
        for (kind, block), (kind_after, printed) in pairwise(blocks)
        if kind == "python"
    ]


def test_page_runs_and_prints_what_it_says(tmp_path, monkeypatch):
    """Prevents an example that fails when pasted, and an outdated result."""
    monkeypatch.chdir(tmp_path)
    command = shlex.split(_BLOCK.findall(PAGE.read_text())[0][1])
    assert command[0] == "python" and command[1].startswith("tools/")
    command[:2] = sys.executable, str(ROOT / command[1])
    subprocess.run(command, check=True, capture_output=True)
    names: dict[str, object] = {"__name__": "page"}
    for block, expected in examples():
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            exec(compile(block, str(PAGE), "exec"), names)
        assert output.getvalue() == expected, block
        assert errors.getvalue() == "", block


def test_page_shows_every_name():
    """Prevents a function of `import omnibal` that no example calls."""
    code = "".join(block for block, _ in examples())
    shown = set(re.findall(r"\bomnibal\.(\w+)", code)) - {"model", "search"}
    # The result of `plan` is shown by its attributes.
    assert shown | {"Planned"} == set(omnibal.__all__)


def test_all_names_resolve():
    """Prevents a listed name that cannot be imported, or two lists that differ."""
    from omnibal import library

    assert sorted(omnibal.__all__) == sorted(library.__all__)
    assert all(getattr(omnibal, name) is getattr(library, name) for name in omnibal.__all__)
    with pytest.raises(AttributeError):
        omnibal.__getattr__("plans")


def test_import_imports_nothing_large():
    """Prevents a program that waits for numpy, scipy or torch before it uses them."""
    large = "{'torch', 'scipy', 'numpy', 'pydantic'} & set(sys.modules)"
    program = f"import sys, omnibal; assert not {large}, {large}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda: omnibal.training_job("llama3.1-8b", "h100-80g", precision="bf17"), "bf16"),
        (lambda: omnibal.training_job("llama3.1-8b", "h100-80g", trainer="foo"), "ms-swift"),
        (lambda: omnibal.Samples(lengths=example_lengths(), packing="first fit"), "balanced"),
        (lambda: omnibal.pack(example_lengths(), 512, limits={"tile": 8}), "tiles"),
    ],
    ids=["precision", "trainer", "packing", "limit"],
)
def test_a_word_that_is_not_known_is_refused_with_those_that_are(mistake, said):
    """Prevents a KeyError, and a misspelt setting that is ignored."""
    with pytest.raises(UserError, match=said):
        mistake()
