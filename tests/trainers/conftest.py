"""Exports read by their target trainers; run by `scripts/test_trainers.sh`.

`.venv` lacks the trainers' packages, so pytest skips these tests there.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("swift") else ["test_*.py"]
