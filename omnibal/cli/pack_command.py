"""`omnibal pack`: pack samples, group packs into steps, and measure the balance."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import omnibal.cli.options as shared
from omnibal.base.outputs import check_files
from omnibal.cli.console import print_notes, print_result, status
from omnibal.data.lengths import Lengths, length_files, read_lengths
from omnibal.families.named import named_model, named_model_file
from omnibal.model.config import config_file, load_cluster
from omnibal.model.encoders import ITEM_FEATURES
from omnibal.model.levels import Level
from omnibal.model.limits import (
    DEFAULT_MICRO_BATCHES,
    MAX_PACKS_PER_STEP,
    Caps,
    check_limits,
    check_packs_per_step,
)
from omnibal.model.parallel import Parallel
from omnibal.packing.balance_metrics import measure_packs
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import write_packs


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitOptions:
    max_tiles: shared.NeededMaxTilesOption = None
    max_tokens: Annotated[int | None, shared.count_option("max language tokens per pack")] = None
    limit: shared.LimitOption = None

    def caps(self, lengths: Lengths) -> Caps:
        given = shared.limits_given(self.limit, self.max_tiles, self.max_tokens)
        item_names = [name for name in lengths.item_names if lengths.items[name].any()]
        check_limits(given, item_names, "samples", others=ITEM_FEATURES)
        return Caps.of(**given)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions:
    dp: Annotated[int, shared.size_option("data-parallel size")]
    micro_batches: Annotated[
        int, shared.count_option("packs per rank and step", most=MAX_PACKS_PER_STEP)
    ] = DEFAULT_MICRO_BATCHES
    packing: shared.PackingRuleOption = PackingMethod.BALANCED
    seed: shared.SeedOption = 0
    mixture: shared.MixtureOption = None
    model: Annotated[
        str, typer.Option(metavar="NAME", help=f"of the times to balance: {shared.PRESET}")
    ] = "internvl-chat-1.5-6b-20b"
    cluster: Annotated[
        str, typer.Option(metavar="NAME", help=f"of the times to balance: {shared.PRESET}")
    ] = "a100-80g"


def pack(
    lengths: shared.LengthsArgument,
    limits: LimitOptions,
    steps: StepOptions,
    bound: Annotated[bool, typer.Option(help="prove a min number of packs")] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Parquet file to write")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="SVG file to write: load of ranks")] = None,
    as_json: shared.JsonOption = False,
) -> None:
    """Pack samples, group packs into steps, and measure the balance."""
    from omnibal.job.job import JobSpec
    from omnibal.job.plan_data import SampleData
    from omnibal.packing.balanced import pack_balanced
    from omnibal.packing.pack_bound import naive_lower_bound, packs_lower_bound
    from omnibal.report.plan_tables import packing_facts
    from omnibal.search.cap_search import isf_note

    mixtures = [] if steps.mixture is None else [steps.mixture]
    inputs = [
        *length_files(lengths),
        *mixtures,
        named_model_file(steps.model),
        config_file("clusters", steps.cluster),
    ]
    check_files({"-o": output, "--picture": picture}, inputs)
    shared.check_picture(picture)
    check_packs_per_step(steps.dp, steps.micro_batches)
    job = JobSpec(
        model=named_model(steps.model),
        cluster=load_cluster(steps.cluster),
        parallel=Parallel(pipeline=1, data=steps.dp),
        precision="bf16",
    )
    samples, _ = shared.draw_mixture(read_lengths(lengths), steps.mixture, steps.seed)
    caps = limits.caps(samples)
    # The steps of `omnibal plan`, without its search and levels.
    data = SampleData(
        lengths=samples,
        settings=PackSettings(packing=steps.packing, seed=steps.seed),
        levels=(Level(caps=caps),),
        packs_per_step=steps.dp * steps.micro_batches,
    )
    start = time.perf_counter()
    packs, _ = data.schedule(job)
    seconds = time.perf_counter() - start
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_packs(packs, output)
    if picture is not None:
        from omnibal.report.drawing import svg_file
        from omnibal.report.formatting import write_ascii
        from omnibal.report.loads import draw_loads

        write_ascii(svg_file(draw_loads(job, data, packs)), picture)
    with status("proving how many packs are needed"):
        lower_bound = naive_lower_bound(samples, caps)
        if bound:
            fewest = int(np.bincount(packs.epoch).min())  # of any epoch
            if steps.packing is not PackingMethod.BALANCED:
                # From ISF's packs, far from optimal, the proof would take minutes.
                fewest = min(fewest, len(pack_balanced(samples, caps, steps.seed)))
            lower_bound = packs_lower_bound(samples, caps, found=fewest)
    load_ms = job.load_ms(packs.packs, samples)  # [packs]
    metrics = measure_packs(packs, samples, data.levels, steps.dp, load_ms, lower_bound)
    if steps.packing is PackingMethod.ISF:
        print_notes(filter(None, [isf_note(samples, caps, steps.seed)]))
    busy = np.bincount(packs.step[packs.slot == 0])  # ranks with a first micro-batch, [steps]
    step = int(busy.argmin())
    if idle := steps.dp - int(busy[step]):
        note = (
            f"step {step + 1:,} of {len(busy):,} takes the remainder, {busy[step]:,} packs for "
            f"{steps.dp:,} ranks: {idle:,} of them without any; --micro-batches 2 avoids that"
        )
        print_notes([note])
    name, source = job.model.name, job.cost.source
    result = metrics.as_dict() | {"seconds": seconds, "load": source, "model": name}
    print_result(as_json, result, packing_facts(metrics, f"{name}, {source}"))
