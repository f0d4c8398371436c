"""The language model's embedding, layers and head (h hidden, t tensor size)."""

from dataclasses import replace

import numpy as np

from omnibal.cost.attention_costs import attention_block
from omnibal.cost.device_rates import Device
from omnibal.cost.feed_forward import feed_forward
from omnibal.cost.kernels import FP32_BYTES, KernelPass, element_wise, in_module, product
from omnibal.cost.linears import with_fp8
from omnibal.cost.work import (
    FIRST_OUTPUT,
    SECOND_OUTPUT,
    CountedUnit,
    Kept,
    Working,
    chain_units,
    recompute_modules,
)
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.layer_kinds import LayerKind

_TOKEN_ID_BYTES = 8  # torch int64
# Reads and writes of bf16 logits in forward and backward by Megatron-core's unfused loss
# (`tensor_parallel/cross_entropy.py`); fp32 passes count twice.
_UNFUSED_LOSS_MOVED = (19, 7)


def language_embed(model: ModelConfig, device: Device) -> CountedUnit:
    """Return the word embedding and the insertion of encoder features."""
    h, size, tokens = model.language.hidden_size, device.element_bytes, device.features["tokens"]
    item_tokens = [
        device.features[tower.feature] * tower.tokens_per_item for tower in model.encoders.values()
    ]
    encoded_bytes = np.sum([0 * tokens, *item_tokens], axis=0) * h * size
    text_bytes = tokens * h * size
    ids_bytes = tokens * _TOKEN_ID_BYTES
    both_bytes = encoded_bytes + text_bytes
    exchange = device.rings("forward", 2 * text_bytes, 2)  # all-reduced
    if device.sequence_parallel:  # scattered, with a gather in backward
        exchange = device.rings("forward", text_bytes) + device.rings("backward", text_bytes)
    words = model.language.words_of_rank(device.tensor)
    # Learned positions are replicated on tensor-parallel ranks, looked up and added.
    positions = (model.language.max_positions or 0) * (model.language.positions == "learned")
    added_bytes = text_bytes * bool(positions)
    return CountedUnit(
        kernels=(
            *element_wise(
                2 * both_bytes + 5 * added_bytes, 3 * both_bytes + 2 * added_bytes, launches=6
            ),
            *exchange,
        ),
        # Backward needs only the ids, for the positions of encoder features.
        kept=(Kept("token ids", "", ids_bytes),),
        boundary_bytes=ids_bytes,
        output_bytes=text_bytes * device.sequence_share,
        working=(Working(both_bytes, weight=words * h, of_words=True),),
        other_parameters=(words + positions) * h,
    )


