"""Adapters saved, exported, imported and merged, beside hooks on Transformers' own model."""

import json
import re

import pytest
import qwen_vl_cases
import torch
from adapter_cases import (
    EVERYWHERE,
    computed_here,
    farthest,
    plan_of,
    trained,
)
from checkpoint_cases import train_range
from conversion_cases import computed_by, micro_batches, model_of
from ranks import run_ranks
from released import KINDS, imported, transformers_model
from safetensors.torch import load_file
from toy import OPTIONS, stages_of, toy_plan

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_weights
from megatron.vlm.conversion.adapter_files import add_adapter, export_adapter
from megatron.vlm.conversion.exporting import plan_export_like, write_export
from megatron.vlm.conversion.importing import import_checkpoint, open_released
from megatron.vlm.conversion.tensor_map import Layout
from megatron.vlm.step.train import build_trainer
from omnibal.base.errors import UserError
from omnibal.model.adapters import adapters_of
from omnibal.model.parallel import Parallel

NAME = "300m-qwen2"
SOME = adapters_of(rank=3, alpha=9, targets="q_proj,k_proj,down_proj", rank_stabilized=True)
EXACT = 1e-5
"""Of logits, as a share of the largest."""


def with_hooks(links, name, folder):
    """Transformers' model with an adapter folder as PEFT's formula has it, module by module."""
    model = transformers_model(KINDS[name])
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    used = set()
    for path, module in model.named_modules():
        if not re.fullmatch(config["target_modules"], path):
            continue
        a, b = (f"base_model.model.{path}.lora_{which}.weight" for which in "AB")
        used |= {a, b}

        def add(module, given, output, pair=(tensors[a], tensors[b])):
            return output + scale * (given[0] @ pair[0].t()) @ pair[1].t()

        module.register_forward_hook(add)
    assert used == tensors.keys(), "all modules that are matched, and no others, have tensors"
    return computed_by(model, micro_batches(model_of(name)))


def plainly(links, name, folder):
    """Transformers' model of a released folder."""
    model = transformers_model(KINDS[name])
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return computed_by(model, micro_batches(model_of(name)))


@pytest.mark.parametrize("adapters", [EVERYWHERE, SOME], ids=["everywhere", "some"])
def test_an_exported_adapter_computes_what_training_does(tmp_path, adapters):
    """Prevents: an adapter under other names, with other rows, or at another scale; and a merged
    model, or an import of the adapter, that is another."""
    run = trained(NAME, adapters, tmp_path)
    ours = computed_here(NAME, adapters, run.run)
    [theirs] = run_ranks(Parallel(pipeline=1), with_hooks, NAME, run.adapter)
    assert farthest(ours, theirs) < EXACT and ours.loss == pytest.approx(theirs.loss, rel=EXACT)
    before = computed_here(NAME, None, run.imported)
    assert farthest(before, theirs) > 1e-2, "adapters have moved"
    like = open_released(run.released)
    write_export(plan_export_like(open_newest(run.run), like, None), tmp_path / "merged", print)
    [merged] = run_ranks(Parallel(pipeline=1), plainly, NAME, tmp_path / "merged")
    assert farthest(merged, theirs) < EXACT
    import_checkpoint(add_adapter(like, run.adapter), tmp_path / "again", lambda size: None)
    assert open_newest(tmp_path / "again").adapters.rank == adapters.rank
    again = computed_here(NAME, adapters, tmp_path / "again")
    assert farthest(again, ours) < EXACT


def loads(links, plan, run):
    trainer = build_trainer(plan, links, OPTIONS, steps=2, seed=9)
    try:
        return load_weights(run, plan, trainer.stages)
    except UserError as error:
        return str(error)


def test_other_adapters_than_the_plans_are_refused(tmp_path):
    """Prevents: adapters that are left out in silence, or loaded at another scale."""
    run = trained(NAME, SOME, tmp_path)
    doubled = SOME.model_copy(update={"alpha": 2 * SOME.alpha})
    for adapters, words in ((doubled, "scale"), (EVERYWHERE, "beside"), (None, "the plan none")):
        plan = plan_of(NAME, adapters)
        [told] = run_ranks(plan.parallel, loads, plan, run.run)
        assert "of other adapters" in told and words in told
    same = SOME.model_copy(update={"targets": (r".*(q_proj|k_proj|down_proj)",)})
    plan = plan_of(NAME, same)
    assert run_ranks(plan.parallel, loads, plan, run.run) == [5]


def test_a_resumed_run_has_the_same_bits(tmp_path):
    """Prevents: adapters, or their moments, that a checkpoint does not have."""
    plan = plan_of(NAME, EVERYWHERE)
    [(_, whole)] = run_ranks(plan.parallel, train_range, plan, 0, 4, None, None)
    run_ranks(plan.parallel, train_range, plan, 0, 2, None, tmp_path)
    [(_, resumed)] = run_ranks(plan.parallel, train_range, plan, 2, 4, tmp_path, None)
    assert whole.keys() == resumed.keys()
    assert any(".adapters." in name for name in whole)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def with_random_adapters(links, plan, run, save):
    """Save a run's weights with adapters none of which is zero."""
    trainer = build_trainer(plan, links, OPTIONS, steps=2, seed=9)
    load_weights(run, plan, trainer.stages)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trainer.stage.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    parts = (plan, trainer.stages, trainer.optimizers, trainer.scheduler, {})
    writer = CheckpointWriter(save, *parts, keep_last=None, asynchronous=False)
    writer.save(1, {})
    writer.finish()


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl-tied", "qwen3-vl-moe"])
def test_modules_of_qwen_vl_are_transformers_own(tmp_path, name):
    """Prevents: names of modules that PEFT does not find, and rows of a module in another order
    than the model that has them in its weights."""
    theirs = qwen_vl_cases.transformers_model(name)
    theirs.save_pretrained(tmp_path / "released", save_original_format=False)
    qwen_vl_cases.write_companions(tmp_path / "released")
    run = imported(tmp_path / "released", tmp_path / "imported")
    like, model = open_released(tmp_path / "released"), open_newest(run).model
    plan = toy_plan(model, stages_of(model)).model_copy(update={"adapters": EVERYWHERE})
    run_ranks(plan.parallel, with_random_adapters, plan, run, tmp_path / "run")
    stored = open_newest(tmp_path / "run")
    layout = Layout(qwen_vl_cases.KINDS[name].layout)
    count = export_adapter(stored, layout, tmp_path / "adapter", None)
    write_export(plan_export_like(stored, like, None), tmp_path / "merged", print)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    paths = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in tensors}
    assert len(paths) == count == len(tensors) // 2
    for path in paths:
        module = theirs.get_submodule(path)
        assert isinstance(module, torch.nn.Linear), path
        a, b = (tensors[f"base_model.model.{path}.lora_{which}.weight"] for which in "AB")
        expected = module.weight + EVERYWHERE.scale * b @ a
        torch.testing.assert_close(merged[f"{path}.weight"], expected, rtol=1e-5, atol=1e-5)
