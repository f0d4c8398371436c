"""Plans of earlier schemas: they are refused, with the command that makes them anew."""

import json
import shlex
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from omnibal.config import (
    ClusterConfig,
    ModelConfig,
    Precision,
    load_cluster,
    load_model,
    preset_names,
)
from omnibal.data.packing import PackingMethod
from omnibal.errors import UserError
from omnibal.limits import Caps
from omnibal.parallel import Parallel

_SCHEMA = 1
_FILE = "FILE"


class _Lenient(BaseModel):
    """Fields that are read of an earlier plan; others are left."""

    model_config = ConfigDict(extra="ignore")


class _EarlierShapes(_Lenient):
    caps: Caps
    micro_batches_per_step: int


class _EarlierData(_EarlierShapes):
    method: str
    seed: int
    epochs: int


class _EarlierPlan(_Lenient):
    """What plan.json of schema 1 says of the job and its data."""

    model: ModelConfig
    cluster: ClusterConfig
    precision: Precision
    parallel: Parallel
    frozen: tuple[str, ...] = ()
    data: _EarlierData | None
    shapes: _EarlierShapes | None = None


def refuse_earlier(text: str, path: Path, profile: Path, lengths: Path) -> None:
    """Refuse the text of a plan.json of an earlier schema; other text passes.

    Args:
        path: of plan.json.
        profile: of the plan's measured costs, which may not be there.
        lengths: of the plan's lengths.

    Raises:
        UserError: the plan is of an earlier schema.
    """
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("schema_version") != _SCHEMA:
            return
        plan = _EarlierPlan.model_validate(found)
    except ValueError:  # not JSON, or not such a plan, which reading it says in its own words
        return
    if plan.data is None and plan.shapes is None:
        return
    command = _command(plan, path.parent, profile, lengths)
    files = ", where FILE is a TOML file of what plan.json says" if _FILE in command else ""
    raise UserError(
        f"{path}: is a plan of schema {_SCHEMA}, whose stages this version does not read; make it "
        f"anew with `{command}`{files}"
    )


def _command(plan: _EarlierPlan, directory: Path, profile: Path, lengths: Path) -> str:
    """The command that makes the plan, beside its directory, of which it reads files."""
    sizes = plan.parallel
    shapes = plan.data or plan.shapes
    assert shapes is not None
    parts = ["omnibal plan", *_model_option(plan.model), *_cluster_options(plan.cluster)]
    if plan.data is not None:
        parts += [f"--lengths {shlex.quote(str(lengths))}"]
    parts += [*shapes.caps.options, sizes.options]
    if sizes.tensor > 1 and not sizes.sequence_parallel:
        parts.append("--no-sequence-parallel")
    parts.append(f"--micro-batches {shapes.micro_batches_per_step}")
    if plan.data is not None:
        parts.append(f"--epochs {plan.data.epochs} --seed {plan.data.seed}")
        if plan.data.method in list(PackingMethod):
            parts.append(f"--packing {plan.data.method}")
    parts += [f"--freeze {part}" for part in plan.frozen]
    parts.append(f"--precision {plan.precision}")
    if profile.exists():
        parts.append(f"--profile {shlex.quote(str(profile))}")
    named = directory if directory.name else directory.resolve()
    return " ".join([*parts, f"-o {shlex.quote(f'{named}.new')}"])


def _model_option(model: ModelConfig) -> list[str]:
    """The preset of equal values but for the tiling, which lengths bring, or a file to be made."""
    if model.name in preset_names("models"):
        preset = load_model(model.name)
        if not (model.takes_images and preset.takes_images):
            return [f"--model {_FILE}"]
        if model.with_tower("vision", tiling=preset.vision.tiling) == preset:
            return [f"--model {model.name}"]
    return [f"--model {_FILE}"]


def _cluster_options(cluster: ClusterConfig) -> list[str]:
    """The preset of equal values but for those that have options, or a file to be made."""
    if cluster.name not in preset_names("clusters"):
        return [f"--cluster {_FILE}"]
    preset = load_cluster(cluster.name)
    options = [f"--cluster {cluster.name}"]
    changed = {}
    for field, option in (
        ("memory_gib", "--memory-gib"),
        ("inter_node_gb_per_s", "--network-gb-per-s"),
    ):
        value = cluster.model_dump()[field]
        if value != preset.model_dump()[field]:
            changed[field] = value
            options.append(f"{option} {value!r}")
    return options if preset.model_copy(update=changed) == cluster else [f"--cluster {_FILE}"]
