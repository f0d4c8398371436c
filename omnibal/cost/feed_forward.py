"""Feed-forward of a language layer: dense, or a mixture of experts.

Letters: h hidden, f feed-forward width, t tensor size, E experts, k experts per token. SwiGLU and
GeGLU cost the same. Experts follow Megatron-core's `moe_layer.py` with the all-to-all dispatcher,
unfused in this project's trainer (`megatron/vlm/model/experts.py`). A rank is planned for
`imbalance` times the mean number of tokens.
"""

from dataclasses import replace

import numpy as np

from omnibal.cost.device_rates import Device
from omnibal.cost.kernels import FP32_BYTES, Kernel, Kernels, element_wise, in_module, product
from omnibal.cost.work import EXPERT_PRODUCTS, SECOND_OUTPUT, Kept, Work, Working
from omnibal.model.config import LanguageConfig
from omnibal.model.layer_kinds import ExpertsConfig, LayerKind

ROUTED = "routed tokens"  # kept input rows of experts
DENSE_PRODUCTS = ("mlp.linear_fc1", "mlp.linear_fc2")
_INDEX_BYTES, _BOOL_BYTES = 8, 1  # torch int64, and bool
# Reads and writes per token and expert, forward and backward: scores, auxiliary loss, maps.
_MAPS, _BACK_MAPS = 12, 10
# Kernels of router, dispatch and experts: a third of core's 50 forward and 45 backward.
_KERNELS_OF_EXPERTS = 32
# Kernels with Transformer Engine's fused routing and permutation, and grouped products.
_FUSED_KERNELS_OF_EXPERTS = 14


