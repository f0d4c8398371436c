"""Models read from a hub's `config.json`, compared with Transformers' classes for these files."""

import json
import random
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    InternVLConfig,
)

from omnibal.base.errors import UserError
from omnibal.cost.analytic import model_parameters
from omnibal.families import deepseek, gemma, glm, kimi, qwen, text
from omnibal.families.named import named_model

CONFIGS = Path(__file__).parents[1] / "planner" / "hub_configs"
LAYERS = 8
CASES = (
    *("qwen2-vl-7b", "qwen2.5-vl-7b", "qwen2.5-vl-3b", "qwen3-vl-8b", "qwen3-vl-30b-a3b"),
    *("qwen3.5-0.8b", "qwen3.5-35b-a3b", "glm-4.5v", "kimi-k2.5", "gemma-3-4b"),
    *("deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "qwen3-8b", "qwen3-30b-a3b"),
    *("gpt-oss-20b", "gpt2", "minitron-4b", "mpt-7b"),
)


def fewer_layers(name):
    """Return the configuration with fewer language layers, spelled as Transformers reads it."""
    config = json.loads((CONFIGS / name / "config.json").read_text())
    language = config.get("text_config", config)
    layers = {"gpt2": "n_layer", "mpt-7b": "n_layers"}.get(name, "num_hidden_layers")
    language[layers] = LAYERS
    if "layer_types" in language:
        language["layer_types"] = language["layer_types"][:LAYERS]
    if name == "kimi-k2.5":
        config["vision_config"] = {
            key.removeprefix("vt_").removeprefix("init_"): value
            for key, value in config["vision_config"].items()
            if key.startswith(("vt_", "init_", "patch_size", "merge_kernel_size"))
        }
    return config


VALUES = {
    "num_hidden_layers": (1, 2, 3, 6),
    "n_layer": (1, 2),
    "n_layers": (1, 2),
    "n_embd": (384, 1536),
    "d_model": (512, 1024),
    "num_local_experts": (4, 16),
    "depth": (1, 2, 5),
    "hidden_size": (256, 512),
    "intermediate_size": (96, 320, 1000),
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (32, 48, 64),
    "vocab_size": (1003, 32_000, 50_001),
    "moe_intermediate_size": (48, 160),
    "num_experts": (4, 16),
    "n_routed_experts": (4, 16),
    "num_experts_per_tok": (1, 2),
    "n_shared_experts": (1, 2),
    "shared_expert_intermediate_size": (64, 128),
    "first_k_dense_replace": (0, 1, 2),
    "kv_lora_rank": (64, 128),
    "q_lora_rank": (None, 96),
    "qk_nope_head_dim": (32, 64),
    "v_head_dim": (32, 64),
    "decoder_sparse_step": (1, 2),
    "attention_bias": (False, True),
    "qkv_bias": (False, True),
    "use_qk_norm": (False, True),
    "tie_word_embeddings": (False, True),
}
"""Values for random changes, tried in every table that has the key."""
OUTER_WIDTHS = {"out_hidden_size", "text_hidden_size", "projection_hidden_size"}
LISTED_LAYERS = {"deepstack_visual_indexes", "fullatt_block_indexes"}


def change_keys(config: dict, rng: random.Random) -> dict:
    """Return a copy with random keys changed in all tables, and dependent widths adjusted."""
    config = json.loads(json.dumps(config))
    language = config.get("text_config", config)
    tables = [config, language, config.get("vision_config", {})]
    for table in tables:
        for key in sorted(VALUES.keys() & table.keys()):
            if rng.random() < 0.4 and (key != "hidden_size" or table is language):
                table[key] = rng.choice(VALUES[key])
    kinds = language.get("layer_types")
    if kinds:
        language["layer_types"] = (kinds * 8)[: language["num_hidden_layers"]]
    vision = config.get("vision_config", {})
    for key in OUTER_WIDTHS & vision.keys():
        vision[key] = language["hidden_size"]
    for key in LISTED_LAYERS & vision.keys():
        vision[key] = [at for at in vision[key] if at < vision["depth"]] or vision[key][:0]
    if language.get("pad_token_id") and "vocab_size" in language:
        language["pad_token_id"] %= language["vocab_size"]
    language.pop("experts_per_token", None)  # another spelling, in GPT-OSS only
    if "num_experts_per_tok" in language:
        numbers = ("num_experts", "n_routed_experts", "num_local_experts")
        [experts] = (language[name] for name in numbers if name in language)
        language["num_experts_per_tok"] = min(language["num_experts_per_tok"], experts)
    if rng.random() < 0.3:
        config["tie_word_embeddings"] = rng.choice((False, True))
    return config


@pytest.mark.parametrize("name", [*CASES, "internvl"])
def test_files_and_random_changes_have_the_parameters_of_transformers(name, tmp_path):
    """Prevents parameter counts that differ from Transformers' model, and keys that are misread or
    ignored.

    Transformers omits prediction layers; other tests compare them with complete checkpoints.
    """
    if name == "internvl":  # this class ties the head by the outer key: 622 million parameters
        InternVLConfig().save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
    else:
        config = fewer_layers(name)
    rng, agreed = random.Random(name), 0
    for is_changed in [False] + [True] * 15:
        own = change_keys(config, rng) if is_changed else config
        (tmp_path / "config.json").write_text(json.dumps(own))
        try:
            model = named_model(str(tmp_path)).with_tower("language", prediction_layers=0)
            maker = AutoModelForImageTextToText if model.encoders else AutoModelForCausalLM
            with torch.device("meta"):
                made = maker.from_config(AutoConfig.from_pretrained(tmp_path))
        except (UserError, ValueError, RuntimeError, AssertionError):
            assert is_changed
            continue  # refused by either
        theirs = sum(each.numel() for each in made.parameters())
        assert model_parameters(model).stored == theirs, (tmp_path / "config.json").read_text()
        agreed += 1
    assert agreed >= 5


@pytest.mark.parametrize(("outer", "has_head"), list(product((True, False), repeat=2)))
def test_a_checkpoint_tells_whether_internvl_has_a_head(outer, has_head, tmp_path):
    """Prevents a plan without the released head after a newer version rewrote the file."""
    InternVLConfig(tie_word_embeddings=outer).save_pretrained(tmp_path)
    names = ["model.language_model.embed_tokens.weight", *["lm_head.weight"] * has_head]
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tied = named_model(str(tmp_path)).language.tied_head
    assert tied == (outer and not has_head)


@pytest.mark.parametrize("name", [name for name in CASES if name != "kimi-k2.5"])
def test_what_transformers_saves_again_is_the_same_model(name, tmp_path):
    """Prevents refusing or misreading a model saved again by a newer version of Transformers."""
    AutoConfig.from_pretrained(CONFIGS / name).save_pretrained(tmp_path / name)
    for processor in (CONFIGS / name).glob("*processor_config.json"):
        shutil.copy(processor, tmp_path / name)
    assert named_model(str(tmp_path / name)) == named_model(str(CONFIGS / name))


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
"""Read from the complete model's table, or without effect on cost."""
DIFFERENT = {
    # The file decides whether its weights exist; the class assumes one layer by default.
    ("deepseek_v3", "num_nextn_predict_layers"),
    # The class always normalizes and has no such key.
    ("qwen3_vl_moe_text", "norm_topk_prob"),
    ("kimi_k25_vision", "merge_kernel_size"),  # one number for both sides
}


@pytest.mark.parametrize("kind", TABLES)
def test_what_a_file_leaves_out_is_as_its_class_has_it(kind):
    """Prevents a missing key read as another value than the class's default."""
    theirs = AutoConfig.for_model(kind)
    table = TABLES[kind]()
    ours = {
        name: value
        for name, value in dict(table).items()
        if name not in STATED_ONLY and (kind, name) not in DIFFERENT and hasattr(theirs, name)
    }
    assert len(ours) >= 7
    for name, value in ours.items():
        default = getattr(theirs, name)
        if value is not None:  # else off, or derived from other keys
            as_list = [list(each) if isinstance(each, tuple) else each for each in (value, default)]
            assert as_list[0] == as_list[1], name
