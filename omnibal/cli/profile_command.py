"""`omnibal profile`: measure the model's layers on this device (in processes with torch)."""

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import omnibal.cli.command_tables as tables
import omnibal.cli.options as shared
from omnibal.base.errors import UserError
from omnibal.base.files import atomic
from omnibal.base.frozen import MAX_LAYERS
from omnibal.base.outputs import check_files
from omnibal.cli.console import print_result
from omnibal.data.lengths import length_files, read_lengths
from omnibal.families.named import named_model, named_model_file
from omnibal.model.config import PlainPrecision, config_file, config_toml, load_cluster
from omnibal.model.limits import check_limits

_MAX_REPETITIONS = 10_000  # hours of timing; more is a typo


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureOptions:
    max_tokens: Annotated[int, shared.count_option("max language tokens per pack")]
    max_tiles: shared.NeededMaxTilesOption = None
    limit: shared.LimitOption = None
    tokens_per_sample: Annotated[
        int | None, shared.count_option("of a typical sample (default: mean of --lengths)")
    ] = None
    lengths: Annotated[
        list[Path] | None, typer.Option(help="file of `omnibal lengths` (repeatable)")
    ] = None
    data: Annotated[
        Path | None, typer.Option(help="samples to read meanwhile, to time reading")
    ] = None
    tokenizer_model: shared.TokenizerOption = None
    layers: Annotated[
        int | None,
        shared.count_option("layers of each tower to build (default: few)", most=MAX_LAYERS),
    ] = None
    repetitions: Annotated[
        int | None,
        shared.count_option("timed runs of each pack (default: few)", most=_MAX_REPETITIONS),
    ] = None
    provider: shared.ProviderOption = "local"
    processes: Annotated[
        int, shared.count_option("processes (devices) that measure", most=shared.MOST_PROCESSES)
    ] = 1
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"{shared.PRESET} or TOML to extend")
    ] = None
    cluster_output: Annotated[
        Path | None, typer.Option(help="TOML to write: --cluster with rates")
    ] = None

    def typical_tokens(self) -> int:
        """Return tokens of a typical sample: as given, or the lengths' mean. Raises UserError."""
        if self.tokens_per_sample is not None:
            return self.tokens_per_sample
        if not self.lengths:
            raise UserError("attention needs sample lengths: give --tokens-per-sample or --lengths")
        return round(read_lengths(self.lengths).tokens.mean())

    def data_files(self) -> list[Path]:
        """Return data and tokenizer files, empty if neither is given. Raises UserError."""
        from omnibal.data.annotations import Annotations
        from omnibal.data.tokenizer import list_tokenizer_files, open_tokenizer

        _require_both_or_none(
            {"--data": self.data, "--tokenizer-model": self.tokenizer_model},
            "samples are read with a tokenizer",
        )
        if self.data is None or self.tokenizer_model is None:
            return []
        open_tokenizer(self.tokenizer_model)
        return [
            self.data,
            *Annotations.open(self.data).files,
            *list_tokenizer_files(self.tokenizer_model),
        ]


def _require_both_or_none(values: Mapping[str, object], reason: str) -> None:
    """Raise UserError, with the reason, if only some of the options are given."""
    given = [name for name, value in values.items() if value is not None]
    missing = [name for name, value in values.items() if value is None]
    if given and missing:
        raise UserError(f"{given[0]} was given without {missing[0]}; {reason}: give both or none")


def profile(
    model: shared.ModelOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="profile.json to write")],
    measured: MeasureOptions,
    precision: Annotated[PlainPrecision, typer.Option(help="fp8 is not measured")] = "bf16",
    as_json: shared.JsonOption = False,
) -> None:
    """Measure the model's layers on this device, and fit costs."""
    from omnibal.cost.profile import fit_residuals, read_profile, with_measured_rates
    from omnibal.job.check import model_obstacle

    for module, package in (("torch", "torch"), ("megatron.core", "megatron-core")):
        if importlib.util.find_spec(module) is None:
            raise UserError(f'{package} is not installed; install it with: pip install ".[train]"')
    # Check all inputs here: later every process would report the same mistake.
    lengths = length_files(measured.lengths or [])
    presets = [] if measured.cluster is None else [config_file("clusters", measured.cluster)]
    inputs = [named_model_file(model), *lengths, *measured.data_files(), *presets]
    check_files({"-o": output, "--cluster-output": measured.cluster_output}, inputs)
    _require_both_or_none(
        {"--cluster": measured.cluster, "--cluster-output": measured.cluster_output},
        "a cluster file needs the cluster to add measured rates to, and the file to write",
    )
    base = None if measured.cluster is None else load_cluster(measured.cluster)
    profiled_model = named_model(model)
    caps = shared.limits_given(measured.limit, measured.max_tiles, measured.max_tokens)
    obstacle = model_obstacle(profiled_model)
    if obstacle is not None:
        raise UserError(f"{obstacle}, so it cannot be measured: plan it without --profile")
    check_limits(caps, profiled_model.item_features, profiled_model.name)
    tokens_per_sample = measured.typical_tokens()
    for path in filter(None, (output, measured.cluster_output)):
        path.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "--model": model,
        "--precision": precision,
        "--max-tiles": caps.get("tiles"),
        "--max-clips": caps.get("clips"),
        "--max-image-tokens": caps.get("image_tokens"),
        "--max-tokens": caps["tokens"],
        "--tokens-per-sample": tokens_per_sample,
        "--layers": measured.layers,
        "--repetitions": measured.repetitions,
        "--provider": measured.provider,
        "--data": measured.data,
        "--tokenizer-model": measured.tokenizer_model,
    }
    # One process per device: all devices of a node are busy during training too.
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={measured.processes}"]
    command = [sys.executable, "-m", *launcher, "-m", "megatron.vlm.measure.profiler"]
    for name, value in options.items():
        command += [] if value is None else [name, str(value)]
    with atomic(output) as written:
        command += ["--output", str(written)]
        # The program's output goes to stderr: stdout is for the result.
        returncode = subprocess.run(command, check=False, stdout=sys.__stderr__).returncode
        if returncode:
            raise typer.Exit(returncode)
        result = read_profile(written)
        residuals = fit_residuals(result, profiled_model)
    if base is not None and measured.cluster_output is not None:
        with atomic(measured.cluster_output) as written:
            written.write_text(config_toml(with_measured_rates(base, result)))
    print_result(
        as_json,
        {
            "profile": output,
            "provider": result.provider,
            "residuals": residuals,
        },
        tables.residuals_table(residuals, result.provider),
    )
