"""Features of shares, against a token-by-token count, and the cost of a level's exchange."""

from dataclasses import replace

import numpy as np
import pytest
from cost_cases import assumed_h100
from length_cases import lengths_of
from plan_cases import MODEL, example_profile, job_spec

from omnibal.base.errors import UserError
from omnibal.cost.analytic import model_flops
from omnibal.cost.context import costs_at
from omnibal.cost.model import CostModel, UnitCost
from omnibal.cost.profile import Profile, ShareMeasurement, model_sha256
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.model.config import ClusterConfig, load_cluster, load_model
from omnibal.model.layer_kinds import LayerRun
from omnibal.model.levels import ContextExchange, CutRule, Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.rate_tables import CollectiveTime, Rates
from omnibal.model.runtime import RuntimeOptions
from omnibal.model.units import feature_names, feature_names_at
from omnibal.packing.cut import cut_pack, item_bounds
from omnibal.packing.features import pack_features, share_features
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.shares import shares_of

pytestmark = pytest.mark.quick

RANKS, TWO_RANKS = 4, Parallel(pipeline=1, data=2)


def level(context: int, cut: CutRule = CutRule.CONTIGUOUS, exchange: str = "gather") -> Level:
    sizes = {"caps": Caps.of(tokens=1), "context": context, "attention_weight": 0.01}
    return Level(**sizes, cut=cut, exchange=ContextExchange(exchange))


def random_schedule(
    rng: np.random.Generator, contexts: list[int]
) -> tuple[ScheduledPacks, Lengths]:
    """Return steps of three slots on four ranks. Each slot has a random level."""
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
    return ScheduledPacks.from_packs(packs, lengths, step, dp_rank, slot, level=index), lengths


def reference(tokens: np.ndarray, loss: np.ndarray, tiles: int, one: Level, part: int, window: int):
    """Return a rank's features of a pack, counted token by token."""
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
            # Difference of squares: twice the earlier tokens, plus one.
            squared += share * (2 * place + 1)
            windowed += share * (2 * min(place, window) + (place < window))
            own += rank == part
            with_loss += (rank == part) * (place >= count - lossy)
    own_tiles = np.diff(item_bounds(tiles, one.context))[part]
    return [1, own_tiles, own, squared, windowed, with_loss, exchanged.max()]


@pytest.mark.parametrize("cut", CutRule)
@pytest.mark.parametrize("exchange", ContextExchange)
def test_features_of_shares_are_those_of_a_token_by_token_count(
    cut: CutRule, exchange: ContextExchange
) -> None:
    """Prevents time and memory of work that a rank does not do."""
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
        tokens, loss = lengths.tokens[samples], lengths.loss_tokens[samples]
        tiles = int(lengths.items["tiles"][samples].sum())
        one, part = levels[shares.level[row]], int(shares.part[row])
        expected = reference(tokens, loss, tiles, one, part, window)
        np.testing.assert_allclose(found[row], expected, rtol=1e-12)


def test_features_of_one_level_are_those_of_packs() -> None:
    """Prevents changed plans with a single level."""
    packs, lengths = random_schedule(np.random.default_rng(1), [1])
    names = feature_names(MODEL)
    whole = pack_features(packs.packs, lengths, names)
    assert feature_names_at(names, [level(1)]) == names
    np.testing.assert_array_equal(share_features(packs, lengths, [level(1)], names), whole)


H100 = assumed_h100()
FAST_COPIES = H100.model_copy(
    update={"memory_gb_per_s": 1e30, "kernel_us": 1e-12, "link_latency_us": 10}
)
"""A cluster where only links take time in an exchange."""
SLOW = H100.model_copy(update={"link_latency_us": 7, "kernel_us": 3})


