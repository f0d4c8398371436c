"""Every exchange between ranks as each of them begins it, with random delays before each.

Ranks that begin exchanges of a group in different orders wait for each other for ever on NCCL, and
on gloo only where a delay lets it happen. So the orders themselves are compared.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_MOST_DELAY_S = 0.002
_UNEVEN = ("alltoall", "gather_", "scatter_", "broadcast")
"""Collectives whose ranks need not name equally many numbers: beginnings of their names."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective or a message that a rank has begun."""

    kind: str
    """Name of torch's operation, such as `allreduce_`."""
    group: tuple[int, ...]
    """Ranks of its group."""
    name: str
    """Name of the group, as several may be of the same ranks."""
    numbers: int
    """Numbers in its tensors; 0 where its ranks may have unequally many."""
    dtype: str
    peer: int | None
    """The other rank of a message; None for a collective."""


class ExchangeLog(TorchDispatchMode):
    """Logs the exchanges that this rank begins while it is entered, each after a random delay."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.begun: list[Exchange] = []
        self._rng = np.random.default_rng(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, of which exchanges are logged."""
        if func.namespace == "c10d":
            time.sleep(self._rng.uniform(0, _MOST_DELAY_S))
            self.begun.append(_exchange(func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))


def _exchange(kind: str, args: tuple[Any, ...]) -> Exchange:
    unboxed = [dist.ProcessGroup.unbox(each) for each in args if _is_group(each)]
    (group,) = unboxed
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = list(_tensors(args))
    is_message = kind in ("send", "recv_")
    uneven = kind.lstrip("_").startswith(_UNEVEN)
    return Exchange(
        kind=kind,
        group=ranks,
        name=group.group_name,
        numbers=0 if uneven else sum(each.numel() for each in tensors),
        dtype=str(tensors[0].dtype) if tensors and not uneven else "",
        peer=ranks[next(each for each in args if type(each) is int)] if is_message else None,
    )


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def logged_exchanges(links: Any, work: Callable[..., Any], *arguments: Any) -> list[Exchange]:
    """What this rank has begun in `work(links, *arguments)`."""
    with ExchangeLog(seed=dist.get_rank()) as log:
        work(links, *arguments)
    return log.begun


def disagreements(logs: Sequence[Sequence[Exchange]]) -> list[str]:
    """Say where ranks begin exchanges of a group in different orders, or messages go astray.

    Args:
        logs: of every rank, in the order of ranks.
    """
    found = []
    collectives: defaultdict[tuple[str, tuple[int, ...]], dict[int, list[Exchange]]]
    collectives = defaultdict(dict)
    sent, received = defaultdict(list), defaultdict(list)
    for rank, log in enumerate(logs):
        for each in log:
            if each.peer is None:
                collectives[each.name, each.group].setdefault(rank, []).append(each)
            elif each.kind == "send":
                sent[each.name, rank, each.peer].append((each.numbers, each.dtype))
            else:
                received[each.name, each.peer, rank].append((each.numbers, each.dtype))
    for (name, group), by_rank in collectives.items():
        first = by_rank.get(group[0], [])
        for rank in group[1:]:
            own = by_rank.get(rank, [])
            differs = next(
                (at for at, (a, b) in enumerate(zip(first, own, strict=False)) if a != b),
                min(len(first), len(own)),
            )
            if own != first:
                found.append(
                    f"group {name} of ranks {group}: exchange {differs} of {len(first)} is "
                    f"{first[differs : differs + 1]} on rank {group[0]}, and of {len(own)} "
                    f"{own[differs : differs + 1]} on rank {rank}"
                )
    for way in sent.keys() | received.keys():
        if sent[way] != received[way]:
            found.append(f"messages {way[1]} to {way[2]}: {sent[way]} and {received[way]}")
    return found
