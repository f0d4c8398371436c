"""Features of shares, beside a token-by-token count, and what a level's exchange costs."""

from dataclasses import replace

import numpy as np
import pytest
from cost_cases import assumed_h100
from length_cases import lengths_of
from plan_cases import MODEL, example_profile, job_spec

from omnibal.base.errors import UserError
from omnibal.cost.analytic import model_flops
from omnibal.cost.context import ExchangeSource, costs_at
from omnibal.cost.model import CostModel, pack_features
from omnibal.cost.profile import Measured, ShareMeasurement, model_sha256
from omnibal.cost.share_features import share_features
from omnibal.cost.source import ANALYTIC
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.model.config import load_cluster, load_model
from omnibal.model.layers import LayerRun
from omnibal.model.levels import ContextExchange, CutRule, Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.rates import CollectiveTime, Rates
from omnibal.model.units import feature_names, feature_names_at, unit_names
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.steps.cut import cut_pack, item_bounds
from omnibal.steps.shares import shares_of

pytestmark = pytest.mark.quick

RANKS = 4


def level(context: int, cut: CutRule = CutRule.CONTIGUOUS, exchange: str = "gather") -> Level:
    return Level(
        caps=Caps.of(tokens=1),
        context=context,
        cut=cut,
        exchange=ContextExchange(exchange),
        attention_weight=0.01,
    )


def random_schedule(
    rng: np.random.Generator, contexts: list[int]
) -> tuple[ScheduledPacks, Lengths]:
    """Steps of three slots on four ranks, each slot of a level at random."""
    rows = []
    for step in range(4):
        levels = [int(rng.integers(len(contexts))) for _ in range(3)]
        for slot, index in enumerate(levels):
            rows += [(step, rank, slot, index) for rank in range(0, RANKS, contexts[index])]
    step, dp_rank, slot, index = np.array(sorted(rows)).T
    sizes = rng.integers(1, 6, len(step))
    samples = int(sizes.sum())
    packs = Packs(samples=rng.permutation(samples), offsets=np.append(0, np.cumsum(sizes)))
    tokens = (rng.pareto(1.0, samples) * 20).astype(np.int32).clip(0, 400) + 1
    tiles = rng.integers(0, 5, samples)
    lengths = lengths_of(tiles=tiles, tokens=tokens, loss_tokens=rng.integers(0, tokens + 1))
    return ScheduledPacks.of(packs, lengths, step, dp_rank, slot, level=index), lengths


def counted(tokens: np.ndarray, loss: np.ndarray, tiles: int, one: Level, part: int, window: int):
    """What a rank has of a pack, token by token, in the order of the test's features."""
    pieces = cut_pack(tokens, one)
    owner = [np.full(count, -1) for count in tokens]
    for rank, sample, first, stop in zip(
        pieces.rank, pieces.sample, pieces.first, pieces.stop, strict=True
    ):
        owner[sample][first:stop] = rank
    own = squared = windowed = with_loss = 0.0
    exchanged = np.zeros(one.context)
    for ranks, count, lossy in zip(owner, tokens, loss, strict=True):
        is_divided = len(set(ranks)) > 1
        exchanged += is_divided * np.bincount(ranks, minlength=one.context)
        by_heads = is_divided and one.exchange is ContextExchange.HEADS
        for place, rank in enumerate(ranks):
            share = 1 / one.context if by_heads else float(rank == part)
            # The difference of squares: twice what a token sees but for itself.
            squared += share * (2 * place + 1)
            windowed += share * (2 * min(place, window) + (place < window))
            own += rank == part
            with_loss += (rank == part) * (place >= count - lossy)
    bounds = item_bounds(tiles, one.context)
    return [
        1,
        bounds[part + 1] - bounds[part],
        own,
        squared,
        windowed,
        with_loss,
        exchanged.max(),
    ]


