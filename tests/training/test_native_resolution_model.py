"""Layers of native-resolution models; test_qwen_vl_parity.py has the full models."""

import pytest
import torch
from native_resolution_cases import pack_of, qwen2_5_vl, qwen3_vl, sample_of
from ranks import run_ranks
from toy import cut_plan
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import get_vision_window_index
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    get_vision_interpolation_indices_and_weights,
)

from megatron.vlm.model.image_places import ImagePlaces, windows_of
from megatron.vlm.model.initialize import first_values, initialize_parameters
from megatron.vlm.model.stage import build_stage
from omnibal.data.native_resolution import Grid
from omnibal.model.parallel import Parallel

ONE = Parallel(pipeline=1)
# Samples: two images (partial windows), text only, a video, an image.
SAMPLES = [
    ((Grid(1, 6, 4), Grid(1, 2, 8)), 9), ((), 7), ((Grid(3, 4, 6),), 8), ((Grid(1, 10, 14),), 6),
]  # fmt: skip
EVERY = {"vision": (0, 1, 2, 3, 4), "language": (0, 1, 2)}
MODELS = pytest.mark.parametrize(
    "model", [qwen3_vl(), qwen2_5_vl()], ids=["Qwen3-VL", "Qwen2.5-VL"]
)


def loss_and_gradients(links, model, samples, *recomputed):
    """Return loss and gradients of a pack for each set of recomputed layers."""
    batch, found = pack_of([sample_of(model, *one, seed=i) for i, one in enumerate(samples)]), []
    for recompute in recomputed:
        stage = build_stage(cut_plan(model, recompute=recompute), 0)
        initialize_parameters(stage, first_values(stage, seed=5))
        loss = stage(batch)
        loss.backward()
        found.append((loss.item(), {name: one.grad for name, one in stage.named_parameters()}))
    return found


@MODELS
def test_recomputed_equals_not_recomputed(model):
    """Prevents recomputation without the deepstack projector, or reading freed memory."""
    some = {"vision": (1, 2), "language": (0,)}
    [(plain, *again)] = run_ranks(ONE, loss_and_gradients, model, SAMPLES, {}, some, EVERY)
    for loss, gradients in again:
        assert loss == plain[0]
        torch.testing.assert_close(gradients, plain[1], rtol=0, atol=0)


@MODELS
def test_packs_without_images_give_every_parameter_a_gradient(model):
    """Prevents steps that hang on encoder gradients when a pack has no image."""
    [[(_, gradients)]] = run_ranks(ONE, loss_and_gradients, model, [((), 5), ((), 8)], {})
    for name, gradient in gradients.items():
        assert gradient is not None, name
        is_of_text = name.startswith(("embedding.", "language.", "head."))
        assert bool(gradient.any()) == is_of_text, name


@pytest.mark.in_own_process
def test_places_are_transformers_places():
    """Prevents positions or windows that are right only for square images or full windows."""
    grids = [Grid(1, 6, 4), Grid(2, 10, 14), Grid(1, 2, 2), Grid(1, 8, 16)]
    grid_thw = torch.tensor(grids)
    expected = get_vision_interpolation_indices_and_weights(
        grid_thw, 5, align_corners=True, spatial_merge_size=2
    )
    places = ImagePlaces(grids, qwen3_vl().images, torch.device("cpu"))
    torch.testing.assert_close(tuple(places.neighbours()), tuple(expected))
    order, cells = windows_of(grids, 2, 2)
    expected, borders = get_vision_window_index(grid_thw, 2, 16, 4)
    assert order.tolist() == expected.tolist()
    assert [4 * cell_count for cell_count in cells] == borders.diff().tolist()
