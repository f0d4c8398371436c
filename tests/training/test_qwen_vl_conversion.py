"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL of Transformers: lossless import and export."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conversion_cases import load_in_transformers
from conversion_file_cases import (
    assert_equal_tensors,
    check_round_trip,
    edit_config,
    edit_tensor,
    edit_tensors,
    export_run,
    tensors_of,
)
from qwen_vl_cases import (
    IDS,
    KINDS,
    as_released,
    save_tensors,
    transformers_model,
    write_companions,
)
from released import expand_experts, imported
from transformers import Qwen3VLMoeForConditionalGeneration

from megatron.vlm.checkpoint.identity import CheckpointIdentity, open_newest
from megatron.vlm.conversion.exporting import plan_export_as, plan_export_like
from megatron.vlm.conversion.importing import open_released
from megatron.vlm.conversion.tensor_map import TensorLayout
from omnibal.base.errors import UserError
from omnibal.families.named import named_model
from omnibal.model.config import config_toml, load_model

IMAGE = IDS["image_token_id"]


def save_release(name: str, folder: Path, shard_size="20KB", dtype=torch.float32, own_names=False):
    """Save a Transformers folder with released or own tensor names, and its companion files."""
    model = transformers_model(name).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard_size, save_original_format=not own_names)
    write_companions(folder)
    return folder


