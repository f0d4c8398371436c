"""Analytic costs against published sizes, formulas and communication volumes."""

from itertools import product

import numpy as np
import pytest
from cost_cases import analytic_cost, workload_of_a_step

from omnibal.cost.analytic import model_flops
from omnibal.cost.model import CostModel
from omnibal.model.config import ClusterConfig, load_cluster, load_model
from omnibal.model.parallel import Parallel
from omnibal.model.rate_tables import AttentionTime, CopyTime, Rates
from omnibal.pipeline.stage_cost import held_units, per_step_costs, trained_parameters
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.pipeline.unit_runs import stages_from_cuts

pytestmark = pytest.mark.quick

MODEL = load_model("internvl-chat-1.5-6b-20b")
CLUSTER = load_cluster("a100-80g").model_copy(update={"rates": {}})
PACK = np.array([1.0, 9, 4096, 4096**2, 4096])


def cost_of(
    cluster: ClusterConfig = CLUSTER,
    precision: str = "bf16",
    frozen: tuple[str, ...] = (),
    **sizes: int,
) -> CostModel:
    return analytic_cost(MODEL, cluster, Parallel(**{"pipeline": 4} | sizes), precision, frozen)


def isolate_rates(**rates: float) -> ClusterConfig:
    """Return the cluster with the given rates. Other work takes no time."""
    links = ("memory_gb_per_s", "intra_node_gb_per_s", "inter_node_gb_per_s")
    free = dict.fromkeys(links, 1e15) | {
        "kernel_us": 1e-15,
        "link_latency_us": 1e-15,
        "host_us": 0.0,
    }
    free["peak_tflops"] = {"bf16": 1e15, "fp32": 1e15}
    return CLUSTER.model_copy(update=free | rates)


def test_frozen_parts_cost_what_is_left_of_them():
    """Prevents weight gradients charged to frozen parts, and frozen parts after trained ones
    charged no backward."""
    whole = cost_of().units
    projector_only = cost_of(frozen=("vision", "language")).units
    for unit in ("vision_embed", "vision_layer"):
        cost = projector_only[unit]
        assert not cost.backward_ms.any() and not cost.activation_bytes.any()
        assert not cost.boundary_bytes.any() and not cost.output_gradient_bytes.any()
        assert cost.trained_parameters == 0 < cost.parameters
        assert np.array_equal(cost.forward_ms, whole[unit].forward_ms)
    # The projector is the first trained part. Its norm needs its product's input gradient.
    projector = projector_only["projector"]
    assert projector.trained_parameters == projector.parameters
    np.testing.assert_allclose(projector.backward_ms, whole["projector"].backward_ms)
    # The image embedding begins with its weights: the pixels need no gradient.
    products = isolate_rates(peak_tflops={"bf16": 100.0})
    embed = cost_of(cluster=products).units["vision_embed"]
    np.testing.assert_allclose(embed.backward_ms, embed.forward_ms, rtol=1e-6, atol=1e-9)
    # Frozen layers after the projector compute input gradients only: one product instead of two.
    layer = cost_of(frozen=("vision", "language"), cluster=products).units["language_layer"]
    linear = PACK @ layer.forward_ms - 2 * 4096**2 * 6144 / (100e9 * CLUSTER.matmul_efficiency)
    attention = PACK @ layer.forward_ms - linear
    assert PACK @ layer.backward_ms == pytest.approx(linear + 2.5 * attention)
    assert layer.trained_parameters == 0
    kept = PACK @ layer.activation_bytes
    assert PACK @ layer.boundary_bytes < kept < PACK @ whole["language_layer"].activation_bytes


@pytest.mark.parametrize(("precision", "expected"), [("fp32", (4, 4, 8)), ("bf16", (2, 4, 12))])
def test_state_bytes_and_their_sharding(precision: str, expected: tuple[int, int, int]):
    """Prevents sharding weights or gradients along with the optimizer state."""
    cost = cost_of(data=4, precision=precision)
    held = cost.rates.weight_bytes, cost.rates.gradient_bytes, 4 * cost.rates.optimizer_bytes
    assert held == expected


TIED = MODEL.with_tower("language", tied_head=True)


