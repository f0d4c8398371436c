"""The map of tensors at the size of real models: names and shapes alone, no values, no memory."""

import json
import math
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
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
from megatron.vlm.conversion.importing import open_released
from megatron.vlm.conversion.released_config import read_config
from megatron.vlm.conversion.tensor_map import Layout, Parameter, parameters, released
from megatron.vlm.model.configs import encoder_transformer_configs, language_transformer_config
from megatron.vlm.model.initialize import global_parameter_name
from megatron.vlm.model.stage import VLMStage
from megatron.vlm.model.tensor_parallel import unpadded_size, whole_shape
from omnibal.base.errors import UserError
from omnibal.families.named import named_model
from omnibal.job.plan import Plan
from omnibal.model.config import ModelConfig, load_model

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "reproduce"))
from paper import TABLE_9

pytestmark = pytest.mark.quick

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a piece of a tensor begins and ends, by axis."""


def cuts_of(model: ModelConfig, stage_layers: Sequence[int]) -> list[int]:
    """Positions in the unit sequence where stages of so many layers begin."""
    cuts, layers = [], 0
    for own in stage_layers[:-1]:
        layers += own
        # Before the language layers come the vision embed, the projector and the language embed.
        cuts.append(layers + (1 if layers < model.vision.layers else 3))
    return cuts


def table_9_plan(number: int) -> Plan:
    """A job of the paper without its data-parallel copies, which smaller jobs below have."""
    job = TABLE_9[number]
    model, sizes = load_model(job.model), job.parallel
    return toy_plan(
        model,
        stages_of(model, *cuts_of(model, job.stage_layers)),
        tensor=sizes.tensor,
        sequence_parallel=sizes.sequence_parallel,
    )


def preset_plan(name: str, *cuts: int, tied_head: bool = False, **sizes) -> Plan:
    model = load_model(name)
    language = model.language.model_copy(update={"tied_head": tied_head})
    model = model.model_copy(update={"language": language})
    return toy_plan(model, stages_of(model, *cuts), **sizes)


PLANS = {TABLE_9[number].model: table_9_plan(number) for number in range(len(TABLE_9))}
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
    """The stage of one rank of a world that is not there, of tensors that have no values."""
    sizes = plan.parallel
    dist.init_process_group("fake", rank=rank, world_size=sizes.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            sizes.tensor, sizes.pipeline, create_gloo_process_groups=False
        )
        stage = plan.stages[parallel_state.get_pipeline_model_parallel_rank()]
        arguments = (plan.model, stage, sizes, plan.precision)
        with FakeTensorMode():
            yield VLMStage(
                plan.model,
                stage,
                encoder_transformer_configs(*arguments),
                language_transformer_config(*arguments),
            )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def sharded_tensors(stage: VLMStage) -> Iterator[ShardedTensor]:
    """What the rank stores, in pieces that lie in one place."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for entry in stage.sharded_state_dict(metadata={"dp_cp_group": group}).values():
        if isinstance(entry, ShardedTensorFactory):
            yield from entry.build()
        elif not isinstance(entry, ShardedObject):
            yield entry


def box_of(tensor: ShardedTensor, whole: Sequence[int]) -> Box:
    """The piece of the tensor without what is padded."""
    sizes = (*(1 for _ in range(tensor.prepend_axis_num)), *tensor.local_shape)
    ends = [
        min(start + size, most)
        for start, size, most in zip(tensor.global_offset, sizes, whole, strict=True)
    ]
    return tuple(tensor.global_offset), tuple(ends)


def volume(box: Box) -> int:
    return math.prod(max(end - start, 0) for start, end in zip(*box, strict=True))


def overlap(one: Box, other: Box) -> bool:
    starts = [max(pair) for pair in zip(one[0], other[0], strict=True)]
    ends = [min(pair) for pair in zip(one[1], other[1], strict=True)]
    return all(start < end for start, end in zip(starts, ends, strict=True))


def stored_shape(parameter: Parameter) -> tuple[int, ...]:
    return parameter.shape if parameter.layers is None else (parameter.layers, *parameter.shape)


@pytest.mark.parametrize("plan", (PLANS | OF_IMAGES).values(), ids=PLANS | OF_IMAGES)
def test_ranks_hold_just_what_the_map_knows(plan):
    """Prevents: parameters that an import leaves as they were drawn, or an export leaves out; and
    shards that leave rows out or have them twice, at the sizes and splits of real jobs."""
    known = {parameter.name: parameter for parameter in parameters(plan.model)}
    wholes = {parameter.key: stored_shape(parameter) for parameter in known.values()}
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
    """Of the whole model's parameters, without padding."""
    found = {}
    for name, parameter in stage.named_parameters():
        full = global_parameter_name(stage, name)
        unpadded = unpadded_size(stage.model_config, full)
        found[full] = tuple(whole_shape(parameter, unpadded, stage.groups.tp))
    return found


