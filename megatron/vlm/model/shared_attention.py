"""Causal attention over a pack shared by context-parallel ranks.

A rank's queries are its pieces of samples. A piece attends to its sample up to the piece's end. The
level selects how keys arrive:

- `gather`: all-gather keys and values of divided samples; backward reduces their gradients. The
  gathered tensors are freed and gathered again in backward, unless the layer is recomputed.
- `heads`: all-to-all, so that each rank has all tokens of divided samples and some heads
  (DeepSpeed-Ulysses, arXiv 2309.14509).

Samples within one rank need no exchange.

Shapes: T tokens of this rank, N heads, G key/value heads, D head size, R tokens of its divided
pieces, M the maximum R of a rank, A tokens of all divided samples, K keys of all its pieces, C
ranks that share the pack, X any row shape.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all

from megatron.vlm.inputs.batch import Borders, borders_of
from megatron.vlm.inputs.pack_share import PackShare, ShareLayout
from omnibal.base.arrays import expand_ranges
from omnibal.model.levels import ContextExchange

# Attention within one rank, as `attention.attend_packed`.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Borders, bool], torch.Tensor]


class SharedAttention(ABC):
    """Attention of a rank's share, in place of `Borders`."""

    @abstractmethod
    def attend(
        self, query_TND: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, inner: Attend
    ) -> torch.Tensor:
        """Attend over the ranks that share the pack, by `inner` on each; return [T, N, D]."""

    def for_recomputation(self) -> "SharedAttention":
        """Return the variant for a layer that is recomputed in backward."""
        return self


