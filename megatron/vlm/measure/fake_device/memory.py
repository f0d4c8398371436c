"""Bytes that a device gives out, counted as torch's caching allocator counts them."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

BLOCK_BYTES = 512
"""Sizes are rounded up to a multiple of this (`kMinBlockSize` of torch's CUDACachingAllocator)."""


def block_bytes(size: int) -> int:
    """Bytes of the block that the allocator gives out for `size` bytes."""
    return size + -size % BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Label:
    """What made an allocation: a module's path, an operation and the phase of the step."""

    where: str
    operation: str
    phase: str


@dataclass(slots=True, eq=False)
class _Allocation:
    """One storage on the device, from its birth to its end on the tracker's own count of both."""

    size: int
    label: Label
    born: int
    died: int | None = None


class MemoryTracker:
    """Counts each storage from when it is made until nothing refers to it."""

    def __init__(self) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0
        """Most bytes since `reset_peak`."""
        self._live: dict[int, tuple[weakref.ref, _Allocation]] = {}
        self._made: list[_Allocation] = []
        self._moment = 0
        self.highest_bytes = 0
        """Bytes at the highest moment since `watch`."""
        self._highest_moment = 0
        self._highest_working: tuple[Label, int] | None = None
        self.highest_label: Label | None = None
        """What was running at the highest moment since `watch`."""

    def reset_peak(self) -> None:
        """Begin to look for the peak anew, as `torch.cuda.reset_peak_memory_stats` does."""
        self.peak_bytes = self.now_bytes

    def watch(self) -> None:
        """Begin to look for the highest moment anew; `contents` is of the one since then."""
        self._made = [allocation for _, allocation in self._live.values()]
        self.highest_bytes = 0

    def hold(self, storage: torch.UntypedStorage, label: Label) -> None:
        """Count a storage, unless it is counted already, for as long as it exists."""
        key = storage._cdata
        if key in self._live:
            return
        self._moment += 1
        ended = weakref.ref(storage, lambda _: self._end(self._live.pop(key)[1]))
        self._begin(ended, storage, label)

    def _begin(self, reference: weakref.ref, storage: torch.UntypedStorage, label: Label) -> None:
        allocation = _Allocation(block_bytes(storage.nbytes()), label, self._moment)
        self._live[storage._cdata] = (reference, allocation)
        self._made.append(allocation)
        self.now_bytes += allocation.size

    def resized(self, storage: torch.UntypedStorage, label: Label) -> None:
        """Count a storage by its new size, if it is counted: an allocation in place of another."""
        key = storage._cdata
        if key not in self._live:
            return
        reference, before = self._live[key]
        self._end(before)
        self._begin(reference, storage, label)
        self.settle(label)

    def _end(self, allocation: _Allocation) -> None:
        self._moment += 1
        allocation.died = self._moment
        self.now_bytes -= allocation.size

    def settle(self, label: Label, working_bytes: int = 0) -> None:
        """Compare what is allocated with the peaks, after an operation.

        Args:
            working_bytes: that the operation had besides its outputs until it ended.
        """
        most = self.now_bytes + working_bytes
        if most > self.peak_bytes:
            self.peak_bytes = most
        if most > self.highest_bytes:
            self.highest_bytes, self._highest_moment = most, self._moment
            self._highest_working = (label, working_bytes) if working_bytes else None
            self.highest_label = label

    def relabel(self, tensors: Iterable[torch.Tensor], label: Label) -> None:
        """Say what the storages of some tensors are."""
        for tensor in tensors:
            found = self._live.get(tensor.untyped_storage()._cdata)
            if found is not None:
                found[1].label = label

    def relabel_rest(self, label: Label) -> None:
        """Say what all storages are that have been made before now, unless `relabel` has."""
        for _, allocation in self._live.values():
            if allocation.label.phase != label.phase:
                allocation.label = label

    def live(self) -> dict[Label, tuple[int, int]]:
        """Number of storages and bytes by what made them, now."""
        return _by_label(allocation for _, allocation in self._live.values())

    def contents(self) -> dict[Label, tuple[int, int]]:
        """Number of storages and bytes by what made them, at the highest moment since `watch`.

        The bytes add up to `highest_bytes`.
        """
        there = _by_label(
            one
            for one in self._made
            if one.born <= self._highest_moment
            and (one.died is None or one.died > self._highest_moment)
        )
        if self._highest_working is not None:
            label, size = self._highest_working
            working = Label(label.where, f"{label.operation} (working memory)", label.phase)
            there[working] = (1, size)
        return there


def _by_label(allocations: Iterable[_Allocation]) -> dict[Label, tuple[int, int]]:
    counts: Counter[Label] = Counter()
    sizes: Counter[Label] = Counter()
    for one in allocations:
        counts[one.label] += 1
        sizes[one.label] += one.size
    return {label: (counts[label], sizes[label]) for label in sizes}
