"""Training with context-parallel packs."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from chunk_cases import with_chunks
from data_parallel_cases import encoding_stream
from encoder_cases import choice_of
from length_cases import lengths_of
from megatron.core import parallel_state
from tensor_parallel_cases import Feed, model_of, with_unequal_weights
from toy import share_of, stages_of, toy_batch, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from omnibal.job.plan import Plan, PlannedLevel
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.config import ModelConfig
from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.model.layer_kinds import ExpertsConfig, LayerRun
from omnibal.model.levels import ContextExchange, CutRule
from omnibal.model.limits import Caps
from omnibal.packing.packs import Packs, ScheduledPacks

# Slots as (level, packs), a pack being samples of (tiles, text tokens). Levels 1 and 2 are shared.
# Packs have no images, fewer tiles than ranks, or a sample absent on some rank.
FULL = [
    (1, [[(2, 6), (3, 3), (0, 19)], [(0, 25), (0, 4)]]),
    (0, [[(1, 6)], [(0, 9)], [(2, 5), (0, 3)], [(0, 4)]]),
    (2, [[(3, 41), (0, 5)], [(0, 33)]]),
]
# The last rows have packs for some ranks only, wider packs first.
SHORT = [(2, [[(1, 20), (0, 7)], [(0, 12)]]), (1, [[(4, 21)]]), (0, [[(0, 8)]])]
STEPS = [FULL, SHORT]


@dataclass(frozen=True)
class Case:
    """Levels 1 and 2 as (context, cut, exchange), and options."""

    levels: tuple[tuple[int, CutRule, ContextExchange], ...]
    sizes: dict
    cuts: tuple[int, ...] = ()
    tied: bool = False
    frozen: tuple[str, ...] = ()
    adapters: AdapterConfig | None = None
    recompute: tuple[dict, ...] = ({}, {}, {})
    drop_path: float = 0.0
    text_only: bool = False
    experts: bool = False
    dp_encoders: DataParallelEncoders | None = None
    chunks: int = 1


REPLICATED, SHARDED = (choice_of(2, 2, {"vision": 2}, sharded=ranks) for ranks in (1, 4))
GATHER, HEADS = ContextExchange.GATHER, ContextExchange.HEADS
IN_PARTS = {"data": 2, "tensor": 2, "sequence_parallel": True}
DP4_LEVELS = ((2, CutRule.ZIGZAG, GATHER), (4, CutRule.CONTIGUOUS, HEADS))
_TIED = {
    "tied": True, "recompute": ({}, {"vision": (0, 1), "language": (1,)}, {"language": (0,)}),
}  # fmt: skip
# Each cut rule and each kind of parallelism is combined with both exchanges.
CASES = {
    "dp4": Case(
        DP4_LEVELS, {"data": 4}, drop_path=0.3,
        recompute=({}, {"vision": (1,), "language": (0,)}, {"language": (0, 1)}),
    ),
    "dp4-wide": Case(
        ((4, CutRule.WHOLE, GATHER), (2, CutRule.COST, HEADS)), {"data": 4}, tied=True
    ),
    "tp2-sp-dp2": Case(
        ((2, CutRule.COST, GATHER), (2, CutRule.WHOLE, HEADS)), IN_PARTS, frozen=("vision",),
        recompute=({"language": (1,)}, {"language": (0,)}, {}),
    ),
    "pp2-dp2": Case(
        ((2, CutRule.CONTIGUOUS, GATHER), (2, CutRule.ZIGZAG, HEADS)), {"data": 2}, cuts=(5,),
        **_TIED,
    ),
    # Ranks that share a pack have unequal numbers of packs.
    "pp2-of-two-chunks-dp2": Case(
        ((2, CutRule.COST, GATHER), (2, CutRule.ZIGZAG, HEADS)), {"data": 2}, cuts=(2, 5, 6),
        chunks=2, drop_path=0.3, **_TIED,
    ),
    "pp2-dp2-vision": Case(
        ((2, CutRule.WHOLE, GATHER), (2, CutRule.COST, HEADS)), {"data": 2}, cuts=(2,),
        frozen=("language",), drop_path=0.3,
    ),
    "dp2-text": Case(
        ((2, CutRule.ZIGZAG, GATHER), (2, CutRule.CONTIGUOUS, HEADS)), {"data": 2}, text_only=True
    ),
    "dp4-data-parallel": Case(
        DP4_LEVELS, {"data": 4}, drop_path=0.3, dp_encoders=REPLICATED,
        recompute=({}, {"language": (0,)}, {"language": (0, 1)}),
    ),
    "pp2-dp2-data-parallel-divided": Case(
        ((2, CutRule.WHOLE, GATHER), (2, CutRule.COST, HEADS)), {"data": 2}, cuts=(2,),
        dp_encoders=SHARDED,
    ),
    "tp2-sp-dp2-adapters": Case(
        ((2, CutRule.COST, GATHER), (2, CutRule.WHOLE, HEADS)), IN_PARTS,
        frozen=("vision", "projector"), adapters=AdapterConfig(rank=4, alpha=8),
        recompute=({"language": (0,)}, {"language": (0,)}, {}),
    ),
    "dp4-data-parallel-adapters": Case(
        DP4_LEVELS, {"data": 4}, frozen=("projector",), dp_encoders=SHARDED,
        adapters=AdapterConfig(rank=4, alpha=8, parts=("vision", "language")),
    ),
    "dp4-experts": Case(
        DP4_LEVELS, {"data": 4, "expert": 4}, recompute=({"language": (0,)},) * 3, experts=True
    ),
}  # fmt: skip


def plan_of(case) -> Plan:
    """Return the case's plan, with four key/value heads in language layers."""
    model = model_of(vocabulary=49, kv_heads=4, is_qwen3=case.tied, tied=case.tied)
    if case.experts:
        # No auxiliary loss, as it is per rank of a shared pack.
        experts = ExpertsConfig(experts=8, experts_per_token=2, ffn_hidden_size=10)
        model = model.with_tower("language", runs=(LayerRun(layers=1, experts=experts),))
    if case.text_only:
        model = ModelConfig(name="toy-text", language=model.language)
    shapes = [(1, CutRule.CONTIGUOUS, GATHER), *case.levels]
    of_stages = model if case.dp_encoders is None else model.without_encoders()
    levels = tuple(
        PlannedLevel(
            caps=Caps.of(tiles=9, tokens=400 * number),
            context=context,
            cut=cut,
            exchange=exchange,
            attention_weight=0.05,
            recompute=tuple(s.recompute for s in stages_of(of_stages, *case.cuts, **recompute)),
        )
        for number, ((context, cut, exchange), recompute) in enumerate(
            zip(shapes, case.recompute, strict=True), 1
        )
    )
    plan = toy_plan(model, stages_of(of_stages, *case.cuts), **case.sizes)
    changes = {"levels": levels, "frozen": case.frozen, "adapters": case.adapters}
    plan = plan.model_copy(update={"data_parallel_encoders": case.dp_encoders, **changes})
    return plan if case.chunks == 1 else with_chunks(plan, case.chunks)


