"""A model without an encoder: the same numbers under every layout.

test_text_only_conversion.py compares them with Transformers' own.
"""

import numpy as np
import pytest
from ranks import run_ranks
from tensor_parallel_cases import compare_resumed, compare_with_one_process
from toy import OPTIONS, cut_plan, stages_of, toy_plan, toy_text_model

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
from megatron.vlm.model.stage import build_stage
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.model.config import RopeScaling
from omnibal.model.parallel import Parallel
from omnibal.model.units import unit_names

pytestmark = pytest.mark.quick

LLAMA = toy_text_model(
    rope_base=20, rope_scaling=RopeScaling(factor=8, original_positions=40), vocab_size=51
)
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
    plan = cut_plan(MODELS[name], *cuts, recompute={"language": (0, 2)}, **sizes)
    compare_with_one_process(plan, STEPS)


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
