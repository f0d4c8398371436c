"""The model against itself under changes that must not matter, and against plain PyTorch."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from ranks import run_ranks
from toy import pack, stages_of, toy_model, toy_plan, toy_sample

from megatron.vlm.model.initialize import initialize_parameters
from megatron.vlm.model.stage import build_stage
from omnibal.model.parallel import Parallel

pytestmark = pytest.mark.quick

SAMPLES = [(2, 9), (0, 12), (1, 6), (3, 15)]
ONE = Parallel(pipeline=1)


def whole_model(model, **recompute):
    stage = build_stage(toy_plan(model, stages_of(model, **recompute)), 0)
    initialize_parameters(stage, seed=5)
    return stage


def loss_and_gradients(stage, batches):
    stage.zero_grad()
    losses = []
    for batch in batches:
        stage.set_input_tensor(None)
        loss = stage(batch)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad.clone() for name, p in stage.named_parameters()}


def packed_and_unpacked(links, model):
    stage = whole_model(model)
    samples = [toy_sample(model, *counts, seed=i) for i, counts in enumerate(SAMPLES)]
    together = loss_and_gradients(stage, [pack(samples)])
    apart = loss_and_gradients(stage, [pack([sample]) for sample in samples])
    each = [loss_and_gradients(stage, [pack([a, b])])[0][0] for a, b in pairwise(samples)]
    return together, apart, each


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="300M-like: LayerNorm, qkv bias"),
        pytest.param({"normalization": "RMSNorm", "qkv_bias": False}, id="6B-like: RMSNorm"),
        pytest.param({"qk_norm": False}, id="without-qk-norm"),
    ],
)
def test_packed_equals_unpacked(changes):
    """Prevents: attention, RoPE or labels that cross from one packed sample into the next."""
    [(together, apart, each)] = run_ranks(ONE, packed_and_unpacked, toy_model(**changes))
    assert together[0][0] == pytest.approx(sum(apart[0]), rel=1e-5)
    for pair, (first, second) in zip(each, pairwise(apart[0]), strict=True):
        assert pair == pytest.approx(first + second, rel=1e-5)
    for name, gradient in together[1].items():
        torch.testing.assert_close(gradient, apart[1][name], rtol=1e-4, atol=1e-5, msg=name)


def with_and_without_recompute(links, model):
    batch = pack([toy_sample(model, *counts, seed=i) for i, counts in enumerate(SAMPLES)])
    kept = []
    for recompute in ({}, {"vision": (1, 3)}, {"vision": (0, 1, 2, 3), "language": (0, 2)}):
        stage = whole_model(model, **recompute)
        weights = {p.untyped_storage().data_ptr() for p in stage.parameters()}
        saved = {}

        def remember(tensor, saved=saved, weights=weights):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            stage.set_input_tensor(None)
            loss = stage(batch)
        bytes_kept = sum(saved.values())
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in stage.named_parameters()}
        kept.append((loss.item(), gradients, bytes_kept))
    return kept


def test_recomputed_equals_not_recomputed():
    """Prevents: recomputation that changes a gradient, or that keeps the activations after all."""
    [(plain, some, most)] = run_ranks(ONE, with_and_without_recompute, toy_model())
    assert plain[2] > some[2] > most[2]
    for recomputed in (some, most):
        assert recomputed[0] == plain[0]
        for name, gradient in plain[1].items():
            torch.testing.assert_close(recomputed[1][name], gradient, rtol=0, atol=0, msg=name)


def stage_and_reference_loss(links, model):
    stage = whole_model(model)
    samples = [toy_sample(model, *counts, seed=i) for i, counts in enumerate(SAMPLES)]
    for name, parameter in stage.named_parameters():
        if parameter.dim() == 1:  # so that a forgotten bias, norm or scale would show
            torch.manual_seed(len(name))
            parameter.data += 0.3 * torch.randn_like(parameter)
    stage.set_input_tensor(None)
    weights = dict(stage.named_parameters())
    expected = [reference_loss(model, weights, sample).item() for sample in samples]
    return stage(pack(samples)).item(), expected


@pytest.mark.parametrize(
    "model",
    [
        toy_model(),
        toy_model(normalization="RMSNorm", qkv_bias=False),
        toy_model(qk_norm=False),
        toy_model(qk_norm=False, layer_scale_init=None),
        toy_model().with_tower("language", qk_norm=True, head_size=10),
    ],
    ids=["300M-like", "6B-like", "without-qk-norm", "EVA-CLIP-like", "Qwen3-like"],
)
def test_model_equals_plain_pytorch(model):
    """Prevents: a wrong reading of InternVL: layer scale, q and k norms, pixel shuffle, GQA,
    RoPE."""
    [(got, expected)] = run_ranks(ONE, stage_and_reference_loss, model)
    assert got == pytest.approx(sum(expected), rel=1e-5)


def reference_loss(model, weights, sample):
    """InternVL's forward for one sample, written out with PyTorch functions alone."""
    w = {name: value.detach() for name, value in weights.items()}
    ids, hidden = torch.tensor(sample.ids), None
    hidden = w["embedding.word_embeddings.weight"][ids]
    if len(sample.pixels_TCPP):
        hidden[ids == 0] = reference_image_features(model, w, sample.pixels_TCPP)
    language = model.language
    head_size = language.head_width
    for layer in range(language.layers):
        p = f"language.layers.{layer}."
        x = F.rms_norm(
            hidden, hidden.shape[-1:], w[p + "input_layernorm.weight"], language.norm_eps
        )
        qkv = (x @ w[p + "self_attention.linear_qkv.weight"].T).view(
            len(ids), language.kv_heads, -1, head_size
        )
        # InternLM2's rows: per key/value head its query heads, then k, then v.
        query, key, value = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
        if language.qk_norm:
            of_query, of_key = (w[f"{p}self_attention.{one}_layernorm.weight"] for one in "qk")
            query = query / (query.square().mean(-1, True) + language.norm_eps).sqrt() * of_query
            key = key / (key.square().mean(-1, True) + language.norm_eps).sqrt() * of_key
        query, key = rope(query, language.rope_base), rope(key, language.rope_base)
        share = language.heads // language.kv_heads
        key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        hidden = hidden + attention(query, key, value, causal=True) @ (
            w[p + "self_attention.linear_proj.weight"].T
        )
        x = F.rms_norm(
            hidden, hidden.shape[-1:], w[p + "pre_mlp_layernorm.weight"], language.norm_eps
        )
        gate, up = (x @ w[p + "mlp.linear_fc1.weight"].T).chunk(2, -1)
        hidden = hidden + (F.silu(gate) * up) @ w[p + "mlp.linear_fc2.weight"].T
    hidden = F.rms_norm(
        hidden, hidden.shape[-1:], w["language.final_layernorm.weight"], language.norm_eps
    )
    logits = hidden @ w["head.weight"][: language.vocab_size].T  # the rest is padding
    mask = torch.tensor(sample.loss_mask)
    return F.cross_entropy(logits[:-1][mask[1:]], ids[1:][mask[1:]], reduction="sum")


