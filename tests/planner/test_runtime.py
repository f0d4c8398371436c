"""Runtime options of trainers: the hidden part of exchanges, against plain walks."""

from typing import Any

import numpy as np
import pytest
from cost_cases import analytic_cost, assumed_h100

from omnibal.cost.link_rates import all_to_all_line, message_line, pass_line
from omnibal.cost.model import CostModel
from omnibal.families.named import named_model
from omnibal.model.parallel import Group, Parallel
from omnibal.model.rate_tables import CollectiveTime, Rates
from omnibal.model.runtime import OWN_RUNTIME, RuntimeOptions
from omnibal.pipeline.stage_cost import PerStepCosts
from omnibal.trainers.lint.command_line import read_launch
from omnibal.trainers.lint.line import line_of
from omnibal.trainers.lint.line_job import runtime_of

CLUSTER = assumed_h100()
MODEL = named_model("llama3.1-70b")
LAYER = "language_layer"
HIDDEN = (
    "--overlap-grad-reduce --overlap-param-gather --cross-entropy-loss-fusion "
    "--ddp-average-in-collective"
)


def cost_of(runtime: RuntimeOptions = OWN_RUNTIME, *, tensor: int = 4, data: int = 2) -> CostModel:
    parallel = Parallel(tensor=tensor, pipeline=1, data=data, sequence_parallel=tensor > 1)
    return analytic_cost(MODEL, CLUSTER, parallel, "bf16", runtime=runtime)


def alter(**options: Any) -> RuntimeOptions:
    return OWN_RUNTIME.model_copy(update=options)


def test_each_switch_of_gradients_and_weights_has_its_time_and_memory():
    """Prevents weights gathered twice or never without --overlap-param-gather, and
    --grad-reduce-in-bf16 that changes only time, only memory or neither."""
    hidden, waited = cost_of(), cost_of(alter(overlap_weights=False))
    assert waited.rates.weight_gather_ms == 0
    expected_ms = hidden.rates.optimizer_ms + hidden.rates.weight_gather_ms
    assert waited.rates.optimizer_ms == pytest.approx(expected_ms)
    assert np.isinf(cost_of(alter(overlap_gradients=False)).bucket_parameters)
    half = cost_of(alter(bf16_gradients=True)).rates
    assert half.gradient_bytes == hidden.rates.gradient_bytes / 2
    assert half.gradient_reduction_ms == pytest.approx(hidden.rates.gradient_reduction_ms / 2)
    # Averaging is a pass over all gradients, which one data-parallel rank skips.
    for data, passes in ((1, 0), (2, 2)):
        plain = cost_of(data=data).rates.optimizer_ms
        divided = cost_of(alter(averages_gradients=True), data=data).rates.optimizer_ms
        expected_ms = passes * 4 / (CLUSTER.memory_gb_per_s * 1e6)
        assert divided - plain == pytest.approx(expected_ms)


def test_a_recomputed_module_is_run_again():
    """Prevents a feed-forward recomputed for nothing, or kept although recomputed."""
    again = cost_of(alter(recomputed=("mlp",)), tensor=1).units[LAYER]
    plain, language = cost_of(tensor=1).units[LAYER], MODEL.language
    elements = np.array([0, 1, 0, 0]) * language.ffn_hidden_size
    products_ms = 6 * language.hidden_size * elements / (989e9 * 0.55)
    launches_ms = 3 * 0.004 * np.array([1, 0, 0, 0])
    expected_ms = products_ms + 3 * 2 * elements / (3350e6 * 0.8) + launches_ms
    assert again.backward_ms - plain.backward_ms == pytest.approx(expected_ms)
    assert plain.activation_bytes - again.activation_bytes == pytest.approx(3 * 2 * elements)
    np.testing.assert_array_equal(again.forward_ms, plain.forward_ms)


@pytest.mark.parametrize("tensor", [2, 8])
def test_one_part_of_an_overlapped_exchange_is_waited_for(tensor: int):
    """Prevents --tp-comm-overlap that hides nothing, or everything."""
    plain = cost_of(tensor=tensor).units[LAYER]
    hidden = cost_of(alter(overlap_tensor=True), tensor=tensor).units[LAYER]
    np.testing.assert_allclose(hidden.collective_ms, plain.collective_ms / tensor)
    saved = [plain.forward_ms - hidden.forward_ms, plain.backward_ms - hidden.backward_ms]
    np.testing.assert_allclose(saved, plain.collective_ms * (1 - 1 / tensor), atol=1e-12)