@pytest.mark.parametrize("own_names", [False, True])
@pytest.mark.parametrize(
    ("name", "shard_size", "dtype"),
    [
        ("qwen2-vl", "20KB", torch.float32),
        ("qwen2.5-vl-tied", "1GB", torch.bfloat16),
        ("qwen3-vl-tied", "20KB", torch.bfloat16),
        ("qwen3-vl-moe", "1GB", torch.float32),
        ("qwen3.5-tied", "20KB", torch.bfloat16),
        ("qwen3.5-moe", "1GB", torch.float32),
    ],
)
def test_import_knows_the_model_and_export_gives_the_same_bytes(
    tmp_path, name, shard_size, dtype, own_names
):
    """Prevents imports that lose a size or layer type, and exports with changed tensors, names or
    files, for released and for Transformers' names."""
    source = save_release(name, tmp_path / "released", shard_size, dtype, own_names)
    run = check_round_trip(source, tmp_path)
    assert load_model(str(run / "model.toml")) == KINDS[name].model
    assert (run / "model.toml").read_text() == config_toml(KINDS[name].model)
    assert named_model(str(source)) == KINDS[name].model
    carried = {path.name for path in (run / "tokenizer").iterdir()}
    assert {"chat_template.json", "video_preprocessor_config.json"} <= carried
    assert (len(list(source.glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    layout = KINDS[name].layout
    if own_names:
        layout = f"{layout}-prefixed" if "2" in name else layout.removesuffix("-apart")
    assert open_released(source).layout == layout


@pytest.mark.parametrize("name", [name for name in KINDS if name.endswith("tied")])
def test_a_tied_heads_copy_stays(tmp_path, name):
    """Prevents tied models that other tools cannot load because the head's tensor is missing."""
    source = save_release(name, tmp_path / "released", "1GB")
    tensors = tensors_of(source)
    [embedding] = [value for key, value in tensors.items() if key.endswith("embed_tokens.weight")]
    save_tensors(source, tensors | {"lm_head.weight": embedding.clone()})
    assert open_newest(check_round_trip(source, tmp_path)).model.language.tied_head


def test_a_head_of_its_own_is_not_tied(tmp_path):
    """Prevents a trained head replaced by the embedding although Transformers 5 loads it."""
    source = save_release("qwen2-vl", tmp_path / "released")
    edit_config(tie_word_embeddings=True)(source)
    assert not open_released(source).model.language.tied_head


def test_experts_are_read_turned_stacked_and_apart(tmp_path):
    """Prevents transposed expert matrices, swapped gate and up, and reordered experts, in released
    files, Transformers 5 files and files with one tensor per expert."""
    model = transformers_model("qwen3-vl-moe")
    own = {key: value.detach() for key, value in model.named_parameters()}
    forms = {
        TensorLayout.QWEN3_VL_MOE: as_released(own),
        TensorLayout.QWEN3_VL_MOE_STACKED: own,
        TensorLayout.QWEN3_VL_MOE_APART: dict(expand_experts(own)),
    }
    for layout, tensors in forms.items():
        source = save_release("qwen3-vl-moe", tmp_path / layout / "there")
        save_tensors(source, tensors)
        run = check_round_trip(source, tmp_path / layout)
        assert open_released(source).layout == layout
        for other, expected in forms.items():
            out = export_run(run, other, tmp_path / layout / other)
            assert_equal_tensors(tensors_of(out), dict(expected))


@pytest.mark.parametrize("inner", [12, 24])
def test_square_experts_are_told_apart_by_the_other_stack(tmp_path, inner):
    """Prevents square matrices transposed by mistake, or exported in a layout that Transformers 5,
    which decides by shape, misreads."""
    config = copy.deepcopy(KINDS["qwen3-vl-moe"].config)
    config.text_config.moe_intermediate_size = inner
    model = Qwen3VLMoeForConditionalGeneration(config)
    own = {key: value.detach() for key, value in model.named_parameters()}
    model.save_pretrained(tmp_path / "there")
    for layout, tensors in (
        (TensorLayout.QWEN3_VL_MOE_STACKED, own),
        (TensorLayout.QWEN3_VL_MOE, as_released(own)),
    ):
        save_tensors(tmp_path / "there", tensors)
        assert open_released(tmp_path / "there").layout == layout
        run = imported(tmp_path / "there", tmp_path / f"run-{layout}")
        out = export_run(run, TensorLayout.QWEN3_VL_MOE_STACKED, tmp_path / f"out-{layout}")
        assert_equal_tensors(tensors_of(out), own)
    with pytest.raises(UserError, match=r"layout qwen3-vl-moe: .* square matrices of experts"):
        export_run(run, TensorLayout.QWEN3_VL_MOE, tmp_path / "turned")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("form", ["as released", "own names"])
def test_export_of_a_layout_is_what_transformers_loads(tmp_path, name, form):
    """Prevents a config.json that does not match the trained weights."""
    model, kind = transformers_model(name), KINDS[name]
    run = imported(save_release(name, tmp_path / "released"), tmp_path / "run")
    layout = TensorLayout(kind.layout.removesuffix("-stacked"))
    if form == "own names":
        layout = open_released(save_release(name, tmp_path / "own", own_names=True)).layout
    out = export_run(run, layout, tmp_path / "out")
    again = load_in_transformers(out)
    assert type(again) is type(model)
    assert_equal_tensors(dict(again.named_parameters()), dict(model.named_parameters()))
    assert {key: again.config.to_dict()[key] for key in IDS} == IDS
    assert again.config.text_config.to_dict() == model.config.text_config.to_dict()
    assert again.generation_config.eos_token_id == again.config.text_config.eos_token_id == 3
    # An image of 2 x 4 cells.
    ids = torch.tensor([[8, IDS["vision_start_token_id"], *[IMAGE] * 8, 5, 9, 10, 9]])
    size = kind.model.images.values_per_patch
    given = {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.randn(32, size, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 4, 8]]),
    }
    with torch.no_grad():
        # Sums may be ordered by the weights' memory alignment.
        torch.testing.assert_close(again(**given).logits, model(**given).logits)
    found = open_released(out)
    assert found.model == kind.model.model_copy(update={"name": "out"})
    assert found.layout == layout


GATE_UP = "model.language_model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "qwen2-vl",
            edit_tensors(lambda tensors: tensors.pop("visual.merger.ln_q.weight")),
            "lacks visual.merger.ln_q.weight; the tensors must be those of config.json's model",
        ),
        (
            "qwen3-vl-tied",
            edit_tensors(lambda tensors: tensors.update(extra=torch.zeros(2))),
            "has extra, which the model does not",
        ),
        (
            "qwen3-vl-tied",
            edit_config(vision_config__deepstack_visual_indexes=[1]),
            r"has model.visual.deepstack_merger_list.1.linear_fc1.bias, .* and 1 more, which",
        ),
        (
            "qwen2.5-vl-tied",
            edit_tensor("visual.patch_embed.proj.weight", lambda value: value.flatten(1)),
            r"visual.patch_embed.proj.weight is \[36, 96\] and not \[36, 3, 2, 4, 4\]",
        ),
        (
            "qwen3-vl-moe",
            edit_tensor(GATE_UP, lambda value: value[:3]),
            r"gate_up_proj is \[3, 40, 24\] and not \[4, ",
        ),
        ("qwen3-vl-moe", edit_config(text_config__mlp_only_layers=[1]), "experts in every layer"),
        ("qwen3-vl-moe", edit_config(text_config__norm_topk_prob=False), "must be true"),
        ("qwen2-vl", edit_config(vision_config__depth=2), "has visual.blocks.2.attn.proj.bias"),
        ("qwen3-vl-tied", edit_config(text_config__new_thing=1), "new_thing is not understood"),
        (
            "qwen2.5-vl-tied",
            edit_config(text_config__rope_parameters={"rope_type": "yarn", "factor": 4.0}),
            "RoPE of type 'yarn' is not trained; it must be one of default, mrope",
        ),
        ("qwen3-vl-tied", edit_config(quantization_config={"bits": 4}), "must be unquantized"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, name, change, message):
    """Prevents weights left at random values, and imports of another architecture."""
    source = save_release(name, tmp_path / "released")
    change(source)
    with pytest.raises(UserError, match=message) as refused:
        open_released(source)
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save_release("qwen3-vl-tied", tmp_path_factory.mktemp("tied") / "released")


