"""Adapters (LoRA): the model with them is the one whose weights have their product added, they
alone are trained, and every way to divide ranks trains them to the same numbers."""

from dataclasses import replace

import mixture_cases
import pytest
import torch
from native_resolution_cases import pack_of, qwen2_5_vl, qwen3_vl, sample_of
from ranks import run_ranks
from tensor_parallel_cases import (
    MODELS,
    STEPS,
    Feed,
    alone,
    batches_of,
    compare_with_one_process,
)
from toy import OPTIONS, stages_of, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.data.native_resolution import Grid
from omnibal.model.adapters import AdapterConfig, adapters_of

EVERYWHERE = AdapterConfig(rank=4, alpha=8, parts=("vision", "projector", "language"))
SOME = adapters_of(rank=3, alpha=6, targets="q_proj,v_proj,down_proj", rank_stabilized=True)
NEVER_CLIPPED = replace(OPTIONS, clip_grad=0.0)


def plan_of(name, adapters, *cuts, frozen=(), recompute=None, **sizes):
    model = MODELS[name]
    plan = toy_plan(model, stages_of(model, *cuts, **(recompute or {})), **sizes)
    return plan.model_copy(update={"adapters": adapters, "frozen": frozen})


def what_moves(links, plan):
    """Whether each parameter moved in two steps; B moves first, and then A."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    before = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
    for number, packs in enumerate(STEPS[:2]):
        train_step(trainer, MicroBatchStream.of([*batches_of(plan.model, number, packs)]))
    trainer.wait_for_weights()
    return {name: not torch.equal(before[name], p) for name, p in trainer.stage.named_parameters()}


def test_adapters_alone_move_and_parts_that_are_trained_whole():
    """Prevents: base weights that move, adapters that do not, and linears that get some unasked."""
    plan = plan_of("6B-like", SOME, frozen=("vision",))
    [moved] = run_ranks(plan.parallel, what_moves, plan)
    assert moved == {name: ".adapters." in name or name.startswith("projector.") for name in moved}
    names = {name.split(".adapters.")[1] for name in moved if ".adapters." in name}
    pieces = ("q_proj", "v_proj", "down_proj")
    assert names == {f"{piece}.lora_{matrix}" for piece in pieces for matrix in "ab"}


# Rows of q, k and v lie by groups of heads, and all those of the gate before those of the other.
_ROWS = {
    "q_proj": lambda rows, groups: rows.unflatten(0, (groups, -1))[:, :-20],
    "k_proj": lambda rows, groups: rows.unflatten(0, (groups, -1))[:, -20:-10],
    "v_proj": lambda rows, groups: rows.unflatten(0, (groups, -1))[:, -10:],
    "gate_proj": lambda rows, groups: rows[: len(rows) // 2],
    "up_proj": lambda rows, groups: rows[len(rows) // 2 :],
}
_LINEARS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv"), "self_attention.linear_qkv"),
    **dict.fromkeys(("o_proj", "proj"), "self_attention.linear_proj"),
    **dict.fromkeys(("gate_proj", "up_proj", "fc1"), "mlp.linear_fc1"),
    **dict.fromkeys(("down_proj", "fc2"), "mlp.linear_fc2"),
    "linear_1": "linear_fc1",
    "linear_2": "linear_fc2",
}


def with_and_merged(links, plan):
    """Loss with random adapters, and of the model without, with their products in its weights."""
    losses, pairs = [], {}
    for one in (plan, plan.model_copy(update={"adapters": None})):
        trainer = build_trainer(one, links, NEVER_CLIPPED, steps=10, seed=3)
        stage = trainer.stage
        if one.adapters is not None:
            generator = torch.Generator().manual_seed(1)
            for name, parameter in stage.named_parameters():
                if name.endswith("lora_b"):
                    parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
                    a = stage.get_parameter(name.replace("lora_b", "lora_a")).detach().clone()
                    pairs[name] = parameter.detach().clone() @ a * plan.adapters.scale
        else:
            for name, product in pairs.items():
                owner, piece, _ = name.replace(".adapters", "").rsplit(".", 2)
                weight = stage.get_submodule(owner).get_submodule(_LINEARS[piece]).weight.data
                rows = _ROWS.get(piece, lambda all_rows, groups: all_rows)(weight, 2)
                rows += product.view(rows.shape)
        [batch, *_] = batches_of(one.model, 0, STEPS[0])
        losses.append(train_step(trainer, MicroBatchStream.of([batch])).loss)
    return losses


def test_equals_weights_with_the_products_added():
    """Prevents: a scale, an order of matrices, or rows that are not those of PEFT's q, k, v,
    gate and up."""
    plan = plan_of("6B-like", EVERYWHERE)
    [(beside, merged)] = run_ranks(plan.parallel, with_and_merged, plan)
    assert beside == pytest.approx(merged, rel=1e-5)
    without = plan.model_copy(update={"adapters": None})
    [(plain, _)] = run_ranks(plan.parallel, with_and_merged, without)
    assert abs(plain - merged) > 1e-2


@pytest.mark.parametrize(
    ("adapters", "cuts", "sizes"),
    [
        pytest.param(SOME, (5,), {"tensor": 2, "sequence_parallel": True}, id="tp2-sp-pp2"),
        pytest.param(EVERYWHERE, (2,), {"tensor": 2, "data": 2, "sharded": 2}, id="tp2-zero3-pp2"),
    ],
)
def test_every_way_to_divide_equals_one_process(adapters, cuts, sizes):
    """Prevents: gradients of whole matrices that are parts on each rank, and recomputed layers
    without gradients where nothing before them is trained."""
    recompute = {"language": (0, 1), "vision": (0,)}
    compare_with_one_process(plan_of("6B-like", adapters, *cuts, recompute=recompute, **sizes))


@pytest.mark.parametrize(
    ("cuts", "sizes"),
    [
        pytest.param((6,), {"data": 2, "expert": 2, "recompute": (0, 2)}, id="ep2-pp2"),
        pytest.param((), {"tensor": 2, "sequence_parallel": True, "expert": 2}, id="tp2-sp-ep2"),
    ],
)
def test_beside_attention_of_layers_with_experts(cuts, sizes):
    """Prevents: experts that are frozen, and whose tokens' gradients are lost on other ranks."""
    changes = {"frozen": ("vision",), "adapters": AdapterConfig(rank=4, alpha=8)}
    plan = mixture_cases.plan_of(*cuts, **sizes).model_copy(update=changes)
    compare_with_one_process(plan, rel=2e-5)
    _, _, weights = alone(plan)
    assert any(".adapters.o_proj." in name for name in weights)
    assert not any(".mlp." in name and "language" in name for name in weights)


