"""Plans and exports written by the user's commands, and the packs that trainers should read."""

import contextlib
import io
import json
import shlex
import tarfile
import tempfile
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from string import Template

import numpy as np
from length_cases import lengths_of
from PIL import Image

from omnibal import cli
from omnibal.data.lengths import Lengths, write_lengths
from omnibal.job.check import open_plan
from omnibal.packing.packs import ScheduledPacks

SAMPLES = 10_000
SHARDS = 4
MICRO_BATCHES = 4
MAX_TOKENS = 4_096
SMALL = "--model internvl-digits --cluster laptop-cpu"


def run(command: str) -> str:
    """Run a command in this process; return its standard output."""
    printed, notes = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(notes):
        try:
            cli.main(command.split())
        except SystemExit as ended:
            assert ended.code in (0, None), f"{command}: {notes.getvalue()}"
    return printed.getvalue()


@dataclass(frozen=True)
class Planned:
    """A plan, its export, and the packs that every rank should train in order."""

    export: Path
    command: str
    """The training command of RUN.md."""
    tokens: np.ndarray
    """Tokens by sample, [samples]."""
    packs: list[list[list[list[int]]]]
    """Sample numbers by step, slot, rank and position in the pack."""

    @property
    def full_steps(self) -> int:
        """Number of steps with the first step's pack count."""
        sizes = [sum(map(len, step)) for step in self.packs]
        return sizes.count(sizes[0])

    def rank_packs(self, rank: int) -> list[list[int]]:
        """Packs of a rank in all full steps, in order."""
        return [slot[rank] for step in self.packs[: self.full_steps] for slot in step]

    @property
    def flags(self) -> dict[str, str]:
        """The command's flags and values."""
        values, words = dict[str, str](), list[str]()
        for word in shlex.split(self.command):
            words.append(Template(word).safe_substitute(values))
            name, is_assigned, value = words[-1].partition("=")
            if is_assigned and name.isupper():
                values[name] = value
        named = [place for place, word in enumerate(words) if word.startswith("--")]
        return {words[place].removeprefix("--"): words[place + 1] for place in named}


def plan_job(
    data: Path, target: str, seed: int, ranks: int, *, job: str = SMALL, workers: int = 0
) -> Planned:
    """Plan 10,000 samples for a trainer and export the plan."""
    name = f"{target}-{seed}-{ranks}{job.replace(' ', '')}"
    lengths, plan = data.with_name(f"lengths{seed}.parquet"), data.with_name(f"plan-{name}")
    export = Path(tempfile.mkdtemp(dir=data.parent)) / "export"
    if not lengths.exists():
        write_lengths(draw_lengths(seed), lengths)
    if not plan.exists():
        run(
            f"plan {job} --dp {ranks} --lengths {lengths} --max-tokens {MAX_TOKENS} "
            f"--micro-batches {MICRO_BATCHES} --seed {seed} --packing isf --for {target} "
            f"--no-compare -o {plan} {'' if 'swift' in target else '--max-tiles 40'}"
        )
    made = json.loads(run(f"export {plan} --to {export} --data {data} --workers {workers} --json"))
    packs, read_lengths = open_plan(plan).steps
    tokens = read_lengths.tokens.astype(np.int64)
    return Planned(export, made["command"], tokens, order_packs(packs))


def order_packs(packs: ScheduledPacks) -> list[list[list[list[int]]]]:
    """Packs by step, slot and rank, with samples in the plan's order."""
    rows = np.lexsort((packs.dp_rank, packs.slot, packs.step)).tolist()
    return [
        [[packs.packs[row].tolist() for row in slot] for _, slot in groupby(step, packs.slot.item)]
        for _, step in groupby(rows, packs.step.item)
    ]


def shows_picture(number: int) -> bool:
    """Whether a sample shows a picture."""
    return number % 5 == 0


@cache
def picture(kind: int) -> bytes:
    """PNG image with red channel `kind`."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (kind, 0, 0)).save(file, "PNG")
    return file.getvalue()


def picture_of(number: int) -> bytes:
    """Image of a sample; 7 distinct images."""
    return picture(number % 35)


def record(number: int, **more: object) -> dict:
    """Record with its number as the answer."""
    shown = "<image>" if shows_picture(number) else ""
    messages = [
        {"role": "user", "content": f"{shown}What is sample {number}?"},
        {"role": "assistant", "content": str(number)},
    ]
    return {"messages": messages, **more}


def write_lines(folder: Path) -> Path:
    """Write the samples as JSONL with image files."""
    for number in range(0, 35, 5):
        (folder / f"{number}.png").write_bytes(picture(number))
    path = folder / "data.jsonl"
    with path.open("w") as file:
        for number in range(SAMPLES):
            shown = shows_picture(number)
            more = {"images": [str(folder / f"{number % 35}.png")]} if shown else {}
            file.write(json.dumps(record(number, **more)) + "\n")
    return path


def write_shards(folder: Path) -> Path:
    """Write the samples as tar shards with their images."""
    for shard in range(SHARDS):
        with tarfile.open(folder / f"part-{shard}.tar", "w") as tar:
            for number in range(shard * SAMPLES // SHARDS, (shard + 1) * SAMPLES // SHARDS):
                members = {"json": json.dumps(record(number)).encode()}
                if shows_picture(number):
                    members["png"] = picture_of(number)
                for part, content in members.items():
                    member = tarfile.TarInfo(f"{number:06}.{part}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    path = folder / "meta.json"
    path.write_text(json.dumps({"data": {"shards": f"part-{{0..{SHARDS - 1}}}.tar"}}))
    return path


def draw_lengths(seed: int) -> Lengths:
    """Draw lengths by `seed % 3`: heavy-tailed, nearly uniform, or of four values."""
    rng = np.random.default_rng(seed)
    tokens = [
        np.clip(rng.lognormal(6, 1, SAMPLES), 64, MAX_TOKENS),
        rng.integers(180, 320, SAMPLES),
        rng.choice([64, 300, 900, 2_000], SAMPLES),
    ][seed % 3].astype(np.int32)
    shown = np.array([shows_picture(number) for number in range(SAMPLES)])
    return lengths_of(tiles=shown, tokens=tokens, loss_tokens=tokens // 2)
