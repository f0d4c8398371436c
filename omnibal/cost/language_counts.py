"""Counts of the language model's embedding, layers and head (h hidden, t tensor size)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from omnibal.cost.attention_counts import attention
from omnibal.cost.counts import (
    FIRST_OUTPUT,
    FP32_BYTES,
    SECOND_OUTPUT,
    Block,
    Collectives,
    Counts,
    Device,
    Features,
    Kept,
    Product,
    Working,
    one_after_another,
)
from omnibal.cost.feed_forward_counts import feed_forward
from omnibal.cost.fp8_counts import cast_kernels, in_fp8, kept_in_fp8, working_in_fp8
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.layers import LayerKind

_TOKEN_ID_BYTES = 8  # torch int64
_UNFUSED_LOSS_MOVED = (19, 7)
"""Forward and backward reads and writes of the logits by Megatron-core's unfused loss, in bf16;
fp32 passes count twice (`tensor_parallel/cross_entropy.py`)."""


def language_embed(model: ModelConfig, device: Device, features: Features) -> Counts:
    """Count the word embedding and the insertion of encoder features."""
    h, size, tokens = model.language.hidden_size, device.element_bytes, features.one("tokens")
    item_tokens = [
        features.one(tower.feature) * tower.tokens_per_item for tower in model.encoders.values()
    ]
    encoded_bytes = np.sum([features.none, *item_tokens], axis=0) * h * size
    text_bytes = tokens * h * size
    ids_bytes = tokens * _TOKEN_ID_BYTES
    # All-reduced, with no backward exchange, or scattered, with a gather in backward.
    passes, back_passes = (1, 1) if device.sequence_parallel else (2, 0)
    words = model.language.words_of_rank(device.tensor)
    # Learned positions, replicated on tensor-parallel ranks: looked up, added.
    placed = (model.language.max_positions or 0) * (model.language.positions == "learned")
    added_bytes = text_bytes * bool(placed)
    return Counts(
        products=(),
        moved_bytes=2 * (encoded_bytes + text_bytes) + 5 * added_bytes,
        back_moved_bytes=3 * (encoded_bytes + text_bytes) + 2 * added_bytes,
        collectives=Collectives(
            forward_bytes=passes * device.sent * text_bytes,
            backward_bytes=back_passes * device.sent * text_bytes,
            passes=passes,
            back_passes=back_passes,
        ),
        kernels=6,
        # Only the positions of encoder features.
        kept=(Kept("token ids", "", ids_bytes),),
        boundary_bytes=ids_bytes,
        output_bytes=text_bytes * device.whole,
        working=(Working(text_bytes + encoded_bytes, weight=words * h, of_words=True),),
        parameters=(words + placed) * h,
    )


def language_layer(
    language: LanguageConfig, kind: LayerKind, device: Device, features: Features
) -> Counts:
    """Count a layer of one attention and feed-forward kind."""
    size, whole, tokens = device.element_bytes, device.whole, features.one("tokens")
    h, post_norms = language.hidden_size, 2 if language.post_norms else 0
    first = attention(language, kind, device, features)
    second = feed_forward(language, kind, device, features)
    products = in_fp8(device, first.products + second.products)
    blocks = (first, second)
    # Fused kernels between blocks: norm; add and norm; add. Backward also reads norm inputs and the
    # residual's gradient. Norms after blocks read and write one tensor, in backward two.
    moved_bytes = tokens * (2 + 4 + 3 + 2 * post_norms) * h * whole * size
    back_moved_bytes = tokens * (2 * 4 + 3 * post_norms) * h * whole * size
    part_bytes = tokens * h * whole * size
    divided = sum(block.divided_parameters for block in blocks)
    experts = sum(block.expert_parameters for block in blocks)
    later = (SECOND_OUTPUT, *(line.what for line in second.kept))
    return Counts(
        products=products,
        attended=first.attended + second.attended,
        other_attention_flops=first.other_attention_flops + second.other_attention_flops,
        moved_bytes=moved_bytes + first.moved_bytes + second.moved_bytes,
        back_moved_bytes=back_moved_bytes + first.back_moved_bytes + second.back_moved_bytes,
        collectives=first.collectives + second.collectives,
        kernels=3 + post_norms + first.kernels + second.kernels + cast_kernels(device, products),
        kept=_inputs_in_fp8(
            kind, device, first, _layer_kept(language, device, tokens, first, second)
        ),
        boundary_bytes=part_bytes,
        output_bytes=part_bytes,
        working=working_in_fp8(
            device,
            (
                *second.working,
                *(
                    replace(
                        moment,
                        gone=(*later, *moment.gone),
                        after=moment.after + len(second.products),
                    )
                    for moment in first.working
                ),
            ),
            products,
        ),
        # Between the blocks: gradients of the norm's output, of the sum, and of the layer's output
        # unless shared with the second product.
        late_working=(
            Working(
                (3 if device.sequence_parallel or post_norms else 2) * part_bytes,
                gone=later,
                after=len(second.products),
            ),
        ),
        parameters=(2 + post_norms) * h * (1 + language.norm_bias)
        + sum(block.whole_parameters for block in blocks)
        + experts
        + -(-divided // device.tensor),
        expert_parameters=experts,
    )


def _layer_kept(
    language: LanguageConfig, device: Device, tokens: np.ndarray, first: Block, second: Block
) -> tuple[Kept, ...]:
    """List activations a layer keeps of `tokens` [features], in execution order."""
    between = tokens * device.whole
    hidden_bytes = between * language.hidden_size * device.element_bytes
    moments_bytes = between * FP32_BYTES

    def after(block: str) -> tuple[Kept, ...]:
        if not language.post_norms:
            return ()
        return (
            Kept(f"{block}'s output", block, hidden_bytes),
            Kept(f"moments of {block}'s norm", "norm", moments_bytes),
        )

    return (
        Kept("input", "", hidden_bytes),
        Kept(FIRST_OUTPUT, "norm", hidden_bytes, for_weights=True),
        Kept("first norm's moments", "norm", moments_bytes),
        *first.kept,
        *after("self_attention"),
        Kept("middle residual", "scaled_add_norm", hidden_bytes),
        Kept(SECOND_OUTPUT, "scaled_add_norm", hidden_bytes, for_weights=True),
        Kept("second norm's moments", "scaled_add_norm", moments_bytes),
        *second.kept,
        *after("mlp"),
    )


def _inputs_in_fp8(
    kind: LayerKind, device: Device, attention: Block, kept: Sequence[Kept]
) -> tuple[Kept, ...]:
    """Return a layer's kept activations, with FP8 inputs of its linears.

    Two linears of latent attention each keep the first norm's output. The router keeps the second
    norm's output in bf16 and attention keeps its output, so linears with the same input keep
    copies.
    """
    whole = {FIRST_OUTPUT} if kind.latent is not None else set()
    whole |= {SECOND_OUTPUT} if kind.experts is not None else set()
    last = attention.products[-1]
    is_gated = any(line.what == "gated output" for line in attention.kept)
    copied = [] if is_gated else [("attention's output", last.rows * last.inner)]
    if kind.experts is not None and kind.experts.shared_ffn_hidden_size is not None:
        (second,) = (line for line in kept if line.what == SECOND_OUTPUT)
        copied.append((SECOND_OUTPUT, second.bytes / device.element_bytes))
    return kept_in_fp8(device, kept, whole=whole, copied=copied)


def head(
    language: LanguageConfig, device: Device, features: Features, *, padded: bool = True
) -> Counts:
    """Count final norm, logits and loss, and multi-token prediction layers.

    A prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2; Megatron-core
    `multi_token_prediction.py`) is a layer of the last kind with a joining projection, norm, logits
    and loss. The last stage holds a copy of the embedding and exchanges its gradient with the
    first.
    """
    last = _logits(language, device, features, padded=padded)
    if not language.prediction_layers:
        return last
    again = replace(last, parameters=language.hidden_size)
    layer = language_layer(language, language.kinds[-1], device, features)
    prediction = (_joined(language, device, features), layer, again)
    units = (*prediction * language.prediction_layers, last)
    copied = 0 if language.tied_head else language.words_of_rank(device.tensor)
    counts = one_after_another([(f"{place}: ", unit) for place, unit in enumerate(units)])
    return replace(counts, parameters=counts.parameters + copied * language.hidden_size)


def _joined(language: LanguageConfig, device: Device, features: Features) -> Counts:
    """Embeddings of next tokens and hidden states, each normed, concatenated and projected."""
    t, size, tokens = device.tensor, device.element_bytes, features.one("tokens")
    h, own, sequence = language.hidden_size, tokens * device.whole, device.sequence_parallel
    hidden_bytes, moments_bytes = own * h * size, own * FP32_BYTES
    block_bytes = tokens * h * size
    embedded = 1 if sequence else 2  # scattered or all-reduced
    products = in_fp8(device, (Product(tokens, 2 * h, h / t),))
    kept = (
        Kept("token ids", "", tokens * _TOKEN_ID_BYTES),
        Kept("normed", "norm", 2 * (hidden_bytes + moments_bytes)),
        Kept("joined", "cat", 2 * hidden_bytes, for_weights=True),
    )
    return Counts(
        products=products,
        # Embedding; both norms; concatenation.
        moved_bytes=(2 + 2 * 2 + 4) * hidden_bytes,
        back_moved_bytes=(3 + 2 * 3 + 4) * hidden_bytes,
        # The input is gathered, or its gradient all-reduced. The output is always gathered.
        collectives=Collectives(
            forward_bytes=device.sent * block_bytes * (embedded + 1 + (2 if sequence else 0)),
            backward_bytes=device.sent * block_bytes * (1 + 2 if sequence else 2 * 2),
            again_bytes=device.sent * block_bytes * (2 if sequence else 0),
            passes=embedded + 1 + (1 if sequence else 0),
            back_passes=2,
            passes_again=1 if sequence else 0,
            gathered_bytes=2 * block_bytes if sequence else 0.0,
        ),
        kernels=6 + cast_kernels(device, products),
        kept=kept_in_fp8(device, kept, whole=(), copied=()),
        boundary_bytes=hidden_bytes,
        output_bytes=hidden_bytes,
        working=(
            Working(block_bytes + 2 * hidden_bytes, weight=2 * h * h / t),
            Working(
                hidden_bytes,
                weight=language.words_of_rank(t) * h,
                gone=("normed", "joined"),
                of_words=True,
            ),
        ),
        parameters=2 * h + -(-2 * h * h // t),
    )


def _logits(
    language: LanguageConfig, device: Device, features: Features, *, padded: bool
) -> Counts:
    """Final norm over all tokens; logits and loss only for tokens with loss."""
    h, size = language.hidden_size, device.element_bytes
    tokens, loss_tokens = features.one("tokens"), features.one("loss_tokens")
    vocabulary = -(-language.vocab_size // device.tensor)
    if padded:
        vocabulary = language.words_of_rank(device.tensor)
    hidden_bytes = tokens * h * size * device.whole
    gathered_bytes = tokens * h * size
    logits_bytes, loss_bytes = loss_tokens * vocabulary * size, loss_tokens * h * size
    # Backward all-reduces the gradient of loss tokens, or the input is gathered, its gradient
    # scattered, and the input gathered again.
    collectives = Collectives(backward_bytes=2 * device.sent * loss_bytes, back_passes=2)
    if device.sequence_parallel:
        sent_bytes = device.sent * gathered_bytes
        collectives = Collectives(
            forward_bytes=sent_bytes,
            backward_bytes=sent_bytes,
            again_bytes=sent_bytes,
            passes=1,
            back_passes=1,
            passes_again=1,
        )
    loss_moved, back_loss_moved = (1, 2) if device.runtime.fused_loss else _UNFUSED_LOSS_MOVED
    loss_bytes_moved = logits_bytes * device.loss_slowdown
    return Counts(
        products=(Product(loss_tokens, h, vocabulary, given="what carries loss"),),
        # Norm; one read of the logits; in backward a read, and a write of their gradient.
        moved_bytes=2 * hidden_bytes + loss_moved * loss_bytes_moved,
        back_moved_bytes=3 * hidden_bytes + back_loss_moved * loss_bytes_moved,
        collectives=collectives,
        kernels=10,
        kept=(
            Kept("input", "", hidden_bytes),
            Kept("norm's moments", "norm", hidden_bytes / h / size * FP32_BYTES),
            Kept("what carries loss", "index_select", loss_bytes, for_weights=True),
            Kept("logits", "head", logits_bytes),
        ),
        boundary_bytes=hidden_bytes,
        output_bytes=0 * tokens,
        working=(
            # Gradient of the logits in their dtype; of the weight after the logits are freed; of
            # all positions.
            Working(logits_bytes, beside_logits=True),
            Working(logits_bytes + loss_bytes, weight=vocabulary * h, gone=("logits",)),
            Working(gathered_bytes + loss_bytes, gone=("logits", "what carries loss"), after=1),
        ),
        parameters=h * (1 + language.norm_bias) + vocabulary * h,
    )
