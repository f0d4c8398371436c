"""Import of published kernel rates into a cluster file."""

import json
from pathlib import Path

import pytest

from omnibal.cost.shaped_rates import collective_line
from omnibal.model.config import load_cluster
from tools import import_rates


def matmul(m: int, k: int, n: int, layout: str, share: float, out: str = "bf16") -> dict:
    return {"m": m, "k": k, "n": n, "layout": layout, "out_dtype": out, "share": share}


def tables(matmuls: list[dict]) -> dict:
    """Tables in the format of SimuMax's system files."""
    attention = {
        "batch": 1, "seq_len": 4096, "head_num": 64, "kv_head_num": 8, "qk_head_dim": 128,
        "v_head_dim": 128, "qkv_contiguous": True, "share": 1.2,
    }  # fmt: skip
    group = {
        "ng": 8, "M": 256, "N": 3072, "K": 5120, "stage": "fwd", "main_grad_dtype": "bf16",
        "share": 0.2,
    }  # fmt: skip
    all_reduce = {"scale": 2, "offset": -1, "efficient_factor": 0.5, "latency_us": 6.0,
                  "fixed_latency_us": 4.0, "fixed_latency_us_by_comm_num": {"2": 14.0}}  # fmt: skip
    return {
        "source": "a table",
        "device": "a device, 8 a node",
        "operations": {
            "matmul": {"peak_tflops": 100, "measured": matmuls},
            "group_matmul": {"peak_tflops": 100, "measured": [group, group | {"share": 0.6}]},
            "sdp_fwd": {"peak_tflops": 100, "measured": [attention]},
            "sdp_bwd": {"peak_tflops": 100, "measured": []},
        },
        "memory": {"default": {"efficient_factor": 0.5, "gbps": 1000, "latency_us": 30}},
        "networks": {
            "high_intra_node": {
                "bandwidth": {"efficient_factor": 1.0, "gbps": 400, "latency_us": 35},
                "op": {
                    "all_reduce": all_reduce,
                    "all_gather": {"scale": 1, "offset": -1},
                    "p2p": {"scale": 1, "offset": 0, "efficient_factor": 2.0, "latency_us": 9},
                },
            }
        },
    }


def test_fields_mean_what_their_source_computes(tmp_path: Path, capsys):
    """Prevents gradients read as forwards, GiB as GB, and rates above the link's bandwidth."""
    given = tables(
        [
            matmul(10, 20, 30, "TN", 0.5),  # 10 tokens, 20 in, 30 out
            matmul(10, 30, 20, "NN", 0.4),
            matmul(30, 10, 20, "NT", 0.3, "fp32"),
            matmul(30, 10, 20, "NT", 0.2, "bf16"),
        ]
    )
    (tmp_path / "tables.json").write_text(json.dumps(given))
    out, base = tmp_path / "mine.toml", ["--base", "h100-80g"]
    with pytest.raises(SystemExit, match="0"):
        import_rates.main([str(tmp_path / "tables.json"), *base, "-o", str(out)])
    assert "send is left out: 859 GB/s exceeds the link's 450" in capsys.readouterr().out
    assert "# Measured, by a table" in out.read_text()
    cluster = load_cluster(str(out))
    rates = cluster.rates["bf16"]
    # The base's accuracy does not apply to imported rates.
    base = load_cluster("h100-80g").model_copy(update={"rates": {}, "accuracy": {}})
    assert cluster.model_copy(update={"rates": {}}) == base
    assert {(rate.rows, rate.inner, rate.outer) for rate in rates.products} == {(10, 20, 30)}
    assert [(rate.of, rate.gradient, rate.share) for rate in rates.products] == [
        ("forward", "fp32", 0.5),
        ("input_gradient", "fp32", 0.4),
        ("weight_gradient", "fp32", 0.3),
        ("weight_gradient", "bf16", 0.2),
    ]
    [group] = rates.grouped  # times 1 / share are averaged: 5 and 5/3
    assert group.share == pytest.approx(0.3) and group.groups == 8
    [attention] = rates.attention
    flops = 64 * 4096**2 * (2 * 128 + 2 * 128)
    assert attention.time_ms(100) == pytest.approx(flops / 120e12 * 1e3)
    line = collective_line(rates.collectives, 2)
    # An all-reduce of 2 ranks sends all bytes once, at half of 400 GiB/s, after 6 + 14 us.
    assert 2 * line.fixed_ms == pytest.approx(0.02)
    assert line.each_ms == pytest.approx(1 / (200 * 2**30) * 1e3, rel=1e-3)
    assert {rate.kind for rate in rates.collectives} == {"all_reduce"}
    assert [rate.gb_per_s for rate in rates.copies] == [pytest.approx(500 * 2**30 / 1e9, rel=1e-3)]
