"""A rank's part of a step of native-resolution images, with its encoder passes."""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from data_parallel_cases import shares_of
from length_cases import lengths_of
from megatron.core import parallel_state
from native_resolution_cases import STEPS

from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from omnibal.packing.packs import Packs, ScheduledPacks


def schedule_step(number, ranks):
    """Return a step's packs dealt to ranks in turn, sample lengths, and each pack's index."""
    packs = STEPS[number]
    place = np.array(sorted(range(len(packs)), key=lambda place: (place % ranks, place)))
    samples = [grids for index in place for grids, _ in packs[index]]
    cells = [
        [grid.rows * grid.columns // 4 for grid in grids for _ in range(grid.times)]
        for grids in samples
    ]
    lengths = lengths_of(
        image_tokens=[sum(own) for own in cells],
        squared_image_tokens=[sum(one**2 for one in own) for own in cells],
        tokens=[100] * len(cells),
        loss_tokens=[1] * len(cells),
    )
    ends = np.cumsum([len(packs[index]) for index in place])
    members = Packs(samples=np.arange(len(cells)), offsets=np.append(0, ends))
    found = ScheduledPacks.from_packs(members, lengths, 0 * place, place % ranks, place // ranks)
    return found, lengths, place


def own_stream(plan, number, packs):
    """Return this rank's part of a step: encoder passes, then micro-batches without patches."""
    own = packs[parallel_state.get_data_parallel_rank() :: plan.parallel.data]
    if plan.data_parallel_encoders is None:
        return MicroBatchStream.of(own)
    scheduled, lengths, order = schedule_step(number, plan.parallel.data)
    shares = shares_of(plan, scheduled, dist.get_rank(), lengths).step(0)
    passes = [encoder_pass(one, [packs[place] for place in order]) for one in shares.passes]
    texts = [replace(batch, patches_YX=None, image_grids=()) for batch in own]
    return replace(MicroBatchStream.of(own), batches=iter([*passes, *texts]), encoding=shares)


def encoder_pass(planned, packs):
    patches, grids = [], []
    for run in planned.runs:
        own, start = packs[run.row], 0
        for grid in own.image_grids:
            stop = start + grid.patches // 4
            if start in run.items:
                assert stop - 1 in run.items, "images go whole"
                grids.append(grid)
                patches.append(own.patches_YX[4 * start : 4 * stop])
            start = stop
    return MicroBatch(
        tiles=0, image_tokens=planned.items, image_grids=tuple(grids), tokens=0, segment_tokens=(),
        patches_YX=torch.cat(patches),
    )  # fmt: skip
