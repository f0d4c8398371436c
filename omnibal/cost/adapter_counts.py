"""Counts of adapters beside the products of a frozen unit (LoRA).

Beside y = x W stand x A and its product with B, added to y (Hu et al. 2021, LoRA, arXiv 2106.09685,
section 4.1), as `megatron/vlm/model/adapters.py` runs them: all A's of a linear in one product, all
B's in another, and the sum with y in the latter. Their ranks are a few dozen, so that both take as
long as their inputs and outputs are read and written, unless their operations take longer. A's
gradient needs x, which is kept where no backward needed it before; gradients of W are not made.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from omnibal.cost.counts import Collectives, Counts, Device, Kept, Product
from omnibal.cost.feed_forward_counts import EXPERT_PRODUCTS
from omnibal.model.adapters import AdapterConfig, Linear

_KERNELS, _KERNELS_OF_A_PIECE = 2, 2
"""Kernels of a linear's adapters in forward, two products, and where it is of several pieces to put
A's and B's together; backward has about twice as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """Adapters of one product, on one device."""

    product: Product
    rank: int
    """Rank of all of them together."""
    pieces: int
    """Pieces of the linear that have any."""
    outputs: float
    """Outputs of these pieces on this device, of all ranks of each."""
    divides_inputs: bool
    part: float
    """Share of the sequence that a device has between blocks."""

    @property
    def parameters(self) -> int:
        """Parameters of A and of B."""
        each = self.rank / self.pieces
        matrices = self.rank * self.product.inner + each * self.outputs
        return round(matrices * self.product.groups)

    @property
    def kernels(self) -> int:
        """Kernels in forward."""
        return _KERNELS + (_KERNELS_OF_A_PIECE * self.pieces if self.pieces > 1 else 0)

    @property
    def rows_in(self) -> np.ndarray:
        """Rows that A takes, [features]."""
        return self.product.rows * (1.0 if self.divides_inputs else self.part)

    @property
    def rows_out(self) -> np.ndarray:
        """Rows that B makes, [features]."""
        return self.product.rows * (self.part if self.divides_inputs else 1.0)


def with_adapters(
    counts: Counts,
    device: Device,
    adapters: AdapterConfig,
    linears: Mapping[str, Linear],
    *,
    part: float,
) -> Counts:
    """Counts of a frozen unit with adapters."""
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
        kernels=counts.kernels + sum(pair.kernels for pair in pairs),
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
    """The adapters of every product that has any; one without a name where all linears do."""
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
    """Bytes that both products read and write, or as many as take as long as their operations.

    Forward reads x, and reads and writes y. Backward reads y's gradient for B's gradient and its
    input's, x for A's, and reads and writes x's gradient, to which it adds.
    """
    inner, outer, times = pair.product.inner, pair.product.outer, 2 if backward else 1
    of_input, of_output = (3, 2) if backward else (1, 2)
    flops_as_bytes = 2 * times * pair.rank * device.bytes_per_ms / device.flops_per_ms
    size = device.element_bytes
    input_bytes = max(of_input * size, flops_as_bytes) * inner
    output_bytes = max(of_output * size, flops_as_bytes) * outer
    return pair.rows_in * input_bytes + pair.rows_out * output_bytes


def _exchanged(device: Device, pair: _Pair) -> Collectives:
    """What tensor-parallel ranks exchange between A and B."""
    if device.tensor == 1 or not pair.product.name:
        return Collectives()
    sent_bytes = device.sent * pair.product.rows * pair.rank * device.element_bytes
    if pair.part < 1:  # gathered or scattered
        return Collectives(
            forward_bytes=sent_bytes, backward_bytes=sent_bytes, passes=1, back_passes=1
        )
    if pair.divides_inputs:
        return Collectives(forward_bytes=2 * sent_bytes, passes=2)
    return Collectives(backward_bytes=2 * sent_bytes, back_passes=2)
