"""Plans and exports, made by the commands as a user types them, and what they should be read as."""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnibal import cli
from omnibal.check import open_plan
from omnibal.data.lengths import Lengths, write_lengths

SAMPLES = 10_000
MICRO_BATCHES = 4
MAX_TOKENS = 4_096


def run(command: str) -> str:
    """Run a command in this process, and return what it prints."""
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
    """What RUN.md says to run."""
    tokens: np.ndarray
    """Of every sample, [samples]."""
    ranks: int
    packs: list[list[list[list[int]]]]
    """Numbers of the samples: by step, slot, rank and place in the pack."""

    def of_rank(self, rank: int, *, steps: int | None = None) -> list[list[int]]:
        """Packs of a rank, one after another."""
        chosen = self.packs[:steps]
        return [slot[rank] for step in chosen for slot in step]

    @property
    def flags(self) -> dict[str, str]:
        """Flags of the command and their values."""
        words = self.command.replace("\\\n", " ").split()
        named = [place for place, word in enumerate(words) if word.startswith("--")]
        return {words[place].removeprefix("--"): words[place + 1] for place in named}


def planned(folder: Path, target: str, seed: int, ranks: int, more: str = "") -> Planned:
    """Plan 10,000 samples for a trainer and export it, as `omnibal plan` and `omnibal export` do.

    Args:
        folder: that holds the data, or will; a plan and an export are made in it.
        target: name of the trainer.
        seed: of the samples' lengths.
        ranks: data-parallel ones.
        more: options of the export.
    """
    folder.mkdir(exist_ok=True)
    data, lengths = folder / "data.jsonl", folder / f"lengths{seed}.parquet"
    if not data.exists():
        write_data(data)
    if not lengths.exists():
        write_lengths(drawn_lengths(seed), lengths)
    plan, export = folder / f"plan-{target}-{seed}-{ranks}", folder / f"{target}-{seed}-{ranks}"
    run(
        f"plan --model internvl-digits --cluster laptop-cpu --dp {ranks} --lengths {lengths} "
        f"--max-tokens {MAX_TOKENS} --micro-batches {MICRO_BATCHES} --seed {seed} --packing isf "
        f"--for {target} --no-compare -o {plan} {'' if 'swift' in target else '--max-tiles 40'}"
    )
    made = json.loads(run(f"export {plan} --to {export} --data {data} --json {more}"))
    files = open_plan(plan)
    return Planned(
        export=export,
        command=made["command"],
        tokens=files.steps[1].tokens.astype(np.int64),
        ranks=ranks,
        packs=in_turn(files.steps[0], ranks),
    )


def in_turn(packs, ranks: int) -> list[list[list[list[int]]]]:
    """Packs by step, slot and rank; each sample list as the plan has it."""
    turns: dict[tuple[int, int, int], list[int]] = {
        (int(packs.step[k]), int(packs.slot[k]), int(packs.dp_rank[k])): packs.packs[k].tolist()
        for k in range(len(packs))
    }
    steps = int(packs.step.max()) + 1
    slots = [max(slot for s, slot, _ in turns if s == step) + 1 for step in range(steps)]
    return [
        [
            [turns[step, slot, rank] for rank in range(ranks) if (step, slot, rank) in turns]
            for slot in range(slots[step])
        ]
        for step in range(steps)
    ]


def write_data(path: Path) -> None:
    """Write texts that say their numbers."""
    with path.open("w") as file:
        for number in range(SAMPLES):
            messages = [
                {"role": "user", "content": f"What is sample {number}?"},
                {"role": "assistant", "content": str(number)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def drawn_lengths(seed: int) -> Lengths:
    """Lengths with a heavy tail, the first seed's; of others nearly equal, or of a few values."""
    rng = np.random.default_rng(seed)
    tokens = [
        np.clip(rng.lognormal(6, 1, SAMPLES), 16, MAX_TOKENS),
        rng.integers(180, 320, SAMPLES),
        rng.choice([64, 300, 900, 2_000], SAMPLES),
    ][seed % 3].astype(np.int32)
    return Lengths(
        items={"tiles": np.zeros(SAMPLES, np.int32)},
        tokens=tokens,
        loss_tokens=(tokens // 2).astype(np.int32),
        source=np.zeros(SAMPLES, np.int32),
        source_names=("data",),
        origin=None,
    )
