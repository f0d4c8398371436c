"""Model and cluster descriptions read from TOML; sizes follow the published config files."""

import json
import re
from collections.abc import Collection
from difflib import get_close_matches
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    Field,
    PositiveFloat,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from omnibal.base.errors import UserError
from omnibal.base.files import read_toml_model
from omnibal.base.frozen import Count, Frozen, Layers, Rate, Share, Width, written_unless
from omnibal.model.encoders import (
    ENCODER_KINDS,
    ClipsEncoder,
    Encoder,
    ImagesEncoder,
    TilesEncoder,
    TilingConfig,
)
from omnibal.model.layer_kinds import LayerKind, LayerRun
from omnibal.model.rate_tables import Rates, ScaledRates

Precision = Literal["fp32", "bf16", "fp8"]
"""Weight and activation type; "fp8" is bf16 with FP8 products in layers (`omnibal.model.fp8`)."""
PlainPrecision = Literal["fp32", "bf16"]  # precisions without FP8, used for measurements
Provider = Literal["local", "te"]
"""Provider of linears and attention: this project with Megatron-core, or Transformer Engine."""
ChatTemplate = Literal[
    "internlm2-chat", "Hermes-2", "phi3-chat", "internvl2_5", "llama3", "qwen2.5", "tokenizer"
]
"""Chat templates: InternVL's `template`, Llama 3.1, Qwen2.5, or the tokenizer's own."""
T = TypeVar("T", bound="Frozen")
E = TypeVar("E", TilesEncoder, ClipsEncoder)
_PRESETS = Path(__file__).parents[1] / "presets"


class RopeScaling(Frozen):
    """Llama 3.1's RoPE scaling.

    Wavelengths above `original_positions / low_frequency_factor` tokens are slowed by `factor`,
    those below `original_positions / high_frequency_factor` are unchanged, with interpolation in
    between.
    """

    factor: PositiveFloat
    low_frequency_factor: PositiveFloat = 1.0
    high_frequency_factor: PositiveFloat = 4.0
    original_positions: Count = 8192

    @model_validator(mode="after")
    def _low_is_below_high(self) -> "RopeScaling":
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor {self.low_frequency_factor} must be below "
                f"high_frequency_factor {self.high_frequency_factor}"
            )
        return self


class RopeSections(Frozen):
    """Multimodal RoPE sections (Qwen2-VL, arXiv 2409.12191, 2.1) of half a head."""

    time: Width
    rows: Width
    columns: Width
    interleaved: bool = Field(
        default=False,
        description="whether frequencies of the three alternate, the last being time's (Qwen3-VL), "
        "or follow each other",
    )


_VOCABULARY_MULTIPLE = 128
"""Padding multiple of each tensor-parallel rank's vocabulary, as in Megatron-LM."""


