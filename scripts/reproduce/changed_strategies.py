"""Parallel sizes that are chosen with rates that were measured or fitted, beside assumed ones.

    python scripts/reproduce/changed_strategies.py [--job 1 2 ...] [--packs 1]

Each job is planned twice by `omnibal plan --gpus`, for packs of 8,192 tokens: on the preset, and on
the same devices with the shares that the presets had before anything was held against a GPU. The
second choice is then predicted on the preset too: what choosing by assumed rates would cost.
"""

import argparse
import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paper import print_table

from omnibal.cli import main as omnibal
from omnibal.model.config import ClusterConfig, cluster_toml, load_cluster

JOBS = (
    ("internvl2.5-8b", "h100-80g", 64),
    ("internvl2.5-26b", "h100-80g", 64),
    ("internvl2.5-78b", "h100-80g", 64),
    ("qwen3-vl-8b", "h100-80g", 64),
    ("qwen3-vl-32b", "h100-80g", 64),
    ("qwen3-vl-235b-a22b", "h100-80g", 64),
    ("internvl-chat-1.5-6b-20b", "a100-80g", 32),
    ("internvl-chat-1.5-6b-20b", "h100-80g", 64),
    ("internvl-chat-1.5-6b-20b", "h100-80g", 512),
    ("internvl2.5-78b", "h100-80g", 512),
)
_TOKENS = 8192
_ASSUMED: dict[str, Any] = {
    "matmul_efficiency": 0.55, "memory_efficiency": 0.8, "kernel_us": 4, "link_efficiency": 0.5,
    "link_latency_us": 10, "network_efficiency": None, "basis": "assumed", "rates": {},
    "rates_of": None, "accuracy": {},
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """What is chosen for a job."""

    sizes: dict[str, Any]
    recomputed: int
    step_ms: float
    samples: int
    """Of a step, on all devices."""

    def __str__(self) -> str:
        names = {"tensor": "TP", "pipeline": "PP", "data": "DP", "expert": "EP"}
        sizes = " ".join(f"{short} {self.sizes[name]}" for name, short in names.items()
                         if self.sizes.get(name, 1) > 1)  # fmt: skip
        return f"{sizes or 'DP 1'}, {self.recomputed} recomputed"


def assumed(cluster: ClusterConfig) -> ClusterConfig:
    """The devices with the shares that were assumed; A100's products reach 0.65."""
    shares = _ASSUMED | ({"matmul_efficiency": 0.65} if "a100" in cluster.name else {})
    return cluster.model_copy(update=shares)


def planned(model: str, cluster: ClusterConfig, options: Sequence[str]) -> Choice:
    """Plan a job on packs of made-up samples."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cluster.toml").write_text(cluster_toml(cluster))
        words = ["plan", "--model", model, "--cluster", str(folder / "cluster.toml"), *options]
        words += ["--max-tokens", str(_TOKENS), "-o", str(folder / "plan"), "--json"]
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(io.StringIO()), suppress(SystemExit):
            omnibal(words)
        plan = json.loads((folder / "plan" / "plan.json").read_text())
    result = json.loads(printed.getvalue())
    return Choice(
        sizes=plan["parallel"],
        recomputed=sum(stage["recompute"] for stage in result["stages"]),
        step_ms=result["step_ms"],
        samples=plan["shapes"]["micro_batches_per_step"] * plan["parallel"].get("data", 1),
    )


def row(model: str, name: str, gpus: int, packs: int) -> Iterator[str]:
    """One line of the table, for so many packs a device and step."""
    cluster = load_cluster(name)
    devices = ["--gpus", str(gpus), "--samples-per-step", str(packs * gpus)]
    now = planned(model, cluster, devices)
    before = planned(model, assumed(cluster), devices)
    sizes = [
        word
        for option, field in (
            ("--tp", "tensor"),
            ("--pp", "pipeline"),
            ("--dp", "data"),
            ("--ep", "expert"),
        )
        for word in (option, str(before.sizes.get(field, 1)))
    ]
    kept = planned(
        model,
        cluster,
        [*sizes, "--micro-batches", str(before.samples // before.sizes.get("data", 1))],
    )
    yield f"{model}, {gpus} x {name}"
    yield str(before)
    yield str(now)
    yield f"{before.step_ms / before.samples:.1f}"
    yield f"{kept.step_ms / kept.samples:.1f}"
    yield f"{now.step_ms / now.samples:.1f}"
    yield f"{kept.step_ms / kept.samples / (now.step_ms / now.samples) - 1:+.1%}"


def main() -> None:
    """Print both choices of every job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=int, nargs="*", help="numbers of jobs, from 1; left out: all")
    parser.add_argument("--packs", type=int, default=1, help="of a device in a step")
    given = parser.parse_args()
    chosen = given.job or range(1, len(JOBS) + 1)
    columns = (
        "job", "by assumed rates", "by these rates", "ms a pack, as was predicted",
        "the same sizes now", "now", "cost of the old choice",
    )  # fmt: skip
    rows = [[*row(*JOBS[number - 1], given.packs)] for number in chosen]
    title = f"strategies for packs of 8,192 tokens, {given.packs} a device and step"
    print_table(title, columns, rows)


if __name__ == "__main__":
    main()