def text_job(tensor: int = 1, cluster: ClusterConfig = FAST_COPIES, **changes) -> JobSpec:
    parallel = Parallel(tensor=tensor, pipeline=1, data=8, sequence_parallel=tensor > 1)
    given = {"model": load_model("internvl2-26b"), "cluster": cluster, "parallel": parallel}
    return JobSpec(**given, precision="bf16", **changes)


def copied_ms(cluster: ClusterConfig) -> float:
    """Return ms per byte read or written by a copy."""
    return 1 / (cluster.memory_gb_per_s * 1e6 * cluster.memory_efficiency)


def profile_of_digits(**changes) -> Profile:
    profile = example_profile().model_copy(update={"model_sha256": model_sha256(MODEL)})
    return profile.model_copy(update=changes)


def layer_of(job: JobSpec, one: Level) -> UnitCost:
    """Return a language layer on packs of this level."""
    (cost,) = job.costs_at([one])
    return cost.units["language_layer"]


def test_features_of_a_shared_pack_leave_at_the_rate_of_an_all_to_all() -> None:
    """Prevents feature exchange priced at the all-gather's rate."""
    exchange = CollectiveTime(kind="all_to_all", ranks=2, latency_us=30, gb_per_s=2)
    gather = CollectiveTime(kind="all_gather", ranks=2, latency_us=30, gb_per_s=7)
    rates = Rates(device="mine", collectives=(exchange, gather))
    cluster = load_cluster("h100-80g").model_copy(update={"rates": {"bf16": rates}})
    job = job_spec(cluster=cluster, parallel=TWO_RANKS, precision="bf16")
    (cost,) = job.costs_at([level(2)])
    tile_bytes = MODEL.vision.tokens_per_item * MODEL.language.hidden_size * 2
    tile_ms = cost.units["language_embed"].context_ms[0, cost.features.index("tiles")]
    expected_ms = tile_bytes / 2 / 2e6 + 2 * tile_bytes * copied_ms(cluster)
    assert tile_ms == pytest.approx(expected_ms, rel=1e-6)


def test_a_group_that_leaves_the_node_pays_the_networks_rate() -> None:
    """Prevents inter-node levels priced at intra-node rates, or limited to one of two adapters."""
    within, beyond = (layer_of(text_job(each), level(4)).context_ms[0, -1] for each in (2, 4))
    assert beyond == pytest.approx(within * 450 / (2 * 50) / 2)


def test_costs_of_levels_differ_by_their_exchange_alone() -> None:
    """Prevents levels that change the cost of a share's own work."""
    job = text_job(cluster=H100)
    small, shared = job.costs_at([level(1), level(4)])
    base = job.cost
    assert small.features == shared.features == (*base.features, "exchanged_tokens")
    for name, unit in base.units.items():
        alone, together = small.units[name], shared.units[name]
        np.testing.assert_array_equal(alone.forward_ms, [*unit.forward_ms, 0])
        fields = ("forward_ms", "backward_ms", "recompute_ms")
        for field, added_ms in zip(fields, together.context_ms, strict=True):
            expected_ms = getattr(alone, field) + added_ms
            np.testing.assert_allclose(getattr(together, field), expected_ms, rtol=1e-12)
        assert not alone.context_ms.any()
        exchanges = name in ("language_layer", "language_embed")
        assert together.context_ms.any() == exchanges, name
        np.testing.assert_array_equal(together.activation_bytes, alone.activation_bytes)
    assert job.costs_at([level(1)]) == (base,)


def test_frozen_encoders_get_no_gradient_of_their_features() -> None:
    """Prevents time for gradients of frozen encoders' features."""
    for frozen, goes_back in (((), True), (("vision",), True), (("vision", "projector"), False)):
        (cost,) = text_job(frozen=frozen).costs_at([level(2)])
        forward_ms, backward_ms, _ = cost.units["language_embed"].context_ms
        assert forward_ms.any() and backward_ms.any() == goes_back
        assert cost.units["language_layer"].context_ms[1].any()


