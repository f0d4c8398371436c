"""Packs to measure context-parallel language layers on."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch.distributed as dist

from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.pack_share import Share
from omnibal.cost.context import exchange_mistake
from omnibal.cost.share_features import part_features
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.model.levels import ContextExchange, CutRule, Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.units import EXCHANGED
from omnibal.packing.packs import Packs

_SIZES = (1 / 4, 1 / 16)
"""Tokens of a rank's share, as shares of a pack's cap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredShare:
    """This process's share of a pack."""

    batch: MicroBatch
    """Sizes only. A layer needs no content."""
    context: int
    exchange: ContextExchange
    features: dict[str, int]
    """Features, by name, of the largest share in the rank's block, which all ranks wait for."""


def context_sizes(processes: int) -> tuple[int, ...]:
    """Context-parallel sizes that divide the number of processes: powers of two."""
    powers = (2**exponent for exponent in range(1, processes.bit_length()))
    return tuple(size for size in powers if processes % size == 0)


def shares_of_process(
    job: JobSpec, contexts: Iterable[int], max_tokens: int, tokens_per_sample: int
) -> Iterator[MeasuredShare]:
    """Yield shares of every context size and exchange that the model's heads allow.

    Packs of one sample exchange all tokens, packs of typical samples only tokens at the cuts. This
    separates the costs that depend on exchanged tokens.
    """
    for context, exchange, size in product(contexts, ContextExchange, _SIZES):
        tokens = max(round(max_tokens * size), 1) * context
        several = max(round(tokens / tokens_per_sample), 1)
        for samples, cut in ((1, CutRule.ZIGZAG), (several, CutRule.CONTIGUOUS)):
            level = Level(caps=Caps.of(tokens=tokens), context=context, exchange=exchange, cut=cut)
            if exchange_mistake(job.model, Parallel(pipeline=1), level) is None:
                bounds = np.linspace(0, tokens, samples + 1).round().astype(int)
                yield _share(np.diff(bounds).tolist(), level)


def _share(sample_tokens: Sequence[int], level: Level) -> MeasuredShare:
    tokens = np.array(sample_tokens)
    share = Share.of(tokens, level, dist.get_rank() % level.context)
    batch = MicroBatch(
        tiles=0,
        tokens=share.tokens,
        segment_tokens=tuple(share.own_pieces.tokens.tolist()),
        share=share,
    )
    names = ("tokens", "squared_tokens", EXCHANGED)
    pack = Packs.from_lists([list(range(len(tokens)))])
    lengths = Lengths(
        items={},
        tokens=tokens,
        loss_tokens=tokens,
        source=np.zeros(len(tokens), np.int32),
        source_names=("",),
    )
    most = part_features(pack, lengths, level, names)[0].max(axis=0)
    features = {name: round(value) for name, value in zip(names, most.tolist(), strict=True)}
    return MeasuredShare(
        batch=batch, context=level.context, exchange=level.exchange, features=features
    )
