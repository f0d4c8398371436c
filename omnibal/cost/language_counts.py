"""Counts of the language model: its embedding, layers of every kind, and head.

Letters: h hidden, f feed-forward, t tensor size.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.config import LanguageConfig, ModelConfig
from omnibal.cost.counts import FP32_BYTES, Counts, Device, Features, Kept, Product, Working
from omnibal.layers import LayerKind
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
    words = model.language.words_of_rank(device.tensor)
    return Counts(
        products=(),
        attention_flops=0 * tokens,
        moved_bytes=2 * (encoded_bytes + text_bytes),
        back_moved_bytes=3 * (encoded_bytes + text_bytes),
        # All-reduced, and backward is then free; or scattered, and backward gathers.
        collective_bytes=(1 if device.sequence_parallel else 2) * device.sent * text_bytes,
        back_collective_bytes=(1 if device.sequence_parallel else 0) * device.sent * text_bytes,
        gathered_again_bytes=0 * tokens,
        passes=1 if device.sequence_parallel else 2,
        back_passes=1 if device.sequence_parallel else 0,
        kernels=6,
        # Of the encoders' features, their places alone.
        kept=(Kept(what="token ids", made_by="", bytes=ids_bytes),),
        boundary_bytes=ids_bytes,
        output_bytes=text_bytes * device.whole,
        working=(Working(bytes=text_bytes + encoded_bytes, weight=words * h),),
        parameters=words * h,
    )


def language_layer(
    language: LanguageConfig, kind: LayerKind, device: Device, features: Features
) -> Counts:
    """Count a layer of one kind of attention and feed-forward."""
    t, size, whole = device.tensor, device.element_bytes, device.whole
    tokens = features.one("tokens")
    attended = features.one(attended_feature(kind))
    h, feed_forward = language.hidden_size, _feed_forward(language, kind, device)
    f, routed = feed_forward.used_width, feed_forward.experts_per_token * language.hidden_size
    key_value = 2 * h * language.kv_heads // language.heads
    divided = 2 * h * h + h * key_value
    biases = h + key_value if language.qkv_bias else 0
    # Read and written by fused kernels between blocks: the first norm, an add with the norm after
    # it, an add; backward each norm's input, and the residual's gradient with the norm's. Divided:
    # q, k and v into their own places, rotated, and SwiGLU. Copies to and from experts.
    rotated = 2 * (h + key_value)
    moved = (2 + 4 + 3) * h * whole + (rotated + 3 * f) / t + 4 * routed
    back_moved = 2 * 4 * h * whole + (rotated + 5 * f) / t + 6 * routed
    block_bytes = tokens * h * size
    part_bytes, inner_bytes = block_bytes * whole, tokens * f / t * size
    gathered_bytes = block_bytes if device.sequence_parallel else 0 * tokens
    routed_bytes = tokens * routed * size
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
        back_moved_bytes=tokens * back_moved * size,
        collective_bytes=collective_bytes,
        back_collective_bytes=collective_bytes,
        gathered_again_bytes=collective_bytes / 2 if device.sequence_parallel else 0 * tokens,
        passes=2 * 2,
        back_passes=2 * 2,
        passes_again=2 if device.sequence_parallel else 0,
        kernels=10 + (_KERNELS_OF_EXPERTS if kind.experts else 0),
        kept=_layer_kept(language, kind, device, tokens),
        boundary_bytes=part_bytes,
        output_bytes=part_bytes,
        working=(
            # The second product's gradients, of its output as a whole; SwiGLU's; the first's, of
            # its input as a whole and, divided again, as this rank's part.
            Working(
                bytes=part_bytes + gathered_bytes + inner_bytes + routed_bytes, weight=h * f / t
            ),
            Working(bytes=part_bytes + 3 * inner_bytes + routed_bytes, gone=("their product",)),
            Working(
                bytes=part_bytes
                + 2 * inner_bytes
                + block_bytes
                + gathered_bytes * whole
                + routed_bytes,
                weight=2 * h * f / t,
                gone=("gate and value", "their product"),
            ),
        ),
        # A layer's gathered input.
        shared_bytes=gathered_bytes,
        parameters=2 * h
        + feed_forward.router_parameters
        + feed_forward.expert_parameters
        + -(-(divided + 3 * h * feed_forward.held_width + biases) // t),
        expert_parameters=feed_forward.expert_parameters,
    )


def _layer_kept(
    language: LanguageConfig, kind: LayerKind, device: Device, tokens: np.ndarray
) -> tuple[Kept, ...]:
    """List what a layer keeps of `tokens` [features]."""
    t, size = device.tensor, device.element_bytes
    h, feed_forward = language.hidden_size, _feed_forward(language, kind, device)
    between = tokens * device.whole
    hidden_bytes, moments_bytes = between * h * size, between * FP32_BYTES
    width = h + 2 * h * language.kv_heads // language.heads
    inner_bytes = tokens * feed_forward.used_width / t * size
    attended_bytes = tokens * (h * size + FP32_BYTES * language.heads) / t
    lines = [
        Kept(what="input", made_by="", bytes=hidden_bytes),
        Kept(what="first norm's output", made_by="norm", bytes=hidden_bytes, for_weights=True),
        Kept(what="first norm's moments", made_by="norm", bytes=moments_bytes),
        Kept(
            what="rotated q and k, and v",
            made_by="self_attention.split_and_rotate",
            bytes=tokens * width / t * size,
        ),
        Kept(
            what="attention's output and log-sum-exp",
            made_by="self_attention.core_attention",
            bytes=attended_bytes,
        ),
        Kept(what="middle residual", made_by="scaled_add_norm", bytes=hidden_bytes),
        Kept(
            what="second norm's output",
            made_by="scaled_add_norm",
            bytes=hidden_bytes,
            for_weights=True,
        ),
        Kept(what="second norm's moments", made_by="scaled_add_norm", bytes=moments_bytes),
        Kept(what="gate and value", made_by="mlp.linear_fc1", bytes=2 * inner_bytes),
        Kept(what="their product", made_by="swiglu", bytes=inner_bytes, for_weights=True),
    ]
    if kind.experts:
        # A copy of every token for each expert that it is routed to, and what that one gives, which
        # the gradient of its weight needs.
        routed_bytes = tokens * feed_forward.experts_per_token * h * size
        lines += [
            Kept(what="routed tokens", made_by="dispatch", bytes=routed_bytes, for_weights=True),
            Kept(what="experts' outputs", made_by="experts", bytes=routed_bytes),
        ]
    return tuple(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class _FeedForward:
    """Sizes of a layer's feed-forward. Expert-parallel ranks share out the experts, none of which
    is divided; tensor-parallel ranks divide all else."""

    used_width: int
    """Width that a token passes."""
    held_width: int
    """Width of all weights but the experts'."""
    experts_per_token: int
    router_parameters: int
    expert_parameters: int
    """Those of the experts on one device."""


