"""Adapters (LoRA): only they are trained, and every parallel layout trains them to equal numbers.
test_adapter_files.py checks their outputs."""

import mixture_cases
import native_resolution_cases as native
import pytest
from ranks import run_ranks
from tensor_parallel_cases import MODELS, Feed, as_one_process, compare_with_one_process, find_moved
from toy import cut_plan

from omnibal.model.adapter_settings import AdapterConfig, adapters_of

EVERYWHERE = AdapterConfig(rank=4, alpha=8, parts=("vision", "projector", "language"))
SOME = adapters_of(rank=3, alpha=6, targets="q_proj,v_proj,down_proj", rank_stabilized=True)
MODEL = MODELS["6B-like"]


def test_adapters_alone_move_and_parts_that_are_trained_whole():
    """Prevents trained base weights, untrained adapters, and adapters on unselected linears."""
    plan = cut_plan(MODEL, adapters=SOME, frozen=("vision",))
    [moved] = run_ranks(plan.parallel, find_moved, plan)
    assert moved == {name: ".adapters." in name or name.startswith("projector.") for name in moved}
    names = {name.split(".adapters.")[1] for name in moved if ".adapters." in name}
    pieces = ("q_proj", "v_proj", "down_proj")
    assert names == {f"{piece}.lora_{matrix}" for piece in pieces for matrix in "ab"}


IN_PARTS = {"tensor": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("adapters", "cut", "sizes"),
    [
        pytest.param(SOME, 5, IN_PARTS, id="tp2-sp-pp2"),
        pytest.param(EVERYWHERE, 2, {"tensor": 2, "data": 2, "sharded": 2}, id="tp2-zero3-pp2"),
    ],
)
def test_every_way_to_divide_equals_one_process(adapters, cut, sizes):
    """Prevents adapter gradients not reduced over tensor-parallel ranks, and recomputed layers that
    lose gradients if no earlier layer is trained."""
    recompute = {"language": (0, 1), "vision": (0,)}
    compare_with_one_process(cut_plan(MODEL, cut, recompute=recompute, adapters=adapters, **sizes))


@pytest.mark.parametrize(
    ("cuts", "sizes"),
    [
        pytest.param((6,), {"data": 2, "expert": 2, "recompute": (0, 2)}, id="ep2-pp2"),
        pytest.param((), {**IN_PARTS, "expert": 2}, id="tp2-sp-ep2"),
    ],
)
def test_beside_attention_of_layers_with_experts(cuts, sizes):
    """Prevents token gradients lost on expert-parallel ranks if experts are frozen."""
    changes = {"frozen": ("vision",), "adapters": AdapterConfig(rank=4, alpha=8)}
    plan = mixture_cases.plan_of(*cuts, **sizes).model_copy(update=changes)
    compare_with_one_process(plan, rel=2e-5)
    _, _, weights = as_one_process(plan)
    assert any(".adapters.o_proj." in name for name in weights)
    assert not any(".mlp." in name and "language" in name for name in weights)


@pytest.mark.parametrize(
    ("model", "cuts", "sizes"),
    [
        pytest.param(native.qwen3_vl(), (4,), IN_PARTS, id="Qwen3-VL"),
        pytest.param(native.qwen2_5_vl(kv_heads=2), (), {"tensor": 2, "data": 2}, id="Qwen2.5-VL"),
    ],
)
def test_beside_encoders_of_native_resolution(model, cuts, sizes):
    """Prevents tensor-parallel ranks from training adapters differently for encoders with padded
    heads or a gate, or after deepstack features."""
    recompute = {"vision": (0, 3), "language": (0,)}
    plan = cut_plan(model, *cuts, recompute=recompute, adapters=EVERYWHERE, **sizes)
    steps = [native.STEPS[0][::2], native.STEPS[1][:2]]
    given = {"steps": steps, "feed": Feed(native.packs_of)}
    compare_with_one_process(plan, rel=2e-5, **given)
    assert any(".adapters.qkv." in key for key in as_one_process(plan, **given)[2])
