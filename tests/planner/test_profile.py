"""Fits of measured profiles, against known costs."""

from pathlib import Path

import numpy as np
import pytest
from cost_cases import analytic_cost
from profile_cases import CLUSTER, MODEL, PARALLEL, SHAPES, measure, measurements_of, true_cost

from omnibal.base.errors import UserError
from omnibal.cost.model import CostModel
from omnibal.cost.profile import Profile, fit_residuals, model_sha256, read_profile
from omnibal.cost.setting import CostSetting
from omnibal.cost.source import CostSource
from omnibal.model.config import ModelConfig, RopeScaling
from omnibal.model.layer_kinds import ExpertsConfig, LayerRun
from omnibal.model.parallel import Parallel
from omnibal.model.rate_tables import CollectiveTime, Rates
from omnibal.model.units import unit_names

pytestmark = pytest.mark.quick
LAYER = "language_layer_experts8"
EXPERTS = ExpertsConfig(experts=8, experts_per_token=2, ffn_hidden_size=128)


def model_with(experts: ExpertsConfig) -> ModelConfig:
    """Return the model with these experts in every language layer."""
    return MODEL.with_tower("language", runs=(LayerRun(layers=1, experts=experts),))


def make_profile(model: ModelConfig, parallel: Parallel, **changed: object) -> Profile:
    """Return a profile with the model's analytic costs as measurements."""
    counted = measurements_of(analytic_cost(model, CLUSTER, parallel, "fp32"))
    sha256 = model_sha256(model)
    return measure(optimizer=(), links=(), model_sha256=sha256, measurements=counted, **changed)


def costs(profile: Profile, parallel: Parallel = PARALLEL, model: ModelConfig = MODEL) -> CostModel:
    return CostSource(profile).costs(CostSetting(model, CLUSTER, parallel, "fp32"))


def test_exact_measurements_give_back_the_true_costs():
    """Prevents a fit that mixes up features, directions or units of measure."""
    fitted = costs(measure())
    shapes = np.array([[1, *shape] for shape in [*SHAPES, (12, 2000, 10**6, 700)]])
    for unit, known in true_cost().units.items():
        cost = fitted.units[unit]
        for name in ("forward_ms", "backward_ms", "recompute_ms"):
            assert shapes @ getattr(cost, name) == pytest.approx(shapes @ getattr(known, name))
        expected_bytes = shapes @ known.activation_bytes
        assert shapes @ cost.activation_bytes == pytest.approx(expected_bytes, rel=1e-3, abs=1)
    assert fitted.optimizer_ms_fixed == pytest.approx(0.2)
    assert fitted.rates.optimizer_ms == pytest.approx(1e-5)
    assert fitted.link_latency_ms == pytest.approx(0.03)
    assert fitted.link_ms_per_byte == pytest.approx(2e-6)
    assert fitted.source == "profile:test CPU, 2 processes, provider local"
    assert all(residual.max_error < 1e-3 for residual in fit_residuals(measure(), MODEL))


@pytest.mark.parametrize("changes", [{}, {"imbalance": 2.0}, {"auxiliary_loss": 0.01}], ids=str)
def test_experts_that_ranks_share_out_cost_what_is_counted_besides(changes):
    """Prevents expert-parallel plans without the exchange and imbalance that a profile lacks, and
    measuring again for another margin or loss."""
    alone, shared_out = Parallel(pipeline=1, data=4), Parallel(pipeline=1, data=4, expert=4)
    profile, features = make_profile(model_with(EXPERTS), alone), np.array([1, *SHAPES[-1]])
    planned = model_with(EXPERTS.model_copy(update=changes))
    for sizes in (alone, shared_out):
        found = costs(profile, sizes, planned).units[LAYER]
        known = analytic_cost(planned, CLUSTER, sizes, "fp32").units[LAYER]
        assert features @ found.forward_ms == pytest.approx(features @ known.forward_ms, rel=1e-3)
        kept, rel = features @ known.activation_bytes, 0.01 if changes else 1e-3
        assert features @ found.activation_bytes == pytest.approx(kept, rel=rel)
        if not changes:
            for name in ("backward_ms", "recompute_ms", "collective_ms"):
                expected = features @ getattr(known, name).T
                assert features @ getattr(found, name).T == pytest.approx(expected, rel=1e-3)
            assert bool(found.collective_ms.any()) == (sizes.expert > 1)
    more = model_with(EXPERTS.model_copy(update={"experts": 16}))
    with pytest.raises(UserError, match="with other sizes than"):
        costs(profile, shared_out, more)


def test_noise_stays_a_relative_error_of_its_own_size():
    """Prevents fits dominated by the largest micro-batch."""
    residuals = fit_residuals(measure(noise=0.05), MODEL)
    times = [r for r in residuals if r.quantity != "activation_bytes"]
    assert len(times) == 3 * len({*unit_names(MODEL)})
    assert all(0 < r.median_error < 0.05 and r.max_error < 0.12 for r in times)
    assert all(r.measurements == len(SHAPES) for r in times)


