"""Options that several commands share, and the groups that they come in."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnibal.base.errors import UserError
from omnibal.base.frozen import MAX_COUNT
from omnibal.base.remote_path import location
from omnibal.cli.help_groups import COUNT, HelpAllOption
from omnibal.families.named import named_model, named_model_file
from omnibal.job.plan import MAX_SEED
from omnibal.model.adapter_settings import ALL_LINEAR, AdapterConfig, adapters_of
from omnibal.model.config import (
    ChatTemplate,
    ClusterConfig,
    ModelConfig,
    Precision,
    Provider,
    config_file,
    load_cluster,
    with_imbalance,
)
from omnibal.model.layer_kinds import MAX_IMBALANCE
from omnibal.model.limits import FEATURE_NAME, USABLE_MEMORY_FRACTION
from omnibal.model.parallel import MAX_DEVICES, Parallel, expert_counts
from omnibal.model.targets import OWN, TrainerConstraints
from omnibal.model.units import LANGUAGE, model_parts
from omnibal.packing.packing import PackingMethod

if TYPE_CHECKING:  # it imports scipy, which `omnibal --help` should not wait for
    from omnibal.job.job import JobSpec

MOST_PROCESSES = 1_024  # more is a mistake in a number
_MOST_GIB = 1e9
"""Max memory in GiB, and network rate in GB/s."""


def count_option(help_text: str, least: int = 1, most: int = MAX_COUNT) -> Any:
    """Make an integer option."""
    return typer.Option(min=least, max=most, metavar=COUNT, help=help_text)


size_option = partial(count_option, most=MAX_DEVICES)
"""Make an option of a number of devices."""
PRESET = "preset (`omnibal presets` lists them)"
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="tokenizer.json, SentencePiece tokenizer.model, or a folder with one"
    ),
]

DataRootOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="folder or URL that all files of the data must be in, links followed (default: any)",
        parser=location,
    ),
]
TemplateOption = Annotated[
    ChatTemplate | None,
    typer.Option(
        metavar="NAME",
        help="chat template in place of the model's (tokenizer: its own; see docs/data.md)",
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"{PRESET}, id on a model hub, folder or config.json of a checkpoint, or TOML file",
    ),
]
ClusterOption = Annotated[
    str, typer.Option(metavar="NAME", help=f"{PRESET} or TOML file (docs/costs.md)")
]
PackingRuleOption = Annotated[PackingMethod, typer.Option(help="packing rule")]
LengthsArgument = Annotated[
    list[Path], typer.Argument(metavar="LENGTHS...", help="Parquet or OmniBal JSON files")
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=MAX",
        help="limit of another feature of a pack, such as clips=4 (may be repeated)",
    ),
]
NeededMaxTilesOption = Annotated[
    int | None, count_option("image tiles that a pack may hold, if samples have any")
]
ProviderOption = Annotated[
    Provider, typer.Option(help="of the layers' linears and attention, as of pretrain_vlm.py")
]
SeedOption = Annotated[int, count_option("of packs and order", most=MAX_SEED, least=0)]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        metavar="GIB",
        help=f"memory of a device (default: the cluster's); {USABLE_MEMORY_FRACTION:.0%} of it is "
        "used",
    ),
]
DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="plan directory")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")]


def changed_cluster(
    name: str, memory_gib: float | None, network_gb_per_s: float | None = None
) -> ClusterConfig:
    """Read a cluster, overriding figures if given."""
    given = {"memory_gib": memory_gib, "inter_node_gb_per_s": network_gb_per_s}
    changes = {field: value for field, value in given.items() if value is not None}
    for field, value in changes.items():
        if not (math.isfinite(value) and value <= _MOST_GIB):
            option = {"memory_gib": "--memory-gib", "inter_node_gb_per_s": "--network-gb-per-s"}
            raise UserError(
                f"{option[field]} {value}: must be a finite number of at most "
                f"{_MOST_GIB:,.0f}; give one"
            )
    return load_cluster(name).model_copy(update=changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    model: ModelOption
    cluster: ClusterOption
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART",
            help="part not to train, such as vision, projector or language (may be repeated)",
        ),
    ] = None
    lora_rank: Annotated[
        int | None,
        count_option(
            "train adapters (LoRA) of this rank; all other weights are frozen, unless --freeze is "
            "given",
            most=2**16,
        ),
    ] = None
    lora_alpha: Annotated[
        float | None,
        typer.Option(metavar="X", help="scale of adapters times their rank (default: 2 x rank)"),
    ] = None
    lora_targets: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="linears with adapters: names such as q_proj,v_proj, all-linear, or a regular "
            "expression (default: all-linear)",
        ),
    ] = None
    lora_part: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART", help="part with adapters (may be repeated; default: language)"
        ),
    ] = None
    lora_rslora: Annotated[
        bool, typer.Option("--lora-rslora", help="scale adapters by alpha / sqrt(rank)")
    ] = False
    precision: Annotated[
        Precision,
        typer.Option(help="of weights and activations; fp8 is bf16 with FP8 products in layers"),
    ] = "bf16"
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="profile.json with measured costs (default: counted)"),
    ] = None
    memory_gib: MemoryOption = None
    network_gb_per_s: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="GB/S",
            help="between nodes, per device (default: the cluster's; 200 Gb/s are 25)",
        ),
    ] = None
    expert_imbalance: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=MAX_IMBALANCE,
            metavar="X",
            help="tokens of the fullest expert-parallel rank over the mean (default: the model's, "
            "else 1.2)",
        ),
    ] = None
    help_all: HelpAllOption = False

    def files(self) -> list[Path]:
        own = [] if self.profile is None else [self.profile]
        return [named_model_file(self.model), config_file("clusters", self.cluster), *own]

    def job(
        self,
        parallel: Parallel | None = None,
        trainer: TrainerConstraints = OWN,
    ) -> "JobSpec":
        """Make the job with parallel sizes, by default the smallest with costs."""
        from omnibal.cost.profile import read_profile
        from omnibal.cost.source import CostSource
        from omnibal.job.job import JobSpec

        model = named_model(self.model)
        if self.expert_imbalance is not None:
            if not expert_counts(model):
                raise UserError(
                    f"--expert-imbalance {self.expert_imbalance:g} was given, and {model.name} has "
                    "no experts: leave it out, or choose a model with a mixture of experts"
                )
            model = with_imbalance(model, self.expert_imbalance)
        cluster = changed_cluster(self.cluster, self.memory_gib, self.network_gb_per_s)
        source = CostSource(None if self.profile is None else read_profile(self.profile))
        if parallel is None:
            parallel = Parallel(tensor=source.tensor or 1, pipeline=1)
        return JobSpec(
            model=model,
            cluster=cluster,
            parallel=trainer.held(parallel),
            precision=self.precision,
            frozen=self._frozen(model),
            adapters=self._adapters(),
            cost_source=source,
            trainer=trainer,
        )

    def _frozen(self, model: ModelConfig) -> tuple[str, ...]:
        """Return frozen parts in model order; with only adapters, all parts without."""
        parts = model_parts(model)
        if self.lora_rank is not None and self.freeze is None:
            return tuple(part for part in parts if part not in (self.lora_part or [LANGUAGE]))
        unknown = sorted(set(self.freeze or ()) - set(parts))
        if unknown:
            raise UserError(
                f"--freeze was given for {', '.join(unknown)}, which {model.name} does not have; "
                f"it may be {', '.join(parts)}: choose one of these"
            )
        frozen = tuple(part for part in parts if part in (self.freeze or ()))
        if len(frozen) == len(parts):
            raise UserError(
                f"--freeze was given for {', '.join(frozen)}, which is the whole model; a part "
                "must be left to train: leave one out"
            )
        return frozen

    def _adapters(self) -> AdapterConfig | None:
        if self.lora_rank is None:
            more = {
                "--lora-alpha": self.lora_alpha,
                "--lora-targets": self.lora_targets,
                "--lora-part": self.lora_part,
                "--lora-rslora": self.lora_rslora or None,
            }
            for option in (option for option, value in more.items() if value is not None):
                raise UserError(f"{option} is of adapters, which --lora-rank asks for: give it")
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
    tp: Annotated[int | None, size_option("tensor-parallel size")] = None
    pp: Annotated[int | None, size_option("pipeline-parallel size (stages)")] = None
    dp: Annotated[int | None, size_option("data-parallel size")] = None
    ep: Annotated[int | None, size_option("expert-parallel size, a divisor of --tp x --dp")] = None
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            help="divide activations between tensor-parallel blocks too (default: with --tp > 1)"
        ),
    ] = None

    def parallel(self) -> Parallel:
        """Return the parallel sizes, by default 1."""
        tensor, data, expert = self.tp or 1, self.dp or 1, self.ep or 1
        if self.sequence_parallel and tensor == 1:
            raise UserError(
                "--sequence-parallel was given with --tp 1; it divides activations over tensor "
                "ranks, of which there must be at least 2: raise --tp, or leave it out"
            )
        divides = tensor > 1 if self.sequence_parallel is None else self.sequence_parallel
        if tensor * data % expert or (expert % tensor and tensor % expert):
            raise UserError(
                f"--ep {expert} was given with --tp {tensor} --dp {data}; it must divide the "
                f"{tensor * data} ranks of a stage, and divide --tp or be a multiple of it: choose "
                "another --ep, or other sizes"
            )
        return Parallel(
            tensor=tensor,
            pipeline=self.pp or 1,
            data=data,
            sequence_parallel=divides,
            expert=expert,
        )


def limits_given(
    limits: Sequence[str] | None, max_tiles: int | None = None, max_tokens: int | None = None
) -> dict[str, int]:
    """Return caps by feature, from --limit, --max-tiles and --max-tokens."""
    given = [("tiles", max_tiles), ("tokens", max_tokens), *map(_parsed_limit, limits or ())]
    caps: dict[str, int] = {}
    for name, cap in given:
        if cap is not None and name in caps:
            raise UserError(
                f"the limit of {name} is given twice, {caps[name]} and {cap}; give one of them"
            )
        if cap is not None:
            caps[name] = cap
    return caps


def _parsed_limit(text: str) -> tuple[str, int]:
    name, _, cap = text.partition("=")
    if not (re.fullmatch(FEATURE_NAME, name) and re.fullmatch("[0-9]{1,99}", cap)):
        raise UserError(f"--limit {text}: must be a feature and a count, such as clips=4")
    if not 1 <= int(cap) <= MAX_COUNT:
        raise UserError(f"--limit {text}: the count must be from 1 to {MAX_COUNT}; give one")
    return name, int(cap)
