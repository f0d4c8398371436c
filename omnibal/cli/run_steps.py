"""The steps of `omnibal run`: commands, their input files, and which are done.

A step is skipped if its command, and the sizes and times of its inputs, have not changed. A
training resumes if only rates change, or steps of the same samples are added.
"""

import ctypes
import hashlib
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from omnibal.base.errors import UserError
from omnibal.base.files import atomic, check_room, read_json_model
from omnibal.base.printable import without_secrets
from omnibal.base.program import ArgumentParser
from omnibal.data.annotations import read_meta
from omnibal.data.stored_files import AUDIO_SUFFIXES, IMAGE_SUFFIXES, VIDEO_SUFFIXES
from omnibal.families.named import HUB_ID, named_model
from omnibal.job.plan import read_plan
from omnibal.job.runlog import RATES, latest_step

_ROOT = Path(__file__).resolve().parents[2]
_MEDIA = IMAGE_SUFFIXES | AUDIO_SUFFIXES | VIDEO_SUFFIXES | {".tar"}
_MAX_FILES = 200_000  # of a folder that is checked for changes: it may be a home directory
_RATES = {"--" + name.replace("_", "-") for name in RATES}
_FIXED_OPTIONS = {"--seed", "--loss-weighting", "--drop-path-rate", "--adam-beta1", "--adam-beta2"}
_FIXED_OPTIONS |= {"--adam-eps", "--finetune"}  # a run keeps these from its start
_SIGNAL_STATUS = 128  # a shell adds it to a signal's number in an exit status
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_WEIGHTS = "*.safetensors"
# Configuration, tokenizer and code of a checkpoint on a hub.
_DESCRIPTIONS = ["*.json", "*.jinja", "*.model", "*.py", "*.txt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """A command, its inputs and its result."""

    words: tuple[str, ...]  # command line, which begins with `omnibal`, `python` or `bash`
    reads: tuple[Path, ...] = ()
    media: tuple[Path, ...] = ()  # folders of images, recordings, videos and shards that are inputs
    makes: Path | None = None  # result; None for a check, which is run every time
    last_step: int | None = None  # of a training; other steps are complete if `makes` exists

    @property
    def text(self) -> str:
        return shlex.join(self.words)

    def state(self) -> dict[str, Any]:
        """Return the command and a hash of each input."""
        read = {str(path): _digest(path) for path in self.reads}
        read |= {str(path): _digest(path, _MEDIA) for path in self.media}
        return {"command": without_secrets(self.text), "read": read}

    @property
    def is_complete(self) -> bool:
        """Whether the result exists, of a training up to its last step."""
        if self.makes is None or self.last_step is None:
            return self.makes is not None and self.makes.exists()
        return (latest_step(self.makes) or 0) >= self.last_step

    def can_resume(self, before: dict[str, Any] | None, now: dict[str, Any]) -> bool:
        """Return whether this step can continue from the result of the state `before`."""
        return self.last_step is not None and before == now


@dataclass(frozen=True, kw_only=True, slots=True)
class Training(RunStep):
    """A training, which can resume with other rates or more steps of the same samples."""

    plan: Path
    options: tuple[str, ...]  # words of the trainer's command line

    def state(self) -> dict[str, Any]:
        """Return hashes of inputs and model, the options, and number and hash of the steps."""
        plan = read_plan(self.plan)
        assert plan.data is not None
        model = repr([plan.model, plan.adapters, plan.frozen])
        return RunStep.state(self) | {
            "options": re.split(r" (?=--)", without_secrets(shlex.join(self.options))),
            "model": hashlib.sha256(model.encode()).hexdigest(),
            "steps": [plan.data.steps, plan.data.steps_sha256],
        }

    def can_resume(self, before: dict[str, Any] | None, now: dict[str, Any]) -> bool:
        """Return whether inputs, model, earlier steps and fixed options are unchanged."""
        if before is None or "steps" not in before:
            return False
        changed = _changes(before, now) - {"its steps"}
        # A complete training is repeated with other rates, unless there are more steps.
        fixed = _FIXED_OPTIONS | (_RATES if self.is_complete else set())
        if any(name in fixed or not name.startswith("--") for name in changed):
            return False
        from omnibal.job.plan_files import hash_steps  # imports scipy

        steps, digest = before["steps"]
        return hash_steps(self.plan, steps) == digest


def run_steps(
    steps: Sequence[RunStep], journal: Path, say: Callable[[str], None], *, trains: bool = True
) -> int:
    """Run the commands that are not done, in order, until one fails. Return its status, else 0.

    Results of earlier trainings, imports and exports are renamed, not overwritten.

    Args:
        journal: JSON file with the state that every result was made from, read and updated.
        trains: whether to start the training here, or only prepare it.
    """
    made: dict[str, Any] = {}
    if journal.exists():
        remedy = "it was written by `omnibal run`; remove it to run every step again"
        made = read_json_model(dict[str, dict[str, Any] | None], journal, remedy)
    for step in steps:
        name, state = "" if step.makes is None else step.makes.name, step.state()
        before = made.get(name)
        if before == state and step.is_complete:
            say(f"$ {step.text}  (done)")
            continue
        can_resume = step.can_resume(before, state)
        if before not in (None, state):
            changes = ", ".join(sorted(_changes(before, state)))
            say(f"{'going on' if can_resume else 'again'}, since {changes} changed:")
        if step.makes is not None and step.words[0] != "omnibal" and not can_resume:
            _rename_result(step.makes, say)
        is_started = trains or step.last_step is None
        say(f"$ {step.text}" if is_started else f"to train, where the devices are: {step.text}")
        # If stopped, a training resumes from this state; other steps start again.
        _write(journal, made | {name: state if step.last_step is not None else None})
        if not is_started:
            say("when it has ended, run this command again")
            break
        start = {"omnibal": [sys.executable, "-m", "omnibal"], "python": [sys.executable]}
        command = [*start.get(step.words[0], ["bash"]), *step.words[1:]]
        status = _run_command(command, say)
        if status and step.last_step is not None and step.makes is not None:
            place = f"after step {latest_step(step.makes) or 0} of {step.last_step}"
            failed = f"error: {step.text} ended with status {status} {place}, see {step.makes}.log"
            again = "run this command again to go on"
            say(f"stopped {place}; {again}" if status > _SIGNAL_STATUS else f"{failed}; {again}")
        if status:
            return status
        made[name] = state
        _write(journal, made)
        if step.last_step is not None and not step.is_complete:
            say(f"stopped before step {step.last_step}; run this command again to go on")
            break
    return 0


def _run_command(command: Sequence[str], say: Callable[[str], None]) -> int:
    """Run a command and pass signals on. Return its status, or 128 + signal if one was caught."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        say("stopping; a training ends its step and saves first")
        if number == signal.SIGTERM:  # a terminal sends Ctrl-C to both processes itself
            process.send_signal(number)

    # The command inherits the folder's lock: the only open file that is inheritable.
    process = subprocess.Popen(command, close_fds=False, preexec_fn=_die_with_parent)
    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return _SIGNAL_STATUS + caught[-1] if status and caught else status


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _write(journal: Path, made: dict[str, Any]) -> None:
    with atomic(journal) as temporary:
        temporary.write_text(json.dumps(made, indent=1))


def _rename_result(result: Path, say: Callable[[str], None]) -> None:
    number = 1
    while (kept := result.with_name(f"{result.name}-{number}")).exists():
        number += 1
    if result.exists():
        result.rename(kept)
        say(f"{result} is kept as {kept}")


def _changes(before: dict[str, Any], now: dict[str, Any]) -> set[str]:
    """Return names of files, folders and options that differ, and others, such as "its steps"."""
    files = set(before.get("read", {}).items()) ^ set(now["read"].items())
    options = set(before.get("options", ())) ^ set(now.get("options", ()))
    others = {f"its {name}" for name in now if before.get(name) != now[name]}
    named = {name for name, _ in files} | {
        re.split("[ =]", option)[0] for option in options if option
    }
    return named | (others - {"its read", "its options"})


def _digest(path: Path, suffixes: frozenset[str] | None = None) -> str:
    """Return a hash of size and time of a file, a folder's files, or all below with `suffixes`."""
    files = [path]
    if path.is_dir():
        pattern = "*" if suffixes is None else "**/*"
        below = sorted(islice(path.glob(pattern), _MAX_FILES + 1))
        files = [file for file in below if suffixes is None or file.suffix.lower() in suffixes]
        files = files if len(below) <= _MAX_FILES else []
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    entries = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    # Empty for no files, or too many to check.
    return hashlib.sha256(repr(entries).encode()).hexdigest() if entries else ""


def has_released_weights(folder: Path) -> bool:
    """Whether a folder has weights of a released checkpoint."""
    return any(folder.glob(_WEIGHTS))


def fetch_checkpoint(name: str, *, weights: bool) -> Path:
    """Download a hub's checkpoint, without weights unless `weights`. Return its local folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    patterns = [*_DESCRIPTIONS, _WEIGHTS] if weights else _DESCRIPTIONS
    try:
        if weights and not HF_HUB_OFFLINE:
            files = snapshot_download(name, allow_patterns=patterns, dry_run=True)
            size = sum(file.file_size or 0 for file in files if file.will_download)
            check_room(Path(HF_HUB_CACHE, name), size)
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"{name} cannot be fetched ({reason}); download it and give its folder as --model, or "
            "give --weights FOLDER, or --from-scratch for random weights"
        ) from error


def choose_weights(
    model: str, weights: Path | None, *, from_scratch: bool
) -> tuple[Path | None, bool]:
    """Return the folder of first weights (None: random), and whether to fetch them from a hub."""
    if from_scratch and weights is not None:
        raise UserError("--from-scratch and --weights exclude each other; leave one out")
    if from_scratch:
        return None, False
    if weights is None and HUB_ID.fullmatch(model) and not Path(model).exists():
        return fetch_checkpoint(model, weights=False), True
    if weights is None and not Path(model).is_dir():
        named_model(model)
        raise UserError(
            f"--model {model} has no weights to start from: give a released checkpoint's folder or "
            "name on a hub as --model, or --weights FOLDER, or --from-scratch for random ones"
        )
    folder = weights or Path(model)
    if not has_released_weights(folder) and not any(folder.glob("iter_*")):
        raise UserError(
            f"{folder}: holds no weights, neither {_WEIGHTS} of a released checkpoint nor iter_* "
            "of a run; give the folder of either as --weights, or --from-scratch for random ones"
        )
    return folder, False


def find_tokenizer(model: str, weights: Path | None) -> Path | None:
    """Return the folder of the tokenizer of the model or the weights. None if neither is local."""
    others = [] if weights is None else [weights / "tokenizer", weights]
    return next((path for path in (Path(model), *others) if path.is_dir()), None)


def plan_steps(
    data: Path,
    model: str,
    tokenizer: Path | None,
    planned_with: Sequence[str],
    output: Path,
    scanned_with: Sequence[str],
) -> list[RunStep]:
    """Return the commands from data to a checked plan."""
    lengths, plan = output / "lengths.parquet", output / "plan"
    sources = read_meta(data).values()
    annotations = [data.parent / s.in_file for s in sources if s.in_file is not None]
    media = tuple(sorted({source.media_folder(data.parent) for source in sources}))
    # Weights of a hub are downloaded later, and change neither lengths nor plan.
    folder = Path(model)
    of_model = [folder] if folder.is_file() else []
    of_model += [path for pattern in _DESCRIPTIONS for path in sorted(folder.glob(pattern))]
    read = [] if tokenizer is None else ["--tokenizer-model", str(tokenizer)]
    scan = ["lengths", str(data), "--model", model, "-o", str(lengths), *read, *scanned_with]
    planned = ["plan", "--model", model, "--lengths", str(lengths), *planned_with, "-o", str(plan)]
    own = [] if tokenizer is None or tokenizer == folder else [tokenizer]
    inputs = (data, *annotations, *of_model, *own)
    return [
        RunStep(words=("omnibal", *scan), reads=inputs, media=media, makes=lengths),
        RunStep(words=("omnibal", *planned), reads=(lengths, *of_model), makes=plan),
        RunStep(words=("omnibal", "check", str(plan))),
    ]


def conversion_step(way: str, source: Path, made: Path, *more: str) -> RunStep:
    """Return the import or export of weights as a step."""
    words = ("python", str(_ROOT / "tools" / "convert.py"), way, str(source), *more)
    return RunStep(words=(*words, "-o", str(made)), reads=(source,), makes=made)


def write_launch(
    output: Path, data: Path, tokenizer: Path | None, per_node: int, gpus: int, more: Sequence[str]
) -> None:
    """Write train.sh: torchrun on one node of `per_node` devices, sbatch on several."""
    root, per_node = _ROOT / "scripts", min(gpus, per_node)
    files = (output / "plan", data, tokenizer, output / "run")
    job = ["" if path is None else str(path) for path in files]
    if gpus <= per_node:
        alone = [f"GPUS_PER_NODE={gpus}", str(root / "train_nodes.sh"), "1", "0", "localhost"]
        # tee ignores signals, so that run.log also has the output of saving after a signal.
        tee = shlex.join(["tee", "-a", str(output / "run.log")])
        command = f"exec > >(trap '' INT TERM USR1 HUP; exec {tee}) 2>&1\n"
        command += shlex.join(["exec", "env", *alone, *job, *more])
    else:
        per = ["--ntasks-per-node", str(per_node), "--gpus-per-node", str(per_node)]
        nodes = ["--nodes", str(-(-gpus // per_node)), *per, str(root / "slurm" / "train.sbatch")]
        command = f"cd {shlex.quote(str(_ROOT))} && exec "
        command += shlex.join(["sbatch", *nodes, *job, *more])
    with atomic(output / "train.sh") as temporary:
        temporary.write_text(f"#!/usr/bin/env bash\n{command}\n")
        temporary.chmod(0o755)


def training_step(output: Path, loads: Path | None, scan: RunStep, more: Sequence[str]) -> Training:
    """Return the training as a step, up to the plan's steps or --train-iters, if fewer."""
    plan = output / "plan"
    data = read_plan(plan).data
    assert data is not None
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--train-iters", type=int, default=data.steps)
    given = parser.parse_known_args(more)[0].train_iters
    return Training(
        words=("bash", str(output / "train.sh")),
        reads=(*scan.reads, *([] if loads is None else [loads])),
        media=scan.media,
        makes=output / "run",
        last_step=min(data.steps, given),
        plan=plan,
        options=tuple(more),
    )
