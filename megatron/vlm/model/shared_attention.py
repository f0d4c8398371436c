"""Causal attention over a pack shared by context-parallel ranks.

A rank's queries are its pieces of samples. Each attends to its sample up to the piece's end. The
level selects how keys arrive:

- `gather`: all-gather keys and values of divided samples; backward reduces their gradients. The
  gathered tensors are freed and gathered again in backward, unless the layer is recomputed.
- `heads`: all-to-all, so that each rank has all tokens of divided samples and some heads
  (DeepSpeed-Ulysses, arXiv 2309.14509).

Samples within one rank need no exchange.

Shapes: T tokens of this rank, N heads, G key/value heads, D head size, R tokens of its divided
pieces, A tokens of all divided samples, K keys of all its pieces, C ranks that share the pack.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.vlm.inputs.batch import borders_of
from megatron.vlm.inputs.pack_share import Share, ShareLayout
from megatron.vlm.model.exchange import Gathering, exchange_rows, gather_rows, scatter_gradients
from omnibal.data.image_sizes import numbers_of_runs
from omnibal.model.levels import ContextExchange

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedSeqParams, bool], torch.Tensor]
"""Attention within one rank, as `attention.attend_packed`."""


class SharedAttention(ABC):
    """Attention of a rank's share, in place of core's `PackedSeqParams`."""

    @abstractmethod
    def attend(
        self, query_TND: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, by: Attend
    ) -> torch.Tensor:
        """Attend across the block's ranks, [T, N, D]."""

    def recomputed(self) -> "SharedAttention":
        """Return the variant for a layer that is recomputed in backward."""
        return self


