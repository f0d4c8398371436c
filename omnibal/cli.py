"""The `omnibal` command: parse, call the library, print.

Results go to stdout, as tables or with `--json` as one JSON object; progress and errors to stderr.
What only one command needs is imported there, so that `omnibal --help` stays fast.
"""

import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from omnibal import __version__, tables
from omnibal.config import (
    MAX_COUNT,
    MAX_LAYERS,
    MAX_TILES_OF_IMAGE,
    ClusterConfig,
    ModelConfig,
    Part,
    Precision,
    cluster_file,
    load_cluster,
    load_model,
    model_file,
    preset_names,
)
from omnibal.data.lengths import Lengths, length_files, read_lengths, write_lengths
from omnibal.data.metrics import measure_packs
from omnibal.data.packing import PackingMethod
from omnibal.data.packs import Packs, write_packs
from omnibal.data.steps import DataRequest, deal_steps, draw_steps
from omnibal.errors import DoesNotFit, UserError
from omnibal.files import atomic, is_stream
from omnibal.limits import (
    MAX_PACKS_PER_STEP,
    USABLE_MEMORY_FRACTION,
    Caps,
    check_packs_per_step,
    memory_cap_gib,
)
from omnibal.outputs import check_files, check_folder
from omnibal.parallel import MAX_DEVICES, Parallel
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule
from omnibal.pipeline.prediction import Prediction
from omnibal.plan import MAX_EPOCHS, MAX_SEED, Plan, plan_files
from omnibal.program import run_app
from omnibal.runlog import RUN_FILE, run_files

if TYPE_CHECKING:
    from omnibal.planner import PlanRequest, PlanResult
    from omnibal.strategy import Strategy, StrategySearch

app = typer.Typer(name="omnibal", add_completion=False, pretty_exceptions_enable=False)

DEFAULT_MICRO_BATCHES = 8
DEFAULT_CAP_SAMPLES = 20_000
_DATA_OPTIONS = (
    "lengths max_tiles max_tokens micro_batches epochs seed packing".split()  # of `omnibal plan`
)
_MOST_PROCESSES = 1_024
_MOST_REPETITIONS = 10_000
_MOST_GIB = 1e9
"""Of memory, and of a network's rate in GB/s."""
_PARQUET_MAGIC = b"PAR1"
_CAPS_NEEDED = (
    "the caps of a pack are two numbers: give both --max-tiles and --max-tokens, or neither, with "
    "--lengths, to have them searched for"
)
_STRATEGY_OPTIONS = "micro_batches sequence_parallel steps_of method recompute".split()


def _preset_help(kind: str) -> str:
    return f"{kind} preset (`omnibal presets` lists them) or TOML file"


