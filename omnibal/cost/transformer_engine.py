"""Extra memory of Megatron-core with Transformer Engine's layers.

Products accumulate weight gradients in the fp32 buffer and return an empty gradient, cached forever
per shape and dtype (`get_dummy_wgrad` of `transformer_engine/pytorch/module/base.py`, 2.11;
Megatron-core 0.16.1 uses it for the head too, `tensor_parallel/layers.py`). Only the word
embedding's gradient is temporary. The fused loss writes its gradient over the logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from omnibal.cost.model import LibraryBuffer
from omnibal.cost.work import Unit, Working

_WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS workspace per stream from Hopper on (`get_cublas_workspace_size_bytes`), as in torch."""
_GROUPED_STREAMS = 4
"""Streams of grouped products, each with a workspace."""


def drop_weight_gradients(moments: Sequence[Working]) -> tuple[Working, ...]:
    """Return moments of a language unit's backward without temporary weight gradients."""
    return tuple(
        each if each.of_words else replace(each, weight=0)
        for each in moments
        if not each.beside_logits
    )


def library_buffers(trained: Mapping[str, Unit], element_bytes: int) -> tuple[LibraryBuffer, ...]:
    """Buffers that libraries keep for language units.

    `trained`: trained language unit kinds, by name.
    """
    with_shape: dict[tuple[float, float], set[str]] = {}
    for name, unit in trained.items():
        for product in unit.products:
            # Routers and single-output gates are not Transformer Engine layers.
            if product.dtype != "fp32" and product.outer > 1:
                with_shape.setdefault((product.inner, product.outer), set()).add(name)
    gradients = [
        LibraryBuffer(
            what=f"empty gradient of {inner:g} x {outer:g} weights",
            bytes=inner * outer * element_bytes,
            kinds=frozenset(kinds),
        )
        for (inner, outer), kinds in with_shape.items()
    ]
    some = frozenset(trained)
    grouped = frozenset(name for name, unit in trained.items() if unit.expert_parameters)
    workspaces = (
        LibraryBuffer(what="workspaces of products", bytes=2 * _WORKSPACE_BYTES, kinds=some),
        LibraryBuffer(
            what="workspaces of grouped products",
            bytes=_GROUPED_STREAMS * _WORKSPACE_BYTES,
            kinds=grouped,
        ),
    )
    return (*gradients, *workspaces)
