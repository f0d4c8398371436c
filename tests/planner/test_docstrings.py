"""Every docstring is readable without the preceding one."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
MIDDLES = (
    *(f"{word} " for word in "Of And Or But Also Those These Which That Whose Whom".split()),
    *("The same", "As above", "Likewise", "Besides", "Ditto"),
)
"""Beginnings that continue an earlier sentence."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring: of modules, classes, functions and variables."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        described = (ast.Assign, ast.AnnAssign)
        for before, one in zip([node, *body], body, strict=False):
            is_first = before is node and isinstance(
                node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            )
            if not (is_first or isinstance(before, described)) or not isinstance(one, ast.Expr):
                continue
            if isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                yield one.lineno, one.value.value


def test_every_docstring_stands_alone():
    """Prevents a docstring that continues another, which is unclear in an editor's tooltip."""
    paths = [*(ROOT / "omnibal").rglob("*.py"), *(ROOT / "megatron" / "vlm").rglob("*.py")]
    trees = {path: ast.parse(path.read_text()) for path in sorted(paths)}
    found = [(path, line, text) for path in trees for line, text in docstrings(trees[path])]
    assert len(found) > 3_500
    begin = ((f"{path}:{line}: {text[:60]}", text) for path, line, text in found)
    wrong = [told for told, text in begin if text.startswith(MIDDLES)]
    assert not wrong, "\n".join(wrong)


def test_all_kinds_of_docstrings_are_seen():
    """Prevents a vacuous test that finds no docstrings."""
    text = '"""A."""\nx = 1\n"""B."""\nclass C:\n    """C."""\n    y: int\n    """D."""\n'
    text += 'def f():\n    """E."""\n    z = "no"\n    "F"\n    return "no"\n'
    assert {doc for _, doc in docstrings(ast.parse(text))} == {"A.", "B.", "C.", "D.", "E.", "F"}