@pytest.mark.parametrize("chunks", [2, 5])
@pytest.mark.parametrize("overlaps", [True, False])
def test_chunks_are_exchanged_one_after_another(chunks: int, overlaps: bool):
    """Prevents chunks with gradients that all wait for the last backward, or for no link."""
    rng, stages = np.random.default_rng(chunks), 3
    ends, starts = rng.uniform(0, 50, (2, 4, chunks, stages))
    reduction, gather = rng.uniform(1, 60, (2, stages))
    once = PerStepCosts(
        reduction_ms=reduction, gather_ms=gather, buckets=np.ones(stages), overlaps=overlaps,
        tied_ms=np.zeros(stages), update_ms=np.zeros(stages),
    )  # fmt: skip
    exposed, waits = once.chunks_exposed_ms(ends), once.first_waits_ms(starts)
    for rank, stage in np.ndindex(4, stages):
        last, link = max(ends[rank, :, stage]), 0.0
        for end in sorted(ends[rank, :, stage]):
            link = max(link, end if overlaps else last) + reduction[stage] / chunks
        assert exposed[rank, stage] == pytest.approx(link - last)
        arrivals = np.arange(1, chunks + 1) * gather[stage] / chunks
        late = max(arrivals - starts[rank, :, stage])
        expected = max(late, 0) if overlaps else gather[stage]
        assert waits[rank, stage] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"overlap_gradients": False, "overlap_weights": False, "fused_loss": False,
              "kept_logits": 2, "averages_gradients": True}),
        (HIDDEN, {}),
        ("--calculate-per-token-loss", {"averages_gradients": False}),
        ("--tp-comm-overlap --sequence-parallel", {"overlap_tensor": True}),
        ("--tp-comm-overlap --sequence-parallel --variable-seq-lengths", {"overlap_tensor": False}),
        ("--cp-comm-type all_gather", {"ring_tokens": None}),
        ("--grad-reduce-in-bf16", {"bf16_gradients": True}),
        ("--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
         {"recomputed": ("layernorm", "mlp")}),
        ("--recompute-granularity full --recompute-modules mlp", {"recomputed": ()}),
    ],
)  # fmt: skip
def test_switches_of_a_line_are_read(flags: str, expected: dict[str, bool]):
    """Prevents a switch without effect on the prediction."""
    line = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --bf16 "
        f"--pipeline-model-parallel-size 1 --seq-length 4096 --context-parallel-size 2 {flags}"
    )
    found = runtime_of(line_of(read_launch(line, {}), MODEL))
    for name, value in ({"ring_tokens": 4096} | expected).items():
        assert getattr(found, name) == value, name
    if flags.startswith("--overlap"):
        engine = {"transformer_engine": True, "accumulates_in_products": True}
        engine["replicates_optimizer"] = True  # without --use-distributed-optimizer
        assert found == OWN_RUNTIME.model_copy(update={"ring_tokens": 4096} | engine)


def test_what_was_measured_over_the_network_counts_beyond_a_node():
    """Prevents measured network rates that are ignored, or used within a node."""
    measured = tuple(
        CollectiveTime(kind=kind, ranks=ranks, place="network", latency_us=20, gb_per_s=30)
        for kind, ranks in (("all_gather", 16), ("all_to_all", 16), ("send", 2))
    )
    rates = Rates(device="mine", collectives=measured)
    cluster = CLUSTER.model_copy(update={"rates": {"bf16": rates}})
    expected = (20e-3, 1 / 30e6)
    for line_of_ranks, group in ((pass_line, Group), (all_to_all_line, Group), (message_line, int)):
        line = line_of_ranks(cluster, group(16), "bf16")
        assert (line.fixed_ms, line.each_ms) == pytest.approx(expected, rel=0.01)
        within = line_of_ranks(cluster, group(8), "bf16")
        assert within == line_of_ranks(CLUSTER, group(8), "bf16")
