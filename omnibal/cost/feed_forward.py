"""Feed-forward of a language layer: dense, or a mixture of experts.

Letters: h hidden, f feed-forward width, t tensor size, E experts, k experts per token. SwiGLU and
GeGLU cost the same. Experts follow Megatron-core's `moe_layer.py` with the all-to-all dispatcher,
unfused in this project's trainer (`megatron/vlm/model/experts.py`). A rank is planned for
`imbalance` times the mean number of tokens.
"""

from dataclasses import replace

import numpy as np

from omnibal.cost.device import Device
from omnibal.cost.kernels import FP32_BYTES, Features, Kernel, Kernels, element_wise, product
from omnibal.cost.work import EXPERT_PRODUCTS, SECOND_OUTPUT, Kept, Work, Working
from omnibal.model.config import LanguageConfig
from omnibal.model.layers import ExpertsConfig, LayerKind

ROUTED = "routed tokens"
"""Kept input rows of experts."""
DENSE_PRODUCTS = ("mlp.linear_fc1", "mlp.linear_fc2")
_INDEX_BYTES, _BOOL_BYTES = 8, 1  # torch int64, and bool
_MAPS, _BACK_MAPS = 12, 10
"""Reads and writes per token and expert, forward and backward: scores, auxiliary loss, maps."""
_KERNELS_OF_EXPERTS = 32
"""Kernels of router, dispatch and experts: a third of core's 50 forward and 45 backward."""
_FUSED_KERNELS_OF_EXPERTS = 14
"""Kernels with Transformer Engine's fused routing and permutation, and grouped products."""


def feed_forward(
    language: LanguageConfig, kind: LayerKind, device: Device, features: Features
) -> Work:
    """Return a layer's feed-forward."""
    if kind.experts is None:
        return _dense(language, device, features)
    block, experts = _mixture(language.hidden_size, kind.experts, device, features), kind.experts
    if not language.bias:
        return block
    held = -(-experts.experts // device.expert)
    biases = held * (2 * experts.ffn_hidden_size + language.hidden_size)
    return replace(block, expert_biases=biases, other_parameters=experts.experts)


def _dense(language: LanguageConfig, device: Device, features: Features) -> Work:
    """Gate, if any, and value in one product, fused activation, and the output product."""
    t, size, tokens = device.tensor, device.element_bytes, features.one("tokens")
    h, f, gates = language.hidden_size, language.ffn_hidden_size, language.gates
    inner_bytes, block_bytes = tokens * f / t * size, tokens * h * size
    part_bytes = block_bytes * device.whole
    gathered_bytes = device.gather_buffer(block_bytes)
    # The second product's output reuses the residual's gradient unless size or dtype differ.
    own = int(device.sequence_parallel or language.post_norms)
    return Work(
        kernels=_mlp(device, tokens, h, f, gates, DENSE_PRODUCTS, (SECOND_OUTPUT, "their product")),
        gathered_bytes=gathered_bytes,
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
        other_parameters=(gates * f / t + h) * language.bias,
    )


def _mlp(
    device: Device,
    tokens: np.ndarray,
    h: int,
    f: int,
    gates: int = 2,
    names: tuple[str, str] = ("", ""),
    given: tuple[str, str] = ("", ""),
) -> Kernels:
    """Kernels of a feed-forward that ranks divide, with a value and a gate, or one of them."""
    t, size = device.tensor, device.element_bytes
    inner_bytes = tokens * f / t * size
    return (
        *product(tokens, h, gates * f / t, name=names[0], given=given[0]),
        *element_wise((gates + 1) * inner_bytes, (2 * gates + 1) * inner_bytes),
        *product(tokens, f / t, h, name=names[1], given=given[1]),
        *device.whole_inputs(tokens * h * size),
    )


def _all_to_alls(device: Device, rows: np.ndarray, h: int) -> Kernels:
    """All-to-alls of dispatch and combine: rows, their weights, and forward's counts per rank."""
    if device.expert == 1:
        return ()
    exchanged_bytes = rows * (2 * h * device.element_bytes + FP32_BYTES)
    return (
        Kernel(kind="all_to_all", bytes=exchanged_bytes, launches=4),
        Kernel(kind="all_to_all", of="backward", bytes=exchanged_bytes, launches=3),
    )


def _mixture(h: int, experts: ExpertsConfig, device: Device, features: Features) -> Work:
    """Router, dispatch and combine, routed experts, and shared experts."""
    size, tokens = device.element_bytes, features.one("tokens")
    own, f = tokens * device.whole, experts.ffn_hidden_size
    held = -(-experts.experts // device.expert)  # experts on this device
    sent = own * experts.experts_per_token
    rows = sent * (experts.imbalance if device.expert > 1 else 1.0)
    shared, sorts = experts.shared_ffn_hidden_size or 0, 2 if held > 1 else 0
    into, out_of = EXPERT_PRODUCTS
    own_bytes = own * h * size
    # Dispatch and combine; sort by expert and back.
    permuted_bytes = ((5 * sent + own) + sorts * rows * 2) * h * size
    permuted = element_wise(permuted_bytes, permuted_bytes, 2 + sorts, kind="permutation")
    # SwiGLU, weighted in fp32. Backward recomputes the product, which is not kept.
    weighted, back_weighted = 2 * size + 2 * FP32_BYTES, 3 * size + 8 * FP32_BYTES
    activated_bytes = rows * f * (3 * size + weighted)
    back_activated_bytes = rows * f * (5 * size + back_weighted + 3 * size + weighted)
    # Router: fp32 input, maps.
    mapped_bytes, routed_bytes = own * experts.experts * FP32_BYTES, own * h * (size + FP32_BYTES)
    launches = _FUSED_KERNELS_OF_EXPERTS if device.runtime.fused_routing else _KERNELS_OF_EXPERTS
    return Work(
        kernels=(
            *product(own, h, experts.experts, dtype="fp32"),
            # The host waits for the numbers of tokens per expert.
            replace(permuted[0], waits=1),
            permuted[1],
            *_all_to_alls(device, rows, h),
            *product(rows, h, 2 * f, groups=held, name=into),
            *product(rows, f, h, groups=held, name=out_of),
            *element_wise(
                activated_bytes + _MAPS * mapped_bytes + routed_bytes,
                back_activated_bytes + _BACK_MAPS * mapped_bytes + 2 * routed_bytes,
                launches - 3 - 2 - sorts,
            ),
            # Shared experts are added, after a gate if any.
            *(_mlp(device, tokens, h, shared) if shared else ()),
            *(element_wise(3 * own_bytes, 0 * own_bytes) if shared else ()),
            *(product(own, h, 1) if experts.shared_gate else ()),
            *(element_wise(3 * own_bytes, 6 * own_bytes, 2) if experts.shared_gate else ()),
        ),
        gathered_bytes=device.gather_buffer(tokens * h * size) * (shared > 0),
        kept=_mixture_kept(h, experts, device, tokens, rows),
        working=_mixture_working(
            h, f, held, device, own, rows, 2 * bool(shared) + experts.shared_gate
        ),
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
