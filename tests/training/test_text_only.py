"""A model without an encoder: the same numbers under every layout, and those of plain PyTorch."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from tensor_parallel_cases import compare_resumed, compare_with_one_process
from toy import OPTIONS, stages_of, toy_batch, toy_plan, toy_text_model

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.measure.profiler import (
    KeptActivations,
    ProfileOptions,
    kept_bytes_of_units,
    peak_activation_bytes,
    profiled_batches,
    random_batch,
)
from megatron.vlm.measure.replay import StageReplayer, standing_in, state_bytes_of
from megatron.vlm.model.initialize import initialize_parameters
from megatron.vlm.model.stage import build_stage
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.model.config import RopeScaling
from omnibal.model.parallel import Parallel
from omnibal.model.units import unit_names

pytestmark = pytest.mark.quick

SCALING = RopeScaling(factor=8, original_positions=40)
"""Of the toy's three frequencies, one stays, one is divided and one is in between."""
LLAMA = toy_text_model(rope_base=20, rope_scaling=SCALING, vocab_size=51)
QWEN = toy_text_model(qkv_bias=True, tied_head=True, vocab_size=51)
MODELS = {"Llama": LLAMA, "Qwen": QWEN}
# Packs as (tiles, text tokens): odd and even counts, and one pack without loss.
STEPS = [
    [[(0, 9), (0, 14)], [(0, 12), (0, 7)], [(0, 5)], [(0, 8), (0, 6), (0, 11)]],
    [[(0, 21)], [(0, 2)], [(0, 8), (0, 2)]],
]


# Units: 0 language embed, 1-3 language layers, 4 head.
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("cuts", "sizes"),
    [
        pytest.param((2,), {}, id="pp2"),
        pytest.param((1, 2, 4), {}, id="pp4-embed-and-head-alone"),
        pytest.param((), {"tensor": 2}, id="tp2"),
        pytest.param((2,), {"tensor": 2, "sequence_parallel": True}, id="pp2-tp2-sp"),
        pytest.param((3,), {"data": 2}, id="pp2-dp2"),
    ],
)
def test_split_equals_one_process(name, cuts, sizes):
    """Prevents: a stage that waits for image features, or a loss or gradient that a layout
    changes where no stage has an encoder."""
    model = MODELS[name]
    plan = toy_plan(model, stages_of(model, *cuts, language=(0, 2)), **sizes)
    compare_with_one_process(plan, STEPS)


def losses_and_gradients(links, model):
    """The stage's loss and gradients of one pack, and those of plain PyTorch."""
    stage = build_stage(toy_plan(model, stages_of(model)), 0)
    initialize_parameters(stage, seed=5)
    for name, parameter in stage.named_parameters():
        if parameter.dim() == 1:  # so that a forgotten bias or norm would show
            torch.manual_seed(len(name))
            parameter.data += 0.3 * torch.randn_like(parameter)
    batch = toy_batch(model, [(0, 30), (0, 9)], seed=0)
    stage.set_input_tensor(None)
    weights = {name: p.detach().clone() for name, p in stage.named_parameters()}
    found = []
    for loss_of, leaves in (
        (lambda: stage(batch), dict(stage.named_parameters())),
        (lambda: reference_loss(model, weights, batch), weights),
    ):
        for leaf in leaves.values():
            leaf.requires_grad_()
        loss = loss_of()
        loss.backward()
        found.append((loss.item(), {name: leaf.grad.clone() for name, leaf in leaves.items()}))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_model_equals_plain_pytorch(name):
    """Prevents: a wrong reading of Llama 3.1 or Qwen2.5: GQA, scaled RoPE, biases, a tied head."""
    [(got, expected)] = run_ranks(Parallel(pipeline=1), losses_and_gradients, MODELS[name])
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert got[1].keys() == expected[1].keys()
    for key, gradient in expected[1].items():
        torch.testing.assert_close(got[1][key], gradient, rtol=1e-4, atol=1e-5, msg=key)


def reference_loss(model, w, batch):
    """Llama's forward, sample by sample, written out with PyTorch functions alone."""
    language, total = model.language, torch.zeros(())
    mask = torch.zeros(batch.tokens, dtype=torch.bool)
    mask[batch.loss_positions_L] = True
    start = 0
    for tokens in batch.segment_tokens:
        ids, learned = (x[start : start + tokens] for x in (batch.token_ids_S, mask))
        hidden = w["embedding.word_embeddings.weight"][ids]
        for layer in range(language.layers):
            own = {
                key.removeprefix(f"language.layers.{layer}."): value
                for key, value in w.items()
                if key.startswith(f"language.layers.{layer}.")
            }
            hidden = reference_layer(language, own, hidden)
        hidden = rms_norm(hidden, w["language.final_layernorm.weight"], language.norm_eps)
        head = w["embedding.word_embeddings.weight" if language.tied_head else "head.weight"]
        logits = hidden @ head[: language.vocab_size].T  # the rest is padding
        total = total + F.cross_entropy(logits[learned], ids.roll(-1)[learned], reduction="sum")
        start += tokens
    return total


