"""Exported adapters opened by PEFT, and PEFT's adapters imported: logits, loss, gradients."""

import re
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

sys.path.append(str(Path(__file__).parents[1] / "training"))
from adapter_cases import EVERYWHERE, compute_run, max_difference, plan_of, train_adapters
from conversion_cases import compute_samples, micro_batches, model_of
from ranks import run_ranks
from released import KINDS, save_released, transformers_model

from megatron.vlm.conversion.adapter_files import add_adapter
from megatron.vlm.conversion.importing import import_checkpoint, open_released
from omnibal.model.adapter_settings import adapters_of
from omnibal.model.parallel import Parallel

NAME = "300m-qwen2"
SOME = adapters_of(rank=3, alpha=9, targets="q_proj,v_proj,down_proj", rank_stabilized=True)


def compute_by_peft(links, name, folder):
    """PEFT's logits, loss and gradients with an adapter's folder."""
    model = PeftModel.from_pretrained(transformers_model(KINDS[name]), folder, is_trainable=True)
    return compute_samples(model, micro_batches(model_of(name)))


def language_gradients(gradients, model):
    """Gradients of the language model's adapters by PEFT's names, with q, k and v separate."""
    named = {}
    for name, value in gradients.items():
        match = re.fullmatch(r"language\.layers\.(\d+)\.adapters\.(\w+)\.lora_([ab])", name)
        if match:
            block = "self_attn" if match[2] in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            module = f"model.language_model.layers.{match[1]}.{block}.{match[2]}"
            named[f"base_model.model.{module}.lora_{match[3].upper()}.default.weight"] = value
    return named


@pytest.mark.parametrize("adapters", [EVERYWHERE, SOME], ids=["everywhere", "some"])
def test_peft_computes_what_training_does(tmp_path, adapters):
    """Prevents an exported adapter with other logits, loss or gradients in PEFT."""
    run = train_adapters(NAME, adapters, tmp_path)
    ours = compute_run(NAME, adapters, run.run)
    [theirs] = run_ranks(Parallel(pipeline=1), compute_by_peft, NAME, run.adapter)
    assert max_difference(ours, theirs) < 1e-5 and ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    own = language_gradients(ours.gradients, NAME)
    expected = {n: g for n, g in theirs.gradients.items() if ".language_model." in n}
    assert own.keys() == expected.keys() and own
    for name, gradient in expected.items():
        atol = 1e-4 * gradient.abs().max().item()
        torch.testing.assert_close(own[name], gradient, rtol=1e-4, atol=atol, msg=name)


def save_by_peft(links, name, folder):
    """Save a PEFT adapter with nonzero B; return PEFT's logits, loss and gradients."""
    config = LoraConfig(r=5, lora_alpha=7, target_modules=r".*language_model.*\.(k_proj|up_proj)")
    model = get_peft_model(transformers_model(KINDS[name]), config)
    generator = torch.Generator().manual_seed(0)
    for module, parameter in model.named_parameters():
        if "lora_B" in module:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    model.save_pretrained(folder)
    return compute_samples(model, micro_batches(model_of(name)))


def test_an_adapter_that_peft_has_saved_is_imported(tmp_path):
    """Prevents an imported PEFT adapter with other logits or loss than in PEFT."""
    [theirs] = run_ranks(Parallel(pipeline=1), save_by_peft, NAME, tmp_path / "adapter")
    source = save_released(transformers_model(KINDS[NAME]), tmp_path / "released", "stacked")
    opened = add_adapter(open_released(source), tmp_path / "adapter")
    import_checkpoint(opened, tmp_path / "run", lambda size: None)
    ours = compute_run(NAME, opened.adapters, tmp_path / "run")
    assert max_difference(ours, theirs) < 1e-5
    assert plan_of(NAME, opened.adapters).adapters == opened.adapters