def test_measured_units_keep_their_times() -> None:
    """Prevents a lost exchange if unit costs were measured."""
    job = job_spec(parallel=TWO_RANKS, cost_source=CostSource(profile_of_digits()))
    counted_job = replace(job, cost_source=ANALYTIC)
    (measured,), (by_counts,) = (each.costs_at([level(2)]) for each in (job, counted_job))
    for name, unit in measured.units.items():
        own_ms = (unit.forward_ms - unit.context_ms[0])[:-1]
        np.testing.assert_allclose(own_ms, job.cost.units[name].forward_ms, rtol=1e-12)
        np.testing.assert_array_equal(unit.context_ms, by_counts.units[name].context_ms)


def known_shares(context: int, exchange: ContextExchange) -> list[ShareMeasurement]:
    """Return layers on shares: 3 ms, 0.01 ms per token and 0.05 ms per exchanged token longer."""
    shares = []
    for tokens, exchanged in ((512, 512), (512, 100), (128, 128), (128, 0)):
        more_ms = 3 + 0.01 * tokens + 0.05 * exchanged
        share = ShareMeasurement(
            unit="language_layer",
            context=context,
            exchange=exchange,
            tokens=tokens,
            squared_tokens=tokens**2,
            exchanged_tokens=exchanged,
            forward_ms=1.0 + tokens + more_ms,
            backward_ms=2.0 + tokens + 2 * more_ms,
        )
        shares.append(share)
    return shares


def test_exchanges_take_what_was_measured_of_shares() -> None:
    """Prevents counted exchanges if shares were measured, and measurements used for another
    exchange, context size or node boundary."""
    times = tuple(
        one.model_copy(update={"forward_ms": 1.0 + one.tokens, "backward_ms": 2.0 + one.tokens})
        for one in example_profile().measurements
    )
    gather, heads = ContextExchange
    shares = (*known_shares(4, gather), *known_shares(2, heads))
    alone = profile_of_digits(measurements=times)
    measured = profile_of_digits(measurements=times, shares=shares)
    node = load_cluster("laptop-cpu").model_copy(update={"gpus_per_node": 4})
    job = job_spec(
        cluster=node, parallel=Parallel(pipeline=1, data=4), cost_source=CostSource(measured)
    )
    reference = replace(job, cost_source=CostSource(alone))

    def added_context_ms(job: JobSpec, context: int, exchange: ContextExchange) -> np.ndarray:
        return layer_of(job, level(context, exchange=exchange)).context_ms

    names = job.cost.features
    expected = np.zeros((3, len(names) + 1))
    expected[:2, names.index("fixed")] = 3, 6
    expected[:2, names.index("tokens")] = 0.01, 0.02
    expected[:2, -1] = 0.05, 0.1
    np.testing.assert_allclose(added_context_ms(job, 4, gather), expected, atol=1e-5)
    expected[2] = expected[0]  # heads are exchanged again if a layer is recomputed
    np.testing.assert_allclose(added_context_ms(job, 2, heads), expected, atol=1e-5)
    np.testing.assert_array_equal(
        added_context_ms(job, 2, gather), added_context_ms(reference, 2, gather)
    )
    small = node.model_copy(update={"gpus_per_node": 2})
    beyond, as_counted = (
        added_context_ms(replace(each, cluster=small), 4, gather) for each in (job, reference)
    )
    np.testing.assert_array_equal(beyond, as_counted)


