"""Imported Qwen-VL models against Transformers: logits, losses, gradients and a trained step."""

import functools
import json
from pathlib import Path

import pytest
import torch
from conversion_cases import (
    Computed,
    add_adapter_products,
    assert_computes,
    assert_near,
    compute_samples,
    load_in_transformers,
    observe,
    predicting_positions,
    train_and_save,
)
from conversion_file_cases import edit_config, export_run
from native_resolution_cases import (
    ImageSample,
    pack_of,
    parity_packs,
    pixel_arguments,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_5_moe,
    qwen3_vl,
    qwen3_vl_moe,
    transformers_model,
)
from ranks import run_ranks
from released import imported, randomize
from toy import stages_of, toy_plan

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.conversion.adapter_files import export_adapter
from megatron.vlm.conversion.exporting import plan_export_like, write_export
from megatron.vlm.conversion.importing import open_released
from megatron.vlm.conversion.tensor_map import TensorLayout
from megatron.vlm.inputs.batch import MicroBatch
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.config import ModelConfig
from omnibal.model.parallel import Parallel

KINDS = {
    "qwen3-vl": (qwen3_vl(), TensorLayout.QWEN3_VL),
    "qwen3-vl-tied": (qwen3_vl(tied_head=True), TensorLayout.QWEN3_VL),
    "qwen3-vl-moe": (qwen3_vl_moe(), TensorLayout.QWEN3_VL_MOE_STACKED),
    "qwen2.5-vl": (qwen2_5_vl(kv_heads=2), TensorLayout.QWEN2_5_VL_PREFIXED),
    "qwen2-vl": (qwen2_vl(kv_heads=2), TensorLayout.QWEN2_VL_PREFIXED),
    "qwen3.5": (qwen3_5(), TensorLayout.QWEN3_5),
    "qwen3.5-tied": (qwen3_5(tied_head=True), TensorLayout.QWEN3_5),
    "qwen3.5-moe": (qwen3_5_moe(), TensorLayout.QWEN3_5_MOE),
}
"""Models, and layouts with Transformers' module names."""
MODELS = {name: model for name, (model, _) in KINDS.items()}
GATED = {"qwen2.5-vl": ("vision.",)}


def hf_model(name: str) -> torch.nn.Module:
    return randomize(transformers_model(MODELS[name]))


def batches_of(name: str) -> list[MicroBatch]:
    return [*map(pack_of, parity_packs(MODELS[name]))]


def import_run(name: str, folder: Path) -> Path:
    """Import a Transformers folder; return the run directory."""
    hf_model(name).save_pretrained(folder / "released", max_shard_size="30KB")
    return imported(folder / "released", folder / "run")


def logits_of(model: torch.nn.Module, sample: ImageSample) -> torch.Tensor:
    """Return the logits at positions before a token with loss."""
    asked = predicting_positions(sample)
    return model(input_ids=torch.tensor([sample.ids]), **pixel_arguments(sample)).logits[0, asked]


@functools.cache
def reference(name: str):
    return run_ranks(Parallel(pipeline=1), compute_reference, name)[0]


def compute_reference(links, name: str) -> Computed:
    return compute_samples(hf_model(name), parity_packs(MODELS[name]), logits_of)