@pytest.mark.parametrize("cut", CutRule)
@pytest.mark.parametrize("exchange", ContextExchange)
def test_features_of_shares_are_those_of_a_token_by_token_count(
    cut: CutRule, exchange: ContextExchange
) -> None:
    """Prevents times and memory of work that a rank does not do."""
    rng, window = np.random.default_rng(3), 7
    levels = [level(1), level(2, cut, exchange), level(4, cut, exchange)]
    packs, lengths = random_schedule(rng, [1, 2, 4])
    names = ("fixed", "tiles", "tokens", "squared_tokens", f"squared_tokens_window{window}")
    features = feature_names_at((*names, "loss_tokens"), levels)
    shares = shares_of(packs, levels)
    found = share_features(packs, lengths, levels, features)
    assert len(found) == len(shares) == 4 * 3 * RANKS
    for row, pack in enumerate(shares.pack):
        samples = packs.packs[pack]
        expected = counted(
            lengths.tokens[samples],
            lengths.loss_tokens[samples],
            int(lengths.items["tiles"][samples].sum()),
            levels[shares.level[row]],
            int(shares.part[row]),
            window,
        )
        np.testing.assert_allclose(found[row], expected, rtol=1e-12)


def test_features_of_one_level_are_those_of_packs() -> None:
    """Prevents plans of one level that change."""
    packs, lengths = random_schedule(np.random.default_rng(1), [1])
    names = feature_names(MODEL)
    whole = pack_features(packs.packs, lengths, names)
    assert feature_names_at(names, [level(1)]) == names
    np.testing.assert_array_equal(share_features(packs, lengths, [level(1)], names), whole)


FAST_COPIES = assumed_h100().model_copy(
    update={"memory_gb_per_s": 1e30, "kernel_us": 1e-12, "link_latency_us": 10}
)
"""A cluster on which an exchange takes the time of its links alone."""


def text_job(tensor: int = 1, data: int = 8, **changes) -> JobSpec:
    parallel = Parallel(tensor=tensor, pipeline=1, data=data, sequence_parallel=tensor > 1)
    return JobSpec(
        **{
            "model": load_model("internvl2-26b"),
            "cluster": FAST_COPIES,
            "parallel": parallel,
            "precision": "bf16",
        }
        | changes
    )


def test_features_of_a_shared_pack_leave_at_the_rate_of_an_all_to_all() -> None:
    """Prevents features that are exchanged at the rate of a ring, as keys and values that are
    gathered are."""
    exchange = CollectiveTime(kind="all_to_all", ranks=2, latency_us=30, gb_per_s=2)
    gather = CollectiveTime(kind="all_gather", ranks=2, latency_us=30, gb_per_s=7)
    rates = Rates(device="mine", collectives=(exchange, gather))
    cluster = load_cluster("h100-80g").model_copy(update={"rates": {"bf16": rates}})
    job = job_spec(cluster=cluster, parallel=Parallel(pipeline=1, data=2), precision="bf16")
    (cost,) = job.costs_at([level(2)])
    tile_bytes = MODEL.vision.tokens_per_item * MODEL.language.hidden_size * 2
    copied_ms = 2 * tile_bytes / (cluster.memory_gb_per_s * 1e6 * cluster.memory_efficiency)
    tile_ms = cost.units["language_embed"].context_ms[0, cost.features.index("tiles")]
    assert tile_ms == pytest.approx(tile_bytes / 2 / 2e6 + copied_ms, rel=1e-6)


def test_a_group_that_leaves_the_node_pays_the_networks_rate() -> None:
    """Prevents levels whose ranks talk over the network at the price of a node's links, or through
    one adapter where they have two."""
    within, beyond = (
        text_job(tensor).costs_at([level(4)])[0].units["language_layer"].context_ms[0, -1]
        for tensor in (2, 4)
    )
    assert beyond == pytest.approx(within * 450 / (2 * 50) / 2)


