"""`config.json` of model hubs: fields read for every family, and named refusals."""

import json
import re
from pathlib import Path

import pytest
from cli_cases import run

from omnibal.base.errors import UserError
from omnibal.families.hub import read_hub_config
from omnibal.families.named import model_notes, named_model

pytestmark = pytest.mark.quick

CONFIGS = Path(__file__).parent / "hub_configs"


def config_of(name):
    return json.loads((CONFIGS / name / "config.json").read_text())


def load(folder, config, **others):
    """Return the model of a folder with this `config.json` and other files, by stem."""
    folder.mkdir(exist_ok=True)
    for stem, content in {"config": config, **others}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return read_hub_config(folder)


def patch(name, table, **changes):
    config = config_of(name)
    config[table].update(changes)
    return config


def test_spellings_of_other_versions_are_the_same_model(tmp_path):
    """Prevents reading another model from a file rewritten by a newer or older version."""
    flat = config_of("qwen2.5-vl-3b")
    outside = {"architectures", "model_type", "vision_config", "tie_word_embeddings"}
    inside = {key: value for key, value in flat.items() if key not in outside}
    rope = inside.pop("rope_scaling") | {"rope_theta": inside.pop("rope_theta")}
    newer = {key: flat[key] for key in outside} | {
        "text_config": inside | {"model_type": "qwen2_5_vl_text", "rope_parameters": rope}
    }
    assert load(tmp_path / "m", newer) == load(tmp_path / "m", flat)
    assert load(tmp_path / "m", flat | newer) == load(tmp_path / "m", flat)
    with pytest.raises(UserError, match="hidden_size is 9, but 2048 in text_config"):
        load(tmp_path / "m", flat | newer | {"hidden_size": 9})
    own = config_of("kimi-k2.5")
    vision = {
        "patch_size": 14,
        "pos_emb_height": 64,
        "pos_emb_width": 64,
        "pos_emb_time": 4,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "merge_kernel_size": [2, 2],
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
    }
    written = own | {"vision_config": vision, "projection_hidden_size": 1152}
    assert load(tmp_path / "m", written) == load(tmp_path / "m", own)


def test_keys_of_other_writers(tmp_path):
    """Prevents refusing tuned models for a tool's notes, losing a prediction layer, and refusing
    Kimi-K2, the language model of K2.5."""
    whole = config_of("kimi-k2.5")
    alone = load(tmp_path / "k2", whole["text_config"] | {"model_type": "kimi_k2"})
    assert alone.language == load(tmp_path / "k2.5", whole).language
    noted = patch("qwen3-vl-8b", "text_config", unsloth_fixed=True) | {"unsloth_version": "2026.1"}
    assert load(tmp_path / "m", noted) == load(tmp_path / "m", config_of("qwen3-vl-8b"))
    predicting = patch("glm-4.5v", "text_config", num_nextn_predict_layers=1)
    assert load(tmp_path / "g", predicting).language.prediction_layers == 1


def test_pixels_of_the_processor_next_to_it(tmp_path):
    """Prevents plans for images larger than the model's processor makes them."""
    given = config_of("qwen3-vl-2b")
    pixels = {"min_pixels": 1024, "max_pixels": 65_536}
    edges = {"size": {"shortest_edge": 1024, "longest_edge": 65_536}}
    for number, others in enumerate(
        [
            {"preprocessor_config": pixels},
            {"preprocessor_config": edges},
            {"processor_config": {"image_processor": pixels}},
        ]
    ):
        tower = load(tmp_path / str(number), given, **others).encoders["vision"]
        assert (tower.min_pixels, tower.max_pixels) == (1024, 65_536)
    kimi = config_of("kimi-vl-a3b")
    limited = load(tmp_path / "k", kimi, preprocessor_config={"in_token_limit": 16_384})
    assert limited.encoders["vision"].max_pixels == 16_384 * 14**2
    with pytest.raises(UserError, match=r"patch_size 14, and config\.json 16"):
        load(tmp_path / "p", given, preprocessor_config={"patch_size": 14})


