"""The model's invariances (packing, recomputation), and its outputs compared with Transformers."""

import json
from itertools import pairwise

import pytest
import torch
from conversion_cases import as_released, compute_samples
from ranks import run_ranks
from toy import IMAGE_TOKEN, cut_plan, pack, toy_batch, toy_model, toy_sample
from transformers import AutoConfig, AutoModelForImageTextToText

from megatron.vlm.conversion.config_files import configurations
from megatron.vlm.conversion.tensor_map import TensorLayout
from megatron.vlm.model.initialize import first_values, initialize_parameters
from megatron.vlm.model.stage import build_stage
from omnibal.families.folder import CONFIG_FILE
from omnibal.model.parallel import Parallel

pytestmark = pytest.mark.quick

SAMPLES = [(2, 9), (0, 12), (1, 6), (3, 15)]
ONE = Parallel(pipeline=1)


def whole_model(model, recompute=None):
    stage = build_stage(cut_plan(model, recompute=recompute), 0)
    initialize_parameters(stage, first_values(stage, seed=5))
    return stage


def loss_and_gradients(stage, batches):
    stage.zero_grad()
    losses = []
    for batch in batches:
        stage.set_input_tensor(None)
        loss = stage(batch)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad.clone() for name, p in stage.named_parameters()}


def packed_and_unpacked(links, model):
    stage = whole_model(model)
    samples = [toy_sample(model, *counts, seed=i) for i, counts in enumerate(SAMPLES)]
    together = loss_and_gradients(stage, [pack(samples)])
    apart = loss_and_gradients(stage, [pack([sample]) for sample in samples])
    each = [loss_and_gradients(stage, [pack([a, b])])[0][0] for a, b in pairwise(samples)]
    return together, apart, each


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="300M-like: LayerNorm, qkv bias"),
        pytest.param({"normalization": "RMSNorm", "qkv_bias": False}, id="6B-like: RMSNorm"),
        pytest.param({"qk_norm": False}, id="without-qk-norm"),
    ],
)
def test_packed_equals_unpacked(changes):
    """Prevents attention, RoPE or labels that cross between packed samples."""
    [(together, apart, each)] = run_ranks(ONE, packed_and_unpacked, toy_model(**changes))
    assert together[0][0] == pytest.approx(sum(apart[0]), rel=1e-5)
    assert each == pytest.approx([sum(pair) for pair in pairwise(apart[0])], rel=1e-5)
    torch.testing.assert_close(together[1], apart[1], rtol=1e-4, atol=1e-5)


def with_and_without_recompute(links, model):
    """Return ((losses, gradients), kept bytes), each for more recomputed layers."""
    batch, found = toy_batch(model, SAMPLES, seed=0), []
    for recompute in ({}, {"vision": (1, 3)}, {"vision": (0, 1, 2, 3), "language": (0, 2)}):
        stage = whole_model(model, recompute)
        weights = {p.untyped_storage().data_ptr() for p in stage.parameters()}
        saved = {}

        def remember(tensor, saved=saved):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            stage.set_input_tensor(None)
            stage(batch)
        kept = sum(size for place, size in saved.items() if place not in weights)
        found.append((loss_and_gradients(stage, [batch]), kept))
    return found


def test_recomputed_equals_not_recomputed():
    """Prevents recomputation that changes a gradient or still keeps the activations."""
    [found] = run_ranks(ONE, with_and_without_recompute, toy_model())
    (plain, *recomputed), (none, some, most) = zip(*found, strict=True)
    assert none > some > most
    for losses, gradients in recomputed:
        assert losses == plain[0]
        torch.testing.assert_close(gradients, plain[1], rtol=0, atol=0)


def ours_and_transformers(links, model):
    """Return (loss, gradients) per token, ours and of Transformers' class with equal weights."""
    stage = whole_model(model)
    for name, parameter in stage.named_parameters():
        if parameter.dim() == 1:  # a missing bias, norm or scale would show
            torch.manual_seed(len(name))
            parameter.data += 0.3 * torch.randn_like(parameter)
    samples = [toy_sample(model, *counts, seed=i) for i, counts in enumerate(SAMPLES)]
    batch = pack(samples)
    [loss], gradients = loss_and_gradients(stage, [batch])
    layout, tokens = TensorLayout.TRANSFORMERS_PREFIXED, len(batch.labels_L)
    config = json.loads(configurations(model, layout, "float32", None)[CONFIG_FILE])
    # A model without layer scale equals a model with all scales 1.
    config["vision_config"]["layer_scale_init_value"] = 1.0
    theirs = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(**config, image_token_id=IMAGE_TOKEN)
    ).eval()
    weights = {name: one.detach() for name, one in stage.named_parameters()}
    theirs.load_state_dict(as_released(weights, model, layout), strict=False)
    expected = compute_samples(theirs, [samples])
    own = {name: one / tokens for name, one in as_released(gradients, model, layout).items()}
    return loss / tokens, own, expected.loss, expected.gradients


@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": False, "layer_scale_init": None}],
    ids=["norms-of-both-kinds", "EVA-CLIP-like"],
)
def test_model_equals_transformers(changes):
    """Prevents q and k norms tied to the normalization, and a wrong epsilon, activation or scale,
    in models unlike any released InternVL; test_conversion_parity.py has the released kinds."""
    [(loss, gradients, expected_loss, expected)] = run_ranks(
        ONE, ours_and_transformers, toy_model(**changes)
    )
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    expected = {name: expected[name] for name in gradients}
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