def _feed_forward(language: LanguageConfig, kind: LayerKind, device: Device) -> _FeedForward:
    f, experts = language.ffn_hidden_size, kind.experts
    if experts is None:
        return _FeedForward(
            used_width=f,
            held_width=f,
            experts_per_token=0,
            router_parameters=0,
            expert_parameters=0,
        )
    width, shared = experts.ffn_hidden_size, experts.shared_ffn_hidden_size or 0
    return _FeedForward(
        used_width=experts.experts_per_token * width + shared,
        held_width=shared,
        experts_per_token=experts.experts_per_token,
        router_parameters=language.hidden_size * experts.experts,
        expert_parameters=-(-experts.experts // device.expert) * 3 * language.hidden_size * width,
    )


def _feed_forward_products(
    language: LanguageConfig, kind: LayerKind, device: Device, tokens: np.ndarray
) -> tuple[Product, ...]:
    """Products of SwiGLU, whose gate and value are one; or of a router and its experts."""
    h, t, experts = language.hidden_size, device.tensor, kind.experts
    if experts is None:
        return _swiglu(h, language.ffn_hidden_size / t, tokens)
    own, shared = tokens * device.whole, experts.shared_ffn_hidden_size
    routed = own * experts.experts_per_token * (experts.imbalance if device.expert > 1 else 1.0)
    held = -(-experts.experts // device.expert)
    return (
        Product(rows=own, inner=h, outer=experts.experts),
        *_swiglu(h, experts.ffn_hidden_size, routed, groups=held),
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
    logits_bytes, loss_bytes = loss_tokens * vocabulary * size, loss_tokens * h * size
    return Counts(
        products=(Product(rows=loss_tokens, inner=h, outer=vocabulary),),
        attention_flops=0 * tokens,
        # The norm, and the logits read once; backward they are read again, and their gradient
        # written.
        moved_bytes=2 * hidden_bytes + logits_bytes,
        back_moved_bytes=3 * hidden_bytes + 2 * logits_bytes,
        # Backward all-reduces the gradient of what carries loss; or the input is gathered, its
        # gradient scattered, and the input gathered again.
        collective_bytes=gather_bytes,
        back_collective_bytes=gather_bytes if device.sequence_parallel else reduced_bytes,
        gathered_again_bytes=gather_bytes,
        passes=1 if device.sequence_parallel else 0,
        back_passes=1 if device.sequence_parallel else 2,
        passes_again=1 if device.sequence_parallel else 0,
        kernels=10,
        kept=(
            Kept(what="input", made_by="", bytes=hidden_bytes),
            Kept(what="norm's moments", made_by="norm", bytes=hidden_bytes / h / size * FP32_BYTES),
            Kept(
                what="what carries loss",
                made_by="index_select",
                bytes=loss_bytes,
                for_weights=True,
            ),
            Kept(what="logits", made_by="head", bytes=logits_bytes),
        ),
        boundary_bytes=hidden_bytes,
        output_bytes=0 * tokens,
        working=(
            # The logits' gradient, in their type; the weight's, when the logits are gone; then that
            # of all positions.
            Working(bytes=logits_bytes),
            Working(bytes=logits_bytes + loss_bytes, weight=vocabulary * h, gone=("logits",)),
            Working(bytes=gathered_bytes + loss_bytes, gone=("logits", "what carries loss")),
        ),
        parameters=h + vocabulary * h,
    )
