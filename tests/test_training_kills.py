"""Training that is killed, as the benchmark does it, a few times."""

import json
import subprocess
import sys

from commands import REPOSITORY


def test_killed_training_loses_and_doubles_nothing():
    """Prevents: a kill that costs samples, or from which a run goes on with other numbers; against
    a run that was never killed."""
    command = ("benchmarks/training_kills.py", "--kills", "3", "--seed", "2")
    done = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert sum(result["killed"].values()) == 3 and result["finished"] >= 1
