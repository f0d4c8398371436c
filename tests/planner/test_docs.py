"""README and docs/: length, links, file names and commands."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from omnibal.cli import app

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SUBJECTS = (
    *("models", "data", "planning", "encoders", "training", "conversion", "replay", "results"),
    *("faults", "lint", "python", "levels", "replanning"),
)
TRAINERS = sorted((ROOT / "docs" / "trainers").glob("*.md"))
GUIDES = (README, *(ROOT / "docs" / f"{subject}.md" for subject in SUBJECTS), *TRAINERS)
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
MOST_LINES = 150

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
each_guide = pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)

_BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PLACE = re.compile(
    r"(?<![\w/.-])(?:\./)?((?:benchmarks|docs|megatron/vlm|omnibal|scripts|tests|tools)/"
    r"[\w/.-]*\w|pretrain_vlm\.py)"
)
_OPTION = re.compile(r"(?<![\w-])(--?[a-z][a-z-]*)")


def prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def options_of(command: str) -> set[str]:
    """Return all options of an `omnibal` command."""
    parameters = get_command(app).commands[command].params
    return {name for one in parameters for name in (*one.opts, *one.secondary_opts)}


def test_readme_is_short_and_reaches_design_and_log():
    """Prevents a front page too long to read, and pages without a link."""
    assert {"docs/design.md", "docs/log.md"} <= set(_LINK.findall(README.read_text()))
    lines = README.read_text().splitlines()
    assert len(lines) <= MOST_LINES, f"move some of the {len(lines)} lines to a page of docs/"


@each_page
def test_links_resolve(page: Path):
    """Prevents links to moved or renamed files and headings."""
    for link in _LINK.findall(prose(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} names no heading"


@each_guide
def test_named_files_exist(page: Path):
    """Prevents commands and explanations that name a moved or renamed file."""
    missing = [name for name in _PLACE.findall(page.read_text()) if not (ROOT / name).exists()]
    assert not missing


@each_guide
def test_commands_exist_with_their_options(page: Path):
    """Prevents a pasted command that ends with `no such option`."""
    blocks = "".join(_BLOCK.findall(page.read_text()))
    for line in blocks.replace("\\\n", " ").splitlines():
        words = line.split()
        if words[:1] == ["omnibal"]:
            outside_quotes = re.sub(r'"[^"]*"', "", line)
            unknown = set(_OPTION.findall(outside_quotes)) - options_of(words[1])
            assert not unknown, f"{line}: no such option"
        elif "pretrain_vlm.py" in words:
            source = (ROOT / "megatron" / "vlm" / "run" / "arguments.py").read_text()
            options = _OPTION.findall(line.partition("pretrain_vlm.py")[2])
            fields = [option.removeprefix("--").replace("-", "_") for option in options]
            assert all(re.search(f'[ "]{field}"?: ', source) for field in fields), line


@pytest.mark.parametrize("page", GUIDES[1:], ids=lambda page: page.name)
def test_guide_begins_with_a_command(page: Path):
    """Prevents a guide that begins with explanations, or that no page links to."""
    begins, index = "(omnibal|python|scripts/|\\./scripts/)", README
    if page in TRAINERS:
        begins = "omnibal plan [^`]*--for [^`]*\nomnibal export [^`]*```"
        index = ROOT / "docs" / "trainers.md"
    assert re.match(rf"# [^\n]+\n\n```\n{begins}", page.read_text())
    assert f"]({page.relative_to(index.parent)})" in index.read_text()
