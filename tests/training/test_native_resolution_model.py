"""Qwen3-VL, dense and sparse, Qwen2.5-VL and Qwen2-VL against transformers' own models."""

import pytest
import torch
import torch.nn.functional as F
from native_resolution_cases import (
    ImageSample,
    pack_of,
    pixel_arguments,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    qwen3_vl_moe,
    renamed,
    sample_of,
    transformers_model,
)
from ranks import run_ranks
from toy import stages_of, toy_plan
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import get_vision_window_index
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    get_vision_interpolation_indices_and_weights,
)

from megatron.vlm.model.image_places import ImagePlaces, windows_of
from megatron.vlm.model.initialize import initialize_parameters
from megatron.vlm.model.stage import VLMStage, build_stage
from omnibal.data.native_resolution import Grid
from omnibal.model.config import ModelConfig
from omnibal.model.parallel import Parallel

ONE = Parallel(pipeline=1)
SAMPLES = [
    # Two images, one of which is no whole number of windows; a video; an image alone.
    ((Grid(1, 6, 4), Grid(1, 2, 8)), 9),
    ((), 7),
    ((Grid(3, 4, 6),), 8),
    ((Grid(1, 10, 14),), 6),
]
MODELS = {
    "Qwen3-VL": qwen3_vl(),
    "Qwen3-VL with experts": qwen3_vl_moe(),
    "Qwen3-VL with a tied head": qwen3_vl(tied_head=True),
    "Qwen2.5-VL": qwen2_5_vl(),
    "Qwen2-VL": qwen2_vl(),
}


def whole_model(model: ModelConfig, **recompute: tuple[int, ...]) -> VLMStage:
    """All of a model, of which no bias, norm or scale is what would not show."""
    stage = build_stage(toy_plan(model, stages_of(model, **recompute)), 0)
    initialize_parameters(stage, seed=5)
    for name, parameter in stage.named_parameters():
        if parameter.dim() == 1:
            torch.manual_seed(len(name))
            parameter.data += 0.3 * torch.randn_like(parameter)
    return stage


def samples_of(model: ModelConfig) -> list[ImageSample]:
    return [sample_of(model, *each, seed=number) for number, each in enumerate(SAMPLES)]


