"""Activations that units save on a fake device, by line of the cost table, and their backward
memory: a case of fake_device_cases.py.

Layers have their real sizes. The middle one of three layers is measured.
"""

import gc
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from toy import OPTIONS

from megatron.vlm.measure.fake_device.memory import BLOCK_BYTES, Label, MemoryTracker
from megatron.vlm.measure.fake_device.mode import FakeDevice, fake_cuda
from megatron.vlm.measure.random_batches import random_batch
from megatron.vlm.measure.stage_replay import act_as_stage
from megatron.vlm.step.train import build_trainer
from omnibal.cost.analytic import kept_lines
from omnibal.cost.towers import LAST_OUTPUT
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.model.config import load_cluster, load_model
from omnibal.model.layer_kinds import ExpertsConfig, LayerRun
from omnibal.model.parallel import Parallel
from omnibal.model.units import feature_names, model_parts, unit_kinds, unit_names
from omnibal.pipeline.unit_runs import stages_from_cuts

CLUSTER = load_cluster("h100-80g").model_copy(update={"host_us": 0.0})
SEGMENTS, TILES, CLIPS, LOSS_TOKENS = (2048, 1024, 1024), 3, 2, 1000
IMAGES = (1024, 512, 512)
"""Tokens of native-resolution images."""
LAYERS = 3
ROUNDING = 1 << 18
"""Tolerance in bytes of sums over a model's tensors."""
INPUTS = ("scaled_add", "aten.add", "aten.clone")
"""Operations that produce the next layer's input or the projector's shuffled input."""
DEEPSTACK = "vision_deepstack.0"
"""Module of a deepstack projector, counted with its layer."""

MODULES = {
    "vision_embed": "vision_embedding",
    "projector": "projector",
    "vision_projector": "projector",
    "audio_embed": "audio_embedding",
    "audio_projector": "audio_projector",
    "language_embed": "embedding",
    "head": "head",
}
"""Modules of units other than layers."""

UNITS = (
    {
        f"{kind}_layer{ending}": f"{kind}.layers.1"
        for kind, endings in (
            ("vision", ("", "_window", "_deepstack")),
            ("audio", ("",)),
            ("language", ("", "_experts32", "_experts256")),
        )
        for ending in endings
    }
    | {f"language_layer_linear{ending}": "language.layers.1" for ending in ("", "_experts256")}
    | {name: module for name, module in MODULES.items() if "projector" in name or "audio" in name}
)
"""Module of an example unit, by measured name."""

WITH_EXPERTS = " with experts"
SIZES = {"experts": 32, "experts_per_token": 4, "ffn_hidden_size": 512}
EXPERTS = ExpertsConfig(**SIZES, auxiliary_loss=0.01)

CASES = (
    ("internvl-chat-1.5-6b-20b", 4, False, ()),
    ("eva-clip-18b-internlm2-20b", 2, True, ()),
    ("qwen2.5-32b", 4, True, ()),
    ("internvl3.5-1b", 1, False, ("vision", "projector")),
    ("internvl3-8b-whisper", 4, True, ()),
    ("qwen3-vl-8b", 1, False, ()),
    ("qwen3-vl-32b", 4, True, ("language",)),
    ("qwen2.5-vl-7b", 4, True, ()),
    ("qwen3.5-9b", 1, False, ()),
    ("qwen3.5-35b-a3b", 2, True, ()),
    (f"internvl2.5-8b{WITH_EXPERTS}", 2, True, ()),
)


def one_stage_plan(
    name: str, tensor: int, sequence_parallel: bool, frozen: tuple[str, ...]
) -> Plan:
    """Return a plan of one stage with few layers."""
    preset = name.removesuffix(WITH_EXPERTS)
    model = load_model(preset)
    model = model.with_layers(**dict.fromkeys(model.towers, LAYERS))
    if model.language.is_hybrid:  # the last layer is not linear
        linear, full = model.language.runs
        runs = (linear.model_copy(update={"layers": LAYERS - 1}), full)
        model = model.with_tower("language", runs=runs)
    if model.images is not None:
        # Deepstack projector in the middle layer; windows up to it.
        deepstack = (1,) if model.images.deepstack_layers else ()
        full = (2,) if model.images.full_layers else ()
        model = model.with_tower("vision", deepstack_layers=deepstack, full_layers=full)
    if preset != name:
        model = model.with_tower("language", runs=(LayerRun(layers=1, experts=EXPERTS),))
    [stage] = stages_from_cuts(model, ())
    parallel = Parallel(pipeline=1, tensor=tensor, sequence_parallel=sequence_parallel)
    return Plan(
        model=model, precision="bf16", parallel=parallel, stages=(stage,), cluster=CLUSTER,
        data=None, frozen=frozen,
    )  # fmt: skip


