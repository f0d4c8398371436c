"""Training of native-resolution models with data-parallel encoders: packs of whole samples."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from data_parallel_cases import data_parallel_plan, shares_of
from length_cases import lengths_of
from megatron.core import parallel_state
from native_resolution_cases import pack_of, sample_of
from tensor_parallel_cases import Feed
from toy import stages_of, toy_plan

from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.inputs.encoder_share import EncoderPass
from omnibal.data.lengths import Lengths
from omnibal.data.native_resolution import Grid
from omnibal.job.plan import Plan
from omnibal.model.config import ModelConfig
from omnibal.packing.packs import Packs, ScheduledPacks

Sample = tuple[tuple[Grid, ...], int]
"""Images and videos of a sample, and its text tokens."""

# Packs of samples of each step, dealt to data-parallel ranks in turn: fewer packs than slots, a
# video, a sample that is longer than a pass, packs of text alone, all images in one pack, a step
# without any, one pack for all ranks.
STEPS: list[list[list[Sample]]] = [
    [
        [((Grid(1, 6, 4), Grid(1, 2, 8)), 9), ((Grid(1, 4, 4),), 6)],
        [((), 12), ((), 7)],
        [((Grid(3, 4, 6),), 5), ((Grid(1, 2, 4), Grid(1, 2, 2)), 9)],
        [((Grid(1, 2, 2),), 8), ((), 6), ((Grid(1, 4, 10),), 11)],
        [((), 9)],
    ],
    [[((), 7)], [((Grid(1, 8, 4),), 12), ((Grid(1, 4, 4),), 3), ((Grid(1, 2, 6),), 5)], [((), 4)]],
    [[((), 12), ((), 4)], [((), 5)]],
    [[((Grid(2, 2, 6), Grid(1, 4, 2)), 8)]],
]


def plan_of(model: ModelConfig, cuts: Sequence[int] = (), **options: object) -> Plan:
    """A plan with data-parallel encoders; cuts count units of the language model alone."""
    given = {"per_pass": 9, "kept": 7} | options
    return data_parallel_plan(model, cuts, **given)


def packs_of(
    model: ModelConfig, number: int, packs: Sequence[list[Sample]]
) -> Iterator[MicroBatch]:
    """The packs of a step, with weights that differ between positions."""
    for index, pack in enumerate(packs):
        seed = 100 * number + 10 * index
        batch = pack_of([sample_of(model, *one, seed=seed + i) for i, one in enumerate(pack)])
        weights = torch.linspace(0.5, 1.5, len(batch.labels_L))
        yield replace(batch, loss_weights_L=weights, loss_weight=weights.sum().item())


def scheduled_step(number: int, ranks: int) -> tuple[ScheduledPacks, Lengths, list[int]]:
    """A step of packs, of which every data-parallel rank has every `ranks`-th; lengths of its
    samples; and the place in the step of each pack."""
    packs = STEPS[number]
    order = sorted(range(len(packs)), key=lambda place: (place % ranks, place))
    samples = [sample for place in order for sample in packs[place]]
    cells = [sum(grid.patches // 4 for grid in grids) for grids, _ in samples]
    squares = [
        sum(grid.times * (grid.rows * grid.columns // 4) ** 2 for grid in grids)
        for grids, _ in samples
    ]
    sizes = [len(packs[place]) for place in order]
    lengths = lengths_of(
        image_tokens=cells,
        squared_image_tokens=squares,
        tokens=[100] * len(cells),
        loss_tokens=[1] * len(cells),
    )
    members = Packs(samples=np.arange(len(cells)), offsets=np.append(0, np.cumsum(sizes)))
    place = np.array(order)
    found = ScheduledPacks.of(members, lengths, 0 * place, place % ranks, place // ranks)
    return found, lengths, order


def own_stream(plan: Plan, number: int, packs: Sequence[MicroBatch]) -> MicroBatchStream:
    """This rank's part of a step: its passes, and its micro-batches without patches, in order."""
    own = packs[parallel_state.get_data_parallel_rank() :: plan.parallel.data]
    if plan.beside is None:
        return MicroBatchStream.of(own)
    held, lengths, order = scheduled_step(number, plan.parallel.data)
    shares = shares_of(plan, held, dist.get_rank(), lengths).step(0)
    in_order = [packs[place] for place in order]
    texts = [replace(batch, patches_YX=None, image_grids=()) for batch in own]
    read = [*(_pass(one, in_order) for one in shares.passes), *texts]
    return replace(MicroBatchStream.of(own), batches=iter(read), encoding=shares)


def _pass(planned: EncoderPass, packs: Sequence[MicroBatch]) -> MicroBatch:
    patches, grids = [], []
    for run in planned.runs:
        own, start = packs[run.row], 0
        for grid in own.image_grids:
            cells = grid.patches // 4
            if start in run.items:
                assert start + cells - 1 in run.items, "images go whole"
                grids.append(grid)
                patches.append(own.patches_YX[4 * start : 4 * (start + cells)])
            start += cells
    return MicroBatch(
        tiles=0,
        image_tokens=planned.items,
        image_grids=tuple(grids),
        patches_YX=torch.cat(patches),
        tokens=0,
        segment_tokens=(),
    )


FEED = Feed(packs_of, own_stream)


def in_pipeline(model: ModelConfig, *cuts: int, frozen: tuple[str, ...] = ()) -> Plan:
    """The model with its encoder in the pipeline; cuts count all units."""
    return toy_plan(model, stages_of(model, *cuts)).model_copy(update={"frozen": frozen})