def rms_norm(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def reference_layer(language, w, hidden_SH):
    heads, groups = language.heads, language.kv_heads
    size, share = language.hidden_size // heads, heads // groups
    x = rms_norm(hidden_SH, w["input_layernorm.weight"], language.norm_eps)
    qkv = F.linear(
        x, w["self_attention.linear_qkv.weight"], w.get("self_attention.linear_qkv.bias")
    ).view(len(x), groups, share + 2, size)
    query = rotated(language, qkv[:, :, :share].flatten(1, 2))
    key, value = rotated(language, qkv[:, :, share]), qkv[:, :, share + 1]
    key, value = (one.repeat_interleave(share, 1) for one in (key, value))
    scores = torch.einsum("snd,tnd->nst", query, key) / math.sqrt(size)
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
    context = torch.einsum("nst,tnd->snd", scores.softmax(-1), value).flatten(1)
    hidden_SH = hidden_SH + context @ w["self_attention.linear_proj.weight"].T
    x = rms_norm(hidden_SH, w["pre_mlp_layernorm.weight"], language.norm_eps)
    gate, up = (x @ w["mlp.linear_fc1.weight"].T).chunk(2, -1)
    return hidden_SH + (F.silu(gate) * up) @ w["mlp.linear_fc2.weight"].T


def rotated(language, x_SND):
    """Rotary embedding by complex numbers: component i pairs with i + D / 2."""
    tokens, _, size = x_SND.shape
    frequencies = [frequency(language, pair, size) for pair in range(size // 2)]
    angles = torch.outer(torch.arange(tokens).double(), torch.tensor(frequencies).double())
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.complex(*x_SND.double().chunk(2, -1)) * turns
    return torch.cat([pairs.real, pairs.imag], -1).float()


def frequency(language, pair, size):
    """Radians a token, by the formula of Meta's `apply_scaling`."""
    plain = language.rope_base ** (-2 * pair / size)
    scaling, wave = language.rope_scaling, 2 * math.pi / plain
    if scaling is None or wave < scaling.original_positions / scaling.high_frequency_factor:
        return plain
    if wave > scaling.original_positions / scaling.low_frequency_factor:
        return plain / scaling.factor
    smooth = (scaling.original_positions / wave - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def test_the_toys_scaling_has_all_three_cases():
    """Prevents a comparison that passes on a scaling that changes no frequency, or each alike."""
    plain = LLAMA.language.model_copy(update={"rope_scaling": None})
    size = LLAMA.language.hidden_size // LLAMA.language.heads
    factors = [frequency(plain, i, size) / frequency(LLAMA.language, i, size) for i in range(3)]
    assert factors[0] == 1 and 1 < factors[1] < 7 and factors[2] == pytest.approx(8)


def units_of_a_pack(links, model):
    stage = build_stage(toy_plan(model, stages_of(model)), 0)
    batch = random_batch(model, 0, (20, 40), 7)
    kept = KeptActivations(stage)
    with kept.recording():
        loss = stage(batch)
    whole = kept.now_bytes
    loss.backward()
    return whole, kept_bytes_of_units(stage, batch)


def test_profiled_units_add_up_to_the_stage():
    """Prevents: a profile of a text-only model that fails, or measures units that it lacks."""
    [(whole, by_unit)] = run_ranks(Parallel(pipeline=1), units_of_a_pack, LLAMA)
    assert set(by_unit) == {"language_embed", "language_layer", "head"}
    assert sum(by_unit[name] for name in unit_names(LLAMA)) == pytest.approx(whole, abs=9)


def test_profiled_packs_tell_all_costs_apart():
    """Prevents: packs of texts in which one size follows from the others."""
    options = ProfileOptions(
        max_tiles=0, max_tokens=448, tokens_per_sample=57, layers=1, repetitions=1
    )
    batches = list(profiled_batches(LLAMA, options))
    assert not any(batch.tiles for batch in batches)
    squares = [sum(length**2 for length in batch.segment_tokens) for batch in batches]
    loss_tokens = [len(batch.labels_L) for batch in batches]
    tokens = [batch.tokens for batch in batches]
    features = np.array([[1] * len(batches), tokens, squares, loss_tokens], float).T
    assert np.linalg.cond(features / np.linalg.norm(features, axis=0)) < 60


def bytes_of_rank(links, plan):
    """Of a real rank: state after a step, and the most that a step keeps."""
    trainer = build_trainer(plan, links, OPTIONS, steps=2, seed=0)
    batches = [random_batch(plan.model, *sizes, plan.stages[links.rank]) for sizes in SIZES]

    def step():
        train_step(trainer, MicroBatchStream.of(batches))

    step()
    return state_bytes_of(trainer), peak_activation_bytes(trainer, step)


SIZES = [(0, (20, 40), 7), (0, (30,), 30), (0, (50, 9, 41), 1)]


@pytest.mark.in_own_process
def test_a_rank_alone_needs_what_it_needs_in_the_job():
    """Prevents: a replay of a text-only stage that fails, or measures other memory than the job."""
    plan = toy_plan(QWEN, stages_of(QWEN, 1, 3, language=(1,)))
    ranks = run_ranks(plan.parallel, bytes_of_rank, plan)
    for number, stage in enumerate(plan.stages):
        batches = [random_batch(QWEN, *sizes, stage) for sizes in SIZES]
        with standing_in(plan.parallel, number) as links:
            replayer = StageReplayer(plan, links)
            assert (replayer.state_bytes, replayer.activation_bytes(batches)) == ranks[number]


def test_a_checkpoint_resumes_under_another_split(tmp_path):
    """Prevents: a saved text-only model that another layout cannot go on from."""
    layouts = toy_plan(QWEN, stages_of(QWEN, 2)), toy_plan(QWEN, stages_of(QWEN), tensor=2)
    compare_resumed(tmp_path, *((plan, 1) for plan in layouts), steps=STEPS)