ModelOption = Annotated[str, typer.Option("--model", help=_preset_help("model"))]
ClusterOption = Annotated[str, typer.Option(help=_preset_help("cluster"))]
ProfileOption = Annotated[
    Path | None, typer.Option(help="profile.json to take costs from, in place of counting")
]
PackingRuleOption = Annotated[PackingMethod, typer.Option(help="packing rule")]
LengthsOption = Annotated[
    list[Path], typer.Argument(metavar="LENGTHS...", help="Parquet or OmniBal JSON files")
]
MaxTilesOption = Annotated[
    int, typer.Option(min=1, max=MAX_COUNT, help="image tiles that a pack may hold")
]
MaxTokensOption = Annotated[
    int, typer.Option(min=1, max=MAX_COUNT, help="language tokens that a pack may hold")
]
OptionalMaxTilesOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_COUNT, help="image tiles that a pack may hold (default: searched for)"
    ),
]
OptionalMaxTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_COUNT, help="language tokens that a pack may hold (default: searched for)"
    ),
]
MicroBatchesOption = Annotated[
    int, typer.Option(min=1, max=MAX_PACKS_PER_STEP, help="packs of one rank in a step")
]
PackingOption = Annotated[PackingMethod, typer.Option("--packing", "--method", help="packing rule")]
PrecisionOption = Annotated[Precision, typer.Option(help="of weights and activations")]
SeedOption = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="of packs and order")]
TensorOption = Annotated[int, typer.Option(min=1, max=MAX_DEVICES, help="tensor-parallel size")]
PipelineOption = Annotated[
    int, typer.Option(min=1, max=MAX_DEVICES, help="pipeline-parallel size (stages)")
]
DataOption = Annotated[int, typer.Option(min=1, max=MAX_DEVICES, help="data-parallel size")]
ChosenTensorOption = Annotated[
    int | None,
    typer.Option("--tp", min=1, max=MAX_DEVICES, help="tensor-parallel size (default: 1)"),
]
ChosenPipelineOption = Annotated[
    int | None,
    typer.Option(
        "--pp", min=1, max=MAX_DEVICES, help="pipeline-parallel size, stages (default: 1)"
    ),
]
ChosenDataOption = Annotated[
    int | None,
    typer.Option("--dp", min=1, max=MAX_DEVICES, help="data-parallel size (default: 1)"),
]
SequenceOption = Annotated[
    bool | None,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel",
        help="divide the language model's activations between parallel blocks too (default: with "
        "--tp above 1)",
    ),
]
FreezeOption = Annotated[
    list[Part] | None, typer.Option(help="part that is not trained (may be repeated)")
]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        help="memory of a device, in place of the cluster's; "
        f"{USABLE_MEMORY_FRACTION:.0%} of it is used for planning",
    ),
]
NetworkOption = Annotated[
    float | None,
    typer.Option(
        min=0.001, help="between nodes, per device, in place of the cluster's (200 Gb/s are 25)"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; a user's mistake is one line on stderr and exit status 2."""
    run_app(app, "omnibal", arguments)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Plan the training of vision-language models: packs, pipeline stages, recomputation."""
    if version:
        sys.stdout.write(f"omnibal {__version__}\n")
    elif context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


@app.command()
def lengths(
    meta: Annotated[Path, typer.Argument(help="InternVL meta JSON that names the annotations")],
    model: ModelOption,
    tokenizer_model: Annotated[
        Path,
        typer.Option(
            help="SentencePiece tokenizer.model, Hugging Face tokenizer.json, or a folder: there "
            "tokenizer.json if it exists, else tokenizer.model"
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write")],
    max_dynamic_patch: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_TILES_OF_IMAGE, help="tiles of one image, in place of the model's"
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST_PROCESSES,
            help="that scan at the same time (default: usable cores)",
        ),
    ] = None,
    on_error: Annotated[
        Literal["stop", "skip"],
        typer.Option(help="bad samples: name the first and stop, or leave out and list them all"),
    ] = "stop",
    as_json: JsonOption = False,
) -> None:
    """Scan a dataset: tiles and tokens of every sample, from image headers and text."""
    from omnibal.data.annotations import Annotations
    from omnibal.data.scan import scan_key, scan_lengths, skipped_notes, write_skipped
    from omnibal.data.scan_journal import ScanJournal
    from omnibal.data.scan_pool import usable_cores
    from omnibal.data.tokenizer import open_tokenizer, tokenizer_files

    start = time.perf_counter()
    keeps_files = not is_stream(output)
    skipped_list = output.with_name(f"{output.name}.skipped.txt")
    partial = output.with_name(f"{output.name}.partial")
    outputs: dict[str, Path | None] = {"-o": output}
    if keeps_files:
        outputs |= {"the list beside -o": skipped_list, "the journal beside -o": partial}
    _check_earlier_lengths(output)
    check_files(outputs, [meta, model_file(model), *tokenizer_files(tokenizer_model)])
    config = _with_max_dynamic_patch(load_model(model), max_dynamic_patch)
    tokenizer = open_tokenizer(tokenizer_model)
    annotations = Annotations.open(meta)
    check_files(outputs, annotations.files)
    output.parent.mkdir(parents=True, exist_ok=True)
    key = scan_key(annotations, config, tokenizer)
    journal = ScanJournal.open(partial, key) if keeps_files else None
    for note in journal.notes(len(annotations)) if journal else ():
        sys.stderr.write(f"{note}\n")
    try:
        with _progress("scanning", len(annotations)) as advance:
            scan = scan_lengths(
                annotations, config, tokenizer, advance, processes=processes or usable_cores(),
                on_error=on_error, journal=journal,
            )  # fmt: skip
    except KeyboardInterrupt as error:
        sys.stderr.write("interrupted: run the same command again to resume\n")
        raise typer.Exit(128 + signal.SIGINT) from error
    if keeps_files:
        write_skipped(scan.skipped, skipped_list)
    write_lengths(scan.lengths, output)
    if journal is not None:
        journal.remove()
    for note in skipped_notes(scan.skipped, skipped_list if keeps_files else None):
        sys.stderr.write(f"{note}\n")
    result = {
        "samples": len(scan.lengths),
        "seconds": time.perf_counter() - start,
        "skipped": len(scan.skipped),
        "skipped_list": str(skipped_list) if scan.skipped and keeps_files else None,
        "sources": tables.source_statistics(scan.lengths),
    }
    _print_result(as_json, result, tables.lengths_table(scan.lengths))


@app.command()
def pack(  # noqa: PLR0913 (one parameter per option)
    lengths: LengthsOption,
    max_tiles: MaxTilesOption,
    max_tokens: MaxTokensOption,
    dp: Annotated[int, typer.Option(min=1, max=MAX_DEVICES, help="data-parallel ranks")],
    micro_batches: MicroBatchesOption = DEFAULT_MICRO_BATCHES,
    packing: PackingOption = PackingMethod.BALANCED,
    seed: SeedOption = 0,
    model: Annotated[
        str, typer.Option(help=f"whose predicted time is balanced: {_preset_help('model')}")
    ] = "internvl-chat-1.5-6b-20b",
    cluster: Annotated[
        str, typer.Option(help=f"on which that is predicted: {_preset_help('cluster')}")
    ] = "a100-80g",
    bound: Annotated[
        bool, typer.Option(help="prove how many packs are needed at least, or only add up sizes")
    ] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Parquet file to write")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="SVG file to draw: load of ranks before and after")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Pack samples under two caps, match packs into steps, share them out, and measure it all."""
    from omnibal.cap_search import isf_note
    from omnibal.cost.analytic import analytic_cost
    from omnibal.cost.model import pack_features
    from omnibal.data.bound import naive_lower_bound, packs_lower_bound
    from omnibal.pipeline.stage_cost import model_ms
    from omnibal.report.loads import LoadSetting, write_loads

    inputs = [*length_files(lengths), model_file(model), cluster_file(cluster)]
    check_files({"-o": output, "--picture": picture}, inputs)
    _check_picture(picture)
    check_packs_per_step(dp, micro_batches)
    config, hardware = load_model(model), load_cluster(cluster)
    parallel = Parallel(pipeline=1, data=dp)
    cost = analytic_cost(config, hardware, parallel, "bf16")
    samples = read_lengths(lengths)
    caps = Caps(max_tiles=max_tiles, max_tokens=max_tokens)
    request = DataRequest(
        caps=caps,
        method=packing,
        seed=seed,
        epochs=1,
        packs_per_step=dp * micro_batches,
        alike=dp,
    )

    def load(packs: Packs) -> np.ndarray:
        return model_ms(cost, config, pack_features(packs, samples))

    start = time.perf_counter()
    packs = deal_steps(draw_steps(samples, request, load), samples, load, dp)
    seconds = time.perf_counter() - start
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_packs(packs, output)
    if picture is not None:
        setting = LoadSetting(model=config, cluster=hardware, cost=cost, request=request, dp=dp)
        write_loads(setting, packs, samples, picture)
    with _status("proving how many packs are needed"):
        least = naive_lower_bound(samples, caps)
        if bound:
            fewest = int(np.bincount(packs.epoch).min())
            least = packs_lower_bound(samples, caps, found=fewest)
    metrics = measure_packs(packs, samples, caps, dp, load(packs.packs), least)
    if packing is PackingMethod.ISF and (note := isf_note(samples, caps, seed)) is not None:
        sys.stderr.write(f"note: {note}\n")
    result = asdict(metrics) | {"seconds": seconds, "load": cost.source, "model": config.name}
    _print_result(as_json, result, tables.packs_table(metrics, f"{config.name}, {cost.source}"))


@app.command()
def caps(  # noqa: PLR0913 (one parameter per option)
    lengths: LengthsOption,
    model: ModelOption,
    cluster: ClusterOption,
    tp: TensorOption = 1,
    pp: PipelineOption = 1,
    dp: DataOption = 1,
    sequence_parallel: SequenceOption = None,
    freeze: FreezeOption = None,
    samples_per_step: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            help="of all ranks, at which caps are compared "
            f"(default: 4.5 samples x {DEFAULT_MICRO_BATCHES} micro-batches x dp)",
        ),
    ] = None,
    rule: Annotated[
        Literal["time", "paper"],
        typer.Option(
            help="least predicted time per sample, or the OmniBal paper's: 4 to 5 samples in a "
            "pack and least imbalance"
        ),
    ] = "time",
    packing: PackingRuleOption = PackingMethod.BALANCED,
    precision: PrecisionOption = "bf16",
    profile: ProfileOption = None,
    memory_gib: MemoryOption = None,
    network_gb_per_s: NetworkOption = None,
    samples: Annotated[
        int,
        typer.Option(min=1, max=MAX_COUNT, help="drawn to try caps on; more where steps are large"),
    ] = DEFAULT_CAP_SAMPLES,
    seed: SeedOption = 0,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST_PROCESSES,
            help="that try caps at the same time (default: all cores)",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose the caps, --max-tiles and --max-tokens: the least predicted time that fits."""
    from omnibal import cap_search
    from omnibal.cost.profile import read_profile
    from omnibal.data.scan_pool import usable_cores

    start = time.perf_counter()
    hardware = _cluster(cluster, memory_gib, network_gb_per_s)
    request = cap_search.CapSearchRequest(
        model=load_model(model),
        cluster=hardware,
        parallel=_parallel(tp, pp, dp, sequence_parallel),
        frozen=_frozen(freeze),
        precision=precision,
        lengths=read_lengths(lengths),
        packing=packing,
        samples_per_step=samples_per_step
        or cap_search.usual_samples_per_step(dp, DEFAULT_MICRO_BATCHES),
        samples=samples,
        seed=seed,
        profile=read_profile(profile) if profile else None,
        rule=cap_search.CapRule(rule),
    )
    with _progress("trying caps", cap_search.MAX_CANDIDATES) as advance:
        found = cap_search.search_caps(request, advance, processes or usable_cores())
    for note in cap_search.notes(request, found):
        sys.stderr.write(f"note: {note}\n")
    reasons = [reason.split(";")[0] for reason in found.infeasible.values()]
    unusable = [f"{len(reasons)} other caps cannot be used: {reasons[0]}"] if reasons else []
    result = {
        "max_tiles": found.best.max_tiles,
        "max_tokens": found.best.max_tokens,
        "rule": rule,
        "candidates": [asdict(candidate) for candidate in found.candidates],
        "infeasible": [
            {**each.model_dump(), "reason": reason} for each, reason in found.infeasible.items()
        ],
        "seconds": time.perf_counter() - start,
    }
    _print_result(
        as_json,
        result,
        tables.caps_table(found, memory_cap_gib(hardware)),
        *unusable,
        f"use: --max-tiles {found.best.max_tiles} --max-tokens {found.best.max_tokens}",
    )


@app.command()
def profile(  # noqa: PLR0913 (one parameter per option)
    model: ModelOption,
    max_tiles: MaxTilesOption,
    max_tokens: MaxTokensOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="profile.json to write")],
    tokens_per_sample: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_COUNT, help="of a typical sample [default: the mean of --lengths]"
        ),
    ] = None,
    lengths: Annotated[list[Path] | None, typer.Option(help="lengths (may be repeated)")] = None,
    precision: PrecisionOption = "bf16",
    processes: Annotated[
        int, typer.Option(min=1, max=_MOST_PROCESSES, help="that measure at the same time")
    ] = 1,
    layers: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_LAYERS, help="layers of each tower to build [default: few]"),
    ] = None,
    repetitions: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST_REPETITIONS, help="timed runs of each pack [default: few]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the model's layers on this device, and show how well the costs fit."""
    from omnibal.cost.profile import fit_residuals, read_profile

    for module, package in (("torch", "torch"), ("megatron.core", "megatron-core")):
        if not _is_installed(module):
            raise UserError(
                f"{package} is not installed, and `omnibal profile` runs the model's layers; "
                'install it with: pip install ".[train]" in its repository'
            )
    # A mistake is found here, before several processes start and each reports it.
    check_files({"-o": output}, [model_file(model), *length_files(lengths or [])])
    load_model(model)
    if tokens_per_sample is None:
        if not lengths:
            raise UserError(
                "attention's cost depends on the samples' length: give --tokens-per-sample, or "
                "--lengths to take the mean of"
            )
        tokens_per_sample = round(read_lengths(lengths).tokens.mean())
    output.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "--model": model,
        "--precision": precision,
        "--max-tiles": max_tiles,
        "--max-tokens": max_tokens,
        "--tokens-per-sample": tokens_per_sample,
        "--layers": layers,
        "--repetitions": repetitions,
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launcher, "-m", "megatron.vlm.profiler"]
    for name, value in options.items():
        command += [] if value is None else [name, str(value)]
    with atomic(output) as written:
        command += ["--output", str(written)]
        # Whatever the programs print is progress: stdout is for the result.
        returncode = subprocess.run(command, check=False, stdout=sys.__stderr__).returncode
        if returncode:
            raise typer.Exit(returncode)
        residuals = fit_residuals(read_profile(written))
    _print_result(
        as_json,
        {"profile": str(output), "residuals": [asdict(residual) for residual in residuals]},
        tables.residuals_table(residuals),
    )


