"""Attention variants of a language layer.

Letters: h hidden, t tensor size; q, k and v over all heads. Element-wise kernels are this
project's fused ones if its trainer builds the layer, else those that the function names.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.cost.device_rates import Device
from omnibal.cost.kernels import FP32_BYTES, Kernels, attention, element_wise, in_module, product
from omnibal.cost.work import FIRST_OUTPUT, Kept, Work, Working
from omnibal.model.config import LanguageConfig
from omnibal.model.layer_kinds import LatentAttention, LayerKind, LinearAttention
from omnibal.model.units import attended_feature

CHUNK = 64  # tokens per chunk of the gated delta rule (flash-linear-attention, Megatron-core)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWidths:
    """Input and output elements per token over all heads."""

    query: int
    key: int
    value: int
    output: int


def attention_widths(language: LanguageConfig, kind: LayerKind, tensor: int) -> AttentionWidths:
    """Return widths of softmax attention, summed over `tensor` ranks."""
    if kind.latent is not None:
        of_key = kind.latent.head_size + kind.latent.rotary_head_size
        query, value = (language.heads * size for size in (of_key, kind.latent.value_head_size))
        return AttentionWidths(query=query, key=query, value=value, output=value)
    # With fewer key-value heads than ranks, every rank has a copy of one head.
    numbers = language.heads, max(language.kv_heads, tensor)
    query, key = (number * language.head_width for number in numbers)
    return AttentionWidths(query=query, key=key, value=key, output=query)


def attention_block(language: LanguageConfig, kind: LayerKind, device: Device) -> Work:
    """Return the kernels and memory of a layer's attention."""
    if kind.linear is not None:
        return _gated_delta_rule(language, kind.linear, device)
    widths = attention_widths(language, kind, device.tensor)
    if kind.latent is not None:
        return _latent(language, kind.latent, widths, device)
    pairs = device.features[attended_feature(kind)] / 2  # visible ones
    return _grouped_query(language, widths, device, pairs)


def _grouped_query(
    language: LanguageConfig, widths: AttentionWidths, device: Device, pairs: np.ndarray
) -> Work:
    """Return grouped-query attention, with optional q/k norms, output gate and sinks.

    With q/k norms, v is a view of the qkv product's output, kept for the norms
    (`megatron/vlm/model/fused/rotary.py`). Qwen3.5's output gate comes from the same product and
    multiplies attention's output in a separate kernel.
    """
    t, size, tokens = device.tensor, device.element_bytes, device.features["tokens"]
    h, query, key_value = language.hidden_size, widths.query, widths.key + widths.value
    gate, norms = query * language.output_gate, int(language.qk_norm)
    has_views = language.qk_norm or language.output_gate
    # Divided: split and rotation of q, k, v; backward also reads a norm's inputs.
    # Without rotation and norms, q, k and v stay views.
    is_rotary = language.positions == "rotary"
    is_moved = is_rotary or language.qk_norm
    rotated = is_moved * 2 * (query + key_value - has_views * widths.value)
    back_rotated = 2 * (query + key_value) + norms * (query + widths.key)
    made = query + gate + 2 * language.kv_heads * language.head_width
    projected = "gated output" if gate else ""
    qkv, by, gated_bytes = "self_attention.linear_qkv", "self_attention", tokens * gate / t * size
    own_bytes, all_bytes = tokens * (query + gate + key_value) / t * size, tokens * made * size
    kept = [
        Kept("rotated q and k, and v", f"{by}.split_and_rotate", own_bytes),
        _core_kept(language, widths, device, tokens),
    ]
    if has_views or not is_rotary:
        # Norm scales per head of q and k.
        moments = FP32_BYTES * (query + widths.key) / language.head_width * norms
        rotated_bytes = tokens * ((query + widths.key) * size + moments) / t
        kept[:1] = [
            # The gate is taken out of the product.
            Kept("product with q, k and v", by if gate else qkv, own_bytes),
            Kept("rotated q and k", f"{by}.norm_and_rotate", rotated_bytes),
        ]
    if not is_rotary and not language.qk_norm:
        del kept[1]
    if gate:
        kept.append(Kept(projected, by, gated_bytes, for_weights=True))
    copies: Kernels = ()
    if language.kv_heads < t:
        # All ranks' q, k and v are gathered, and each rank copies its heads (Megatron-core
        # `get_query_key_value_tensors`).
        copies = (
            *element_wise(2 * (all_bytes + own_bytes), 3 * all_bytes + own_bytes, launches=2),
            *device.rings("forward", all_bytes),
            *device.rings("backward", all_bytes),
        )
    return Work(
        kernels=(
            *product(tokens, h, made / t, name=qkv, given=FIRST_OUTPUT),
            *attention(pairs, tokens, language.heads / t, 2 * language.head_width, causal=True),
            *product(tokens, query / t, h, name=f"{by}.linear_proj", given=projected),
            *element_wise(
                tokens * rotated / t * size,
                tokens * back_rotated / t * size,
                launches=int(is_moved),
            ),
            # Attention's output, gate, product; in backward also both gradients.
            *(element_wise(3 * gated_bytes, 5 * gated_bytes) if gate else ()),
            *copies,
            *device.block_exchange(tokens * h * size),
        ),
        gathered_bytes=device.sequence_parallel * tokens * h * size,
        kept=tuple(kept),
        other_parameters=made / t * (language.qkv_bias or language.bias)
        + language.heads / t * language.sinks
        + 2 * language.head_width * norms
        + h * language.bias,
    )