def test_tied_head_is_held_once_by_a_stage_and_once_each_by_two():
    """Prevents counting a tied matrix twice on one stage, or once for two stages."""
    parallel = Parallel(tensor=2, pipeline=2, data=4)
    plain, one = (analytic_cost(model, CLUSTER, parallel, "bf16") for model in (MODEL, TIED))
    matrix = 46_336 * 6144  # 92,553 words padded to a multiple of 128 on each of two ranks
    workload = workload_of_a_step(np.stack([PACK] * 4))
    for cuts, saved in (((47,), [0, matrix]), ((60,), [0, 0])):
        stages = stages_from_cuts(MODEL, cuts)
        kept = np.subtract(
            *(trained_parameters(each, held_units(each, stages)) for each in (plain, one))
        )
        np.testing.assert_array_equal(kept, saved)
        memories = (stage_memories(cost, [stages], workload) for cost in (plain, one))
        for before, after, count in zip(*memories, saved, strict=True):
            for part, size in (("weights", 2), ("gradients", 4), ("optimizer", 3)):
                more, less = (getattr(each, f"{part}_gib") for each in (before, after))
                assert (more - less) * GIB == pytest.approx(size * count), part
            assert before.activations_gib == after.activations_gib
    for unit in one.units:
        assert np.array_equal(one.units[unit].forward_ms, plain.units[unit].forward_ms)
        assert np.array_equal(one.units[unit].backward_ms, plain.units[unit].backward_ms)
    assert np.array_equal(model_flops(TIED, ()), model_flops(MODEL, ()))


def test_tied_gradient_crosses_between_two_stages_only():
    """Prevents a tied gradient without all-reduce, or one if on a single stage or frozen."""
    bare = isolate_rates(intra_node_gb_per_s=100.0, inter_node_gb_per_s=100.0, link_efficiency=0.5)
    parallel = Parallel(pipeline=3)
    together, apart = stages_from_cuts(MODEL, (20, 40)), stages_from_cuts(MODEL, (20, 60))

    # An all-reduce of two ranks sends the fp32 gradient once: half of it each way, twice.
    sent_ms = 92_672 * 6144 * 4 / (100e6 * 0.5)
    for stages, model, frozen, expected in (
        (apart, TIED, (), [0, sent_ms, sent_ms]),
        (together, TIED, (), [0, 0, 0]),
        (apart, MODEL, (), [0, 0, 0]),
        (apart, TIED, ("language",), [0, 0, 0]),
    ):
        once = per_step_costs(analytic_cost(model, bare, parallel, "bf16", frozen), stages)
        exchanged_ms = once.exposed_ms(np.zeros(3)) + once.first_wait_ms(np.zeros(3))
        np.testing.assert_allclose(exchanged_ms, expected, rtol=1e-6, atol=1e-9)


def test_links_leave_the_node_only_when_the_job_does():
    """Prevents NVLink bandwidth for a job on several nodes, and reductions at data size 1."""
    assert cost_of(tensor=2, pipeline=4).link_ms_per_byte == pytest.approx(1 / 150e6)
    assert cost_of(tensor=4, pipeline=4).link_ms_per_byte == pytest.approx(1 / 12.5e6)
    assert cost_of(data=1).rates.gradient_reduction_ms == 0
    # A ring through the network uses the adapters of all its ranks in a node.
    for sizes, rate in (((2, 4), 150e6), ((4, 4), 2 * 12.5e6), ((8, 4), 12.5e6), ((1, 4), 150e6)):
        cost = cost_of(tensor=sizes[0], data=sizes[1])
        assert cost.rates.gradient_reduction_ms == pytest.approx(3 / 4 * 4 / rate)
        assert cost.rates.weight_gather_ms == pytest.approx(3 / 4 * 2 / rate)


