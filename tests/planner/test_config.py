"""Presets load, and invalid configurations are refused before any division by their values."""

import re
from pathlib import Path

import pytest

from omnibal.base.errors import UserError
from omnibal.model.config import (
    LanguageConfig,
    ModelConfig,
    config_file,
    config_toml,
    load_cluster,
    load_model,
    preset_names,
)

pytestmark = pytest.mark.quick

DIGITS, LLAMA = load_model("internvl-digits"), load_model("llama3.1-8b")


SHIPPED = {"a100-80g", "b200-180g", "h100-80g", "h200-141g", "laptop-cpu"}


@pytest.mark.parametrize("name", sorted({*preset_names("clusters")} | SHIPPED))
def test_every_cluster_preset_loads(name):
    """Prevents shipping a preset with a wrong field, or under another name."""
    cluster = load_cluster(name)
    assert cluster.name == name
    assert set(cluster.peak_tflops) >= {"bf16", "fp32"}
    assert cluster.inter_node_gb_per_s < cluster.intra_node_gb_per_s < cluster.memory_gb_per_s


@pytest.mark.parametrize(("ratio", "factor"), [(1, 1), (0.5, 2), (0.25, 4), (0.125, 8)])
def test_pixel_shuffle_factor(ratio, factor):
    """Prevents a projector width that disagrees with downsample_ratio."""
    model = ModelConfig.model_validate(DIGITS.model_dump() | {"downsample_ratio": ratio})
    assert model.vision.pixel_shuffle_factor == factor


@pytest.mark.parametrize("ratio", [2, 1.5, 0.3, 0.45, 0.999, float("nan"), float("inf"), 0, -0.5])
def test_other_downsample_ratios_are_refused(ratio):
    """Prevents a division by zero, and training 0.3 as a third."""
    with pytest.raises(ValueError, match="downsample_ratio"):
        ModelConfig.model_validate(DIGITS.model_dump() | {"downsample_ratio": ratio})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "did you mean 'internvl-digits'.*`omnibal presets` lists them"),
        (b"layers = ", r"internvl-digit: not TOML.*compare with a preset"),
        (b"name = '\xff'", "not UTF-8"),
        (b"name = 'x'", "language: Field required"),
        (b"name = 'x'\nspeed = 1", "Field required|speed"),
    ],
)
def test_mistakes_in_a_model_file(tmp_path: Path, monkeypatch, content, expected):
    """Prevents a traceback for a mistake in a hand-written model file."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="neither a file nor a preset"):
        load_model(str(tmp_path))
    if content is not None:
        Path("internvl-digit").write_bytes(content)
    with pytest.raises(UserError, match=expected):
        load_model("internvl-digit")


def model_with_text(name: str) -> ModelConfig:
    """Return a model with this text in all its text fields."""
    texts = {"name": name, "system_message": f"{name}.", "chat_system_message": f".{name}"}
    model = DIGITS.with_tower("language", max_positions=99, rope_factor=1.5)
    return model.model_copy(update=texts)


NAMES = ["plain", 'a"b\\c', "a\n\tb", "\x01\x1f", "\x7f", "\u2028\u00e9\U0001f600"]


@pytest.mark.parametrize(
    "model", [*map(model_with_text, NAMES), LLAMA], ids=lambda model: repr(model.name)
)
def test_a_written_model_is_read_as_it_was(tmp_path, model):
    """Prevents an invalid model.toml for special characters in a name, and losing a language table
    or an absent encoder."""
    (tmp_path / "model.toml").write_text(config_toml(model), encoding="utf-8")
    assert load_model(str(tmp_path / "model.toml")) == model


def scale_rope(**changes):
    language = LLAMA.language.model_dump()
    return language | {"rope_scaling": language["rope_scaling"] | changes}


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        (scale_rope(low_frequency_factor=4), "must be below high_frequency_factor"),
        (scale_rope(factor=0), "factor"),
        (scale_rope() | {"rope_factor": 2.0}, "are exclusive"),
        (
            DIGITS.language.model_dump() | {"rope_factor": 2.0},
            r"rope_factor 2\.0 needs max_positions",
        ),
    ],
)
def test_scalings_that_cannot_be_are_refused(language, expected):
    """Prevents a division by zero, an ignored second RoPE scaling, and a factor without
    effect."""
    with pytest.raises(ValueError, match=expected):
        LanguageConfig.model_validate(language)


@pytest.mark.parametrize("name", ["language", "head", "projector", "Vision", "my-eye", "", "1st"])
def test_an_encoder_has_a_name_of_its_own(name):
    """Prevents two parts with equal names, and stages that cannot be parsed from plan.json."""
    encoders = {name: DIGITS.vision.model_dump()}
    with pytest.raises(ValueError, match="letters and digits, not language"):
        ModelConfig(name="x", language=DIGITS.language, encoders=encoders)


def test_a_truth_value_is_no_number(tmp_path):
    """Prevents `true` parsed as 1, such as a model of one layer or a link of 1 GB/s."""
    path = tmp_path / "edited.toml"
    for text, load in (
        (config_toml(DIGITS), load_model),
        (config_file("clusters", "laptop-cpu").read_text(), load_cluster),
    ):
        found = list(re.finditer(r"^(\w+) = ([\d.]+)$", text, re.MULTILINE))
        assert len(found) > 8
        for number in found:
            path.write_text(f"{text[: number.start(2)]}true{text[number.end(2) :]}")
            with pytest.raises(UserError, match=number[1]):
                load(str(path))
