"""Counts of every unit kind by hand: kernels' reads and writes, kept tensors, and the working set
at each moment of backward, in elements of bf16 (2 bytes) and fp32. Sizes differ, and 3
tensor-parallel ranks divide few of them, so that a wrong operator changes the number."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omnibal.cost.device_rates import Device
from omnibal.cost.images import images_embed, images_layer, images_projector
from omnibal.cost.kernels import EXCHANGES, KernelPass, unit_vectors
from omnibal.cost.language import head, language_embed, language_layer
from omnibal.cost.linears import with_adapters
from omnibal.cost.shaped_rates import LinearTime
from omnibal.cost.towers import clips_embed, encoder_layer, encoder_projector, tiles_embed
from omnibal.cost.work import CountedUnit
from omnibal.model.adapter_settings import AdapterConfig, adapted_linears
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.encoders import ClipsEncoder, EncoderLayers, ImagesEncoder, TilesEncoder
from omnibal.model.fp8 import TRAINED_FP8
from omnibal.model.layer_kinds import ExpertsConfig, LatentAttention, LayerKind, LinearAttention
from omnibal.model.runtime import RuntimeOptions
from omnibal.model.units import unit_kinds

pytestmark = pytest.mark.quick

IMAGES = ("tiles", "clips", "image_tokens", "squared_image_tokens")
FEATURES = unit_vectors(("fixed", *IMAGES, "tokens", "squared_tokens", "loss_tokens"))
SIZES = np.array([1.0, 3, 5, 7, 29, 11, 61, 6])
"""Feature values of a micro-batch."""
TILES, CLIPS, CELLS, TOKENS, LOSS = 3, 5, 7, 11, 6
PASSES: tuple[KernelPass, ...] = ("forward", "backward", "weight_gradient")
MOVING = ("low_rank", "element_wise", "permutation", "loss")
SLOW = {"element_wise": 1.0, "permutation": 1 / 1.25, "loss": 1 / 1.5}
NOTHING = (0, [], set(), (), (0, 0, 0))


def device(tensor: int = 3, sequence_parallel: bool = False, **changes: Any) -> Device:
    """Return a bf16 device. Its rates do not matter."""
    moved, products = dict.fromkeys(MOVING, 1.0), {None: 1.0, "fp32": 1.0, "fp8": 1.0}
    line, sizes = LinearTime(fixed_ms=1.0, each_ms=1.0), {"tensor": tensor, "element_bytes": 2}
    sizes |= {"ring": line, "all_to_all": line, "product_times": None, "kernel_ms": 1.0}
    sizes |= {"flops_per_ms": products, "bytes_per_ms": moved, "features": FEATURES}
    return Device(**sizes | {"sequence_parallel": sequence_parallel} | changes)


def total(value: np.ndarray | float) -> float:
    """Return a value's sum over the micro-batch's features."""
    return float(np.sum(value * SIZES))


def count_unit(unit: CountedUnit, own: Device | None = None) -> dict[str, Any]:
    """Return all counts of the micro-batch; `own` sets the relative time per byte."""
    own = own or device()
    moved, sent, passes = (dict.fromkeys((*PASSES, "repeated"), 0.0) for _ in range(3))
    for one in unit.kernels:
        if one.kind == "ring":
            sent[one.phase] += total(one.bytes)
            passes[one.phase] += one.passes
        elif one.kind in MOVING:
            moved[one.phase] += total(own.ms(one)) - one.launches
    exchanges = [one for one in unit.kernels if one.kind == "all_to_all"]
    return {
        "products": [
            (total(one.rows), one.inner, one.outer, *([one.groups] if one.groups > 1 else []))
            for one in unit.products
        ],
        "attention": sum(total(one.flops) for one in unit.forward if "attention" in one.kind),
        "forward": moved["forward"],
        "backward": moved["backward"],
        "sent": sent["forward"],
        "back sent": sent["backward"],
        "again sent": sent["weight_gradient"],
        "passes": tuple(passes[each] for each in PASSES),
        "exchanged": [total(one.bytes) for one in exchanges],
        "exchanges": tuple(one.launches for one in exchanges),
        "waits": sum(one.waits for one in unit.kernels),
        "kernels": sum(one.launches for one in unit.forward if one.kind not in EXCHANGES),
        "kept": {line.what: total(line.bytes) for line in unit.kept},
        "for weights": {line.what for line in unit.kept if line.for_weights},
        "input": total(unit.boundary_bytes),
        "output": total(unit.output_bytes),
        "working": [
            (total(unit.working_bytes(each, trained=True)), each.weight) for each in unit.working
        ],
        "forward working": [total(each.bytes) for each in unit.forward_working],
        "passing": total(unit.passing_bytes),
        "shared": total(unit.gathered_bytes),
        "parameters": unit.parameters,
        "of experts": unit.expert_parameters,
    }


def check(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare every number; names absent from `expected` must be zero or empty."""
    assert expected.keys() <= found.keys()
    for name, value in found.items():
        wanted = expected.get(name)
        if wanted is None:
            assert value in NOTHING, name
        elif isinstance(value, list):
            assert len(value) == len(wanted), name
            for here, there in zip(value, wanted, strict=True):
                assert here == pytest.approx(there), name
        else:
            assert value == (wanted if isinstance(value, set) else pytest.approx(wanted)), name


