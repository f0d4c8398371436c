"""Imported Qwen-VL models against transformers: logits, loss, gradients, and a trained step."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
from conversion_cases import (
    TOLERANCE,
    Computed,
    as_released,
    assert_near,
    computed_by,
    logits_together,
    observed,
    predicting_positions,
    put_together,
    train_and_save,
)
from conversion_file_cases import exported
from native_resolution_cases import (
    ImageSample,
    pack_of,
    pixel_arguments,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    qwen3_vl_moe,
    sample_of,
    transformers_model,
)
from ranks import run_ranks
from released import imported, randomized
from safetensors.torch import load_file
from toy import stages_of, toy_plan
from transformers import AutoModelForImageTextToText

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.conversion.adapter_files import export_adapter
from megatron.vlm.conversion.importing import open_released
from megatron.vlm.conversion.tensor_map import Layout
from megatron.vlm.inputs.batch import MicroBatch
from omnibal.data.native_resolution import Grid
from omnibal.model.adapters import AdapterConfig
from omnibal.model.config import ModelConfig
from omnibal.model.parallel import Parallel

MODELS = {
    "qwen3-vl": qwen3_vl(),
    "qwen3-vl-tied": qwen3_vl(tied_head=True),
    "qwen3-vl-moe": qwen3_vl_moe(),
    "qwen2.5-vl": qwen2_5_vl(kv_heads=2),
    "qwen2-vl": qwen2_vl(kv_heads=2),
}
OWN_NAMES = {
    "qwen3-vl": Layout.QWEN3_VL,
    "qwen3-vl-tied": Layout.QWEN3_VL,
    "qwen3-vl-moe": Layout.QWEN3_VL_MOE_STACKED,
    "qwen2.5-vl": Layout.QWEN2_5_VL_PREFIXED,
    "qwen2-vl": Layout.QWEN2_VL_PREFIXED,
}
GATED = {"qwen2.5-vl": ("language.", "vision.")}


def packs_of(model: ModelConfig) -> list[list[ImageSample]]:
    """Images, of which some are no whole number of windows, a video, and text; then text alone."""
    first = [((Grid(1, 6, 4), Grid(1, 2, 8)), 9), ((), 7), ((Grid(3, 4, 6),), 8)]
    rows = [first, [((Grid(1, 10, 14),), 6)], [((), 5), ((), 4)]]
    return [
        [sample_of(model, *each, seed=10 * row + place) for place, each in enumerate(samples)]
        for row, samples in enumerate(rows)
    ]


def theirs(name: str) -> torch.nn.Module:
    return randomized(transformers_model(MODELS[name]))


def batches_of(name: str) -> list[MicroBatch]:
    return [pack_of(samples) for samples in packs_of(MODELS[name])]


def run_of(name: str, folder: Path) -> Path:
    """The run directory of a folder that transformers has written."""
    theirs(name).save_pretrained(folder / "released", max_shard_size="30KB")
    return imported(folder / "released", folder / "run")


def logits_of(model: torch.nn.Module, sample: ImageSample) -> torch.Tensor:
    """Logits of the positions whose next token is learned."""
    asked = predicting_positions(sample)
    return model(input_ids=torch.tensor([sample.ids]), **pixel_arguments(sample)).logits[0, asked]


@functools.cache
def reference(name: str):
    return run_ranks(Parallel(pipeline=1), computed_by_transformers, name)[0]


def computed_by_transformers(links, name: str) -> Computed:
    return computed_by(theirs(name), packs_of(MODELS[name]), logits_of)


# Units: 0 vision embed, 1-5 vision layers of which the second and fourth have deepstack features,
# 6 projector, 7 language embed, 8-10 language layers, 11 head.
LAYOUTS = {
    "one-process": ((), {}),
    "pp2-tp2": ((3,), {"tensor": 2}),
    "pp2-tp2-sp": ((9,), {"tensor": 2, "sequence_parallel": True}),
}
CASES = [
    *((name, "one-process") for name in MODELS),
    ("qwen3-vl", "pp2-tp2"),
    ("qwen3-vl-tied", "pp2-tp2-sp"),
    ("qwen3-vl-moe", "pp2-tp2-sp"),
    ("qwen2.5-vl", "pp2-tp2"),
    ("qwen2-vl", "pp2-tp2-sp"),
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_imported_model_computes_what_transformers_does(tmp_path, name, layout):
    """Prevents: rows of q, k, v or of gate and up in another order, experts, mergers or norms in
    the place of others, and another epsilon, activation, window or RoPE than the folder's."""
    cuts, sizes = LAYOUTS[layout]
    if layout == "pp2-tp2-sp" and name == "qwen3-vl-moe":
        sizes = sizes | {"expert": 2}
    run = run_of(name, tmp_path)
    model = open_released(tmp_path / "released").model
    plan = toy_plan(model, stages_of(model, *cuts), **sizes)
    ranks = run_ranks(plan.parallel, observed, plan, run, batches_of(name))
    expected = reference(name)
    logits = logits_together(plan, [seen["head"] for _, seen, _ in ranks])
    for own, other in zip(logits, expected.logits_LW, strict=True):
        assert_near(own, other, "logits")
    losses = [rank[0] for rank in ranks]
    assert losses == pytest.approx([expected.loss] * len(ranks), rel=TOLERANCE)
    found = put_together(plan, [own for *_, own in ranks], GATED.get(name, ("language.",)))
    ours = as_released(found, model, OWN_NAMES[name])
    assert ours.keys() == expected.gradients.keys()
    for key, gradient in expected.gradients.items():
        assert_near(ours[key], gradient, key)