class LanguageConfig(Frozen):
    """Decoder, by default with RMSNorm, RoPE and gated feed-forwards; attention by layer kind."""

    layers: Layers
    hidden_size: Width
    heads: Width
    kv_heads: Width
    head_size: Width | None = written_unless(None, "left out: hidden_size / heads")
    ffn_hidden_size: Width
    vocab_size: Width
    activation: Literal["gated", "gelu", "squared_relu"] = written_unless(
        "gated", "of dense feed-forwards; left out: SwiGLU or GeGLU, others have no gate"
    )
    positions: Literal["rotary", "learned", "alibi"] = written_unless(
        "rotary", "learned (GPT-3): an embedding of max_positions; alibi (MPT): none"
    )
    bias: bool = written_unless(False, "biases of all linears but the head (GPT-3, GPT-OSS)")
    norm_bias: bool = written_unless(False, "biases of the norms (LayerNorm)")
    sinks: bool = written_unless(False, "a learned logit per head in attention's sum (GPT-OSS)")
    qkv_bias: bool = False
    qk_norm: bool = written_unless(
        False, "RMSNorm of every head of q and of k, with one weight for all heads (Qwen3)"
    )
    output_gate: bool = written_unless(
        False, "gate of attention's output, made of the layer's input (Qwen3.5)"
    )
    post_norms: bool = written_unless(False, "a norm after each block too (Gemma 3)")
    norm_eps: PositiveFloat = 1e-5
    rope_base: Annotated[int, Field(ge=1, le=10**15)] = 1_000_000
    max_positions: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None,
        description="tokens of the longest sample; left out: any number",
    )
    rope_factor: PositiveFloat | None = Field(
        default=None,
        description="of the dynamic scaling that a released model's RoPE has beyond max_positions; "
        "kept for exports, as no sample is longer",
    )
    rope_scaling: RopeScaling | None = Field(
        default=None, description="of samples of any length (Llama 3.1); left out: there is none"
    )
    rope_sections: RopeSections | None = written_unless(
        None,
        "of a token's time, row and column (Qwen2-VL and later); left out: all turn by "
        "its place in the sample",
    )
    tied_head: bool = Field(
        default=False, description="the head's matrix is the token embedding (small Qwen2 models)"
    )
    prediction_layers: Annotated[int, Field(ge=0, le=16)] = written_unless(
        0,
        "layers of multi-token prediction behind the last one, trained with the head "
        "(DeepSeek-V3, arXiv 2412.19437, section 2.2)",
    )
    runs: tuple[LayerRun, ...] = Field(
        default=(),
        description="runs of layers of other kinds, repeated until there are `layers`; left out: "
        "all have full attention and a dense feed-forward",
    )

    @property
    def head_width(self) -> int:
        """Width of one head of q, of k and of v."""
        return self.head_size or self.hidden_size // self.heads

    @property
    def gates(self) -> int:
        """Matrices into a dense feed-forward's activation."""
        return 2 if self.activation == "gated" else 1

    def words_of_rank(self, tensor: int) -> int:
        """Padded vocabulary size per rank of `tensor` ranks."""
        return -(-self.vocab_size // (_VOCABULARY_MULTIPLE * tensor)) * _VOCABULARY_MULTIPLE

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "LanguageConfig":
        if self.head_size is None and self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of heads {self.heads}, or "
                "head_size given"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.positions == "learned" and self.max_positions is None:
            raise ValueError("learned positions need max_positions, the size of their embedding")
        if self.activation != "gated" and any(kind.experts for kind in self.kinds):
            raise ValueError("experts are gated; leave activation out")
        if self.rope_factor is not None and self.max_positions is None:
            raise ValueError(
                f"rope_factor {self.rope_factor} scales RoPE beyond max_positions, so that must be "
                "given too"
            )
        if self.rope_factor is not None and self.rope_scaling is not None:
            raise ValueError("rope_factor and rope_scaling scale RoPE in two ways; give one")
        if (rope := self.rope_sections) is not None:
            counts = (rope.time, rope.rows, rope.columns)
            if 2 * sum(counts) != self.head_width:
                raise ValueError(
                    f"rope_sections {counts} must add up to half of a head, {self.head_width // 2}"
                )
        kinds = set(self.kinds)
        if len({kind.name for kind in kinds}) < len(kinds):
            raise ValueError("runs with equally many experts must have equal experts")
        return self

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of every layer, [layers]."""
        pattern = [run.kind for run in self.runs for _ in range(run.layers)] or [LayerKind()]
        return tuple(islice(cycle(pattern), self.layers))


class ModelConfig(Frozen):
    """A language model with any number of encoders.

    With one encoder `vision` over tiles, InternVL's form is written: tables `vision` and `tiling`,
    and `downsample_ratio`. Both forms are read.
    """

    name: str
    encoders: dict[str, Encoder] = Field(default={}, description="by name, in model order")
    language: LanguageConfig
    chat_template: ChatTemplate = "internlm2-chat"
    system_message: str | None = Field(
        default=None,
        description="of conversations without their own; empty: none, left out: the template's",
    )
    chat_system_message: str | None = Field(
        default=None,
        description="of tools/chat.py instead; empty: an empty turn, left out: as in training",
    )

    _encoders_elsewhere: dict[str, Encoder] = PrivateAttr(default={})

    @field_validator("encoders", mode="before")
    @classmethod
    def _have_kinds(cls, encoders: Any) -> Any:
        for name, tower in encoders.items() if isinstance(encoders, dict) else ():
            if isinstance(tower, dict) and "kind" not in tower:
                kinds = " or ".join(f'"{kind}"' for kind in ENCODER_KINDS)
                raise ValueError(f"{name} needs a kind, of what it takes: {kinds}")
        return encoders

    @field_validator("encoders")
    @classmethod
    def _names_are_words(cls, encoders: dict[str, Encoder]) -> dict[str, Encoder]:
        for name in encoders:
            if not re.fullmatch("[a-z][a-z0-9]*", name) or name in _TAKEN_NAMES:
                raise ValueError(
                    f"an encoder is named {name!r}; a name must be small letters and digits, and "
                    f"none of {', '.join(_TAKEN_NAMES)}: choose another, such as vision or audio"
                )
        return encoders

    @model_validator(mode="before")
    @classmethod
    def _from_internvl_form(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not _INTERNVL_KEYS & given.keys():
            return given
        if "encoders" in given:
            raise ValueError(
                "a model has either encoders or vision, tiling and downsample_ratio beside them; "
                "give encoders alone"
            )
        rest = {name: value for name, value in given.items() if name not in _INTERNVL_KEYS}
        tower = given.get("vision", {})
        if isinstance(tower, TilesEncoder):
            tower = tower.model_dump()
        if not isinstance(tower, dict):
            raise ValueError("vision must be a table")
        beside = {name: given[name] for name in _BESIDE_VISION if name in given}
        return rest | {"encoders": {"vision": {"kind": "tiles"} | tower | beside}}

    @model_serializer(mode="wrap")
    def _to_internvl_form(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        encoders = fields.pop("encoders")
        if list(encoders) != ["vision"] or not isinstance(self.encoders["vision"], TilesEncoder):
            return fields | {"encoders": encoders}
        tower = encoders["vision"]
        del tower["kind"]
        ratio, tiling = (tower.pop(name) for name in _BESIDE_VISION)
        first = {"name": fields["name"], "downsample_ratio": ratio, "vision": tower}
        return first | {"language": fields["language"], "tiling": tiling} | fields

    @property
    def vision(self) -> TilesEncoder:
        """Tile encoder of InternVL."""
        return self._encoder(TilesEncoder, "vision", "image tiles", "a vision table")

    @property
    def takes_images(self) -> bool:
        """Whether the model has `vision`, a tile encoder."""
        return isinstance(self.encoders.get("vision"), TilesEncoder)

    @property
    def images(self) -> ImagesEncoder | None:
        """Native-resolution image encoder, or None if absent."""
        towers = self.encoders.values()
        return next((tower for tower in towers if isinstance(tower, ImagesEncoder)), None)

    @property
    def audio(self) -> ClipsEncoder:
        """Audio clip encoder of the trainer."""
        table = 'an encoder "audio" of kind "clips"'
        return self._encoder(ClipsEncoder, "audio", "audio clips", table)

    def _encoder(self, kind: type[E], name: str, items: str, table: str) -> E:
        tower = self.encoders.get(name)
        if not isinstance(tower, kind):
            raise UserError(
                f"{self.name} has no encoder of {items}, which this needs; it must be a model with "
                f"{table}: choose another --model"
            )
        return tower

    @property
    def takes_audio(self) -> bool:
        """Whether the model has `audio`, a clip encoder."""
        return isinstance(self.encoders.get("audio"), ClipsEncoder)

    @property
    def tiling(self) -> TilingConfig | None:
        """Tiling of images, or None if the model takes no images."""
        return self.vision.tiling if self.takes_images else None

    @property
    def towers(self) -> tuple[str, ...]:
        """Names of all encoders and "language", in model order."""
        return (*self.encoders, "language")

    @property
    def layers(self) -> int:
        """Number of layers of all towers."""
        return sum(tower.layers for tower in self.encoders.values()) + self.language.layers

    @property
    def item_features(self) -> tuple[str, ...]:
        """Item features of the encoders, in model order."""
        return tuple(dict.fromkeys(tower.feature for tower in self.encoders.values()))

    def without_encoders(self) -> "ModelConfig":
        """Return the language model alone, with deepstack inputs from its encoders."""
        alone = self.model_copy(update={"encoders": {}})
        alone._encoders_elsewhere = self.encoders_elsewhere | self.encoders
        return alone

    @property
    def encoders_elsewhere(self) -> dict[str, Encoder]:
        """Encoders that provide features to a separate language model, by name."""
        return self._encoders_elsewhere

    def with_tower(self, name: str, **changes: Any) -> "ModelConfig":
        """Return the model with changed fields of the encoder `name`, or of "language"."""
        if name == "language":
            language = self.language.model_copy(update=changes)
            return self.model_copy(update={"language": language})
        tower = self.encoders[name].model_copy(update=changes)
        return self.model_copy(update={"encoders": self.encoders | {name: tower}})

    def with_layers(self, **layers: int) -> "ModelConfig":
        """Return the model with other layer counts for the given towers."""
        model = self
        for name, count in layers.items():
            model = model.with_tower(name, layers=count)
        return model


_TAKEN_NAMES = ("language", "projector", "head")  # part names that no encoder may have
_BESIDE_VISION = ("downsample_ratio", "tiling")
_INTERNVL_KEYS = {"vision", *_BESIDE_VISION}
_OF_DATA = ("name", "tiling", "chat_template", "system_message", "chat_system_message")


_NCCL_PEER_MIB = 32 * 12.0
"""NCCL buffers per all-to-all peer: 23.6 GiB for 63 peers (NVIDIA/Megatron-LM#6378)."""


class ClusterConfig(Frozen):
    """Devices and links for the analytic cost model; bandwidths are per device."""

    name: str
    device: str
    memory_gib: Rate
    gpus_per_node: Annotated[int, Field(ge=1, le=1_024)]
    peak_tflops: dict[Precision, Rate] = Field(description="dense matrix rate by precision")
    matmul_efficiency: Share = Field(description="share of the peak that layers reach")
    fp8_efficiency: Share | None = written_unless(
        None, "share of the fp8 peak that products in FP8 reach; left out: that of others"
    )
    memory_gb_per_s: Rate
    memory_efficiency: Share = Field(
        description="share of that rate that element-wise kernels reach"
    )
    kernel_us: Rate = Field(description="of each kernel, besides its work")
    host_us: Annotated[float, Field(ge=0, le=1e9)] = written_unless(
        0.0, "of the host to launch a kernel of a layer; left out: not counted"
    )
    intra_node_gb_per_s: Rate
    inter_node_gb_per_s: Rate
    link_efficiency: Share = Field(description="share of both rates that transfers reach")
    network_efficiency: Share | None = written_unless(
        None, "share of inter_node_gb_per_s instead; left out: link_efficiency"
    )
    link_latency_us: Rate
    peer_mib: Annotated[float, Field(ge=0, le=1e6)] | None = written_unless(
        None,
        "buffers of the communication library for each rank that a device exchanges "
        "with in an all-to-all; left out: NCCL's 384 (32 channels of 12 MiB), 0 where device is "
        "a CPU",
    )
    basis: Literal["measured", "fitted", "assumed"] | None = written_unless(
        None,
        "where most of the rates come from; left out: assumed, or measured where there "
        "is a table of rates",
    )
    # Not written if empty: plans are keyed by the hash of the written text.
    rates: dict[PlainPrecision, Rates] = written_unless(
        {}, "measured rates by precision, of shapes, which count in place of the shares"
    )
    hop_us: Annotated[float, Field(ge=0, le=1e9)] = written_unless(
        3.0, "latency of a ring's hop between nodes; fitted on published steps if left out"
    )
    accuracy: dict[str, Any] = written_unless(
        {}, "error that plans of earlier versions hold; not read"
    )
    rates_of: ScaledRates | None = written_unless(
        None, "another cluster, whose tables count where this one has none"
    )

    @property
    def network_share(self) -> float:
        """Achieved share of the network adapter's rate."""
        return self.network_efficiency or self.link_efficiency

    @property
    def is_cpu(self) -> bool:
        """Whether devices are CPU cores."""
        return "CPU" in self.device

    @property
    def peer_bytes(self) -> float:
        """Library buffers per all-to-all peer."""
        nccl_mib = 0.0 if self.is_cpu else _NCCL_PEER_MIB
        return (nccl_mib if self.peer_mib is None else self.peer_mib) * 2**20

    def measured(self, precision: Precision) -> Rates | None:
        """Measured rates; under FP8, bf16 rates of operations left in bf16."""
        return self.rates.get("bf16" if precision == "fp8" else precision)

    def tflops(self, precision: Precision) -> float:
        """Dense peak of a device."""
        if precision not in self.peak_tflops:
            known = ", ".join(self.peak_tflops) or "none"
            raise UserError(
                f"cluster {self.name}: peak_tflops has no rate for {precision} (it has {known}); "
                f"add {precision} to peak_tflops, or choose a --precision that it has"
            )
        return self.peak_tflops[precision]


def with_imbalance(model: ModelConfig, imbalance: float) -> ModelConfig:
    """Return the model with another `ExpertsConfig.imbalance` in all expert layers."""
    change = {"imbalance": imbalance}
    experts = (run.experts and run.experts.model_copy(update=change) for run in model.language.runs)
    runs = zip(model.language.runs, experts, strict=True)
    changed = tuple(run.model_copy(update={"experts": each}) for run, each in runs)
    return model.with_tower("language", runs=changed)


def load_model(name_or_path: str) -> ModelConfig:
    """Read the model preset of that name, or the TOML file at that path."""
    return _load("models", name_or_path, ModelConfig)


def config_toml(config: ModelConfig | ClusterConfig) -> str:
    """TOML text that `load_model` or `load_cluster` reads back."""
    return "\n".join(_toml_lines(config.model_dump(mode="json", exclude_none=True), "")) + "\n"


def precision_rates_toml(precision: Precision, rates: Rates) -> str:
    """TOML text of a cluster's rates in one precision."""
    dumped = rates.model_dump(mode="json", exclude_none=True)
    return "\n".join(_toml_lines({"rates": {precision: dumped}}, "")).lstrip("\n") + "\n"


def _toml_lines(table: dict[str, Any], path: str) -> list[str]:
    """Lines of a table, values first, then nested tables; `path` ends in a dot."""
    tables = {name: value for name, value in table.items() if isinstance(value, dict)}
    lines = [_toml_line(name, table[name]) for name in table if name not in tables]
    for name, inner in tables.items():
        lines += ["", f"[{path}{name}]", *_toml_lines(inner, f"{path}{name}.")] if inner else []
    return lines


def _toml_line(name: str, value: Any) -> str:
    return f"{name} = {_toml_value(value)}"


def _toml_value(value: Any) -> str:
    """A value in one line. A list of tables takes one line per table."""
    if isinstance(value, dict):
        return "{" + ", ".join(_toml_line(*entry) for entry in value.items()) + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + "".join(f"    {_toml_value(one)},\n" for one in value) + "]"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    # JSON writes text, numbers and booleans as TOML does, except for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def model_sizes(model: ModelConfig, *, without: Collection[str]) -> dict[str, Any]:
    """Describe a model's towers as JSON values, without names and data preparation.

    `without`: fields of towers and experts to leave out.
    """
    fields = model.model_dump(mode="json")
    for name in _OF_DATA:
        fields.pop(name, None)
    language = fields["language"]
    tables = [language, fields.get("vision", {}), *fields.get("encoders", {}).values()]
    tables += [run["experts"] for run in language.get("runs", ()) if run.get("experts")]
    for table in tables:
        for name in (*without, "tiling"):
            table.pop(name, None)
    for name in ("runs", "rope_scaling"):  # unknown to older descriptions
        if not language.get(name):
            language.pop(name, None)
    return fields


def load_cluster(name_or_path: str) -> ClusterConfig:
    """Read the cluster preset of that name, or the TOML file at that path.

    Tables taken from another cluster (`rates_of`) are resolved.
    """
    cluster = _load("clusters", name_or_path, ClusterConfig)
    scaled = cluster.rates_of
    if scaled is None:
        return cluster
    other = _load("clusters", scaled.cluster, ClusterConfig)
    if not other.rates:
        raise UserError(
            f"cluster {cluster.name}: rates_of names {scaled.cluster}, which has no table of rates "
            "of its own; name a cluster that has one, such as b200-180g, or leave rates_of out"
        )
    taken = {
        precision: rates.of_peak(other.tflops(precision), cluster.tflops(precision), scaled)
        for precision, rates in other.rates.items()
        if precision in cluster.peak_tflops
    }
    return cluster.model_copy(update={"rates": taken | cluster.rates, "rates_of": None})


def preset_names(kind: str) -> list[str]:
    """Names of the shipped presets of `kind` ("models" or "clusters")."""
    return sorted(path.stem for path in (_PRESETS / kind).glob("*.toml"))


def config_file(kind: str, name_or_path: str) -> Path:
    """File that `load_model` or `load_cluster` reads, of `kind` "models" or "clusters"."""
    preset = name_or_path in preset_names(kind)
    return _PRESETS / kind / f"{name_or_path}.toml" if preset else Path(name_or_path)


def _load(kind: str, name_or_path: str, config_type: type[T]) -> T:
    names, path = preset_names(kind), config_file(kind, name_or_path)
    if not path.is_file():
        near = get_close_matches(name_or_path, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"{name_or_path!r} is neither a file nor a preset{hint} (`omnibal presets` lists them)"
        )
    page = "; docs/models.md describes all of a model file" if kind == "models" else ""
    remedy = f"compare with a preset, such as {_PRESETS / kind / names[0]}.toml{page}"
    return read_toml_model(config_type, path, remedy)
