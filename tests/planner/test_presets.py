"""The shipped model presets, against the sizes that their publishers give.

Sources: model cards of OpenGVLab's checkpoints, InternLM2, Llama 3, Yi and Qwen1.5; EVA-CLIP and
EVA-CLIP-18B papers for encoders; 5.54 B of InternViT-6B by its 45 released layers; for text-only
models half of `total_size` (bytes in bf16) of their `model.safetensors.index.json`.
"""

import json
from pathlib import Path

import pytest
from cost_cases import analytic_cost

from omnibal.base.errors import UserError
from omnibal.cost.analytic import model_parameters
from omnibal.model.config import ModelConfig, load_cluster, load_model, preset_names
from omnibal.model.parallel import Parallel, check_parallel

pytestmark = pytest.mark.quick

# Billions of parameters of complete checkpoints, including the projector.
CHECKPOINTS = {
    name: billions
    for billions, names in {
        25.5: "internvl-chat-1.5-6b-20b internvl-1.5-26b internvl2-26b internvl2.5-26b",
        2.21: "mini-internvl-1.5-2b internvl2-2b internvl2.5-2b",
        4.15: "mini-internvl-1.5-4b internvl2-4b",
        0.938: "internvl2-1b internvl2.5-1b internvl3-1b",
        8.08: "internvl2-8b internvl2.5-8b",
        40.1: "internvl2-40b",
        76.3: "internvl2-76b",
        3.71: "internvl2.5-4b",
        38.4: "internvl2.5-38b internvl3-38b",
        78.4: "internvl2.5-78b internvl3-78b",
        2.09: "internvl3-2b",
        7.94: "internvl3-8b",
        15.1: "internvl3-14b",
    }.items()
    for name in names.split()
}

# Billions of (encoder, language model) for pairs that were never released.
PAIRS = {
    "internvl-chat-1.5-6b-34b": (5.54, 34.4),
    "internvit-6b-llama3-8b": (5.54, 8.03),
    "internvit-6b-llama3-70b": (5.54, 70.6),
    "internvit-6b-qwen1.5-110b": (5.54, 111.2),
    "eva-clip-1b-internlm2-20b": (1.01, 19.86),
    "eva-clip-4b-internlm2-20b": (4.35, 19.86),
    "eva-clip-8b-internlm2-20b": (7.5, 19.86),
    "eva-clip-18b-internlm2-20b": (17.5, 19.86),
}

DIGITS = ("internvl-digits", "internvl-digits-moe", "internvl-digits-omni")
QUICKSTARTS = {*DIGITS, "qwen3-vl-digits", "qwen3.5-digits"}

TEXT_ONLY = {
    "llama3.1-8b": 16_060_522_496 // 2,
    "llama3.1-70b": 141_107_412_992 // 2,
    "qwen2.5-32b": 65_527_752_704 // 2,
    "qwen2.5-7b": 7_615_616_512,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    # The released 7B without 64 words; rounded sizes of the papers' and llm-foundry's tables.
    "mpt-7b": 6_649_286_656 - 64 * 4096,
    "mpt-1b": pytest.approx(1.31e9, rel=0.005),
    "mpt-3b": pytest.approx(2.65e9, rel=0.005),
    "mpt-30b": pytest.approx(29.96e9, rel=0.005),
    "gpt3-175b": pytest.approx(174.6e9, rel=0.005),
    "nemotron-4-15b": pytest.approx(15.6e9, rel=0.005),
    "nemotron-4-340b": pytest.approx(341e9, rel=0.005),
}
"""Exact parameters of complete checkpoints without an encoder."""

OMNI = "internvl3-8b-whisper"
HUB = json.loads((Path(__file__).parent / "hub_configs" / "sources.json").read_text())
"""Presets built from hub files, compared in `test_hub_presets.py`."""


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def language_parameters(model: ModelConfig) -> int:
    return model_parameters(model.without_encoders()).stored


def encoder_parameters(model: ModelConfig) -> int:
    inputs, width = 4 * model.vision.hidden_size, model.language.hidden_size
    projector = 2 * inputs + linear(inputs, width) + linear(width, width)
    return model_parameters(model).stored - language_parameters(model) - projector


def roughly(billions: float):
    """Return a comparison to a published size, which is rounded to two or three digits."""
    return pytest.approx(billions * 1e9, rel=0.015)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_has_its_published_size(name):
    """Prevents a wrong layer count, width, vocabulary or tied head, and a wrong InternViT that a
    language model hides in the sum."""
    model = load_model(name)
    assert model_parameters(model).stored == roughly(CHECKPOINTS[name])
    assert encoder_parameters(model) == roughly(5.54 if model.vision.hidden_size == 3200 else 0.304)


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_text_only_checkpoint_has_its_published_size(name):
    """Prevents a wrong width, bias or vocabulary, or an encoder that a text-only model lacks."""
    model = load_model(name)
    assert not model.encoders
    assert model_parameters(model).stored == TEXT_ONLY[name]


@pytest.mark.parametrize("name", PAIRS)
def test_pair_has_its_parts_published_sizes(name):
    """Prevents a wrong encoder that a large language model would hide in the sum."""
    model, (encoder, language) = load_model(name), PAIRS[name]
    assert encoder_parameters(model) == roughly(encoder)
    assert language_parameters(model) == roughly(language)