NATIVE = {"Qwen3-VL": qwen3_vl(), "Qwen2.5-VL": qwen2_5_vl(kv_heads=2)}
NATIVE_STEPS = [
    [[((Grid(1, 6, 4), Grid(1, 2, 8)), 9), ((), 6)], [((Grid(3, 4, 6),), 5)]],
    [[((Grid(1, 8, 2),), 20)], [((), 7)]],
]


def native_packs(model, number, packs):
    for index, pack in enumerate(packs):
        seed = 100 * number + 10 * index
        yield pack_of([sample_of(model, *one, seed=seed + i) for i, one in enumerate(pack)])


def native_plan(name, *cuts, **sizes):
    model = NATIVE[name]
    stages = stages_of(model, *cuts, vision=(0, 3), language=(0,))
    return toy_plan(model, stages, **sizes).model_copy(update={"adapters": EVERYWHERE})


@pytest.mark.parametrize(
    ("name", "cuts", "sizes"),
    [
        pytest.param("Qwen3-VL", (4,), {"tensor": 2, "sequence_parallel": True}, id="Qwen3-VL"),
        pytest.param("Qwen2.5-VL", (), {"tensor": 2, "data": 2}, id="Qwen2.5-VL"),
    ],
)
def test_beside_encoders_of_native_resolution(name, cuts, sizes):
    """Prevents: adapters beside padded heads or a gate of an encoder, or behind deepstack features,
    that tensor-parallel ranks train otherwise."""
    plan, packs = native_plan(name, *cuts, **sizes), {"feed": Feed(native_packs)}
    compare_with_one_process(plan, NATIVE_STEPS, rel=2e-5, **packs)
    assert any(".adapters.qkv." in key for key in alone(plan, NATIVE_STEPS, **packs)[2])