TILES = [layout for layout in Layout if not (layout.is_text_only or layout.is_qwen_vl)]
QWEN_VL = {
    "qwen2-vl-7b": [Layout.QWEN2_VL, Layout.QWEN2_VL_PREFIXED],
    "qwen2.5-vl-7b": [Layout.QWEN2_5_VL, Layout.QWEN2_5_VL_PREFIXED],
    "qwen2.5-vl-3b": [Layout.QWEN2_5_VL_PREFIXED],
    "qwen3-vl-8b": [Layout.QWEN3_VL],
    "qwen3-vl-2b": [Layout.QWEN3_VL],
    "qwen3-vl-30b-a3b": [
        Layout.QWEN3_VL_MOE_STACKED,
        Layout.QWEN3_VL_MOE,
        Layout.QWEN3_VL_MOE_APART,
    ],
}
"""Layouts of each release; the last of dense ones has the names of Transformers' modules."""
HUB_CONFIGS = Path(__file__).parents[1] / "planner" / "hub_configs"


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(
            pytest.param(PLANS[name].model, layout, id=f"{name}-{layout}")
            for name in PLANS
            for layout in TILES
        ),
        *(
            pytest.param(named_model(str(HUB_CONFIGS / name)), layout, id=f"{name}-{layout}")
            for name, layouts in QWEN_VL.items()
            for layout in layouts
        ),
    ],
)
def test_released_names_are_unique(model, layout):
    """Prevents: two parameters that are read from, or written to, one tensor."""
    names: list[str] = []
    for parameter in parameters(model):
        made_of = released(parameter, model, layout)
        names += made_of.names
        values = sum(map(math.prod, made_of.shapes))
        assert values == math.prod(parameter.shape), parameter.name
        assert len(made_of.names) == len(made_of.shapes)
    assert len(names) == len(set(names))


