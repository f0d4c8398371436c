"""What the launchers would start, found out by stand-ins for torchrun, srun and python on PATH."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

REPOSITORY = Path(__file__).parent.parent
NODES_SCRIPT = REPOSITORY / "scripts" / "train_nodes.sh"
ONE_NODE_SCRIPT = REPOSITORY / "scripts" / "train_8gpu.sh"
SBATCH = REPOSITORY / "scripts" / "slurm" / "train.sbatch"
SCAN_SBATCH = SBATCH.with_name("scan.sbatch")

# Each program starts itself again under this Python, whose path may hold a space.
_RECORD = """#!/bin/sh
''''exec '{python}' "$0" "$@" # '''
import json, os, sys
kept = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS NCCL_IB_HCA".split()
kept += "CUDA_MODULE_LOADING PYTORCH_CUDA_ALLOC_CONF CUDA_DEVICE_MAX_CONNECTIONS".split()
with open("{log}", "a") as log:
    environment = {{name: os.environ[name] for name in kept if name in os.environ}}
    print(json.dumps([sys.argv[1:], environment]), file=log)
sys.exit(int(os.environ.get("FAKE_EXIT", "0")))
"""
_SRUN = """#!/bin/sh
''''exec '{python}' "$0" "$@" # '''
import json, os, subprocess, sys
first = next(i for i, word in enumerate(sys.argv) if i and not word.startswith("-"))
with open("{log}", "a") as log:
    print(json.dumps([sys.argv[1:first], {{}}]), file=log)
tasks, per_node = int(os.environ["FAKE_TASKS"]), 8
for rank in (0, tasks - 1):
    task = {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank % per_node, "SLURM_NTASKS": tasks}}
    environment = os.environ | {{name: str(value) for name, value in task.items()}}
    code = subprocess.run(sys.argv[first:], env=environment).returncode
sys.exit(code)
"""
_SCONTROL = """#!/bin/sh
''''exec '{python}' "$0" "$@" # '''
import os, sys
assert sys.argv[1:] == ["show", "hostnames", "gpu[01-64]"], sys.argv
for node in range(1, int(os.environ["FAKE_TASKS"]) // 8 + 1):
    print(f"gpu{{node:02}}")
"""


# What every rank is given unless the user says otherwise.
RANK_SETTINGS = {
    "OMP_NUM_THREADS": "4",
    "CUDA_MODULE_LOADING": "EAGER",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


class Bench:
    """A folder with stand-ins, a run's directory, and what was started."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "my run"
        self.job = ["plan", "meta.json", "tokenizer.model", str(self.run)]
        self._log = folder / "started"
        self._programs = folder / "bin"
        self._programs.mkdir()
        for name, text in {
            "torchrun": _RECORD,
            "python": _RECORD,
            "ray": _RECORD,
            "srun": _SRUN,
            "scontrol": _SCONTROL,
        }.items():
            program = self._programs / name
            program.write_text(text.format(python=sys.executable, log=self._log))
            program.chmod(0o755)

    def start(self, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a launcher with nothing of this process's environment but PATH."""
        path = f"{self._programs}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", *map(str, command)],
            env={"PATH": path, **environment}, text=True, capture_output=True, timeout=600,
        )  # fmt: skip

    def started(self) -> list[tuple[list[str], dict[str, str]]]:
        """Arguments and environment of every stand-in that was started."""
        if not self._log.exists():
            return []
        return [tuple(json.loads(line)) for line in self._log.read_text().splitlines()]

    def slurm(self, nodes: int) -> dict[str, str]:
        """The environment in which Slurm runs a batch script."""
        return {
            "SLURM_SUBMIT_DIR": str(REPOSITORY),
            "SLURM_JOB_NODELIST": "gpu[01-64]",
            "SLURM_JOB_ID": "1234567",
            "SLURM_CPUS_PER_TASK": "8",
            "FAKE_TASKS": str(8 * nodes),
        }

    def trainer_arguments(self, *more: str) -> list[str]:
        plan, data, tokenizer, run = self.job
        names = ("--plan", plan, "--data", data, "--tokenizer-model", tokenizer, "--save", run)
        return [*names, *more]

    def leave_checkpoint(self) -> None:
        self.run.mkdir()
        (self.run / "latest_checkpointed_iteration.txt").write_text("5")


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path)


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def refused(result: subprocess.CompletedProcess[str], bench: Bench) -> str:
    assert (result.returncode, result.stdout) == (2, "") and not bench.started(), result.stderr
    return result.stderr