def whole_packs(model, number, rows, drop_path):
    """Yield a step's rows with each pack as one micro-batch."""
    for place, (level, packs) in enumerate(rows):
        row = []
        for index, mixed in enumerate(packs):
            samples = [(tiles * bool(model.encoders), text) for tiles, text in mixed]
            batch = toy_batch(model, samples, seed=100 * number + 10 * place + index)
            keys = torch.arange(batch.tiles) * 0x9E3779B97F4A7C + place if drop_path else None
            row.append(replace(with_unequal_weights(batch), level=level, drop_path_keys_T=keys))
        yield level, row


def own_batches(plan, number, rows):
    """Return this data-parallel rank's micro-batches."""
    rank, ranks = parallel_state.get_data_parallel_rank(), plan.parallel.data
    batches, placed, is_full = [], [], True
    slots = np.zeros(ranks, int)
    for level, row in rows:
        planned = plan.levels[level]
        # On fewer ranks, a row is split into several.
        blocks = ranks // planned.context
        for first in range(0, len(row), blocks):
            packs = row[first : first + blocks]
            is_full &= len(packs) == blocks
            for place, whole in enumerate(packs):
                block = slice(place * planned.context, (place + 1) * planned.context)
                placed.append((block.start, slots[block.start], level, whole))
                slots[block] += 1
                if rank // planned.context == place:
                    batches.append(share_of(whole, planned, rank % planned.context))
    stream = MicroBatchStream.of(batches)
    if plan.data_parallel_encoders is not None:
        placed.sort(key=lambda one: one[:2])
        first_ranks, slot, levels, packs = zip(*placed, strict=True)
        counts = {name: [vars(pack)[name] for pack in packs] for name in ("tiles", "tokens")}
        scheduled = ScheduledPacks.from_packs(
            Packs.from_lists([[row] for row in range(len(packs))]), lengths_of(**counts),
            np.zeros(len(packs)), np.array(first_ranks), np.array(slot), level=np.array(levels),
        )  # fmt: skip
        stream = encoding_stream(plan, scheduled, packs, batches)
    return replace(stream, rows_are_full=is_full)


def options_of(case):
    """Return the case's steps and feed."""
    packed = partial(whole_packs, drop_path=case.drop_path)
    return {"steps": STEPS, "feed": Feed(packed, own_batches, case.drop_path)}
