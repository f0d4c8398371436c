"""A vision and audio model, cut anywhere: losses, gradients and weights of one process."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tensor_parallel_cases import as_one_process, compare_with_one_process
from toy import OPTIONS, cut_plan, toy_batch, toy_omni_model

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step import links as links_module
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.setting import CostSetting
from omnibal.model.units import model_parts
from omnibal.pipeline.unit_runs import stage_units

MODEL = toy_omni_model()
# Samples of (tiles, text tokens, clips), in packs with tiles and clips, one kind, or none.
STEPS = [
    [[(2, 9, 1), (1, 14, 0)], [(0, 12, 0), (0, 7, 0)], [(3, 5, 0)], [(0, 8, 3), (0, 6, 1)]],
    [[(0, 20, 2)], [(1, 6, 2), (4, 10, 0)], [(2, 8, 1)]],
]

# Units of the model: 0 vision embed, 1-4 vision layers, 5 vision projector, 6 audio embed,
# 7-10 audio layers, 11 audio projector, 12 language embed, 13-15 language layers, 16 head.
PLANS = {
    "inside-the-audio-encoder": ((9,), {}),
    "between-the-encoders": ((6,), {}),
    "inside-vision-and-before-the-audio-projector": ((3, 11), {}),
    "before-the-language-embed": ((12,), {}),
    "five-stages-one-of-audio-layers-alone": ((4, 8, 10, 14), {}),
    "two-pipelines": ((9,), {"data": 2}),
    "tp2": ((), {"tensor": 2}),
    "tp2-sp-pp2": ((9,), {"tensor": 2, "sequence_parallel": True}),
}


@pytest.mark.parametrize(("cuts", "sizes"), PLANS.values(), ids=PLANS)
def test_split_equals_one_process(cuts, sizes):
    """Prevents lost or swapped features or gradients of the two encoders, ranks that hang on packs
    without recordings, and wrongly split heads or norms."""
    recompute = {"vision": (1,), "audio": (0, 2), "language": (1,)}
    compare_with_one_process(cut_plan(MODEL, *cuts, recompute=recompute, **sizes), STEPS)


def test_steps_without_recordings_and_without_any_item_train_and_do_not_hang():
    """Prevents stages that wait for an empty tensor, and weights without gradients."""
    steps = [[[(0, 12, 0)], [(0, 9, 0)]], [[(2, 8, 0)], [(0, 6, 0)]], [[(0, 7, 2)]]]
    plan = cut_plan(MODEL, 3, 9)
    compare_with_one_process(plan, steps)
    for part, has_items in (("vision_embedding.", [0, 1, 0]), ("audio_embedding.conv", [0, 0, 1])):
        moved = [
            {bool(grad.any()) for name, grad in of_step.items() if name.startswith(part)}
            for of_step in as_one_process(plan, steps)[1]
        ]
        assert moved == [{bool(each)} for each in has_items]


def test_keys_of_the_audio_encoder_get_no_bias():
    """Prevents a key bias, absent in Whisper, that Adam trains on rounding errors."""
    _, gradients, weights = as_one_process(cut_plan(MODEL), STEPS)
    names = [name for name in weights if name.startswith("audio.") and name.endswith("qkv.bias")]
    assert len(names) == MODEL.audio.layers
    for name in names:
        weight, gradient = (
            one[name].unflatten(0, (MODEL.audio.heads, 3, -1)) for one in (weights, gradients[0])
        )
        assert not weight[:, 1].any() and not gradient[:, 1].any()
        assert weight[:, [0, 2]].all()


def count_sent(links, plan, step):
    """Return (bytes to the next stage, bytes to the previous stage), moved parameters, loss."""
    sent = {links.activations: 0, links.gradients: 0}
    isend = dist.isend

    def count_and_send(tensor, target, group):
        sent[group] += tensor.nbytes
        return isend(tensor, target, group=group)

    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    before = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
    batches = [toy_batch(plan.model, pack, seed=i) for i, pack in enumerate(step)]
    links_module.dist.isend = count_and_send
    result = train_step(trainer, MicroBatchStream.of(batches))
    moved = {n: not torch.equal(before[n], p) for n, p in trainer.stage.named_parameters()}
    return tuple(sent.values()), moved, result.loss


def planned_bytes(cost, plan, step):
    """Return the bytes over each cut in a step, (forward, backward), by the planner's costs."""
    batches = [toy_batch(plan.model, pack, seed=0) for pack in step]
    totals = {
        name: sum(vars(one)[name] for one in batches) for name in ("tiles", "clips", "tokens")
    }
    totals["fixed"] = len(batches)
    vector = np.array([totals.get(name, 0.0) for name in cost.features])
    last = [cost.units[stage_units(cost.kinds, stage.units)[-1]] for stage in plan.stages[:-1]]
    return [
        tuple(round(vector @ each) for each in (unit.output_bytes, unit.output_gradient_bytes))
        for unit in last
    ]


@pytest.mark.parametrize(
    "frozen",
    [
        (),
        ("vision", "vision_projector"),
        ("audio",),
        ("vision", "audio", "language"),
        ("vision", "vision_projector", "audio", "audio_projector"),
    ],
    ids=lambda parts: "+".join(parts) or "none",
)
def test_what_crosses_cuts_is_what_the_planner_counts_and_frozen_parts_stay(frozen):
    """Prevents planned message sizes other than the sent ones, gradients sent to frozen encoders,
    frozen parts that move, and trained parts that do not."""
    plan, one = cut_plan(MODEL, 4, 6, 9, frozen=frozen), cut_plan(MODEL)
    [(_, _, expected)] = run_ranks(one.parallel, count_sent, one, STEPS[0])
    ranks = run_ranks(plan.parallel, count_sent, plan, STEPS[0])
    cost = analytic_cost(CostSetting(MODEL, plan.cluster, plan.parallel, "fp32", frozen))
    sent = [(before[0][0], after[0][1]) for before, after in pairwise(ranks)]
    assert sent == planned_bytes(cost, plan, STEPS[0])
    for _, moved, loss in ranks:
        assert loss == pytest.approx(expected, rel=1e-5)
        for name, is_moved in moved.items():
            assert is_moved == (part_of(name) not in frozen), name


def part_of(parameter: str) -> str:
    """Return the model part of a parameter, by its name."""
    first = parameter.split(".")[0].removesuffix("_embedding")
    part = "vision_projector" if first == "projector" else first
    return part if part in model_parts(MODEL) else "language"