def unpadded(model: ModelConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors without the padded words of the vocabulary."""
    of_words = ("embedding.word_embeddings.weight", "head.weight")
    words = model.language.vocab_size
    return {name: one[:words] if name in of_words else one for name, one in tensors.items()}


def ours(links, model: ModelConfig):
    """Features and deepstack features, loss, weights and gradients."""
    stage = whole_model(model)
    batch = pack_of(samples_of(model))
    features = {name: one.detach() for name, one in stage.encode(batch).items()}
    loss = stage(batch)
    loss.backward()
    weights = {name: one.detach() for name, one in stage.named_parameters()}
    gradients = {name: one.grad for name, one in stage.named_parameters()}
    return features, loss.item(), unpadded(model, weights), unpadded(model, gradients)


def reference(links, model: ModelConfig, tensors: dict[str, torch.Tensor]):
    """The same of transformers' model with these weights, sample by sample."""
    theirs = transformers_model(model)
    theirs.load_state_dict(tensors, strict=not model.language.tied_head)
    losses, features = [], []
    for sample in samples_of(model):
        ids_1S = torch.tensor([sample.ids])
        given = pixel_arguments(sample)
        logits_SW = theirs(input_ids=ids_1S, **given).logits[0]
        asked = torch.tensor(sample.loss_mask).nonzero().squeeze(1) - 1
        losses.append(F.cross_entropy(logits_SW[asked], ids_1S[0, asked + 1], reduction="sum"))
        if sample.grids:
            seen = theirs.model.visual(sample.patches_YX, grid_thw=torch.tensor(sample.grids))
            features.append([seen.pooler_output, *(vars(seen).get("deepstack_features") or ())])
    loss = torch.stack(losses).sum()
    loss.backward()
    gradients = {name: one.grad for name, one in theirs.named_parameters()}
    joined = [torch.cat(each).detach() for each in zip(*features, strict=True)]
    return joined, loss.item(), gradients


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name):
    """Prevents: positions, windows, rotations, activations, deepstack features or multimodal RoPE
    other than the released models', in a forward or in any gradient."""
    model = MODELS[name]
    [(features, loss, weights, gradients)] = run_ranks(ONE, ours, model)
    theirs = run_ranks(ONE, reference, model, renamed(model, weights))
    [(expected_features, expected, expected_gradients)] = theirs
    assert loss == pytest.approx(expected, rel=1e-5)
    assert len(features) == 1 + len(model.images.deepstack_layers)
    for found, value in zip(features.values(), expected_features, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
    found_gradients = renamed(model, gradients)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, value in expected_gradients.items():
        atol = 1e-4 * value.abs().max().item()
        torch.testing.assert_close(found_gradients[name], value, rtol=1e-4, atol=atol, msg=name)


def with_and_without_recompute(links, model: ModelConfig):
    batch, found = pack_of(samples_of(model)), []
    every = {"vision": tuple(range(model.images.layers)), "language": (0, 1, 2)}
    for recompute in ({}, {"vision": (1, 2), "language": (0,)}, every):
        stage = whole_model(model, **recompute)
        loss = stage(batch)
        loss.backward()
        found.append((loss.item(), {name: one.grad for name, one in stage.named_parameters()}))
    return found


@pytest.mark.parametrize("model", [qwen3_vl(), qwen2_5_vl()], ids=["Qwen3-VL", "Qwen2.5-VL"])
def test_recomputed_equals_not_recomputed(model):
    """Prevents: a layer that is recomputed without its deepstack projector, or on memory that a
    projector has kept and the recomputation has let go of."""
    [(plain, *recomputed)] = run_ranks(ONE, with_and_without_recompute, model)
    for loss, gradients in recomputed:
        assert loss == plain[0]
        for name, gradient in plain[1].items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=0, msg=name)


def text_only(links, model: ModelConfig):
    stage = whole_model(model)
    batch = pack_of([sample_of(model, (), tokens, seed=1) for tokens in (5, 8)])
    stage(batch).backward()
    return {name: one.grad for name, one in stage.named_parameters()}


@pytest.mark.parametrize("model", [qwen3_vl(), qwen2_5_vl()], ids=["Qwen3-VL", "Qwen2.5-VL"])
def test_packs_without_images_give_every_parameter_a_gradient(model):
    """Prevents: a step that waits for gradients of an encoder that a pack has no image for."""
    [gradients] = run_ranks(ONE, text_only, model)
    for name, gradient in gradients.items():
        assert gradient is not None, name
        is_of_text = name.startswith(("embedding.", "language.", "head."))
        assert bool(gradient.any()) == is_of_text, name


@pytest.mark.in_own_process
def test_places_are_transformers_places():
    """Prevents: learned positions or windows that only agree with the released ones in a square
    image, or where all windows are whole."""
    grids = [Grid(1, 6, 4), Grid(2, 10, 14), Grid(1, 2, 2), Grid(1, 8, 16)]
    grid_thw = torch.tensor(grids)
    tower = qwen3_vl().images
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid_thw, 5, align_corners=True, spatial_merge_size=2
    )
    places = ImagePlaces(grids, tower, torch.device("cpu"))
    found_indices, found_weights = places.neighbours()
    torch.testing.assert_close(found_indices, indices)
    torch.testing.assert_close(found_weights, weights)
    order, cells = windows_of(grids, 2, 2)
    expected, borders = get_vision_window_index(grid_thw, 2, 16, 4)
    assert order.tolist() == expected.tolist()
    assert [4 * each for each in cells] == borders.diff().tolist()
