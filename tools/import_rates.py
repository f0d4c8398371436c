"""Convert published tables of kernels' rates to the `rates` of a cluster file.

    python tools/import_rates.py kernels.json --base b200-180g -o b200-180g.toml

Tables are SimuMax's system files (MooreThreads/SimuMax, configs/system) as JSON: `operations`
matmul, group_matmul, sdp_fwd and sdp_bwd, `memory` and `networks`; semantics are from
simumax/core/config.py. The output is the base's text up to its first table of rates, and the
imported rates. Repeated shapes get their mean time.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from pydantic import ValidationError

from omnibal.base.errors import UserError
from omnibal.base.files import atomic, complaint, read_json_model
from omnibal.base.outputs import check_files
from omnibal.base.program import run_app
from omnibal.model.config import config_file, load_cluster, precision_rates_toml
from omnibal.model.rate_tables import (
    AttentionTime,
    CollectiveKind,
    CollectiveTime,
    CopyKind,
    CopyTime,
    GroupedTime,
    ProductPass,
    ProductTime,
    Rates,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_Kernel = TypeVar("_Kernel", ProductTime, GroupedTime, AttentionTime)

_GIB_IN_GB = 2**30 / 1e9
_RANKS = (2, 4, 8)
_STAGES: dict[str, ProductPass] = {
    "fwd": "forward",
    "bwd_grad_act": "input_gradient",
    "bwd_grad_w": "weight_gradient",
}
_COLLECTIVES: dict[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all2all": "all_to_all",
    "p2p": "send",
}
_COPIES: dict[str, CopyKind] = {
    "default": "plain",
    "permute_fwd": "permute",
    "permute_bwd": "permute_backward",
    "ce": "cross_entropy",
    "ce_fusion": "fused_cross_entropy",
}


def read_rates(tables: dict[str, Any], link_gb_per_s: float, *, kernels_only: bool) -> Rates:
    """Return the tables' rates in bf16."""
    operations = tables["operations"]
    # Shares of attention count the full square, 2 products in forward and 5 in backward.
    attention = [
        _attention(row, "forward" if name == "sdp_fwd" else "backward")
        for name in ("sdp_fwd", "sdp_bwd")
        for row in operations[name]["measured"]
    ]
    [tflops] = {float(operation["peak_tflops"]) for operation in operations.values()}
    memory = {} if kernels_only else tables["memory"]
    return Rates(
        device=tables["device"].split(",")[0],
        tflops=tflops,
        products=_merge_repeats(_product(row) for row in operations["matmul"]["measured"]),
        grouped=_merge_repeats(_group(row) for row in operations["group_matmul"]["measured"]),
        attention=_merge_repeats(attention),
        collectives=() if kernels_only else tuple(_collectives(tables["networks"], link_gb_per_s)),
        copies=tuple(
            CopyTime(kind=kind, latency_us=copy["latency_us"], gb_per_s=_gb_per_s(copy, copy))
            for name, kind in _COPIES.items()
            if (copy := memory.get(name))
        ),
    )


def _product(row: dict[str, Any]) -> ProductTime:
    m, k, n = row["m"], row["k"], row["n"]
    share, gradient = _four_digits(row["share"]), row["out_dtype"]
    match row["layout"]:
        case "TN":  # forward: m tokens, k in, n out
            return ProductTime(rows=m, inner=k, outer=n, share=share)
        case "NN":  # the input's gradient: m tokens, k out, n in
            return ProductTime(of="input_gradient", rows=m, inner=n, outer=k, share=share)
        case "NT":  # the weights' gradient: m out, k tokens, n in, accumulated in `out_dtype`
            return ProductTime(
                of="weight_gradient", gradient=gradient, rows=k, inner=n, outer=m, share=share
            )
        case layout:
            raise ValueError(f"layout {layout} is none of TN, NN and NT")


def _group(row: dict[str, Any]) -> GroupedTime:
    of = _STAGES[row["stage"]]
    return GroupedTime(
        of=of,
        gradient=row["main_grad_dtype"] if of == "weight_gradient" else "fp32",
        groups=row["ng"],  # of M rows each, K in and N out in all three stages
        rows=row["M"],
        inner=row["K"],
        outer=row["N"],
        share=_four_digits(row["share"]),
    )


def _attention(row: dict[str, Any], of: Any) -> AttentionTime:
    return AttentionTime(
        of=of,
        tokens=row["seq_len"],
        heads=row["head_num"],
        kv_heads=row["kv_head_num"],
        head_size=row["qk_head_dim"],
        value_size=row["v_head_dim"],
        packed=not row["qkv_contiguous"],
        share=_four_digits(row["share"]),
    )


