"""Models and clusters as read from TOML, and their presets."""

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

from omnibal.base.errors import UserError, refuse_if
from omnibal.base.files import read_toml_model
from omnibal.base.frozen import Count, Fraction, Frozen, Layers, Rate, Width, written_unless
from omnibal.model.encoders import (
    ENCODER_KINDS,
    ClipsEncoder,
    Encoder,
    ImagesEncoder,
    TilesEncoder,
    TilingConfig,
)
from omnibal.model.layer_kinds import LayerKind, LayerRun
from omnibal.model.rate_tables import NO_RATES, Rates, ScaledRates

Precision = Literal["fp32", "bf16", "fp8"]  # fp8: bf16 with FP8 GEMMs in layers (model/fp8.py)
PlainPrecision = Literal["fp32", "bf16"]  # of measurements
Provider = Literal["local", "te"]  # linears and attention: Megatron-core's, Transformer Engine's
ChatTemplateName = Literal[  # InternVL's names, Llama 3.1, Qwen2.5, or the tokenizer's own
    "internlm2-chat", "Hermes-2", "phi3-chat", "internvl2_5", "llama3", "qwen2.5", "tokenizer"
]
T = TypeVar("T", bound="Frozen")
E = TypeVar("E", TilesEncoder, ClipsEncoder)
_PRESETS = Path(__file__).parents[1] / "presets"


class RopeScaling(Frozen):
    """Llama 3.1's RoPE scaling, by wavelength w in tokens.

    Frequencies with w > original_positions / low_frequency_factor are divided by `factor`, with
    w < original_positions / high_frequency_factor unchanged, and interpolated in between.
    """

    factor: PositiveFloat
    low_frequency_factor: PositiveFloat = 1.0
    high_frequency_factor: PositiveFloat = 4.0
    original_positions: Count = 8192

    @model_validator(mode="after")
    def _low_is_below_high(self) -> "RopeScaling":
        low, high = self.low_frequency_factor, self.high_frequency_factor
        message = f"low_frequency_factor {low} must be below high_frequency_factor {high}"
        refuse_if(low >= high, message)
        return self


class RopeSections(Frozen):
    """Multimodal RoPE sections (Qwen2-VL, arXiv 2409.12191, 2.1) of half a head, or less.

    With fewer than half of a head, the rest of the head has no position (partial RoPE).
    """

    time: Width
    rows: Width
    columns: Width
    # frequencies of the three alternate, ending with time's (Qwen3-VL), or follow each other
    interleaved: bool = False


_VOCABULARY_MULTIPLE = 128  # per tensor-parallel rank: Megatron's --make-vocab-size-divisible-by


