"""Presets built from hub files, against the parameter counts that publishers give.

Exact figures count the tensors of published safetensors files, by the hub's metadata or index,
except figures marked as quoted or remembered. Rounded figures come from the model cards and papers
that are named.
"""

import json
import re
from pathlib import Path

import pytest
from cli_cases import printed

from omnibal.base.errors import UserError
from omnibal.cost.analytic import model_parameters
from omnibal.families.named import hub_ids, model_notes, named_model, named_model_file
from omnibal.model.config import load_model, preset_names
from scripts.hub_presets import preset_texts

pytestmark = pytest.mark.quick

CONFIGS = Path(__file__).parent / "hub_configs"
PRESETS = Path(__file__).parents[2] / "omnibal" / "presets" / "models"

EXACT = {
    # From the hub's metadata or index of the model in `hub_configs/sources.json`.
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-32b": 33_452_718_336,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-32b": 33_357_390_064,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-235b-a22b": 235_670_022_896,
    "qwen3.5-0.8b": 873_438_784,
    "qwen3.5-2b": 2_274_069_824,
    "qwen3.5-4b": 4_659_865_088,
    "qwen3.5-9b": 9_653_104_368,
    "qwen3.5-27b": 27_781_427_952,
    "qwen3.5-35b-a3b": 35_951_822_704,
    "qwen3.5-122b-a10b": 125_086_497_008,
    "qwen3.5-397b-a17b": 403_397_928_944,
    "glm-4.5v": 107_710_933_120,
    "kimi-vl-a3b": 16_407_657_776,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-27b": 27_432_406_640,
    "qwen3-8b": 8_190_735_360,
    "internvl3.5-1b": 1_060_897_792,
    "internvl3.5-8b": 8_528_318_464,
    # Quoted from public files of other projects.
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "gemma-3-12b": 12_187_325_040,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # From memory: no source that could be read has it.
    "qwen2.5-vl-72b": 73_410_777_344,
}
"""Parameters of complete checkpoints, including prediction layers if present."""

NOT_TRAINED = {
    # A routing bias per expert is a buffer: 45 layers of 128 experts, 26 of 64.
    "glm-4.5v": 45 * 128,
    # The index does not explain the remaining 27 x 64.
    "kimi-vl-a3b": 26 * 64 + 27 * 64,
}
"""Checkpoint values without a gradient, which plans do not count."""

ROUNDED = {
    # From InternVL3.5's model cards, in billions with two to four digits.
    "internvl3.5-2b": 2.35e9,
    "internvl3.5-4b": 4.73e9,
    "internvl3.5-14b": 15.1e9,
    "internvl3.5-38b": 38.4e9,
    "internvl3.5-30b-a3b": 30.8e9,
    "internvl3.5-241b-a28b": 240.7e9,
    # arXiv 2509.23661 names 4B and 8B; Qwen3-4B and 8B with an untied head have 4.41 and 8.19.
    "llava-onevision-1.5-4b": 4.41e9 + 0.33e9,
    "llava-onevision-1.5-8b": 8.19e9 + 0.337e9,
    # DeepSeek-V3's README_WEIGHTS: 671 B, and 11.5 B that only the prediction layer has.
    "deepseek-v3": 671e9 + 11.5e9,
    # Kimi-K2's model card says 1 T, its tensors 1.0264 T. MoonViT adds 0.47 B.
    "kimi-k2.5": 1026.4e9 + 0.47e9,
}
ACTIVE = {
    # From model cards that count as here: the complete language model for one token.
    "deepseek-v2": 21e9,
    "deepseek-v2-lite": 2.66e9,
    "qwen3-vl-30b-a3b": 3.35e9 + 0.54e9,
    "qwen3-vl-235b-a22b": 22.2e9 + 0.58e9,
    # From its name, including 5.5 B of InternViT-6B.
    "internvl3.5-241b-a28b": 28e9,
}


@pytest.mark.parametrize("name", EXACT | ROUNDED)
def test_parameters_are_the_published_ones(name):
    """Prevents omitting or double-counting a bias, norm, gate or prediction layer."""
    stored = model_parameters(load_model(name)).stored
    assert stored == pytest.approx((EXACT | ROUNDED)[name], rel=0.005)
    assert name in ROUNDED or stored == EXACT[name] - NOT_TRAINED.get(name, 0)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones(name):
    """Prevents counting experts that a token is not routed to as its work."""
    parameters = model_parameters(load_model(name))
    assert parameters.active == pytest.approx(ACTIVE[name], rel=0.02)
    assert parameters.active < parameters.stored / 4