class OnDevice(NamedTuple):
    """Device memory used by a micro-batch."""

    kept: dict[tuple[str, str], int]
    """Bytes allocated by its forward and still live, by module and operation."""
    most_backward: dict[str, int]
    """Peak bytes above the start while a unit runs backward, by module."""


def run_on_device(fake_device: FakeDevice, plan: Plan) -> OnDevice:
    """Run a micro-batch forward and backward."""
    with act_as_stage(plan.parallel, 0) as links:
        trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=0)
        fake_device.places.name(trainer.stage)
        tiles = TILES if plan.model.takes_images else 0
        clips = CLIPS if plan.model.takes_audio else 0
        images = IMAGES if plan.model.images is not None else ()
        sizes = (tiles, SEGMENTS, LOSS_TOKENS, plan.stages[0])
        batch = random_batch(plan.model, *sizes, clips=clips, images=images)
        fields = {name: value for name, value in vars(batch).items() if torch.is_tensor(value)}
        batch = replace(batch, **{name: fake_device.fake(each) for name, each in fields.items()})
        memory = fake_device.memory
        gc.collect()  # frees the previous case's model
        memory.watch()
        memory.settle(Label("", "", ""))  # a maximum
        before, before_bytes = memory.contents(), memory.now_bytes
        output = trainer.models[0](batch.to(torch.device("cuda")))
        found: dict[tuple[str, str], int] = defaultdict(int)
        memory.watch()
        memory.settle(Label("", "", ""))
        for label, (_, size) in memory.contents().items():
            found[label.where, label.operation] += size - before.get(label, (0, 0))[1]
        most: dict[str, int] = defaultdict(int)
        settle, memory.settle = memory.settle, partial(_settle, memory, most)
        output.backward()
        memory.settle = settle
    return OnDevice(found, {unit: size - before_bytes for unit, size in most.items()})


def _settle(memory: MemoryTracker, most: dict[str, int], label: Label, working: int = 0) -> None:
    """Record live bytes per unit, replacing the comparison with the peak."""
    tower, _, rest = label.where.partition(".layers.")
    unit = f"{tower}.layers.{rest.partition('.')[0]}" if rest else tower.partition(".")[0]
    most[unit] = max(most[unit], memory.now_bytes + working)


def name_origin(where: str, operation: str) -> str:
    """Return a tensor's origin as in the cost table: the fused operation's name, or the module."""
    library, _, name = operation.partition("::")
    is_fused = library == "omnibal"
    made = f"{where}.{name}".strip(".") if is_fused else where or f"{library}.{name}"
    # Router tensors and row weights count for the mixture, products for the experts.
    mixture = {"mlp.router": "mlp", "mlp.experts.swiglu": "mlp.experts"}
    return "" if made in INPUTS else mixture.get(made, made)


def check(fake_device: FakeDevice, name: str, *layout: object) -> None:
    """Assert that the device memory equals each line of the cost table, within blocks."""
    plan = one_stage_plan(name, *layout)
    found = run_on_device(fake_device, plan)
    sizes = {
        "fixed": 1, "tiles": TILES, "clips": CLIPS, "tokens": sum(SEGMENTS),
        "loss_tokens": LOSS_TOKENS, "squared_tokens": sum(tokens**2 for tokens in SEGMENTS),
        "image_tokens": sum(IMAGES), "squared_image_tokens": sum(size**2 for size in IMAGES),
    }  # fmt: skip
    features = np.array([sizes[feature] for feature in feature_names(plan.model)], np.float64)
    lines = kept_lines(plan.model, plan.parallel, plan.precision, plan.frozen, plan.adapters)
    measured = {kind.name: kind.measured_name for kind in unit_kinds(plan.model)}
    lines = {measured[name]: each for name, each in lines.items()}
    for unit, prefix in UNITS.items():
        if unit not in lines or _is_frozen(plan, unit):
            continue
        prefix = _find_layer(plan, unit, prefix)
        expected: dict[str, float] = defaultdict(float)
        for line in (line for line in lines[unit] if line.what != LAST_OUTPUT):
            expected[line.made_by] += float(features @ line.bytes)
        allocated = saved_bytes(found, prefix)
        if unit == "vision_layer_deepstack":
            deepstack = saved_bytes(found, DEEPSTACK)
            allocated |= {f"deepstack.{made}": size for made, size in deepstack.items()}
        if unit == "audio_embed":
            del allocated[""]  # its output counts for the first layer
        what = (name, *layout, unit)
        assert set(allocated) == set(expected), (what, dict(allocated), dict(expected))
        for made, size in allocated.items():
            most = 4 * BLOCK_BYTES
            if plan.model.language.zero_centered_norms and made == "":
                most += 2 * 4 * plan.model.language.hidden_size  # both norms' weights plus 1
            assert abs(size - expected[made]) <= most, (what, made, size, expected[made])
    check_working(plan, features, found.most_backward)


