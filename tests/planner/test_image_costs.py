"""Costs of native-resolution image encoders, against Transformers' modules and brute force."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_cases import run
from cost_cases import analytic_cost, passes_of
from PIL import Image
from tokenizer_cases import byte_level_bpe
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, SiglipVisionConfig, SiglipVisionModel
from transformers.models.gemma3 import configuration_gemma3, modeling_gemma3
from transformers.models.glm4v import configuration_glm4v, modeling_glm4v
from transformers.models.kimi_k25 import configuration_kimi_k25, modeling_kimi_k25
from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl, modeling_qwen2_5_vl
from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5
from transformers.models.qwen3_vl import configuration_qwen3_vl, modeling_qwen3_vl

from omnibal.cost.analytic import unit_flops
from omnibal.cost.model import CostModel
from omnibal.data.lengths import draw_samples, read_lengths, write_lengths
from omnibal.data.native_resolution import image_segments
from omnibal.model.config import LanguageConfig, ModelConfig, config_toml, load_cluster
from omnibal.model.encoders import ImagesEncoder, VideoConfig
from omnibal.model.parallel import Parallel
from omnibal.model.units import unit_kinds, unit_names
from omnibal.packing.features import pack_features
from omnibal.packing.packs import Packs
from omnibal.pipeline.recompute import group_layers, split_groups, sum_groups
from omnibal.pipeline.stage_memory import build_table
from omnibal.pipeline.unit_runs import stages_from_cuts, unit_counts, unit_runs

CLUSTER = load_cluster("h100-80g")
WIDTH = 256
"""Hidden size of the language model, which projectors output."""
IMAGES = ((1, 16, 24), (1, 8, 8), (3, 12, 16))
"""Grids (frames, rows, columns) of patches, in full attention windows. An image has one frame."""


def encoder(**changes: Any) -> ImagesEncoder:
    """Return a small encoder like Qwen3-VL's, without deepstack."""
    sizes = {"layers": 4, "hidden_size": 64, "heads": 2, "ffn_hidden_size": 160, "patch_size": 14}
    kinds = {"normalization": "LayerNorm", "qkv_bias": True, "qk_norm": False}
    return ImagesEncoder.model_validate(sizes | {"frames_per_patch": 2} | kinds | changes)


def model_with(tower: ImagesEncoder, layers: int = 4) -> ModelConfig:
    """Return a model of the encoder and a small language model."""
    language = LanguageConfig(
        layers=layers, hidden_size=WIDTH, heads=4, kv_heads=2, ffn_hidden_size=256, vocab_size=640
    )
    names = {"name": "images", "chat_template": "qwen2.5"}
    return ModelConfig(**names, encoders={"vision": tower}, language=language)


def cost_of(model: ModelConfig) -> CostModel:
    return analytic_cost(model, CLUSTER, Parallel(pipeline=1), "bf16")


SMALL = {"depth": 4, "hidden_size": 64, "num_heads": 2, "out_hidden_size": WIDTH}