def test_what_was_not_measured_is_counted():
    """Prevents zero memory, recompute, optimizer or link costs if not measured, and a local link's
    rate used between nodes."""
    unknown = {"activation_bytes": None, "recompute_ms": None}
    few = tuple(each.model_copy(update=unknown) for each in measure().measurements)
    profile = measure(optimizer=(), links=(), measurements=few)
    counted, fitted = analytic_cost(MODEL, CLUSTER, PARALLEL, "fp32"), costs(profile)
    for name, unit in fitted.units.items():
        np.testing.assert_array_equal(unit.activation_bytes, counted.units[name].activation_bytes)
        np.testing.assert_array_equal(unit.recompute_ms, unit.forward_ms)
    assert fitted.rates.optimizer_ms == counted.rates.optimizer_ms
    assert fitted.link_ms_per_byte == counted.link_ms_per_byte
    quantities = {residual.quantity for residual in fit_residuals(profile, MODEL)}
    assert quantities == {"forward_ms", "backward_ms"}
    across = Parallel(pipeline=CLUSTER.gpus_per_node + 1)
    counted = analytic_cost(MODEL, CLUSTER, across, "fp32")
    assert costs(measure(), across).link_ms_per_byte == counted.link_ms_per_byte


def test_data_parallel_ranks_exchange_at_measured_rates():
    """Prevents measured collectives that are ignored, scaled twice by the rate of a send, or merged
    into one rate for gathers and reductions."""
    data = Parallel(pipeline=1, data=CLUSTER.gpus_per_node)
    gb_per_s = {"all_gather": 2.0, "reduce_scatter": 0.5, "all_to_all": 4.0}
    collectives = tuple(
        CollectiveTime(kind=kind, ranks=data.data, latency_us=20, gb_per_s=rate)
        for kind, rate in gb_per_s.items()
    )
    fitted = costs(measure(rates=Rates(device="mine", collectives=collectives)), data)
    sent_bytes = 4 * (data.data - 1) / data.data
    gather_ms, reduction_ms = (sent_bytes / (rate * 1e6) for rate in (2.0, 0.5))
    assert fitted.rates.weight_gather_ms == pytest.approx(gather_ms, rel=1e-6)
    assert fitted.rates.gradient_reduction_ms == pytest.approx(reduction_ms, rel=1e-6)
    # If no collective was measured, the rate of a send scales the counted times.
    counted = analytic_cost(MODEL, CLUSTER, data, "fp32")
    scaled = costs(measure(), data)
    # The update is sharded over the ranks.
    assert scaled.rates.optimizer_ms == pytest.approx(1e-5 / data.data)
    slower = scaled.link_ms_per_byte / counted.link_ms_per_byte
    expected = slower * counted.rates.gradient_reduction_ms
    assert scaled.rates.gradient_reduction_ms == pytest.approx(expected)


def test_experts_are_dispatched_at_the_measured_rate_of_an_all_to_all():
    """Prevents an analytic dispatch time for experts although a profile measured it."""
    model, shared_out = model_with(EXPERTS), Parallel(pipeline=1, data=2, expert=2)

    def collective_ms(gb_per_s: float) -> float:
        exchange = CollectiveTime(kind="all_to_all", ranks=2, latency_us=1, gb_per_s=gb_per_s)
        rates = Rates(device="mine", collectives=(exchange,))
        profile = make_profile(model, Parallel(pipeline=1, data=2), rates=rates)
        cost = costs(profile, shared_out, model)
        layer = next(unit for unit in cost.units.values() if unit.expert_parameters)
        return float(layer.collective_ms[0, cost.features.index("tokens")])

    assert collective_ms(0.1) == pytest.approx(10 * collective_ms(1.0), rel=1e-6)


@pytest.mark.parametrize(
    ("changed", "parallel", "message"),
    [
        ({"model_sha256": "0"}, PARALLEL, "with other sizes than internvl-digits"),
        ({"precision": "bf16"}, PARALLEL, "measured in bf16 but the plan is for fp32"),
        ({}, Parallel(tensor=2, pipeline=2), "tensor size 1 but the plan has 2"),
        ({}, Parallel(tensor=2, pipeline=2), "plan with --tp 1 or without --profile"),
        ({"measurements": measure().measurements[:-5]}, PARALLEL, "no measurement of head"),
    ],
)
def test_a_profile_of_something_else_is_refused(
    changed: dict[str, object], parallel: Parallel, message: str
):
    """Prevents plans with another job's times."""
    with pytest.raises(UserError, match=message):
        costs(measure(**changed), parallel)


@pytest.mark.parametrize(
    ("tower", "changes", "same"),
    [
        (None, {"name": "other", "chat_template": "Hermes-2", "system_message": "Be brief."}, True),
        (None, {"chat_system_message": "Be brief."}, True),
        ("vision", {"layers": 9, "norm_eps": 1e-3, "layer_scale_init": 0.5}, True),
        ("vision", {"downsample_ratio": 0.25}, False),
        ("vision", {"layer_scale_init": None}, False),
        ("vision", {"hidden_size": 128}, False),
        ("vision", {"qkv_bias": False}, False),
        ("language", {"layers": 9, "norm_eps": 1e-3, "tied_head": True}, True),
        ("language", {"max_positions": 500, "rope_base": 500, "rope_factor": 2.0}, True),
        ("language", {"rope_scaling": RopeScaling(factor=8)}, True),
        ("language", {"vocab_size": 300}, False),
    ],
    ids=str,
)
def test_the_model_hash_covers_what_units_cost(tower, changes, same):
    """Prevents refusing a profile for another depth, or using it for other sizes."""
    model = MODEL.with_tower(tower, **changes) if tower else MODEL.model_copy(update=changes)
    assert (model_sha256(model) == model_sha256(MODEL)) == same


@pytest.mark.parametrize("text", [None, "", '{"device": "x"', '{"device": "x"}'])
def test_a_broken_profile_is_refused(tmp_path: Path, text: str | None):
    """Prevents a traceback for a missing, truncated or incomplete file."""
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=r"profile\.json.*omnibal profile"):
        read_profile(path)
