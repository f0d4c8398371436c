"""A scan on a Ray cluster of three nodes, while workers, nodes and the command itself are killed.

    python benchmarks/scan_kills.py [--kills 50] [--samples 20000] [--seed 0]

Starts a cluster on this machine, a head and two nodes of one core, and scans one dataset of the
quickstart's kind again and again with the command that a user types. Whenever the scan has come a
little further, a process of it is killed, of each kind in turn; a killed command is started
again. Every finished scan must be the bytes that one process writes, and so has no sample lost or
doubled: it ends with an error where one is not.
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
_STORE_BYTES = 80 * 2**20  # of a node's objects; Ray asks for 75 MiB at least
_STALLED_S = 300.0  # without a finished part: far more than a lost node is noticed in
_KINDS = ("worker", "node", "command")


@dataclass(frozen=True, slots=True)
class Nodes:
    """A cluster of a head without cores and of two nodes with one each."""

    cluster: Cluster

    @classmethod
    def start(cls) -> "Nodes":
        """Start all three."""
        head = {"num_cpus": 0, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        nodes = cls(Cluster(initialize_head=True, head_node_args=head))
        for _ in range(2):
            nodes.add()
        return nodes

    def add(self) -> None:
        """Start one more node."""
        self.cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)

    def kill_node(self, chosen: random.Random) -> None:
        """Kill all processes of a node that works, and start another."""
        node = chosen.choice(sorted(self.cluster.worker_nodes, key=lambda each: each.node_id))
        self.cluster.remove_node(node, allow_graceful=False)
        self.add()

    def kill_worker(self, chosen: random.Random) -> bool:
        """Kill a process that works on a task; False where none does."""
        raylets = [
            process.process.pid
            for node in self.cluster.worker_nodes
            for process in node.all_processes["raylet"]
        ]
        working = [
            child
            for pid in raylets
            for child in psutil.Process(pid).children()
            if child.cmdline() and child.cmdline()[0].startswith("ray::_work_on")
        ]
        if working:
            chosen.choice(working).kill()
        return bool(working)


@dataclass(frozen=True, slots=True)
class Scans:
    """One dataset scanned on a cluster, and in one process for comparison."""

    folder: Path
    address: str

    @property
    def output(self) -> Path:
        """What the command writes."""
        return self.folder / "cluster.parquet"

    def command(self, output: Path, *where: str) -> list[str]:
        """The command that a user types."""
        data = self.folder / "digits"
        given = ("--model", "internvl-digits", "--tokenizer-model", data / "tokenizer.model")
        words = (data / "train" / "meta.json", *given, "-o", output, *where)
        return [sys.executable, "-m", "omnibal", "lengths", *map(str, words), "--json"]

    def alone(self) -> bytes:
        """What one process writes."""
        output = self.folder / "alone.parquet"
        run(self.command(output, "--processes", "1"))
        return output.read_bytes()

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """The command on the cluster, from where it was killed before."""
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
        """Size of the journal of what is finished."""
        partial = self.output.with_name(f"{self.output.name}.partial")
        return partial.stat().st_size if partial.exists() else 0

    def wait_for_more(self, process: subprocess.Popen[str]) -> bool:
        """Wait until the scan has finished a part; False where it has ended."""
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


def killed(scans: Scans, nodes: Nodes, kills: int, chosen: random.Random) -> tuple[Counter, int]:
    """Scan until so many processes were killed; how many of each kind, and the finished scans."""
    expected, counted, finished = scans.alone(), Counter[str](), 0
    kill: dict[str, Callable[[], bool | None]] = {
        "worker": lambda: nodes.kill_worker(chosen),
        "node": lambda: nodes.kill_node(chosen),
    }
    while counted.total() < kills or not finished:
        with scans.running() as process:
            while scans.wait_for_more(process):
                time.sleep(chosen.uniform(0, 0.05))
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
            raise SystemExit("a scan has other bytes than that of one process")
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
        made = ("--output", str(Path(name) / "digits"), "--samples", str(arguments.samples))
        run([sys.executable, "tools/make_digits_dataset.py", *made])
        nodes = Nodes.start()
        try:
            scans = Scans(Path(name), nodes.cluster.address)
            counted, finished = killed(scans, nodes, arguments.kills, random.Random(arguments.seed))
        finally:
            nodes.cluster.shutdown()
    result = {"killed": dict(counted), "finished": finished, "lost": 0, "doubled": 0}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