def test_costs_of_levels_differ_by_their_exchange_alone() -> None:
    """Prevents levels that change what a share's own work costs."""
    job = text_job(cluster=assumed_h100())
    small, shared = job.costs_at([level(1), level(4)])
    base = job.cost
    assert small.features == shared.features == (*base.features, "exchanged_tokens")
    for name, unit in base.units.items():
        alone, together = small.units[name], shared.units[name]
        np.testing.assert_array_equal(alone.forward_ms, [*unit.forward_ms, 0])
        np.testing.assert_allclose(
            together.forward_ms - together.context_ms[0], alone.forward_ms, rtol=1e-12
        )
        np.testing.assert_allclose(
            together.backward_ms - together.context_ms[1], alone.backward_ms, rtol=1e-12
        )
        again = together.recompute_ms - alone.recompute_ms
        np.testing.assert_allclose(again, together.context_ms[2], atol=1e-15)
        assert not alone.context_ms.any()
        exchanges = name in ("language_layer", "language_embed")
        assert together.context_ms.any() == exchanges, name
        np.testing.assert_array_equal(together.activation_bytes, alone.activation_bytes)
    assert job.costs_at([level(1)]) == (base,)


def test_frozen_encoders_get_no_gradient_of_their_features() -> None:
    """Prevents time for gradients that nobody needs."""
    for frozen, goes_back in (((), True), (("vision",), True), (("vision", "projector"), False)):
        (cost,) = text_job(frozen=frozen).costs_at([level(2)])
        forward_ms, backward_ms, _ = cost.units["language_embed"].context_ms
        assert forward_ms.any() and backward_ms.any() == goes_back
        assert cost.units["language_layer"].context_ms[1].any()


def test_measured_units_keep_their_times() -> None:
    """Prevents an exchange that is lost where costs were measured."""
    profile = example_profile().model_copy(update={"model_sha256": model_sha256(MODEL)})
    job = job_spec(parallel=Parallel(pipeline=1, data=2), cost_source=Measured(profile))
    counted_job = replace(job, cost_source=ANALYTIC)
    (measured,), (by_counts,) = (each.costs_at([level(2)]) for each in (job, counted_job))
    for name in dict.fromkeys(unit_names(MODEL)):
        np.testing.assert_allclose(
            measured.units[name].forward_ms[:-1] - measured.units[name].context_ms[0][:-1],
            job.cost.units[name].forward_ms,
            rtol=1e-12,
        )
        np.testing.assert_array_equal(
            measured.units[name].context_ms, by_counts.units[name].context_ms
        )


def of_known_shares(context: int, exchange: str) -> list[ShareMeasurement]:
    """Layers on shares that take 3 ms, 0.01 ms a token and 0.05 ms an exchanged one longer."""
    shares = []
    for tokens, exchanged in ((512, 512), (512, 100), (128, 128), (128, 0)):
        more_ms = 3 + 0.01 * tokens + 0.05 * exchanged
        shares.append(
            ShareMeasurement(
                unit="language_layer",
                context=context,
                exchange=ContextExchange(exchange),
                tokens=tokens,
                squared_tokens=tokens**2,
                exchanged_tokens=exchanged,
                forward_ms=1.0 + tokens + more_ms,
                backward_ms=2.0 + tokens + 2 * more_ms,
            )
        )
    return shares


def test_exchanges_take_what_was_measured_of_shares() -> None:
    """Prevents counted exchanges where layers on shares were measured, and measured ones by
    another exchange, at another context size or beyond the node."""
    alone = example_profile()
    alone = alone.model_copy(
        update={
            "model_sha256": model_sha256(MODEL),
            "measurements": tuple(
                one.model_copy(
                    update={"forward_ms": 1.0 + one.tokens, "backward_ms": 2.0 + one.tokens}
                )
                for one in alone.measurements
            ),
        }
    )
    gather, heads = ContextExchange
    shares = (*of_known_shares(4, gather), *of_known_shares(2, heads))
    measured = alone.model_copy(update={"shares": shares})
    node = load_cluster("laptop-cpu").model_copy(update={"gpus_per_node": 4})
    job = job_spec(
        cluster=node, parallel=Parallel(pipeline=1, data=4), cost_source=Measured(measured)
    )
    counted = replace(job, cost_source=Measured(alone))

    def added(job: JobSpec, context: int, exchange: ContextExchange) -> np.ndarray:
        (cost,) = job.costs_at([level(context, exchange=exchange)])
        return cost.units["language_layer"].context_ms

    names = job.cost.features
    expected = np.zeros((3, len(names) + 1))
    expected[:2, names.index("fixed")] = 3, 6
    expected[:2, names.index("tokens")] = 0.01, 0.02
    expected[:2, -1] = 0.05, 0.1
    np.testing.assert_allclose(added(job, 4, gather), expected, atol=1e-5)
    expected[2] = expected[0]  # heads are exchanged again where a layer is recomputed
    np.testing.assert_allclose(added(job, 2, heads), expected, atol=1e-5)
    np.testing.assert_array_equal(added(job, 2, gather), added(counted, 2, gather))
    small = node.model_copy(update={"gpus_per_node": 2})
    beyond, as_counted = (added(replace(each, cluster=small), 4, gather) for each in (job, counted))
    np.testing.assert_array_equal(beyond, as_counted)


