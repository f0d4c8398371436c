"""Lines of code and words of documentation are within the budget of pyproject.toml."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
BUDGET = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["omnibal"]["budget"]
CODE = {".py", ".sh", ".sbatch"}
PRODUCT = ("omnibal", "megatron", "tools", "scripts", "pretrain_vlm.py", "setup.py")
FOLDERS = (*PRODUCT, "tests", "benchmarks")


def sizes() -> Counter[str]:
    """Return lines of code by folder, by omnibal package and of the product, and words of docs."""
    found: Counter[str] = Counter()
    for folder in FOLDERS:
        root = ROOT / folder
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.suffix not in CODE:
                continue
            lines = path.read_text().count("\n")
            package = "/".join(path.relative_to(ROOT).parts[:2])
            counted = [folder] + ["product"] * (folder in PRODUCT)
            counted += [package] * (folder == "omnibal")
            found.update(dict.fromkeys(counted, lines))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found["words"] = sum(len(page.read_text().split()) for page in pages)
    return found


def test_lines_and_words_are_within_the_budget():
    """Prevents a code base that grows with every change, and lines moved to a folder without a
    limit."""
    found = sizes()
    assert found.keys() - {"words"} == BUDGET["lines"].keys()
    limits = BUDGET["lines"] | {"words": BUDGET["words"]}
    over = {name: (found[name], most) for name, most in limits.items() if found[name] > most}
    assert not over, f"over the budget of pyproject.toml (found, budget), make room: {over}"