def language_layer(language: LanguageConfig, kind: LayerKind, device: Device) -> CountedUnit:
    """Return a language layer: norms, attention and feed-forward of a kind."""
    size, whole, tokens = device.element_bytes, device.sequence_share, device.features["tokens"]
    h, post_norms = language.hidden_size, 2 if language.post_norms else 0
    first = attention_block(language, kind, device)
    second = feed_forward(language, kind, device)
    part_bytes, moments_bytes = tokens * h * whole * size, tokens * whole * FP32_BYTES
    products, norm, sum_and_norm = len(second.products), "norm", "scaled_add_norm"
    of_norms, later = ("layernorm",), (SECOND_OUTPUT, *(line.what for line in second.kept))

    def after(block: str) -> tuple[Kept, ...]:
        """Return activations kept by a norm after a block."""
        output = Kept(f"{block}'s output", block, part_bytes)
        both = output, Kept(f"moments of {block}'s norm", norm, moments_bytes)
        return both if language.post_norms else ()

    layer = CountedUnit(
        kernels=(
            *first.kernels,
            *second.kernels,
            # Fused kernels between blocks: norm; add and norm; add. Backward also reads norm inputs
            # and the residual's gradient. Norms after blocks read and write one tensor, in backward
            # two.
            *in_module("layernorm", element_wise(2 * 2 * part_bytes, 2 * 4 * part_bytes, 2)),
            *element_wise((2 + 3) * part_bytes, 0 * part_bytes),
            *element_wise(2 * post_norms * part_bytes, 3 * post_norms * part_bytes, post_norms),
        ),
        kept=(
            Kept("input", "", part_bytes),
            Kept(FIRST_OUTPUT, norm, part_bytes, for_weights=True, modules=of_norms),
            Kept("first norm's moments", norm, moments_bytes),
            *(*first.kept, *after("self_attention")),
            Kept("middle residual", sum_and_norm, part_bytes),
            Kept(SECOND_OUTPUT, sum_and_norm, part_bytes, for_weights=True, modules=of_norms),
            Kept("second norm's moments", sum_and_norm, moments_bytes),
            *(*second.kept, *after("mlp")),
        ),
        boundary_bytes=part_bytes,
        output_bytes=part_bytes,
        working=(
            *second.working,
            *(moment.before_later_units(later, products) for moment in first.working),
        ),
        # Between the blocks: gradients of the norm's output, of the sum, and of the layer's output
        # unless shared with the second product.
        late_working=(
            Working(
                (3 if device.sequence_parallel or post_norms else 2) * part_bytes,
                freed=later,
                finished=products,
            ),
        ),
        gathered_bytes=np.maximum(first.gathered_bytes, second.gathered_bytes),
        other_parameters=first.other_parameters
        + second.other_parameters
        + (2 + post_norms) * h * (1 + language.norm_bias),
        expert_biases=second.expert_biases,
    )
    # Both down projections of latent attention keep the first norm's output. The router keeps the
    # second norm's output in bf16, and attention its own output, so FP8 linears keep copies.
    shared = {FIRST_OUTPUT} if kind.latent is not None else set()
    shared |= {SECOND_OUTPUT} if kind.experts is not None else set()
    last = first.products[-1]
    is_gated = any(line.what == "gated output" for line in first.kept)
    copied = [] if is_gated else [("attention's output", last.rows * last.inner)]
    if kind.experts is not None and kind.experts.shared_ffn_hidden_size is not None:
        copied.append((SECOND_OUTPUT, part_bytes / size))
    layer = with_fp8(device, layer, whole=shared, copied=copied)
    return recompute_modules(layer, device.runtime.recomputed)


def head(language: LanguageConfig, device: Device) -> CountedUnit:
    """Return final norm, logits and loss, and multi-token prediction layers.

    A prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2; Megatron-core
    `multi_token_prediction.py`) is a layer of the last kind with a joining projection, norm, logits
    and loss. The last stage holds a copy of the embedding, whose gradient is all-reduced with the
    first stage's.
    """
    last = _logits(language, device)
    if not language.prediction_layers:
        return last
    h, number = language.hidden_size, language.prediction_layers
    layer = language_layer(language, language.kinds[-1], device)
    units = (*(_join_embeddings(language, device), layer, last) * number, last)
    unit = chain_units([(f"{place}: ", unit) for place, unit in enumerate(units)])
    # Predictions share the head's weights.
    words = language.words_of_rank(device.tensor)
    copied = -number * last.products[0].outer + (0 if language.tied_head else words)
    # The gradient of the head's weight waits for that of its other use; their sum is a copy.
    of_loss = {line.what for line in last.kept} - {"input", "norm's moments"}
    freed = tuple(line.what for line in unit.kept if line.what.partition(": ")[2] in of_loss)
    working = (
        *(replace(moment, weight=moment.weight + words * h) for moment in unit.working),
        Working(layer.output_bytes, weight=3 * words * h, freed=freed),
    )
    parameters = unit.other_parameters + copied * h
    return replace(unit, working=working, other_parameters=parameters)


