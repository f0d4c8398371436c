"""Low-rank adapters (LoRA) of a frozen unit.

y = x W gains (x A) B (Hu et al. 2021, LoRA, arXiv 2106.09685, section 4.1), as run by
`megatron/vlm/model/adapters.py`: all A's of a linear in one product, all B's and the sum in
another. Both are usually memory-bound. A's gradient needs x, which is then kept.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from omnibal.cost.device import Device
from omnibal.cost.kernels import Kernel, KernelPass, Kernels, element_wise
from omnibal.cost.work import EXPERT_PRODUCTS, Kept, Unit
from omnibal.model.adapters import AdapterConfig, Linear

_KERNELS_OF_A_PIECE = 2
"""Forward kernels that concatenate a piece if a linear has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """Adapters of one product, on one device."""

    product: Kernel
    rank: int
    """Sum of ranks."""
    pieces: int
    """Adapted pieces of the linear."""
    outputs: float
    """Outputs of these pieces on this device, summed over ranks."""
    divides_inputs: bool
    part: float
    """Share of the sequence that a device holds between blocks."""

    @property
    def parameters(self) -> int:
        """Parameters of A and B."""
        each = self.rank / self.pieces
        matrices = self.rank * self.product.inner + each * self.outputs
        return round(matrices * self.product.groups)

    @property
    def rows_out(self) -> np.ndarray:
        """Output rows of B, [features]."""
        return self.product.rows * (self.part if self.divides_inputs else 1.0)


def with_adapters(
    unit: Unit,
    device: Device,
    adapters: AdapterConfig,
    linears: Mapping[str, Linear],
    *,
    part: float,
) -> Unit:
    """Return a frozen unit with adapters."""
    pairs = list(_pairs(unit, adapters, linears, part))
    given = {pair.product.given for pair in pairs}
    parameters = sum(pair.parameters for pair in pairs)
    return replace(
        unit,
        kernels=(*unit.kernels, *(one for pair in pairs for one in _kernels(pair, device))),
        kept=(
            *(
                replace(one, for_weights=one.for_weights and one.what not in given)
                for one in unit.kept
            ),
            *(
                Kept(
                    f"between A and B of {pair.product.name}",
                    pair.product.name,
                    pair.rows_out * pair.rank * device.element_bytes,
                )
                for pair in pairs
            ),
        ),
        other_parameters=unit.other_parameters + parameters,
        adapter_parameters=parameters,
    )


def _pairs(
    unit: Unit, adapters: AdapterConfig, linears: Mapping[str, Linear], part: float
) -> Iterator[_Pair]:
    """Iterate over adapters of adapted products; unnamed products need `all-linear`."""
    for product in unit.products:
        linear = linears.get(product.name)
        if linear is not None:
            whole = sum(piece.outputs for piece in linear.pieces)
            share = sum(piece.outputs for piece in linear.adapted) / whole
            yield _Pair(
                product=product,
                rank=adapters.rank * len(linear.adapted),
                pieces=len(linear.adapted),
                outputs=product.outer * share,
                divides_inputs=linear.divides_inputs,
                part=part,
            )
        elif (product.dtype != "fp32" and adapters.is_of_all) and (
            not product.name or (adapters.experts and product.name in EXPERT_PRODUCTS)
        ):
            yield _Pair(
                product=product,
                rank=adapters.rank,
                pieces=1,
                outputs=product.outer,
                divides_inputs=False,
                part=1.0,
            )


def _kernels(pair: _Pair, device: Device) -> Iterator[Kernel]:
    """Both products of a pair, concatenation and exchange.

    Forward reads x and updates y; backward reads x and y's gradient and updates x's gradient.
    """
    product, size = pair.product, device.element_bytes
    rows_in = product.rows * (1.0 if pair.divides_inputs else pair.part)
    sides = (rows_in, product.inner, (1, 3)), (pair.rows_out, product.outer, (2, 2))
    passes: tuple[KernelPass, ...] = ("forward", "backward")
    for rows, width, tensors in sides:
        for times, of in enumerate(passes, start=1):
            yield Kernel(
                kind="low_rank",
                of=of,
                rows=rows,
                inner=width,
                outer=times * pair.rank,
                bytes=tensors[times - 1] * size * width * rows,
                launches=times,
            )
    if pair.pieces > 1:
        nothing = product.nothing
        yield from element_wise(nothing, nothing, _KERNELS_OF_A_PIECE * pair.pieces)
    yield from _rings(device, pair)


def _rings(device: Device, pair: _Pair) -> Kernels:
    """Tensor-parallel exchange between A and B."""
    if not pair.product.name:
        return ()
    rank_bytes = pair.product.rows * pair.rank * device.element_bytes
    if pair.part < 1:  # gather or scatter
        return device.rings("forward", rank_bytes) + device.rings("backward", rank_bytes)
    return device.rings("forward" if pair.divides_inputs else "backward", 2 * rank_bytes, 2)