def shared_attention(
    share: Share, padding: int, group: dist.ProcessGroup, device: torch.device
) -> SharedAttention | None:
    """Return the attention of a share, or None if no sample is divided.

    Padding tokens attend to each other.
    """
    layout = ShareLayout.of(share, padding)
    if not len(layout.divided):
        return None
    match share.exchange:
        case ContextExchange.GATHER:
            return _GatheredKeys.of(layout, group, device)
        case ContextExchange.HEADS:
            return _DividedHeads.of(layout, group, device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _GatheredKeys(SharedAttention):
    gathering: Gathering
    borders: PackedSeqParams
    """Borders of this rank's pieces, and for keys of each sample up to the piece's end."""
    keeps_keys: bool = False

    @classmethod
    def of(
        cls, layout: ShareLayout, group: dist.ProcessGroup, device: torch.device
    ) -> "_GatheredKeys":
        most = int(layout.divided_tokens.max())
        starts, counts, key_tokens = _wanted_ranges(layout, most)
        query_tokens = layout.own.tokens.tolist()
        if layout.padding:
            query_tokens.append(layout.padding)
        gathering = Gathering(
            sent_S=_divided_rows(layout, device),
            most_sent=most,
            wanted_W=_ranges(starts, counts, device),
            group=group,
        )
        return cls(gathering=gathering, borders=borders_of(query_tokens, key_tokens, device))

    def recomputed(self) -> "_GatheredKeys":
        return replace(self, keeps_keys=True)

    def attend(
        self, query_TND: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, by: Attend
    ) -> torch.Tensor:
        own_T2GD = torch.stack([key_TGD, value_TGD], 1)
        again = None
        if torch.is_grad_enabled() and not self.keeps_keys and own_T2GD.requires_grad:
            again = _GatheredAgain(own_T2GD.detach(), self.gathering)
        key_KGD, value_KGD = _GatherKeys.apply(own_T2GD, self.gathering, again)
        if again is None:
            return by(query_TND, key_KGD, value_KGD, self.borders, True)
        again.stands_for(key_KGD)
        with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
            context_TND = by(query_TND, key_KGD, value_KGD, self.borders, True)
        return _GatherBefore.apply(context_TND, again)


def _wanted_ranges(layout: ShareLayout, most: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return start and row count of every run of `Gathering.wanted_W`, and keys of every piece."""
    divided, own, is_divided = layout.divided, layout.own, layout.own_divided
    before = np.cumsum(divided.tokens) - divided.tokens
    of_rank = np.cumsum(layout.divided_tokens) - layout.divided_tokens
    sent_row = layout.tokens + divided.rank * most + before - of_rank[divided.rank]
    by_place = np.lexsort((divided.first, divided.sample))
    # A divided sample takes all runs up to the piece itself. A whole sample is one run, cut at the
    # piece's end.
    first_run = np.searchsorted(divided.sample[by_place], own.sample)
    last_run = first_run.copy()
    last_run[is_divided] = np.argsort(by_place)[divided.rank == layout.part]
    runs = np.where(is_divided, last_run - first_run + 1, 1)
    of_divided = np.repeat(is_divided, runs)
    starts = np.repeat(layout.own_start - own.first, runs)
    counts = np.repeat(own.stop, runs)
    chosen = by_place[numbers_of_runs(first_run[is_divided], runs[is_divided])]
    starts[of_divided], counts[of_divided] = sent_row[chosen], divided.tokens[chosen]
    key_tokens = own.stop.tolist()
    if layout.padding:
        starts = np.append(starts, layout.tokens - layout.padding)
        counts = np.append(counts, layout.padding)
        key_tokens.append(layout.padding)
    return starts, counts, key_tokens


_View = tuple[torch.Size, tuple[int, ...], int]
"""Size, stride and offset of a view of gathered keys that are freed at present."""


class _GatheredAgain:
    """A layer's gathered keys and values, freed after forward and gathered again for backward."""

    def __init__(self, own_T2GD: torch.Tensor, gathering: Gathering) -> None:
        self._own_T2GD, self._gathering = own_T2GD, gathering
        self._address = 0
        self._keys_K2GD: torch.Tensor | None = None

    def stands_for(self, key_KGD: torch.Tensor) -> None:
        """Set the memory of the gathered keys, so that views of it are not saved."""
        self._address = key_KGD.untyped_storage().data_ptr()

    def pack(self, saved: torch.Tensor) -> torch.Tensor | _View:
        """Save only the layout of views of the keys."""
        if saved.untyped_storage().data_ptr() != self._address:
            return saved
        return saved.size(), saved.stride(), saved.storage_offset()

    def unpack(self, saved: torch.Tensor | _View) -> torch.Tensor:
        """Restore a saved tensor."""
        if isinstance(saved, torch.Tensor):
            return saved
        assert self._keys_K2GD is not None, "a layer's keys are used before they are gathered"
        return self._keys_K2GD.as_strided(*saved)

    def gather(self) -> None:
        """Gather again, before attention's backward."""
        self._keys_K2GD = gather_rows(self._own_T2GD, self._gathering)

    def free(self) -> None:
        """Free the keys, after attention's backward."""
        self._keys_K2GD = None


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own_T2GD: torch.Tensor, gathering: Gathering, again: _GatheredAgain | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.own_rows, ctx.gathering, ctx.again = len(own_T2GD), gathering, again
        keys_K2GD = gather_rows(own_T2GD, gathering)
        return keys_K2GD[:, 0], keys_K2GD[:, 1]

    @staticmethod
    def backward(ctx, *gradients):
        if ctx.again is not None:
            ctx.again.free()
        return scatter_gradients(gradients, ctx.own_rows, ctx.gathering), None, None


class _GatherBefore(torch.autograd.Function):
    """Identity; backward gathers the keys before the input's backward."""

    @staticmethod
    def forward(ctx: Any, context_TND: torch.Tensor, again: _GatheredAgain) -> torch.Tensor:
        ctx.again = again
        return context_TND.view_as(context_TND)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.again.gather()
        return gradients[0], None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _DividedHeads(SharedAttention):
    group: dist.ProcessGroup
    divided_tokens: list[int]
    """Tokens of every rank's divided pieces, [C]."""
    rows_R: torch.Tensor
    """This rank's tokens of divided samples."""
    whole_rows: torch.Tensor
    """This rank's other tokens, with padding."""
    unordered_T: torch.Tensor
    """Inverse of the concatenation of both."""
    by_sample_A: torch.Tensor
    """Tokens of all divided samples, as indices of received rows."""
    by_rank_A: torch.Tensor
    """Inverse of `by_sample_A`."""
    divided_borders: PackedSeqParams
    whole_borders: PackedSeqParams | None

    @classmethod
    def of(
        cls, layout: ShareLayout, group: dist.ProcessGroup, device: torch.device
    ) -> "_DividedHeads":
        divided, own, is_whole = layout.divided, layout.own, ~layout.own_divided
        by_place = np.lexsort((divided.first, divided.sample))
        sent_row = np.cumsum(divided.tokens) - divided.tokens
        by_sample_A = _ranges(sent_row[by_place], divided.tokens[by_place], device)
        whole_start, whole_tokens = layout.own_start[is_whole], own.tokens[is_whole]
        if layout.padding:
            whole_start = np.append(whole_start, layout.tokens - layout.padding)
            whole_tokens = np.append(whole_tokens, layout.padding)
        rows_R = _divided_rows(layout, device)
        whole_rows = _ranges(whole_start, whole_tokens, device)
        sample = divided.sample[by_place]
        borders = np.flatnonzero(np.diff(sample, prepend=-1))
        segments = np.add.reduceat(divided.tokens[by_place], borders).tolist()
        whole = whole_tokens.tolist()
        return cls(
            group=group,
            divided_tokens=layout.divided_tokens.tolist(),
            rows_R=rows_R,
            whole_rows=whole_rows,
            unordered_T=_inverse(torch.cat([rows_R, whole_rows])),
            by_sample_A=by_sample_A,
            by_rank_A=_inverse(by_sample_A),
            divided_borders=borders_of(segments, segments, device),
            whole_borders=borders_of(whole, whole, device) if whole else None,
        )

    def attend(
        self, query_TND: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, by: Attend
    ) -> torch.Tensor:
        qkv = (query_TND, key_TGD, value_TGD)
        # This rank's tokens of divided samples. Rank i gets part i of the heads of q, k and v.
        ranks, own = len(self.divided_tokens), len(self.rows_R)
        each_own, counts = [own] * ranks, self.divided_tokens
        split = [
            heads.index_select(0, self.rows_R)
            .unflatten(1, (ranks, heads.shape[1] // ranks))
            .transpose(0, 1)
            for heads in qkv
        ]
        sent = torch.cat(split, 2).flatten(0, 1)  # [C * R, (N + 2 G) / C, D]
        got_A = exchange_rows(sent, each_own, counts, self.group)
        heads_AXD = got_A.index_select(0, self.by_sample_A)
        query, key, value = heads_AXD.split([part.shape[2] for part in split], 1)
        context_A = by(query, key, value, self.divided_borders, True)
        context_A = context_A.index_select(0, self.by_rank_A)
        back = exchange_rows(context_A, counts, each_own, self.group)
        parts = [back.unflatten(0, (ranks, own)).transpose(0, 1).flatten(1, 2)]
        if self.whole_borders is not None:
            query, key, value = (heads.index_select(0, self.whole_rows) for heads in qkv)
            parts.append(by(query, key, value, self.whole_borders, True))
        return torch.cat(parts).index_select(0, self.unordered_T)


def _divided_rows(layout: ShareLayout, device: torch.device) -> torch.Tensor:
    """Return this rank's tokens of divided samples, in order, [R]."""
    mine = layout.own_divided
    return _ranges(layout.own_start[mine], layout.own.tokens[mine], device)


def _ranges(starts: np.ndarray, counts: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the numbers of runs of rows, int64 on the device; copies only the runs there."""
    starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    table = torch.from_numpy(np.stack([ends, starts - (ends - counts)]))
    ends_on, shift_on = table.to(device, non_blocking=True)
    places = torch.arange(total, device=device)
    return places + shift_on[torch.bucketize(places, ends_on, right=True)]


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
