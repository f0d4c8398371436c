"""Launch scripts under fake torchrun, srun and python programs that record their arguments."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

REPOSITORY = Path(__file__).parent.parent
TRAINER = str(REPOSITORY / "pretrain_vlm.py")
NODES_SCRIPT = REPOSITORY / "scripts" / "train_nodes.sh"
ONE_NODE_SCRIPT = REPOSITORY / "scripts" / "train_8gpu.sh"
SBATCH = REPOSITORY / "scripts" / "slurm" / "train.sbatch"
SCAN_SBATCH = SBATCH.with_name("scan.sbatch")

# The shell line runs the program under this Python; its path may have a space.
_START = """#!/bin/sh
''''exec '{python}' "$0" "$@" # '''
import json, os, subprocess, sys
def record(words, environment):
    with open("{log}", "a") as log:
        print(json.dumps([words, environment]), file=log)
"""
_RECORD = """
kept = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS NCCL_IB_HCA".split()
kept += "CUDA_MODULE_LOADING PYTORCH_CUDA_ALLOC_CONF CUDA_DEVICE_MAX_CONNECTIONS".split()
kept += ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "GLOO_SOCKET_IFNAME"]
record(sys.argv[1:], {name: os.environ[name] for name in kept if name in os.environ})
sys.exit(int(os.environ.get("FAKE_EXIT", "0")))
"""
_SRUN = """
first = next(i for i, word in enumerate(sys.argv) if i and not word.startswith("-"))
record(sys.argv[1:first], {})
tasks, per_node = int(os.environ["FAKE_TASKS"]), 8
for rank in (0, tasks - 1):
    task = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % per_node, "SLURM_NTASKS": tasks}
    environment = os.environ | {name: str(value) for name, value in task.items()}
    code = subprocess.run(sys.argv[first:], env=environment).returncode
sys.exit(code)
"""
_SCONTROL = """
assert sys.argv[1:] == ["show", "hostnames", "gpu[01-64]"], sys.argv
for node in range(1, int(os.environ["FAKE_TASKS"]) // 8 + 1):
    print(f"gpu{node:02}")
"""
_PROGRAMS = dict.fromkeys(("torchrun", "python", "ray"), _RECORD)
_PROGRAMS |= {"srun": _SRUN, "scontrol": _SCONTROL}

# Default environment of every rank.
RANK_SETTINGS = {
    "OMP_NUM_THREADS": "4",
    "CUDA_MODULE_LOADING": "EAGER",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}

Starts = list[tuple[list[str], dict[str, str]]]
"""Arguments and environment of every recorded program."""


class Bench:
    """A folder with fake programs, their record, and a run's directory."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "my run"
        self.job = ["plan", "meta.json", "tokenizer.model", str(self.run)]
        self._log = folder / "started"
        self._programs = folder / "bin"
        self._programs.mkdir()
        for name, text in _PROGRAMS.items():
            program = self._programs / name
            program.write_text(_START.format(python=sys.executable, log=self._log) + text)
            program.chmod(0o755)

    def start(self, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a launcher with only PATH from this process's environment."""
        path = f"{self._programs}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", *map(str, command)],
            env={"PATH": path, **environment}, text=True, capture_output=True, timeout=600,
        )  # fmt: skip

    def launches(self, *command: object, **environment: str) -> Starts:
        """Run a launcher that must succeed; return the programs it started."""
        self._log.unlink(missing_ok=True)
        result = self.start(*command, **environment)
        assert result.returncode == 0, result.stderr
        return [tuple(json.loads(line)) for line in self._log.read_text().splitlines()]

    def refusal(self, *command: object, **environment: str) -> str:
        """Run a launcher that must start nothing; return its error output."""
        result = self.start(*command, **environment)
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        assert not self._log.exists()
        return result.stderr

    def slurm(self, nodes: int) -> dict[str, str]:
        """Environment of a Slurm batch script."""
        return {
            "SLURM_SUBMIT_DIR": str(REPOSITORY),
            "SLURM_JOB_NODELIST": "gpu[01-64]",
            "SLURM_JOB_ID": "1234567",
            "SLURM_CPUS_PER_TASK": "8",
            "FAKE_TASKS": str(8 * nodes),
        }

    def trainer_arguments(self, *more: str) -> list[str]:
        names = ("--plan", "--data", "--tokenizer-model", "--save")
        return [word for pair in zip(names, self.job, strict=True) for word in pair] + [*more]


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path)