@app.command()
def plan(  # noqa: PLR0913 (one parameter per option)
    context: typer.Context,
    model: ModelOption,
    cluster: ClusterOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="plan directory to write")],
    max_tiles: OptionalMaxTilesOption = None,
    max_tokens: OptionalMaxTokensOption = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_DEVICES,
            help="devices to choose parallel sizes for; any of --tp, --pp and --dp that is given "
            "stays as it is",
        ),
    ] = None,
    tp: ChosenTensorOption = None,
    pp: ChosenPipelineOption = None,
    dp: ChosenDataOption = None,
    sequence_parallel: SequenceOption = None,
    freeze: FreezeOption = None,
    lengths: Annotated[
        list[Path] | None,
        typer.Option(help="lengths of the data (may be repeated); without, a plan of shapes only"),
    ] = None,
    profile: ProfileOption = None,
    micro_batches: MicroBatchesOption = DEFAULT_MICRO_BATCHES,
    samples_per_step: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            help="of all ranks, with --gpus; strategies are compared at so many (default: 36 for "
            "every node)",
        ),
    ] = None,
    epochs: Annotated[
        int, typer.Option(min=1, max=MAX_EPOCHS, help="times that every sample is trained")
    ] = 1,
    seed: SeedOption = 0,
    precision: PrecisionOption = "bf16",
    memory_gib: MemoryOption = None,
    network_gb_per_s: NetworkOption = None,
    packing: PackingRuleOption = PackingMethod.BALANCED,
    method: Annotated[
        PartitionMethod, typer.Option(help="how the model is split over stages")
    ] = PartitionMethod.OMNIBAL,
    recompute: Annotated[
        RecomputeRule | None,
        typer.Option(
            help="which layers are recomputed [default: cheapest with omnibal, front with others]"
        ),
    ] = None,
    steps_of: Annotated[
        Path | None,
        typer.Option(
            help="plan directory whose data to keep, step by step, so that its run can go on with "
            "other parallel sizes"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make the plan: packs, pipeline stages, recomputed layers, and what to expect of them."""
    from omnibal.check import open_plan, training_obstacles
    from omnibal.cost.profile import read_profile
    from omnibal.planner import PlanRequest, check_replaceable, data_settings, save_plan

    check_replaceable(output)
    check_folder("-o", output, _plan_inputs(model, cluster, profile, lengths, steps_of))
    job: dict[str, Any] = {
        "model": load_model(model),
        "cluster": _cluster(cluster, memory_gib, network_gb_per_s),
        "frozen": _frozen(freeze),
        "precision": precision,
        "profile": read_profile(profile) if profile else None,
    }
    samples = read_lengths(lengths) if lengths else None
    given = (max_tiles, max_tokens)
    caps = None if given == (None, None) else _both_caps(*given)
    found = None
    if gpus is not None:
        _refuse_given(context, _STRATEGY_OPTIONS, "--gpus chooses that")
        sizes = {"tensor": tp, "pipeline": pp, "data": dp}
        found = _find_strategy(
            {**job, **sizes, "gpus": gpus, "caps": caps, "packing": packing, "seed": seed},
            samples,
            samples_per_step,
        )
        caps, micro_batches = found.best.caps, found.best.micro_batches
        job["parallel"] = found.best.parallel
    else:
        _refuse_given(context, ("samples_per_step",), "it goes with --gpus")
        job["parallel"] = _parallel(tp or 1, pp or 1, dp or 1, sequence_parallel)
    if steps_of is not None:
        _refuse_given(context, _DATA_OPTIONS, "--steps-of takes that from its plan")
        earlier = open_plan(steps_of)
        data = data_settings(earlier.plan, earlier.data)
    else:
        data = {
            "caps": caps or _find_caps(job, samples, packing, micro_batches, seed),
            "lengths": samples,
            "packing": packing,
            "packs_per_step": job["parallel"].data * micro_batches,
            "epochs": epochs,
            "seed": seed,
        }
    if recompute is None:
        is_joint = method is PartitionMethod.OMNIBAL
        recompute = RecomputeRule.CHEAPEST if is_joint else RecomputeRule.FRONT
    request = PlanRequest(**job, **data, method=method, recompute=recompute)
    if found is None:
        result = _make_plan(request)
    else:
        result, found = _make_plan_of_strategy(request, found)
    save_plan(result, output)
    gap = None if result.search is None else result.search.gap
    notes = training_obstacles(result.plan)
    if gap:
        notes.append(
            f"the search ended before its proof: stages that are up to {gap:.2%} faster may exist"
        )
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    prediction = result.plan.prediction
    assert prediction is not None
    summary = _plan_summary(result.plan, prediction) | {"search_gap": gap}
    strategies = []
    if found is not None:
        summary["strategies"] = [
            {**asdict(strategy), **_models_dumped(strategy)} for strategy in found.ranking
        ]
        strategies = [tables.strategy_table(found, memory_cap_gib(result.plan.cluster))]
    _print_result(
        as_json,
        summary,
        *strategies,
        tables.stages_table(result.plan, prediction),
        tables.memory_table(result.plan, prediction),
        tables.lost_time_table(prediction),
        tables.plan_table(result.plan, prediction),
    )


@app.command()
def presets(as_json: JsonOption = False) -> None:
    """List the models and clusters that can be named."""
    models = [load_model(name) for name in preset_names("models")]
    clusters = [load_cluster(name) for name in preset_names("clusters")]
    result = {
        "models": [model.model_dump(mode="json") for model in models],
        "clusters": [cluster.model_dump(mode="json") for cluster in clusters],
    }
    _print_result(as_json, result, tables.models_table(models), tables.clusters_table(clusters))


@app.command()
def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="plan directory")],
    as_json: JsonOption = False,
) -> None:
    """Prove that training can follow a plan, or say why not."""
    from omnibal.check import check_and_open, training_obstacles

    files, passed = check_and_open(directory)
    notes = training_obstacles(files.plan)
    lines = [f"ok: {sentence}" for sentence in passed] + [f"note: {note}" for note in notes]
    _print_result(as_json, {"passed": passed, "notes": notes}, *lines)


@app.command()
def simulate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="plan directory")],
    trace: Annotated[
        Path | None, typer.Option(help="Chrome trace of a step to write, for Perfetto")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_COUNT, help="that the trace shows (default: the slowest)"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate all steps of a plan on its own packs."""
    from omnibal.check import open_plan
    from omnibal.cost.model import pack_features
    from omnibal.pipeline.simulate import simulate_run
    from omnibal.pipeline.workload import Workload
    from omnibal.report.trace import chrome_trace

    check_files({"--trace": trace}, plan_files(directory))
    files = open_plan(directory)
    planned, cost, (packs, samples) = files.plan, files.cost, files.steps
    features = pack_features(packs.packs, samples)
    workload = Workload.of(packs, features, planned.parallel.data)
    with _status("simulating"):
        steps = simulate_run(cost, planned.stages, workload)
    shown = int(steps.step_ms.argmax()) if step is None else step
    if shown >= packs.steps:
        raise UserError(
            f"--step {shown} was given, and the plan has steps 0 to {packs.steps - 1}; give one of "
            "these"
        )
    if trace is not None:
        events = chrome_trace(cost, planned.stages, workload, shown)
        trace.parent.mkdir(parents=True, exist_ok=True)
        with atomic(trace) as temporary:
            temporary.write_text(json.dumps(events) + "\n")
    result = {
        "steps": packs.steps,
        "step_ms_mean": float(steps.step_ms.mean()),
        "step_ms_median": float(np.median(steps.step_ms)),
        "step_ms_min": float(steps.step_ms.min()),
        "step_ms_max": float(steps.step_ms.max()),
        "slowest_step": int(steps.step_ms.argmax()),
        "busy_fraction": (steps.busy_ms.sum(axis=0) / steps.step_ms.sum()).tolist(),
        "trace": None if trace is None else str(trace),
        "trace_step": None if trace is None else shown,
    }
    _print_result(as_json, result, tables.simulation_table(result))


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="plan directory")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write")],
    run: Annotated[
        Path | None, typer.Option(help="directory of the run trained from it (its --save)")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="directory of its replay (the -o of tools/replay.py)")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a page that shows the plan, and beside it what its replay and its run took."""
    from omnibal.check import open_plan
    from omnibal.replay import replay_files
    from omnibal.report import write_report
    from omnibal.report.summary import replay_figures

    trained = _run_directory(run)
    inputs = [*plan_files(directory)]
    inputs += [] if trained is None else run_files(trained)
    inputs += [] if replay is None else replay_files(replay)
    check_files({"-o": output}, inputs)
    shown = write_report(open_plan(directory), trained, output, replay)
    result: dict[str, Any] = {}
    if shown.replay is not None:
        result["replay"] = replay_figures(shown.plan, shown.replay)
    if shown.run is not None:
        result["run"] = asdict(shown.run)
        if shown.plan.prediction is not None:
            result["predicted_step_ms"] = shown.plan.prediction.step_ms
    if shown.evaluation is not None:
        result["accuracy"] = {kind.kind: kind.accuracy for kind in shown.evaluation.kinds}
        result["chance"] = {kind.kind: kind.chance for kind in shown.evaluation.kinds}
    result["report"] = str(output)
    measured = []
    if shown.replay is not None or shown.run is not None:
        measured = [tables.run_table(shown.plan, shown.run, shown.replay, shown.evaluation)]
    _print_result(as_json, result, *measured, f"report: {output}")


def _cluster(name: str, memory_gib: float | None, network_gb_per_s: float | None) -> ClusterConfig:
    """The cluster, with what was given in place of its own figures."""
    given = {"memory_gib": memory_gib, "inter_node_gb_per_s": network_gb_per_s}
    changes = {field: value for field, value in given.items() if value is not None}
    for field, value in changes.items():
        if not (math.isfinite(value) and value <= _MOST_GIB):
            option = {"memory_gib": "--memory-gib", "inter_node_gb_per_s": "--network-gb-per-s"}
            raise UserError(
                f"{option[field]} {value}: must be a finite number of at most {_MOST_GIB:,.0f}; "
                "give one"
            )
    return load_cluster(name).model_copy(update=changes)


def _parallel(tp: int, pp: int, dp: int, sequence_parallel: bool | None) -> Parallel:
    if sequence_parallel and tp == 1:
        raise UserError(
            "--sequence-parallel was given with --tp 1; it divides activations over tensor ranks, "
            "of which there must be at least 2: raise --tp, or leave it out"
        )
    divides = tp > 1 if sequence_parallel is None else sequence_parallel
    return Parallel(tensor=tp, pipeline=pp, data=dp, sequence_parallel=divides)


def _frozen(parts: list[Part] | None) -> tuple[Part, ...]:
    frozen = tuple(part for part in Part if part in (parts or ()))
    if len(frozen) == len(Part):
        raise UserError(
            f"--freeze was given for {', '.join(frozen)}, which is the whole model; a part must be "
            "left to train: leave one out"
        )
    return frozen


def _both_caps(max_tiles: int | None, max_tokens: int | None) -> Caps:
    if max_tiles is None or max_tokens is None:
        raise UserError(_CAPS_NEEDED)
    return Caps(max_tiles=max_tiles, max_tokens=max_tokens)


def _find_strategy(
    setting: dict[str, Any], samples: Lengths | None, samples_per_step: int | None
) -> "StrategySearch":
    """Parallel sizes and, where not given, caps of least predicted time per sample."""
    from omnibal import strategy
    from omnibal.data.scan_pool import usable_cores

    if samples is None:
        raise UserError(
            "--gpus was given without --lengths; which parallel sizes are best depends on the "
            "data: give its lengths, or the sizes themselves by --tp, --pp and --dp"
        )
    usual = strategy.strategy_samples_per_step(setting["gpus"], setting["cluster"])
    request = strategy.StrategyRequest(
        **setting,
        lengths=samples,
        samples_per_step=samples_per_step or usual,
        samples=DEFAULT_CAP_SAMPLES,
    )
    with _progress("trying strategies", strategy.progress_total(request)) as advance:
        return strategy.search_strategies(request, advance, usable_cores())


def _models_dumped(strategy: "Strategy") -> dict[str, Any]:
    """The fields of a strategy that are no plain values."""
    models = {"parallel": strategy.parallel, "caps": strategy.caps, "lost": strategy.lost}
    return {name: model.model_dump(mode="json") for name, model in models.items()}


def _make_plan(request: "PlanRequest") -> "PlanResult":
    """The plan, or an error that says what would fit."""
    from omnibal.planner import make_plan

    try:
        return make_plan(request)
    except DoesNotFit as error:
        raise _with_advice(request, error) from error


def _make_plan_of_strategy(
    request: "PlanRequest", found: "StrategySearch"
) -> tuple["PlanResult", "StrategySearch"]:
    """The plan of the fastest strategy that fits on all data, and the strategies from it on.

    Strategies were found to fit on samples that were drawn, and all may need slightly more.
    """
    from omnibal.planner import make_plan
    from omnibal.strategy import without_best

    left, first_error = found, None
    while True:
        best = left.best
        packs_per_step = best.parallel.data * best.micro_batches
        sized = replace(
            request, parallel=best.parallel, caps=best.caps, packs_per_step=packs_per_step
        )
        try:
            return make_plan(sized), left
        except DoesNotFit as error:
            first_error = first_error or error
        if len(left.ranking) == 1:
            raise _with_advice(request, first_error) from first_error
        left = without_best(left, "does not fit all data")
        old, new = (
            f"--tp {sizes.tensor} --pp {sizes.pipeline} --dp {sizes.data}"
            for sizes in (best.parallel, left.best.parallel)
        )
        sys.stderr.write(
            f"note: {old} fits the samples it was tried on, and not all: taking {new}\n"
        )


def _with_advice(request: "PlanRequest", error: DoesNotFit) -> UserError:
    """The error with what would fit."""
    from omnibal.feasible import does_not_fit_message, find_changes

    with _status("looking for what would fit"):
        advice = find_changes(request)
    return UserError(does_not_fit_message(error, advice))


def _find_caps(
    job: dict[str, Any],
    samples: Lengths | None,
    packing: PackingMethod,
    micro_batches: int,
    seed: int,
) -> Caps:
    """The caps of least predicted time per sample, as `omnibal caps` finds them."""
    from omnibal import cap_search
    from omnibal.data.scan_pool import usable_cores

    if samples is None:
        raise UserError(_CAPS_NEEDED)
    request = cap_search.CapSearchRequest(
        **job,
        lengths=samples,
        packing=packing,
        samples_per_step=cap_search.usual_samples_per_step(job["parallel"].data, micro_batches),
        samples=DEFAULT_CAP_SAMPLES,
        seed=seed,
        rule=cap_search.CapRule.TIME,
    )
    with _progress("trying caps", cap_search.MAX_CANDIDATES) as advance:
        found = cap_search.search_caps(request, advance, usable_cores())
    chosen = f"--max-tiles {found.best.max_tiles} --max-tokens {found.best.max_tokens}"
    for note in (f"found {chosen}", *cap_search.notes(request, found)):
        sys.stderr.write(f"note: {note}\n")
    return found.best


def _refuse_given(context: typer.Context, options: Sequence[str], why: str) -> None:
    """Refuse options of the command line that another one overrules."""
    sources = {name: context.get_parameter_source(name) for name in options}
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    if given:
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{listed} cannot be given: {why}; leave it out")


def _run_directory(run: Path | None) -> Path | None:
    """The directory that is meant by --run, which may name the run.jsonl in it."""
    if run is None or not run.is_file():
        return run
    if run.name != RUN_FILE:
        raise UserError(
            f"--run {run}: is a file; give the directory of the run, which holds its {RUN_FILE}"
        )
    return run.parent


def _plan_inputs(
    model: str,
    cluster: str,
    profile: Path | None,
    lengths: list[Path] | None,
    steps_of: Path | None,
) -> list[Path]:
    """What `omnibal plan` reads."""
    given = [path for path in (profile, steps_of) if path is not None]
    return [model_file(model), cluster_file(cluster), *given, *length_files(lengths or [])]


def _check_earlier_lengths(output: Path) -> None:
    """Refuse to write lengths over a file that no scan wrote, as it may be an image of the data."""
    if not output.is_file() or is_stream(output):
        return
    with output.open("rb") as file:
        begins = file.read(len(_PARQUET_MAGIC))
    if begins not in (b"", _PARQUET_MAGIC):
        raise UserError(
            f"-o {output}: exists and is not a Parquet file, so no earlier result of this command; "
            "move it away or choose another -o"
        )


def _check_picture(picture: Path | None) -> None:
    if picture is not None and picture.suffix.lower() != ".svg" and not is_stream(picture):
        raise UserError(f"{picture}: the picture is SVG; --picture must name a file ending in .svg")


def _print_result(as_json: bool, result: dict[str, Any], *readable: Table | str) -> None:
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    console = Console()
    for part in readable:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f}/s")


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr with rate and expected end; gives what to call with the samples done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)


@contextmanager
def _status(what: str) -> Iterator[None]:
    """A spinner on stderr for work whose length is not known."""
    with Console(stderr=True).status(what):
        yield


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def _with_max_dynamic_patch(model: ModelConfig, max_dynamic_patch: int | None) -> ModelConfig:
    if max_dynamic_patch is None:
        return model
    tiling = model.tiling
    if max_dynamic_patch < tiling.min_dynamic_patch:
        raise UserError(
            f"--max-dynamic-patch {max_dynamic_patch} is below the model's min_dynamic_patch "
            f"{tiling.min_dynamic_patch}; give at least that many"
        )
    tiling = tiling.model_copy(update={"max_dynamic_patch": max_dynamic_patch})
    return model.model_copy(update={"tiling": tiling})


def _plan_summary(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    return {
        "stages": [
            {
                "vision_layers": stage.vision_layers,
                "language_layers": stage.language_layers,
                "recompute": stage.recomputed_layers,
                "recompute_vision": len(stage.recompute_vision),
                "recompute_language": len(stage.recompute_language),
                "forward_ms": predicted.forward_ms,
                "backward_ms": predicted.backward_ms,
                "wait_fraction": predicted.wait_fraction,
                "peak_gib": predicted.memory.peak_gib,
            }
            for stage, predicted in zip(plan.stages, prediction.stages, strict=True)
        ],
        "step_ms": prediction.step_ms,
        "ideal_step_ms": prediction.ideal_step_ms,
        "lost_ms": prediction.lost.model_dump(),
        "bubble_fraction": prediction.bubble_fraction,
        "samples_per_second_per_gpu": prediction.samples_per_second_per_gpu,
        "gpu_days": prediction.gpu_days,
        "memory_cap_gib": memory_cap_gib(plan.cluster),
        "cost_source": prediction.cost_source,
        "packs": plan.data.packs if plan.data else None,
        "steps": plan.data.steps if plan.data else None,
    }