def test_copies_and_kernels_of_an_exchange_count() -> None:
    """Prevents levels that seem free where links are fast, as between processes of one machine."""
    fast, real = (
        text_job(cluster=cluster).costs_at([level(4)])[0].units["language_layer"].context_ms
        for cluster in (FAST_COPIES, assumed_h100())
    )
    width, cluster = 2 * 6144 * 8 // 48, assumed_h100()
    # Written to where they are received, and read and written in the order of this rank's pieces.
    least_ms = 2 * 4 * 2 * width / (cluster.memory_gb_per_s * 1e6 * cluster.memory_efficiency)
    assert real[0, -1] - fast[0, -1] == pytest.approx(least_ms)
    assert (real[0, 0] - fast[0, 0]) * 1e3 == pytest.approx(6 * cluster.kernel_us)


def test_exchanges_are_at_the_profiles_rates() -> None:
    """Prevents a cluster's guess where collectives were measured."""
    profile = example_profile().model_copy(update={"model_sha256": model_sha256(MODEL)})
    sizes = [2**power for power in range(10, 21, 2)]
    collectives = tuple(
        CollectiveTime(kind="all_gather", ranks=2, bytes=size, ms=0.5 + size / 2 * 1e-4)
        for size in sizes
    )
    rates = Rates(device="test", collectives=collectives)
    given = {"parallel": Parallel(pipeline=1, data=2)}
    unknown = job_spec(cost_source=Measured(profile), **given).costs_at([level(2)])[0]
    measured = job_spec(cost_source=Measured(profile.model_copy(update={"rates": rates})), **given)
    found = measured.costs_at([level(2)])[0].units["language_layer"].context_ms[0]
    guessed = unknown.units["language_layer"].context_ms[0]
    width, cluster = 2 * MODEL.language.hidden_size, measured.cluster
    width = width * MODEL.language.kv_heads // MODEL.language.heads
    copies_ms = 2 * 2 * 4 * width / (cluster.memory_gb_per_s * 1e6 * cluster.memory_efficiency)
    assert found[-1] - copies_ms == pytest.approx(4 * width * 1e-4, rel=1e-3)
    assert found[0] == pytest.approx(0.5 + 6 * cluster.kernel_us / 1e3, rel=1e-3)
    assert guessed[0] < found[0] and guessed[-1] < found[-1]


def test_heads_that_do_not_divide_are_refused() -> None:
    """Prevents an exchange of parts of heads."""
    assert text_job(tensor=2).costs_at([level(4, exchange="heads")])
    with pytest.raises(UserError, match="8 over 2; exchange by gather"):
        text_job(tensor=2).costs_at([level(8, exchange="heads")])