def test_model_operations_are_six_per_parameter_and_token():
    """Prevents a utilization that counts recomputation, padding or a tower twice, or exceeds 1 with
    frozen parts. Reference: 6 N D (Kaplan et al. 2020) per tower."""
    flops = model_flops(MODEL, ())
    _, tiles, tokens, squared, loss_tokens = flops
    language_layers = 48 * (2 * 6144**2 + 2 * 6144 * 1024 + 3 * 6144 * 16384)
    assert tokens == pytest.approx(6 * language_layers, rel=1e-9)
    assert loss_tokens == pytest.approx(6 * 92_553 * 6144, rel=1e-9)
    assert squared == pytest.approx(48 * 3 * 2 * 6144, rel=1e-9)
    vision_layers = 45 * (4 * 3200**2 + 2 * 3200 * 12800) * 1025
    attention = 45 * 3 * 4 * 1025**2 * 3200
    patches = 1024 * 588 * 3200
    projector = 256 * (12800 * 6144 + 6144**2)
    expected = 6 * (vision_layers + projector) + 4 * patches + attention
    assert tiles == pytest.approx(expected, rel=1e-9)
    assert flops[0] == 0
    # All parts before the projector are frozen. Its norm is trained, so both gradients remain.
    frozen = model_flops(MODEL, ("vision",))
    expected = 2 * vision_layers + 6 * projector + 2 * patches + attention / 3
    assert frozen[1] == pytest.approx(expected, rel=1e-9)
    np.testing.assert_array_equal(frozen[2:], flops[2:])


def test_copies_timed_with_their_latency_are_long_ones():
    """Prevents element-wise kernels at a copy rate that includes latency, which is added again, and
    guessed streaming rates despite measurements."""
    guessed = isolate_rates(memory_gb_per_s=1000.0, memory_efficiency=0.5, kernel_us=3.0)
    together = CopyTime(bytes=2**20, ms=0.004)
    apart = CopyTime(latency_us=9.0, gb_per_s=800.0)
    tables = [{}, *({"bf16": Rates(device="test", copies=(one,))} for one in (together, apart))]
    costs = [
        cost_of(cluster=guessed.model_copy(update={"rates": rates, "basis": "measured"}))
        for rates in tables
    ]
    forward_ms = [cost.units["language_layer"].forward_ms for cost in costs]
    bytes_, kernels = PACK[1:] @ forward_ms[0][1:] * 1000e6 * 0.5, forward_ms[0][0] / 0.003
    assert PACK @ forward_ms[1] == pytest.approx(bytes_ / (1000e6 * 0.5) + kernels * 0.003)
    assert PACK @ forward_ms[2] == pytest.approx(bytes_ / 800e6 + kernels * 0.009)
    # Per step: zero the gradients; read and write gradients, weights and optimizer state.
    streamed = 4 + 2 * (2 + 4 + 12)
    rates = [cost.rates.optimizer_ms for cost in costs]
    assert rates == pytest.approx([streamed / 1000e6, streamed / (2**20 / 0.004), streamed / 800e6])


def test_measured_attention_stands_in_for_counted():
    """Prevents attention FLOPs charged on top of its measured time, and non-causal or forward
    kernels' times used for causal or backward ones."""
    counted = CLUSTER.model_copy(update={"basis": "measured"})
    ms_per_flop = {
        (of, causal): scale * 1e-11
        for scale, (of, causal) in enumerate(product(("forward", "backward"), (True, False)), 1)
    }

    def measured_ms(of: str, causal: bool, samples: int, tokens: int, width: int) -> float:
        """Return a latency plus time for full tiles of 128 keys; half a tile per query is empty."""
        pairs = samples * tokens * ((tokens / 2 if causal else tokens) + 64)
        passes = 1 if of == "forward" else 2.5
        return 0.05 + ms_per_flop[of, causal] * passes * pairs * 2 * 2 * width

    sizes = {"heads": 48, "kv_heads": 8, "head_size": 128, "value_size": 128}
    attention = tuple(
        AttentionTime(
            tokens=t, of=of, causal=causal, ms=measured_ms(of, causal, 1, t, 48 * 128), **sizes
        )
        for of, causal in ms_per_flop
        for t in (512, 1024, 4096)
    )
    rates = {"bf16": Rates(device="test", attention=attention)}
    before = cost_of(cluster=counted)
    after = cost_of(cluster=counted.model_copy(update={"rates": rates}))
    peak = counted.tflops("bf16") * 1e9 * counted.matmul_efficiency
    for unit, causal, samples, tokens, width in (
        ("language_layer", True, 1, 4096, 6144),
        ("vision_layer", False, 9, 1025, 3200),
    ):
        counted_ms = 4 * width * samples * tokens**2 / (2 if causal else 1) / peak
        for of, passes in (("forward", 1), ("backward", 2.5)):
            changed, plain = (getattr(each.units[unit], f"{of}_ms") for each in (after, before))
            expected = measured_ms(of, causal, samples, tokens, width) - passes * counted_ms
            assert PACK @ (changed - plain) == pytest.approx(expected), (unit, of)