def _core_kept(
    language: LanguageConfig, widths: AttentionWidths, device: Device, tokens: np.ndarray
) -> Kept:
    """Return output and log-sum-exp, kept by softmax attention."""
    width_bytes = widths.output * device.element_bytes + FP32_BYTES * language.heads
    name, by = "attention's output and log-sum-exp", "self_attention.core_attention"
    return Kept(name, by, tokens * width_bytes / device.tensor)


def _latent(
    language: LanguageConfig, latent: LatentAttention, widths: AttentionWidths, device: Device
) -> Work:
    """Return latent attention as Megatron-core's `MLASelfAttention` trains it.

    Down projections are replicated on tensor-parallel ranks (own tokens under sequence
    parallelism), up projections divided, and weights are not absorbed
    (`multi_latent_attention.py` with Transformer Engine's linears).
    """
    t, size, by = device.tensor, device.element_bytes, "self_attention"
    h, tokens, rank = language.hidden_size, device.features["tokens"], latent.key_value_rank
    own, rotary = tokens * device.sequence_share, latent.rotary_head_size
    pairs, up_from, down, ranks = device.features["squared_tokens"] / 2, h, [rank + rotary], [rank]
    if (query_rank := latent.query_rank) is not None:
        up_from, down, ranks = query_rank, [query_rank, *down], [query_rank, rank]
    up_to = language.heads * (latent.head_size + latent.value_head_size)
    # One kernel concatenates the rotated parts: it reads and writes q, k and v.
    copied_bytes = tokens * 2 * (widths.query + widths.key + widths.value) / t * size
    # Scores sum over the head size of q and k, outputs have the head size of v.
    elements = latent.head_size + rotary + latent.value_head_size
    latents_bytes, own_bytes = tokens * (up_from + rank + rotary) * size, own * sum(ranks) * size
    up = (
        *product(tokens, up_from, widths.query / t),
        *product(tokens, rank, up_to / t),
        *element_wise(copied_bytes, copied_bytes),
    )
    return Work(
        kernels=(
            *(kernel for outer in down for kernel in product(own, h, outer)),
            *in_module("mla_up_proj", up),
            *attention(pairs, tokens, language.heads / t, elements, causal=True),
            *product(tokens, widths.output / t, h),
            *element_wise(2 * own_bytes, 3 * own_bytes, len(ranks)),
            *_latent_exchange(device, latents_bytes, tokens * h * size),
        ),
        gathered_bytes=device.sequence_parallel * latents_bytes,
        kept=(
            Kept("latents", by, own_bytes),
            Kept("latents' moments", by, own * len(ranks) * FP32_BYTES),
            Kept("normed latents", by, own_bytes, for_weights=True),
            Kept("q, k and v", by, copied_bytes / 2, modules=("mla_up_proj",)),
            _core_kept(language, widths, device, tokens),
        ),
        other_parameters=sum(ranks),
    )


def _latent_exchange(device: Device, latents_bytes: np.ndarray, block_bytes: np.ndarray) -> Kernels:
    """Return gathers of latents under sequence parallelism, and the reduction of outputs."""
    if not device.sequence_parallel:
        # All-reduces: the output; in backward gradients of the query latent, the key-value latent,
        # and the rotated key.
        return (
            *device.rings("forward", 2 * block_bytes, 2),
            *device.rings("backward", 2 * latents_bytes, 6, launches=3),
        )
    both_bytes = latents_bytes + block_bytes
    return (
        *device.rings("forward", both_bytes, 4, launches=3),
        *device.rings("backward", both_bytes, 4, launches=3),
        *device.rings("weight_gradient", latents_bytes, 2, launches=2),
    )


