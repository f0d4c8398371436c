"""Counts of the attention variants of a language layer.

Letters: h hidden, t tensor size; q, k and v over all heads. Element-wise work is that of this
project's fused kernels if its trainer builds the layer, else of the kernels each function names.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.cost.counts import (
    FIRST_OUTPUT,
    FP32_BYTES,
    Attended,
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
from omnibal.model.layers import LatentAttention, LayerKind, LinearAttention
from omnibal.model.units import attended_feature

CHUNK = 64
"""Chunk size of the gated delta rule, in flash-linear-attention and Megatron-core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWidths:
    """Input and output elements per token over all heads."""

    query: int
    key: int
    value: int
    output: int


def attention_widths(language: LanguageConfig, kind: LayerKind, tensor: int) -> AttentionWidths:
    """Widths of causal or sliding-window attention on all of `tensor` ranks.

    With fewer key-value heads than ranks, every rank has a copy of one.
    """
    if kind.latent is not None:
        of_key = kind.latent.head_size + kind.latent.rotary_head_size
        query, value = (language.heads * size for size in (of_key, kind.latent.value_head_size))
        return AttentionWidths(query=query, key=query, value=value, output=value)
    numbers = language.heads, max(language.kv_heads, tensor)
    query, key = (number * language.head_width for number in numbers)
    return AttentionWidths(query=query, key=key, value=key, output=query)


def attention(
    language: LanguageConfig, kind: LayerKind, device: Device, features: Features
) -> Block:
    """Count a layer's attention."""
    if kind.linear is not None:
        return _gated_delta_rule(language, kind.linear, device, features)
    attended = features.one(attended_feature(kind))
    widths = attention_widths(language, kind, device.tensor)
    if kind.latent is not None:
        return _latent(language, kind.latent, widths, device, features, attended)
    return _grouped_query(language, widths, device, features, attended)


def _grouped_query(
    language: LanguageConfig,
    widths: AttentionWidths,
    device: Device,
    features: Features,
    attended: np.ndarray,
) -> Block:
    """Grouped-query attention; causal attention does half of 4 q operations per pair.

    With q/k norms, v is a view of the qkv product's output, kept for the norms
    (`megatron/vlm/model/fused/rotary.py`). Qwen3.5's output gate comes from the same product and
    multiplies attention's output in a separate kernel.
    """
    t, size, tokens = device.tensor, device.element_bytes, features.one("tokens")
    h, query, key_value = language.hidden_size, widths.query, widths.key + widths.value
    gate = query if language.output_gate else 0
    has_views = language.qk_norm or language.output_gate
    # Divided: split and rotation of q, k, v; backward also reads a norm's inputs.
    # Without rotation and norms, q, k and v stay views.
    is_moved = language.positions == "rotary" or language.qk_norm
    rotated = 2 * (query + key_value - (widths.value if has_views else 0)) if is_moved else 0
    back_rotated = 2 * (query + key_value) + (query + widths.key if language.qk_norm else 0)
    made = query + gate + 2 * language.kv_heads * language.head_width
    # With fewer key-value heads than ranks, all ranks' q, k and v are gathered and a rank's own
    # are copied from them (Megatron-core `get_query_key_value_tensors`).
    gathered = made if language.kv_heads < t else 0
    own = (query + gate + key_value) / t if gathered else 0
    gathered_bytes = device.sent * tokens * gathered * size
    passes = 1 if gathered else 0
    seen = _causal(features, attended, language.heads / t, 2 * language.head_width)
    return Block(
        products=(
            Product(tokens, h, made / t, name="self_attention.linear_qkv", given=FIRST_OUTPUT),
            Product(
                tokens,
                query / t,
                h,
                name="self_attention.linear_proj",
                given="gated output" if gate else "",
            ),
        ),
        attended=(seen,),
        # Gate: attention's output, gate, product; in backward also both gradients.
        moved_bytes=tokens * ((rotated + 3 * gate) / t + 2 * (gathered + own)) * size,
        back_moved_bytes=tokens * ((back_rotated + 5 * gate) / t + 3 * gathered + own) * size,
        collectives=whole_inputs(device, tokens * h * size)
        + Collectives(
            forward_bytes=gathered_bytes,
            backward_bytes=gathered_bytes,
            passes=passes,
            back_passes=passes,
        ),
        kernels=(4 if is_moved else 3) + (1 if gate else 0) + 2 * passes,
        kept=_grouped_query_kept(language, widths, device, tokens),
        divided_parameters=h * made
        + query * h
        + made * (language.qkv_bias or language.bias)
        + language.heads * language.sinks,
        whole_parameters=2 * language.head_width * language.qk_norm + h * language.bias,
    )


def _causal(features: Features, attended: np.ndarray, heads: float, elements: float) -> Attended:
    """Causal attention; `attended` is twice the number of visible pairs."""
    pairs, rows = attended / 2, features.one("tokens")
    return Attended(pairs=pairs, rows=rows, heads=heads, elements=elements, causal=True)