def saved_bytes(found: OnDevice, prefix: str) -> dict[str, int]:
    """Return bytes saved by a module and its submodules, by origin."""
    allocated: dict[str, int] = defaultdict(int)
    for (where, operation), size in found.kept.items():
        if size and (where == prefix or where.startswith(f"{prefix}.")):
            allocated[name_origin(where[len(prefix) + 1 :], operation)] += size
    return allocated


def _find_layer(plan: Plan, unit: str, module: str) -> str:
    """Return the module, or the tower's last layer of this kind if the middle layer differs."""
    tower = unit.partition("_layer")[0]
    measured = {kind.name: kind.measured_name for kind in unit_kinds(plan.model) if kind.is_layer}
    units = (measured.get(name, "") for name in unit_names(plan.model))
    names = [name for name in units if name.startswith(f"{tower}_layer") and tower != "audio"]
    if not names or names[LAYERS // 2] == unit:
        return module
    last = max(number for number, name in enumerate(names) if name == unit)
    return f"{tower}.layers.{last}"


def _is_frozen(plan: Plan, unit: str) -> bool:
    """Return whether a unit has no backward: it and its tower are frozen."""
    tower = "vision" if unit == "projector" else unit.split("_")[0]
    parts = {tower, unit} if unit.endswith("projector") else {tower}
    return tower != "language" and parts & set(model_parts(plan.model)) <= set(plan.frozen)


def check_working(plan: Plan, features: np.ndarray, most: dict[str, int]) -> None:
    """Assert each unit's backward peak: saved activations plus its temporary memory."""
    cost = JobSpec(
        model=plan.model, cluster=plan.cluster, parallel=plan.parallel, precision="bf16",
        frozen=plan.frozen,
    ).cost  # fmt: skip
    shared = max(features @ unit.shared_bytes for unit in cost.units.values())
    # Image positions and both rotary tables, counted for no unit.
    besides = 2 * sum(SEGMENTS) * 128 * 2 + ROUNDING
    if plan.model.language.prediction_layers:  # and the embedding's gradient of predictions
        besides += 2 * sum(SEGMENTS) * plan.model.language.hidden_size
    if (tower := plan.model.images) is not None:  # and of patches
        besides += 4 * sum(IMAGES) * tower.positions_per_item * tower.head_width
        # Gradients of deepstack features wait for their projectors.
        waiting = len(tower.deepstack_layers) * sum(IMAGES)
        besides += 2 * waiting * plan.model.language.hidden_size
    kept, looked_at = 0.0, 0
    numbers: defaultdict[str, count[int]] = defaultdict(count)
    kinds = {kind.name: kind for kind in cost.kinds}
    for kind in (kinds[name] for name in unit_names(plan.model)):
        unit = cost.units[kind.name]
        kept += features @ unit.activation_bytes
        layer = next(numbers[kind.tower]) if kind.is_layer else None
        name = MODULES[kind.name] if layer is None else f"{kind.tower}.layers.{layer}"
        needed = kept + max(unit.transient_bytes @ features) + shared
        # The loss is outside the head's modules, but its backward starts the head's.
        measured = max(most[name], most[""]) if name == "head" else most.get(name)
        if kind.has_deepstack and measured is not None:
            measured = max(measured, most[DEEPSTACK.partition(".")[0]])
        if unit.has_backward and measured is not None:
            looked_at += 1
            unasked_of = name == "embedding" and "projector" in plan.frozen
            difference = measured - needed
            # The feature gradient is counted although a frozen encoder does not need it.
            unasked = features @ cost.units["projector"].output_bytes if unasked_of else 0
            if name == "head" and plan.model.language.prediction_layers:
                unasked += 0.03 * needed  # moments of both uses are bounds
            what = (plan.model.name, str(plan.parallel), plan.frozen, name, difference)
            assert -ROUNDING - unasked <= difference <= besides, what
    assert looked_at > LAYERS


def units_kept() -> None:
    """Each line of the cost table, and the backward memory of units."""
    with fake_cuda() as fake_device:
        for case in CASES:
            check(fake_device, *case)
