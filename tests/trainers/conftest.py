"""Exports read by the trainers they are for; `scripts/test_trainers.sh` runs these alone.

They need packages that `.venv` does not have, so that the other tests leave them out.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("swift") else ["test_*.py"]