def _grouped_query_kept(
    language: LanguageConfig, widths: AttentionWidths, device: Device, tokens: np.ndarray
) -> tuple[Kept, ...]:
    t, size, query = device.tensor, device.element_bytes, widths.query
    gate = query if language.output_gate else 0
    log_sum_exp_bytes = FP32_BYTES * language.heads
    attended = Kept(
        "attention's output and log-sum-exp",
        "self_attention.core_attention",
        tokens * (query * size + log_sum_exp_bytes) / t,
    )
    is_rotary = language.positions == "rotary"
    if is_rotary and not language.qk_norm and not gate:
        width = query + widths.key + widths.value
        made_by = "self_attention.split_and_rotate"
        rotated_bytes = tokens * width / t * size
        rotated = Kept("rotated q and k, and v", made_by, rotated_bytes)
        return rotated, attended
    made_by = "self_attention.norm_and_rotate"
    # Norm scales per head of q and k.
    heads = (query + widths.key) / language.head_width
    moments = FP32_BYTES * heads if language.qk_norm else 0
    product = query + gate + widths.key + widths.value
    made = Kept("product with q, k and v", "self_attention.linear_qkv", tokens * product / t * size)
    if not is_rotary and not language.qk_norm:
        return made, attended
    lines = [
        made,
        Kept("rotated q and k", made_by, tokens * ((query + widths.key) * size + moments) / t),
        attended,
    ]
    if gate:
        gated_bytes = tokens * query / t * size
        lines.append(Kept("gated output", "gate", gated_bytes, for_weights=True))
    return tuple(lines)


def _latent(
    language: LanguageConfig,
    latent: LatentAttention,
    widths: AttentionWidths,
    device: Device,
    features: Features,
    attended: np.ndarray,
) -> Block:
    """Latent attention as Megatron-core's `MLASelfAttention` trains it, without absorption.

    Down projections are replicated on tensor-parallel ranks (own tokens under sequence
    parallelism), up projections divided (`multi_latent_attention.py` with Transformer Engine's
    linears). A kernel that concatenates the rotated part reads and writes q, k and v once.
    """
    t, size, whole = device.tensor, device.element_bytes, device.whole
    h, tokens, rank = language.hidden_size, features.one("tokens"), latent.key_value_rank
    own, query_rank, rotary = tokens * whole, latent.query_rank, latent.rotary_head_size
    up_from = h if query_rank is None else query_rank
    up_to = language.heads * (latent.head_size + latent.value_head_size)
    down, norms = [(h, rank + rotary)], rank
    if query_rank is not None:
        down, norms = [(h, query_rank), *down], norms + query_rank
    copied = 2 * (widths.query + widths.key + widths.value)
    # Scores over the width of q and k, sums over that of v.
    elements = latent.head_size + rotary + latent.value_head_size
    seen = _causal(features, attended, language.heads / t, elements)
    return Block(
        products=(
            *(Product(own, inner, outer) for inner, outer in down),
            Product(tokens, up_from, widths.query / t),
            Product(tokens, rank, up_to / t),
            Product(tokens, widths.output / t, h),
        ),
        attended=(seen,),
        moved_bytes=(own * 2 * norms + tokens * copied / t) * size,
        back_moved_bytes=(own * 3 * norms + tokens * copied / t) * size,
        collectives=_latent_collectives(
            device, tokens * (up_from + rank + rotary) * size, tokens * h * size
        ),
        kernels=7 if query_rank is None else 9,
        kept=_latent_kept(language, latent, widths, device, tokens),
        divided_parameters=up_from * widths.query + rank * up_to + widths.output * h,
        whole_parameters=sum(inner * outer for inner, outer in down) + norms,
    )


def _latent_collectives(
    device: Device, latents_bytes: np.ndarray, block_bytes: np.ndarray
) -> Collectives:
    """Gathers of latents under sequence parallelism, and the usual reduction of outputs."""
    if not device.sequence_parallel:
        # All-reduces: the output; in backward gradients of the query latent, the key-value latent,
        # and the rotated key.
        return Collectives(
            forward_bytes=2 * device.sent * block_bytes,
            backward_bytes=2 * device.sent * latents_bytes,
            passes=2,
            back_passes=6,
        )
    both_bytes = device.sent * (latents_bytes + block_bytes)
    return Collectives(
        forward_bytes=both_bytes,
        backward_bytes=both_bytes,
        again_bytes=device.sent * latents_bytes,
        passes=4,
        back_passes=4,
        passes_again=2,
        gathered_bytes=latents_bytes,
    )


def _latent_kept(
    language: LanguageConfig,
    latent: LatentAttention,
    widths: AttentionWidths,
    device: Device,
    tokens: np.ndarray,
) -> tuple[Kept, ...]:
    t, size = device.tensor, device.element_bytes
    own, norms = tokens * device.whole, [latent.key_value_rank, latent.query_rank]
    ranks = sum(rank for rank in norms if rank is not None)
    count = sum(rank is not None for rank in norms)
    return (
        Kept("latents", "self_attention", own * ranks * size),
        Kept("latents' moments", "self_attention", own * count * FP32_BYTES),
        Kept("normed latents", "self_attention", own * ranks * size, for_weights=True),
        Kept(
            "q, k and v",
            "self_attention",
            tokens * (widths.query + widths.key + widths.value) / t * size,
        ),
        Kept(
            "attention's output and log-sum-exp",
            "self_attention.core_attention",
            tokens * (widths.output * size + FP32_BYTES * language.heads) / t,
        ),
    )


