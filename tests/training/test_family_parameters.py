"""Models read from a hub's `config.json` beside Transformers' classes that read the same file."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from megatron.vlm.conversion.released_config import read_config
from omnibal.cost.parameters import model_parameters
from omnibal.families import deepseek, gemma, glm, kimi, qwen, text
from omnibal.families.named import named_model

CONFIGS = Path(__file__).parents[1] / "planner" / "hub_configs"
LAYERS = 8
CASES = (
    "qwen2-vl-7b",
    "qwen2.5-vl-7b",
    "qwen2.5-vl-3b",
    "qwen3-vl-8b",
    "qwen3-vl-30b-a3b",
    "qwen3.5-0.8b",
    "qwen3.5-35b-a3b",
    "glm-4.5v",
    "kimi-k2.5",
    "gemma-3-4b",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
    "qwen3-8b",
    "qwen3-30b-a3b",
)


def fewer_layers(name):
    """The file's content for fewer language layers, in the spelling that Transformers reads."""
    config = json.loads((CONFIGS / name / "config.json").read_text())
    language = config.get("text_config", config)
    language["num_hidden_layers"] = LAYERS
    if "layer_types" in language:
        language["layer_types"] = language["layer_types"][:LAYERS]
    if name == "kimi-k2.5":
        config["vision_config"] = {
            key.removeprefix("vt_").removeprefix("init_"): value
            for key, value in config["vision_config"].items()
            if key.startswith(("vt_", "init_", "patch_size", "merge_kernel_size"))
        }
    return config


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_transformers(name, tmp_path):
    """Prevents: a parameter that the plan counts and the model has not, or the other way round.

    Transformers leaves prediction layers out, whose parameters are checked with whole checkpoints'.
    """
    (tmp_path / "config.json").write_text(json.dumps(fewer_layers(name)))
    model = named_model(str(tmp_path)).with_tower("language", prediction_layers=0)
    maker = AutoModelForImageTextToText if model.encoders else AutoModelForCausalLM
    with torch.device("meta"):
        theirs = maker.from_config(AutoConfig.from_pretrained(tmp_path))
    assert model_parameters(model).stored == sum(each.numel() for each in theirs.parameters())


@pytest.mark.parametrize("name", [name for name in CASES if name != "kimi-k2.5"])
def test_what_transformers_saves_again_is_the_same_model(name, tmp_path):
    """Prevents: a model that was tuned and saved by a newer version being refused, or another."""
    AutoConfig.from_pretrained(CONFIGS / name).save_pretrained(tmp_path / name)
    assert named_model(str(tmp_path / name)) == named_model(str(CONFIGS / name))


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "internvl3.5-8b"])
def test_plans_are_for_what_conversion_makes(name):
    """Prevents: a plan of a config.json that the checkpoint imported from its folder is not of."""
    heads = ["lm_head.weight", "language_model.lm_head.weight"]
    assert read_config(CONFIGS / name, heads)[0] == named_model(str(CONFIGS / name))


TABLES = {
    "llama": text.LlamaText,
    "qwen2": text.Qwen2Text,
    "qwen3": text.Qwen3Text,
    "qwen3_moe": text.Qwen3MoeText,
    "qwen2_vl_text": qwen.Qwen25VLText,
    "qwen2_vl_vision": qwen.Qwen2VLVision,
    "qwen2_5_vl_text": qwen.Qwen25VLText,
    "qwen3_vl_text": qwen.Qwen3VLText,
    "qwen3_vl_moe_text": qwen.Qwen3VLMoeText,
    "qwen3_5_text": qwen.HybridText,
    "qwen3_5_moe_text": qwen.HybridMoeText,
    "qwen2_5_vl_vision": qwen.Qwen25VLVision,
    "qwen3_vl_vision": qwen.Qwen3VLVision,
    "glm4v_moe_text": glm.GlmText,
    "glm4v_moe_vision": glm.GlmVision,
    "gemma3_text": gemma.GemmaText,
    "siglip_vision_model": gemma.SiglipVision,
    "kimi_k25_vision": kimi.MoonVit,
    "deepseek_v2": deepseek.DeepseekV2Text,
    "deepseek_v3": deepseek.DeepseekV3Text,
}
STATED_ONLY = {"tie_word_embeddings", "rope_scaling", "rope_parameters", "rope_theta"}
"""Read as the whole model's, or without a cost."""
DIFFERENT = {
    # Its weights are there only where a file says so; the class takes one where none does.
    ("deepseek_v3", "num_nextn_predict_layers"),
    # Always so in the class, which has no such key.
    ("qwen3_vl_moe_text", "norm_topk_prob"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_what_a_file_leaves_out_is_as_its_class_has_it(kind):
    """Prevents: a key that is left out read as another value than its writer had."""
    theirs = AutoConfig.for_model(kind)
    table = TABLES[kind]()
    ours = {
        name: value
        for name, value in dict(table).items()
        if name not in STATED_ONLY and (kind, name) not in DIFFERENT and hasattr(theirs, name)
    }
    assert len(ours) >= 8
    for name, value in ours.items():
        default = getattr(theirs, name)
        given = list(value) if isinstance(value, tuple) else value
        default = list(default) if isinstance(default, tuple) else default
        if given is None:
            continue  # off, or made of other keys
        assert given == default, name
