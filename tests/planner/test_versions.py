"""Sources against the Python versions that setup.py allows, without those interpreters."""

import ast
import re
import warnings
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
DROPPED = {
    *("asynchat", "asyncore", "distutils", "imp", "smtpd"),  # 3.12
    *("aifc", "audioop", "cgi", "cgitb", "chunk", "crypt", "imghdr", "mailcap", "msilib", "nis"),
    *("nntplib", "ossaudiodev", "pipes", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib"),
    *("lib2to3",),  # 3.13
    "pkg_resources",  # from setuptools, absent in new environments
}
"""Modules removed in Python 3.12 and 3.13."""
SOURCES = [
    path
    for folder in ("omnibal", "megatron", "tools", "benchmarks", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
] + [ROOT / "pretrain_vlm.py", ROOT / "setup.py"]


def test_sources_are_of_every_version_that_is_allowed():
    """Prevents syntax newer than the oldest Python, modules removed in newer ones, and dates
    without time zones or invalid escapes, which Python 3.12 warns about."""
    [allowed] = re.findall(r'python_requires="([^"]+)"', (ROOT / "setup.py").read_text())
    assert allowed == ">=3.11,<3.14"
    assert len(SOURCES) > 200
    for path in SOURCES:
        with warnings.catch_warnings(action="error"):
            tree = ast.parse(path.read_text(), feature_version=(3, 11))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names.append(str(node.module))
            dropped = {name.partition(".")[0] for name in names} & DROPPED
            assert not dropped, f"{path.relative_to(ROOT)}:{node.lineno} imports {dropped}"
            attribute = node.attr if isinstance(node, ast.Attribute) else None
            assert attribute not in ("utcnow", "utcfromtimestamp"), path
