"""Counts of low-rank adapters (LoRA) of a frozen unit.

y = x W gains (x A) B (Hu et al. 2021, LoRA, arXiv 2106.09685, section 4.1), as run by
`megatron/vlm/model/adapters.py`: all A's of a linear in one product, all B's and the sum in
another. Both are usually memory-bound. A's gradient needs x, which is then kept.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from omnibal.cost.counts import Collectives, Counts, Device, Kept, Product
from omnibal.cost.feed_forward_counts import EXPERT_PRODUCTS
from omnibal.model.adapters import AdapterConfig, Linear

_KERNELS, _KERNELS_OF_A_PIECE = 2, 2
"""Forward kernels of a linear's adapters: two products; concatenation if it has several pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """Adapters of one product, on one device."""

    product: Product
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
    counts: Counts,
    device: Device,
    adapters: AdapterConfig,
    linears: Mapping[str, Linear],
    *,
    part: float,
) -> Counts:
    """Return counts of a frozen unit with adapters."""
    pairs = list(_pairs(counts, adapters, linears, part))
    given = {pair.product.given for pair in pairs}
    parameters = sum(pair.parameters for pair in pairs)
    moved_bytes = [_moved(pair, device, backward=False) for pair in pairs]
    back_moved_bytes = [_moved(pair, device, backward=True) for pair in pairs]
    sent = sum((_exchanged(device, pair) for pair in pairs), counts.collectives)
    return replace(
        counts,
        moved_bytes=np.sum([counts.moved_bytes, *moved_bytes], axis=0),
        back_moved_bytes=np.sum([counts.back_moved_bytes, *back_moved_bytes], axis=0),
        kernels=counts.kernels
        + _KERNELS * len(pairs)
        + _KERNELS_OF_A_PIECE * sum(pair.pieces for pair in pairs if pair.pieces > 1),
        collectives=sent,
        kept=(
            *(
                replace(one, for_weights=one.for_weights and one.what not in given)
                for one in counts.kept
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
        parameters=counts.parameters + parameters,
        adapter_parameters=parameters,
    )


def _pairs(
    counts: Counts, adapters: AdapterConfig, linears: Mapping[str, Linear], part: float
) -> Iterator[_Pair]:
    """Iterate over adapters of adapted products; unnamed products need `all-linear`."""
    for product in counts.products:
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
        elif (not product.is_fp32 and adapters.is_of_all) and (
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


def _moved(pair: _Pair, device: Device, *, backward: bool) -> np.ndarray:
    """Bytes that both products read and write, at least the equivalent of their operations.

    Forward reads x and updates y; backward reads x and y's gradient and updates x's gradient.
    """
    inner, outer, times = pair.product.inner, pair.product.outer, 2 if backward else 1
    of_input, of_output = (3, 2) if backward else (1, 2)
    flops_as_bytes = 2 * times * pair.rank * device.bytes_per_ms / device.flops_per_ms
    size = device.element_bytes
    input_bytes = max(of_input * size, flops_as_bytes) * inner
    output_bytes = max(of_output * size, flops_as_bytes) * outer
    rows_in = pair.product.rows * (1.0 if pair.divides_inputs else pair.part)
    return rows_in * input_bytes + pair.rows_out * output_bytes


def _exchanged(device: Device, pair: _Pair) -> Collectives:
    """Tensor-parallel exchange between A and B."""
    if device.tensor == 1 or not pair.product.name:
        return Collectives()
    sent_bytes = device.sent * pair.product.rows * pair.rank * device.element_bytes
    if pair.part < 1:  # gather or scatter
        return Collectives(
            forward_bytes=sent_bytes, backward_bytes=sent_bytes, passes=1, back_passes=1
        )
    if pair.divides_inputs:
        return Collectives(forward_bytes=2 * sent_bytes, passes=2)
    return Collectives(backward_bytes=2 * sent_bytes, back_passes=2)
