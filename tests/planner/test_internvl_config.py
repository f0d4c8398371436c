"""Reading config.json of InternVL 1.5 to 3.5, from shortened hub files."""

import json
from pathlib import Path
from typing import Any

import pytest

from omnibal.base.errors import UserError
from omnibal.families.hub import read_hub_config
from omnibal.families.named import model_notes, named_model
from omnibal.model.config import load_model

pytestmark = pytest.mark.quick

CONFIGS = Path(__file__).parent / "hub_configs"


def config_of(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / name / "config.json").read_text())


WHOLE = config_of("internvl3.5-8b")
QWEN3_8B, VISION_300M = WHOLE["llm_config"], WHOLE["vision_config"]
QWEN3_30B_A3B = config_of("internvl3.5-30b-a3b")["llm_config"]
VISION_6B = config_of("internvl3.5-38b")["vision_config"]
QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
    "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_scaling": {"factor": 2.0, "type": "dynamic"},
    "rope_theta": 1000000.0, "tie_word_embeddings": False, "vocab_size": 151674,
}  # fmt: skip
PHI3 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "embd_pdrop": 0.0,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144,
    "rope_scaling": {"long_factor": [1.03] * 48, "short_factor": [1.05] * 48, "type": "su"},
    "tie_word_embeddings": False, "vocab_size": 32020,
}  # fmt: skip


def internvl(llm: dict[str, Any], vision: dict[str, Any] = VISION_300M) -> dict[str, Any]:
    return WHOLE | {"llm_config": llm, "vision_config": vision}


def hf_config(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl",
        "downsample_ratio": 0.5, "projector_hidden_act": "gelu", "tie_word_embeddings": False,
        "text_config": text, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_config": {
            "attention_bias": True, "hidden_act": "gelu", "hidden_size": 1024,
            "image_size": [448, 448], "intermediate_size": 4096, "layer_norm_eps": 1e-06,
            "layer_scale_init_value": 0.1, "norm_type": "layer_norm", "num_attention_heads": 16,
            "num_hidden_layers": 24, "patch_size": [14, 14], "use_qk_norm": False,
        },
    }  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", [internvl(QWEN3_8B), hf_config(QWEN3_8B)])
def test_internvl_3_5_is_read_in_both_formats(tmp_path: Path, config: dict[str, Any]) -> None:
    """Prevents Qwen3 read as Qwen2, with QKV biases and without q and k norms."""
    folder = write(tmp_path / "InternVL3_5-8B", config)
    model = read_hub_config(folder / "config.json")
    assert model == read_hub_config(folder) == named_model(str(folder))
    assert model.name == "internvl3_5-8b" and model.chat_template == "internvl2_5"
    language = model.language
    assert (language.qk_norm, language.qkv_bias, language.head_width) == (True, False, 128)
    assert (language.layers, language.heads, language.kv_heads) == (36, 32, 8)
    assert (language.rope_base, language.vocab_size) == (1_000_000, 151_936)
    assert not language.tied_head and language.runs == ()
    assert model.vision == load_model("internvl3-8b").vision


def test_earlier_versions_are_their_presets(tmp_path: Path) -> None:
    """Prevents InternVL3 configs read as other models than their presets."""
    read = read_hub_config(write(tmp_path / "InternVL3-8B", internvl(QWEN2_7B)))
    preset = load_model("internvl3-8b")
    assert read.vision == preset.vision and read.chat_template == preset.chat_template
    scaled = {"max_positions": 32_768, "rope_factor": 2.0}
    assert read.language == preset.language.model_copy(update=scaled)
    large = read_hub_config(write(tmp_path / "large", internvl(QWEN2_7B, VISION_6B)))
    assert large.vision == load_model("internvl3-78b").vision


def test_phi_3_is_its_preset(tmp_path: Path) -> None:
    """Prevents InternVL2-4B refused, or read as another model than its preset."""
    read = read_hub_config(write(tmp_path / "m", internvl(PHI3) | {"template": "phi3-chat"}))
    preset = load_model("internvl2-4b")
    assert read.vision.model_copy(update={"layer_scale_init": 1.0}) == preset.vision
    assert read.chat_template == preset.chat_template
    assert read.language == preset.language.model_copy(update={"norm_eps": 1e-5})


def test_keys_that_are_not_understood_are_named(tmp_path: Path) -> None:
    """Prevents a modified model planned without a note, or a note for a released model."""
    dumped = {
        "use_moe": False, "moe_coeff_ratio": 0.5, "num_experts": 8, "drop_path_rate": 0.1,
        "laux_allreduce": "all_nodes", "use_flash_attn": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    llm = {"moe_config": None, "max_window_layers": 70, "top_k": 50, "use_cache": True}
    whole = {"hidden_size": 3584, "image_fold": None, "use_llm_lora": 0, "auto_map": {"A": "b"}}
    released = internvl(QWEN2_7B | llm, VISION_300M | dumped) | whole
    for name, config in {"plain": released, "phi": internvl(PHI3)}.items():
        assert model_notes(str(write(tmp_path / name, config))) == []
    changed = internvl(QWEN2_7B | {"attention_sinks": True}, VISION_300M | {"use_moe": True})
    [note] = model_notes(str(write(tmp_path / "changed", changed | {"mlp_layers": 3})))
    assert "llm_config.attention_sinks, vision_config.use_moe and mlp_layers" in note


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            internvl(QWEN3_8B | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}),
            "its language model is GptOssForCausalLM; it must be one of",
        ),
        (
            hf_config(QWEN3_8B | {"model_type": "gpt_oss", "architectures": None}),
            "is gpt_oss",
        ),
        (internvl(QWEN3_30B_A3B | {"mlp_only_layers": [0]}), "has layers without experts"),
        (internvl(QWEN3_8B | {"architectures": ["MistralForCausalLM"]}), "is MistralForCausalLM"),
        (internvl(PHI3 | {"sliding_window": 2047}), "sliding_window 2047"),
        (hf_config(PHI3), "is Phi3ForCausalLM"),
        (internvl(QWEN3_8B | {"use_sliding_window": True}), "use_sliding_window true"),
        (
            internvl(QWEN3_8B, VISION_300M | {"hidden_act": "silu"}),
            "vision_config: hidden_act 'silu' must be 'gelu'",
        ),
        (hf_config(QWEN3_8B | {"model_type": "internlm2", "architectures": None}), "it must"),
        (internvl(QWEN3_8B) | {"min_dynamic_patch": 0}, "min_dynamic_patch: .* .given: 0"),
        ({"model_type": "internvl2"}, "'internvl2' is not known; it must be one of"),
    ],
)
def test_other_models_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    """Prevents an unsupported model planned as another model."""
    with pytest.raises(UserError, match=message):
        read_hub_config(write(tmp_path / "other", config))
