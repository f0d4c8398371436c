"""Toy plans with data-parallel encoders, and a rank's part of a step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from length_cases import lengths_of
from megatron.core import parallel_state
from toy import stages_of, toy_plan

from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.inputs.encoder_share import EncoderPass, EncoderShares, EncodingRanks
from omnibal.data.lengths import Lengths
from omnibal.job.plan import Plan
from omnibal.model.config import ModelConfig
from omnibal.model.data_parallel_encoders import DataParallelEncoders, takes_whole_samples
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.packing.packs import Packs, ScheduledPacks

ITEM_FIELDS = {"tiles": ("pixels_TCPP", "drop_path_keys_T"), "clips": ("frames_CBF",)}
"""Fields of a micro-batch with an entry per item."""


def data_parallel_plan(
    model: ModelConfig,
    cuts: Sequence[int] = (),
    *,
    pipelines: int = 1,
    per_pass: int = 3,
    kept: int = 2,
    frozen: tuple[str, ...] = (),
    recompute: dict[str, tuple[int, ...]] | None = None,
    divided: int = 1,
    **sizes: object,
) -> Plan:
    """Return a plan with data-parallel encoders; cuts are positions in the language model."""
    stages = stages_of(model.without_encoders(), *cuts, **(recompute or {}))
    encoders = list(model.encoders)
    dp_encoders = DataParallelEncoders(
        pipelines=pipelines,
        items_per_pass=dict.fromkeys(encoders, per_pass),
        kept_items=dict.fromkeys(encoders, kept),
        item_ms={name: 1.0 + place for place, name in enumerate(encoders)},
        square_ms=dict.fromkeys(takes_whole_samples(model), 0.01),
        sharded=divided,
    )
    plan = toy_plan(model, stages, **sizes)
    return plan.model_copy(update={"data_parallel_encoders": dp_encoders, "frozen": frozen})


def deal_packs(
    packs: Sequence[MicroBatch], ranks: int, packs_per_step: int | None = None
) -> ScheduledPacks:
    """Return packs dealt to data-parallel ranks in turn, by default as one step."""
    number = np.arange(len(packs))
    step, at = np.divmod(number, packs_per_step or len(packs))
    counts = {name: [vars(pack)[name] for pack in packs] for name in ("tiles", "clips", "tokens")}
    members = Packs.from_lists([[one] for one in number])
    return ScheduledPacks.from_packs(members, lengths_of(**counts), step, at % ranks, at // ranks)


def shares_of(
    plan: Plan, scheduled: ScheduledPacks, rank: int, lengths: Lengths | None = None
) -> EncoderShares:
    encoders = plan.data_parallel_encoders
    ranks = EncodingRanks(pipelines=encoders.pipelines, parallel=plan.parallel, rank=rank)
    return EncoderShares(
        model=plan.model, settings=encoders, ranks=ranks, packs=scheduled, lengths=lengths,
        gpus_per_node=plan.cluster.gpus_per_node,
        levels=plan.levels or [Level(caps=Caps.of(tokens=1))],
    )  # fmt: skip


def own_stream(plan: Plan, number: int, packs: Sequence[MicroBatch]) -> MicroBatchStream:
    """Return this rank's part of a step: encoder passes, then micro-batches without items."""
    own = packs[parallel_state.get_data_parallel_rank() :: plan.parallel.data]
    if plan.data_parallel_encoders is None:
        return MicroBatchStream.of(own)
    in_order = sorted(range(len(packs)), key=lambda i: (i % plan.parallel.data, i))
    return encoding_stream(
        plan, deal_packs(packs, plan.parallel.data), [packs[i] for i in in_order], own
    )


def encoding_stream(
    plan: Plan, scheduled: ScheduledPacks, packs: Sequence[MicroBatch], own: Sequence[MicroBatch]
) -> MicroBatchStream:
    """Return this rank's encoder passes of a step, then its micro-batches without items.

    Args: all packs in row order; `own`: this rank's micro-batches, full packs or shards.
    """
    shares = shares_of(plan, scheduled, dist.get_rank()).step(0)
    fields = [name for names in ITEM_FIELDS.values() for name in names]
    texts = [replace(batch, **dict.fromkeys(fields)) for batch in own]
    read = [*(_pass(one, packs) for one in shares.passes), *texts]
    return replace(MicroBatchStream.of(own), batches=iter(read), encoding=shares)


def _pass(planned: EncoderPass, packs: Sequence[MicroBatch]) -> MicroBatch:
    counts = {"tiles": 0, planned.feature: planned.items}
    fields = dict[str, torch.Tensor]()
    for name in ITEM_FIELDS[planned.feature]:
        wholes = [(vars(packs[run.row])[name], run.items) for run in planned.runs]
        parts = [one[own.start : own.stop] for one, own in wholes if one is not None]
        if parts:
            fields[name] = torch.cat(parts)
    return MicroBatch(**counts, tokens=0, segment_tokens=(), **fields)
