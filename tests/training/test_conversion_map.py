"""The tensor map at real model sizes: names and shapes only, on meta or fake tensors."""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from released import RELEASED_CONFIGS, TEXT_SIZES, VISION_SIZES, rename_tensors, write_holes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from toy import stages_of, toy_plan
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    Qwen2Config,
)

from megatron.vlm.checkpoint.identity import architecture_differences
from megatron.vlm.conversion.config_files import configurations
from megatron.vlm.conversion.importing import open_released
from megatron.vlm.conversion.released_config import read_config
from megatron.vlm.conversion.tensor_map import TensorLayout, find_released, parameters
from megatron.vlm.model.initialize import global_parameter_name
from megatron.vlm.model.stage import VLMStage
from megatron.vlm.model.tensor_parallel import unpadded_size
from omnibal.base.errors import UserError
from omnibal.families.named import named_model
from omnibal.job.plan import Plan
from omnibal.model.config import ModelConfig, load_model

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "reproduce"))
from paper import TABLE_9

pytestmark = pytest.mark.quick

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, stop) of a piece of a tensor, by axis."""


def cuts_of(model: ModelConfig, stage_layers: Sequence[int]) -> list[int]:
    """Return unit positions where stages with these numbers of layers begin."""
    cuts, layers = [], 0
    for own in stage_layers[:-1]:
        layers += own
        # Language layers follow the vision embed, the projector and the language embed.
        cuts.append(layers + (1 if layers < model.vision.layers else 3))
    return cuts


def table_9_plan(number: int) -> Plan:
    """Return a plan of the paper's table 9 without data parallelism; smaller plans cover it."""
    job = TABLE_9[number]
    model, sizes = load_model(job.model), job.parallel
    stages = stages_of(model, *cuts_of(model, job.stage_layers))
    sequences = sizes.sequence_parallel
    return toy_plan(model, stages, tensor=sizes.tensor, sequence_parallel=sequences)


def preset_plan(name: str, *cuts: int, tied_head: bool = False, **sizes) -> Plan:
    model = load_model(name).with_tower("language", tied_head=tied_head)
    return toy_plan(model, stages_of(model, *cuts), **sizes)


PLANS = {job.model: table_9_plan(number) for number, job in enumerate(TABLE_9)}
PLANS |= {
    "internvl2-2b": preset_plan("internvl2-2b"),
    "internvl2-4b": preset_plan("internvl2-4b", 20, tensor=4),
    "internvl2.5-1b": preset_plan("internvl2.5-1b", 10, 30, tensor=2, data=2),
    "tied": preset_plan("internvl3-1b", 10, 30, tied_head=True, tensor=2, data=2),
    "tied-in-one": preset_plan("internvl3-1b", 10, tied_head=True, tensor=2),
    "without-layer-scale": preset_plan("eva-clip-8b-internlm2-20b", 30, tensor=2),
}
OF_IMAGES = {
    "qwen2.5-vl-7b": preset_plan("qwen2.5-vl-7b", 10, tensor=2),
    # Features of deepstack layers cross the first cut.
    "qwen3-vl-8b": preset_plan("qwen3-vl-8b", 20, 40, tensor=2, data=2),
    "qwen3-vl-2b": preset_plan("qwen3-vl-2b", 29),
}


@contextmanager
def rank_of(plan: Plan, rank: int) -> Iterator[VLMStage]:
    """Yield one rank's stage of fake tensors in a fake process group."""
    sizes = plan.parallel
    dist.init_process_group("fake", rank=rank, world_size=sizes.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            sizes.tensor, sizes.pipeline, create_gloo_process_groups=False
        )
        stage = plan.stages[parallel_state.get_pipeline_model_parallel_rank()]
        with FakeTensorMode():
            yield VLMStage(plan.model, stage, sizes, plan.precision)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def sharded_tensors(stage: VLMStage) -> Iterator[ShardedTensor]:
    """Yield the rank's sharded tensors, each a single block."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for entry in stage.sharded_state_dict(metadata={"dp_cp_group": group}).values():
        if isinstance(entry, ShardedTensorFactory):
            yield from entry.build()
        elif not isinstance(entry, ShardedObject):
            yield entry


def box_of(tensor: ShardedTensor, whole: Sequence[int]) -> Box:
    """Return the tensor's block without padding."""
    sizes = (*(1 for _ in range(tensor.prepend_axis_num)), *tensor.local_shape)
    ends = map(sum, zip(tensor.global_offset, sizes, strict=True))
    return tuple(tensor.global_offset), tuple(map(min, ends, whole))


def volume(box: Box) -> int:
    return math.prod(max(end - start, 0) for start, end in zip(*box, strict=True))


