"""Kernels and memory of one unit on one device; vectors have one entry per feature."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from omnibal.cost.kernels import Kernels, in_module


@dataclass(frozen=True, slots=True)
class Kept:
    """Activation kept from forward to backward."""

    what: str
    made_by: str
    """Megatron-core name of the producing module, or the fused operation, empty for unit inputs."""
    bytes: np.ndarray  # bytes on one device, [features]
    for_weights: bool = False  # whether only weight gradients need it, so frozen units free it
    modules: tuple[str, ...] = ()  # recomputing any of these frees it


@dataclass(frozen=True, slots=True)
class Working:
    """Working memory at a moment of backward, apart from kept activations."""

    bytes: np.ndarray  # bytes of the micro-batch's tensors, [features]
    weight: float = 0  # elements of the weight gradient computed then, in the weight's dtype
    freed: tuple[str, ...] = ()  # names of kept lines freed by then
    finished: int = 0  # number of last products done: output gradients freed unless dW is deferred
    of_words: bool = False  # whether the weight is an embedding's, not a product's
    has_logits_gradient: bool = False  # whether an unfused loss writes it next to the logits

    def before_later_units(self, kept: Sequence[str], products: int) -> "Working":
        """Return this moment after later units' backward, which freed `kept` and ran `products`."""
        return replace(self, freed=(*kept, *self.freed), finished=self.finished + products)


EXPERT_PRODUCTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")  # grouped products
# Kept lines of a layer: inputs of its two blocks.
FIRST_OUTPUT, SECOND_OUTPUT = "first norm's output", "second norm's output"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Kernels and memory of a unit, or of its attention or feed-forward, on one device."""

    kernels: Kernels  # of all passes; products in forward's order
    kept: tuple[Kept, ...]  # activations kept if the unit has a backward, including its input
    working: tuple[Working, ...] = ()  # moments of backward, without what later blocks freed
    gathered_bytes: np.ndarray | float = 0.0  # max all-gathered input; core has one per stage
    other_parameters: float = 0  # parameters except products' weights and expert biases
    expert_biases: int = 0

    def within(self, module: str) -> Self:
        """Return this work as part of a module that may be recomputed."""
        kept = (replace(line, modules=(*line.modules, module)) for line in self.kept)
        return replace(self, kernels=in_module(module, self.kernels), kept=tuple(kept))

    @property
    def product_weights(self) -> float:
        """Weights of all products on this device, in elements."""
        return sum(product.weights for product in self.products)

    @property
    def parameters(self) -> int:
        """Parameters on this device, including experts and adapters."""
        weights = self.product_weights + self.other_parameters
        return math.ceil(weights - 1e-6) + self.expert_biases  # a share is inexact in floats

    @property
    def expert_parameters(self) -> int:
        """Expert parameters on this device."""
        experts = sum(
            product.weights for product in self.products if product.name in EXPERT_PRODUCTS
        )
        return round(experts) + self.expert_biases

    @property
    def forward(self) -> Kernels:
        """Forward kernels, including collectives."""
        return tuple(kernel for kernel in self.kernels if kernel.phase == "forward")

    @property
    def products(self) -> Kernels:
        """Forward matrix products."""
        return tuple(kernel for kernel in self.forward if kernel.kind == "product")


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedUnit(Work):
    """One unit, with bytes of its input and output, [features]."""

    boundary_bytes: np.ndarray  # the unit's input
    output_bytes: np.ndarray
    late_working: tuple[Working, ...] = ()  # extra moments with deferred weight gradients
    forward_working: tuple[Working, ...] = ()  # moments of forward if the unit has no backward
    passing_bytes: np.ndarray | float = 0.0  # held during forward and not kept
    adapter_parameters: int = 0  # part of `other_parameters`: all that are trained

    def kept_lines(self, *, trained: bool) -> tuple[Kept, ...]:
        """Return activations kept for backward: frozen units drop inputs of weight gradients."""
        return tuple(line for line in self.kept if trained or not line.for_weights)

    def working_bytes(self, moment: Working, *, trained: bool) -> np.ndarray:
        """Return the moment's bytes minus kept activations freed by then, [features]."""
        freed = [
            line.bytes for line in self.kept_lines(trained=trained) if line.what in moment.freed
        ]
        return moment.bytes - np.sum([0 * moment.bytes, *freed], axis=0)

    def kept_bytes(self, *, trained: bool) -> np.ndarray:
        """Return bytes of kept activations, [features]."""
        lines = self.kept_lines(trained=trained)
        return np.sum([0 * self.boundary_bytes, *(line.bytes for line in lines)], axis=0)


def chain_units(units: Sequence[tuple[str, CountedUnit]]) -> CountedUnit:
    """Return one unit that runs these (prefix, unit) in sequence; prefixes name kept lines."""
    working: list[Working] = []
    for place, (prefix, unit) in enumerate(units):
        # Backward starts from the last unit.
        later = units[place + 1 :]
        later_kept = [f"{name}{line.what}" for name, other in later for line in other.kept]
        later_products = sum(len(other.products) for _, other in later)
        for moment in unit.working:
            own = replace(moment, freed=tuple(f"{prefix}{what}" for what in moment.freed))
            working.append(own.before_later_units(later_kept, later_products))
    parts = [unit for _, unit in units]
    gathered_bytes = np.broadcast_arrays(*(unit.gathered_bytes for unit in parts))
    return replace(
        parts[-1],
        kernels=tuple(
            replace(kernel, given=f"{prefix}{kernel.given}") if kernel.given else kernel
            for prefix, unit in units
            for kernel in unit.kernels
        ),
        kept=tuple(
            replace(line, what=f"{prefix}{line.what}")
            for prefix, unit in units
            for line in unit.kept
        ),
        boundary_bytes=parts[0].boundary_bytes,
        working=tuple(working),
        gathered_bytes=np.max(gathered_bytes, axis=0),
        other_parameters=sum(unit.other_parameters for unit in parts),
        expert_biases=sum(unit.expert_biases for unit in parts),
    )


def recompute_modules(layer: CountedUnit, modules: Collection[str]) -> CountedUnit:
    """Return the layer with modules recomputed, as by core's `--recompute-modules`."""
    wanted = {*modules}
    lost = {line.what: line.bytes for line in layer.kept if wanted & {*line.modules}}
    again = [kernel for kernel in layer.forward if wanted & {*kernel.modules}]
    names = [line.what for line in layer.kept]
    of_second = set(names[names.index(SECOND_OUTPUT) :])

    def add_recomputed(moment: Working) -> Working:
        # A block's activations are recomputed before its backward, and freed like kept ones.
        in_second = SECOND_OUTPUT not in moment.freed
        here = [what for what in lost if (what in of_second) == in_second]
        made = [lost[what] for what in here if what not in moment.freed]
        return replace(moment, bytes=sum(made, moment.bytes))

    return replace(
        layer,
        kernels=(*layer.kernels, *(replace(kernel, phase="repeated") for kernel in again)),
        kept=tuple(line for line in layer.kept if line.what not in lost),
        working=tuple(map(add_recomputed, layer.working)),
    )