def test_exchanges_are_at_the_profiles_rates() -> None:
    """Prevents a cluster's assumed rates if collectives were measured."""
    collectives = tuple(
        CollectiveTime(kind="all_gather", ranks=2, bytes=size, ms=0.5 + size / 2 * 1e-4)
        for size in (2**power for power in range(10, 21, 2))
    )
    rates = Rates(device="test", collectives=collectives)
    guessed, found = (
        layer_of(
            job_spec(cost_source=CostSource(profile), parallel=TWO_RANKS), level(2)
        ).context_ms[0]
        for profile in (profile_of_digits(), profile_of_digits(rates=rates))
    )
    language, cluster = MODEL.language, load_cluster("laptop-cpu")
    width = 2 * language.hidden_size * language.kv_heads // language.heads
    copies_ms = 2 * 2 * 4 * width * copied_ms(cluster)
    assert found[-1] - copies_ms == pytest.approx(4 * width * 1e-4, rel=1e-3)
    assert found[0] == pytest.approx(0.5 + 6 * cluster.kernel_us / 1e3, rel=1e-3)
    assert guessed[0] < found[0] and guessed[-1] < found[-1]


def test_heads_that_do_not_divide_are_refused() -> None:
    """Prevents an exchange of fractions of heads."""
    assert text_job(tensor=2).costs_at([level(4, exchange="heads")])
    with pytest.raises(UserError, match="8 over 2; exchange by gather"):
        text_job(tensor=2).costs_at([level(8, exchange="heads")])


def test_operations_of_a_pack_count_once() -> None:
    """Prevents utilization that grows with the ranks that share a pack."""
    packs, lengths = random_schedule(np.random.default_rng(2), [1, 2, 4])
    model = MODEL.with_tower("language", layers=2, runs=(LayerRun(layers=1, window=6),) * 2)
    flops, names = model_flops(model, ()), feature_names(model)
    levels = [level(1), level(2, CutRule.ZIGZAG), level(4, CutRule.WHOLE)]
    of_packs = pack_features(packs.packs, lengths, names)
    of_shares = share_features(packs, lengths, levels, names)
    expected = (of_packs[:, 1:] @ flops[1:]).sum()
    assert (of_shares[:, 1:] @ flops[1:]).sum() == pytest.approx(expected, rel=1e-12)


def by_name(cost: CostModel, **coefficients: float) -> list[float]:
    """Return coefficients by feature, 0 if absent."""
    return [coefficients.get(name, 0.0) for name in cost.features]


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("exchange", ContextExchange)
def test_exchanges_of_attention_by_hand(exchange: ContextExchange, tensor: int) -> None:
    """Prevents missing copies, kernels or latencies in an exchange's backward, and working memory
    without the rank's own keys and values."""
    (cost,) = text_job(tensor, SLOW).costs_at([level(4, exchange=exchange)])
    q, kv = 6144 / tensor, 2 * 8 * 128 / tensor
    sent_ms, copy_ms = 1 / (450e6 * SLOW.link_efficiency), copied_ms(SLOW)

    def times(collectives: int, kernels: int, sent: float, own: float, exchanged: float):
        """Counts are bf16 elements sent, and read or written by copies."""
        return by_name(
            cost,
            fixed=collectives * 0.007 + kernels * 0.003,
            tokens=2 * own * copy_ms,
            exchanged_tokens=2 * (sent * sent_ms + exchanged * copy_ms),
        )

    if exchange is ContextExchange.GATHER:
        # Concatenate own keys and values, gather 4 ranks' (2 + 2), reorder (2).
        forward = times(1, 6, 3 * kv, 4 * kv + 2 * kv, 2 * 4 * kv)
        # Gathered again. Concatenate gradients of keys and values (2), zeros to add to
        # (1 + 1 + 2); copy own gradients, and add other ranks' sums (2 + 2).
        gathered_and_scattered = (6 + 2 + 4 + 4) * kv, (2 + 2 + 4) * 4 * kv
        backward = times(2, 12, 2 * 3 * kv, *gathered_and_scattered)
        again = times(0, 0, 0, 0, 0)
        working = 3 * kv, 3 * 4 * kv
    else:
        # A quarter of the heads stays. Queries, keys and values by rank, sent, by sample (6),
        # the output by rank and back (4), next to full samples' output (4).
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
    """Prevents tile features sent to ranks that do not need them, or sent without memory."""
    (cost,) = text_job(cluster=SLOW).costs_at([level(4)])
    unit, tile_bytes = cost.units["language_embed"], 256 * 6144 * 2
    tile_ms = tile_bytes * 3 / 4 / (450e6 * SLOW.link_efficiency) + 2 * tile_bytes * copied_ms(SLOW)
    once = by_name(cost, fixed=0.007 + 2 * 0.003, tiles=tile_ms)
    np.testing.assert_allclose(unit.context_ms, [once, once, by_name(cost)], rtol=1e-9)
    np.testing.assert_allclose(unit.transient_bytes[-1], by_name(cost, tiles=2 * tile_bytes))