def _join_embeddings(language: LanguageConfig, device: Device) -> CountedUnit:
    """Return the projection of concatenated embeddings of next tokens and hidden states."""
    t, size, tokens = device.tensor, device.element_bytes, device.features["tokens"]
    h, sequence = language.hidden_size, device.sequence_parallel
    own = tokens * device.sequence_share
    hidden_bytes, moments_bytes = own * h * size, own * FP32_BYTES
    block_bytes = tokens * h * size
    embedded = 1 if sequence else 2  # scattered or all-reduced
    # The input is gathered, or its gradient all-reduced. The output is always gathered.
    forward_bytes = (embedded + 1 + 2 * sequence) * block_bytes
    backward_bytes = (3 if sequence else 4) * block_bytes
    joined = CountedUnit(
        kernels=(
            *product(tokens, 2 * h, h / t),
            # Embedding; both norms; concatenation.
            *element_wise(
                (2 + 2 * 2 + 4) * hidden_bytes, (3 + 2 * 3 + 4) * hidden_bytes, launches=5
            ),
            *device.rings("forward", forward_bytes, embedded + 1 + sequence, launches=2 + sequence),
            *device.rings("backward", backward_bytes, 2, launches=1 + sequence),
            *(device.rings("weight_gradient", 2 * block_bytes) if sequence else ()),
        ),
        kept=(
            Kept("token ids", "", tokens * _TOKEN_ID_BYTES),
            Kept("normed", "norm", 2 * (hidden_bytes + moments_bytes)),
            Kept("joined", "cat", 2 * hidden_bytes, for_weights=True),
        ),
        gathered_bytes=device.sequence_parallel * 2 * block_bytes,
        boundary_bytes=hidden_bytes,
        output_bytes=hidden_bytes,
        working=(
            Working(block_bytes + 2 * hidden_bytes, weight=2 * h * h / t),
            Working(
                hidden_bytes,
                weight=language.words_of_rank(t) * h,
                freed=("normed", "joined"),
                of_words=True,
            ),
        ),
        other_parameters=2 * h,
    )
    return with_fp8(device, joined)


def _logits(language: LanguageConfig, device: Device) -> CountedUnit:
    """Return the final norm over all tokens, and logits and loss of tokens with loss."""
    h, size = language.hidden_size, device.element_bytes
    tokens, loss_tokens = device.features["tokens"], device.features["loss_tokens"]
    vocabulary = -(-language.vocab_size // device.tensor)
    if device.pads:
        vocabulary = language.words_of_rank(device.tensor)
    hidden_bytes = tokens * h * size * device.sequence_share
    gathered_bytes = tokens * h * size
    logits_bytes, loss_bytes = loss_tokens * vocabulary * size, loss_tokens * h * size
    # Without sequence parallelism backward all-reduces the gradient of loss tokens. With it, the
    # input is gathered, its gradient scattered, and the input gathered again.
    exchange = device.rings("backward", 2 * loss_bytes, 2)
    if device.sequence_parallel:
        passes: tuple[KernelPass, ...] = ("forward", "backward", "weight_gradient")
        exchange = tuple(ring for phase in passes for ring in device.rings(phase, gathered_bytes))
    loss_moved, back_loss_moved = (1, 2) if device.runtime.fused_loss else _UNFUSED_LOSS_MOVED
    return CountedUnit(
        kernels=(
            *product(loss_tokens, h, vocabulary, given="hidden states with loss"),
            *element_wise(2 * hidden_bytes, 3 * hidden_bytes, launches=8),
            # One read of the logits; in backward a read, and a write of their gradient.
            *element_wise(loss_moved * logits_bytes, back_loss_moved * logits_bytes, kind="loss"),
            *exchange,
        ),
        kept=(
            Kept("input", "", hidden_bytes),
            Kept("norm's moments", "norm", hidden_bytes / h / size * FP32_BYTES),
            Kept("hidden states with loss", "index_select", loss_bytes, for_weights=True),
            Kept("logits", "head", device.runtime.kept_logits * logits_bytes),
        ),
        boundary_bytes=hidden_bytes,
        output_bytes=0 * tokens,
        working=(
            # Gradient of the logits, in their dtype; of the weight, after the logits are freed; of
            # the hidden states of all positions.
            Working(logits_bytes, has_logits_gradient=True),
            Working(logits_bytes + loss_bytes, weight=vocabulary * h, freed=("logits",)),
            Working(
                gathered_bytes + loss_bytes, freed=("logits", "hidden states with loss"), finished=1
            ),
        ),
        other_parameters=h * (1 + language.norm_bias),
    )
