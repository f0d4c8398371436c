"""Counts of the language model: its embedding, layers of every kind, and head.

Letters: h hidden, f feed-forward, t tensor size.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.config import LanguageConfig, LayerKind, ModelConfig
from omnibal.cost.counts import FP32_BYTES, Counts, Device, Features, Product
from omnibal.units import attended_feature

_TOKEN_ID_BYTES = 8
_KERNELS_OF_EXPERTS = 12
"""Kernels of a router's product and choice, and of copies to and from experts."""


def language_embed(model: ModelConfig, device: Device, features: Features) -> Counts:
    """Count the word embedding, and the features of all encoders put in their places."""
    h, size, tokens = model.language.hidden_size, device.element_bytes, features.one("tokens")
    item_tokens = [
        features.one(tower.feature) * tower.tokens_per_item for tower in model.encoders.values()
    ]
    encoded_bytes = np.sum([features.none, *item_tokens], axis=0) * h * size
    text_bytes = tokens * h * size
    ids_bytes = tokens * _TOKEN_ID_BYTES
    return Counts(
        products=(),
        attention_flops=0 * tokens,
        moved_bytes=2 * (encoded_bytes + text_bytes),
        # All-reduced, and backward is then free; or scattered, and backward gathers.
        collective_bytes=(1 if device.sequence_parallel else 2) * device.sent * text_bytes,
        back_collective_bytes=(1 if device.sequence_parallel else 0) * device.sent * text_bytes,
        gathered_again_bytes=0 * tokens,
        passes=1 if device.sequence_parallel else 2,
        back_passes=1 if device.sequence_parallel else 0,
        kernels=6,
        kept_bytes=ids_bytes + encoded_bytes,
        kept_frozen_bytes=ids_bytes + encoded_bytes,
        boundary_bytes=ids_bytes + encoded_bytes,
        output_bytes=text_bytes * device.whole,
        transient_bytes=text_bytes,
        parameters=model.language.words_of_rank(device.tensor) * h,
    )