def test_operations_of_a_pack_count_once() -> None:
    """Prevents utilization that grows with the ranks that share a pack."""
    packs, lengths = random_schedule(np.random.default_rng(2), [1, 2, 4])
    model = MODEL.with_tower("language", layers=2, runs=(LayerRun(layers=1, window=6),) * 2)
    flops = model_flops(model, load_cluster("laptop-cpu"), ())
    names = feature_names(model)
    of_packs = (pack_features(packs.packs, lengths, names)[:, 1:] @ flops[1:]).sum()
    levels = [level(1), level(2, CutRule.ZIGZAG), level(4, CutRule.WHOLE)]
    of_shares = (share_features(packs, lengths, levels, names)[:, 1:] @ flops[1:]).sum()
    assert of_shares == pytest.approx(of_packs, rel=1e-12)


def by_name(cost: CostModel, **coefficients: float) -> list[float]:
    """Coefficients of the features, 0 of those not given."""
    return [coefficients.get(name, 0.0) for name in cost.features]


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("exchange", ContextExchange)
def test_exchanges_of_attention_by_hand(exchange: ContextExchange, tensor: int) -> None:
    """Prevents: copies, kernels or latencies of an exchange's backward that are lost, and working
    memory without the rank's own keys and values."""
    cluster = assumed_h100().model_copy(update={"link_latency_us": 7, "kernel_us": 3})
    job = text_job(tensor, cluster=cluster)
    (cost,) = job.costs_at([level(4, exchange=exchange)])
    q, kv = 6144 / tensor, 2 * 8 * 128 / tensor
    sent_ms = 1 / (450e6 * cluster.link_efficiency)
    copied_ms = 1 / (cluster.memory_gb_per_s * 1e6 * cluster.memory_efficiency)

    def times(collectives: int, kernels: int, sent: float, own: float, exchanged: float):
        """Of bf16 elements that are sent, and that copies read and write."""
        return by_name(
            cost,
            fixed=collectives * 0.007 + kernels * 0.003,
            tokens=2 * own * copied_ms,
            exchanged_tokens=2 * (sent * sent_ms + exchanged * copied_ms),
        )

    if exchange is ContextExchange.GATHER:
        # Own keys beside values, and both beside the 4 ranks' (2 + 2); all in order (2).
        forward = times(1, 6, 3 * kv, 4 * kv + 2 * kv, 2 * 4 * kv)
        # Gathered again. Gradients of keys beside those of values (2), zeros that they are added
        # to (1 + 1 + 2); own ones copied, and others' sums added to them (2 + 2).
        gathered_and_scattered = (6 + 2 + 4 + 4) * kv, (2 + 2 + 4) * 4 * kv
        backward = times(2, 12, 2 * 3 * kv, *gathered_and_scattered)
        again = times(0, 0, 0, 0, 0)
        working = 3 * kv, 3 * 4 * kv
    else:
        # A quarter of the heads stays. Queries, keys and values by rank, sent, by sample (6), the
        # output by rank and back (4), beside that of whole samples (4).
        forward = times(2, 12, (2 * q + kv) * 3 / 4, 4 * q, 10 * q + 6 * kv)
        backward = again = forward
        working = 0, 6 * q + 4 * kv
    unit = cost.units["language_layer"]
    np.testing.assert_allclose(unit.context_ms, [forward, backward, again], rtol=1e-9)
    # Gradients of the residual, of attention's output, and of queries, keys and values.
    own = 6144 + q + q + kv + working[0]
    expected = by_name(cost, tokens=2 * own, exchanged_tokens=2 * working[1])
    np.testing.assert_allclose(unit.transient_bytes[-1], expected, rtol=1e-9)


def test_exchange_of_features_by_hand() -> None:
    """Prevents: features of tiles that the ranks of a block need for nothing, or that take no
    memory on their way."""
    cluster = assumed_h100().model_copy(update={"link_latency_us": 7, "kernel_us": 3})
    (cost,) = text_job(cluster=cluster).costs_at([level(4)])
    unit, tile_bytes = cost.units["language_embed"], 256 * 6144 * 2
    rate = 450e6 * cluster.link_efficiency
    copies = cluster.memory_gb_per_s * 1e6 * cluster.memory_efficiency
    tile_ms = tile_bytes * 3 / 4 / rate + 2 * tile_bytes / copies
    once = by_name(cost, fixed=0.007 + 2 * 0.003, tiles=tile_ms)
    nothing = by_name(cost)
    np.testing.assert_allclose(unit.context_ms, [once, once, nothing], rtol=1e-9)
    np.testing.assert_allclose(unit.transient_bytes[-1], by_name(cost, tiles=2 * tile_bytes))


