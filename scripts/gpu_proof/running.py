"""Settings and time limits of parts, and how their programs run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
from pydantic import JsonValue

from scripts.gpu_proof.card import Comparison, PartResult, Status

REPOSITORY = Path(__file__).resolve().parents[2]
_NO_DEVICE = {"CUDA_VISIBLE_DEVICES": ""}
_POLL_S = 0.05
Until = Callable[[], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Sizes of the parts' jobs."""

    limits_s: Mapping[str, float]
    trained_steps: int
    checkpoint_gib: float
    model: str = "internvl-chat-1.5-6b-20b"  # replayed and profiled
    sizes: tuple[str, ...] = ("--tp", "2", "--pp", "4", "--dp", "4")
    max_tiles: int = 9
    max_tokens: int = 4096
    tokens_per_sample: int = 1000
    samples: int = 4000  # synthetic, of the replayed plan; 0 fills micro-batches to the caps
    micro_batches: int = 8
    replayed: tuple[int, ...] = (0, 3)  # stages, most informative first


_LIMITS_S = {"tests": 90, "train": 120, "replay": 120, "checkpoint": 60, "profile": 80}
REAL = Settings(limits_s=_LIMITS_S | {"providers": 60}, trained_steps=200, checkpoint_gib=8.0)
FAKE_DEVICE = Settings(
    limits_s=dict.fromkeys(REAL.limits_s, 300), trained_steps=12, checkpoint_gib=0.25
)


class PartEndedError(Exception):
    """Early end of a part, with its status and reason."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(kw_only=True, slots=True)
class Context:
    """Input and results of a part."""

    output: Path
    settings: Settings
    on_fake_device: bool
    digits: Path | None  # dataset, or None to make it
    end_s: float  # deadline on the monotonic clock
    figures: dict[str, JsonValue] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)

    def compare(self, of: str, unit: str, predicted: float, measured: float) -> None:
        """Add a predicted and measured quantity to the card."""
        row = Comparison(of=of, unit=unit, predicted=predicted, measured=measured)
        self.comparisons.append(row)

    def run(self, name: str, *arguments: object, until: Until | None = None) -> Path:
        """Run a program of this project, and return its log.

        Args:
            arguments: for Python, or a shell script with its arguments.
            until: when true, SIGTERM ends the program, and any exit status is good.
        """
        log = self.output / "logs" / f"{name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        python = [] if str(arguments[0]).endswith(".sh") else [sys.executable]
        command = [*python, *map(str, arguments)]
        with log.open("w") as output:
            output.write(" ".join(command) + "\n")
            output.flush()  # before the program's own output
            path = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
            changes = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "COLUMNS": "200"}
            changes |= {"GPUS_PER_NODE": "1"} | (_NO_DEVICE if self.on_fake_device else {})
            changes["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            code = run_within(command, output, self.end_s, {**os.environ, **changes}, until)
        if code is None:
            raise PartEndedError("timed-out", f"{name} was ended at the part's time limit")
        if code:
            raise PartEndedError("failed", f"{name}: {_last_line(log)}")
        return log


Part = Callable[[Context], None]


def run_part(name: str, part: Part, context: Context) -> PartResult:
    """Run a part, and return its result, also of exceptions."""
    start_s = time.monotonic()
    status: Status = "ok"
    reason = ""
    try:
        part(context)
    except PartEndedError as ended:
        status, reason = ended.status, ended.reason
    except Exception as error:  # later parts must run after any failure
        status, reason = "failed", f"{type(error).__name__}: {error}"
    return PartResult(
        name=name,
        status=status,
        reason=reason,
        seconds=round(time.monotonic() - start_s, 1),
        limit_s=round(context.end_s - start_s),
        comparisons=tuple(context.comparisons),
        figures=context.figures,
    )


def run_within(
    command: list[str],
    log: IO[str],
    end_s: float,
    environment: Mapping[str, str],
    until: Until | None = None,
) -> int | None:
    """Run a program, and return its exit status, 0 after SIGTERM, or None on time-out."""
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        while until is not None and process.poll() is None and time.monotonic() < end_s:
            if until():
                process.terminate()
                process.wait(timeout=max(end_s - time.monotonic(), 0.1))
                return 0
            time.sleep(_POLL_S)
        return process.wait(timeout=max(end_s - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Kill remaining children too; ranks of torchrun have sessions of their own.
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or [line for line in lines if line] or ["no message"])[-1][:300]
