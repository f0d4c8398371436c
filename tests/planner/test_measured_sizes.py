"""Sizes that `omnibal profile` measures, against the linear layers of models."""

import numpy as np
import pytest

from omnibal.cost.analytic import layer_products
from omnibal.cost.measured_sizes import measured_sizes
from omnibal.model.config import load_cluster, load_model, preset_names
from omnibal.model.encoders import ImagesEncoder
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel

pytestmark = pytest.mark.quick

CLUSTER = load_cluster("h100-80g")


@pytest.mark.parametrize("name", preset_names("models"))
def test_few_sizes_span_what_models_compute(name):
    """Prevents extrapolated rates for a model's layer sizes, or minutes of measuring."""
    model = load_model(name)
    towers = model.encoders.values()
    items = {one.feature: 2304 if isinstance(one, ImagesEncoder) else 9 for one in towers}
    sizes = measured_sizes(model, CLUSTER, Caps.of(**items, tokens=4096), "bf16")
    assert 8 <= len(sizes.rows) * len(sizes.inner) * len(sizes.outer) <= 216
    assert sizes.outer[0] > 8  # a gate's one output is no width of a matrix product
    for axis in (sizes.rows, sizes.inner, sizes.outer):
        assert (np.diff(np.log(axis)) <= np.log(4.6)).all()
    for tensor in (1, 2):
        for one in layer_products(model, Parallel(tensor=tensor, pipeline=1)):
            if one.dtype == "fp32" or one.outer == 1:  # routers and gates
                continue
            for size, axis in ((one.inner, sizes.inner), (one.outer, sizes.outer)):
                assert 0.9 * axis[0] <= size <= 1.1 * axis[-1]
    # The largest product, with its weights and output, fits on an otherwise empty device.
    m, k, n = sizes.rows[-1], sizes.inner[-1], sizes.outer[-1]
    assert 2 * (m * k + k * n + m * n) < 16 * 2**30
    tokens_bytes = 4096 * model.language.hidden_size * 2
    assert sizes.collective_bytes[-1] == pytest.approx(tokens_bytes, rel=0.01)
    assert all(size % (4 * ranks) == 0 for size in sizes.collective_bytes for ranks in range(2, 9))


def test_sizes_are_multiples_that_kernels_are_made_for():
    """Prevents measuring odd sizes, slow in matrix kernels and absent from models."""
    model = load_model("internvl-chat-1.5-6b-20b")
    sizes = measured_sizes(model, CLUSTER, Caps.of(tiles=9, tokens=4096), "bf16")
    assert all(size % 8 == 0 for axis in (sizes.rows, sizes.inner, sizes.outer) for size in axis)
    # 512 is a slice of 32 padded vision heads; 32,768 both halves of InternLM2's feed-forward.
    assert (sizes.inner[0], sizes.outer[-1]) == (512, 32768)