def overlap(one: Box, other: Box) -> bool:
    starts, ends = zip(one, other, strict=True)
    return volume((tuple(map(max, *starts)), tuple(map(min, *ends)))) > 0


@pytest.mark.parametrize("plan", (PLANS | OF_IMAGES).values(), ids=PLANS | OF_IMAGES)
def test_ranks_hold_just_what_the_map_knows(plan):
    """Prevents parameters unknown to import or export, and sharded checkpoints with missing or
    overlapping rows at real sizes and splits."""
    known = {parameter.name: parameter for parameter in parameters(plan.model)}
    wholes = {
        one.key: one.shape if one.layers is None else (one.layers, *one.shape)
        for one in known.values()
    }
    shapes: dict[str, tuple[int, ...]] = {}
    first: dict[tuple[str, int], list[Box]] = defaultdict(list)
    copies: dict[tuple[str, int], set[Box]] = defaultdict(set)
    for rank in range(plan.parallel.world_size):
        with rank_of(plan, rank) as stage:
            shapes |= shapes_of(stage)
            for tensor in sharded_tensors(stage):
                whole = wholes[tensor.key]
                assert tensor.allow_shape_mismatch or tensor.global_shape == whole, tensor.key
                box = box_of(tensor, whole)
                *replica, data = tensor.replica_id
                if volume(box):
                    copies[tensor.key, data].add(box)
                if volume(box) and not any(replica):
                    first[tensor.key, data].append(box)
    assert shapes == {name: parameter.shape for name, parameter in known.items()}
    assert first.keys() == {(key, data) for key in wholes for data in range(plan.parallel.data)}
    for (key, data), boxes in first.items():
        assert sum(map(volume, boxes)) == math.prod(wholes[key]), key
        assert set(boxes) == copies[key, data], key
        by_layer = defaultdict(list)
        for box in boxes:
            by_layer[box[0][0] if ".layers." in key else 0].append(box)
        for own in by_layer.values():
            assert not any(overlap(*pair) for pair in combinations(own, 2)), key


def shapes_of(stage: VLMStage) -> dict[str, tuple[int, ...]]:
    """Return global unpadded shapes of the stage's parameters."""
    found = {}
    for name, parameter in stage.named_parameters():
        full, shape = global_parameter_name(stage, name), list(parameter.shape)
        if parameter.tensor_model_parallel:
            own = shape[parameter.partition_dim]
            unpadded = unpadded_size(stage.model_config, full)
            shape[parameter.partition_dim] = unpadded or own * stage.groups.tp.size()
        found[full] = tuple(shape)
    return found


TILES = [layout for layout in TensorLayout if not (layout.is_text_only or layout.is_qwen_vl)]
QWEN_VL = {
    "qwen2-vl-7b": [TensorLayout.QWEN2_VL, TensorLayout.QWEN2_VL_PREFIXED],
    "qwen2.5-vl-7b": [TensorLayout.QWEN2_5_VL, TensorLayout.QWEN2_5_VL_PREFIXED],
    "qwen2.5-vl-3b": [TensorLayout.QWEN2_5_VL_PREFIXED],
    "qwen3-vl-8b": [TensorLayout.QWEN3_VL],
    "qwen3-vl-2b": [TensorLayout.QWEN3_VL],
    "qwen3-vl-30b-a3b": [
        TensorLayout.QWEN3_VL_MOE_STACKED,
        TensorLayout.QWEN3_VL_MOE,
        TensorLayout.QWEN3_VL_MOE_APART,
    ],
}
"""Layouts of each release. For dense models the last has the names of Transformers' modules."""
HUB_CONFIGS = Path(__file__).parents[1] / "planner" / "hub_configs"


def released_shapes(model: ModelConfig, layout: TensorLayout) -> dict[str, tuple[int, ...]]:
    """Return shapes of the layout's tensors; assert that none is made of two parameters."""
    found: dict[str, tuple[int, ...]] = {}
    for parameter in parameters(model):
        made_of = find_released(parameter, model, layout)
        own = dict(zip(made_of.names, made_of.shapes, strict=True))
        assert len(own) == len(made_of.names) and not own.keys() & found.keys(), parameter.name
        assert sum(map(math.prod, made_of.shapes)) == math.prod(parameter.shape), parameter.name
        found |= own
    return found


@pytest.mark.parametrize("layout", TILES)
@pytest.mark.parametrize("name", PLANS)
def test_released_names_are_unique(name, layout):
    """Prevents two parameters that map to one released tensor."""
    assert released_shapes(PLANS[name].model, layout)