def feed_forward(language: LanguageConfig, kind: LayerKind, device: Device) -> Work:
    """Return the kernels and memory of a layer's feed-forward."""
    if kind.experts is None:
        return _dense(language, device).within("mlp")
    experts = kind.experts
    block = _mixture(language.hidden_size, experts, device).within("moe")
    if not language.bias:
        return block
    held = -(-experts.experts // device.expert)
    biases = held * (2 * experts.ffn_hidden_size + language.hidden_size)
    return replace(block, expert_biases=biases, other_parameters=experts.experts)


def _dense(language: LanguageConfig, device: Device) -> Work:
    """Return a feed-forward: gate (if any) and value in one product, activation, output product."""
    t, size, tokens = device.tensor, device.element_bytes, device.features["tokens"]
    h, f, gates = language.hidden_size, language.ffn_hidden_size, language.gates
    inner_bytes, block_bytes = tokens * f / t * size, tokens * h * size
    part_bytes = block_bytes * device.sequence_share
    gathered_bytes = device.sequence_parallel * block_bytes
    # The gradient of the second product's output is the residual's, unless size or dtype differ.
    own = int(device.sequence_parallel or language.post_norms)
    return Work(
        kernels=_mlp(device, tokens, h, f, gates, DENSE_PRODUCTS, (SECOND_OUTPUT, "their product")),
        gathered_bytes=gathered_bytes,
        kept=(
            Kept("gate and value", "mlp.linear_fc1", gates * inner_bytes),
            Kept("their product", "swiglu", inner_bytes, for_weights=True),
            *((Kept("activated gate", "silu", inner_bytes),) if device.runtime.plain else ()),
        ),
        working=(
            # Gradients: second product (unsharded output), activation, first product (unsharded,
            # then sharded input).
            Working(part_bytes + gathered_bytes + inner_bytes, weight=h * f / t),
            Working(part_bytes + (gates + 1) * inner_bytes, freed=("their product",), finished=own),
            Working(
                part_bytes
                + gates * inner_bytes
                + block_bytes
                + gathered_bytes * device.sequence_share,
                weight=gates * h * f / t,
                freed=("gate and value", "their product"),
                finished=own,
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
    """Return kernels of a tensor-parallel feed-forward, with `gates` 2 if gated, else 1."""
    t, size = device.tensor, device.element_bytes
    inner_bytes = tokens * f / t * size
    return (
        *product(tokens, h, gates * f / t, name=names[0], given=given[0]),
        *element_wise((gates + 1) * inner_bytes, (2 * gates + 1) * inner_bytes),
        *product(tokens, f / t, h, name=names[1], given=given[1]),
        *device.block_exchange(tokens * h * size),
    )


def _mixture(h: int, experts: ExpertsConfig, device: Device) -> Work:
    """Return router, dispatch and combine, routed experts, and shared experts."""
    size, tokens, f = device.element_bytes, device.features["tokens"], experts.ffn_hidden_size
    own, number, k = tokens * device.sequence_share, experts.experts, experts.experts_per_token
    held = -(-number // device.expert)  # experts on this device
    rows = own * k * (experts.imbalance if device.expert > 1 else 1.0)
    shared, sorts = experts.shared_ffn_hidden_size or 0, 2 if held > 1 else 0
    # In backward, shared experts' products run before the routed experts'.
    others, into, out_of = 2 * (shared > 0) + experts.shared_gate, *EXPERT_PRODUCTS
    part_bytes, rows_bytes, inner_bytes = own * h * size, rows * h * size, rows * f * size
    shared_bytes = tokens * shared / device.tensor * size
    fp32_bytes, weights_bytes = rows * f * FP32_BYTES, rows * FP32_BYTES
    # Dispatch and combine, which flex dispatchers fuse with the exchange; sort by expert and back.
    dispatched_bytes = (device.runtime.dispatcher != "flex") * (5 * k + 1) * part_bytes
    permuted_bytes = dispatched_bytes + sorts * 2 * rows_bytes
    permuted = element_wise(permuted_bytes, permuted_bytes, 2 + sorts, kind="permutation")
    # SwiGLU, weighted in fp32. Backward recomputes gate x value, which is not kept.
    activated_bytes = 5 * inner_bytes + 2 * fp32_bytes
    back_activated_bytes = activated_bytes + 8 * inner_bytes + 8 * fp32_bytes
    # The router reads its input in fp32.
    mapped_bytes, routed_bytes = own * number * FP32_BYTES, own * h * (size + FP32_BYTES)
    launches = _FUSED_KERNELS_OF_EXPERTS if device.runtime.fused_routing else _KERNELS_OF_EXPERTS
    all_to_alls: Kernels = ()
    if device.expert > 1:  # of rows and their weights, and in forward of counts per rank
        sent_bytes = rows * (2 * h * size + FP32_BYTES)
        all_to_alls = (
            Kernel(kind="all_to_all", bytes=sent_bytes, launches=4),
            Kernel(kind="all_to_all", phase="backward", bytes=sent_bytes, launches=3),
        )
    kernels = [
        *product(own, h, number, dtype="fp32"),
        # The host waits for the numbers of tokens per expert.
        *(replace(permuted[0], waits=1), permuted[1]),
        *all_to_alls,
        *product(rows, h, 2 * f, groups=held, name=into),
        *product(rows, f, h, groups=held, name=out_of),
        *in_module("moe_act", element_wise(activated_bytes, back_activated_bytes)),
        *element_wise(
            _MAPS * mapped_bytes + routed_bytes,
            _BACK_MAPS * mapped_bytes + 2 * routed_bytes,
            launches - 3 - 2 - sorts - 1,
        ),
    ]
    # Scores for the auxiliary loss; routing weights and the routing map.
    maps = FP32_BYTES * (2 if experts.auxiliary_loss > 0 else 1) + _BOOL_BYTES
    kept = [
        Kept("scores and choice", "mlp", own * number * maps),
        Kept("chosen weights and places", "mlp", own * k * (FP32_BYTES + 2 * _INDEX_BYTES)),
        Kept(ROUTED, "mlp", rows_bytes, for_weights=True),
        Kept("gate and value", "mlp.experts", 2 * inner_bytes),
        Kept("weights of rows", "mlp", weights_bytes),
        Kept("weighted product", "mlp.experts", inner_bytes, True, ("moe_act",)),
    ]
    if shared:  # added, after a gate if any
        of_shared = ("shared_experts",)
        kernels += in_module("shared_experts", _mlp(device, tokens, h, shared))
        kernels += element_wise(3 * part_bytes, 0 * part_bytes)
        first, second = "mlp.shared_experts.linear_fc1", "mlp.shared_experts.swiglu"
        kept += [
            Kept("shared gate and value", first, 2 * shared_bytes, modules=of_shared),
            Kept("shared product", second, shared_bytes, True, of_shared),
        ]
    if experts.shared_gate:
        kernels += [*product(own, h, 1), *element_wise(3 * part_bytes, 6 * part_bytes, 2)]
        kept.append(Kept("shared output", "mlp.shared_experts.linear_fc2", own * h * size))
        kept.append(Kept("gate of the shared output", "mlp.shared_experts", own * size))
    weighted = ("weighted product",)
    active = (*weighted, "weights of rows")
    all_freed = (*active, "gate and value")
    return Work(
        kernels=tuple(kernels),
        gathered_bytes=device.sequence_parallel * tokens * h * size * (shared > 0),
        kept=tuple(kept),
        # Sorted rows; gradients of product two, fp32 weights, SwiGLU, product one; unsorted rows.
        # Weight gradients cover all experts of the device.
        working=(
            Working(part_bytes + 2 * rows_bytes, finished=others),
            Working(part_bytes + rows_bytes + inner_bytes, weight=held * h * f, finished=others),
            Working(part_bytes + inner_bytes + 2 * fp32_bytes, freed=weighted, finished=others + 1),
            Working(
                part_bytes + weights_bytes + 3 * inner_bytes, freed=active, finished=others + 1
            ),
            Working(
                part_bytes + 2 * weights_bytes + 2 * inner_bytes + rows_bytes,
                weight=held * 2 * h * f,
                freed=all_freed,
                finished=others + 1,
            ),
            Working(part_bytes + 2 * rows_bytes, freed=(*all_freed, ROUTED), finished=others + 2),
        ),
    )
