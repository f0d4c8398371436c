"""Counted costs against published sizes, formulas and communication volumes."""

import numpy as np
import pytest

from omnibal.config import load_cluster, load_model
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel, Unit
from omnibal.pipeline.units import stage_units, stages_from_cuts, unit_sequence
from omnibal.plan import Parallel, Stage

MODEL = load_model("internvl-chat-1.5-6b-20b")
CLUSTER = load_cluster("a100-80g")
PACK = np.array([1.0, 9, 4096, 4096**2])


def cost_of(
    tensor: int = 1, data: int = 1, pipeline: int = 4, precision: str = "bf16"
) -> CostModel:
    parallel = Parallel(tensor=tensor, pipeline=pipeline, data=data)
    return analytic_cost(MODEL, CLUSTER, parallel, precision)


def test_parameters_are_those_of_the_published_model():
    """Prevents forgotten or doubled weights, which would falsify all memory figures."""
    units = cost_of().units
    vision = units[Unit.VISION_EMBED].parameters + 45 * units[Unit.VISION_LAYER].parameters
    language = sum(
        units[unit].parameters * (48 if unit == Unit.LANGUAGE_LAYER else 1)
        for unit in (Unit.LANGUAGE_EMBED, Unit.LANGUAGE_LAYER, Unit.HEAD)
    )
    assert vision == pytest.approx(5.54e9, abs=5e6)
    assert language == pytest.approx(19.86e9, abs=5e6)
    assert units[Unit.VISION_LAYER].parameters == pytest.approx(122.9e6, abs=5e4)
    assert units[Unit.LANGUAGE_LAYER].parameters == pytest.approx(390e6, abs=2e5)


def test_layer_operations_follow_the_megatron_formula():
    """Prevents a lost factor: 24 s h^2 + 4 s^2 h for an ungrouped layer with f = 4 h."""
    ms_per_flop = 1 / (312e9 * 0.5)
    h, s = 3200, 1025
    expected_ms = 9 * (24 * s * h**2 + 4 * s**2 * h) * ms_per_flop
    vision = cost_of().units[Unit.VISION_LAYER]
    assert PACK @ vision.forward_ms == pytest.approx(expected_ms)
    assert PACK @ vision.backward_ms == pytest.approx(2 * expected_ms)
    # Language: six operations in all per token and weight, and causal attention's half square.
    h, weights = 6144, 2 * 6144**2 + 2 * 6144 * 1024 + 3 * 6144 * 16384
    expected_ms = (2 * 4096 * weights + 2 * 4096**2 * h) * ms_per_flop
    assert PACK @ cost_of().units[Unit.LANGUAGE_LAYER].forward_ms == pytest.approx(expected_ms)


def test_activations_follow_korthikanti_without_dropout():
    """Prevents counting a tensor twice or not at all: 32 s h bytes, plus this model's extras."""
    h, rows = 3200, 9 * 1025
    extras = (2 + 2) * 2 * h + 4 * 25  # layer scale, q/k norms, log-sum-exp of 25 heads
    kept_bytes = PACK @ cost_of().units[Unit.VISION_LAYER].activation_bytes
    assert kept_bytes == pytest.approx(rows * (32 * h + extras))


@pytest.mark.parametrize(
    ("cuts", "mib"),
    [
        pytest.param((48, 65, 81), 144.0, id="parameter: three language cuts"),
        pytest.param((24, 49, 73), 144.0 + 8.3, id="layer: one vision cut"),
        pytest.param((20, 40, 70), 144.0 + 16.6, id="profile: two vision cuts"),
        pytest.param((23, 47, 72), 144.0 - 12.7, id="BMP: vision, projector, language"),
    ],
)
def test_cut_volumes_are_those_of_omnibal_table_4(cuts: tuple[int, ...], mib: float):
    """Prevents charging a cut for the wrong tensor."""
    cost = cost_of()
    crossing = [stage_units(stage)[-1] for stage in stages_from_cuts(MODEL, cuts)[:-1]]
    volume = sum(PACK @ cost.units[unit].output_bytes for unit in crossing)
    assert volume / 2**20 == pytest.approx(mib, abs=0.1)


@pytest.mark.parametrize(("precision", "expected"), [("fp32", (4, 4, 8)), ("bf16", (2, 4, 12))])
def test_state_bytes_and_their_sharding(precision: str, expected: tuple[int, int, int]):
    """Prevents sharding weights or gradients along with the optimizer's state."""
    cost = cost_of(data=4, precision=precision)
    assert cost.weight_bytes_per_parameter == expected[0]
    assert cost.gradient_bytes_per_parameter == expected[1]
    assert cost.optimizer_bytes_per_parameter == expected[2] / 4


def test_tensor_parallelism_divides_layers():
    """Prevents ignoring tensor parallelism, or dividing what every rank holds whole."""
    whole, half = cost_of(tensor=1).units, cost_of(tensor=2).units
    for unit in (Unit.VISION_LAYER, Unit.LANGUAGE_LAYER, Unit.PROJECTOR):
        ratio = half[unit].parameters / whole[unit].parameters
        assert 0.5 <= ratio < 0.501
        assert half[unit].activation_bytes.sum() > whole[unit].activation_bytes.sum() / 2
        assert np.array_equal(half[unit].boundary_bytes, whole[unit].boundary_bytes)
    for unit in (Unit.VISION_LAYER, Unit.LANGUAGE_LAYER):
        np.testing.assert_allclose(half[unit].forward_ms, whole[unit].forward_ms / 2)


def test_links_leave_the_node_only_when_the_job_does():
    """Prevents pricing NVLink for a job that spans nodes, and reductions where there are none."""
    assert cost_of(tensor=2, pipeline=4).link_ms_per_byte == pytest.approx(1 / 300e6)
    assert cost_of(tensor=4, pipeline=4).link_ms_per_byte == pytest.approx(1 / 25e6)
    assert cost_of(data=1).gradient_reduction_ms_per_parameter == 0
    within = cost_of(tensor=2, data=4).gradient_reduction_ms_per_parameter
    across = cost_of(tensor=4, data=4).gradient_reduction_ms_per_parameter
    assert within == pytest.approx(3 / 4 * 6 / 300e6)
    assert across == pytest.approx(3 / 4 * 6 / 25e6)


def test_every_unit_of_every_preset_costs_something():
    """Prevents a unit that the search could move for free."""
    for precision in ("fp32", "bf16"):
        for unit, unit_cost in cost_of(precision=precision).units.items():
            assert PACK @ unit_cost.forward_ms > 0
            assert PACK @ unit_cost.activation_bytes >= PACK @ unit_cost.boundary_bytes > 0, unit
            assert unit_cost.parameters > 0


def test_uncut_model_is_one_stage():
    """Prevents losing a unit between the unit list and the stages."""
    (stage,) = stages_from_cuts(MODEL, ())
    assert stage == Stage(
        vision_embed=True,
        vision_layers=45,
        projector=True,
        language_embed=True,
        language_layers=48,
        head=True,
    )
    assert stage_units(stage) == unit_sequence(MODEL)
