"""Random legal combinations of features: drawn, planned, and trained against one process."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import native_resolution_cases as native
import shared_training_cases as shared
import torch
from chunk_cases import with_chunks
from conversion_cases import model_of
from conversion_file_cases import assert_same_parameters, export_run, export_to_match
from data_parallel_cases import data_parallel_plan, own_stream
from native_pass_cases import own_stream as native_stream
from pydantic import ValidationError
from ranks import run_ranks
from released import imported, save_toy
from tensor_parallel_cases import (
    Feed,
    as_one_process,
    assert_same_results,
    assert_same_training,
    train_steps,
)
from toy import cut_plan, pack, stages_of, toy_audio_encoder, toy_sample

from megatron.vlm.conversion.tensor_map import TensorLayout
from megatron.vlm.inputs.data import LossWeighting
from omnibal.base.errors import UserError
from omnibal.job.check import check_plan, training_obstacles
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan, PlannedLevel, write_plan
from omnibal.job.plan_data import MockData
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.adapter_settings import AdapterConfig, adapter_mistake
from omnibal.model.config import ModelConfig
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import ContextExchange, CutRule
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.units import frozen_mistake, model_parts
from omnibal.pipeline.schedules import PipelineSchedule

DEEP = {"layers": 4}
"""Language layers, enough for two chunks on two stages."""


LONG = {"max_positions": 640}
FURTHER = LONG | {"prediction_layers": 1}
"""Required in configurations of Transformers."""


@dataclass(frozen=True)
class Kind:
    """A model and its export layout."""

    model: ModelConfig
    layout: TensorLayout | None
    """None: export like a folder of the model without audio encoder."""

    @property
    def is_native(self) -> bool:
        return self.model.images is not None


@cache
def kinds() -> dict[str, Kind]:
    """Return the models to draw from, by name."""
    tiles, tied = model_of("300m-qwen2"), model_of("6b-qwen2-tied")
    mixture = model_of("300m-qwen3-moe").with_tower("language", **DEEP)
    text = ModelConfig(
        name="text", language=mixture.language.model_copy(update={"runs": (), **LONG})
    )
    hybrid = native.qwen3_5(**FURTHER).model_copy(update={"encoders": {}})
    audio = {"audio": toy_audio_encoder(layers=2)}
    return {
        "tiles": Kind(tiles.with_tower("language", **DEEP), TensorLayout.INTERNVL_QWEN2),
        "tiles-tied": Kind(tied.with_tower("language", **DEEP), TensorLayout.TRANSFORMERS),
        "experts": Kind(mixture, TensorLayout.INTERNVL_QWEN3_MOE),
        "text": Kind(text, TensorLayout.QWEN3),
        "audio": Kind(tiles.model_copy(update={"encoders": tiles.encoders | audio}), None),
        "qwen3-vl": Kind(native.qwen3_vl(**LONG), TensorLayout.QWEN3_VL),
        "qwen3-vl-tied": Kind(native.qwen3_vl(**LONG, tied_head=True), TensorLayout.QWEN3_VL),
        "qwen3-vl-moe": Kind(native.qwen3_vl_moe(**LONG), TensorLayout.QWEN3_VL_MOE_STACKED),
        "qwen3.5": Kind(native.qwen3_5(**FURTHER), TensorLayout.QWEN3_5),
        "qwen3.5-tied": Kind(native.qwen3_5(**FURTHER, tied_head=True), TensorLayout.QWEN3_5),
        "qwen3.5-moe": Kind(native.qwen3_5_moe(**FURTHER), TensorLayout.QWEN3_5_MOE),
        "qwen3.5-text": Kind(hybrid, TensorLayout.QWEN3_5_TEXT),
        "qwen2.5-vl": Kind(native.qwen2_5_vl(**LONG, kv_heads=2), TensorLayout.QWEN2_5_VL),
    }


@dataclass(frozen=True)
class Drawn:
    """A plan that may be refused, and settings of its steps."""

    kind: str
    plan: Plan
    weighting: LossWeighting
    drop_path: float
    seed: int
    """Seed of the packs."""

    @property
    def summary(self) -> str:
        """A short description of the combination."""
        plan = self.plan
        weights = f"{plan.parallel.sharding} weights over {plan.parallel.sharded}"
        encoders = plan.data_parallel_encoders
        encoding = encoders and f"data-parallel over {encoders.pipelines}, {encoders.sharded}"
        levels = [(each.context, str(each.cut), str(each.exchange)) for each in plan.levels]
        held = "; ".join(" ".join(map(str, stage.units)) for stage in plan.stages)
        again = sum(bool(stage.recompute) for stage in plan.stages)
        parts = [
            self.kind, str(plan.parallel), weights, plan.schedule.name, held,
            f"{again} recompute", encoding, levels, plan.frozen, plan.adapters and "adapters",
            self.weighting, self.drop_path and "drop path",
        ]  # fmt: skip
        return ", ".join(str(part) for part in parts if part)


WORLDS = [(1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 4, 1), (4, 1, 1), (1, 1, 2), (1, 2, 1)]
"""Tensor, pipeline and data sizes."""
KIND_WEIGHTS = {"experts": 3, "audio": 3, "qwen3-vl-moe": 2}
LEVELS = [(2, CutRule.ZIGZAG), (4, CutRule.WHOLE), (2, CutRule.COST), (4, CutRule.CONTIGUOUS)]


def draw_sizes(draw: random.Random, kind: Kind, is_shared: bool) -> dict[str, Any]:
    """Draw sizes of at most four ranks, with more weight on experts and hybrid sharding."""
    tensor, pipeline, data = draw.choice([each for each in WORLDS if each[2] > is_shared])
    sizes: dict[str, Any] = {"pipeline": pipeline, "data": data}
    has_experts = any(layer.experts for layer in kind.model.language.kinds)
    if tensor > 1:
        sizes |= {"tensor": tensor, "sequence_parallel": has_experts or draw.random() < 0.7}
    if has_experts:
        sizes["expert"] = draw.choice([each for each in (1, 2, 4) if each <= tensor * data])
    sizes["sharded"] = draw.choice([each for each in (1, 2, 2, 4) if each <= data])
    return sizes


def draw_trained(draw: random.Random, kind: Kind) -> dict[str, Any]:
    """Draw compatible frozen parts and adapters."""
    model, parts = kind.model, list(model_parts(kind.model))
    if draw.random() < 0.2:
        own = tuple(part for part in parts if part == "language" or draw.random() < 0.4)
        adapters, frozen = AdapterConfig(rank=4, alpha=8, parts=own), set(parts) - {*own}
    else:
        is_frozen = draw.random() < 0.4
        adapters, frozen = None, {part for part in parts if is_frozen and draw.random() < 0.4}
    given = {"adapters": adapters, "frozen": tuple(sorted(frozen))}
    mistake = frozen_mistake(model, given["frozen"])
    if mistake or adapter_mistake(model, given["frozen"], adapters):
        return draw_trained(draw, kind)
    return given


def draw_plan(draw: random.Random, name: str, trained: dict[str, Any], is_shared: bool) -> Plan:
    """Draw a plan with random cuts, recomputation and levels; check may refuse it."""
    kind = kinds()[name]
    sizes = draw_sizes(draw, kind, is_shared)
    schedule, chunks = draw.choice(
        [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]
        if sizes["pipeline"] > 1
        else [("1f1b", 1)]
    )
    pipeline = sizes.pop("pipeline")
    is_data_parallel = bool(kind.model.encoders) and draw.random() < 0.35
    held = kind.model.without_encoders() if is_data_parallel else kind.model
    towers = ["language", *held.encoders]
    layers = {tower: count_layers(held, tower) for tower in towers}
    units = sum(layers.values()) + 2 * len(towers)
    parts = pipeline * chunks
    if parts > units:
        raise UserError("there are more chunks than units")
    cuts = tuple(sorted(draw.sample(range(1, units), parts - 1)))

    def again() -> dict[str, tuple[int, ...]]:
        is_some = draw.random() < 0.5
        return {
            tower: tuple(k for k in range(count) if is_some and draw.random() < 0.5)
            for tower, count in layers.items()
        }

    recompute = {} if is_shared else again()
    if is_data_parallel:
        most = sizes.get("tensor", 1) * pipeline * sizes["data"]
        plan = data_parallel_plan(
            kind.model, cuts, recompute=recompute, frozen=trained["frozen"],
            pipelines=draw.choice([k for k in (1, 2, 4) if sizes["data"] % k == 0]),
            per_pass=draw.choice([9, 12]) if kind.is_native else draw.choice([1, 2, 5]),
            kept=draw.choice([0, 1, 7, 99]),
            divided=draw.choice([k for k in (1, 2, 4) if k <= most]),
            **sizes,
        )  # fmt: skip
    else:
        plan = cut_plan(kind.model, *cuts, recompute=recompute, **sizes)
    plan = plan.model_copy(update=trained)
    plan = with_chunks(plan, chunks, schedule)
    one_node = plan.cluster.model_copy(update={"gpus_per_node": 4})
    plan = plan.model_copy(update={"cluster": one_node})
    if is_shared:
        return plan.model_copy(update={"levels": tuple(draw_levels(draw, plan, held, cuts, again))})
    return plan.model_copy(update={"shapes": mock_data(plan.model).describe()})


def count_layers(model: ModelConfig, tower: str) -> int:
    """Return the number of layers of a tower."""
    return model.language.layers if tower == "language" else model.encoders[tower].layers


def draw_levels(draw, plan, held, cuts, again) -> Iterator[PlannedLevel]:
    """Yield three levels. The last two are context-parallel."""
    same = again()
    shapes = [(1, CutRule.CONTIGUOUS), *draw.sample(LEVELS, 2)]
    for number, (context, cut) in enumerate(shapes, 1):
        layers = same if plan.parallel.routing_ranks > 1 else again()
        yield PlannedLevel(
            caps=Caps.of(**dict.fromkeys(plan.model.item_features, 99), tokens=400 * number),
            context=min(context, plan.parallel.data),
            cut=cut,
            exchange=draw.choice([*ContextExchange]),
            attention_weight=0.05,
            recompute=tuple(stage.recompute for stage in stages_of(held, *cuts, **layers)),
        )


def mock_data(model: ModelConfig) -> MockData:
    """Return mock data of four packs per rank, with caps above the drawn packs."""
    caps = Caps.of(**dict.fromkeys(model.item_features, 40), tokens=120)
    return MockData(caps=caps, micro_batches_per_step=4)


def check_saved(plan: Plan, folder: Path) -> Plan:
    """Return the plan as read back from its folder; raises UserError if refused."""
    whole = type(plan).model_validate_json(plan.model_dump_json())
    folder.mkdir()
    write_plan(whole, folder)
    check_plan(folder)
    obstacles = [why for why in training_obstacles(whole) if "shapes only" not in why]
    if obstacles:
        raise UserError(obstacles[0])
    return whole


def plan_again(draw: random.Random, plan: Plan) -> Plan:
    """Return the planner's plan of this model and its trained parts at other sizes."""
    name = next(each for each, kind in kinds().items() if kind.model == plan.model)
    sizes = draw_sizes(draw, kinds()[name], is_shared=False)
    wanted = [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]
    schedule, chunks = draw.choice(wanted if sizes["pipeline"] > 1 else wanted[:1])
    is_data_parallel = draw.random() < 0.4 and bool(plan.model.encoders)
    job = JobSpec(
        model=plan.model,
        cluster=plan.cluster,
        parallel=Parallel(**sizes),
        precision="fp32",
        frozen=plan.frozen,
        adapters=plan.adapters,
        placement=EncoderPlacement.DATA_PARALLEL if is_data_parallel else EncoderPlacement.PIPELINE,
    )
    schedule = PipelineSchedule(name=schedule, chunks=chunks)
    return make_plan(PlanRequest(job=job, data=mock_data(plan.model), schedule=schedule)).plan