class _Kimi(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = configuration_kimi_k25.Kimi_K25Config(
            vision_config={
                "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 160,
                "num_attention_heads": 2, "pos_emb_height": 12, "pos_emb_width": 12,
            },
            text_config={"model_type": "deepseek_v3", "hidden_size": WIDTH},
            projection_hidden_size=64,
        )  # fmt: skip
        self.tower = modeling_kimi_k25.Kimi_K25VisionModel(config.vision_config)
        self.projector = modeling_kimi_k25.Kimi_K25MultimodalProjection(config)

    def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        return self.projector(self.tower(pixels.view(-1, 3, 14, 14), grid_thw).pooler_output)


class _Gemma(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        vision = SiglipVisionConfig(
            hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=2,
            image_size=224, patch_size=14, vision_use_head=False,
        )  # fmt: skip
        config = configuration_gemma3.Gemma3Config(
            vision_config=vision, text_config={"hidden_size": WIDTH}, mm_tokens_per_image=16
        )
        self.tower = SiglipVisionModel(vision)
        self.projector = modeling_gemma3.Gemma3MultiModalProjector(config)

    def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        images = torch.zeros(len(grid_thw), 3, 224, 224)
        return self.projector(self.tower(images).last_hidden_state)


def module_factory(module: type, config: type, **sizes: Any) -> Callable[[], torch.nn.Module]:
    return lambda: module(config(**SMALL, **sizes))


FAMILIES: dict[str, tuple[ImagesEncoder, Callable[[], torch.nn.Module]]] = {
    "qwen2.5-vl": (
        encoder(
            normalization="RMSNorm", gated=True, patch_bias=False, window_pixels=112,
            full_layers=(1, 3),
        ),
        module_factory(
            modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel,
            configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig,
            intermediate_size=160, fullatt_block_indexes=[1, 3],
        ),
    ),
    "qwen3-vl": (
        encoder(patch_size=16, learned_positions=144, deepstack_layers=(0, 2)),
        module_factory(
            modeling_qwen3_vl.Qwen3VLVisionModel, configuration_qwen3_vl.Qwen3VLVisionConfig,
            intermediate_size=160, num_position_embeddings=144, deepstack_visual_indexes=[0, 2],
        ),
    ),
    "qwen3.5": (
        encoder(patch_size=16, learned_positions=144),
        module_factory(
            modeling_qwen3_5.Qwen3_5VisionModel, configuration_qwen3_5.Qwen3_5VisionConfig,
            intermediate_size=160, num_position_embeddings=144,
        ),
    ),
    "glm-4.5v": (
        encoder(
            normalization="RMSNorm", ffn_hidden_size=WIDTH, qkv_bias=False, bias=False, gated=True,
            learned_positions=144, embed_norm=True, final_norm=True, projector="gated",
            projector_hidden_size=320,
        ),
        module_factory(
            modeling_glm4v.Glm4vVisionModel, configuration_glm4v.Glm4vVisionConfig,
            intermediate_size=320, image_size=168,
        ),
    ),
    "kimi-k2.5": (encoder(learned_positions=144, final_norm=True, frames_per_patch=1), _Kimi),
    "gemma3": (
        encoder(
            merge_size=4, frames_per_patch=1, learned_positions=256, final_norm=True,
            projector="pooled", resize="fixed", max_pixels=224**2,
        ),
        _Gemma,
    ),
}  # fmt: skip


def grids(family: str) -> list[tuple[int, int, int]]:
    """Return the family's image grids in frames and patches."""
    if family == "gemma3":
        return [(1, 16, 16)] * 2
    # Kimi's frames attend to each other; GLM's are given to the tower as images.
    frames_alone = [(1, *patches) for frames, *patches in IMAGES for _ in range(frames)]
    return frames_alone if family in ("glm-4.5v", "kimi-k2.5") else list(IMAGES)


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_transformers_modules(family: str) -> None:
    """Prevents omitted weights, norms, biases, projectors or deepstack layers, and attention
    counted over the wrong positions."""
    tower, make_theirs = FAMILIES[family]
    theirs = make_theirs()
    for module in theirs.modules():
        if isinstance(module, PreTrainedModel):
            # Torch does not count operations of its fused attention on a CPU.
            module.set_attn_implementation("eager")
    model = model_with(tower)
    cost = cost_of(model)
    kinds = {kind.name for kind in cost.kinds if kind.tower == "vision"}
    own = [name for name in unit_names(model) if name in kinds]
    parameters = sum(cost.units[name].parameters for name in own)
    assert parameters == sum(each.numel() for each in theirs.parameters())
    grid = torch.tensor(grids(family))
    patches = int(grid.prod(dim=1).sum())
    values = 3 * tower.frames_per_patch * tower.patch_size**2
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        theirs(torch.zeros(patches, values), grid_thw=grid)
    cells = [(t, h * w // tower.merge_size**2) for t, h, w in grid.tolist()]
    sizes = {
        "image_tokens": sum(t * each for t, each in cells),
        "squared_image_tokens": sum(t * each**2 for t, each in cells),
    }
    frozen_flops = unit_flops(model, ("vision", "projector"))
    features = np.array([float(sizes.get(name, 0)) for name in cost.features])
    counted = sum(float(frozen_flops[name] @ features) for name in own)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("tensor", [1, 2])
def test_deepstack_features_cross_every_cut_up_to_the_layer_that_takes_them(tensor: int) -> None:
    """Prevents pipeline messages without deepstack features, and features replicated on every rank
    counted as sequence-parallel shards."""
    model, bare = (
        model_with(encoder(layers=6, deepstack_layers=taken), layers=5) for taken in ((1, 3, 4), ())
    )
    sizes = Parallel(tensor=tensor, pipeline=1, sequence_parallel=tensor > 1)
    cost, plain = (analytic_cost(each, CLUSTER, sizes, "bf16") for each in (model, bare))
    cell = np.array([float(name == "image_tokens") for name in cost.features])
    # After embed, six layers, projector, language embed, five layers.
    waiting = [0, 0, 1, 1, 2, 3, 3, 3, 3, 2, 1, 0, 0, 0]
    names = zip(unit_names(model)[:-1], unit_names(bare)[:-1], waiting, strict=True)
    for name, without, number in names:
        for field in ("output_bytes", "output_gradient_bytes"):
            more = getattr(cost.units[name], field) - getattr(plain.units[without], field)
            assert cell @ more == number * WIDTH * 2, (name, field)


def test_a_stage_has_room_for_what_comes_over_its_own_cut() -> None:
    """Prevents counting deepstack features again on every later stage, and a search that counts
    less memory than a check."""
    model = model_with(encoder(layers=4, deepstack_layers=(0, 1, 2)), layers=6)
    cost = analytic_cost(model, CLUSTER, Parallel(pipeline=2), "bf16")
    names, kinds, one = unit_names(model), cost.kinds, np.ones(len(cost.features))
    none = 0 * one[None]
    tables = [
        build_table(cost, replace(passes_of(none, none, np.array(links)), largest=one))
        for links in (0, (1, 1, 0, 0))
    ]
    for cut in range(names.index("language_embed") + 1, len(names) - 1):
        for stage in stages_from_cuts(model, (cut, len(names) - 1))[1:2]:
            runs, none = unit_runs(kinds, [stage]), np.zeros(len(kinds), np.int64)
            without, checked = (float(table.stage_bytes([runs])[0]) for table in tables)
            before = cost.units[names[cut - 1]]
            came = one @ (before.output_bytes + before.output_gradient_bytes)
            assert checked - without == pytest.approx(came), cut
            assert tables[1].pass_bytes(unit_counts(kinds, stage.units), none)[0] >= checked * (
                1 - 1e-12
            )


def test_all_layers_of_one_kind_that_recompute_bring_back_what_they_dropped() -> None:
    """Prevents a recompute peak without the activations that the last layer restores."""
    model = model_with(encoder(layers=9, deepstack_layers=(2, 5)))
    cost = cost_of(model)
    kinds, (whole,) = cost.kinds, stages_from_cuts(model, ())
    cells = np.array([float(name == "image_tokens") for name in cost.features])
    passes = passes_of(cells[None], 0 * cells[None])
    table, held = build_table(cost, passes), unit_counts(kinds, whole.units)
    layers = [at for at, kind in enumerate(kinds) if kind.is_layer and kind.tower == "vision"]
    plain = [at for at in layers if "deepstack" not in kinds[at].name]
    assert len(plain) > 1
    units = list(cost.units.values())
    kept = np.array([cells @ unit.activation_bytes for unit in units])
    input_ = np.array([cells @ unit.boundary_bytes for unit in units])

    def peak_bytes(recomputed: np.ndarray) -> float:
        return float(table.running_bytes(held, recomputed)[0])

    none, every = np.zeros((2, len(kinds)), np.int64)
    every[layers] = held[layers]
    # In its backward, the last layer holds all its activations, other layers just their inputs.
    last = plain[-1]
    working = max(cells @ moment for moment in units[last].transient_bytes)
    before = kept[0] + (held[layers] * input_[layers]).sum() - input_[last]
    assert peak_bytes(every) >= before + kept[last] + working
    # While a layer of the kind is kept, recomputing another needs no more than keeping it.
    some = none.copy()
    some[plain[0]] = held[plain[0]]
    saved = held[plain[0]] * (kept[plain[0]] - input_[plain[0]])
    assert peak_bytes(none) - peak_bytes(some) == pytest.approx(saved)


def test_layers_that_differ_in_what_they_carry_are_recomputed_as_one_kind() -> None:
    """Prevents a recompute search that grows with every deepstack feature."""
    model = model_with(encoder(layers=9, deepstack_layers=(2, 5)))
    kinds = unit_kinds(model)
    alike = group_layers(kinds)
    layers = [kind for kind in kinds if kind.is_layer]
    assert sorted(map(len, alike)) == [2, 2, 3] and len(layers) == 7
    counts = unit_counts(kinds, stages_from_cuts(model, ())[0].units)
    held = np.array([n for n, kind in zip(counts, kinds, strict=True) if kind.is_layer])
    assert sum_groups(alike, held).tolist() == [7, 2, 4]
    # The first four of seven plain vision layers: 0, 1, 3, 4.
    apart = split_groups(alike, held, np.array([4, 0, 0]))
    stage = stages_from_cuts(model, (), [apart.tolist()])[0]
    assert [str(span) for span in stage.recompute] == ["vision 0..1", "vision 3..4"]


def write_data(folder: Path) -> list[list[tuple[int, int]]]:
    """Write messages with texts and images; return the image sizes of every sample."""
    rng = np.random.default_rng(0)
    records, sizes = [], []
    for number in range(40):
        own = [tuple(rng.integers(40, 500, 2).tolist()) for _ in range(int(rng.integers(0, 4)))]
        names = [f"{number}-{place}.png" for place in range(len(own))]
        for name, size in zip(names, own, strict=True):
            Image.new("L", size).save(folder / name)
        asked = {"role": "user", "content": "<image>" * len(own) + " what is this"}
        said = {"role": "assistant", "content": "a picture " * int(rng.integers(1, 9))}
        records.append({"messages": [asked, said], "images": names})
        sizes.append(own)
    (folder / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    model = byte_level_bpe(["what is this", "a picture"])
    pads = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    model.add_special_tokens(["<|im_start|>", "<|im_end|>", *pads])
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    return sizes


def test_images_are_scanned_planned_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents a native-resolution model that loads but cannot be scanned, planned or checked."""
    sizes = write_data(tmp_path)
    video = VideoConfig(times="before", counts_frames=True)
    tower = encoder(deepstack_layers=(1, 2), video=video, max_pixels=90_000)
    model = tmp_path / "model.toml"
    model.write_text(config_toml(model_with(tower)))
    data, lengths, plan = (str(tmp_path / name) for name in ("data.jsonl", "lengths", "plan"))
    scan = ["--model", str(model), "--tokenizer-model", str(tmp_path / "tokenizer.json")]
    limits = ["--min-pixels", "784", "--max-pixels", "80000"]
    run("lengths", data, *scan, *limits, "-o", lengths)
    found = read_lengths([Path(lengths)])
    rule = encoder(min_pixels=784, max_pixels=80_000).image_rule
    cells = [[image_segments(*size, rule).all_tokens for size in own] for own in sizes]
    assert found.column("image_tokens").tolist() == [sum(own) for own in cells]
    squares = [sum(each**2 for each in own) for own in cells]
    assert found.column("squared_image_tokens").tolist() == squares
    some = draw_samples(found, 9, 0)
    assert set(some.squares["squared_image_tokens"]) <= set(squares) and len(some) == 9
    write_lengths(found, tmp_path / "again")
    again = read_lengths([tmp_path / "again"])
    assert again.sha256 == found.sha256 != some.sha256
    packs = Packs.from_lists([[0, 1, 2], [3], list(range(4, 40))])
    features = pack_features(packs, found, ["fixed", "squared_image_tokens"])
    assert features[:, 1].tolist() == [sum(squares[:3]), squares[3], sum(squares[4:])]
    sizes_of_job = "--cluster h100-80g --pp 2 --dp 2 --micro-batches 2".split()
    caps = ["--limit", "image_tokens=600", "--max-tokens", "1200"]
    given = ["--model", str(model), *sizes_of_job, *caps, "--lengths", lengths, "-o", plan]
    run("plan", *given)
    run("check", plan)
    run("plan", *given, "--encoder", "data-parallel")
    run("check", plan)
    written = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert written["data_parallel_encoders"]["square_ms"]["vision"] > 0