def transformers_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What transformers has in a model of these sizes."""
    vision, language = model.vision, model.language
    text = (Qwen2Config if language.qkv_bias else LlamaConfig)(
        hidden_size=language.hidden_size,
        num_hidden_layers=language.layers,
        num_attention_heads=language.heads,
        num_key_value_heads=language.kv_heads,
        intermediate_size=language.ffn_hidden_size,
        vocab_size=language.vocab_size,
        tie_word_embeddings=language.tied_head,
    )
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(
            hidden_size=vision.hidden_size,
            num_hidden_layers=vision.layers,
            num_attention_heads=vision.heads,
            intermediate_size=vision.ffn_hidden_size,
            image_size=[vision.image_size] * 2,
            patch_size=[vision.patch_size] * 2,
            norm_type="rms_norm" if vision.normalization == "RMSNorm" else "layer_norm",
            attention_bias=vision.qkv_bias,
            use_qk_norm=vision.qk_norm,
        ),
        text_config=text,
        tie_word_embeddings=language.tied_head,
    )
    with FakeTensorMode():
        whole = InternVLForConditionalGeneration(config)
    return {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}


@pytest.mark.parametrize(
    "name", ["internvl-chat-1.5-6b-34b", "internvit-6b-qwen1.5-110b", "internvl2.5-1b", "tied"]
)
def test_released_shapes_are_those_of_transformers(name):
    """Prevents: names or shapes that hold for small models alone, such as head sizes."""
    model = PLANS[name].model
    found: dict[str, tuple[int, ...]] = {}
    for parameter in parameters(model):
        made_of = released(parameter, model, Layout.TRANSFORMERS_PREFIXED)
        found |= dict(zip(made_of.names, made_of.shapes, strict=True))
    assert found == transformers_shapes(model)


@pytest.mark.parametrize("name", QWEN_VL)
def test_qwen_vl_shapes_are_those_of_transformers(name):
    """Prevents: names or shapes that hold for small Qwen-VL models alone."""
    model, layouts = named_model(str(HUB_CONFIGS / name)), QWEN_VL[name]
    own_names = layouts[0] if "moe" in layouts[0] else layouts[-1]
    found: dict[str, tuple[int, ...]] = {}
    for parameter in parameters(model):
        made_of = released(parameter, model, own_names)
        found |= dict(zip(made_of.names, made_of.shapes, strict=True))
    config = AutoConfig.from_pretrained(HUB_CONFIGS / name)
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config)
    assert found == {key: tuple(value.shape) for key, value in whole.named_parameters()}


# InternVL-Chat-V1.5 as it is released.
CONFIG = {
    "architectures": ["InternVLChatModel"],
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 448,
    "llm_config": {
        "architectures": ["InternLM2ForCausalLM"],
        "bias": False,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "intermediate_size": 16_384,
        "num_attention_heads": 48,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 3.0, "type": "dynamic"},
        "rope_theta": 1_000_000,
        "tie_word_embeddings": False,
        "vocab_size": 92_553,
    },
    "max_dynamic_patch": 12,
    "min_dynamic_patch": 1,
    "model_type": "internvl_chat",
    "ps_version": "v2",
    "select_layer": -1,
    "template": "internlm2-chat",
    "use_thumbnail": True,
    "vision_config": {
        "hidden_act": "gelu",
        "hidden_size": 3200,
        "image_size": 448,
        "initializer_factor": 0.1,
        "intermediate_size": 12_800,
        "layer_norm_eps": 1e-06,
        "norm_type": "rms_norm",
        "num_attention_heads": 25,
        "num_hidden_layers": 45,
        "patch_size": 14,
        "qk_normalization": True,
        "qkv_bias": False,
    },
}
VISION_LAYER = {
    "norm1.weight": [3200], "norm2.weight": [3200], "ls1": [3200], "ls2": [3200],
    "attn.qkv.weight": [9600, 3200], "attn.proj.weight": [3200, 3200], "attn.proj.bias": [3200],
    "attn.q_norm.weight": [3200], "attn.k_norm.weight": [3200],
    "mlp.fc1.weight": [12_800, 3200], "mlp.fc1.bias": [12_800],
    "mlp.fc2.weight": [3200, 12_800], "mlp.fc2.bias": [3200],
}  # fmt: skip
LANGUAGE_LAYER = {
    "attention_norm.weight": [6144], "ffn_norm.weight": [6144],
    "attention.wqkv.weight": [8192, 6144], "attention.wo.weight": [6144, 6144],
    "feed_forward.w1.weight": [16_384, 6144], "feed_forward.w3.weight": [16_384, 6144],
    "feed_forward.w2.weight": [6144, 16_384],
}  # fmt: skip
REST = {
    "vision_model.embeddings.class_embedding": [1, 1, 3200],
    "vision_model.embeddings.position_embedding": [1, 1025, 3200],
    "vision_model.embeddings.patch_embedding.weight": [3200, 3, 14, 14],
    "vision_model.embeddings.patch_embedding.bias": [3200],
    "mlp1.0.weight": [12_800], "mlp1.0.bias": [12_800],
    "mlp1.1.weight": [6144, 12_800], "mlp1.1.bias": [6144],
    "mlp1.3.weight": [6144, 6144], "mlp1.3.bias": [6144],
    "language_model.model.tok_embeddings.weight": [92_553, 6144],
    "language_model.model.norm.weight": [6144],
    "language_model.output.weight": [92_553, 6144],
}  # fmt: skip


def whole_checkpoint() -> dict[str, list[int]]:
    vision = {
        f"vision_model.encoder.layers.{layer}.{name}": shape
        for layer in range(45)
        for name, shape in VISION_LAYER.items()
    }
    language = {
        f"language_model.model.layers.{layer}.{name}": shape
        for layer in range(48)
        for name, shape in LANGUAGE_LAYER.items()
    }
    return REST | vision | language


def write_headers(folder: Path, shapes: Mapping[str, Sequence[int]], files: int) -> int:
    """A checkpoint of bf16 whose values are holes in the files; returns how many there are."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    names = sorted(shapes)
    for number in range(files):
        file, header, size = f"model-{number + 1:05d}-of-{files:05d}.safetensors", {}, 0
        for name in names[number::files]:
            end = size + 2 * math.prod(shapes[name])
            header[name] = {
                "dtype": "BF16",
                "shape": list(shapes[name]),
                "data_offsets": [size, end],
            }
            weight_map[name], size = file, end
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + size)
    values = sum(map(math.prod, shapes.values()))
    index = {"metadata": {"total_size": 2 * values}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return values


def test_released_checkpoint_of_26b_is_understood(tmp_path):
    """Prevents: a real checkpoint that is refused, taken for another model, or read whole just to
    look at it."""
    values = write_headers(tmp_path / "InternVL-Chat-V1-5", whole_checkpoint(), 11)
    assert values == pytest.approx(25.5e9, rel=0.01)
    found = open_released(tmp_path / "InternVL-Chat-V1-5")
    assert found.layout is Layout.INTERNVL_INTERNLM2 and found.bytes == 2 * values
    assert architecture_differences(found.model, load_model("internvl-chat-1.5-6b-20b")) == []
    assert {found.dtype(parameter) for parameter in parameters(found.model)} == {torch.bfloat16}
    order = [found.files.tensors[found_name(found, one)].file for one in found.file_order()]
    assert order == sorted(order)


def found_name(checkpoint, parameter: Parameter) -> str:
    return released(parameter, checkpoint.model, checkpoint.layout).names[0]


def test_released_checkpoint_that_lacks_a_layer_is_refused(tmp_path):
    """Prevents: a message of thousands of names."""
    shapes = {name: shape for name, shape in whole_checkpoint().items() if ".layers.3." not in name}
    write_headers(tmp_path / "there", shapes, 11)
    with pytest.raises(UserError, match=r"lacks language_model\.model\.layers\.3\.") as caught:
        open_released(tmp_path / "there")
    assert "and 15 more" in str(caught.value) and len(str(caught.value)) < 800


@pytest.mark.parametrize("text", [Qwen2Config, LlamaConfig])
def test_what_a_configuration_leaves_out_is_the_default_of_its_class(tmp_path, text):
    """Prevents: an epsilon, a RoPE base or a norm that is this project's default, and not that of
    the class that wrote the file."""
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 99,
    }
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
    assert models[0][1] is Layout.TRANSFORMERS
    assert models[0][0].language.qkv_bias == (text is Qwen2Config)
