"""Published launch lines and their models, from launch_lines.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnibal.data.lengths import Lengths
from omnibal.families.named import named_model
from omnibal.model.config import LanguageConfig, ModelConfig, load_cluster, load_model, preset_names
from omnibal.trainers.lint.command_line import read_launch
from omnibal.trainers.lint.line import line_of
from omnibal.trainers.lint.line_job import LineJob, make_line_job

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class PublishedLine:
    """A launch line, and the rule that it breaks, if any."""

    id: str
    launcher: str
    model: str
    line: str
    source: str
    rule: str | None = None


_DATA: dict[str, Any] = json.loads((Path(__file__).parent / "launch_lines.json").read_text())
LINES = [PublishedLine(**row) for row in _DATA["lines"]]
GOOD = [line for line in LINES if line.rule is None]
BROKEN = [line for line in LINES if line.rule is not None]


def model_of(name: str) -> ModelConfig:
    """Return a preset, a hub config.json's model, or a model with sizes from the data."""
    if name in preset_names("models"):
        return named_model(name)
    if name not in _DATA["models"]:
        return named_model(str(ROOT / name))
    sizes = _DATA["models"][name]
    return sized_model(sizes["layers"], sizes["heads"], sizes["kv_groups"], sizes["experts"])


def sized_model(
    layers: int, heads: int, kv_heads: int, experts: int = 0, latent: bool = False
) -> ModelConfig:
    """Return a language model with the sizes that rules compare."""
    kind: dict[str, Any] = {"layers": 1}
    if experts:
        kind["experts"] = {"experts": experts, "experts_per_token": 2, "ffn_hidden_size": 64}
    if latent:
        ranks = {"key_value_rank": 16, "head_size": 32, "rotary_head_size": 16}
        kind["latent"] = ranks | {"value_head_size": 32}
    sizes = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "hidden_size": 64 * heads}
    sizes |= {"ffn_hidden_size": 256, "vocab_size": 1024}
    runs = [kind] if experts or latent else []
    return ModelConfig(name="sizes", language=LanguageConfig.model_validate(sizes | {"runs": runs}))


CLUSTER = load_cluster("h100-80g").model_copy(update={"host_us": 0.0})
"""Without host time, which would hide differences between small models."""
VARIABLES = {"NODE_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}


def of_line(
    line: str,
    model: str | ModelConfig,
    samples: Lengths | None = None,
    image_share: float = 0.5,
    **changes,
) -> LineJob:
    """Return a launch line's job, on H100s or a changed cluster."""
    sizes = load_model(model) if isinstance(model, str) else model
    launch = read_launch(line, VARIABLES)
    cluster = CLUSTER.model_copy(update=changes)
    return make_line_job(line_of(launch, sizes), sizes, cluster, samples, image_share)