def test_values_and_frames_of_the_processors_next_to_it(tmp_path):
    """Prevents pixel values or video frames that differ from the released model's."""
    older, newer = config_of("qwen2.5-vl-3b"), config_of("qwen3-vl-2b")
    tower = load(tmp_path / "a", older).images
    assert tower.pixel_mean == (0.48145466, 0.4578275, 0.40821073)
    assert tower.pixel_scale == 1 / 255
    assert load(tmp_path / "b", newer).images.pixel_std == (0.5,) * 3
    colours = {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3], "rescale_factor": 0.5}
    tower = load(tmp_path / "c", newer, preprocessor_config=colours).images
    assert (tower.pixel_mean, tower.pixel_std) == ((0.1, 0.2, 0.3), (1, 2, 3))
    assert tower.pixel_scale == 0.5
    for change, message in (
        ({"do_normalize": False}, "do_normalize of the image processor must be true"),
        ({"resample": 2}, "resample 2 must be"),
    ):
        with pytest.raises(UserError, match=message):
            load(tmp_path / "d", newer, preprocessor_config=change)
    size = {"shortest_edge": 2048, "longest_edge": 65_536}
    frames = {"fps": 1, "min_frames": 2, "max_frames": 8, "size": size}
    other = {"fps": 3}
    for others in (
        {"video_preprocessor_config": frames, "processor_config": {"processor_class": "x"}},
        {"processor_config": {"video_processor": frames}, "video_preprocessor_config": other},
    ):
        folder = tmp_path / "-".join(sorted(others))
        video = load(folder, newer, **others).images.video
        assert (video.frames_per_second, video.min_frames, video.max_frames) == (1, 2, 8)
        assert (video.min_pixels, video.max_pixels) == (2048, 65_536)
        assert (video.times, video.sampling) == ("before", "ends")
    older = json.loads((CONFIGS / "qwen2.5-vl-7b/config.json").read_text())
    for others in ({"min_pixels": 2048, "max_pixels": 65_536}, {"size": size}):
        video = load(tmp_path / f"o{len(others)}", older, preprocessor_config=others).images.video
        assert (video.min_pixels, video.max_pixels) == (2048, 65_536)
    video = load(tmp_path / "n", newer, preprocessor_config={"max_pixels": 65_536}).images.video
    assert video.max_pixels != 65_536
    with pytest.raises(UserError, match="cap_pixels_per_frame"):
        load(tmp_path / "e", newer, video_preprocessor_config={"cap_pixels_per_frame": True})


