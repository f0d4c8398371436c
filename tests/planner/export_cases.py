"""Plans to export, made without a search, and the data that they are of.

    case = export_case(TargetName.MS_SWIFT, seed=0, ranks=8)
    case.export(folder / "data.jsonl", folder / "export")

writes an export of 10,000 samples. `python tests/planner/export_cases.py TARGET SEED RANKS FOLDER`
does so from a shell, for checks against the trainers themselves.
"""

import heapq
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from length_cases import lengths_of
from trainer_cases import scheduled as in_order

from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths
from omnibal.export.directory import Export, export_input, make_export
from omnibal.export.trainers import EXPORTS
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.job.plan_data import describe_data
from omnibal.job.plan_files import PlanFiles
from omnibal.model.config import load_cluster, load_model
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TARGETS, TargetName
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.pipeline.stage import Stage

MODEL = load_model("internvl-digits")
CLUSTER = load_cluster("laptop-cpu")
MICRO_BATCHES = 4
SAMPLES = 10_000


@dataclass(frozen=True)
class ExportCase:
    """A plan in memory, whose sample k is line k of the data that `write_data` writes."""

    files: PlanFiles
    target: TargetName

    @property
    def lengths(self) -> Lengths:
        return self.files.steps[1]

    @property
    def packs(self) -> ScheduledPacks:
        return self.files.steps[0]

    def export(self, data: Path | None, folder: Path) -> Export:
        """Write the export; the data too, where it is not there yet."""
        if data is not None and not data.exists():
            write_data(len(self.lengths), data)
        annotations = None if data is None else Annotations.open(data)
        given = export_input(self.files, TARGETS[self.target], annotations, folder, 0)
        made = make_export(given, EXPORTS[self.target])
        made.write()
        return made


def write_data(samples: int, path: Path) -> None:
    """Write as many short texts, each of which says its number."""
    with path.open("w") as file:
        for number in range(samples):
            messages = [
                {"role": "user", "content": f"What is sample {number}?"},
                {"role": "assistant", "content": str(number)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


@cache
def export_case(
    target: TargetName, *, seed: int, ranks: int, samples: int = SAMPLES, full: bool = False
) -> ExportCase:
    """A plan on one stage with packs of nearly equal tokens; its last step is full if asked."""
    lengths = drawn_lengths(seed, samples)
    per_step = ranks * MICRO_BATCHES
    count = -(-int(lengths.tokens.sum()) // 4_096)
    count = -(-count // per_step) * per_step if full else count // per_step * per_step + ranks // 2
    packs = scheduled(token_balanced(lengths.tokens, count), lengths, ranks, seed)
    return ExportCase(files=plan_files(target, packs, lengths, ranks), target=target)


def drawn_lengths(seed: int, samples: int) -> Lengths:
    rng = np.random.default_rng(seed)
    tokens = np.clip(rng.lognormal(6, 1, samples), 16, 4_000).astype(np.int32)
    return lengths_of(tiles=0 * tokens, tokens=tokens, loss_tokens=tokens // 2)


def token_balanced(tokens: np.ndarray, count: int) -> list[list[int]]:
    """Samples to packs, longest first, each to the pack with the fewest tokens."""
    held = [(0, pack) for pack in range(count)]
    packs: list[list[int]] = [[] for _ in range(count)]
    for sample in np.argsort(-tokens, kind="stable").tolist():
        total, pack = heapq.heappop(held)
        packs[pack].append(sample)
        heapq.heappush(held, (total + int(tokens[sample]), pack))
    return packs


def scheduled(packs: list[list[int]], lengths: Lengths, ranks: int, seed: int) -> ScheduledPacks:
    """Packs in any order as full steps, the last with what is over."""
    order = np.random.default_rng(seed).permutation(len(packs)).tolist()
    listed = Packs.from_lists([packs[number] for number in order])
    return in_order(listed, lengths, ranks, MICRO_BATCHES)


def plan_files(
    target: TargetName, packs: ScheduledPacks, lengths: Lengths, ranks: int
) -> PlanFiles:
    """A plan of one stage that trains these packs."""
    stage = Stage.of(
        "vision embed", f"vision 0..{MODEL.vision.layers - 1}", "projector", "language embed",
        f"language 0..{MODEL.language.layers - 1}", "head",
    )  # fmt: skip
    plan = Plan(
        model=MODEL,
        precision="bf16",
        parallel=TARGETS[target].held(Parallel(pipeline=1, data=ranks)),
        made_for=target,
        stages=(stage,),
        cluster=CLUSTER,
        data=describe_data(
            packs,
            lengths,
            caps=Caps.of(tiles=1, tokens=int(packs.tokens.max())),
            method="other",
            seed=0,
            epochs=1,
            packs_per_step=ranks * MICRO_BATCHES,
            micro_batches_per_step=MICRO_BATCHES,
        ),
    )
    return PlanFiles(plan=plan, job=JobSpec.of_plan(plan), data=(packs, lengths))


if __name__ == "__main__":
    name, seed, ranks, where = sys.argv[1:]
    case = export_case(TargetName(name), seed=int(seed), ranks=int(ranks))
    Path(where).mkdir(parents=True, exist_ok=True)
    case.export(Path(where) / "data.jsonl", Path(where) / "export")
