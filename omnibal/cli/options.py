"""Options of several commands, declared once, and their groups."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from omnibal.base.errors import UserError
from omnibal.base.files import is_stream
from omnibal.base.frozen import MAX_COUNT
from omnibal.base.remote_path import location
from omnibal.cli.console import print_notes
from omnibal.cli.help_groups import COUNT, HelpAllOption
from omnibal.data.lengths import Lengths
from omnibal.data.mixture import mix_samples, read_mixture, shortfalls
from omnibal.families.named import named_model, named_model_file
from omnibal.job.plan import MAX_SEED
from omnibal.model import config
from omnibal.model.adapter_settings import ALL_LINEAR, AdapterConfig, adapters_of
from omnibal.model.layer_kinds import MAX_IMBALANCE
from omnibal.model.limits import FEATURE_NAME, USABLE_MEMORY_FRACTION
from omnibal.model.parallel import MAX_DEVICES, Parallel, expert_counts
from omnibal.model.targets import OWN, TrainerConstraints
from omnibal.model.units import LANGUAGE, model_parts
from omnibal.packing.packing import PackingMethod

if TYPE_CHECKING:  # it imports scipy, which `omnibal --help` should not wait for
    from omnibal.job.job import JobSpec

MOST_PROCESSES = 1_024  # more is a typo
_MAX_RATE = 1e9  # of --memory-gib and --network-gb-per-s; more is a typo, and inf breaks searches


def count_option(help_text: str, least: int = 1, most: int = MAX_COUNT) -> Any:
    """Return an integer option from `least` to `most`."""
    return typer.Option(min=least, max=most, metavar=COUNT, help=help_text)


size_option = partial(count_option, most=MAX_DEVICES)  # for numbers of devices
PRESET = "preset (`omnibal presets`)"  # in help texts
TokenizerOption = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="tokenizer.json, tokenizer.model, or their folder"),
]
DataRootOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="folder or URL that must hold all data (default: any)",
        parser=location,  # Path would drop a slash of "s3://"
    ),
]
TemplateOption = Annotated[
    config.ChatTemplateName | None,
    typer.Option(metavar="NAME", help="chat template, or tokenizer (default: the model's)"),
]
ModelOption = Annotated[
    str, typer.Option(metavar="NAME", help="preset, hub id, checkpoint or TOML file")
]
ClusterOption = Annotated[str, typer.Option(metavar="NAME", help=f"{PRESET} or TOML file")]
PackingRuleOption = Annotated[PackingMethod, typer.Option(help="min packs, or the paper's ISF")]
LengthsArgument = Annotated[
    list[Path], typer.Argument(metavar="LENGTHS...", help="of `omnibal lengths`, or OmniBal's JSON")
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=MAX", help="other max per pack, such as clips=4 (repeatable)"),
]
NeededMaxTilesOption = Annotated[
    int | None, count_option("max image tiles per pack (required with tiles)")
]
ProviderOption = Annotated[config.Provider, typer.Option(help="local, or Transformer Engine")]
ProcessesOption = Annotated[
    int | None,
    count_option("parallel worker processes (default: usable cores)", most=MOST_PROCESSES),
]
RunOption = Annotated[Path | None, typer.Option(help="run directory (--save) with measured times")]
MixtureOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TOML of weights or epochs by source (default: equal)"),
]
SeedOption = Annotated[int, count_option("random seed of packs and order", most=MAX_SEED, least=0)]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=_MAX_RATE,
        metavar="GIB",
        help=f"memory in GiB, {USABLE_MEMORY_FRACTION:.0%} of it used (default: cluster's)",
    ),
]
DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="plan directory")]
JsonOption = Annotated[bool, typer.Option("--json", help="print a JSON object instead of tables")]


def check_picture(picture: Path | None) -> None:
    """Raise UserError for a --picture that is not named as SVG."""
    if picture is not None and picture.suffix.lower() != ".svg" and not is_stream(picture):
        raise UserError(f"{picture}: the picture is SVG; --picture must name a file ending in .svg")


def draw_mixture(
    lengths: Lengths, mixture: Path | None, seed: int
) -> tuple[Lengths, tuple[int, ...]]:
    """Return the drawn lengths, and the samples available by source (empty without a mixture)."""
    if mixture is None:
        return lengths, ()
    rules = read_mixture(mixture)
    available = np.bincount(lengths.source, minlength=len(lengths.source_names))  # [sources]
    print_notes(shortfalls(rules, lengths.source_names, available))  # unreachable shares
    return mix_samples(lengths, rules, seed), tuple(available.tolist())


def changed_cluster(
    name: str, memory_gib: float | None, network_gb_per_s: float | None = None
) -> config.ClusterConfig:
    """Return a preset or TOML cluster, with memory and network rate overridden if given."""
    given = {"memory_gib": memory_gib, "inter_node_gb_per_s": network_gb_per_s}
    changes = {field: value for field, value in given.items() if value is not None}
    return config.load_cluster(name).model_copy(update=changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    model: ModelOption
    cluster: ClusterOption
    freeze: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="frozen part, vision or projector, say (repeatable)"),
    ] = None
    lora_rank: Annotated[
        int | None, count_option("LoRA rank; without --freeze, only adapters train", most=2**16)
    ] = None
    lora_alpha: Annotated[
        float | None, typer.Option(metavar="X", help="LoRA alpha: scale x rank (default: 2 x rank)")
    ] = None
    lora_targets: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="modules with LoRA, or a regex (default: all-linear)"),
    ] = None
    lora_part: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="part with LoRA (repeatable; default: language)"),
    ] = None
    lora_rslora: Annotated[
        bool, typer.Option("--lora-rslora", help="scale LoRA by alpha / sqrt(rank)")
    ] = False
    precision: Annotated[
        config.Precision, typer.Option(help="fp8: bf16 with FP8 language GEMMs")
    ] = "bf16"
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="costs of `omnibal profile` (default: counted)"),
    ] = None
    memory_gib: MemoryOption = None
    network_gb_per_s: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=_MAX_RATE,
            metavar="X",
            help="inter-node GB/s per GPU (default: the cluster's)",
        ),
    ] = None
    expert_imbalance: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=MAX_IMBALANCE,
            metavar="X",
            help="max / mean tokens of EP ranks (default: the model's)",
        ),
    ] = None
    help_all: HelpAllOption = False

    def files(self) -> list[Path]:
        cluster = config.config_file("clusters", self.cluster)
        return [named_model_file(self.model), cluster, *filter(None, [self.profile])]

    def job(self, parallel: Parallel | None = None, trainer: TrainerConstraints = OWN) -> "JobSpec":
        """Return the job at these parallel sizes, by default 1 or the profile's tensor size."""
        from omnibal.job.job import JobSpec, costs_and_sizes

        model = named_model(self.model)
        if self.expert_imbalance is not None:
            if not expert_counts(model):
                raise UserError(f"--expert-imbalance: {model.name} has no experts, leave it out")
            model = config.with_imbalance(model, self.expert_imbalance)
        cluster = changed_cluster(self.cluster, self.memory_gib, self.network_gb_per_s)
        source, sizes = costs_and_sizes(self.profile, parallel, trainer)
        return JobSpec(
            model=model,
            cluster=cluster,
            parallel=sizes,
            precision=self.precision,
            frozen=self._frozen(model),
            adapters=self._adapters(),
            cost_source=source,
            trainer=trainer,
        )

    def _frozen(self, model: config.ModelConfig) -> tuple[str, ...]:
        """Return the frozen parts in model order. LoRA alone freezes all parts without adapters."""
        parts, given = model_parts(model), self.freeze or []
        if self.lora_rank is not None and self.freeze is None:
            return tuple(part for part in parts if part not in (self.lora_part or [LANGUAGE]))
        # Unknown parts follow: the job refuses them.
        return tuple(part for part in dict.fromkeys([*parts, *given]) if part in given)

    def _adapters(self) -> AdapterConfig | None:
        if self.lora_rank is None:
            details = {
                "--lora-alpha": self.lora_alpha,
                "--lora-targets": self.lora_targets,
                "--lora-part": self.lora_part,
                "--lora-rslora": self.lora_rslora or None,
            }
            for option in (option for option, value in details.items() if value is not None):
                raise UserError(f"{option} needs --lora-rank: give both")
            return None
        return adapters_of(
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            targets=self.lora_targets or ALL_LINEAR,
            parts=tuple(self.lora_part or [LANGUAGE]),
            rank_stabilized=self.lora_rslora,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeOptions:
    tp: Annotated[int | None, size_option("tensor-model-parallel size")] = None
    pp: Annotated[int | None, size_option("pipeline-model-parallel size (stages)")] = None
    dp: Annotated[int | None, size_option("data-parallel size")] = None
    ep: Annotated[
        int | None, size_option("expert-model-parallel size, a divisor of --tp x --dp")
    ] = None
    sequence_parallel: Annotated[
        bool | None, typer.Option(help="Megatron sequence parallelism (default: if --tp > 1)")
    ] = None

    def parallel(self) -> Parallel:
        """Return the parallel sizes, 1 if not given. UserError if they do not fit together."""
        tensor, divides = self.tp or 1, self.sequence_parallel
        return Parallel(pipeline=self.pp or 1).with_sizes(
            tensor=tensor,
            data=self.dp or 1,
            expert=self.ep or 1,
            sequence_parallel=tensor > 1 if divides is None else divides,
        )


def limits_given(
    limits: Sequence[str] | None, max_tiles: int | None = None, max_tokens: int | None = None
) -> dict[str, int]:
    """Return caps by feature, from --limit, --max-tiles and --max-tokens."""
    given = {"tiles": max_tiles, "tokens": max_tokens}
    caps = {name: cap for name, cap in given.items() if cap is not None}
    for text in limits or ():
        name, _, count = text.partition("=")
        if not (re.fullmatch(FEATURE_NAME, name) and re.fullmatch("[0-9]{1,99}", count)):
            raise UserError(f"--limit {text}: must be a feature and a count, such as clips=4")
        if not 1 <= int(count) <= MAX_COUNT:
            raise UserError(f"--limit {text}: the count must be from 1 to {MAX_COUNT}")
        if name in caps:
            raise UserError(f"the limit of {name} is given twice, {caps[name]} and {int(count)}")
        caps[name] = int(count)
    return caps
