"""Counts of a language layer's feed-forward: dense, or a mixture of experts.

Letters: h hidden, f feed-forward width, t tensor size, E experts, k experts per token. SwiGLU and
GeGLU cost the same. Experts follow Megatron-core's `moe_layer.py` with the all-to-all dispatcher,
unfused in this project's trainer (`megatron/vlm/model/experts.py`). A rank is planned for
`imbalance` times the mean number of tokens.
"""

from dataclasses import replace

import numpy as np

from omnibal.cost.counts import (
    FP32_BYTES,
    SECOND_OUTPUT,
    Block,
    Collectives,
    Device,
    Features,
    Kept,
    Product,
    Working,
    whole_inputs,
)
from omnibal.model.config import LanguageConfig
from omnibal.model.layers import ExpertsConfig, LayerKind

ROUTED = "routed tokens"
"""Kept input rows of experts."""
EXPERT_PRODUCTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
"""Names of the grouped expert products."""
_INDEX_BYTES, _BOOL_BYTES = 8, 1  # torch int64, and bool
_MAPS, _BACK_MAPS = 12, 10
"""Reads and writes per token and expert, forward and backward: scores, auxiliary loss, maps."""
_KERNELS_OF_EXPERTS = 32
"""Kernels of router, dispatch and experts: a third of core's 50 forward and 45 backward."""
_FUSED_KERNELS_OF_EXPERTS = 14
"""Kernels with Transformer Engine's fused routing and permutation, and grouped products."""


