"""Row exchanges between ranks, for shared packs and data-parallel encoders.

All ranks of a group call the same function at the same point, also without rows.

Shapes: R rows of this rank, S rows it sends, M maximum rows that a rank sends, W rows it wants, X
any row shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


def exchange_rows(
    rows_SX: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send `counts` rows to each rank in order; return the received rows in rank order."""
    return _ExchangeRows.apply(rows_SX, list(sent), list(received), group)


class BegunExchange:
    """An all-to-all in progress, without autograd.

    Ranks of the group begin exchanges in the same order. Each ends once all ranks began it.
    """

    def __init__(
        self, rows_SX: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> None:
        self._arriving = rows_SX.new_empty((sum(received), *rows_SX.shape[1:]))
        # Held until sent.
        self._leaving: torch.Tensor | None = rows_SX.contiguous()
        self._work: dist.Work | None = dist.all_to_all_single(
            self._arriving, self._leaving, received, sent, group=group, async_op=True
        )

    def arrived(self) -> torch.Tensor:
        """Wait and return the received rows, in rank order."""
        if self._work is not None:
            self._work.wait()
        self._work, self._leaving = None, None
        return self._arriving


def exchange_without_gradient(
    rows_SX: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange rows as `exchange_rows`, without autograd."""
    return BegunExchange(rows_SX, sent, received, group).arrived()


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_SX: torch.Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.back = (received, sent, group)
        return exchange_without_gradient(rows_SX, sent, received, group)

    @staticmethod
    def backward(ctx, *gradients):
        return exchange_without_gradient(gradients[0], *ctx.back), None, None, None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Gathering:
    """Rows that a rank offers to its group and rows that it wants."""

    sent_S: torch.Tensor
    """Own rows that other ranks may want, int64."""
    most_sent: int
    """M, equal on all ranks and at least 1: shorter sends are padded."""
    wanted_W: torch.Tensor
    """Wanted rows, int64: r < R is an own row, R + i * M + j is row j sent by rank i.

    A row may be wanted at most twice, as the order of more sums could change.
    """
    group: dist.ProcessGroup


def gather_rows(rows_RX: torch.Tensor, gathering: Gathering) -> torch.Tensor:
    """Gather the wanted rows of all ranks, [W, X], without a gradient."""
    most, ranks = gathering.most_sent, gathering.group.size()
    own = len(rows_RX)
    every = rows_RX.new_empty((own + ranks * most, *rows_RX.shape[1:]))
    every[:own] = rows_RX
    sent = rows_RX.new_zeros((most, *rows_RX.shape[1:]))
    sent[: len(gathering.sent_S)] = rows_RX.index_select(0, gathering.sent_S)
    dist.all_gather_into_tensor(every[own:], sent, group=gathering.group)
    return every.index_select(0, gathering.wanted_W)


def scatter_gradients(
    gradients_WX: Sequence[torch.Tensor], own_rows: int, gathering: Gathering
) -> torch.Tensor:
    """Sum gradients of gathered rows at their source: the transpose of `gather_rows`.

    Return gradients of own rows, [R, entries, X].
    """
    most, ranks = gathering.most_sent, gathering.group.size()
    one = gradients_WX[0]
    every = one.new_zeros((own_rows + ranks * most, len(gradients_WX), *one.shape[1:]))
    for entry, gradient_WX in enumerate(gradients_WX):
        every[:, entry].index_add_(0, gathering.wanted_W, gradient_WX)
    sent = every.new_empty((most, *every.shape[1:]))
    dist.reduce_scatter_tensor(sent, every[own_rows:], group=gathering.group)
    own = every[:own_rows].clone()  # a view would keep the whole memory
    own.index_add_(0, gathering.sent_S, sent[: len(gathering.sent_S)])
    return own