def test_layers_without_a_backward_exchange_forward_alone() -> None:
    """Prevents exchanged gradients of frozen layers, needless recomputation, and an exchange
    without memory next to the layer's working memory."""
    job = text_job()
    trained = job.cost.units["language_layer"]
    nothing = 0 * trained.backward_ms
    alone = replace(trained, backward_ms=nothing, recompute_ms=nothing)
    frozen = replace(job.cost, units=job.cost.units | {"language_layer": alone})
    for exchange in ContextExchange:
        one = level(4, exchange=exchange)
        (cost,) = costs_at(frozen, job.cost_setting, [one])
        unit, other = cost.units["language_layer"], layer_of(job, one)
        np.testing.assert_array_equal(unit.context_ms[0], other.context_ms[0])
        assert not unit.context_ms[1:].any()
        assert not unit.backward_ms.any() and not unit.recompute_ms.any()
        parts = [*alone.transient_bytes.max(axis=0), 0]
        expected = other.transient_bytes[-1] + parts
        np.testing.assert_allclose(unit.transient_bytes[-1], expected, rtol=1e-9)


@pytest.mark.parametrize("sample_tokens", [1024, 65_536])
def test_a_ring_is_walked_step_by_step(sample_tokens: int) -> None:
    """Prevents waiting for keys and values hidden by attention, or none if attention is shorter."""
    cluster = SLOW.model_copy(update={"link_latency_us": 20})
    job, context = text_job(2, cluster=cluster), 4
    setting = replace(job.cost_setting, runtime=RuntimeOptions(ring_tokens=sample_tokens))
    (cost,) = costs_at(job.cost, setting, [level(context)])
    unit, alone = cost.units["language_layer"], job.cost.units["language_layer"]
    own, kv, q = sample_tokens / context, 2 * 8 * 128 / 2, 6144 / 2
    rate = 450e6 * cluster.link_efficiency
    features = np.array(by_name(cost, fixed=1, tokens=own, exchanged_tokens=own))
    square = cost.features.index("squared_tokens")
    for place, name, sent, summed in ((0, "forward_ms", 1, 1), (1, "backward_ms", 2, 2)):
        # A rank has 1/4 of the sample's pairs, in 4 parts.
        part_ms = getattr(alone, name)[square] * sample_tokens**2 / context / context
        expected_ms = 0.0
        for _ in range(context - 1):
            sent_ms = sent * 2 * own * kv / rate + 0.02
            expected_ms += max(sent_ms - part_ms, 0)
            # The old and new values are read, and their sum written.
            expected_ms += summed * 3 * 2 * own * q * copied_ms(cluster) + 4 * 0.003
        assert features @ unit.context_ms[place] == pytest.approx(expected_ms)
        assert (sent_ms > part_ms) == (sample_tokens == 1024)
    np.testing.assert_allclose(unit.context_ms[2], unit.context_ms[0])
    # Two parts at a time, current and next, with gradients of each and of both.
    tokens, exchanged = (cost.features.index(name) for name in ("tokens", "exchanged_tokens"))
    here, there = (each.transient_bytes[-1] for each in (unit, layer_of(job, level(context))))
    assert here[exchanged] == 0 and there[exchanged] > 0
    assert here[tokens] - there[tokens] == pytest.approx(3 * 2 * kv)