def draw_legal(make: Callable[[], Plan], folder: Path) -> Plan:
    """Return the first plan of `make` that is not refused."""
    refused = list[str]()
    for number in range(200):
        try:
            return check_saved(make(), folder / str(number))
        except UserError as error:
            refused.append(str(error))
        except ValidationError as error:
            refused.append(error.errors()[0]["msg"])
    raise AssertionError(refused)


def draw_combination(seed: int, folder: Path) -> tuple[Drawn, Plan]:
    """Return a legal combination, and another plan to resume it."""
    draw = random.Random(seed)
    names = [name for name in kinds() for _ in range(KIND_WEIGHTS.get(name, 1))]
    name = draw.choice(names)
    kind = kinds()[name]
    trained = draw_trained(draw, kind)
    can_share = not (kind.is_native or kind.model.takes_audio or kind.model.language.is_hybrid)
    is_shared = can_share and draw.random() < 0.3
    own = partial(draw_plan, draw, name, trained, is_shared)
    (folder / "own").mkdir()
    (folder / "other").mkdir()
    plan = draw_legal(own, folder / "own")
    make = own if is_shared or draw.random() < 0.3 else partial(plan_again, draw, plan)
    other = draw_legal(make, folder / "other")
    can_drop = kind.model.takes_images and not plan.model.takes_audio
    drop_path = 0.3 if can_drop and draw.random() < 0.3 else 0.0
    weighting = draw.choice([*LossWeighting])
    return Drawn(name, plan, weighting, drop_path, seed), other


