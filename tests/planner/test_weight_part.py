"""The weight gradient's part of a backward: its time and deferred memory, by hand."""

import numpy as np
import pytest
from cost_cases import analytic_cost
from plan_cases import MODEL as DIGITS
from plan_cases import example_profile, job_spec

from omnibal.cost.model import UnitCost
from omnibal.cost.profile import model_sha256
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.config import load_cluster, load_model
from omnibal.model.parallel import Parallel
from omnibal.model.units import feature_names

pytestmark = pytest.mark.quick

MODEL = load_model("internvl3-8b")
CLUSTER = load_cluster("h100-80g")
PLAIN = CLUSTER.model_copy(update={"rates": {}})
LANGUAGE, VISION, FEATURES = MODEL.language, MODEL.encoders["vision"], feature_names(MODEL)
TOKENS, TILES, LOSS = map(FEATURES.index, ("tokens", VISION.feature, "loss_tokens"))


def units(cluster=CLUSTER, *, frozen=(), adapters=None, **sizes) -> dict[str, UnitCost]:
    parallel = Parallel(pipeline=2, **sizes)
    return analytic_cost(MODEL, cluster, parallel, "bf16", frozen, adapters=adapters).units


def test_weight_gradients_of_a_layer_are_its_products_by_hand():
    """Prevents attention's time in the weight part, or missing gradient accumulation."""
    layer = units(PLAIN)["language_layer"]
    h, f, head = LANGUAGE.hidden_size, LANGUAGE.ffn_hidden_size, LANGUAGE.head_width
    made = (LANGUAGE.heads + 2 * LANGUAGE.kv_heads) * head
    weights = h * made + LANGUAGE.heads * head * h + 3 * h * f
    rate = PLAIN.tflops("bf16") * 1e9 * PLAIN.matmul_efficiency  # per ms
    assert layer.weight_ms[TOKENS] == pytest.approx(2 * weights / rate)
    # Read and written in fp32, once per micro-batch; four kernels.
    once_ms = weights * 2 * 4 / (PLAIN.memory_gb_per_s * 1e6) + 4 * PLAIN.kernel_us / 1e3
    assert layer.weight_ms[0] == pytest.approx(once_ms)
    assert not np.delete(layer.weight_ms, [0, TOKENS]).any()


def test_the_part_is_within_the_backward_and_nothing_where_frozen():
    """Prevents a negative input part, and weight parts of frozen units."""
    for sizes in ({}, {"tensor": 4}, {"tensor": 4, "sequence_parallel": True}):
        for name, unit in units(**sizes).items():
            assert (unit.weight_ms <= unit.backward_ms + 1e-12).all(), name
            assert unit.weight_ms.any() == ("embed" not in name)
    frozen, adapted = units(frozen=("vision",)), units(adapters=AdapterConfig(rank=8, alpha=16))
    assert frozen["language_layer"].weight_ms.any()
    for layer in (frozen["vision_layer"], adapted["language_layer"]):
        assert not layer.weight_ms.any() and not layer.late_bytes.any()


def test_a_profile_has_as_large_a_part_as_is_counted():
    """Prevents measured backwards without a weight part, or with a weight part only."""
    profile = example_profile().model_copy(update={"model_sha256": model_sha256(DIGITS)})
    counted, measured = (
        job_spec(cost_source=source).cost.units for source in (ANALYTIC, CostSource(profile))
    )
    for name, unit in measured.items():
        part, whole = counted[name].weight_ms.sum(), counted[name].backward_ms.sum()
        if part == 0:
            assert not unit.weight_ms.any()
            continue
        shares = unit.weight_ms[unit.backward_ms > 0] / unit.backward_ms[unit.backward_ms > 0]
        assert shares == pytest.approx(shares[0]) and 0 < shares[0] < 1
        assert whole > part


@pytest.mark.parametrize("sequence", [False, True])
def test_what_waits_is_inputs_and_gradients_of_linears(sequence: bool):
    """Prevents memory that omits or doubles a deferred product's operands, and a peak with weight
    gradients that do not exist yet."""
    t, size, of = 4, 2, units(tensor=4, sequence_parallel=sequence)
    h, f = LANGUAGE.hidden_size, LANGUAGE.ffn_hidden_size
    a, k = LANGUAGE.heads * LANGUAGE.head_width, LANGUAGE.kv_heads * LANGUAGE.head_width
    between = h / t if sequence else h
    inputs, gradients, working = of["language_layer"].late_bytes
    assert inputs[TOKENS] == pytest.approx(size * (2 * between + a / t + f / t))
    assert gradients[TOKENS] == pytest.approx(size * ((a + 2 * k + 2 * f) / t + 2 * between))
    # Plus a full input or gradient if ranks keep parts.
    assert working[TOKENS] == pytest.approx(size * (h - between))
    assert not working[0]
    v, inner, rows = VISION.hidden_size, VISION.ffn_hidden_size / t, VISION.positions_per_item
    inputs, gradients, _ = of["vision_layer"].late_bytes
    assert inputs[TILES] == pytest.approx(size * rows * (2 * v + v / t + inner))
    assert gradients[TILES] == pytest.approx(size * rows * (3 * v / t + inner + 2 * v))
    inputs, gradients, _ = of["head"].late_bytes
    assert (inputs[LOSS], gradients[LOSS]) == (size * h, size * LANGUAGE.words_of_rank(t))
    assert not of["language_embed"].late_bytes.any() and not of["vision_embed"].late_bytes.any()
    layer = of["language_layer"]
    assert layer.transient_bytes[:, 0].any() and not layer.two_part_bytes[:, 0].any()
    # SwiGLU's backward: the residual's gradient, its copy for the second product if ranks divide
    # the sequence, and gradients of SwiGLU's output and inputs. Its output stays.
    swiglu = size * (between + sequence * between + 3 * f / t)
    assert any(each == pytest.approx(swiglu) for each in layer.two_part_bytes[:, TOKENS])
    moments = of["vision_layer"].two_part_bytes[:, TILES] / (size * rows)
    # The activation's backward: gradients of its sides, of the layer's output and, because of the
    # layer scale, of the second product's output; the scaled output is freed.
    assert any(each == pytest.approx(2 * inner + v + v - v) for each in moments)
    head, words = of["head"].two_part_bytes, LANGUAGE.words_of_rank(t)
    # The logits' gradient next to the logits; in place only after its product runs.
    assert any(each == pytest.approx(size * words) for each in head[:, LOSS])
    assert not head[:, 0].any()