@pytest.fixture(scope="module")
def checkpoint(source) -> CheckpointIdentity:
    return open_newest(imported(source, source.parent / "run"))


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({}, TensorLayout.QWEN3_VL_MOE, "runs is None there"),
        ({}, TensorLayout.QWEN2_5_VL, "window_size: Input should be a valid integer"),
        ({}, TensorLayout.TRANSFORMERS, "encoder is of images, and the layout's of tiles"),
        ({}, TensorLayout.QWEN3, "encoder is of images, and the layout's of none"),
        ({"norm_eps": 1e-5}, TensorLayout.QWEN3_VL, r"norm_eps is 1e-05 there and 1e-06 in layout"),
        ({"gated": True}, TensorLayout.QWEN3_VL, "gated is True there and False in"),
        ({"learned_positions": 0}, TensorLayout.QWEN3_VL, "is no model of layout qwen3-vl: "),
        (
            {"positions_per_second": 3.0},
            TensorLayout.QWEN3_VL,
            "tokens_per_second is not understood",
        ),
    ],
)
def test_a_model_that_a_layout_has_not_is_not_exported(checkpoint, changes, layout, message):
    """Prevents a folder that Transformers loads as another model."""
    model = checkpoint.model
    if "positions_per_second" in changes:
        changes = {"video": model.images.video.model_copy(update=changes)}
    planned = replace(checkpoint, model=model.with_tower("vision", **changes))
    with pytest.raises(UserError, match=message):
        plan_export_as(planned, layout, None, None, 10**9)


def test_other_pixels_export_like_the_release(source, checkpoint):
    """Prevents refusing a model that was trained on smaller images than the release."""
    smaller = replace(
        checkpoint, model=checkpoint.model.with_tower("vision", max_pixels=128 * 128 * 9)
    )
    planned = plan_export_like(smaller, open_released(source), None)
    assert planned.bytes == sum(value.nbytes for value in tensors_of(source).values())
    made = plan_export_as(smaller, TensorLayout.QWEN3_VL, None, None, 10**9).made
    processor = json.loads(made["preprocessor_config.json"])
    assert processor["size"] == {"longest_edge": 128 * 128 * 9, "shortest_edge": 256 * 256}
    assert processor["image_mean"] == processor["image_std"] == [0.5] * 3
    assert "image_token_id" not in json.loads(made["config.json"])
