"""Plans whose packs and stages are written by hand, and shards of their samples, for exports."""

import json
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
from plan_cases import MODEL, job_spec

from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths
from omnibal.export.directory import check_expressible, export_input
from omnibal.export.exported import ExportInput
from omnibal.job.plan import Plan
from omnibal.job.plan_data import describe_data
from omnibal.job.plan_files import PlanFiles
from omnibal.model.config import ModelConfig
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TARGETS, TargetName
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.pipeline.stage import Stage

MICRO_BATCHES = 2


def stages_of(
    model: ModelConfig, *language: int, recompute: dict[int, tuple[str, ...]] | None = None
) -> tuple[Stage, ...]:
    """Stages with so many language layers each, and all encoders on the first one."""
    units: list[list[str]] = []
    first = 0
    for count in language:
        units.append([f"language {first}..{first + count - 1}"] if count else [])
        first += count
    encoders = [
        [f"{name} embed", f"{name} 0..{tower.layers - 1}", "projector"]
        for name, tower in model.encoders.items()
    ]
    units[0] = [*(unit for each in encoders for unit in each), "language embed", *units[0]]
    units[-1].append("head")
    again = recompute or {}
    return tuple(
        Stage.of(*each, recompute=again.get(number, ())) for number, each in enumerate(units)
    )


def random_packs(samples: int, most: int, rng: np.random.Generator) -> Packs:
    """All samples in random packs of 1 to `most`."""
    cuts = np.cumsum(rng.integers(1, most + 1, samples))
    offsets = np.concatenate([[0], cuts[cuts < samples], [samples]])
    return Packs(samples=rng.permutation(samples), offsets=offsets.astype(np.int64))


def scheduled(
    packs: Packs, lengths: Lengths, ranks: int, micro_batches: int = MICRO_BATCHES
) -> ScheduledPacks:
    """The packs in this order of reading, with so many of a rank in every step."""
    place = np.arange(len(packs))
    step, within = np.divmod(place, micro_batches * ranks)
    slot, rank = np.divmod(within, ranks)
    return ScheduledPacks.of(packs, lengths, step, rank, slot)


def plan_files(
    packs: Packs,
    lengths: Lengths,
    stages: tuple[Stage, ...],
    *,
    parallel: Parallel | None = None,
    model: ModelConfig = MODEL,
    **changes,
) -> PlanFiles:
    """A plan of these packs in this order, on as many ranks as `parallel` has."""
    parallel = parallel or Parallel(pipeline=len(stages))
    job = job_spec(model=model, parallel=parallel, **changes)
    run = scheduled(packs, lengths, parallel.data)
    data = describe_data(
        run,
        lengths,
        caps=Caps.of(tiles=max(int(run.items["tiles"].max()), 1), tokens=int(run.tokens.max())),
        method="other",
        seed=0,
        epochs=1,
        packs_per_step=MICRO_BATCHES * parallel.data,
        micro_batches_per_step=MICRO_BATCHES,
    )
    plan = Plan(
        model=model,
        precision=job.precision,
        parallel=parallel,
        frozen=job.frozen,
        stages=stages,
        cluster=job.cluster,
        data=data,
    )
    return PlanFiles(plan=plan, job=job, data=(run, lengths))


def given_of(
    files: PlanFiles,
    name: TargetName,
    annotations: Annotations | None = None,
    workers: int = 0,
    folder: Path = Path("/export"),
) -> ExportInput:
    check_expressible(files, TARGETS[name])
    return export_input(files, TARGETS[name], annotations, folder, workers)


def parts_of(images: int) -> list[str]:
    """Names of a sample's images behind its key."""
    return ["jpg"] if images == 1 else [f"{number}.jpg" for number in range(images)]


def write_shards(folder: Path, shows: np.ndarray, per_shard: int = 5_000) -> Path:
    """A meta of shards with so many images in every sample, text where it has none."""
    for shard, first in enumerate(range(0, len(shows), per_shard)):
        with tarfile.open(folder / f"part-{shard}.tar", "w") as tar:
            for number in range(first, min(first + per_shard, len(shows))):
                record = {
                    "conversations": [
                        {"from": "human", "value": "<image>" * int(shows[number]) + "?"},
                        {"from": "gpt", "value": "!"},
                    ],
                }
                members = {"json": json.dumps(record).encode()}
                members |= dict.fromkeys(parts_of(int(shows[number])), b"\xff\xd8%d" % number)
                for part, content in members.items():
                    member = tarfile.TarInfo(f"{number:06}.{part}")
                    member.size = len(content)
                    tar.addfile(member, BytesIO(content))
    last = (len(shows) - 1) // per_shard
    meta = folder / "meta.json"
    meta.write_text(json.dumps({"a": {"shards": f"part-{{0..{last}}}.tar"}}))
    return meta
