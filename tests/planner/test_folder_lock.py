"""The lock of a folder that only one run may write to."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnibal.base.errors import UserError
from omnibal.base.folder_lock import lock_folder

HOLD = """
import subprocess, sys, time
from pathlib import Path
from omnibal.base.folder_lock import lock_folder
with lock_folder("--save", Path(sys.argv[1]), print):
    child = subprocess.Popen(["sleep", "600"], close_fds=False)
    print(child.pid, flush=True)
    child.wait()
"""
LOCK = ".lock"


def test_a_second_run_is_refused_by_the_name_of_the_first(tmp_path):
    """Prevents two runs writing to one folder, and an error that does not name the first run."""
    node, second = os.uname().nodename, r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*"
    with lock_folder("-o", tmp_path, print):
        named = rf"process {os.getpid()} on {node} since {second}; .* another -o$"
        with pytest.raises(UserError, match=named), lock_folder("-o", tmp_path, print):
            pass
    with lock_folder("-o", tmp_path, print):
        (tmp_path / LOCK).write_text("1 another-node 2026-01-01T00:00:00")
        match = "process 1 on another-node"
        with pytest.raises(UserError, match=match), lock_folder("-o", tmp_path, print):
            pass


def test_a_dead_holder_frees_its_folder_with_its_children(tmp_path):
    """Prevents a lock that outlives a killed run, and one taken while its child still saves."""
    said: list[str] = []

    def say(line):
        said.append(line)
        os.kill(child, signal.SIGKILL)

    command = [sys.executable, "-c", HOLD, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        holder.kill()
    with lock_folder("--save", tmp_path, say):
        assert (tmp_path / LOCK).read_text().startswith(f"{os.getpid()} ")
    assert said == [f"{tmp_path}: waiting for children of process {holder.pid}, which has ended"]


def test_a_folder_that_cannot_be_written_is_named():
    """Prevents building a model for minutes before its first save fails."""
    with (
        pytest.raises(UserError, match=r"^--save /proc/run: .*; give a writable directory"),
        lock_folder("--save", Path("/proc/run"), print),
    ):
        pass