def _gated_delta_rule(language: LanguageConfig, linear: LinearAttention, device: Device) -> Work:
    """Return the chunked gated delta rule with projections, convolution and gated norm.

    Modules follow Megatron-core's `gated_delta_net.py`. The rule is by Yang et al. 2024
    (arXiv 2412.06464, section 3.3), in flash-linear-attention's `ops/gated_delta_rule/chunk.py`,
    with q and k heads repeated per value head.
    """
    t, size, tokens = device.tensor, device.element_bytes, device.features["tokens"]
    h, heads = language.hidden_size, linear.value_heads
    d, e = linear.key_head_size, linear.value_head_size
    keys, values = linear.key_heads * d, heads * e
    mixed = 2 * keys + values  # q, k and v before the convolution
    made = mixed + values + 2 * heads  # with gate, beta and decay
    convolution = linear.convolution_width * mixed
    flops = rule_flops(linear) + 2 * convolution
    of_rule, back_of_rule = _rule_moved(linear, size)
    # Elements moved by transpositions, convolution, split, q and k norms, and gated norm.
    around = 2 * mixed + 2 * mixed + 2 * mixed + 4 * keys + 3 * values
    back_around = 2 * mixed + 3 * mixed + 2 * mixed + 6 * keys + 5 * values
    # Recomputed w, u, values, states, and all gradients.
    running = heads * ((2 * d + 3 * e + 2 * d * e / CHUNK) + (d + 2 * e) + e) / t
    block = "self_attention"
    # Bytes per token kept with flash-linear-attention and fused norms, and what makes them.
    is_core = device.runtime.transformer_engine  # Megatron-core's module, with Transformer Engine
    unit_bytes = 2 * keys * size + 2 * linear.key_heads * FP32_BYTES
    rule_bytes = (heads * CHUNK + values) * size
    kept = [
        ("into the convolution", "", mixed * size),
        ("v", "", values * size),
        ("output's gate", "", values * size),
        ("rows of beta and decay", "", 2 * heads * size),
        ("normed q and k, and their scales", "normalize_heads", unit_bytes),
        # Core's sum of decays is another tensor.
        ("beta and decay", "decay_and_rate", heads * (3 * FP32_BYTES if is_core else size + 4)),
        ("rule's output, and inverses of chunks' triangles", "run_rule", rule_bytes),
        ("norm's scales", "gated_norm", heads * FP32_BYTES),
        ("gated output", "gated_norm", values * size),
    ]
    if is_core and heads > linear.key_heads:  # core repeats them for the kernel
        kept.append(("q and k of every head", "", 2 * heads * d * size))
    return Work(
        kernels=(
            *product(tokens, h, made / t),
            *attention(tokens, tokens, 1, flops / 2 / t, kind="other_attention"),
            *product(tokens, values / t, h),
            # Copies, convolution, norms, beta, decay, and the rule's kernels but the one above.
            *element_wise(
                tokens * (around * size + of_rule) / t,
                tokens * (back_around * size + back_of_rule) / t,
                launches=8 + 1 + 3 + 5 + 7 - 1,
            ),
            *device.block_exchange(tokens * h * size),
        ),
        gathered_bytes=device.sequence_parallel * tokens * h * size,
        kept=tuple(
            Kept(what, f"{block}.{by}".strip("."), tokens * token_bytes / t, what == "gated output")
            for what, by, token_bytes in kept
        ),
        working=(Working(tokens * (h * device.sequence_share + running) * size),),
        other_parameters=(convolution + 2 * heads) / t + e,
    )


def rule_flops(linear: LinearAttention) -> float:
    """Return forward operations per token of the chunked rule over all heads."""
    # Per head, chunk C, key width d, value width e (Yang et al. 2024, section 3.3): k k^T 2 C d,
    # inverse of the triangle C^2 / 3, w 2 C d, u 2 C e; w S, q S and k^T v 2 d e each; q k^T 2 C d
    # and its product with v 2 C e. Backward recomputes w, u and states: 2.5 times forward.
    d, e = linear.key_head_size, linear.value_head_size
    within = CHUNK * (6 * d + 4 * e) + CHUNK**2 / 3
    return linear.value_heads * (within + 6 * d * e)


def _rule_moved(linear: LinearAttention, size: int) -> tuple[float, float]:
    """Return bytes that the rule's kernels read and write per token, forward and backward.

    Operands are read once. Forward: k k^T (fp32 triangle), inverse, w and u, states (one per chunk,
    new values), output. Backward repeats w, u and states, then gradients, as in
    `chunk_gated_delta_rule_bwd`.
    """
    d, e = linear.key_head_size, linear.value_head_size
    state, triangle, heads = d * e / CHUNK, CHUNK, linear.value_heads
    made = (2 * d + 2 * e + triangle) + (2 * d + 2 * e + state)
    forward = d + triangle + made + (2 * d + 2 * e + state)
    of_values, of_states = 2 * d + 2 * e, 3 * d + 3 * e + state
    of_inputs, of_inverse = 6 * d + 3 * e + 2 * state, 6 * d + 3 * e + triangle
    backward = made + of_values + of_states + of_inputs + of_inverse
    return heads * (forward * size + 2 * triangle * FP32_BYTES), heads * backward * size
