"""More freedom, memory or devices never slow down a random goal's plan."""

import random
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from kept_job_cases import plan_job, write_data

from omnibal.model.config import load_cluster

FIXED = (2, "first sizes do not fit")
"""A random seed, and a named goal; `make goals DRAWS=500` draws others."""


KINDS = {
    "llama3.1-8b --lengths texts": (("--max-tokens 8192", "--max-tokens 16384"),),
    "internvl3-8b --lengths tiles": (
        ("--max-tiles 12 --max-tokens 4096",), ("--encoder pipeline", "--encoder data-parallel"),
    ),
    "qwen3-vl-8b --lengths native": (
        ("--limit image_tokens=12288 --max-tokens 16384",), ("--encoder pipeline",),
    ),
    "qwen3-30b-a3b --lengths texts": (("--max-tokens 8192",), ("--ep 2", "--ep 8")),
}  # fmt: skip
"""Options specific to each kind."""
GIVEN = (
    ("--tp 1", "--tp 2", "--tp 4"),
    ("--pp 1", "--pp 2", "--pp 4"),
    ("--sharding replicated", "--sharding full"),
    ("--schedule 1f1b", "--schedule interleaved", "--schedule zb-h1"),
    ("--packing-levels 1",),
)


class DrawnGoal(NamedTuple):
    """A goal by its options: fixed options, and options that may be freed."""

    fixed: str
    gpus: int
    memory_gib: float
    given: tuple[str, ...]

    @property
    def command(self) -> str:
        free = "" if any("--schedule" in each for each in self.given) else " --schedule auto"
        sizes = f"--gpus {self.gpus} --memory-gib {self.memory_gib}"
        return f"{self.fixed} {sizes} {' '.join(self.given)}{free}"

    def relax_choices(self) -> Iterator["DrawnGoal"]:
        """Yield goals with a choice freed, more memory, or twice the devices if sizes are free."""
        for freed in self.given:
            yield self._replace(given=tuple(each for each in self.given if each != freed))
        yield self._replace(memory_gib=1.3 * self.memory_gib)
        if not re.search("--(tp|pp|ep) ", self.command):
            yield self._replace(gpus=2 * self.gpus)


ESTIMATED_GOAL = DrawnGoal(
    "--model qwen3-30b-a3b --lengths texts --cluster a100-80g --samples-per-step 128",
    gpus=8, memory_gib=80, given=("--pp 1", "--max-tokens 8192", "--schedule 1f1b"),
)  # fmt: skip
"""A search once skipped these sizes, as all estimated choices did not fit."""


def draw_goal(rng: random.Random) -> DrawnGoal:
    kind, cluster = rng.choice([*KINDS]), rng.choice(["h100-80g", "a100-80g"])
    samples = rng.choice([64, 128, 256])
    values = [rng.choice(choices) for choices in (*GIVEN, *KINDS[kind])]
    return DrawnGoal(
        fixed=f"--model {kind} --cluster {cluster} --samples-per-step {samples}",
        gpus=rng.choice([8, 16, 32]),
        memory_gib=load_cluster(cluster).memory_gib * rng.choice([0.6, 1.0]),
        given=tuple(rng.sample(values, rng.randint(1, 3))),
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw `--draws` goals from `--seed` on."""
    if "seed" in metafunc.fixturenames:
        draws, first = (metafunc.config.getoption(name) for name in ("draws", "seed"))
        metafunc.parametrize("seed", FIXED if draws is None else range(first, first + draws))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


def test_freedom_never_costs(data, tmp_path, seed):
    """Prevents a search that misses, or mispredicts, plans reachable with fixed choices."""
    rng, plans = random.Random(seed), iter(range(1000))

    def rate(goal: DrawnGoal) -> float | None:
        """Return samples per second of all devices, or None without a valid plan."""
        try:
            result = plan_job(goal.command, data, tmp_path / f"{next(plans)}")
        except AssertionError:
            return None
        return goal.gpus * result["samples_per_second_per_gpu"]

    goal, least = ESTIMATED_GOAL, rate(ESTIMATED_GOAL) if isinstance(seed, str) else None
    while least is None:
        goal = draw_goal(rng)
        least = rate(goal)
    worse = {
        more.command: (found, least)
        for more in goal.relax_choices()
        if not (found := rate(more)) or found < 0.999 * least
    }
    assert not worse, f"slower than {goal.command}: {worse}"