def logits_of_folder(links, folder: Path, model: ModelConfig):
    after, told = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    # Under this project's stand-ins for CUDA, that load leaves RoPE's tables, which are not stored,
    # undefined.
    values, after = after.state_dict(), type(after)(after.config).eval()
    after.load_state_dict(values)
    with torch.no_grad():
        found = [[logits_of(after, sample) for sample in pack] for pack in packs_of(model)]
    return [torch.cat(each) for each in found], dict(after.named_parameters())


@pytest.mark.parametrize(
    ("name", "layout", "cuts", "tensor"),
    [
        ("qwen3-vl-tied", Layout.QWEN3_VL, (3,), 2),
        ("qwen3-vl-moe", Layout.QWEN3_VL_MOE_STACKED, (), 1),
        ("qwen2.5-vl", Layout.QWEN2_5_VL, (9,), 2),
    ],
)
def test_trained_model_is_the_same_in_transformers(tmp_path, name, layout, cuts, tensor):
    """Prevents: an export of the weights before training, of optimizer state, of one stage alone,
    or with a config.json that makes another model of them."""
    run, trained = run_of(name, tmp_path), tmp_path / "trained"
    model = open_released(tmp_path / "released").model
    plan = toy_plan(model, stages_of(model, *cuts), tensor=tensor)
    ranks = run_ranks(plan.parallel, train_and_save, plan, run, trained, batches_of(name))
    exported(trained, layout, tmp_path / "out")
    given_ids(tmp_path / "out", tmp_path / "released")
    [(expected, weights)] = run_ranks(
        Parallel(pipeline=1), logits_of_folder, tmp_path / "out", MODELS[name]
    )
    before = dict(theirs(name).named_parameters())
    for key, value in weights.items():
        assert not torch.equal(value, before[key]), key
    for place, logits in enumerate(expected):
        ours = torch.cat([rank[place] for rank in ranks[-tensor:]], -1)
        assert_near(ours[:, : model.language.vocab_size], logits, "logits")


def with_adapter(links, folder: Path, name: str):
    """Logits of transformers' model with an adapter folder as PEFT's formula has it."""
    model, used = theirs(name), set()
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for path, module in model.named_modules():
        if not re.fullmatch(config["target_modules"], path):
            continue
        pair = [f"base_model.model.{path}.lora_{which}.weight" for which in "AB"]
        used |= {*pair}
        product = config["lora_alpha"] / config["r"] * tensors[pair[1]] @ tensors[pair[0]]
        module.weight.data += product
    assert used == tensors.keys(), "all modules that are matched, and no others, have tensors"
    with torch.no_grad():
        found = [[logits_of(model, sample) for sample in pack] for pack in packs_of(MODELS[name])]
    return [torch.cat(each) for each in found]


@pytest.mark.parametrize(
    ("name", "layout"), [("qwen3-vl", Layout.QWEN3_VL), ("qwen2.5-vl", Layout.QWEN2_5_VL)]
)
def test_an_exported_adapter_computes_what_training_does(tmp_path, name, layout):
    """Prevents: adapters beside a tower at native resolution under names of files, and not of the
    modules that PEFT looks for, or with rows of q, k and v in another order."""
    run, trained = run_of(name, tmp_path), tmp_path / "trained"
    model = open_released(tmp_path / "released").model
    adapters = AdapterConfig(rank=4, alpha=64, parts=("vision", "projector", "language"))
    plan = toy_plan(model, stages_of(model)).model_copy(update={"adapters": adapters})
    [ours] = run_ranks(plan.parallel, train_and_save, plan, run, trained, batches_of(name))
    assert export_adapter(open_newest(trained), layout, tmp_path / "adapter", None) > 20
    [expected] = run_ranks(Parallel(pipeline=1), with_adapter, tmp_path / "adapter", name)
    for found, logits, before in zip(ours, expected, reference(name).logits_LW, strict=True):
        assert_near(found[:, : model.language.vocab_size], logits, "logits")
        assert (before - logits).abs().max() > 1e-2, "adapters have moved"


def given_ids(folder: Path, like: Path) -> None:
    """Put in the ids of images' tokens, which would be those of a tokenizer."""
    config, source = (json.loads((each / "config.json").read_text()) for each in (folder, like))
    ids = {key: value for key, value in source.items() if key.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps(config | ids))
