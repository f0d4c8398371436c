"""What units keep on a pretended device, line by line: python tests/training/kept_cases.py.

Layers are those of real models at real size, of which the middle one of three is looked at.
"""

import warnings
from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch
from toy import OPTIONS

from megatron.vlm.measure.pretended.memory import BLOCK_BYTES
from megatron.vlm.measure.pretended.mode import Pretence, pretended_cuda
from megatron.vlm.measure.profiler import random_batch
from megatron.vlm.measure.replay import standing_in
from megatron.vlm.step.train import build_trainer
from omnibal.config import load_cluster, load_model
from omnibal.cost.analytic import kept_lines
from omnibal.parallel import Parallel
from omnibal.pipeline.stage import Stage
from omnibal.plan import Plan
from omnibal.units import feature_names

CLUSTER = load_cluster("h100-80g")
SEGMENTS, TILES, LOSS_TOKENS = (2048, 1024, 1024), 3, 1000
LAYERS = 3
INPUTS = ("scaled_add", "aten.add", "aten.clone")
"""What ends a layer, whose output is the next one's input, and what shuffles the projector's."""

UNITS = {
    "vision_layer": "vision.layers.1",
    "projector": "projector",
    "language_layer": "language.layers.1",
}
"""Kinds of unit, and the module of one of each."""

CASES = (
    ("internvl-chat-1.5-6b-20b", 2, True, ()),
    ("internvl-chat-1.5-6b-20b", 4, False, ()),
    ("internvl2.5-8b", 1, False, ()),
    ("internvl2.5-8b", 2, True, ("language",)),
    ("internvl2.5-8b", 4, True, ("vision", "projector")),
    ("internvl2.5-78b", 8, True, ()),
    ("eva-clip-18b-internlm2-20b", 2, True, ()),
    ("internvl2.5-1b", 1, False, ()),
    ("qwen2.5-32b", 4, True, ()),
)


def one_stage(name: str, tensor: int, sequence_parallel: bool, frozen: tuple[str, ...]) -> Plan:
    """A model of few layers in one stage."""
    model = load_model(name)
    towers = ("vision", "language") if model.takes_images else ("language",)
    model = model.with_layers(**dict.fromkeys(towers, LAYERS))
    last = LAYERS - 1
    vision = ("vision embed", f"vision 0..{last}", "projector") if model.takes_images else ()
    stage = Stage.of(*vision, "language embed", f"language 0..{last}", "head")
    parallel = Parallel(pipeline=1, tensor=tensor, sequence_parallel=sequence_parallel)
    return Plan(
        model=model, precision="bf16", parallel=parallel, stages=(stage,), cluster=CLUSTER,
        data=None, frozen=frozen,
    )  # fmt: skip


def kept_on_device(pretence: Pretence, plan: Plan) -> dict[tuple[str, str], int]:
    """Bytes that are there after a forward and were not before, by module and operation."""
    with standing_in(plan.parallel, 0) as links:
        trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=0, can_save=False)
        pretence.device.places.name(trainer.stage)
        tiles = TILES if plan.model.takes_images else 0
        batch = random_batch(plan.model, tiles, SEGMENTS, LOSS_TOKENS, plan.stages[0])
        fields = {name: value for name, value in vars(batch).items() if torch.is_tensor(value)}
        batch = replace(batch, **{name: pretence.fake(each) for name, each in fields.items()})
        before = pretence.device.memory.live()
        output = trainer.model(batch.to(torch.device("cuda")))
        found: dict[tuple[str, str], int] = defaultdict(int)
        for label, (_, size) in pretence.device.memory.live().items():
            found[label.where, label.operation] += size - before.get(label, (0, 0))[1]
        assert output.requires_grad
    return found


def maker(where: str, operation: str) -> str:
    """How the table names what made a tensor: a fused operation by its name, else the module."""
    library, _, name = operation.partition("::")
    if library == "omnibal":
        made = f"{where}.{name}".strip(".")
    else:
        made = where or f"{library}.{name}"
    return "" if made in INPUTS else made


def check(pretence: Pretence, name: str, *layout: object) -> None:
    """Every line of the cost model's table is what the device has, to its blocks."""
    plan = one_stage(name, *layout)
    found = kept_on_device(pretence, plan)
    sizes = {
        "fixed": 1, "tiles": TILES, "tokens": sum(SEGMENTS), "loss_tokens": LOSS_TOKENS,
        "squared_tokens": sum(tokens**2 for tokens in SEGMENTS),
    }  # fmt: skip
    features = np.array([sizes[feature] for feature in feature_names(plan.model)], np.float64)
    lines = kept_lines(plan.model, CLUSTER, plan.parallel, plan.precision, plan.frozen)
    for unit, prefix in UNITS.items():
        if unit not in lines or (unit != "language_layer" and "vision" in plan.frozen):
            continue  # not there, or without a backward
        expected: dict[str, float] = defaultdict(float)
        for line in lines[unit]:
            expected[line.made_by] += float(features @ line.bytes)
        allocated: dict[str, int] = defaultdict(int)
        for (where, operation), size in found.items():
            if size and (where == prefix or where.startswith(f"{prefix}.")):
                allocated[maker(where[len(prefix) + 1 :], operation)] += size
        what = (name, *layout, unit)
        assert set(allocated) == set(expected), (what, dict(allocated), dict(expected))
        for made, size in allocated.items():
            assert abs(size - expected[made]) <= 4 * BLOCK_BYTES, (what, made, size, expected[made])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with pretended_cuda() as pretence:
        for case in CASES:
            check(pretence, *case)
            print(f"passed {case}", flush=True)
