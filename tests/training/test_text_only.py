"""A model without encoder, equal under all layouts.

test_text_only_conversion.py compares it with Transformers.
"""

import pytest
from tensor_parallel_cases import compare_resumed, compare_with_one_process
from toy import cut_plan, stages_of, toy_plan, toy_text_model

from omnibal.model.config import RopeScaling

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
    """Prevents stages without encoder that wait for features or change the loss."""
    plan = cut_plan(MODELS[name], *cuts, recompute={"language": (0, 2)}, **sizes)
    compare_with_one_process(plan, STEPS)


def test_a_checkpoint_resumes_under_another_split(tmp_path):
    """Prevents text-only checkpoints that resume under their own layout only."""
    layouts = toy_plan(QWEN, stages_of(QWEN, 2)), toy_plan(QWEN, stages_of(QWEN), tensor=2)
    compare_resumed(tmp_path, *((plan, 1) for plan in layouts), steps=STEPS)
