"""Pytest settings, the suite's CPU budget, and a small digits dataset shared by all tests."""

import gc
import os
import signal
import sys
import time
import timeit
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Before torch is imported: the forked ranks of these tests share no GPU. Test processes and their
# ranks share the cores: several threads per process would only wait for each other.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ and sys.platform == "linux":
    # A disjoint set of cores per worker: planners then start at most one process per core in all.
    number, workers = (
        int(os.environ[name].removeprefix("gw"))
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
    )
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[number::workers] or cores)
# Its CUDA build warns that no GPU is visible, before a command's own output.
os.environ["TORCH_LOGS"] = "-torch.utils.cpp_extension"

import pytest
from commands import launcher
from end_to_end_cases import MODEL, plan_digits, succeed
from hypothesis import HealthCheck, settings

from omnibal.data.tokenizer import Tokenizer, open_tokenizer
from tools.make_digits_dataset import make_dataset

# Fixed examples, without deadlines that depend on load. `make fuzz` draws new examples.
settings.register_profile(
    "fixed",
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "random", settings.get_profile("fixed"), max_examples=1000, derandomize=False, print_blob=True
)
settings.load_profile("fixed")

# A shell's background jobs ignore SIGINT, nohup's SIGHUP; child processes would inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

CPU_SECONDS = pytest.StashKey[float]()
BUDGET_SLACK = 2.5
"""Allowed factor on the CPU seconds: other work on the cores and caches doubles them."""
REFERENCE_LOOP_S = 0.109

NEVER_FORKED = {"ray", "s3fs", "aiobotocore", "moto"}
"""Modules that start threads and take locks: import them in a child process only."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of `make compose` and `make goals`."""
    parser.addoption("--draws", type=int, help="new draws of test_composed.py and test_freedom.py")
    parser.addoption("--seed", type=int, default=0, help="seed of the first of --draws")


@pytest.fixture(autouse=True)
def forks_safely() -> Iterator[None]:
    """Prevents deadlocks of forked ranks after a test that imported a threaded module."""
    yield
    loaded = NEVER_FORKED & sys.modules.keys()
    assert not loaded, f"{sorted(loaded)} in the tests' own process; start a command in its place"


def pytest_collection_finish() -> None:
    """Exclude imports from garbage collection, which would copy their memory in every fork."""
    gc.collect()
    gc.freeze()


def whole_suite(config: pytest.Config) -> bool:
    """Whether the command line selects all tests."""
    option = config.option
    left_out = option.markexpr or option.keyword or option.deselect
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not left_out


def suite_budget(config: pytest.Config) -> float:
    """Return the CPU-second budget of all tests on the machine of `REFERENCE_LOOP_S`."""
    settings = tomllib.loads((config.rootpath / "pyproject.toml").read_text())
    return settings["tool"]["omnibal"]["budget"]["suite_cpu_seconds"]


@cache
def slowness() -> float:
    """CPU time of a fixed loop relative to the budget's reference machine, at least 1."""
    loop = "sum(number * number for number in range(3_000_000))"
    times_s = timeit.repeat(loop, timer=time.process_time, repeat=5, number=1)
    return max(1.0, min(times_s) / REFERENCE_LOOP_S)


def over_budget(config: pytest.Config) -> bool:
    """Whether a run of all tests took over `BUDGET_SLACK` times its budget."""
    # Timing takes half a second: only after all tests, and only in the xdist controller.
    timed = whole_suite(config) and not hasattr(config, "workerinput")
    return timed and config.stash[CPU_SECONDS] > BUDGET_SLACK * slowness() * suite_budget(config)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of all tests that exceeds its CPU-second budget."""
    config = session.config
    if launcher.cache_info().currsize:
        launcher().close()
    # Includes child processes that were waited for, recursively: xdist workers too.
    config.stash[CPU_SECONDS] = sum(os.times()[:4])
    if over_budget(config) and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    line = f"{config.stash[CPU_SECONDS]:,.0f} CPU seconds; "
    line += f"budget of the whole suite: {suite_budget(config):,}"
    if over_budget(config):
        line += f", exceeded {BUDGET_SLACK} times: see --durations, and share set-up"
    terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only folder with train/ (80 samples), heldout/ (20 samples) and tokenizer.model."""
    folder = tmp_path_factory.mktemp("digits") / "dataset"
    make_dataset(folder, samples=80, heldout_samples=20, seed=0)
    return folder


@pytest.fixture(scope="session")
def tokenizer(digits: Path) -> Tokenizer:
    return open_tokenizer(digits / "tokenizer.model")


@pytest.fixture(scope="session")
def lengths(digits, tmp_path_factory) -> Path:
    """Lengths file of the digits dataset, written by `omnibal lengths`."""
    path = tmp_path_factory.mktemp("lengths") / "lengths.parquet"
    meta, tokenizer = digits / "train" / "meta.json", digits / "tokenizer.model"
    succeed("-m", "omnibal", "lengths", meta, *MODEL, "--tokenizer-model", tokenizer, "-o", path)
    return path


@pytest.fixture(scope="session")
def single(lengths, tmp_path_factory) -> Path:
    """Plan of the digits for one process."""
    return plan_digits(lengths, tmp_path_factory.mktemp("plans") / "single")