class LanguageConfig(Frozen):
    """Decoder, by default with RMSNorm, RoPE and gated feed-forwards; attention by layer kind."""

    layers: Layers
    hidden_size: Width
    heads: Width
    kv_heads: Width
    head_size: Width | None = written_unless(None)  # left out: hidden_size / heads
    ffn_hidden_size: Width
    vocab_size: Width
    # of dense feed-forwards; gated: SwiGLU or GeGLU, which cost the same
    activation: Literal["gated", "gelu", "squared_relu"] = written_unless("gated")
    # learned (GPT-3): an embedding of max_positions; alibi (MPT): none
    positions: Literal["rotary", "learned", "alibi"] = written_unless("rotary")
    bias: bool = written_unless(False)  # biases of all linears but the head (GPT-3, GPT-OSS)
    norm_bias: bool = written_unless(False)  # biases of the norms (LayerNorm)
    sinks: bool = written_unless(False)  # a learned logit per head in attention's sum (GPT-OSS)
    qkv_bias: bool = False
    # RMSNorm of every head of q and of k, with one weight for all heads (Qwen3)
    qk_norm: bool = written_unless(False)
    # attention's output is gated by a projection of the layer's input (Qwen3.5)
    output_gate: bool = written_unless(False)
    post_norms: bool = written_unless(False)  # a norm after each block too (Gemma 3)
    # weights of norms are stored minus 1 (Qwen3.5)
    zero_centered_norms: bool = written_unless(False)
    norm_eps: PositiveFloat = 1e-5
    rope_base: Annotated[int, Field(ge=1, le=10**15)] = 1_000_000
    # max tokens per sample; left out: unlimited
    max_positions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    # dynamic RoPE scaling beyond max_positions, for exports only: no sample is longer
    rope_factor: PositiveFloat | None = None
    rope_scaling: RopeScaling | None = None  # Llama 3.1's, at any length; left out: none
    # multimodal RoPE (Qwen2-VL and later); left out: by position in the sample
    rope_sections: RopeSections | None = written_unless(None)
    tied_head: bool = False  # the head's matrix is the token embedding (small Qwen2 models)
    # layers of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2)
    prediction_layers: Annotated[int, Field(ge=0, le=16)] = written_unless(0)
    # weight of the prediction layers' loss: --mtp-loss-scaling-factor
    prediction_loss: Annotated[float, Field(ge=0, le=1e3)] = written_unless(0.1)
    # runs of layer kinds, repeated up to `layers`; left out: full attention, dense feed-forward
    runs: tuple[LayerRun, ...] = ()

    @property
    def head_width(self) -> int:
        """Width of one head of q, of k and of v."""
        return self.head_size or self.hidden_size // self.heads

    @property
    def gates(self) -> int:
        """Matrices before a dense feed-forward's activation: 2 if gated (SwiGLU)."""
        return 2 if self.activation == "gated" else 1

    @property
    def is_hybrid(self) -> bool:
        """Whether layers have linear attention."""
        return any(kind.linear for kind in self.kinds)

    def words_of_rank(self, tensor: int) -> int:
        """Return vocabulary rows per tensor-parallel rank, padded to _VOCABULARY_MULTIPLE."""
        return -(-self.vocab_size // (_VOCABULARY_MULTIPLE * tensor)) * _VOCABULARY_MULTIPLE

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "LanguageConfig":
        wide, heads, keys = self.hidden_size, self.heads, self.kv_heads
        message = f"hidden_size {wide} must be a multiple of heads {heads}, or head_size given"
        refuse_if(self.head_size is None and wide % heads, message)
        refuse_if(heads % keys, f"heads {heads} must be a multiple of kv_heads {keys}")
        has_limit, factor = self.max_positions is not None, self.rope_factor
        is_learned = self.positions == "learned"
        refuse_if(
            is_learned and not has_limit, "learned positions need max_positions, their number"
        )
        has_experts = any(kind.experts for kind in self.kinds)
        is_gated = self.activation == "gated"
        refuse_if(has_experts and not is_gated, "experts are gated; leave activation out")
        refuse_if(factor and not has_limit, f"rope_factor {factor} needs max_positions too")
        both = factor and self.rope_scaling
        refuse_if(both, "rope_factor and rope_scaling are exclusive; drop one")
        if (rope := self.rope_sections) is not None:
            counts, half = (rope.time, rope.rows, rope.columns), self.head_width // 2
            message = f"rope_sections {counts} must add up to at most half of a head, {half}"
            refuse_if(sum(counts) > half, message)
        kinds = set(self.kinds)
        is_unclear = len({kind.name for kind in kinds}) < len(kinds)  # costs are keyed by name
        refuse_if(is_unclear, "runs with equally many experts must have equal experts")
        return self

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of every layer, [layers]."""
        pattern = [run.kind for run in self.runs for _ in range(run.layers)] or [LayerKind()]
        return tuple(islice(cycle(pattern), self.layers))


class ModelConfig(Frozen):
    """Language model with any number of encoders.

    TOML has a table per encoder, or InternVL's form: tables `vision` and `tiling`, and
    `downsample_ratio`. A single encoder `vision` over tiles is written in the latter.
    """

    name: str
    encoders: dict[str, Encoder] = Field(default={})  # by name, in model order
    language: LanguageConfig
    chat_template: ChatTemplateName = "internlm2-chat"
    # for conversations without one; empty: none, left out: the template's
    system_message: str | None = None
    # for tools/chat.py; empty: an empty turn, left out: as in training
    chat_system_message: str | None = None

    _encoders_elsewhere: dict[str, Encoder] = PrivateAttr(default={})

    @field_validator("encoders", mode="before")
    @classmethod
    def _have_kinds(cls, encoders: Any) -> Any:
        for name, tower in encoders.items() if isinstance(encoders, dict) else ():
            if isinstance(tower, dict) and "kind" not in tower:
                kinds = " or ".join(f'"{kind}"' for kind in ENCODER_KINDS)
                raise ValueError(f"{name} needs a kind: {kinds}")
        return encoders

    @field_validator("encoders")
    @classmethod
    def _names_are_words(cls, encoders: dict[str, Encoder]) -> dict[str, Encoder]:
        for name in encoders:
            is_word = re.fullmatch("[a-z][a-z0-9]*", name) and name not in _RESERVED_NAMES
            rule = f"lower-case letters and digits, not {', '.join(_RESERVED_NAMES)}"
            refuse_if(not is_word, f"encoder name {name!r} must be {rule}")
        return encoders

    @model_validator(mode="before")
    @classmethod
    def _from_internvl_form(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not _INTERNVL_KEYS & given.keys():
            return given
        message = "encoders and vision, tiling or downsample_ratio are exclusive; drop these"
        refuse_if("encoders" in given, message)
        others = {name: value for name, value in given.items() if name not in _INTERNVL_KEYS}
        tower = given.get("vision", {})
        if isinstance(tower, TilesEncoder):
            tower = tower.model_dump()
        refuse_if(not isinstance(tower, dict), "vision must be a table")
        outer = {name: given[name] for name in _OUTER_VISION_KEYS if name in given}
        return others | {"encoders": {"vision": {"kind": "tiles"} | tower | outer}}

    @model_serializer(mode="wrap")
    def _to_internvl_form(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        encoders = fields.pop("encoders")
        if list(encoders) != ["vision"] or not isinstance(self.encoders["vision"], TilesEncoder):
            return fields | {"encoders": encoders}
        tower = encoders["vision"]
        del tower["kind"]
        ratio, tiling = (tower.pop(name) for name in _OUTER_VISION_KEYS)
        # Plans are keyed by a hash of this text, so the keys keep their order.
        first = {"name": fields["name"], "downsample_ratio": ratio, "vision": tower}
        return first | {"language": fields["language"], "tiling": tiling} | fields

    @property
    def vision(self) -> TilesEncoder:
        """InternVL's tile encoder. Raise UserError if absent."""
        return self._encoder(TilesEncoder, "vision", "image tiles", "a vision table")

    @property
    def takes_images(self) -> bool:
        """Whether `vision` is a tile encoder."""
        return isinstance(self.encoders.get("vision"), TilesEncoder)

    @property
    def images(self) -> ImagesEncoder | None:
        """Native-resolution image encoder, or None if absent."""
        towers = self.encoders.values()
        return next((tower for tower in towers if isinstance(tower, ImagesEncoder)), None)

    @property
    def audio(self) -> ClipsEncoder:
        """Audio clip encoder. Raise UserError if absent."""
        table = 'an encoder "audio" of kind "clips"'
        return self._encoder(ClipsEncoder, "audio", "audio clips", table)

    def _encoder(self, kind: type[E], name: str, items: str, table: str) -> E:
        tower = self.encoders.get(name)
        if not isinstance(tower, kind):
            raise UserError(f"{self.name} has no encoder of {items}: choose a --model with {table}")
        return tower

    @property
    def takes_audio(self) -> bool:
        """Whether `audio` is a clip encoder."""
        return isinstance(self.encoders.get("audio"), ClipsEncoder)

    @property
    def tiling(self) -> TilingConfig | None:
        """Tiling of images, or None without a tile encoder."""
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
        """Return the language model, encoders in `encoders_elsewhere`; deepstack inputs stay."""
        alone = self.model_copy(update={"encoders": {}})
        alone._encoders_elsewhere = self.encoders_elsewhere | self.encoders
        return alone

    @property
    def encoders_elsewhere(self) -> dict[str, Encoder]:
        """Encoders that `without_encoders` removed: data-parallel, outside the pipeline."""
        return self._encoders_elsewhere

    def with_tower(self, name: str, **changes: Any) -> "ModelConfig":
        """Return the model with changed fields of the tower `name`, not validated."""
        if name == "language":
            language = self.language.model_copy(update=changes)
            return self.model_copy(update={"language": language})
        tower = self.encoders[name].model_copy(update=changes)
        return self.model_copy(update={"encoders": self.encoders | {name: tower}})

    def with_layers(self, **layers: int) -> "ModelConfig":
        """Return the model with other layer counts, by tower."""
        model = self
        for name, count in layers.items():
            model = model.with_tower(name, layers=count)
        return model


_RESERVED_NAMES = ("language", "projector", "head")  # other parts of a model
_OUTER_VISION_KEYS = ("downsample_ratio", "tiling")  # InternVL's form has them outside `vision`
_INTERNVL_KEYS = {"vision", *_OUTER_VISION_KEYS}
_DATA_KEYS = ("name", "tiling", "chat_template", "system_message", "chat_system_message")
# NCCL buffers per all-to-all peer: 23.6 GiB for 63 peers (NVIDIA/Megatron-LM#6378).
_NCCL_PEER_MIB = 32 * 12.0


class ClusterConfig(Frozen):
    """Devices and links; bandwidths are per device."""

    name: str
    device: str
    memory_gib: Rate
    gpus_per_node: Annotated[int, Field(ge=1, le=1_024)]
    peak_tflops: dict[Precision, Rate]  # dense matrix rate by precision
    matmul_efficiency: Fraction  # share of the peak that layers reach
    # share of the fp8 peak that FP8 GEMMs reach; left out: matmul_efficiency
    fp8_efficiency: Fraction | None = written_unless(None)
    memory_gb_per_s: Rate
    memory_efficiency: Fraction  # share of memory_gb_per_s that element-wise kernels reach
    kernel_us: Rate  # fixed device time per kernel
    # host time to launch a kernel of a layer; left out: not counted
    host_us: Annotated[float, Field(ge=0, le=1e9)] = written_unless(0.0)
    intra_node_gb_per_s: Rate
    inter_node_gb_per_s: Rate
    link_efficiency: Fraction  # share of both link rates that transfers reach
    # share of inter_node_gb_per_s alone; left out: link_efficiency
    network_efficiency: Fraction | None = written_unless(None)
    link_latency_us: Rate
    # communication buffers per all-to-all peer; left out: NCCL's 384 (32 channels of 12 MiB),
    # 0 on CPUs
    peer_mib: Annotated[float, Field(ge=0, le=1e6)] | None = written_unless(None)
    # source of most rates; left out: measured with a table of rates, else assumed
    basis: Literal["measured", "fitted", "assumed"] | None = written_unless(None)
    # Not written if empty: plans are keyed by the hash of the written text.
    # measured times by shape and precision; they replace the efficiencies
    rates: dict[PlainPrecision, Rates] = written_unless({})
    # latency per ring hop between nodes; the default is fitted on published steps
    hop_us: Annotated[float, Field(ge=0, le=1e9)] = written_unless(3.0)
    accuracy: dict[str, Any] = written_unless({})  # in plans of earlier versions; not read
    # cluster whose tables replace missing ones of this cluster
    rates_of: ScaledRates | None = written_unless(None)

    @property
    def is_cpu(self) -> bool:
        return "CPU" in self.device

    @property
    def peer_bytes(self) -> float:
        """Bytes of the communication library's buffers per all-to-all peer."""
        nccl_mib = 0.0 if self.is_cpu else _NCCL_PEER_MIB
        return (nccl_mib if self.peer_mib is None else self.peer_mib) * 2**20

    def measured_rates(self, precision: Precision) -> Rates:
        """Return measured rates in this precision (fp8: bf16's), empty if absent."""
        # Under FP8 they cost the operations that stay in bf16.
        return self.rates.get("bf16" if precision == "fp8" else precision, NO_RATES)

    def tflops(self, precision: Precision) -> float:
        """Return a device's dense matrix peak in TFLOP/s. Raise UserError if unknown."""
        if precision not in self.peak_tflops:
            known = ", ".join(self.peak_tflops) or "none"
            message = (
                f"cluster {self.name}: peak_tflops has no rate for {precision} (it has {known})"
            )
            raise UserError(f"{message}; add it, or choose another --precision")
        return self.peak_tflops[precision]


def with_imbalance(model: ModelConfig, imbalance: float) -> ModelConfig:
    """Return the model with another `ExpertsConfig.imbalance` in all expert layers."""
    runs = []
    for run in model.language.runs:
        experts = run.experts and run.experts.model_copy(update={"imbalance": imbalance})
        runs.append(run.model_copy(update={"experts": experts}))
    return model.with_tower("language", runs=tuple(runs))


def load_model(name_or_path: str) -> ModelConfig:
    """Return a model preset by name, or the model of a TOML file."""
    return _load_config("models", name_or_path, ModelConfig)


def config_toml(config: ModelConfig | ClusterConfig) -> str:
    """Return TOML text that `load_model` or `load_cluster` reads back."""
    return "\n".join(_toml_lines(config.model_dump(mode="json", exclude_none=True), "")) + "\n"


def precision_rates_toml(precision: Precision, rates: Rates) -> str:
    """Return the TOML text of a cluster's rates in one precision."""
    dumped = rates.model_dump(mode="json", exclude_none=True)
    return "\n".join(_toml_lines({"rates": {precision: dumped}}, "")).lstrip("\n") + "\n"


def _toml_lines(table: dict[str, Any], path: str) -> list[str]:
    # Values first: after a [table] they would belong to it. `path` is empty or ends in a dot.
    tables = {name: value for name, value in table.items() if isinstance(value, dict)}
    lines = [_toml_line(name, table[name]) for name in table if name not in tables]
    for name, inner in tables.items():
        lines += ["", f"[{path}{name}]", *_toml_lines(inner, f"{path}{name}.")] if inner else []
    return lines


def _toml_line(name: str, value: Any) -> str:
    return f"{name} = {_toml_value(value)}"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(_toml_line(*entry) for entry in value.items()) + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + "".join(f"    {_toml_value(item)},\n" for item in value) + "]"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    # JSON writes text, numbers and booleans as TOML does, except for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def model_sizes(model: ModelConfig, *, without: Collection[str]) -> dict[str, Any]:
    """Return a model's towers as JSON values, without names and data preparation.

    `without`: fields of towers and experts to leave out.
    """
    fields = model.model_dump(mode="json")
    for name in _DATA_KEYS:
        fields.pop(name, None)
    language = fields["language"]
    tables = [language, fields.get("vision", {}), *fields.get("encoders", {}).values()]
    tables += [run["experts"] for run in language.get("runs", ()) if run.get("experts")]
    for table in tables:
        for name in (*without, "tiling"):
            table.pop(name, None)
    for name in ("runs", "rope_scaling"):  # profiles of earlier versions lack them
        if not language.get(name):
            language.pop(name, None)
    return fields


def load_cluster(name_or_path: str) -> ClusterConfig:
    """Return a cluster preset by name, or the cluster of a TOML file, with `rates_of` resolved."""
    cluster = _load_config("clusters", name_or_path, ClusterConfig)
    scaled = cluster.rates_of
    if scaled is None:
        return cluster
    other = _load_config("clusters", scaled.cluster, ClusterConfig)
    message = f"cluster {cluster.name}: rates_of names {scaled.cluster}, which has no rates"
    refuse_if(not other.rates, f"{message}; name another, such as b200-180g, or none")
    taken = {
        precision: rates.scale_to_peak(other.tflops(precision), cluster.tflops(precision), scaled)
        for precision, rates in other.rates.items()
        if precision in cluster.peak_tflops
    }
    return cluster.model_copy(update={"rates": taken | cluster.rates, "rates_of": None})


def preset_names(kind: str) -> list[str]:
    """Return the names of the presets of `kind`, "models" or "clusters"."""
    return sorted(path.stem for path in (_PRESETS / kind).glob("*.toml"))


def config_file(kind: str, name_or_path: str) -> Path:
    """Return the path of a preset of `kind` ("models" or "clusters"), or the given path."""
    preset = name_or_path in preset_names(kind)
    return _PRESETS / kind / f"{name_or_path}.toml" if preset else Path(name_or_path)


def _load_config(kind: str, name_or_path: str, config_type: type[T]) -> T:
    names, path = preset_names(kind), config_file(kind, name_or_path)
    if not path.is_file():
        near = get_close_matches(name_or_path, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        message = f"{name_or_path!r} is neither a file nor a preset{hint}"
        raise UserError(f"{message} (`omnibal presets` lists them)")
    page = "; docs/models.md describes all of a model file" if kind == "models" else ""
    remedy = f"compare with a preset, such as {_PRESETS / kind / names[0]}.toml{page}"
    return read_toml_model(config_type, path, remedy)