def packs_of(model, number, packs, weighting, drop_path, is_audio):
    """Yield the packs of a step, with loss weights by `weighting`."""
    for index, samples in enumerate(packs):
        made = [
            toy_sample(model, *counts, text % 3 * is_audio, seed=100 * number + 10 * index + i)
            for i, counts in enumerate(samples)
            for text in counts[1:]
        ]
        batch = pack(made, weighting)
        keys = torch.arange(batch.tiles) * 0x9E3779B97F4A7C + index if drop_path else None
        yield replace(batch, drop_path_keys_T=keys)


def steps_of(drawn: Drawn) -> tuple[list, Feed]:
    """Return three steps and the feed of their micro-batches."""
    model, draw = drawn.plan.model, random.Random(drawn.seed)
    if drawn.plan.has_shared_packs:
        packed = partial(shared.whole_packs, drop_path=drawn.drop_path)
        steps = [shared.FULL, shared.SHORT, shared.FULL]
        return steps, Feed(packed, shared.own_batches, drawn.drop_path)
    if model.images is not None:
        return native.STEPS[:3], Feed(native.packs_of, native_stream)
    tiles = [0, 1, 2, 3] if model.takes_images else [0]
    steps = [
        [
            [(draw.choice(tiles), draw.randint(3, 14)) for _ in range(draw.randint(1, 3))]
            for _ in range(draw.randint(1, 6))
        ]
        for _ in range(3)
    ]
    own = {"weighting": drawn.weighting, "is_audio": model.takes_audio}
    packed = partial(packs_of, **own, drop_path=drawn.drop_path)
    return steps, Feed(packed, own_stream, drawn.drop_path)


