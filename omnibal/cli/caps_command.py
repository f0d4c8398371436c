"""`omnibal caps`: search for the caps of a pack."""

import time
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

import omnibal.cli.command_tables as tables
import omnibal.cli.options as shared
from omnibal.cli.console import print_notes, print_result, progress
from omnibal.data.lengths import read_lengths
from omnibal.families.named import model_notes
from omnibal.model.limits import SEARCH_SAMPLES
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    samples_per_step: Annotated[
        int | None, shared.count_option("global batch size (default: that of `omnibal plan`)")
    ] = None
    limit: shared.LimitOption = None
    rule: Annotated[
        Literal["time", "paper"], typer.Option(help="min time per sample, or the paper's")
    ] = "time"
    samples: Annotated[int, shared.count_option("min samples to pack")] = SEARCH_SAMPLES
    processes: shared.ProcessesOption = None


def caps(
    lengths: shared.LengthsArgument,
    given: shared.JobOptions,
    sizes: shared.SizeOptions,
    search: SearchOptions,
    packing: shared.PackingRuleOption = PackingMethod.BALANCED,
    seed: shared.SeedOption = 0,
    as_json: shared.JsonOption = False,
) -> None:
    """Search --max-tiles and --max-tokens for min time per sample."""
    from omnibal.base.worker_pool import usable_cores
    from omnibal.search.cap_search import cap_notes, most_candidates, search_caps
    from omnibal.search.step_size import default_samples_per_step
    from omnibal.search.strategy import FreeSizes, StrategyRequest

    start = time.perf_counter()
    job = given.job(sizes.parallel())
    print_notes(model_notes(given.model))
    samples, parallel = read_lengths(lengths), job.parallel
    usual = default_samples_per_step(samples, None, parallel.world_size, parallel.data)
    # A strategy search with a single layout: only caps are free.
    request = StrategyRequest(
        job=job,
        sizes=FreeSizes(gpus=parallel.world_size),
        layouts=(parallel,),
        lengths=samples,
        settings=PackSettings(packing=packing, seed=seed),
        samples_per_step=search.samples_per_step or usual,
        samples=search.samples,
        fixed_caps=shared.limits_given(search.limit),
    )
    with progress("trying caps", most_candidates(request, search.rule)) as advance:
        outcome = search_caps(request, search.rule, advance, search.processes or usable_cores())
    print_notes(cap_notes(request, outcome))
    reasons = [reason.split(";")[0] for reason in outcome.infeasible.values()]  # without advice
    unusable = [f"{len(reasons)} other caps cannot be used: {reasons[0]}"] if reasons else []
    result = {
        **outcome.best.model_dump(),
        "rule": search.rule,
        "candidates": [candidate.as_dict() for candidate in outcome.candidates],
        "infeasible": [
            {**tried.model_dump(), "reason": reason} for tried, reason in outcome.infeasible.items()
        ],
        "seconds": time.perf_counter() - start,
    }
    table = tables.caps_table(outcome, job.memory_cap_gib)
    print_result(as_json, result, table, *unusable, f"use: {' '.join(outcome.best.options)}")