def transformers_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return parameter shapes of Transformers' model for a folder's config.json."""
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    return {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}


@pytest.mark.parametrize(
    "name", ["internvl-chat-1.5-6b-34b", "internvit-6b-qwen1.5-110b", "internvl2.5-1b", "tied"]
)
def test_released_shapes_are_those_of_transformers(tmp_path, name):
    """Prevents names or shapes that only hold for small models, and an exported config.json of
    another model."""
    model, layout = PLANS[name].model, TensorLayout.TRANSFORMERS_PREFIXED
    made = configurations(model, layout, "float32", None)
    (tmp_path / "config.json").write_text(made["config.json"])
    assert released_shapes(model, layout) == transformers_shapes(tmp_path)


@pytest.mark.parametrize("name", QWEN_VL)
def test_qwen_vl_shapes_are_those_of_transformers(name):
    """Prevents names or shapes that only hold for small Qwen-VL models, and two parameters that map
    to one tensor in any layout."""
    shapes = [
        released_shapes(named_model(str(HUB_CONFIGS / name)), layout) for layout in QWEN_VL[name]
    ]
    own = shapes[0 if "moe" in QWEN_VL[name][0] else -1]
    assert own == transformers_shapes(HUB_CONFIGS / name)


CONFIG = json.loads((RELEASED_CONFIGS / "internvl-chat-1.5" / "config.json").read_text())


def whole_checkpoint() -> dict[str, list[int]]:
    """Return shapes of the release's tensors: one layer per tower by `released.py`, repeated to the
    published sizes."""
    text, vision = CONFIG["llm_config"], CONFIG["vision_config"]
    tower = {name: vision[name] for name in VISION_SIZES} | {"num_hidden_layers": 1}
    tower |= {"image_size": [448, 448], "patch_size": [14, 14], "use_qk_norm": True}
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(**tower),
        text_config=LlamaConfig(**{n: text[n] for n in TEXT_SIZES} | {"num_hidden_layers": 1}),
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = InternVLForConditionalGeneration(config)
    shapes = {}
    for name, value in rename_tensors(dict(model.named_parameters()), config, "internlm2").items():
        layers = (vision if name.startswith("vision") else text)["num_hidden_layers"]
        numbers = range(layers if ".layers.0." in name else 1)
        shapes |= {name.replace(".0.", f".{n}."): [*value.shape] for n in numbers}
    return shapes


def test_released_checkpoint_of_26b_is_understood(tmp_path):
    """Prevents a real checkpoint that is refused, mistaken for another model, or fully read to be
    inspected."""
    shapes = whole_checkpoint()
    write_holes(tmp_path / "InternVL-Chat-V1-5", CONFIG, shapes, 11)
    values = sum(map(math.prod, shapes.values()))
    assert values == pytest.approx(25.5e9, rel=0.01)
    found = open_released(tmp_path / "InternVL-Chat-V1-5")
    assert found.layout is TensorLayout.INTERNVL_INTERNLM2 and found.bytes == 2 * values
    assert architecture_differences(found.model, load_model("internvl-chat-1.5-6b-20b")) == []
    assert {found.dtype(parameter) for parameter in parameters(found.model)} == {torch.bfloat16}
    first_names = (find_released(p, found.model, found.layout).names[0] for p in found.file_order())
    order = [found.files.tensors[name].file for name in first_names]
    assert order == sorted(order)


def test_released_checkpoint_that_lacks_a_layer_is_refused(tmp_path):
    """Prevents an error message with thousands of tensor names."""
    shapes = {name: shape for name, shape in whole_checkpoint().items() if ".layers.3." not in name}
    write_holes(tmp_path / "there", CONFIG, shapes, 11)
    with pytest.raises(UserError, match=r"lacks language_model\.model\.layers\.3\.") as caught:
        open_released(tmp_path / "there")
    assert "and 15 more" in str(caught.value) and len(str(caught.value)) < 800


@pytest.mark.parametrize("text", [Qwen2Config, LlamaConfig])
def test_what_a_configuration_leaves_out_is_the_default_of_its_class(tmp_path, text):
    """Prevents this project's default epsilon, RoPE base or norm replacing the default of the
    configuration's class."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 99}
    whole = InternVLConfig(text_config=text(**sizes), tie_word_embeddings=False).to_dict()
    short = {
        "model_type": "internvl",
        "text_config": {"model_type": whole["text_config"]["model_type"], **sizes},
        "vision_config": {},
    }
    models = []
    for name, config in (("whole", whole), ("short", short)):
        folder = tmp_path / name / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        models.append(read_config(folder, ["language_model.lm_head.weight"]))
    assert models[0] == models[1]
    assert models[0][1] is TensorLayout.TRANSFORMERS
    assert models[0][0].language.qkv_bias == (text is Qwen2Config)