def train_save_resume(links, plan, steps, folder, feed):
    """Train two steps, save, and train the next step with a trainer that loads them."""
    begun = train_steps(links, plan, steps[:2], save=folder, feed=feed)
    return begun, train_steps(links, plan, steps[2:], load=folder, first=2, feed=feed)


def resume_last_step(links, plan, steps, folder, feed):
    return train_steps(links, plan, steps[2:], load=folder, first=2, feed=feed)


def compare_composed(drawn: Drawn, other: Plan, folder: Path) -> None:
    """Train, save, resume under both plans and export; compare with one process."""
    (steps, feed), plan, run = steps_of(drawn), drawn.plan, folder / "run"
    results, gradients, weights = as_one_process(plan, steps, feed=feed)
    ranks = run_ranks(plan.parallel, train_save_resume, plan, steps, run, feed)
    begun, after = zip(*ranks, strict=True)
    assert_same_results(begun, results[:2], 2e-5)
    rest = results[2:], gradients[2:], weights
    assert_same_training(after, plan, rest, 2e-5)
    ranks = run_ranks(other.parallel, resume_last_step, other, steps, run, feed)
    assert_same_training(ranks, other, rest, 2e-5)
    layout = kinds()[drawn.kind].layout
    if layout is None:
        like = save_toy("300m-qwen2", folder / "like", "transformers")
        out = export_to_match(run, like, folder / "out")
    else:
        out = export_run(run, layout, folder / "out")
    again = imported(out, folder / "again")
    if plan.adapters is None:
        assert_same_parameters(again, run)