@pytest.mark.parametrize("nodes", [4, 64])
def test_nodes_under_torchrun(bench, nodes):
    """Prevents: nodes that wait for each other at different places, or a save cut off at 30 s."""
    last = str(nodes - 1)
    result = bench.start(NODES_SCRIPT, nodes, last, "node-a", *bench.job, "--lr", "1e-5")
    assert result.returncode == 0, result.stderr
    [(arguments, environment)] = bench.started()
    expected = {
        "--nnodes": str(nodes), "--node-rank": last, "--master-addr": "node-a",
        "--master-port": "29500", "--nproc-per-node": "8", "--shutdown-timeout": "600",
    }  # fmt: skip
    assert {name: option(arguments, name) for name in expected} == expected
    trainer = arguments.index(str(REPOSITORY / "pretrain_vlm.py"))
    assert trainer == 2 * len(expected)
    assert arguments[trainer + 1 :] == bench.trainer_arguments("--lr", "1e-5")
    assert environment == RANK_SETTINGS


def test_a_range_of_nodes_under_torchrun(bench):
    """Prevents: nodes that give up when one fails, or that start anew without a plan for fewer."""
    result = bench.start(NODES_SCRIPT, "3:4", "3", "node-a", *bench.job, "--lr", "1e-5")
    assert result.returncode == 0, result.stderr
    [(arguments, _)] = bench.started()
    expected = {
        "--nnodes": "3:4", "--rdzv-backend": "c10d", "--rdzv-endpoint": "node-a:29500",
        "--nproc-per-node": "8", "--max-restarts": "100",
    }  # fmt: skip
    assert {name: option(arguments, name) for name in expected} == expected
    assert "--node-rank" not in arguments and "--rdzv-conf" not in arguments
    trainer = arguments.index(str(REPOSITORY / "pretrain_vlm.py"))
    assert arguments[trainer + 1 :] == bench.trainer_arguments("--lr", "1e-5", "--elastic")
    assert bench.start(NODES_SCRIPT, "3:4", "0", "node-a", *bench.job).returncode == 0
    assert option(bench.started()[-1][0], "--rdzv-conf") == "is_host=true"
    assert bench.start(NODES_SCRIPT, "3:", "0", "node-a", *bench.job).returncode == 2


@pytest.mark.parametrize(
    "script", [[ONE_NODE_SCRIPT], [NODES_SCRIPT, 1, 0, "localhost"]], ids=["8gpu", "nodes"]
)
def test_one_node_under_torchrun(bench, script):
    """Prevents: two jobs of one node that meet at one port, and settings that do not arrive."""
    own = {
        "OMP_NUM_THREADS": "2", "NCCL_IB_HCA": "mlx5", "CUDA_MODULE_LOADING": "LAZY",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    }  # fmt: skip
    result = bench.start(*script, *bench.job, **own)
    assert result.returncode == 0, result.stderr
    [(arguments, environment)] = bench.started()
    assert arguments[:3] == ["--standalone", "--nproc-per-node", "8"]
    assert arguments[-8:] == bench.trainer_arguments()
    assert environment == own


def test_port_and_gpus_of_torchrun_can_be_set(bench):
    """Prevents: nodes of another size, or a port in use, that need a script of their own."""
    environment = {"GPUS_PER_NODE": "4", "MASTER_PORT": "29999"}
    bench.start(NODES_SCRIPT, 2, 1, "node-a", *bench.job, **environment)
    [(arguments, _)] = bench.started()
    assert option(arguments, "--nproc-per-node") == "4"
    assert option(arguments, "--master-port") == "29999"


@pytest.mark.parametrize("script", ["8gpu", "nodes", "slurm"])
def test_checkpoint_is_resumed(bench, script):
    """Prevents: a second start that is refused, or that starts over from other weights."""
    bench.leave_checkpoint()
    commands = {
        "8gpu": [ONE_NODE_SCRIPT],
        "nodes": [NODES_SCRIPT, 2, 0, "node-a"],
        "slurm": [SBATCH],
    }
    result = bench.start(
        *commands[script], *bench.job, "--load", "other", "--finetune", **bench.slurm(1)
    )
    assert result.returncode == 0, result.stderr
    arguments, _ = bench.started()[-1]
    # Whatever it started from, it goes on from its own checkpoint: the last --load counts.
    assert arguments[-4:] == ["--load", "other", "--load", str(bench.run)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("0", "0", "a"), "NODES is '0'"),
        (("two", "0", "a"), "NODES is 'two'"),
        (("2", "2", "a"), "NODE_RANK is '2'; give each node another number, from 0 to 1"),
        (("2", "-1", "a"), "NODE_RANK is '-1'"),
        (("2", "08", "a"), "NODE_RANK is '08'"),
        (("2", "0", ""), "MASTER is ''"),
        (("2", "0", "localhost"), "MASTER is 'localhost'"),
    ],
)
def test_wrong_nodes_are_refused(bench, arguments, complaint):
    """Prevents: nodes that wait ten minutes for a number given twice or at a wrong address."""
    message = refused(bench.start(NODES_SCRIPT, *arguments, *bench.job), bench)
    assert message.startswith(f"error: {complaint}") and len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "script", [ONE_NODE_SCRIPT, NODES_SCRIPT, SBATCH], ids=lambda path: path.name
)
def test_missing_arguments_show_the_usage(bench, script):
    """Prevents: a job that waits in the queue for a mistake."""
    for count in range(4):
        result = bench.start(script, *bench.job[:count], **bench.slurm(1))
        message = refused(result, bench)
        assert message.startswith("usage: ") and "PLAN META.json TOKENIZER.model RUN" in message