REFUSED = {
    "an unknown key": (patch("qwen3-vl-8b", "text_config", num_memory_layers=2), "num_memory"),
    "another activation": (patch("qwen3-vl-8b", "text_config", hidden_act="gelu"), "hidden_act"),
    "a misspelt key": (config_of("qwen3-8b") | {"num_hidden_layer": 3}, "mean num_hidden_layers"),
    "windows": (config_of("qwen3-8b") | {"use_sliding_window": True}, "use_sliding_window"),
    "dropout": (config_of("qwen3-8b") | {"attention_dropout": 0.1}, "attention_dropout"),
    "MPT without ALiBi": (
        config_of("mpt-7b") | {"attn_config": {"alibi": False}},
        r"alibi false must be true",
    ),
    "a key of no GPT-2": (config_of("gpt2") | {"n_experts": 8}, "n_experts is not understood"),
    "another family": ({"model_type": "mamba2"}, "'mamba2' is not known; it must be one of"),
    "no family": ({"hidden_size": 8}, "has no model_type"),
    "a classifier": (
        config_of("qwen3-8b") | {"architectures": ["Qwen3ForSequenceClassification"]},
        "Qwen3ForSequenceClassification, which does not generate",
    ),
    "layers without a type": (
        patch("gemma-3-4b", "text_config", layer_types=["full_attention"]),
        "layer_types has 1 entries",
    ),
    "a dense layer among experts": (
        patch("qwen3.5-35b-a3b", "text_config", mlp_only_layers=[0]),
        "mlp_only_layers",
    ),
    "a gate that is off": (
        patch("qwen3.5-9b", "text_config", attn_output_gate=False),
        "attn_output_gate",
    ),
    "a truth value": (config_of("qwen3-8b") | {"num_hidden_layers": True}, "num_hidden_layers"),
    "truth values": (config_of("qwen3-8b") | {"num_hidden_layers": [True]}, "num_hidden_layers"),
    "another projector": (
        patch("kimi-k2.5", "vision_config", mm_projector_type="linear"),
        "vision_config: mm_projector_type",
    ),
    "a pooling head": (
        patch("gemma-3-4b", "vision_config", vision_use_head=True),
        "pooling head; vision_use_head must be false",
    ),
    "widths that differ": (
        patch("qwen3-vl-8b", "vision_config", out_hidden_size=3584),
        "width 3584.*hidden_size 4096",
    ),
    "no number": (config_of("qwen3-8b") | {"hidden_size": "wide"}, "hidden_size.*given: 'wide'"),
    "scaled positions of a trained family": (
        config_of("qwen3-8b") | {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
        "'yarn' is not trained",
    ),
    "two spellings": (
        patch("qwen3-vl-30b-a3b", "text_config", num_local_experts=64),
        "num_local_experts and another spelling",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_name(case, tmp_path):
    """Prevents planning an unsupported variant as the base model."""
    config, says = REFUSED[case]
    with pytest.raises(UserError) as error:
        load(tmp_path / "m", config)
    assert re.search(says, str(error.value)), error.value
    assert "config.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Invalid JSON"),
        ("[1]", "should be an object"),
        (None, "no such file"),
        ('{"model_type": "qwen3_vl", "vision_config": 3}', "vision_config"),
    ],
)
def test_broken_files_are_refused(text, says, tmp_path):
    """Prevents a traceback for a truncated download."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=says):
        named_model(str(tmp_path))


@pytest.mark.parametrize(
    "stored",
    [
        config_of("deepseek-v3") | {"quantization_config": {"quant_method": "fp8"}},
        patch("kimi-k2.5", "text_config", quantization_config={"format": "pack-quantized"}),
        patch("internvl3.5-8b", "llm_config", quantization_config={"bits": 4}),
    ],
    ids=["of a model", "of a part", "of InternVL's part"],
)
def test_quantized_releases_are_planned_in_floating_point(stored, tmp_path):
    """Prevents refusing released files with quantized weights, or planning them silently."""
    plain = json.loads(json.dumps(stored))
    for table in (plain, *(value for value in plain.values() if isinstance(value, dict))):
        table.pop("quantization_config", None)
    folder = tmp_path / "m"
    assert (load(folder, plain), model_notes(str(folder))) == (named_model(str(folder)), [])
    unquantized = named_model(str(folder))
    assert load(folder, stored) == unquantized
    [note] = model_notes(str(folder))
    assert "planned in --precision, not as they are stored" in note


def test_a_plan_of_a_hubs_folder(tmp_path, capsys):
    """Prevents commands that refuse `--model FOLDER`, plans that cannot be read back, memory of
    quantized weights, and repeated notes."""
    plan, folder = tmp_path / "plan", tmp_path / "hub"
    quantized = {"quantization_config": {"bits": 4}, "num_hidden_layers": 4, "max_window_layers": 4}
    load(folder, config_of("qwen3-8b") | quantized)
    options = "--cluster h100-80g --pp 2 --tp 4 --max-tokens 4096 --micro-batches 4"
    run(f"plan {options} --model", folder, "-o", plan)
    assert capsys.readouterr().err.count("note: " + model_notes(str(folder))[0]) == 1
    run("check", plan)
    assert json.loads((plan / "plan.json").read_text())["model"]["name"] == "hub"