def shared_attention(
    share: PackShare, padding: int, group: dist.ProcessGroup, device: torch.device
) -> SharedAttention | None:
    """Return the attention of a share, or None if no sample is divided.

    Padding tokens attend to each other.
    """
    layout = ShareLayout(share, padding)
    if not len(layout.divided):
        return None
    match share.exchange:
        case ContextExchange.GATHER:
            return _GatheredKeys.from_layout(layout, group, device)
        case ContextExchange.HEADS:
            return _DividedHeads.from_layout(layout, group, device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _GatheredKeys(SharedAttention):
    sent_R: torch.Tensor  # own rows of divided samples, which every rank receives, int64
    max_sent: int  # M, equal on all ranks and at least 1: shorter sends are padded
    # Wanted rows, int64: r < T is an own row, T + i * M + j is row j sent by rank i. Each row is
    # wanted at most twice, so that backward's atomic sums do not depend on their order.
    wanted_K: torch.Tensor
    group: dist.ProcessGroup
    borders: Borders  # queries: this rank's pieces; keys: samples up to the piece's end
    keeps_keys: bool = False  # whether gathered keys stay until backward

    @classmethod
    def from_layout(
        cls, layout: ShareLayout, group: dist.ProcessGroup, device: torch.device
    ) -> "_GatheredKeys":
        max_sent = int(layout.divided_tokens.max())
        divided, own, is_divided = layout.divided, layout.own, layout.own_divided
        # By divided piece, its first row among all gathered rows.
        before = np.cumsum(divided.tokens) - divided.tokens
        rank_start = np.cumsum(layout.divided_tokens) - layout.divided_tokens
        sent_row = layout.tokens + divided.rank * max_sent + before - rank_start[divided.rank]
        by_place = np.lexsort((divided.first, divided.sample))
        # A piece of a divided sample takes the sample's pieces up to itself, a run of rows each. An
        # undivided sample is one run, cut at the piece's end.
        first_run = np.searchsorted(divided.sample[by_place], own.sample)
        last_run = first_run.copy()
        last_run[is_divided] = np.argsort(by_place)[divided.rank == layout.part]
        runs = np.where(is_divided, last_run - first_run + 1, 1)  # [own pieces]
        in_divided = np.repeat(is_divided, runs)  # [runs]
        starts = np.repeat(layout.own_start - own.first, runs)
        counts = np.repeat(own.stop, runs)
        chosen = by_place[expand_ranges(first_run[is_divided], runs[is_divided])[1]]
        starts[in_divided], counts[in_divided] = sent_row[chosen], divided.tokens[chosen]
        query_tokens, key_tokens = own.tokens.tolist(), own.stop.tolist()
        if layout.padding:
            starts = np.append(starts, layout.tokens - layout.padding)
            counts = np.append(counts, layout.padding)
            query_tokens.append(layout.padding)
            key_tokens.append(layout.padding)
        return cls(
            sent_R=_divided_rows(layout, device),
            max_sent=max_sent,
            wanted_K=_list_rows(starts, counts, device),
            group=group,
            borders=borders_of(query_tokens, key_tokens, device),
        )

    def for_recomputation(self) -> "_GatheredKeys":
        return replace(self, keeps_keys=True)

    def attend(
        self, query_TND: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, inner: Attend
    ) -> torch.Tensor:
        own_T2GD = torch.stack([key_TGD, value_TGD], 1)
        regathered = None
        if torch.is_grad_enabled() and not self.keeps_keys and own_T2GD.requires_grad:
            regathered = _RegatheredKeys(own_T2GD.detach(), self)
        key_KGD, value_KGD = _GatherKeys.apply(own_T2GD, self, regathered)
        if regathered is None:
            return inner(query_TND, key_KGD, value_KGD, self.borders, True)
        regathered.address = key_KGD.untyped_storage().data_ptr()
        with torch.autograd.graph.saved_tensors_hooks(regathered.pack, regathered.unpack):
            context_TND = inner(query_TND, key_KGD, value_KGD, self.borders, True)
        context_TND.register_hook(regathered.gather)  # before attention's backward
        return context_TND


def gather_rows(rows_TX: torch.Tensor, keys: _GatheredKeys) -> torch.Tensor:
    """Gather the wanted rows of all ranks, [K, X], without a gradient."""
    size, ranks = keys.max_sent, keys.group.size()
    own = len(rows_TX)
    all_rows = rows_TX.new_empty((own + ranks * size, *rows_TX.shape[1:]))  # [T + C * M, X]
    all_rows[:own] = rows_TX
    sent = rows_TX.new_zeros((size, *rows_TX.shape[1:]))
    sent[: len(keys.sent_R)] = rows_TX.index_select(0, keys.sent_R)
    dist.all_gather_into_tensor(all_rows[own:], sent, group=keys.group)
    return all_rows.index_select(0, keys.wanted_K)


def scatter_gradients(
    gradients_KX: Sequence[torch.Tensor], own_rows: int, keys: _GatheredKeys
) -> torch.Tensor:
    """Return gradients of own rows, [T, entries, X]: the transpose of `gather_rows`."""
    size, ranks = keys.max_sent, keys.group.size()
    first = gradients_KX[0]
    all_rows = first.new_zeros((own_rows + ranks * size, len(gradients_KX), *first.shape[1:]))
    for entry, gradient_KX in enumerate(gradients_KX):
        all_rows[:, entry].index_add_(0, keys.wanted_K, gradient_KX)
    sent = all_rows.new_empty((size, *all_rows.shape[1:]))
    dist.reduce_scatter_tensor(sent, all_rows[own_rows:], group=keys.group)
    own = all_rows[:own_rows].clone()  # a view would keep other ranks' rows in memory
    own.index_add_(0, keys.sent_R, sent[: len(keys.sent_R)])
    return own


_View = tuple[torch.Size, tuple[int, ...], int]  # size, stride and offset of freed gathered keys


class _RegatheredKeys:
    """A layer's gathered keys and values, freed after forward and gathered again for backward."""

    def __init__(self, own_T2GD: torch.Tensor, keys: _GatheredKeys) -> None:
        self._own_T2GD, self._keys = own_T2GD, keys
        self.address = 0  # storage address of the gathered keys, whose views are not saved
        self.keys_K2GD: torch.Tensor | None = None

    def pack(self, saved: torch.Tensor) -> torch.Tensor | _View:
        """Return the layout of a view of the keys, or another tensor itself, for autograd."""
        if saved.untyped_storage().data_ptr() != self.address:
            return saved
        return saved.size(), saved.stride(), saved.storage_offset()

    def unpack(self, saved: torch.Tensor | _View) -> torch.Tensor:
        """Return a saved tensor, or the view of the regathered keys with a saved layout."""
        if isinstance(saved, torch.Tensor):
            return saved
        assert self.keys_K2GD is not None, "a layer's keys are used before they are gathered"
        return self.keys_K2GD.as_strided(*saved)

    def gather(self, gradient: torch.Tensor) -> None:
        """Gather the keys again, as a hook on the gradient of attention's output."""
        self.keys_K2GD = gather_rows(self._own_T2GD, self._keys)


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own_T2GD, keys, regathered):
        ctx.own_rows, ctx.keys, ctx.regathered = len(own_T2GD), keys, regathered
        keys_K2GD = gather_rows(own_T2GD, keys)
        return keys_K2GD[:, 0], keys_K2GD[:, 1]

    @staticmethod
    def backward(ctx, *gradients):
        if ctx.regathered is not None:
            ctx.regathered.keys_K2GD = None  # attention's backward is done
        return scatter_gradients(gradients, ctx.own_rows, ctx.keys), None, None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _DividedHeads(SharedAttention):
    group: dist.ProcessGroup
    divided_tokens: list[int]  # tokens of every rank's divided pieces, [C]
    rows_R: torch.Tensor  # this rank's tokens of divided samples
    whole_rows: torch.Tensor  # this rank's other tokens, with padding
    unordered_T: torch.Tensor  # place of every token in `rows_R` followed by `whole_rows`
    by_sample_A: torch.Tensor  # received rows, sorted by sample and place
    by_rank_A: torch.Tensor  # inverse of `by_sample_A`
    divided_borders: Borders
    whole_borders: Borders | None

    @classmethod
    def from_layout(
        cls, layout: ShareLayout, group: dist.ProcessGroup, device: torch.device
    ) -> "_DividedHeads":
        divided, own, is_whole = layout.divided, layout.own, ~layout.own_divided
        by_place = np.lexsort((divided.first, divided.sample))
        sent_row = np.cumsum(divided.tokens) - divided.tokens
        by_sample_A = _list_rows(sent_row[by_place], divided.tokens[by_place], device)
        whole_start, whole_tokens = layout.own_start[is_whole], own.tokens[is_whole]
        if layout.padding:
            whole_start = np.append(whole_start, layout.tokens - layout.padding)
            whole_tokens = np.append(whole_tokens, layout.padding)
        rows_R = _divided_rows(layout, device)
        whole_rows = _list_rows(whole_start, whole_tokens, device)
        sample = divided.sample[by_place]
        borders = np.flatnonzero(np.diff(sample, prepend=-1))
        segments = np.add.reduceat(divided.tokens[by_place], borders).tolist()
        whole = whole_tokens.tolist()
        return cls(
            group=group,
            divided_tokens=layout.divided_tokens.tolist(),
            rows_R=rows_R,
            whole_rows=whole_rows,
            unordered_T=_invert(torch.cat([rows_R, whole_rows])),
            by_sample_A=by_sample_A,
            by_rank_A=_invert(by_sample_A),
            divided_borders=borders_of(segments, segments, device),
            whole_borders=borders_of(whole, whole, device) if whole else None,
        )

    def attend(
        self, query_TND: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, inner: Attend
    ) -> torch.Tensor:
        qkv = (query_TND, key_TGD, value_TGD)
        # This rank's tokens of divided samples. Rank i gets part i of the heads of q, k and v.
        ranks, own = len(self.divided_tokens), len(self.rows_R)
        own_counts, counts = [own] * ranks, self.divided_tokens
        split = [
            heads.index_select(0, self.rows_R)
            .unflatten(1, (ranks, heads.shape[1] // ranks))
            .transpose(0, 1)  # [C, R, heads / C, D]
            for heads in qkv
        ]
        sent = torch.cat(split, 2).flatten(0, 1)  # [C * R, (N + 2 G) / C, D]
        received_A = all_to_all(self.group, sent, counts, own_counts)
        heads_AXD = received_A.index_select(0, self.by_sample_A)
        query, key, value = heads_AXD.split([part.shape[2] for part in split], 1)
        context_A = inner(query, key, value, self.divided_borders, True)  # [A, N / C, D]
        context_A = context_A.index_select(0, self.by_rank_A)
        back = all_to_all(self.group, context_A, own_counts, counts)
        parts = [back.unflatten(0, (ranks, own)).transpose(0, 1).flatten(1, 2)]  # [R, N, D]
        if self.whole_borders is not None:
            query, key, value = (heads.index_select(0, self.whole_rows) for heads in qkv)
            parts.append(inner(query, key, value, self.whole_borders, True))
        return torch.cat(parts).index_select(0, self.unordered_T)


def _divided_rows(layout: ShareLayout, device: torch.device) -> torch.Tensor:
    """Return this rank's tokens of divided samples, in order, [R]."""
    mine = layout.own_divided
    return _list_rows(layout.own_start[mine], layout.own.tokens[mine], device)


def _list_rows(starts: np.ndarray, counts: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the row numbers of runs of rows, concatenated, int64, on the device."""
    # Only the runs are copied to the device, which expands them.
    starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    table = torch.from_numpy(np.stack([ends, starts - (ends - counts)]))
    run_ends, shifts = table.to(device, non_blocking=True)
    places = torch.arange(total, device=device)
    return places + shifts[torch.bucketize(places, run_ends, right=True)]


def _invert(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