def check_added(
    more: Mapping[str, Any], less: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    """Compare the differences of two units' counts, and the additional kept tensors."""
    for name, value in expected.items():
        if name == "kept":
            assert more[name] == pytest.approx({**less[name], **value})
        else:
            assert more[name] - less[name] == pytest.approx(value), name


H, A, F = 40, 60, 70
"""Hidden size, width of 4 heads padded to 6 (of 10 each) for 3 ranks, and feed-forward width."""
ENCODER: dict[str, Any] = {"layers": 2, "hidden_size": H, "heads": 4, "ffn_hidden_size": F}
ENCODER |= {"normalization": "LayerNorm", "qkv_bias": True, "qk_norm": True}
PLAIN = {"normalization": "RMSNorm", "qkv_bias": False, "qk_norm": False}
TILES_TOWER = TilesEncoder(**ENCODER, image_size=8, patch_size=2, layer_scale_init=0.1)
CLIPS_TOWER = ClipsEncoder(**ENCODER | PLAIN, frames=14, mel_bins=9, positions_per_token=7)
NORMED_CLIPS = ClipsEncoder(**ENCODER, frames=14, positions_per_token=7)
WIDTH = 50
"""Hidden size of the language model."""
LANGUAGE = LanguageConfig(
    layers=2, hidden_size=WIDTH, heads=5, kv_heads=1, ffn_hidden_size=F, vocab_size=1000
)


def images_tower(**changes: Any) -> ImagesEncoder:
    """Return an encoder with four patches of 5 x 5 pixels and 2 frames per cell."""
    sizes = {"patch_size": 5, "frames_per_patch": 2, "learned_positions": 19}
    return ImagesEncoder(**ENCODER | {"qk_norm": False} | sizes | changes)


WINDOWED = images_tower(window_pixels=30)
GATED = images_tower(
    window_pixels=30, gated=True, qk_norm=True, bias=False, normalization="RMSNorm"
)


def model_with(**encoders: Any) -> ModelConfig:
    return ModelConfig(name="by hand", encoders=encoders, language=LANGUAGE)


def round_up(number: int, parts: int) -> int:
    """Return the largest share of `number` parameters divided into `parts`."""
    return len(range(0, number, parts))


def test_embedding_of_tiles() -> None:
    """Prevents patches, positions or the class token without time or memory."""
    pixels, out = TILES * 16 * 12, TILES * 17 * H
    expected = {
        "products": [(TILES * 16, 12, H)],
        # Read pixels, write patches; read them again with positions, and write the sum.
        "forward": 2 * (pixels + out + out + out),
        # Gradients of positions and class token.
        "backward": 2 * (out + out),
        "kernels": 5,
        "kept": {"pixels by patch": 2 * pixels},
        "for weights": {"pixels by patch"},
        "input": 2 * pixels,
        "output": 2 * out,
        "working": [(2 * out, 17 * H), (2 * out, 12 * H)],
        # Pixels in bf16, patches, product, product with class token, sum.
        "forward working": [2 * (pixels + pixels + out + out + out)],
        "passing": 4 * pixels,
        # Convolution and its bias; class token; positions.
        "parameters": 12 * H + H + H + 17 * H,
    }
    check(count_unit(tiles_embed(TILES_TOWER, device())), expected)


def test_embedding_of_clips() -> None:
    """Prevents convolutions, GELUs or the fp32 frames without time or memory."""
    read, middle, out = CLIPS * 14 * 9, CLIPS * 14 * H, CLIPS * 7 * H
    expected = {
        "products": [(CLIPS * 14, 3 * 9, H), (CLIPS * 7, 3 * H, H)],
        # Cast to bf16; GELU; GELU, transposed, positions added.
        "forward": (4 + 2) * read + 2 * (2 * middle) + 2 * (2 * out + 2 * out + 2 * out),
        # Each GELU reads its input and gradient and writes a gradient.
        "backward": 2 * (3 * middle + 3 * out),
        "kernels": 7,
        "kept": {
            "frames": 2 * read,
            "into GELU": 2 * middle,
            "out of GELU": 2 * middle,
            "into the second GELU": 2 * out,
        },
        "for weights": {"frames", "out of GELU"},
        "input": 2 * read,
        "output": 2 * out,
        # Second convolution: input gradient and weight, GELU's input freed. First GELU: both
        # gradients, its output freed.
        "working": [(2 * (middle + out - out), 3 * H * H), (2 * (2 * middle - out - middle), 0)],
        "forward working": [2 * (middle + middle), 2 * (read + middle)],
        "passing": 4 * read,
        "parameters": 3 * 9 * H + H + 3 * H * H + H,
    }
    check(count_unit(clips_embed(CLIPS_TOWER, device())), expected)


@pytest.mark.parametrize("learned", [0, 19])
@pytest.mark.parametrize("normed", [False, True])
def test_embedding_of_images(learned: int, normed: bool) -> None:
    """Prevents interpolating absent position embeddings, and norms without kept tensors."""
    tower = images_tower(
        learned_positions=learned, embed_norm=normed, class_token=normed, patch_bias=not normed
    )
    rows, values = CELLS * 4, 3 * 2 * 5 * 5
    pixels, out = rows * values, rows * H
    wide = 4 * out if learned else 0
    kept = {"pixels by patch": 2 * pixels}
    if learned:  # indices, weights and patches of four neighbours; two more per patch
        kept["neighbours"] = rows * (4 * (8 + 4 + 8) + 2 * 8)
    if normed:
        kept |= {"norm's input": 2 * out, "norm's moments": rows * 2 * 4}
    expected = {
        "products": [(rows, values, H)],
        # Pixels, patches; four neighbours, their sum, a cast and an addition; norm.
        "forward": 2 * (pixels + out + (2 * out if normed else 0))
        + (6 * wide + 2 * 4 * out if learned else 0),
        "backward": 2 * (3 * out + (out if normed else 0)) + 6 * wide,
        "kernels": 5,
        "kept": kept,
        "for weights": {"pixels by patch"},
        "input": 2 * pixels,
        "output": 2 * out,
        # The gradient of learned positions is fp32, twice as large.
        "working": [(2 * out + wide, 2 * learned * H)] * bool(learned) + [(2 * out, values * H)],
        "forward working": [2 * (pixels + 3 * out), 2 * (pixels + 2 * out) + wide],
        "passing": 4 * pixels,
        # Bias; norm with two vectors, class token and half a head's angles.
        "parameters": H * values + H * learned + (2 * H + H + 5 if normed else H),
    }
    check(count_unit(images_embed(tower, device())), expected)


OF_MIXTURE = {"scores and choice", "chosen weights and places", "routed tokens", "gate and value"}
OF_MIXTURE |= {"weights of rows", "weighted product", "shared gate and value", "shared product"}
Elements = tuple[int, int, int]
"""Elements that kernels read and write per position: of hidden size, heads and feed-forward."""
OF_TILES, OF_CLIPS, OF_CELLS = (TILES * 17, TILES * 17**2), (CLIPS * 7, CLIPS * 7**2), CELLS * 4
"""Positions, and attended pairs of positions."""


@pytest.mark.parametrize(
    ("tower", "t", "width", "rows", "pairs", "moved", "back"),
    [
        # Norm; sum and its norm, both written; last sum: 2 + 4 + 3 of H. GELU: 2 of F, and 3
        # backward with its input; SwiGLU: 3 and 5. A norm's backward reads its input twice, its
        # gradient and the residual's, and writes one.
        # // Norms of q and k, 4, are read again for their sums, 2; backward reads the inputs of
        # each. A scale's input, gradient and result.
        (TILES_TOWER, 3, A, *OF_TILES, (9, 4 + 2, 2), (2 * 4 + 2 * 3, 8 + 4, 3)),
        # Gradients of q, k and v are concatenated, 6; heads are padded only on request.
        (CLIPS_TOWER, 3, H, *OF_CLIPS, (9, 0, 2), (8 + 2, 6, 3)),
        # A single rank exchanges no sums.
        (NORMED_CLIPS, 1, H, *OF_CLIPS, (9, 4, 2), (8 + 2, 8, 3)),
        # Rotation, after norms, reads and writes q and k; gradients of q, k and v are concatenated:
        # 2 more. Windows are of 3 x 3 cells.
        (WINDOWED, 3, A, OF_CELLS, OF_CELLS * 36, (9, 4, 2), (8, 4 + 2, 3)),
        (GATED, 3, A, OF_CELLS, OF_CELLS * 36, (9, 8, 3), (8, 8 + 2, 5)),
        # Each cell's 4 positions attend to all cells of the image.
        (images_tower(), 3, H, OF_CELLS, 29 * 4**2, (9, 4, 2), (8, 4 + 2, 3)),
    ],
    ids=["tiles", "plain clips", "normed clips", "windows", "gated", "whole images"],
)
def test_layer_of_an_encoder(
    tower: EncoderLayers, t: int, width: int, rows: int, pairs: int, moved: Elements, back: Elements
) -> None:
    """Prevents padded heads, q/k norms, layer scales, gates or windows missing from some counts, or
    counted for towers without them."""
    images = isinstance(tower, ImagesEncoder)
    vectors = 1 if tower.normalization == "RMSNorm" else 2
    has_bias, into = not images or tower.bias, 2 * F if images and tower.gated else F
    # A layer scale keeps its input until its gradient is computed.
    scaled = H if tower.layer_scale_init else 0
    kept = {
        "input": 2 * H,
        "first norm's output": 2 * H,
        "first norm's moments": 4 * vectors,
        "rotated q and k, and v" if images else "q, k and v": 2 * 3 * width / t,
        "attention's output and log-sum-exp": 2 * width / t + 4 * (width / 10) / t,
        "middle residual": 2 * H,
        "second norm's output": 2 * H,
        "second norm's moments": 4 * vectors,
        "into the activation": 2 * into / t,
        "out of the activation": 2 * F / t,
    }
    if tower.qk_norm:
        kept["q and k before norms" if images else "normed q and k"] = 2 * 2 * width / t + 2 * 4
    if scaled:
        kept["attention's block, for its layer scale"] = 2 * H
        kept["feed-forward's, for its layer scale"] = 2 * H
    # Two all-reduces of two passes, each of two thirds of the data.
    sent = 2 * 2 * rows * 2 * H * (t - 1) / t
    working = [
        # Gradients of residual and block before its scale; operations free their tensors.
        *([(H + H, 0)] if scaled else []),
        (H + scaled + F / t - scaled, H * F / t),
        (H + F / t + into / t - scaled - F / t, 0),
        (2 * H + into / t - scaled - F / t - into / t, H * into / t),
    ]
    weights = 4 * H * width + (into + F) * H + (into if has_bias else 0)
    weights += (3 * width if tower.qkv_bias else 0) + (2 * width if tower.qk_norm else 0)
    expected = {
        "products": [
            *((rows, H, 3 * width / t), (rows, width / t, H)),
            *((rows, H, into / t), (rows, F / t, H)),
        ],
        "attention": 4 * pairs * width / t,
        "forward": rows * 2 * (moved[0] * H + (moved[1] * width + moved[2] * F) / t),
        "backward": rows * 2 * (back[0] * H + (back[1] * width + back[2] * F) / t),
        "sent": sent,
        "back sent": sent,
        "passes": (4, 4, 0) if t > 1 else (0, 0, 0),
        "kernels": 12,
        "kept": {what: rows * each for what, each in kept.items()},
        "for weights": {"first norm's output", "second norm's output", "out of the activation"},
        "input": rows * 2 * H,
        "output": rows * 2 * H,
        "working": [(rows * 2 * there, weight) for there, weight in working],
        "forward working": [
            rows * 2 * 6 * H,
            rows * 2 * (3 * H + 2 * 3 * width / t),
            rows * 2 * (5 * H + (F + into) / t),
        ],
        # Norms, scales and two biases replicated; other weights divided.
        "parameters": 2 * vectors * H
        + (2 * H if scaled else 0)
        + (2 * H if has_bias else 0)
        + round_up(weights, t),
    }
    model, own = model_with(vision=tower), device(t, pads=width == A)
    kind = next(kind for kind in unit_kinds(model) if kind.is_layer)
    count = images_layer if images else encoder_layer
    check(count_unit(count(model, tower, kind, own)), expected)


def two_products(
    rows, wide, inner, norm, moments, first="last layer's output", normed="norm's output", read=None
) -> dict[str, Any]:
    """Return counts of a norm and two products on 3 ranks; `read` elements are folded first."""
    t, folded, into, out = 3, rows * wide, rows * inner / 3, rows * WIDTH
    own = folded if read is None else read
    kept = {first: 2 * folded, normed: 2 * folded, "norm's moments": 4 * moments}
    return {
        "products": [(rows, wide, inner / t), (rows, inner / t, WIDTH)],
        # Fold, norm; GELU; bias.
        "forward": 2 * (2 * (read or 0) + 2 * own + 2 * into + 2 * out),
        "backward": 2 * (2 * (read or 0) + 3 * own + 3 * into + out),
        "sent": 2 * 2 / 3 * 2 * out,
        "back sent": 2 * 2 / 3 * 2 * folded,
        "passes": (2, 2, 0),
        "kernels": 8,
        "kept": {**kept, "into GELU": 2 * into, "out of GELU": 2 * into},
        "for weights": {normed, "out of GELU"},
        "input": 2 * own,
        "output": 2 * out,
        "working": [
            (2 * (out + into), inner * WIDTH / t),
            (2 * (folded + into - 2 * into), wide * inner / t),
            (2 * (folded + own - 2 * into - folded), 0),
        ],
        "forward working": [2 * (2 * own + (2 * into if read is None else 2 * folded + into))],
        "parameters": norm + WIDTH + round_up(wide * inner + inner + inner * WIDTH, t),
    }


OF_CLIPS_TOKENS = two_products(
    *(CLIPS, 7 * H, WIDTH, H, CLIPS * 7), normed="stacked positions", read=CLIPS * 7 * H
)
"""7 positions, each normed separately, make a token."""
OF_TILES_TOKENS = two_products(
    *(TILES * 4, 4 * H, WIDTH, 2 * 4 * H, TILES * 4 * 2, "shuffled input"), read=TILES * 17 * H
)
"""The 16 patches of 17 positions make 4 tokens. The class token is dropped."""


def pooled_cells() -> dict[str, Any]:
    read, pooled_cells, out = CELLS * 4 * H, CELLS * H, CELLS * WIDTH
    return {
        "products": [(CELLS, H, WIDTH)],
        # Average, norm.
        "forward": 2 * (read + pooled_cells + 2 * pooled_cells),
        "backward": 2 * (3 * pooled_cells + pooled_cells + read),
        "kernels": 4,
        "kept": {
            "averaged cells": 2 * pooled_cells,
            "norm's moments": CELLS * 4,
            "norm's output": 2 * pooled_cells,
        },
        "for weights": {"norm's output"},
        "input": 2 * read,
        "output": 2 * out,
        "working": [(2 * (out + pooled_cells + read), H * WIDTH)],
        "forward working": [2 * (read + 2 * pooled_cells)],
        "parameters": H + H * WIDTH,
    }


def gated() -> dict[str, Any]:
    """Return counts: the first product and norm are replicated, SwiGLU's two products divided."""
    t, wide, inner = 3, 4 * H, CELLS * 23 / 3
    read, out = CELLS * wide, CELLS * WIDTH
    return {
        "products": [
            *((CELLS, wide, WIDTH), (CELLS, WIDTH, WIDTH)),
            *((CELLS, WIDTH, 2 * 23 / t), (CELLS, 23 / t, WIDTH)),
        ],
        # Norm, GELU, SwiGLU.
        "forward": 2 * (2 * out + 2 * out + 3 * inner),
        "backward": 2 * (3 * out + 3 * out + 5 * inner),
        "sent": 2 * 2 / 3 * 2 * out,
        "back sent": 2 * 2 / 3 * 2 * out,
        "passes": (2, 2, 0),
        "kernels": 10,
        "kept": {
            "last layer's output": 2 * read,
            "folded cells": 2 * out,
            "norm's input": 2 * out,
            "norm's moments": CELLS * 2 * 4,
            "into GELU": 2 * out,
            "out of GELU": 2 * out,
            "gate and value": 2 * 2 * inner,
            "their product": 2 * inner,
        },
        "for weights": {"last layer's output", "folded cells", "out of GELU", "their product"},
        "input": 2 * read,
        "output": 2 * out,
        "working": [
            (2 * (out + inner), 23 * WIDTH / t),
            (2 * (out + 3 * inner - inner), 0),
            (2 * (read + 2 * out - 3 * inner), wide * WIDTH),
        ],
        "forward working": [2 * (read + 2 * out + 3 * inner)],
        # Bias of the first product; norm with two vectors.
        "parameters": wide * WIDTH + WIDTH + WIDTH**2 + 2 * WIDTH + round_up(3 * 23 * WIDTH, t),
    }


def projector_of(tower: EncoderLayers) -> dict[str, Any]:
    is_images = isinstance(tower, ImagesEncoder)
    model = model_with(**{"audio" if isinstance(tower, ClipsEncoder) else "vision": tower})
    count = images_projector if is_images else encoder_projector
    return count_unit(count(tower, model, device()))


@pytest.mark.parametrize(
    ("tower", "expected"),
    [
        (TILES_TOWER, OF_TILES_TOKENS),
        (CLIPS_TOWER, OF_CLIPS_TOKENS),
        # The positions of a cell are contiguous.
        (images_tower(), two_products(CELLS, 4 * H, 4 * H, 2 * H, CELLS * 4 * 2)),
        (
            images_tower(projector_hidden_size=17),
            two_products(CELLS, 4 * H, 17, 2 * H, CELLS * 4 * 2),
        ),
        (images_tower(projector="pooled"), pooled_cells()),
        (images_tower(projector="gated", projector_hidden_size=23), gated()),
    ],
    ids=["tiles", "clips", "images", "of a width", "pooled", "gated"],
)
def test_projectors(tower: EncoderLayers, expected: dict[str, Any]) -> None:
    """Prevents a norm over the wrong positions, a wrong width, averaged cells with their patches'
    memory, and divided products that should be replicated."""
    check(projector_of(tower), expected)


def test_what_stands_around_a_projector() -> None:
    """Prevents reordering features of a tower without windows, and a final norm without time,
    memory or parameters."""
    plain, windowed = projector_of(images_tower()), projector_of(WINDOWED)
    out, read = 2 * CELLS * WIDTH, 2 * CELLS * 4 * H
    order = {"forward": 2 * out, "backward": 2 * out, "kernels": 1, "parameters": 0}
    check_added(windowed, plain, order | {"kept": {"order of cells": CELLS * 8}})
    assert windowed["working"] == [(2 * out, 0), *plain["working"]]
    kept = {"input": read, "last norm's moments": CELLS * 4 * 2 * 4}
    norm = {"forward": 2 * read, "backward": 3 * read, "kernels": 1, "parameters": 2 * H}
    check_added(projector_of(images_tower(final_norm=True)), plain, norm | {"kept": kept})


def test_layer_with_a_deepstack_projector() -> None:
    """Prevents a deepstack projector, or the sum of a layer output's two gradients, left out."""
    tower = images_tower(deepstack_layers=(0,))
    model = model_with(vision=tower)
    kinds = {
        kind.has_deepstack: kind
        for kind in unit_kinds(model)
        if kind.is_layer and kind.tower == "vision"
    }
    layer, both = (
        count_unit(images_layer(model, tower, kinds[has_it], device())) for has_it in (False, True)
    )
    # Its norm is over folded cells of width 4 H.
    projector = two_products(CELLS, 4 * H, 4 * H, 2 * 4 * H, CELLS * 2)
    output = CELLS * 4 * 2 * H
    # The projector's input is the next layer's kept input, so this unit does not count it.
    of_projector = {
        f"deepstack: {what}": each
        for what, each in projector["kept"].items()
        if what != "last layer's output"
    }
    let_go = sum(of_projector.values())
    names = ("forward", "sent", "back sent", "parameters", "products")
    expected = {
        **{name: layer[name] + projector[name] for name in names},
        # Gradients from the next layer and the projector are added.
        "backward": layer["backward"] + projector["backward"] + 3 * output,
        "kernels": layer["kernels"] + 8 + 1,
        "passes": (6, 6, 0),
        "kept": layer["kept"] | of_projector,
        "working": [(each - let_go, weight) for each, weight in layer["working"]]
        + [(each + output, weight) for each, weight in projector["working"]],
    }
    check({name: both[name] for name in expected}, expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding_of_words(sequence_parallel: bool) -> None:
    """Prevents scattering encoder features without time, and wrong sends."""
    model = model_with(vision=TILES_TOWER, audio=CLIPS_TOWER)
    text, encoded = TOKENS * WIDTH, (TILES * 4 + CLIPS) * WIDTH
    # 1,000 words: 334 per rank, padded to a multiple of 128.
    words, sent = 384, 2 / 3 * 2 * text
    expected = {
        "forward": 2 * 2 * (encoded + text),
        "backward": 2 * 3 * (encoded + text),
        "sent": sent if sequence_parallel else 2 * sent,
        "back sent": sent if sequence_parallel else 0,
        "passes": (1, 1, 0) if sequence_parallel else (2, 0, 0),
        "kernels": 6,
        "kept": {"token ids": 8 * TOKENS},
        "input": 8 * TOKENS,
        "output": 2 * text / (3 if sequence_parallel else 1),
        "working": [(2 * (text + encoded), words * WIDTH)],
        "parameters": words * WIDTH,
    }
    check(count_unit(language_embed(model, device(3, sequence_parallel))), expected)


def language(**changes: Any) -> LanguageConfig:
    """Return a language tower with 6 query heads and 3 key-value heads of size 9."""
    sizes = {"heads": 6, "kv_heads": 3, "head_size": 9}
    return LanguageConfig(**LANGUAGE.model_dump() | sizes | changes)


def dense_layer(sequence_parallel: bool, options: str = "") -> dict[str, Any]:
    """Return counts of a layer with grouped-query attention and gated feed-forward on 3 ranks."""
    qk_norm, output_gate, post_norms, copied = (
        name in options for name in ("qk_norm", "output_gate", "post_norms", "copied")
    )
    t, q, k = 3, 54, 27  # each key-value head is copied to three ranks
    part = 1 / 3 if sequence_parallel else 1
    hidden = TOKENS * WIDTH * part
    block, inner = TOKENS * WIDTH, TOKENS * F / t
    used = q + k + k + (q if output_gate else 0)
    made = used - 2 * 18 if copied else used
    gathered_row, copied_row = (made, used / t) if copied else (0, 0)
    views = qk_norm or output_gate
    kept = {
        "input": 2 * hidden,
        "first norm's output": 2 * hidden,
        "first norm's moments": 4 * TOKENS * part,
        "attention's output and log-sum-exp": TOKENS * (2 * q + 4 * 6) / t,
        "middle residual": 2 * hidden,
        "second norm's output": 2 * hidden,
        "second norm's moments": 4 * TOKENS * part,
        "gate and value": 2 * 2 * inner,
        "their product": 2 * inner,
    }
    if views:
        scales = 4 * (6 + 3) if qk_norm else 0
        kept["product with q, k and v"] = TOKENS * 2 * used / t
        kept["rotated q and k"] = TOKENS * (2 * (q + k) + scales) / t
    else:
        kept["rotated q and k, and v"] = TOKENS * 2 * (q + k + k) / t
    if output_gate:
        kept["gated output"] = TOKENS * 2 * q / t
    if post_norms:
        for name in ("self_attention", "mlp"):
            kept[f"{name}'s output"] = 2 * hidden
            kept[f"moments of {name}'s norm"] = 4 * TOKENS * part
    # Forward: q, k, and v if copied to a tensor of its own, read and written; attention's output,
    # gate, product. Backward: gradients of q, k and v, and norm inputs; for a gate: two inputs,
    # their gradients and the output's.
    attention = 2 * (q + k) + (0 if views else 2 * k) + (3 * q if output_gate else 0)
    back_attention = 2 * (q + k + k) + (q + k if qk_norm else 0) + (5 * q if output_gate else 0)
    attention += 2 * t * (gathered_row + copied_row)
    back_attention += t * (3 * gathered_row + copied_row)
    normed, back_normed = (9 + 2 * 2, 8 + 2 * 3) if post_norms else (9, 8)
    gathered = block if sequence_parallel else 0
    again_sent = 2 * 2 / 3 * block * 2
    sent = 2 * again_sent + 2 * 2 / 3 * TOKENS * gathered_row
    return {
        "products": [
            *((TOKENS, WIDTH, made / t), (TOKENS, q / t, WIDTH)),
            *((TOKENS, WIDTH, 2 * F / t), (TOKENS, F / t, WIDTH)),
        ],
        "attention": 61 / 2 * 4 * q / t,
        "forward": 2 * (normed * hidden + TOKENS * attention / t + 3 * inner),
        "backward": 2 * (back_normed * hidden + TOKENS * back_attention / t + 5 * inner),
        "sent": sent,
        "back sent": sent,
        "again sent": again_sent if sequence_parallel else 0,
        "passes": (4 + copied, 4 + copied, 2 if sequence_parallel else 0),
        "kernels": 3 + 4 + 3 + output_gate + 2 * post_norms + 2 * copied,
        "kept": kept,
        "for weights": {
            *("first norm's output", "second norm's output", "their product"),
            *(["gated output"] if output_gate else []),
        },
        "input": 2 * hidden,
        "output": 2 * hidden,
        "working": [
            (2 * (hidden + gathered + inner), WIDTH * F / t),
            (2 * (hidden + 3 * inner - inner), 0),
            (2 * (hidden + 2 * inner + block + gathered * part - 3 * inner), 2 * WIDTH * F / t),
        ],
        "shared": 2 * gathered,
        "parameters": (4 if post_norms else 2) * WIDTH
        + (2 * 9 if qk_norm else 0)
        + round_up(WIDTH * made + q * WIDTH + 3 * WIDTH * F + made, t),
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "options",
    ["", "qk_norm", "output_gate", "qk_norm output_gate", "post_norms", "copied", "qk_norm copied"],
)
def test_language_layer(options: str, sequence_parallel: bool) -> None:
    """Prevents head norms, output gates or sequence parallelism missing from some counts."""
    given, own = dict.fromkeys(options.split(), True), device(3, sequence_parallel)
    given |= {"kv_heads": 1} if given.pop("copied", False) else {}
    found = count_unit(language_layer(language(qkv_bias=True, **given), LayerKind(), own))
    check(found, dense_layer(sequence_parallel, options))


def count_attention(counts: CountedUnit, sequence_parallel: bool) -> dict[str, Any]:
    """Return counts of a layer's attention, without feed-forward and norms."""
    found, rest = count_unit(counts), dense_layer(sequence_parallel)
    hidden, inner = TOKENS * WIDTH * (1 / 3 if sequence_parallel else 1), TOKENS * F / 3
    block = 2 * 2 / 3 * 2 * TOKENS * WIDTH
    others = {
        "forward": 2 * (9 * hidden + 3 * inner),
        "backward": 2 * (8 * hidden + 5 * inner),
        "sent": block,
        "back sent": block,
        "again sent": block / 2 if sequence_parallel else 0,
        "kernels": 3 + 3,
    }
    names = ("rotated q and k, and v", "attention's output and log-sum-exp")
    between = [what for what in rest["kept"] if what not in names]
    return {
        **{name: found[name] for name in ("attention", "shared")},
        **{name: found[name] - each for name, each in others.items()},
        "products": found["products"][:-2],
        "passes": tuple(np.subtract(found["passes"], (2, 2, int(sequence_parallel)))),
        "kept": {what: each for what, each in found["kept"].items() if what not in between},
        "for weights": found["for weights"] - rest["for weights"],
        "working": found["working"][3:],
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("query_rank", [None, 13])
def test_latent_attention(query_rank: int | None, sequence_parallel: bool) -> None:
    """Prevents latents sent or kept replicated although divided, or the reverse."""
    latent = LatentAttention(
        query_rank=query_rank, key_value_rank=17, head_size=8, rotary_head_size=4, value_head_size=7
    )
    kind = LayerKind(latent=latent)
    counts = language_layer(language(), kind, device(3, sequence_parallel))
    t, part, q, v = 3, 1 / 3 if sequence_parallel else 1, 6 * (8 + 4), 6 * 7
    rows, ranks = TOKENS * part, 17 + (query_rank or 0)
    up_from = query_rank or WIDTH
    latents, block = TOKENS * (up_from + 17 + 4), TOKENS * WIDTH
    down = [(rows, WIDTH, 13)] if query_rank else []
    copied = TOKENS * 2 * (q + q + v) / t
    if sequence_parallel:
        sent, back, again, passes = latents + block, latents + block, latents, (4, 4, 2)
    else:
        sent, back, again, passes = 2 * block, 2 * latents, 0, (2, 6, 0)
    expected = {
        "products": [
            *(*down, (rows, WIDTH, 17 + 4), (TOKENS, up_from, q / t)),
            *((TOKENS, 17, 6 * (8 + 7) / t), (TOKENS, v / t, WIDTH)),
        ],
        "attention": 61 / 2 * 2 * 6 * (8 + 4 + 7) / t,
        "forward": 2 * (2 * rows * ranks + copied),
        "backward": 2 * (3 * rows * ranks + copied),
        "sent": 2 / 3 * 2 * sent,
        "back sent": 2 / 3 * 2 * back,
        "again sent": 2 / 3 * 2 * again,
        "passes": passes,
        "kernels": 9 if query_rank else 7,
        "kept": {
            "latents": 2 * rows * ranks,
            "latents' moments": 4 * rows * (2 if query_rank else 1),
            "normed latents": 2 * rows * ranks,
            "q, k and v": copied,
            "attention's output and log-sum-exp": TOKENS * (2 * v + 4 * 6) / t,
        },
        "for weights": {"normed latents"},
        "shared": 2 * max(latents, block) if sequence_parallel else 0,
    }
    check(count_attention(counts, sequence_parallel), expected)
    weights = up_from * q + 17 * 6 * (8 + 7) + v * WIDTH + 3 * WIDTH * F
    whole = WIDTH * (17 + 4) + 17 + (WIDTH * 13 + 13 if query_rank else 0)
    assert counts.parameters == 2 * WIDTH + whole + round_up(weights, t)


@pytest.mark.parametrize("key_heads", [2, 6])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_linear_attention(key_heads: int, sequence_parallel: bool) -> None:
    """Prevents gated-delta-rule operations and bytes that are quadratic in tokens, or lack a
    kernel."""
    d, e, c = 5, 8, 64
    linear = LinearAttention(
        key_heads=key_heads, value_heads=6, key_head_size=d, value_head_size=e, convolution_width=3
    )
    kind = LayerKind(linear=linear)
    counts = language_layer(language(), kind, device(3, sequence_parallel))
    t, keys, values = 3, key_heads * d, 6 * e
    mixed = keys + keys + values
    made = mixed + values + 6 + 6
    # Products of a chunk of c tokens: k k^T; triangle inverse; w; u; then w S, q S, k^T v; q k^T
    # and its product with v.
    chunk = 2 * c * c * d + c**3 / 3 + 2 * c * c * d + 2 * c * c * e
    chunk += 3 * 2 * c * d * e + 2 * c * c * d + 2 * c * c * e
    # Elements read and written by a chunk's kernels: k, q or w [c, d], u, v or new values [c, e],
    # state [d, e] and triangle [c, c].
    k, v, state, triangle = c * d, c * e, d * e, c * c
    made_again = (k + v + triangle) + (k + v) + (k + k + v) + (state + v)
    forward = k + triangle + made_again + (k + k + v + state + v)
    # Gradients of new values; of states; of q, k and w; of the inverse and its inputs.
    backward = made_again + (2 * k + 2 * v) + (3 * k + 3 * v + state)
    backward += (6 * k + 3 * v + 2 * state) + (6 * k + 3 * v + triangle)
    fp32 = triangle + triangle  # triangle written and read
    per_token = TOKENS / c * 6
    found = count_attention(counts, sequence_parallel)
    block = 2 * 2 / 3 * 2 * TOKENS * WIDTH
    hidden = TOKENS * WIDTH * (1 / 3 if sequence_parallel else 1)
    # Backward has q, k, v, w, u, new values, states twice, and all their gradients.
    rule = 2 * d + 3 * e + 2 * d * e / c + (d + 2 * e) + e
    # Copy to channels, convolution, copy back; norms of q and k; gated norm.
    around = 2 * mixed + 2 * mixed + 2 * mixed + 2 * 2 * keys + 3 * values
    back_around = 2 * mixed + 3 * mixed + 2 * mixed + 2 * 3 * keys + 5 * values
    kept = {
        "into the convolution": 2 * mixed,
        "v": 2 * values,
        "output's gate": 2 * values,
        "rows of beta and decay": 6 * (2 + 2),
        "normed q and k, and their scales": 2 * 2 * keys + 4 * 2 * key_heads,
        "beta and decay": 6 * (2 + 4),
        "rule's output, and inverses of chunks' triangles": 2 * values + 2 * 6 * c,
        "norm's scales": 4 * 6,
        "gated output": 2 * values,
    }
    expected = {
        "products": [(TOKENS, WIDTH, made / t), (TOKENS, values / t, WIDTH)],
        "attention": (per_token * chunk + TOKENS * 2 * 3 * mixed) / t,
        "forward": (2 * TOKENS * around + per_token * (2 * forward + 4 * fp32)) / t,
        "backward": (2 * TOKENS * back_around + per_token * 2 * backward) / t,
        "sent": block,
        "back sent": block,
        "again sent": block / 2 if sequence_parallel else 0,
        "passes": (2, 2, int(sequence_parallel)),
        "kernels": 2 + 8 + 1 + 3 + 5 + 7,
        "kept": {what: TOKENS * each / t for what, each in kept.items()},
        "for weights": {"gated output"},
        "shared": 2 * TOKENS * WIDTH if sequence_parallel else 0,
    }
    (working,) = found.pop("working")
    check(found, expected)
    # The feed-forward and its norm have freed their kept tensors by then.
    let_go = 2 * (hidden + 3 * TOKENS * F / t)
    assert working == pytest.approx((2 * (hidden + TOKENS * 6 * rule / t) - let_go, 0))
    weights = WIDTH * made + 3 * mixed + 2 * 6 + values * WIDTH + 3 * WIDTH * F
    assert counts.parameters == 2 * WIDTH + e + round_up(weights, t)


@pytest.mark.parametrize("expert", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("shared", [None, 19])
def test_experts(shared: int | None, sequence_parallel: bool, expert: int) -> None:
    """Prevents the busiest rank's rows, copies to experts and back, the fp32 router or shared
    experts missing from some counts."""
    f = 21
    experts = {"experts": 5, "experts_per_token": 2, "ffn_hidden_size": f, "imbalance": 1.5}
    if shared:
        experts |= {"shared_ffn_hidden_size": shared, "shared_gate": True, "auxiliary_loss": 0.1}
    kind, dense = LayerKind(experts=ExpertsConfig(**experts)), dense_layer(sequence_parallel)
    own_device = device(3, sequence_parallel, expert=expert, bytes_per_ms=SLOW)
    found = count_unit(language_layer(language(), kind, own_device), own_device)
    t, part, held = 3, 1 / 3 if sequence_parallel else 1, 5 if expert == 1 else 3
    own = TOKENS * part
    sent = own * 2
    rows = sent * (1 if expert == 1 else 1.5)
    hidden, inner = own * WIDTH, TOKENS * F / t
    shared_inner = TOKENS * (shared or 0) / t
    # Each token is copied to its experts; their outputs are summed: a read and a write, and both
    # of fp32 sums. Rows are sorted by expert, and back.
    copied = 1.25 * 2 * WIDTH * (5 * sent + own) + 1.25 * 2 * WIDTH * 2 * 2 * rows
    weighted = 2 * 2 + 2 * 4
    forward = copied + rows * f * (3 * 2 + weighted) + 12 * own * 5 * 4 + own * WIDTH * (2 + 4)
    backward = copied + rows * f * (5 * 2 + 3 * 2 + 8 * 4 + 3 * 2 + weighted)
    backward += 10 * own * 5 * 4 + 2 * own * WIDTH * (2 + 4)
    block = 2 * 2 / 3 * 2 * TOKENS * WIDTH
    kept = {
        "scores and choice": own * 5 * (4 + 1 + (4 if shared else 0)),
        "chosen weights and places": own * 2 * (4 + 8 + 8),
        "routed tokens": 2 * rows * WIDTH,
        "gate and value": 2 * 2 * rows * f,
        "weights of rows": 4 * rows,
        "weighted product": 2 * rows * f,
    }
    products = [(own, WIDTH, 5), (rows, WIDTH, 2 * f, held), (rows, f, WIDTH, held)]
    del dense["kept"]["gate and value"], dense["kept"]["their product"]
    kernels, whole = 32, WIDTH * 5
    for_weights = {"routed tokens", "weighted product"}
    if shared:
        kept |= {
            "shared gate and value": 2 * 2 * shared_inner,
            "shared product": 2 * shared_inner,
            "shared output": 2 * own * WIDTH,
            "gate of the shared output": 2 * own,
        }
        products += [
            *((TOKENS, WIDTH, 2 * shared / t), (TOKENS, shared / t, WIDTH), (own, WIDTH, 1)),
        ]
        # SwiGLU; gate input, gate and product; sum of routed and shared outputs.
        forward += 2 * (3 * shared_inner + 3 * hidden + 3 * hidden)
        backward += 2 * (5 * shared_inner + 2 * 3 * hidden)
        kernels, whole = 32 + 4 + 3, WIDTH * 5 + WIDTH
        for_weights |= {"shared product"}
    # Tensors in memory, tensors freed by then, and the weight of the computed gradient.
    working = [
        (2 * hidden + 2 * 2 * rows * WIDTH, 0, 0),
        (2 * hidden + 2 * rows * (WIDTH + f), 0, held * WIDTH * f),
        (2 * hidden + 2 * rows * f + 2 * 4 * rows * f, 2 * rows * f, 0),
        (2 * hidden + 4 * rows + 3 * 2 * rows * f, 2 * rows * f + 4 * rows, 0),
        (
            2 * hidden + 2 * 4 * rows + 2 * 2 * rows * f + 2 * rows * WIDTH,
            6 * rows * f + 4 * rows,
            held * 2 * WIDTH * f,
        ),
        (2 * hidden + 2 * 2 * rows * WIDTH, 6 * rows * f + 4 * rows + 2 * rows * WIDTH, 0),
    ]
    of_experts = held * 3 * WIDTH * f
    divided = WIDTH * 108 + 54 * WIDTH + 3 * WIDTH * (shared or 0)
    expected = dense | {
        "products": [*dense["products"][:2], *products],
        "forward": dense["forward"] - 2 * 3 * inner + forward,
        "backward": dense["backward"] - 2 * 5 * inner + backward,
        "kernels": dense["kernels"] - 3 + kernels,
        "waits": 1,  # for token counts
        "kept": dense["kept"] | kept,
        "for weights": dense["for weights"] - {"their product"} | for_weights,
        "working": [(there - gone, weight) for there, gone, weight in working],
        "parameters": 2 * WIDTH + whole + of_experts + round_up(divided, t),
        "of experts": of_experts,
    }
    if expert > 1:
        exchanged = rows * (2 * 2 * WIDTH + 4)
        expected |= {"exchanged": [exchanged, exchanged], "exchanges": (4, 3)}
    if not shared:
        # Each rank has its own tokens and sends none to tensor-parallel ranks.
        expected |= {"sent": block, "back sent": block}
        expected["passes"] = (2, 2, 1 if sequence_parallel else 0)
        expected["again sent"] = block / 2 if sequence_parallel else 0
    check(found, expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_head(sequence_parallel: bool, fused: bool) -> None:
    """Prevents logits for tokens without loss or for unrequested padded words, and gathered inputs
    counted as kept under sequence parallelism."""
    runtime = RuntimeOptions(fused_loss=fused)
    own_device = device(3, sequence_parallel, runtime=runtime, bytes_per_ms=SLOW)
    part = 1 / 3 if sequence_parallel else 1
    hidden, whole, loss = TOKENS * WIDTH * part, TOKENS * WIDTH, LOSS * WIDTH
    logits = LOSS * 384
    # Fused: read; backward reads and writes the gradient. Otherwise fp32, which counts twice: cast,
    # maximum, difference, exponential, sum, division; gradient product, cast.
    moved, back_moved = (1, 2) if fused else ((1 + 2) + 2 + 4 + 4 + 2 + 4, 4 + (2 + 1))
    expected = {
        "products": [(LOSS, WIDTH, 384)],
        "forward": 2 * (2 * hidden + moved * 1.5 * logits),
        "backward": 2 * (3 * hidden + back_moved * 1.5 * logits),
        "kernels": 10,
        "kept": {
            "input": 2 * hidden,
            "norm's moments": 4 * TOKENS * part,
            "hidden states with loss": 2 * loss,
            "logits": 2 * logits,
        },
        "for weights": {"hidden states with loss"},
        "input": 2 * hidden,
        "working": [
            (2 * logits, 0),
            (2 * (logits + loss - logits), 384 * WIDTH),
            (2 * (whole + loss - logits - loss), 0),
        ],
        "parameters": WIDTH + 384 * WIDTH,
    }
    sent = 2 / 3 * 2 * whole
    if sequence_parallel:
        expected |= {"sent": sent, "back sent": sent, "again sent": sent, "passes": (1, 1, 1)}
    else:
        expected |= {"back sent": 2 * 2 / 3 * 2 * loss, "passes": (0, 2, 0)}
    check(count_unit(head(language(), own_device), own_device), expected)
    unpadded = count_unit(head(language(), replace(own_device, pads=False)))
    assert unpadded["products"] == [(LOSS, WIDTH, 334)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_prediction_of_later_tokens(sequence_parallel: bool, tied: bool) -> None:
    """Prevents prediction layers with a second copy of a tied head, uncounted embeddings, or
    working sets that ignore freed tensors."""
    own_device, t, p = device(3, sequence_parallel), 3, 1 / 3 if sequence_parallel else 1
    hidden, block, words = TOKENS * WIDTH * p, TOKENS * WIDTH, 384 * WIDTH
    layer = count_unit(language_layer(language(qkv_bias=True), LayerKind(), own_device))
    last = count_unit(head(language(), own_device))
    model = language(prediction_layers=2, tied_head=tied, qkv_bias=True)
    found = count_unit(head(model, own_device))
    sent = 2 / 3 * 2 * block
    # Embeddings are all-reduced or scattered; double-width inputs and outputs gathered.
    joined = {
        "forward": 2 * (2 * hidden + 2 * 2 * hidden + 2 * 2 * hidden),
        "backward": 2 * (3 * hidden + 2 * 3 * hidden + 2 * 2 * hidden),
        "sent": (1 + 2 + 1 if sequence_parallel else 2 + 1) * sent,
        "back sent": (1 + 2 if sequence_parallel else 2 * 2) * sent,
        "again sent": 2 * sent if sequence_parallel else 0,
        "passes": np.array([3, 2, 1] if sequence_parallel else [3, 2, 0]),
        "kernels": 6,
        "attention": 0,
    }
    for name, value in joined.items():
        of_layer, of_last = (np.array(each[name]) for each in (layer, last))
        assert found[name] == pytest.approx(2 * (value + of_layer + of_last) + of_last), name
    before = [(TOKENS, 2 * WIDTH, WIDTH / t)]
    products = 2 * (before + layer["products"] + last["products"]) + last["products"]
    check({"products": found["products"]}, {"products": products})
    of_joined = {
        "token ids": 8 * TOKENS,
        "normed": 2 * (2 * hidden + 4 * TOKENS * p),
        "joined": 2 * 2 * hidden,
    }
    parts = [of_joined, layer["kept"], last["kept"]] * 2 + [last["kept"]]
    kept = {
        f"{place}: {what}": each for place, part in enumerate(parts) for what, each in part.items()
    }
    assert found["kept"] == pytest.approx(kept)
    # Backward from the last part: later parts have freed their tensors.
    of_first = [
        (2 * (block + 2 * hidden), 2 * WIDTH * WIDTH / t),
        (2 * hidden - of_joined["normed"] - of_joined["joined"], words),
    ]
    expected = []
    for place, moments in enumerate(
        [of_first, layer["working"], last["working"]] * 2 + [last["working"]]
    ):
        gone = sum(sum(part.values()) for part in parts[place + 1 :])
        # A gradient of the head's weight waits for the others.
        expected += [(there - gone, weight + words) for there, weight in moments]
    of_losses = sum(last["kept"].values()) - last["kept"]["input"] - last["kept"]["norm's moments"]
    expected.append((2 * hidden - 3 * of_losses, 3 * words))
    check({"working": found["working"]}, {"working": expected})
    of_prediction = 2 * WIDTH + round_up(2 * WIDTH * WIDTH, t) + layer["parameters"] + WIDTH
    copy = 0 if tied else words
    assert found["parameters"] == 2 * of_prediction + last["parameters"] + copy
    assert (found["input"], found["output"]) == (2 * hidden, 0)
    assert found["shared"] == (2 * 2 * block if sequence_parallel else 0)


def fp8_language(**changes: Any) -> LanguageConfig:
    """Return a language tower with sizes that are multiples of 16."""
    sizes = {"hidden_size": 48, "heads": 4, "kv_heads": 2, "head_size": 16, "ffn_hidden_size": 80}
    return LanguageConfig(**LANGUAGE.model_dump() | sizes | changes)


OF_OUTPUT = {"attention's output": 64}
OF_EXPERTS = LayerKind(
    experts=ExpertsConfig(
        experts=5, experts_per_token=2, ffn_hidden_size=32, shared_ffn_hidden_size=64
    )
)
LATENT = LatentAttention(
    query_rank=16, key_value_rank=32, head_size=16, rotary_head_size=16, value_head_size=16
)


@pytest.mark.parametrize(
    ("kind", "options", "kept_whole", "copied", "widest", "linears"),
    [
        # Columns of qkv (128), attention's projection, gate and value (160), and down projection.
        (LayerKind(), {}, set(), OF_OUTPUT, 160, 4),
        (LayerKind(), {"output_gate": True}, set(), {}, 192, 4),
        # Two down, two up and one output projection; two linears share the first norm's output.
        (LayerKind(latent=LATENT), {}, {"first norm's output"}, OF_OUTPUT, 160, 7),
        # Routed and shared experts. The router reads the second norm's output.
        (OF_EXPERTS, {}, {"second norm's output"}, OF_OUTPUT | {"second norm's output": 48}, 0, 6),
    ],
    ids=["dense", "gated", "latent", "experts"],
)
def test_layers_in_fp8(kind, options, kept_whole, copied, widest, linears) -> None:
    """Prevents FP8 copies of inputs also needed in bf16, casts for only some linears, and gradient
    copies without memory."""
    plain, fast = (
        count_unit(language_layer(fp8_language(**options), kind, each))
        for each in (device(1), device(1, fp8=TRAINED_FP8))
    )
    assert fast["kernels"] - plain["kernels"] == 2 * linears
    kept = {
        what: each / 2 if what in plain["for weights"] - kept_whole else each
        for what, each in plain["kept"].items()
    }
    kept |= {f"{what} in FP8": TOKENS * width for what, width in copied.items()}
    assert fast["kept"] == pytest.approx(kept)
    # The gradient of the widest output, by rows and by columns.
    copies = 2 * (TOKENS * widest if widest else max(TOKENS * 128, 2 * TOKENS * 64))
    for (there, weight), (before, as_before) in zip(fast["working"], plain["working"], strict=True):
        # Freed tensors shrink as the kept ones did.
        assert weight == as_before
        assert copies <= there - before <= copies + sum(plain["kept"].values()) / 2
    first = fast["working"][0][0] - plain["working"][0][0]
    assert first == pytest.approx(copies)


def test_prediction_in_fp8() -> None:
    """Prevents bf16 inputs for the product that joins hidden states and embeddings."""
    model = fp8_language(prediction_layers=1)
    plain, fast = (count_unit(head(model, device(1, fp8=fp8))) for fp8 in (None, TRAINED_FP8))
    # Four linears of the layer and the joining one.
    assert fast["kernels"] - plain["kernels"] == 2 * 5
    assert fast["kept"]["0: joined"] == plain["kept"]["0: joined"] / 2
    assert fast["kept"]["0: normed"] == plain["kept"]["0: normed"]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_adapters_beside_products(sequence_parallel: bool) -> None:
    """Prevents adapters on wrong linears or rows, inputs not kept for A's gradient, and uncounted
    reads of adapter inputs and outputs."""
    t, r, own = 3, 4, replace(device(3, sequence_parallel), flops_per_ms={None: 1e9})
    part = 1 / 3 if sequence_parallel else 1.0
    layer = language_layer(language(), LayerKind(), own)
    adapters = AdapterConfig(rank=r, alpha=1, targets=("q_proj", "v_proj", "down_proj"))
    model = ModelConfig(name="hand", language=language())
    kind = next(one for one in unit_kinds(model) if one.is_layer)
    named = {one.module: one for one in adapted_linears(model, kind, adapters)}
    plain = count_unit(layer)
    adapted = count_unit(with_adapters(layer, own, adapters, named, part=part), own)
    (tokens, h, made), (_, inner, _) = plain["products"][0], plain["products"][3]
    query, key = 6 * 9, 3 * 9
    # A reads x; B reads, writes y; backward reads y's gradient twice and x, adds x's gradient.
    forward = part * tokens * h + tokens * 2 * made + tokens * inner + part * tokens * 2 * h
    backward = part * tokens * 3 * h + tokens * 2 * made + tokens * 3 * inner
    backward += part * tokens * 2 * h
    thin = 2 / 3 * tokens * r * 2
    added = {
        "forward": 2 * forward,
        "backward": 2 * backward,
        "sent": (2 + 1) * thin if sequence_parallel else 2 * thin,
        "back sent": (2 + 1) * thin if sequence_parallel else 2 * 2 * thin,
        "kept": {
            "between A and B of self_attention.linear_qkv": tokens * 2 * r * 2,
            "between A and B of mlp.linear_fc2": part * tokens * r * 2,
        },
    }
    check_added(adapted, plain, added)
    # Replicated: A of q and v, B of down. Divided: B of q and v, A of down.
    parameters = 2 * r * h + r * (query + key) / t + r * inner + r * h
    assert adapted["parameters"] - plain["parameters"] == pytest.approx(parameters, abs=1)
    now_kept = {"first norm's output", "their product"}
    assert adapted["for weights"] == plain["for weights"] - now_kept


@pytest.mark.parametrize(
    ("module", "kind", "lost", "products", "launches"),
    [
        ("mlp", LayerKind(), {"gate and value", "their product"}, 2, 3),
        ("layernorm", LayerKind(), {"first norm's output", "second norm's output"}, 0, 2),
        ("mla_up_proj", LayerKind(latent=LATENT), {"q, k and v"}, 2, 3),
        ("moe_act", OF_EXPERTS, {"weighted product"}, 0, 1),
        ("shared_experts", OF_EXPERTS, {"shared gate and value", "shared product"}, 2, 3),
        ("moe", OF_EXPERTS, OF_MIXTURE, 5, 32 + 4),
    ],
)
def test_recomputed_modules(module, kind, lost, products, launches) -> None:
    """Prevents keeping a recomputed module's tensors, or ignoring their memory in its backward."""
    plain, again = (
        language_layer(language(), kind, device(1, runtime=RuntimeOptions(recomputed=given)))
        for given in ((), (module,))
    )
    before, after = count_unit(plain), count_unit(again)
    assert before["kept"].keys() - after["kept"].keys() == lost
    repeated = [one for one in again.kernels if one.phase == "repeated"]
    assert sum(one.kind == "product" for one in repeated) == products
    assert sum(one.launches for one in repeated) == launches
    assert after["kernels"] == before["kernels"]
    saved = sum(before["kept"].values()) - sum(after["kept"].values())
    more = [
        there - was
        for (there, _), (was, _) in zip(after["working"], before["working"], strict=True)
    ]
    # Recomputed tensors exist from the start of their block's backward.
    assert max(more) <= saved and (module in ("layernorm", "mla_up_proj") or more[0] == saved)