def test_layers_without_a_backward_exchange_forward_alone() -> None:
    """Prevents: gradients of frozen layers that are exchanged, layers that are recomputed for
    nothing, and an exchange that has no room beside what its layer works with."""
    job = text_job()
    trained = job.cost.units["language_layer"]
    nothing = 0 * trained.backward_ms
    alone = replace(trained, backward_ms=nothing, recompute_ms=nothing)
    frozen = replace(job.cost, units=job.cost.units | {"language_layer": alone})
    given = job.model, job.cluster, job.parallel, job.precision, ()
    for exchange in ContextExchange:
        one = level(4, exchange=exchange)
        (cost,), (with_backward,) = (
            costs_at(frozen, *given, [one], ExchangeSource()),
            job.costs_at([one]),
        )
        unit, other = cost.units["language_layer"], with_backward.units["language_layer"]
        np.testing.assert_array_equal(unit.context_ms[0], other.context_ms[0])
        assert not unit.context_ms[1:].any()
        assert not unit.backward_ms.any() and not unit.recompute_ms.any()
        beside = [*alone.transient_bytes.max(axis=0), 0]
        expected = other.transient_bytes[-1] + beside
        np.testing.assert_allclose(unit.transient_bytes[-1], expected, rtol=1e-9)


@pytest.mark.parametrize("sample_tokens", [1024, 65_536])
def test_a_ring_is_walked_step_by_step(sample_tokens: int) -> None:
    """Prevents: keys and values that are waited for though attention takes longer, or that come
    for nothing where it does not."""
    cluster = assumed_h100().model_copy(update={"link_latency_us": 20, "kernel_us": 3})
    job, context = text_job(2, cluster=cluster), 4
    source = ExchangeSource(ring_tokens=sample_tokens)
    given = job.model, cluster, job.parallel, job.precision, job.frozen
    (cost,) = costs_at(job.cost, *given, [level(context)], source)
    unit, alone = cost.units["language_layer"], job.cost.units["language_layer"]
    own = sample_tokens / context
    kv, q = 2 * 8 * 128 / 2, 6144 / 2
    rate = 450e6 * cluster.link_efficiency
    copies = cluster.memory_gb_per_s * 1e6 * cluster.memory_efficiency
    features = np.array(by_name(cost, fixed=1, tokens=own, exchanged_tokens=own))
    square = cost.features.index("squared_tokens")
    for place, name, sent, summed in ((0, "forward_ms", 1, 1), (1, "backward_ms", 2, 2)):
        # Of the whole sample's pairs a rank has one in 4, in 4 parts.
        part_ms = getattr(alone, name)[square] * sample_tokens**2 / context / context
        expected_ms = 0.0
        for _ in range(context - 1):
            sent_ms = sent * 2 * own * kv / rate + 0.02
            expected_ms += max(sent_ms - part_ms, 0)
            # What is there and what is new are read, and their sum written.
            expected_ms += summed * 3 * 2 * own * q / copies + 4 * 0.003
        assert features @ unit.context_ms[place] == pytest.approx(expected_ms)
        assert (sent_ms > part_ms) == (sample_tokens == 1024)
    np.testing.assert_allclose(unit.context_ms[2], unit.context_ms[0])
    # Two parts at a time, the one at hand and the next, with gradients of them and of both.
    (gathered,) = job.costs_at([level(context)])
    tokens, exchanged = (cost.features.index(name) for name in ("tokens", "exchanged_tokens"))
    here, there = (each.units["language_layer"].transient_bytes[-1] for each in (cost, gathered))
    assert here[exchanged] == 0 and there[exchanged] > 0
    assert here[tokens] - there[tokens] == pytest.approx(3 * 2 * kv)
