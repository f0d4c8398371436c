"""A small dataset of the quickstart's kind, made once, for all tests that read real data."""

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

# Before torch is imported: the forked ranks of these tests share no GPU, and two processes of
# tests, each with its ranks, share the cores: threads would only wait for each other.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ and sys.platform == "linux":
    # Each has cores of its own: plans of tests then start no more processes than there are cores.
    number, workers = (
        int(os.environ[name].removeprefix("gw"))
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
    )
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[number::workers] or cores)
# Its CUDA build warns of what is hidden here, before anything that a started command says.
os.environ["TORCH_LOGS"] = "-torch.utils.cpp_extension"

import pytest
from commands import launcher
from end_to_end_cases import MODEL, plan_of, succeed
from hypothesis import HealthCheck, settings

from omnibal.data.tokenizer import Tokenizer, open_tokenizer
from tools.make_digits_dataset import make_dataset

# The same examples in every run, whatever the machine's load. `make fuzz` draws new ones.
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

# A shell that starts the tests in the background has them ignore Ctrl-C, nohup a closed terminal,
# and so all they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

CPU_SECONDS = pytest.StashKey[float]()
BUDGET_SLACK = 2.5
"""Of the CPU seconds, which other work on the same cores and caches doubles."""
REFERENCE_LOOP_S = 0.109

NEVER_FORKED = {"ray", "s3fs", "aiobotocore", "moto"}
"""Modules with threads and locks of their own: a test has a command of its own import them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of `make compose` and `make goals`."""
    parser.addoption("--draws", type=int, help="new draws of test_composed.py and test_freedom.py")
    parser.addoption("--seed", type=int, default=0, help="seed of the first of --draws")


@pytest.fixture(autouse=True)
def forks_safely() -> Iterator[None]:
    """Prevents ranks, which are forked from this process, from being broken by an earlier test."""
    yield
    loaded = NEVER_FORKED & sys.modules.keys()
    assert not loaded, f"{sorted(loaded)} in the tests' own process; start a command in its place"


def pytest_collection_finish() -> None:
    """Spare what is imported by now every garbage collection.

    One marks half a million objects; in a forked process that copies all their memory.
    """
    gc.collect()
    gc.freeze()


def whole_suite(config: pytest.Config) -> bool:
    """Whether no test was left out on the command line."""
    option = config.option
    left_out = option.markexpr or option.keyword or option.deselect
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not left_out


def suite_budget(config: pytest.Config) -> float:
    """CPU seconds that the whole suite may take on the machine of `REFERENCE_LOOP_S`."""
    settings = tomllib.loads((config.rootpath / "pyproject.toml").read_text())
    return settings["tool"]["omnibal"]["budget"]["suite_cpu_seconds"]


@cache
def slowness() -> float:
    """CPU time of a fixed loop over that of the machine that the budget was set on; at least 1."""
    loop = "sum(number * number for number in range(3_000_000))"
    times_s = timeit.repeat(loop, timer=time.process_time, repeat=5, number=1)
    return max(1.0, min(times_s) / REFERENCE_LOOP_S)


def over_budget(config: pytest.Config) -> bool:
    """Whether a whole suite took far more CPU seconds than its budget."""
    # Only a whole suite is worth half a second of timing; workers leave it to the controller.
    timed = whole_suite(config) and not hasattr(config, "workerinput")
    return timed and config.stash[CPU_SECONDS] > BUDGET_SLACK * slowness() * suite_budget(config)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a whole suite that takes far more CPU seconds than its budget."""
    config = session.config
    if launcher.cache_info().currsize:
        launcher().close()
    # Ended processes of this one, and in turn of theirs: workers of pytest-xdist too.
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
    """Folder with train/ (80 samples), heldout/ (20) and tokenizer.model; not to be written to."""
    folder = tmp_path_factory.mktemp("digits") / "dataset"
    make_dataset(folder, samples=80, heldout_samples=20, seed=0)
    return folder


@pytest.fixture(scope="session")
def tokenizer(digits: Path) -> Tokenizer:
    return open_tokenizer(digits / "tokenizer.model")


@pytest.fixture(scope="session")
def lengths(digits, tmp_path_factory) -> Path:
    """File of the digits' lengths, as the command writes it."""
    path = tmp_path_factory.mktemp("lengths") / "lengths.parquet"
    meta, tokenizer = digits / "train" / "meta.json", digits / "tokenizer.model"
    succeed("-m", "omnibal", "lengths", meta, *MODEL, "--tokenizer-model", tokenizer, "-o", path)
    return path


@pytest.fixture(scope="session")
def single(lengths, tmp_path_factory) -> Path:
    """Plan of one process for whole packs of the digits."""
    return plan_of(lengths, tmp_path_factory.mktemp("plans") / "single")