def test_omni_is_internvl3_8b_and_whisper_large_v3():
    """Prevents a wrong layer count, width or norm of either model, and missing audio tokens.

    Published: the 636,968,960 values, fixed positions among them, of Transformers' WhisperEncoder
    with the sizes in the config.json of openai/whisper-large-v3.
    """
    model, seeing = load_model(OMNI), load_model("internvl3-8b")
    audio, width = model.audio, model.audio.hidden_size
    assert model.vision == seeing.vision
    assert model.language == seeing.language.model_copy(update={"vocab_size": 151_674 + 3})
    units = analytic_cost(model, load_cluster("h100-80g"), Parallel(pipeline=1), "bf16").units
    tower = units["audio_embed"].parameters + audio.layers * units["audio_layer"].parameters
    no_key_bias = audio.layers * width
    last_norm, fixed = 2 * width, audio.positions_per_item * width
    assert tower - no_key_bias + last_norm + fixed == 636_968_960
    assert audio.norm_eps == 1e-5 and audio.tokens_per_item == 750
    projector = last_norm + linear(2 * width, 3584) + linear(3584, 3584)
    assert units["audio_projector"].parameters == projector


TILED = [name for name in preset_names("models") if load_model(name).takes_images]


@pytest.mark.parametrize("name", TILED)
def test_only_eva_clip_has_no_layer_scale(name):
    """Prevents a preset without its layer scale, which would be omitted unnoticed."""
    init = load_model(name).vision.layer_scale_init
    assert (init is None) == name.startswith("eva-clip")


HERMES = {
    *("internvl2-1b", "internvl2-40b", "internvl-chat-1.5-6b-34b", "internvit-6b-llama3-8b"),
    *("internvit-6b-llama3-70b", "internvit-6b-qwen1.5-110b"),
}


@pytest.mark.parametrize("name", preset_names("models"))
def test_template_is_the_released_one(name):
    """Prevents training a released model with another chat template than its own, and a preset
    under another name than its own."""
    model = load_model(name)
    assert model.name == name
    assert all(tower.tokens_per_item > 0 for tower in model.encoders.values())
    expected = "internlm2-chat" if model.takes_images else "tokenizer"
    is_own = name in QUICKSTARTS and model.takes_images
    if name.startswith(("internvl2.5", "internvl3")) or is_own:
        expected = "internvl2_5"
    elif name in HERMES:
        expected = "Hermes-2"
    elif name in ("mini-internvl-1.5-4b", "internvl2-4b"):
        expected = "phi3-chat"
    elif name in TEXT_ONLY:
        released = {"llama3": "llama3", "qwen2.5": "qwen2.5"}
        expected = next((released[one] for one in released if name.startswith(one)), expected)
    assert model.chat_template == expected
    assert model.system_message == ("" if is_own else None)


def test_every_preset_is_checked():
    """Prevents a preset with unchecked sizes. The quickstarts' sizes were never published."""
    assert CHECKPOINTS.keys().isdisjoint(PAIRS)
    assert {*CHECKPOINTS, *PAIRS, *TEXT_ONLY, OMNI, *QUICKSTARTS, *HUB} == {*preset_names("models")}


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("internvit-6b-llama3-8b", Parallel(tensor=1, pipeline=4)),
        ("internvl-chat-1.5-6b-20b", Parallel(tensor=2, pipeline=4)),
        ("internvl-chat-1.5-6b-34b", Parallel(tensor=4, pipeline=4)),
        ("internvit-6b-llama3-70b", Parallel(tensor=4, pipeline=8)),
        ("internvit-6b-qwen1.5-110b", Parallel(tensor=8, pipeline=8)),
    ],
)
def test_sizes_of_the_paper_are_accepted(name, parallel):
    """Prevents refusing sizes of OmniBal's Table 9: 25 vision heads on 2, 4 and 8 ranks."""
    check_parallel(load_model(name), parallel, load_cluster("a100-80g"))


def test_heads_are_copied_to_multiples_of_them():
    """Prevents refusing TP 8 for 4 key-value heads, or accepting gates that core does not copy."""
    cluster = load_cluster("h100-80g")
    eight = Parallel(tensor=8, pipeline=1, sequence_parallel=True)
    check_parallel(load_model("qwen3-30b-a3b"), eight, cluster)
    for name in ("qwen2.5-7b", "qwen3.5-35b-a3b"):
        with pytest.raises(UserError, match=r"size 8 does not divide language.(heads|kv_he)"):
            check_parallel(load_model(name), eight, cluster)
    delta, full = load_model("qwen3.5-27b").language.runs
    assert delta.linear is not None
    linear = delta.linear.model_copy(update={"key_heads": 2})
    runs = (delta.model_copy(update={"linear": linear}), full)
    few = load_model("qwen3.5-27b").with_tower("language", runs=runs)
    with pytest.raises(UserError, match=r"size 4 does not divide .*\.key_heads = 2"):
        check_parallel(few, Parallel(tensor=4, pipeline=1), cluster)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("internvl2.5-78", "internvl2.5-78b"),
        ("internvit-6b-lama3-70b", "internvit-6b-llama3-70b"),
        ("InternVL3-38B", "internvl3-38b"),
        ("eva-clip-18b", "eva-clip-18b-internlm2-20b"),
    ],
)
def test_mistyped_name_finds_the_nearest(typo, meant):
    """Prevents searching thirty names for a mistyped preset."""
    with pytest.raises(UserError, match=f"did you mean '{meant}'"):
        load_model(typo)
