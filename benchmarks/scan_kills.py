"""Scans on a Ray cluster of three nodes while workers, nodes and the command are killed.

    python benchmarks/scan_kills.py [--kills 50] [--samples 20000] [--seed 0]

Starts a cluster on this machine, a head and two nodes with one core each, and scans a dataset like
the quickstart's repeatedly with `omnibal lengths`. Whenever a scan progresses, a process is killed,
of each kind in turn; a killed command is started again. Fails unless every finished scan has the
bytes of a scan by one process, without lost or doubled samples.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster

REPOSITORY = Path(__file__).parent.parent
_STORE_BYTES = 80 * 2**20  # of a node's objects; Ray requires 75 MiB
_STALLED_S = 300.0  # without a finished part; a lost node is noticed much sooner
_KINDS = ("worker", "node", "command")


@dataclass(frozen=True, slots=True)
class Nodes:
    """Ray cluster: a head without cores, and two nodes with one core each."""

    cluster: Cluster

    @classmethod
    def start(cls) -> "Nodes":
        head = {"num_cpus": 0, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        nodes = cls(Cluster(initialize_head=True, head_node_args=head))
        for _ in range(2):
            nodes.add()
        return nodes

    def add(self) -> None:
        """Start a node."""
        self.cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)

    def kill_node(self, rng: random.Random) -> None:
        """Kill all processes of a worker node, and start another."""
        node = rng.choice(sorted(self.cluster.worker_nodes, key=lambda node: node.node_id))
        self.cluster.remove_node(node, allow_graceful=False)
        self.add()

    def kill_worker(self, rng: random.Random) -> bool:
        """Kill a process that runs a task, and return whether there was one."""
        raylets = [
            process.process.pid
            for node in self.cluster.worker_nodes
            for process in node.all_processes["raylet"]
        ]
        working = [
            child
            for pid in raylets
            for child in psutil.Process(pid).children()
            if child.cmdline() and child.cmdline()[0].startswith("ray::_run_task")
        ]
        if working:
            rng.choice(working).kill()
        return bool(working)


@dataclass(frozen=True, slots=True)
class Scans:
    """Scans of a dataset on a cluster, and in one process for comparison."""

    folder: Path
    address: str

    @property
    def output(self) -> Path:
        """Length file of scans on the cluster."""
        return self.folder / "cluster.parquet"

    def command(self, output: Path, *engine: str) -> list[str]:
        """Return the scan's command."""
        data = self.folder / "digits"
        model = ("--model", "internvl-digits", "--tokenizer-model", data / "tokenizer.model")
        words = (data / "train" / "meta.json", *model, "-o", output, *engine)
        return [sys.executable, "-m", "omnibal", "lengths", *map(str, words), "--json"]

    def scan_in_one_process(self) -> bytes:
        """Return the length file of a scan by one process."""
        output = self.folder / "alone.parquet"
        run(self.command(output, "--processes", "1"))
        return output.read_bytes()

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """Run the scan on the cluster; it continues the journal of a killed one."""
        command = self.command(self.output, "--engine", "ray", "--address", self.address)
        with (self.folder / "errors").open("w") as errors:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=errors, text=True
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def finished_bytes(self) -> int:
        """Return the size of the journal of finished parts."""
        partial = self.output.with_name(f"{self.output.name}.partial")
        return partial.stat().st_size if partial.exists() else 0

    def wait_for_more(self, process: subprocess.Popen[str]) -> bool:
        """Wait until the scan finishes a part, and return False if it ends."""
        before, deadline = self.finished_bytes(), time.monotonic() + _STALLED_S
        while process.poll() is None:
            if self.finished_bytes() > before:
                return True
            if time.monotonic() > deadline:
                raise SystemExit(f"no part was finished in {_STALLED_S:.0f} s")
            time.sleep(0.005)
        return False


def run(command: list[str]) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)


def scan_and_kill(
    scans: Scans, nodes: Nodes, kills: int, rng: random.Random
) -> tuple[Counter, int]:
    """Scan until `kills` processes were killed; return kills by kind, and finished scans."""
    expected, counted, finished = scans.scan_in_one_process(), Counter[str](), 0
    kill: dict[str, Callable[[], bool | None]] = {
        "worker": lambda: nodes.kill_worker(rng),
        "node": lambda: nodes.kill_node(rng),
    }
    while counted.total() < kills or not finished:
        with scans.running() as process:
            while scans.wait_for_more(process):
                time.sleep(rng.uniform(0, 0.05))
                kind = _KINDS[counted.total() % len(_KINDS)]
                if counted.total() == kills:
                    process.wait(_STALLED_S)
                elif kind == "command":
                    process.send_signal(signal.SIGKILL)
                    counted[kind] += 1
                    break
                elif kill[kind]() is not False:
                    counted[kind] += 1
            process.wait(_STALLED_S)
        if process.returncode == -signal.SIGKILL:
            continue
        if process.returncode != 0:
            raise SystemExit(f"the scan failed: {(scans.folder / 'errors').read_text()}")
        if scans.output.read_bytes() != expected:
            raise SystemExit("a scan's bytes differ from those of one process")
        scans.output.unlink()
        finished += 1
    return counted, finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        options = ("--output", str(Path(name) / "digits"), "--samples", str(arguments.samples))
        run([sys.executable, "tools/make_digits_dataset.py", *options])
        nodes = Nodes.start()
        try:
            scans = Scans(Path(name), nodes.cluster.address)
            rng = random.Random(arguments.seed)
            counted, finished = scan_and_kill(scans, nodes, arguments.kills, rng)
        finally:
            nodes.cluster.shutdown()
    result = {"killed": dict(counted), "finished": finished, "lost": 0, "doubled": 0}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