def _gated_delta_rule(
    language: LanguageConfig, linear: LinearAttention, device: Device, features: Features
) -> Block:
    """Chunked gated delta rule with projections, convolution and gated norm.

    Modules of Megatron-core's `gated_delta_net.py`; the rule of Yang et al. 2024 (arXiv 2412.06464,
    section 3.3) in flash-linear-attention's `ops/gated_delta_rule/chunk.py`, with q and k heads
    repeated per value head.
    """
    t, size, tokens = device.tensor, device.element_bytes, features.one("tokens")
    h, keys = language.hidden_size, linear.key_heads * linear.key_head_size
    values = linear.value_heads * linear.value_head_size
    mixed = 2 * keys + values  # q, k and v before the convolution
    made = mixed + values + 2 * linear.value_heads  # with gate, beta and decay
    convolved_flops = 2 * linear.convolution_width * mixed
    moved, back_moved = _rule_moved(linear, size)
    # Transposed, convolved, split; q and k norms; fp32 beta and decay; gated norm. Backward
    # rereads.
    around = 2 * mixed + 2 * mixed + 2 * mixed + 4 * keys + 3 * values
    back_around = 2 * mixed + 3 * mixed + 2 * mixed + 6 * keys + 5 * values
    return Block(
        products=(
            Product(tokens, h, made / t),
            Product(tokens, values / t, h),
        ),
        other_attention_flops=tokens * (rule_flops(linear) + convolved_flops) / t,
        moved_bytes=tokens * (around * size + moved) / t,
        back_moved_bytes=tokens * (back_around * size + back_moved) / t,
        collectives=whole_inputs(device, tokens * h * size),
        # Both products; eight copies, convolution, norms, beta, decay; seven kernels of the rule.
        kernels=2 + 8 + 1 + 3 + 5 + 7,
        kept=_rule_kept(linear, device, tokens),
        working=(_rule_working(linear, device, tokens, h),),
        divided_parameters=h * made
        + linear.convolution_width * mixed
        + 2 * linear.value_heads
        + values * h,
        whole_parameters=linear.value_head_size,
    )


def rule_flops(linear: LinearAttention) -> float:
    """Forward operations per token of the chunked rule over all heads.

    Per head, chunk C, key width d, value width e (Yang et al. 2024, section 3.3): k k^T 2 C d,
    inverse of the triangle C^2 / 3, w 2 C d, u 2 C e; w S, q S and k^T v 2 d e each; q k^T 2 C d
    and its product with v 2 C e. Backward recomputes w, u and states: 2.5 times forward.
    """
    d, e = linear.key_head_size, linear.value_head_size
    within = CHUNK * (6 * d + 4 * e) + CHUNK**2 / 3
    return linear.value_heads * (within + 6 * d * e)


def _rule_moved(linear: LinearAttention, size: int) -> tuple[float, float]:
    """Bytes that the rule's kernels read and write per token, forward and backward.

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


def _rule_kept(linear: LinearAttention, device: Device, tokens: np.ndarray) -> tuple[Kept, ...]:
    """List activations kept by core's module with flash-linear-attention and fused norms."""
    t, size, heads = device.tensor, device.element_bytes, linear.value_heads
    keys, values = linear.key_heads * linear.key_head_size, heads * linear.value_head_size
    scales = 2 * linear.key_heads * FP32_BYTES
    # q and k repeated per value head, if there are more value heads.
    copied = 2 * heads * linear.key_head_size if heads > linear.key_heads else 0

    def line(what: str, token_bytes: float, *, for_weights: bool = False) -> Kept:
        return Kept(what, "self_attention", tokens * token_bytes / t, for_weights=for_weights)

    return (
        line("into the convolution", (2 * keys + values) * size),
        line("normed q and k, and their scales", 2 * keys * size + scales),
        line("q and k of every head", copied * size),
        line("v", values * size),
        # Beta and its input; the decay's input, the decay and its cumulative sum.
        line("beta and decay", heads * (2 * size + 3 * FP32_BYTES)),
        line("inverse of a chunk's triangle", heads * CHUNK * size),
        line("rule's output and its norm's moments", values * size + heads * FP32_BYTES),
        line("output's gate", values * size),
        line("gated output", values * size, for_weights=True),
    )


def _rule_working(
    linear: LinearAttention, device: Device, tokens: np.ndarray, hidden_size: int
) -> Working:
    """Working memory of the rule's backward: recomputed w, u, values, states, and all gradients."""
    heads, d, e = linear.value_heads, linear.key_head_size, linear.value_head_size
    each = (2 * d + 3 * e + 2 * d * e / CHUNK) + (d + 2 * e) + e
    own_bytes = tokens * hidden_size * device.element_bytes * device.whole
    return Working(own_bytes + tokens * heads * each / device.tensor * device.element_bytes)
