"""Tables of rates: refusals, shipped tables, and prediction errors."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from cost_cases import assumed_h100
from rate_cases import tiled_rates

from omnibal.base.errors import UserError
from omnibal.cost.scattered_rates import ScatteredTimes, product_shapes
from omnibal.cost.shaped_rates import AttentionTimes, ProductTimes, collective_line
from omnibal.model.config import ClusterConfig, config_toml, load_cluster
from omnibal.model.rate_tables import CollectiveTime

pytestmark = pytest.mark.quick

B200 = load_cluster("b200-180g")
RATES = B200.rates["bf16"]
TILED = assumed_h100().model_copy(update={"rates": {"bf16": tiled_rates()}})
PRODUCT_TIMES = ProductTimes.fit(RATES.products, RATES.tflops)
ATTENTION_TIMES = AttentionTimes.fit(RATES.attention, RATES.tflops)


def write_toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


SHAPE = "rows = 512, inner = 1024, outer = 1024"
HEADS = "tokens = 4096, heads = 8, kv_heads = 8, head_size = 128, value_size = 128"


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (f"tflops = 989\nproducts = [{{{SHAPE}, share = 1.2}}]", "share: .*than or equal to 1"),
        (f"tflops = 989\nproducts = [{{{SHAPE}, share = 0.0}}]", "share: .*greater than or equal"),
        (f"tflops = 989\nattention = [{{{HEADS}, share = 2.1}}]", "share: .*than or equal to 2"),
        (
            f"products = [{{{SHAPE}, ms = 1}}, {{{SHAPE}, ms = 2}}]",
            "products: rows 512, inner 1024, outer 1024 is given 2 times; drop",
        ),
        (f"products = [{{{SHAPE}}}]", "ms or share, not both"),
        (f"tflops = 989\nproducts = [{{{SHAPE}, ms = 1, share = 0.5}}]", "ms or share, not"),
        (f"products = [{{{SHAPE}, share = 0.5}}]", "need the peak that they refer to: add tflops"),
        (f"products = [{{{SHAPE}, ms = 1, of = 'sideways'}}]", "of: Input should be 'forward'"),
        ("collectives = [{kind = 'gossip', ranks = 2, bytes = 8, ms = 1}]", "kind: Input should"),
        ("collectives = [{kind = 'send', ranks = 2, bytes = 8}]", r"or latency_us and gb_per_s"),
        ("copies = [{bytes = 8, gb_per_s = 1}]", r"\(given: bytes, gb_per_s\)"),
        ("sorts = []", "sorts: Extra inputs are not permitted"),
    ],
)
def test_a_table_that_cannot_be_is_told_in_one_line(tmp_path: Path, table, told):
    """Prevents plans with rates that no device has, or that are half guessed."""
    device = f"[rates.bf16]\ndevice = 'mine'\n{table}\n"
    path = write_toml(tmp_path, f"{config_toml(assumed_h100())}\n{device}")
    with pytest.raises(UserError, match=f"mine.toml: rates: bf16.*{told}") as error:
        load_cluster(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cluster", [B200, assumed_h100(), TILED], ids=lambda one: one.basis)
def test_tables_are_read_as_they_are_written(tmp_path: Path, cluster: ClusterConfig):
    """Prevents rate tables that change in a plan, or that no plan can be made with."""
    assert load_cluster(str(write_toml(tmp_path, config_toml(cluster)))) == cluster
    assert ClusterConfig.model_validate_json(cluster.model_dump_json()) == cluster


def test_shares_are_times():
    """Prevents a share of another peak, or of other operations than the source counts."""
    forward = next(one for one in RATES.products if one.of == "forward")
    flops = 2 * forward.rows * forward.inner * forward.outer
    assert flops / (forward.time_ms(2250) * 1e-3) / 2250e12 == pytest.approx(forward.share)
    sizes = 131072, 64, "backward"
    [longest] = [one for one in RATES.attention if (one.tokens, one.heads, one.of) == sizes]
    # Five products of the full square: three over q and k's 192 elements, two over v's 128, which
    # the source counts as 2.5 times forward's two.
    flops = 2.5 * 64 * 131072**2 * 2 * (192 + 128)
    assert longest.time_ms(2250) == pytest.approx(flops / (0.658 * 2250e12) * 1e3)


def test_products_are_predicted_from_the_others():
    """Prevents an interpolation no better than one rate for all products."""
    times_ms = np.array([one.time_ms(2250) for one in RATES.products])
    errors = []
    for place in range(0, len(times_ms), 7):
        others = [*RATES.products[:place], *RATES.products[place + 1 :]]
        fitted = ScatteredTimes.fit(product_shapes(others), np.delete(times_ms, place))
        [found_ms] = fitted.ms(product_shapes([RATES.products[place]]))
        errors.append(abs(found_ms / times_ms[place] - 1))
    assert np.median(errors) < 0.06 and np.quantile(errors, 0.9) < 0.2
    rates = np.array([one.flops for one in RATES.products]) / times_ms
    one_rate = np.abs(rates / np.median(rates) - 1)
    assert np.quantile(errors, 0.9) < np.quantile(one_rate, 0.9)


def test_no_product_is_faster_than_its_neighbours():
    """Prevents rates beyond measured values, which a search would settle on, and smoothing over
    measurements."""
    for one in RATES.products[::7]:
        if one.gradient == "fp32":
            found_ms = PRODUCT_TIMES.ms(one.of, one.rows, one.inner, one.outer)
            assert found_ms == pytest.approx(one.time_ms(2250))
    best = max(one.share for one in RATES.products if one.share)
    shapes = np.exp(np.random.default_rng(0).uniform(np.log(16), np.log(2e5), (300, 3)))
    for of in ("forward", "input_gradient", "weight_gradient"):
        shares = 2 * shapes.prod(axis=1) / PRODUCT_TIMES.ms(of, *shapes.T) * 1e-9 / 2250
        assert (shares <= best).all() and (shares > 1e-6).all()


@pytest.mark.parametrize("sizes", [(8192, 10240), (4096, 4096), (5120, 1536), (8192, 64128)])
@pytest.mark.parametrize("of", ["forward", "input_gradient", "weight_gradient"])
def test_lines_are_near_products_of_usual_rows(sizes, of):
    """Prevents a fit over all rows that is wrong at usual micro-batch sizes."""
    # These rows were not measured: a single kernel may be off by the scatter of kernels.
    line, rows = PRODUCT_TIMES.line(of, *sizes), np.geomspace(1000, 32000, 12)
    errors = np.abs((line.fixed_ms + rows * line.each_ms) / PRODUCT_TIMES.ms(of, rows, *sizes) - 1)
    assert np.median(errors) < 0.08 and errors.max() < 0.2


def test_attention_is_as_measured_where_all_samples_are_of_one_length_and_near_it_elsewhere():
    """Prevents short samples at the rate of long samples, few heads at the rate of many, and a
    length between two at a rate outside of both."""
    of_lengths, of_any = defaultdict(list), defaultdict(list)
    for one in RATES.attention:
        elements = one.head_size + one.value_size
        # Half of the square, in full tiles of 128 keys.
        operations = one.flops * (one.tokens / 2 + 64) / one.tokens
        for tokens, errors in ((one.tokens, of_lengths), (None, of_any)):
            line = ATTENTION_TIMES.line(one.of, elements, causal=one.causal, tokens=tokens)
            found_ms = line.fixed_ms + line.each_ms * operations
            key = (one.of, elements, one.tokens) if tokens else one.of
            errors[key].append(found_ms / one.time_ms(RATES.tflops) - 1)
    assert {tokens for *_, tokens in of_lengths} == {4096, 32768, 131072}
    for each in of_lengths.values():
        assert np.mean(np.log1p(each)) == pytest.approx(0, abs=1e-9)
    for of in ("forward", "backward"):
        errors = np.abs(of_any[of])
        assert np.median(errors) < 0.08 and errors.max() < 0.25
    each_ms = [
        ATTENTION_TIMES.line("forward", 256, causal=True, tokens=tokens).each_ms
        for tokens in (32_768, 65_536, 131_072, 10**6)
    ]
    assert each_ms[0] < each_ms[1] < each_ms[2] == each_ms[3]


def test_attention_of_one_length_is_no_line_of_tokens():
    """Prevents attention linear in tokens if a single length was measured."""
    measured = tuple(one for one in RATES.attention if one.tokens == 4096)
    line = AttentionTimes.fit(measured, 2250.0).line("forward", 256, causal=True)
    of_long = 2 * 16 * 256 * (32768**2 / 2 + 64 * 32768) * line.each_ms
    [true] = [one for one in RATES.attention if (one.tokens, one.heads) == (32768, 16)][:1]
    assert of_long == pytest.approx(true.time_ms(2250), rel=0.25)


def test_collectives_that_are_lines_cost_what_the_lines_say():
    """Prevents latencies per pass instead of per collective, and tensor bytes for sent bytes."""
    reduce = CollectiveTime(kind="all_reduce", ranks=8, latency_us=20, gb_per_s=700)
    line = collective_line([reduce], 8)
    assert 2 * line.fixed_ms == pytest.approx(0.02)
    assert line.each_ms == pytest.approx(1 / 700e6)
    exchange = CollectiveTime(kind="all_to_all", ranks=8, latency_us=10, gb_per_s=500)
    send = CollectiveTime(kind="send", ranks=2, place="network", latency_us=30, gb_per_s=40)
    assert collective_line([reduce, exchange], 8, kind="all_to_all").each_ms == pytest.approx(
        1 / 500e6
    )
    assert (
        collective_line([exchange], 8) is None and collective_line([send], 2, kind="send") is None
    )
    assert collective_line([send], 2, "network", "send").fixed_ms == pytest.approx(0.03)


def test_rates_of_another_device_are_scaled_shares(tmp_path: Path):
    """Prevents times at another device's peak, or a table that is not scaled."""
    plain = config_toml(assumed_h100().model_copy(update={"basis": "fitted"}))
    text = f"{plain}\n[rates_of]\ncluster = 'b200-180g'\nproducts = 1.1\n"
    mine = load_cluster(str(write_toml(tmp_path, text)))
    rates = mine.rates["bf16"]
    assert rates.tflops == 989 and mine.rates_of is None and not rates.collectives
    for one, other in zip(rates.products, RATES.products, strict=True):
        assert one.share == pytest.approx(min(1.1 * other.share, 1))
    assert rates.grouped == RATES.grouped
    path = write_toml(tmp_path, f"{plain}\n[rates_of]\ncluster = 'laptop-cpu'\n")
    with pytest.raises(UserError, match=r"rates_of names laptop-cpu, which has no rates"):
        load_cluster(str(path))