def feed_forward(
    language: LanguageConfig, kind: LayerKind, device: Device, features: Features
) -> Block:
    """Count a layer's feed-forward."""
    if kind.experts is None:
        return _dense(language, device, features)
    block = _mixture(language.hidden_size, kind.experts, device, features)
    if not language.bias:
        return block
    h, experts = language.hidden_size, kind.experts
    of_experts = -(-experts.experts // device.expert) * (2 * experts.ffn_hidden_size + h)
    return replace(
        block,
        expert_parameters=block.expert_parameters + of_experts,
        whole_parameters=block.whole_parameters + experts.experts,
    )


def _dense(language: LanguageConfig, device: Device, features: Features) -> Block:
    """Gate, if any, and value in one product, fused activation, and the output product."""
    t, size, tokens = device.tensor, device.element_bytes, features.one("tokens")
    h, f, gates = language.hidden_size, language.ffn_hidden_size, language.gates
    inner_bytes, block_bytes = tokens * f / t * size, tokens * h * size
    part_bytes = block_bytes * device.whole
    into, out_of = _gated(h, f / t, tokens)
    gathered_bytes = block_bytes if device.sequence_parallel else 0 * tokens
    # The second product's output reuses the residual's gradient unless size or dtype differ.
    own = int(device.sequence_parallel or language.post_norms)
    return Block(
        products=(
            replace(into, outer=gates * f / t, name="mlp.linear_fc1", given=SECOND_OUTPUT),
            replace(out_of, name="mlp.linear_fc2", given="their product"),
        ),
        moved_bytes=tokens * (gates + 1) * f / t * size,
        back_moved_bytes=tokens * (2 * gates + 1) * f / t * size,
        collectives=whole_inputs(device, block_bytes),
        kernels=3,
        kept=(
            Kept("gate and value", "mlp.linear_fc1", gates * inner_bytes),
            Kept("their product", "swiglu", inner_bytes, for_weights=True),
        ),
        working=(
            # Gradients: second product (unsharded output), activation, first product (unsharded,
            # then sharded input).
            Working(part_bytes + gathered_bytes + inner_bytes, weight=h * f / t),
            Working(part_bytes + (gates + 1) * inner_bytes, gone=("their product",), after=own),
            Working(
                part_bytes + gates * inner_bytes + block_bytes + gathered_bytes * device.whole,
                weight=gates * h * f / t,
                gone=("gate and value", "their product"),
                after=own,
            ),
        ),
        divided_parameters=(gates + 1) * h * f + gates * f * language.bias,
        whole_parameters=h * language.bias,
    )


def _gated(
    h: int, width: float, rows: np.ndarray, groups: int = 1, names: tuple[str, str] = ("", "")
) -> tuple[Product, Product]:
    return (
        Product(rows, h, 2 * width, groups=groups, name=names[0]),
        Product(rows, width, h, groups=groups, name=names[1]),
    )


def _mixture(h: int, experts: ExpertsConfig, device: Device, features: Features) -> Block:
    """Router, dispatch and combine, routed experts, and shared experts."""
    t, size, tokens = device.tensor, device.element_bytes, features.one("tokens")
    own, f = tokens * device.whole, experts.ffn_hidden_size
    held = -(-experts.experts // device.expert)  # experts on this device
    sent = own * experts.experts_per_token
    rows = sent * (experts.imbalance if device.expert > 1 else 1.0)
    shared, sorts = experts.shared_ffn_hidden_size or 0, 2 if held > 1 else 0
    # Dispatch and combine; sort by expert and back; SwiGLU, weighted in fp32. Router: fp32 input,
    # maps. Shared: SwiGLU, gate, sum.
    permuted = h * size * device.permute_slowdown
    copied = (5 * sent + own) * permuted
    sorted_bytes = sorts * rows * 2 * permuted
    weighted, back_weighted = 2 * size + 2 * FP32_BYTES, 3 * size + 8 * FP32_BYTES
    again = 3 * size + weighted  # recomputed in backward, as the product is not kept
    mapped = own * experts.experts * FP32_BYTES
    routed = own * h * (size + FP32_BYTES)
    gate = 3 * own * h * size if experts.shared_gate else 0 * own
    summed = 3 * own * h * size if shared else 0 * own
    exchanged = Collectives(
        # Dispatch and combine, and the weights.
        exchanged_bytes=rows * (2 * h * size + FP32_BYTES),
        # Three tensors, and the token counts per rank.
        exchanges=4,
        back_exchanges=3,
    )
    return Block(
        products=(
            Product(own, h, experts.experts, is_fp32=True),
            *_gated(h, f, rows, held, EXPERT_PRODUCTS),
            *(_gated(h, shared / t, tokens) if shared else ()),
            *((Product(own, h, 1),) if experts.shared_gate else ()),
        ),
        moved_bytes=copied
        + sorted_bytes
        + rows * f * (3 * size + weighted)
        + _MAPS * mapped
        + routed
        + tokens * 3 * shared / t * size
        + gate
        + summed,
        back_moved_bytes=copied
        + sorted_bytes
        + rows * f * (5 * size + back_weighted + again)
        + _BACK_MAPS * mapped
        + 2 * routed
        + tokens * 5 * shared / t * size
        + 2 * gate,
        collectives=exchanged + whole_inputs(device, tokens * h * size) if shared else exchanged,
        kernels=(_FUSED_KERNELS_OF_EXPERTS if device.runtime.fused_routing else _KERNELS_OF_EXPERTS)
        + (4 if shared else 0)
        + (3 if experts.shared_gate else 0),
        kept=_mixture_kept(h, experts, device, tokens, rows),
        working=_mixture_working(
            h, f, held, device, own, rows, 2 * bool(shared) + experts.shared_gate
        ),
        divided_parameters=3 * h * shared,
        whole_parameters=h * experts.experts + (h if experts.shared_gate else 0),
        expert_parameters=held * 3 * h * f,
    )


def _mixture_kept(
    h: int, experts: ExpertsConfig, device: Device, tokens: np.ndarray, rows: np.ndarray
) -> tuple[Kept, ...]:
    """List activations of experts (computed rows) and of the dispatcher (own tokens)."""
    t, size, f = device.tensor, device.element_bytes, experts.ffn_hidden_size
    own, k = tokens * device.whole, experts.experts_per_token
    # Scores for the auxiliary loss; routing weights and the routing map.
    has_loss = experts.auxiliary_loss > 0
    maps = FP32_BYTES * (2 if has_loss else 1) + _BOOL_BYTES
    lines = [
        Kept("scores and choice", "mlp", own * experts.experts * maps),
        Kept("chosen weights and places", "mlp", own * k * (FP32_BYTES + 2 * _INDEX_BYTES)),
        Kept(ROUTED, "mlp", rows * h * size, for_weights=True),
        Kept("gate and value", "mlp.experts", rows * 2 * f * size),
        # Their product is recomputed in backward.
        Kept("weights of rows", "mlp", rows * FP32_BYTES),
        Kept("weighted product", "mlp.experts", rows * f * size, for_weights=True),
    ]
    shared = tokens * (experts.shared_ffn_hidden_size or 0) / t * size
    if experts.shared_ffn_hidden_size is not None:
        lines += [
            Kept("shared gate and value", "mlp.shared_experts.linear_fc1", 2 * shared),
            Kept("shared product", "mlp.shared_experts", shared, for_weights=True),
        ]
    if experts.shared_gate:
        lines.append(Kept("shared output and its gate", "mlp.shared_experts", own * (h + 1) * size))
    return tuple(lines)


def _mixture_working(
    h: int, f: int, held: int, device: Device, own: np.ndarray, rows: np.ndarray, others: int
) -> tuple[Working, ...]:
    """Moments of the experts' backward; weight gradients cover all experts of the device.

    Args:
        others: shared-expert products, with finished backward.
    """
    size = device.element_bytes
    part_bytes, rows_bytes, inner_bytes = own * h * size, rows * h * size, rows * f * size
    weighted = ("weighted product",)
    active = (*weighted, "weights of rows")
    experts = (*active, "gate and value")
    fp32_bytes, weights_bytes = rows * f * FP32_BYTES, rows * FP32_BYTES
    return (
        # Sorted rows; gradients of product two, fp32 weights, SwiGLU, product one; unsorted rows.
        Working(part_bytes + 2 * rows_bytes, after=others),
        Working(part_bytes + rows_bytes + inner_bytes, weight=held * h * f, after=others),
        Working(part_bytes + inner_bytes + 2 * fp32_bytes, gone=weighted, after=others + 1),
        Working(part_bytes + weights_bytes + 3 * inner_bytes, gone=active, after=others + 1),
        Working(
            part_bytes + 2 * weights_bytes + 2 * inner_bytes + rows_bytes,
            weight=held * 2 * h * f,
            gone=experts,
            after=others + 1,
        ),
        Working(part_bytes + 2 * rows_bytes, gone=(*experts, ROUTED), after=others + 2),
    )