@pytest.mark.parametrize("nodes", [1, 4, 64])
def test_ranks_under_slurm(bench, nodes):
    """Prevents: ranks that do not find each other, or that Slurm's signals do not reach."""
    result = bench.start(SBATCH, *bench.job, "--lr", "1e-5", **bench.slurm(nodes))
    assert result.returncode == 0, result.stderr
    (srun, _), *ranks = bench.started()
    assert {"--kill-on-bad-exit=1", "--cpus-per-task=8"} <= set(srun)
    world = 8 * nodes
    for rank, (arguments, environment) in zip((0, world - 1), ranks, strict=True):
        assert arguments == ["pretrain_vlm.py", *bench.trainer_arguments("--lr", "1e-5")]
        assert environment == {
            "RANK": str(rank), "LOCAL_RANK": str(rank % 8), "WORLD_SIZE": str(world),
            "MASTER_ADDR": "gpu01", "MASTER_PORT": "24567",
        } | RANK_SETTINGS  # fmt: skip


def test_exit_code_under_slurm_is_the_ranks(bench):
    """Prevents: a failed run that Slurm lists as completed."""
    result = bench.start(SBATCH, *bench.job, FAKE_EXIT="2", **bench.slurm(1))
    assert result.returncode == 2


def test_slurm_asks_for_what_the_ranks_need():
    """Prevents: a job that is killed at its limit without a checkpoint, or one log per requeue."""
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", SBATCH.read_text(), re.MULTILINE))
    assert directives["ntasks-per-node"] == directives["gpus-per-node"] == "8"
    assert directives["signal"] == "TERM@300"  # to the ranks; B: would be to this script alone
    assert directives["open-mode"] == "append" and "requeue" in directives


def test_submission_from_elsewhere_is_refused(bench, tmp_path):
    """Prevents: a traceback of python on every rank."""
    environment = bench.slurm(1) | {"SLURM_SUBMIT_DIR": str(tmp_path)}
    message = refused(bench.start(SBATCH, *bench.job, **environment), bench)
    assert "submit with sbatch, from the repository's root" in message


def test_a_scan_starts_ray_on_every_node(bench, tmp_path):
    """Prevents: nodes that idle for hours, a second cluster, or a scan on one node alone."""
    data = ["s3://bucket/meta.json", "-o", "my lengths.parquet"]
    ray, log = tmp_path / "bin" / "ray", tmp_path / "started"
    ray.rename(ray.with_name("recorded"))
    # A cluster is well when both of its nodes were started.
    waits = (
        f"while [ $(grep -c health-check {log}) -lt 1 ] || [ $(grep -c -- --block {log}) -lt 2 ]"
    )
    waits += "; do sleep 0.05; done"
    ray.write_text(f'#!/bin/sh\n"$(dirname "$0")/recorded" "$@"\n[ $1 = start ] || {waits}\n')
    ray.chmod(0o755)
    result = bench.start(SCAN_SBATCH, *data, **bench.slurm(4))
    assert result.returncode == 0, result.stderr
    started = [arguments for arguments, _ in bench.started()]
    [srun] = [words for words in started if words[0].startswith("--no-kill")]
    assert "--cpus-per-task=8" in srun
    address = "gpu01:24567"
    cores = ["--num-cpus", "8", "--disable-usage-stats", "--block"]
    head = ["start", "--head", "--port", "24567", "--include-dashboard=false", *cores]
    others = ["start", "--address", address, *cores]
    nodes = [words for words in started if words[0] == "start"]
    assert nodes == [head, others]
    assert ["health-check", "--address", address] in started
    scan = ["-m", "omnibal", "lengths", *data, "--engine", "ray", "--address", address]
    assert scan in started


def test_a_scan_ends_as_the_command_does(bench, tmp_path):
    """Prevents: a failed scan that Slurm lists as completed, and a submission from elsewhere."""
    elsewhere = bench.slurm(1) | {"SLURM_SUBMIT_DIR": str(tmp_path)}
    assert "submit with sbatch" in refused(bench.start(SCAN_SBATCH, "a", **elsewhere), bench)
    assert "usage: sbatch" in bench.start(SCAN_SBATCH, **bench.slurm(1)).stderr
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 2\n")
    assert bench.start(SCAN_SBATCH, "a", **bench.slurm(1)).returncode == 2
    directives = set(re.findall(r"^#SBATCH --([a-z-]+)", SCAN_SBATCH.read_text(), re.MULTILINE))
    assert {"requeue", "no-kill", "ntasks-per-node"} <= directives