def test_presets_are_what_their_files_say():
    """Prevents presets edited by hand, or different from the output of the generator."""
    texts = preset_texts(CONFIGS)
    assert {*EXACT, *ROUNDED} == set(texts)
    for name, text in texts.items():
        assert (PRESETS / f"{name}.toml").read_text() == text
        assert load_model(name) == named_model(str(CONFIGS / name))


IDS = hub_ids()
NAMED_SIZE = re.compile(r"(?<![\w.])([\d.]+)b(?![\w])", re.IGNORECASE)
"""Match billions of parameters in a model id, but not active parameters ("A3B")."""


def test_hub_ids_are_of_presets():
    """Prevents a preset that its own hub id does not find, or an id of two presets."""
    assert set(IDS) <= set(preset_names("models"))
    sources = json.loads((CONFIGS / "sources.json").read_text())
    assert {name: IDS[name][0] for name in sources} == sources
    every = [one.lower() for ids in IDS.values() for one in ids]
    assert len(every) == len(set(every))
    # Most ids name a size, which the next test compares.
    assert sum(bool(NAMED_SIZE.search(one)) for one in every) > 0.85 * len(every)


@pytest.mark.parametrize("name", IDS)
def test_a_hub_id_finds_a_preset_of_its_size(name):
    """Prevents a hub id that selects a model of another size, or works in one spelling only."""
    model = load_model(name)
    stored = model_parameters(model).stored
    for one in IDS[name]:
        for spelling in (one, one.lower(), one.upper()):
            assert named_model(spelling) == model
        assert named_model_file(one) == PRESETS / f"{name}.toml"
        assert model_notes(one) == [f"{one} is planned as the preset {name}"]
        for billions in NAMED_SIZE.findall(one):
            assert stored == pytest.approx(float(billions) * 1e9, rel=0.3), one


def test_presets_are_found_in_other_spellings():
    """Prevents `deepseekv2` or `Llama3_70B` in a script from finding no model or a wrong model."""
    names = preset_names("models")
    assert len({re.sub("[-_.]", "", name) for name in names}) == len(names)
    for given, meant in (("deepseekv2", "deepseek-v2"), ("Llama3_70B", "llama3-70b")):
        assert named_model(given) == load_model(meant)
        assert model_notes(given) == [f"{given} is planned as the preset {meant}"]


@pytest.mark.parametrize("given", ["acme/Vision-7B", "Qwen/Qwen3-VL-9B-Instruct"])
def test_an_unknown_hub_id_says_what_to_download(given):
    """Prevents a list of 80 presets as the answer to an unknown hub id."""
    words = {given, "config.json", "preprocessor_config.json", "tokenizer.json", "--model"}
    for read in (named_model, named_model_file, model_notes):
        with pytest.raises(UserError) as error:
            read(given)
        said = str(error.value)
        assert all(word in said for word in words)
        assert "\n" not in said and "deepseek-v2" not in said
    assert ("'qwen3-vl-8b'" in said) == given.startswith("Qwen")


def test_a_path_is_no_hub_id(tmp_path, monkeypatch):
    """Prevents a hub id from taking precedence over a user's folder or file."""
    folder = tmp_path / "Qwen" / "Qwen3-VL-8B-Instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes((CONFIGS / "qwen3-8b" / "config.json").read_bytes())
    monkeypatch.chdir(tmp_path)
    assert named_model("Qwen/Qwen3-VL-8B-Instruct").encoders == {}
    for missing in ("models/own.toml", "models/config.json"):
        with pytest.raises(UserError, match="file"):
            named_model(missing)


def test_presets_are_listed_with_their_hub_ids(capsys):
    """Prevents hub ids or presets missing from the list."""
    listed = json.loads(printed(capsys, "presets --json"))["models"]
    assert {model["name"]: model["hub_ids"] for model in listed if model["hub_ids"]} == IDS
    shown = printed(capsys, "presets")
    assert all(one in shown for ids in IDS.values() for one in ids)
    assert all(name in shown for kind in ("models", "clusters") for name in preset_names(kind))