def reference_image_features(model, w, pixels):
    vision, patch = model.vision, model.vision.patch_size
    kernel = w["vision_embedding.patch_projection.weight"].view(-1, 3, patch, patch)
    patches = F.conv2d(
        pixels, kernel, w["vision_embedding.patch_projection.bias"], stride=patch
    ).flatten(2)
    first = w["vision_embedding.class_token"].expand(len(pixels), 1, -1)
    hidden = torch.cat([first, patches.transpose(1, 2)], 1) + w["vision_embedding.positions"]

    def norm(x, name):
        if vision.normalization == "RMSNorm":
            return F.rms_norm(x, x.shape[-1:], w[name + ".weight"], vision.norm_eps)
        return F.layer_norm(
            x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"], vision.norm_eps
        )

    def linear(x, name):
        return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))

    def scale(name):
        assert (name in w) == (vision.layer_scale_init is not None)
        return w.get(name, 1.0)

    for layer in range(vision.layers):
        p = f"vision.layers.{layer}."
        x = linear(norm(hidden, p + "input_layernorm"), p + "self_attention.linear_qkv")
        # Megatron's rows: per head its q, then k, then v.
        query, key, value = rearrange(
            x, "t s (n three d) -> three t s (n d)", three=3, n=vision.heads
        )
        if vision.qk_norm:
            width = (vision.hidden_size,)
            query = F.rms_norm(
                query, width, w[p + "self_attention.q_layernorm.weight"], vision.norm_eps
            )
            key = F.rms_norm(
                key, width, w[p + "self_attention.k_layernorm.weight"], vision.norm_eps
            )
        heads = [x.unflatten(-1, (vision.heads, -1)) for x in (query, key, value)]
        context = torch.stack(
            [attention(*(x[tile] for x in heads), causal=False) for tile in range(len(pixels))]
        )
        branch = linear(context, p + "self_attention.linear_proj")
        hidden = hidden + scale(p + "self_attn_bda.scale") * branch
        branch = F.gelu(linear(norm(hidden, p + "pre_mlp_layernorm"), p + "mlp.linear_fc1"))
        branch = linear(branch, p + "mlp.linear_fc2")
        hidden = hidden + scale(p + "mlp_bda.scale") * branch
    features = []
    side, factor = vision.patches_per_side, model.vision.pixel_shuffle_factor
    for tile in hidden[:, 1:]:
        grid = tile.view(side, side, -1)
        for row in range(0, side, factor):
            for column in range(0, side, factor):
                block = grid[row : row + factor, column : column + factor]
                features.append(block.reshape(-1))
    x = F.layer_norm(
        torch.stack(features), (model.vision.projector_input_size,),
        w["projector.norm.weight"], w["projector.norm.bias"],
    )  # fmt: skip
    return linear(F.gelu(linear(x, "projector.linear_fc1")), "projector.linear_fc2")


def attention(query_SND, key_SND, value_SND, causal):
    """Softmax attention written out; returns [S, N * D]."""
    scores = torch.einsum("snd,tnd->nst", query_SND, key_SND) / math.sqrt(query_SND.shape[-1])
    if causal:
        tokens = len(query_SND)
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -math.inf)
    return torch.einsum("nst,tnd->snd", scores.softmax(-1), value_SND).flatten(1)


def rope(x_SND, base):
    """Rotary embedding by complex numbers: component i pairs with i + D / 2."""
    tokens, _, size = x_SND.shape
    frequencies = base ** (-torch.arange(0, size, 2).double() / size)
    angles = torch.outer(torch.arange(tokens).double(), frequencies)[:, None]
    pairs = torch.complex(*x_SND.double().chunk(2, -1)) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([pairs.real, pairs.imag], -1).float()