def language_layer(
    language: LanguageConfig, kind: LayerKind, device: Device, features: Features
) -> Counts:
    """Count a layer of one kind of attention and feed-forward."""
    t, size, whole = device.tensor, device.element_bytes, device.whole
    tokens = features.one("tokens")
    attended = features.one(attended_feature(kind))
    h, feed_forward = language.hidden_size, _feed_forward(language, kind)
    f, routed = feed_forward.used_width, feed_forward.experts_per_token * language.hidden_size
    key_value = 2 * h * language.kv_heads // language.heads
    divided = 2 * h * h + h * key_value
    biases = h + key_value if language.qkv_bias else 0
    # Between blocks: input, both norms' outputs, the middle residual. Divided: q, k, v, attention's
    # output, and SwiGLU's gate, value and product. Experts take and give a copy of every token that
    # is routed to them, and the weights of what they give need it kept.
    kept = 4 * h * whole + 2 * routed + (2 * h + key_value + 3 * f) / t
    kept_frozen = 2 * h * whole + routed + (2 * h + key_value + 2 * f) / t
    # Read and written between blocks: 2 norms, 2 residuals. Divided: q, k, v into their own places,
    # rotary embedding of q and k, attention's reads and write, SwiGLU. Copies to and from experts.
    moved = (2 * 2 + 2 * 3) * h * whole + 4 * routed
    moved += (2 * (h + key_value) + 2 * (h + key_value / 2) + 2 * h + key_value + 3 * f) / t
    block_bytes = tokens * h * size
    # Gathered and scattered are both blocks' inputs and outputs either way (section 4.2.2).
    collective_bytes = 2 * 2 * device.sent * block_bytes
    return Counts(
        products=(
            Product(rows=tokens, inner=h, outer=(h + key_value) / t),
            Product(rows=tokens, inner=h / t, outer=h),
            *_feed_forward_products(language, kind, device, tokens),
        ),
        attention_flops=attended * 2 * h / t,
        moved_bytes=tokens * moved * size,
        collective_bytes=collective_bytes,
        back_collective_bytes=collective_bytes,
        gathered_again_bytes=collective_bytes / 2 if device.sequence_parallel else 0 * tokens,
        passes=2 * 2,
        back_passes=2 * 2,
        passes_again=2 if device.sequence_parallel else 0,
        kernels=20 + (_KERNELS_OF_EXPERTS if kind.experts else 0),
        kept_bytes=tokens * (kept * size + FP32_BYTES * language.heads / t),
        kept_frozen_bytes=tokens * (kept_frozen * size + FP32_BYTES * language.heads / t),
        boundary_bytes=block_bytes * whole,
        output_bytes=block_bytes * whole,
        transient_bytes=tokens * (2 * h + routed + 3 * f / t) * size,
        parameters=2 * h
        + feed_forward.router_parameters
        + -(-(divided + 3 * h * feed_forward.held_width + biases) // t),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _FeedForward:
    """Sizes of a layer's feed-forward. All experts are on every device that holds the layer, each
    divided over its tensor-parallel ranks: there is no expert parallelism."""

    used_width: int
    """Width that a token passes."""
    held_width: int
    """Width of all weights."""
    experts_per_token: int
    router_parameters: int


def _feed_forward(language: LanguageConfig, kind: LayerKind) -> _FeedForward:
    f, experts = language.ffn_hidden_size, kind.experts
    if experts is None:
        return _FeedForward(used_width=f, held_width=f, experts_per_token=0, router_parameters=0)
    width, shared = experts.ffn_hidden_size, experts.shared_ffn_hidden_size or 0
    return _FeedForward(
        used_width=experts.experts_per_token * width + shared,
        held_width=experts.experts * width + shared,
        experts_per_token=experts.experts_per_token,
        router_parameters=language.hidden_size * experts.experts,
    )


def _feed_forward_products(
    language: LanguageConfig, kind: LayerKind, device: Device, tokens: np.ndarray
) -> tuple[Product, ...]:
    """Products of SwiGLU, whose gate and value are one; or of a router and its experts."""
    h, t, experts = language.hidden_size, device.tensor, kind.experts
    if experts is None:
        return _swiglu(h, language.ffn_hidden_size / t, tokens)
    routed, shared = tokens * experts.experts_per_token, experts.shared_ffn_hidden_size
    return (
        Product(rows=tokens, inner=h, outer=experts.experts),
        *_swiglu(h, experts.ffn_hidden_size / t, routed, groups=experts.experts),
        *(_swiglu(h, shared / t, tokens) if shared else ()),
    )


def _swiglu(h: int, width: float, rows: np.ndarray, groups: int = 1) -> tuple[Product, Product]:
    return (
        Product(rows=rows, inner=h, outer=2 * width, groups=groups),
        Product(rows=rows, inner=width, outer=h, groups=groups),
    )


def head(
    language: LanguageConfig, device: Device, features: Features, *, padded: bool = True
) -> Counts:
    """Final norm over all tokens; logits and loss only where there is one."""
    h, size = language.hidden_size, device.element_bytes
    tokens, loss_tokens = features.one("tokens"), features.one("loss_tokens")
    vocabulary = -(-language.vocab_size // device.tensor)
    if padded:
        vocabulary = language.words_of_rank(device.tensor)
    hidden_bytes = tokens * h * size * device.whole
    gathered_bytes = tokens * h * size
    gather_bytes = device.sent * gathered_bytes if device.sequence_parallel else 0 * tokens
    reduced_bytes = 2 * device.sent * loss_tokens * h * size
    return Counts(
        products=(Product(rows=loss_tokens, inner=h, outer=vocabulary),),
        attention_flops=0 * tokens,
        # Logits are written and read once, their fp32 softmax is read and written twice.
        moved_bytes=2 * hidden_bytes + loss_tokens * vocabulary * (2 * size + 4 * FP32_BYTES),
        # Backward all-reduces the gradient of what carries loss; or the input is gathered, its
        # gradient scattered, and the input gathered again.
        collective_bytes=gather_bytes,
        back_collective_bytes=gather_bytes if device.sequence_parallel else reduced_bytes,
        gathered_again_bytes=gather_bytes,
        passes=1 if device.sequence_parallel else 0,
        back_passes=1 if device.sequence_parallel else 2,
        passes_again=1 if device.sequence_parallel else 0,
        kernels=15,
        # The final norm's input and output, the part of it that carries loss, and the softmax that
        # the loss keeps in fp32.
        kept_bytes=2 * hidden_bytes + loss_tokens * (h * size + vocabulary * FP32_BYTES),
        kept_frozen_bytes=hidden_bytes + loss_tokens * vocabulary * FP32_BYTES,
        boundary_bytes=hidden_bytes,
        output_bytes=0 * tokens,
        # Two fp32 gradients of the logits exist at a time: the loss's and the softmax's.
        transient_bytes=gathered_bytes + loss_tokens * (h * size + vocabulary * 2 * FP32_BYTES),
        parameters=h + vocabulary * h,
    )
