"""Adapters saved, exported, imported and merged, compared with Transformers' model."""

import json
import shutil

import pytest
from adapter_cases import EVERYWHERE, compute_run, max_difference, plan_of, train_adapters
from checkpoint_cases import refusals
from conversion_cases import add_adapter_products, compute_samples, micro_batches, model_of
from ranks import run_ranks
from released import KINDS, transformers_model
from safetensors.torch import load_file

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.conversion.adapter_files import CONFIG_FILE, add_adapter
from megatron.vlm.conversion.exporting import plan_export_like, write_export
from megatron.vlm.conversion.importing import import_checkpoint, open_released
from omnibal.base.errors import UserError
from omnibal.model.adapter_settings import adapters_of
from omnibal.model.parallel import Parallel

NAME = "300m-qwen2"
SOME = adapters_of(rank=3, alpha=9, targets="q_proj,k_proj,down_proj", rank_stabilized=True)
EXACT = 1e-5
"""Tolerance of logits, relative to the largest."""


@pytest.fixture(scope="module")
def exported_adapter(tmp_path_factory):
    """Return a released checkpoint and an adapter of it in PEFT's format."""
    run = train_adapters(NAME, SOME, tmp_path_factory.mktemp("run"))
    return run.released, run.adapter


def run_with_adapter(links, name, folder):
    """Return results of Transformers' model with an adapter folder."""
    model = transformers_model(KINDS[name])
    add_adapter_products(model, folder)
    return compute_samples(model, micro_batches(model_of(name)))


def run_released(links, name, folder):
    """Return results of Transformers' model loaded from a released folder."""
    model = transformers_model(KINDS[name])
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return compute_samples(model, micro_batches(model_of(name)))


@pytest.mark.parametrize("adapters", [EVERYWHERE, SOME], ids=["everywhere", "some"])
def test_an_exported_adapter_computes_what_training_does(tmp_path, adapters):
    """Prevents an exported adapter with wrong names, rows or scale, and a merged model or a
    re-imported adapter that computes other logits."""
    run = train_adapters(NAME, adapters, tmp_path)
    ours = compute_run(NAME, adapters, run.run)
    [theirs] = run_ranks(Parallel(pipeline=1), run_with_adapter, NAME, run.adapter)
    assert max_difference(ours, theirs) < EXACT and ours.loss == pytest.approx(
        theirs.loss, rel=EXACT
    )
    before = compute_run(NAME, None, run.imported)
    assert max_difference(before, theirs) > 1e-2, "adapters have moved"
    like = open_released(run.released)
    write_export(plan_export_like(open_newest(run.run), like, None), tmp_path / "merged", print)
    [merged] = run_ranks(Parallel(pipeline=1), run_released, NAME, tmp_path / "merged")
    assert max_difference(merged, theirs) < EXACT
    import_checkpoint(add_adapter(like, run.adapter), tmp_path / "again", lambda size: None)
    assert open_newest(tmp_path / "again").adapters.rank == adapters.rank
    again = compute_run(NAME, adapters, tmp_path / "again")
    assert max_difference(again, ours) < EXACT


PEFT = {
    "alora_invocation_tokens": None, "arrow_config": None, "auto_mapping": None,
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None,
    "exclude_modules": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.05,
    "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "peft_version": "0.18.0", "qalora_group_size": 16, "rank_pattern": {}, "revision": None,
    "target_parameters": None, "trainable_token_indices": None, "use_qalora": False,
}  # fmt: skip
"""Entries that PEFT writes for plain LoRA and that the export leaves out."""


@pytest.mark.parametrize(
    "entries",
    [
        *({"init_lora_weights": way} for way in ("pissa", "pissa_niter_4", "olora", "corda")),
        *({"init_lora_weights": way} for way in ("loftq", "lora_ga", "not yet known")),
        *({f"use_{way}": True} for way in ("dora", "qalora", "bdlora", "not_yet_known")),
        {"alora_invocation_tokens": [1]},
        {"layer_replication": [[0, 4]]},
        {"trainable_token_indices": [3]},
        {"rank_pattern": {"q_proj": 2}},
    ],
)
def test_adapters_that_mean_something_else_are_refused(tmp_path, exported_adapter, entries):
    """Prevents importing PEFT's other methods as plain LoRA."""
    released, adapter = exported_adapter
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((folder / CONFIG_FILE).read_text()) | PEFT
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    add_adapter(open_released(released), folder)
    (folder / CONFIG_FILE).write_text(json.dumps(config | entries))
    with pytest.raises(UserError, match=f"sets {next(iter(entries))}"):
        add_adapter(open_released(released), folder)


def test_other_adapters_than_the_plans_are_refused(tmp_path):
    """Prevents adapters silently dropped or loaded at another scale."""
    run = train_adapters(NAME, SOME, tmp_path)
    doubled = SOME.model_copy(update={"alpha": 2 * SOME.alpha})
    for adapters, words in ((doubled, "scale"), (EVERYWHERE, "linears"), (None, "the plan none")):
        plan = plan_of(NAME, adapters)
        [(told, _)] = run_ranks(plan.parallel, refusals, plan, [run.run])
        assert "of other adapters" in told and words in told
    same = SOME.model_copy(update={"targets": (r".*(q_proj|k_proj|down_proj)",)})
    plan = plan_of(NAME, same)
    [(told, _)] = run_ranks(plan.parallel, refusals, plan, [run.run])
    assert told is None