def _merge_repeats(kernels: Iterable[_Kernel]) -> tuple[_Kernel, ...]:
    """Return a kernel per shape, with the mean time of its repeats."""
    shapes: dict[_Kernel, list[float]] = {}
    for kernel in kernels:
        assert kernel.share is not None
        shapes.setdefault(kernel.model_copy(update={"share": None}), []).append(kernel.share)
    # Times are inverse to shares: the mean time has their harmonic mean.
    return tuple(
        shape.model_copy(update={"share": _four_digits(len(all_) / sum(1 / s for s in all_))})
        for shape, all_ in shapes.items()
    )


def _four_digits(share: float) -> float:
    return float(f"{share:.4g}")


def _collectives(networks: dict[str, Any], link_gb_per_s: float) -> Iterator[CollectiveTime]:
    links = networks.get("high_intra_node", {"op": {}, "bandwidth": {}})
    for name, kind in _COLLECTIVES.items():
        line = links["op"].get(name, {})
        if "efficient_factor" not in line:  # not measured
            continue
        gb_per_s = _gb_per_s(links["bandwidth"], line)
        if gb_per_s > link_gb_per_s:
            print(f"{kind} is left out: {gb_per_s:.0f} GB/s exceeds the link's {link_gb_per_s:.0f}")
            continue
        by_ranks = line.get("fixed_latency_us_by_comm_num", {})
        for ranks in (2,) if kind == "send" else _RANKS:
            fixed_us = by_ranks.get(str(ranks), line.get("fixed_latency_us", 0.0))
            yield CollectiveTime(
                kind=kind,
                ranks=ranks,
                latency_us=round(line["latency_us"] + fixed_us, 2),
                gb_per_s=gb_per_s,
            )


def _gb_per_s(bandwidth: dict[str, Any], line: dict[str, Any]) -> float:
    # SimuMax: latency + bytes x scale x (ranks + offset) / ranks / (gbps x efficient_factor), with
    # a rate in GiB/s of bytes sent by a rank.
    return _four_digits(bandwidth["gbps"] * line["efficient_factor"] * _GIB_IN_GB)


def cluster_text(base: str, rates: Rates, source: str) -> str:
    """Return the text of a cluster file: the base's, with its rates replaced."""
    lines = base.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("[rates")] or [len(lines)]
    # Drop the comments above the base's rates too.
    while starts[0] and (not lines[starts[0] - 1] or lines[starts[0] - 1].startswith("#")):
        starts[0] -= 1
    note = f"# Measured, by {' '.join(source.split())}; imported by tools/import_rates.py."
    return "\n".join([*lines[: starts[0]], "", note, precision_rates_toml("bf16", rates)])


def _read_tables(path: Path) -> dict[str, Any]:
    remedy = "give tables of SimuMax's system files, as JSON"
    tables = read_json_model(dict[str, Any], path, remedy)
    if not {"source", "device", "operations"} <= tables.keys():
        raise UserError(f"{path}: has no source, device and operations; {remedy}")
    return tables


@app.command(help=__doc__.split("\n\n")[0])
def import_rates(
    file: Annotated[Path, typer.Argument(metavar="TABLES", help="JSON file to read")],
    output: Annotated[Path, typer.Option("--output", "-o", help="TOML file to write")],
    base: Annotated[str, typer.Option(help="preset or cluster file for all other settings")],
    kernels_only: Annotated[
        bool,
        typer.Option(
            "--kernels-only",
            help="leave out copies and collectives, if memory and links are not the base's",
        ),
    ] = False,
) -> None:
    base_file = config_file("clusters", base)
    check_files({"--output": output}, [file, base_file])
    link_gb_per_s, tables = load_cluster(base).intra_node_gb_per_s, _read_tables(file)
    try:
        rates = read_rates(tables, link_gb_per_s, kernels_only=kernels_only)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"{type(error).__name__} {error}"
        if isinstance(error, ValidationError):
            message = complaint(error.errors()[0])
        raise UserError(f"{file}: {message}; compare with SimuMax's system files") from error
    text = cluster_text(base_file.read_text(encoding="utf-8"), rates, str(tables["source"]))
    with atomic(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(
        f"{output}: {len(rates.products)} products, {len(rates.grouped)} grouped, "
        f"{len(rates.attention)} of attention, {len(rates.collectives)} collectives"
    )


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    run_app(app, "import_rates.py", arguments)


if __name__ == "__main__":
    main()
