"""Allocated device memory, in blocks as rounded by torch's caching allocator."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

BLOCK_BYTES = 512  # blocks are multiples: `kMinBlockSize` of torch's CUDACachingAllocator


def block_bytes(size: int) -> int:
    """Return `size` bytes rounded up to the allocator's blocks."""
    return size + -size % BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Label:
    """Origin of an allocation: module path, operation and phase of the step."""

    where: str
    operation: str
    phase: str


@dataclass(slots=True, eq=False)
class _Allocation:
    size: int
    label: Label
    # Moments: numbers of allocations and frees until then.
    born: int
    died: int | None = None


class MemoryTracker:
    """Live storages by label, with peak bytes since `reset_peak` and since `watch`."""

    def __init__(self) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0  # maximum bytes since `reset_peak`
        self._live: dict[int, tuple[weakref.ref, _Allocation]] = {}
        self._made: list[_Allocation] = []
        self._moment = 0
        self.highest_bytes = 0  # maximum bytes since `watch`
        self._highest_moment = 0
        self._highest_working = 0
        self.highest_label: Label | None = None  # running operation at the maximum since `watch`

    def reset_peak(self) -> None:
        self.peak_bytes = self.now_bytes

    def watch(self) -> None:
        """Reset `highest_bytes` to 0, the maximum that `contents` describes."""
        self._made = [allocation for _, allocation in self._live.values()]
        self.highest_bytes = 0

    def hold(self, storage: torch.UntypedStorage, label: Label) -> None:
        """Count a storage until it is freed, unless counted already."""
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

    def resize(self, storage: torch.UntypedStorage, label: Label) -> None:
        """Replace a tracked storage by an allocation of its new size; skip an untracked storage."""
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
        """Update both maxima after an operation with `working_bytes` of workspace."""
        total = self.now_bytes + working_bytes
        self.peak_bytes = max(self.peak_bytes, total)
        if total > self.highest_bytes:
            self.highest_bytes, self._highest_moment = total, self._moment
            self.highest_label, self._highest_working = label, working_bytes

    def relabel(self, label: Label, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Set the label of the tensors' live storages, or of all."""
        keys = self._live if tensors is None else {t.untyped_storage()._cdata for t in tensors}
        for key in self._live.keys() & keys:
            self._live[key][1].label = label

    def contents(self) -> dict[Label, tuple[int, int]]:
        """Return the number and bytes of storages and workspace by label at `highest_bytes`."""
        moment, counts, sizes = self._highest_moment, Counter[Label](), Counter[Label]()
        for allocation in self._made:
            died = allocation.died
            if allocation.born <= moment and (died is None or died > moment):
                counts[allocation.label] += 1
                sizes[allocation.label] += allocation.size
        by_label = {label: (counts[label], sizes[label]) for label in sizes}
        label = self.highest_label
        if label is not None and self._highest_working:
            working = replace(label, operation=f"{label.operation} (working memory)")
            by_label[working] = (1, self._highest_working)
        return by_label