# Units: 0 vision embed, 1-5 vision layers (2 and 4 output deepstack features), 6 projector, 7
# language embed, 8-10 language layers, 11 head.
LAYOUTS = {
    "one-process": ((), {}),
    "pp2-tp2": ((3,), {"tensor": 2}),
    "pp2-tp2-sp": ((9,), {"tensor": 2, "sequence_parallel": True}),
}
CASES = [(name, "one-process") for name in MODELS]
CASES += [(name, "pp2-tp2") for name in ("qwen3-vl", "qwen2.5-vl")]
CASES += [
    (name, "pp2-tp2-sp")
    for name in (
        "qwen3-vl-tied",
        "qwen3-vl-moe",
        "qwen2-vl",
        "qwen3.5",
        "qwen3.5-tied",
        "qwen3.5-moe",
    )
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_imported_model_computes_what_transformers_does(tmp_path, name, layout):
    """Prevents reordered q, k, v or gate and up rows, swapped experts, mergers or norms, and an
    epsilon, activation, window or RoPE other than the folder's."""
    cuts, sizes = LAYOUTS[layout]
    if layout == "pp2-tp2-sp" and name.endswith("moe"):
        sizes = sizes | {"expert": 2}
    run = import_run(name, tmp_path)
    model = open_released(tmp_path / "released").model
    plan = toy_plan(model, stages_of(model, *cuts), **sizes)
    ranks = run_ranks(plan.parallel, observe, plan, run, batches_of(name))
    assert_computes(plan, ranks, reference(name), KINDS[name][1], GATED.get(name, ()))


def logits_of_folder(links, folder: Path, model: ModelConfig):
    after = load_in_transformers(folder)
    return logits_of_packs(after, model), dict(after.named_parameters())


def logits_of_packs(hf_model: torch.nn.Module, model: ModelConfig) -> list[torch.Tensor]:
    with torch.no_grad():
        return [
            torch.cat([logits_of(hf_model, sample) for sample in pack])
            for pack in parity_packs(model)
        ]


@pytest.mark.parametrize(
    ("name", "layout", "cuts", "tensor"),
    [
        ("qwen3-vl-tied", TensorLayout.QWEN3_VL, (3,), 2),
        ("qwen3-vl-moe", TensorLayout.QWEN3_VL_MOE_STACKED, (), 1),
        ("qwen2.5-vl", TensorLayout.QWEN2_5_VL, (9,), 2),
        ("qwen3.5-tied", TensorLayout.QWEN3_5, (9,), 2),
        ("qwen3.5-moe", TensorLayout.QWEN3_5_MOE, (8,), 1),
    ],
)
def test_trained_model_is_the_same_in_transformers(tmp_path, name, layout, cuts, tensor):
    """Prevents exports of untrained weights, optimizer state or one stage only, and a config.json
    of another model."""
    run, trained = import_run(name, tmp_path), tmp_path / "trained"
    model = open_released(tmp_path / "released").model
    plan = toy_plan(model, stages_of(model, *cuts), tensor=tensor)
    ranks = run_ranks(plan.parallel, train_and_save, plan, run, trained, batches_of(name))
    export_run(trained, layout, tmp_path / "out")
    # Image token ids come from a tokenizer, absent here.
    config = json.loads((tmp_path / "released" / "config.json").read_text())
    ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    edit_config(**ids)(tmp_path / "out")
    [(expected, weights)] = run_ranks(
        Parallel(pipeline=1), logits_of_folder, tmp_path / "out", MODELS[name]
    )
    before = dict(hf_model(name).named_parameters())
    for key, value in weights.items():
        assert not torch.equal(value, before[key]), key
    for place, logits in enumerate(expected):
        ours = torch.cat([rank[place] for rank in ranks[-tensor:]], -1)
        assert_near(ours[:, : model.language.vocab_size], logits, "logits")


def adapter_logits(links, folder: Path, name: str):
    model = hf_model(name)
    add_adapter_products(model, folder)
    return logits_of_packs(model, MODELS[name])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3-vl", TensorLayout.QWEN3_VL),
        ("qwen3-vl-moe", TensorLayout.QWEN3_VL_MOE_STACKED),
        ("qwen2.5-vl", TensorLayout.QWEN2_5_VL),
        ("qwen2-vl", TensorLayout.QWEN2_VL),
        ("qwen3.5", TensorLayout.QWEN3_5),
    ],
)
def test_an_exported_adapter_computes_what_training_does(tmp_path, name, layout):
    """Prevents adapters under file names that PEFT cannot match to modules, reordered q, k, v rows,
    and a merged model with other outputs."""
    run, trained = import_run(name, tmp_path), tmp_path / "trained"
    like = open_released(tmp_path / "released")
    adapters = AdapterConfig(rank=4, alpha=64, parts=("vision", "projector", "language"))
    plan = toy_plan(like.model, stages_of(like.model)).model_copy(update={"adapters": adapters})
    [ours] = run_ranks(plan.parallel, train_and_save, plan, run, trained, batches_of(name))
    stored = open_newest(trained)
    assert export_adapter(stored, layout, tmp_path / "adapter", None) > 20
    write_export(plan_export_like(stored, like, None), tmp_path / "merged", print)
    one, model = Parallel(pipeline=1), MODELS[name]
    [expected] = run_ranks(one, adapter_logits, tmp_path / "adapter", name)
    [(merged, _)] = run_ranks(one, logits_of_folder, tmp_path / "merged", model)
    words = model.language.vocab_size
    for own, *others, before in zip(ours, expected, merged, reference(name).logits_LW, strict=True):
        for logits in others:
            assert_near(own[:, :words], logits, "logits")
        assert (before - others[0]).abs().max() > 1e-2, "adapters have moved"