def parse_torchrun(starts: Starts) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Return torchrun's options, the trainer's arguments and the environment."""
    [(words, environment)] = starts
    trainer = words.index(TRAINER)
    options = dict(zip(words[:trainer:2], words[1:trainer:2], strict=True))
    return options, words[trainer + 1 :], environment


@pytest.mark.parametrize(
    ("nodes", "gpus", "port"), [(4, "8", "29500"), (64, "8", "29500"), (2, "4", "29999")]
)
def test_nodes_under_torchrun(bench, nodes, gpus, port):
    """Prevents nodes with different rendezvous addresses, and a final save killed after 30 s."""
    last = str(nodes - 1)
    own = {"GPUS_PER_NODE": gpus, "MASTER_PORT": port} if nodes == 2 else {}
    starts = bench.launches(NODES_SCRIPT, nodes, last, "node-a", *bench.job, "--lr", "1e-5", **own)
    options, arguments, environment = parse_torchrun(starts)
    assert options == {
        "--nnodes": str(nodes), "--node-rank": last, "--master-addr": "node-a",
        "--master-port": port, "--nproc-per-node": gpus,
    }  # fmt: skip
    assert arguments == bench.trainer_arguments("--lr", "1e-5")
    environment.pop("MASTER_PORT", None)  # set by the launcher itself
    assert environment == RANK_SETTINGS | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}


def test_a_range_of_nodes_under_torchrun(bench):
    """Prevents nodes that exit when another fails, or restart without --elastic."""
    expected = {
        "--nnodes": "3:4", "--rdzv-backend": "c10d", "--rdzv-endpoint": "node-a:29500",
        "--nproc-per-node": "8", "--max-restarts": "100", "--rdzv-id": "omnibal",
    }  # fmt: skip
    for rank, more in ((3, {}), (0, {"--rdzv-conf": "is_host=true"})):
        starts = bench.launches(NODES_SCRIPT, "3:4", rank, "node-a", *bench.job, "--lr", "1e-5")
        options, arguments, _ = parse_torchrun(starts)
        assert options == expected | more
        assert arguments == bench.trainer_arguments("--lr", "1e-5", "--elastic")
    assert bench.start(NODES_SCRIPT, "3:", "0", "node-a", *bench.job).returncode == 2


def test_one_node_under_torchrun(bench):
    """Prevents port collisions of two jobs on a node, and lost environment settings."""
    own = {
        "OMP_NUM_THREADS": "2", "NCCL_IB_HCA": "mlx5", "CUDA_MODULE_LOADING": "LAZY",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    }  # fmt: skip
    [(arguments, environment)] = bench.launches(ONE_NODE_SCRIPT, *bench.job, **own)
    assert arguments[:3] == ["--standalone", "--nproc-per-node", "8"]
    assert arguments[-8:] == bench.trainer_arguments()
    assert environment == own | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}


@pytest.mark.parametrize(
    ("named", "chosen"),
    [("lo", "lo"), ("=lo:1,eth", "lo"), ("l,eth", "lo"), ("none", ""), ("^docker,eth", None)],
)
def test_checkpoints_go_over_the_network_of_nccl(bench, named, chosen):
    """Prevents Gloo on another network interface than NCCL: checkpoints would hang."""
    for script in ([NODES_SCRIPT, 2, 0, "node-a"], [SBATCH]):
        own = bench.slurm(1) | {"NCCL_SOCKET_IFNAME": named}
        for given in ({}, {"GLOO_SOCKET_IFNAME": "ib7"}):
            *_, (_, environment) = bench.launches(*script, *bench.job, **own, **given)
            assert environment.get("GLOO_SOCKET_IFNAME") == given.get("GLOO_SOCKET_IFNAME", chosen)


@pytest.mark.parametrize(
    "script",
    [[ONE_NODE_SCRIPT], [NODES_SCRIPT, 2, 0, "node-a"], [SBATCH]],
    ids=["8gpu", "nodes", "slurm"],
)
def test_checkpoint_is_resumed(bench, script):
    """Prevents a second start that is refused or reloads the initial weights."""
    bench.run.mkdir()
    (bench.run / "latest_checkpointed_iteration.txt").write_text("5")
    starts = bench.launches(*script, *bench.job, "--load", "other", "--finetune", **bench.slurm(1))
    # The last --load wins: the run's own checkpoint, not the initial weights.
    assert starts[-1][0][-4:] == ["--load", "other", "--load", str(bench.run)]


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
    """Prevents a ten-minute rendezvous timeout for a wrong node rank or address."""
    message = bench.refusal(NODES_SCRIPT, *arguments, *bench.job)
    assert message.startswith(f"error: {complaint}") and len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "script", [ONE_NODE_SCRIPT, NODES_SCRIPT, SBATCH], ids=lambda path: path.name
)
def test_missing_arguments_show_the_usage(bench, script):
    """Prevents a queued job that fails at start for missing arguments."""
    for count in range(4):
        message = bench.refusal(script, *bench.job[:count], **bench.slurm(1))
        assert message.startswith("usage: ") and "PLAN META.json TOKENIZER.model RUN" in message


@pytest.mark.parametrize("nodes", [1, 4, 64])
def test_ranks_under_slurm(bench, nodes):
    """Prevents ranks with wrong rendezvous variables, and nodes left running after a failure."""
    (srun, _), *ranks = bench.launches(SBATCH, *bench.job, "--lr", "1e-5", **bench.slurm(nodes))
    assert {"--kill-on-bad-exit=1", "--cpus-per-task=8"} <= set(srun)
    world = 8 * nodes
    for rank, (arguments, environment) in zip((0, world - 1), ranks, strict=True):
        assert arguments == ["pretrain_vlm.py", *bench.trainer_arguments("--lr", "1e-5")]
        assert environment == {
            "RANK": str(rank), "LOCAL_RANK": str(rank % 8), "WORLD_SIZE": str(world),
            "MASTER_ADDR": "gpu01", "MASTER_PORT": "24567",
        } | RANK_SETTINGS  # fmt: skip


def test_slurm_asks_for_what_the_ranks_need():
    """Prevents a job killed at its time limit without a checkpoint, and logs lost on requeue."""
    directives, of_scan = (
        dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)", script.read_text(), re.MULTILINE))
        for script in (SBATCH, SCAN_SBATCH)
    )
    assert directives["ntasks-per-node"] == directives["gpus-per-node"] == "8"
    assert directives["signal"] == "TERM@300"  # to the ranks; B: signals only the batch script
    assert directives["open-mode"] == "append" and "requeue" in directives
    assert {"requeue", "no-kill", "ntasks-per-node"} <= of_scan.keys()


@pytest.mark.parametrize("script", [SBATCH, SCAN_SBATCH], ids=lambda path: path.name)
def test_submission_from_elsewhere_is_refused(bench, tmp_path, script):
    """Prevents a traceback on every rank after sbatch from another directory."""
    environment = bench.slurm(1) | {"SLURM_SUBMIT_DIR": str(tmp_path)}
    message = bench.refusal(script, *bench.job, **environment)
    assert "submit with sbatch, from the repository's root" in message


def test_a_scan_starts_ray_on_every_node(bench, tmp_path):
    """Prevents idle nodes, a second Ray cluster, or a scan on one node only."""
    data = ["s3://bucket/meta.json", "-o", "my lengths.parquet"]
    ray, log = tmp_path / "bin" / "ray", tmp_path / "started"
    ray.rename(ray.with_name("recorded"))
    # The health check passes once both nodes were started.
    waits = (
        f"while [ $(grep -c health-check {log}) -lt 1 ] || [ $(grep -c -- --block {log}) -lt 2 ]"
    )
    waits += "; do sleep 0.05; done"
    ray.write_text(f'#!/bin/sh\n"$(dirname "$0")/recorded" "$@"\n[ $1 = start ] || {waits}\n')
    ray.chmod(0o755)
    launches = [arguments for arguments, _ in bench.launches(SCAN_SBATCH, *data, **bench.slurm(4))]
    [srun] = [words for words in launches if words[0].startswith("--no-kill")]
    assert "--cpus-per-task=8" in srun
    address = ["--address", "gpu01:24567"]
    cores = ["--num-cpus", "8", "--disable-usage-stats", "--block"]
    head = ["start", "--head", "--port", "24567", "--include-dashboard=false", *cores]
    nodes = [words for words in launches if words[0] == "start"]
    assert nodes == [head, ["start", *address, *cores]]
    assert ["health-check", *address] in launches
    assert ["-m", "omnibal", "lengths", *data, "--engine", "ray", *address] in launches


def test_jobs_of_slurm_end_as_their_commands_do(bench, tmp_path):
    """Prevents a failed run or scan that Slurm lists as COMPLETED."""
    assert "usage: sbatch" in bench.start(SCAN_SBATCH, **bench.slurm(1)).stderr
    failed = bench.start(SBATCH, *bench.job, FAKE_EXIT="2", **bench.slurm(1))
    assert failed.returncode == 2
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 2\n")
    assert bench.start(SCAN_SBATCH, "a", **bench.slurm(1)).returncode == 2
