"""A launch line with its model, and quantities derived from both."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate
from typing import Any

from omnibal.base.errors import UserError
from omnibal.base.frozen import MAX_COUNT, MAX_LAYERS
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.layer_kinds import LinearAttention
from omnibal.model.levels import ContextExchange
from omnibal.trainers.export.layout import LayoutError, PPLayout, parse_layout
from omnibal.trainers.lint import flags as known
from omnibal.trainers.lint.launch_settings import MEGATRON, Launch, Launcher

_MIN_SIMILARITY = 0.9  # of flag names, for a suggestion; none of the published lines gets one
SIZE_FLAGS: Mapping[str, str] = {  # flag of each model size
    "num-layers": "layers",
    "hidden-size": "hidden",
    "num-attention-heads": "heads",
    "num-query-groups": "query_groups",
    "num-experts": "experts",
    "num-moe-experts": "experts",
}
RECIPES = ("recipe", "model-recipe-name", "mr")  # flags that name a Megatron-Bridge recipe
_MODEL_FLAGS = {Launcher.MS_SWIFT: ("model",), Launcher.MEGATRON_BRIDGE: RECIPES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the language model that flags may set."""

    layers: int
    hidden: int
    heads: int
    query_groups: int  # heads of k and v; equal to heads with latent attention
    experts: int  # routed experts of a layer, or 0


@dataclass(frozen=True)
class LaunchLine:
    """A launch with its language model."""

    launch: Launch
    language: LanguageConfig

    @cached_property
    def flags(self) -> dict[str, str | None]:
        """Values of flags by normalised name. None for a flag without a value."""
        return {known.canonical(name): text for name, text in self.launch.flags.items()}

    @property
    def misspelled_flags(self) -> Mapping[str, str]:
        """Closest known name by flag that is probably misspelled."""
        names = sorted({*known.FIELDS, *known.LENGTHS, *known.FROZEN, *SIZE_FLAGS})
        others = [name for name in self.flags if name not in names]
        near = {name: get_close_matches(name, names, 1, _MIN_SIMILARITY) for name in others}
        return {name: matches[0] for name, matches in near.items() if matches}

    def on(self, name: str, default: bool = False) -> bool:
        """Return whether a switch is on, or `default` if not given."""
        return known.is_on(self.flags[name]) if name in self.flags else default

    def text(self, *names: str) -> str | None:
        """Return the value of the first flag that is given and not "none", or None."""
        texts = (self.flags.get(name) for name in names)
        return next((text.strip() for text in texts if text and not known.is_nothing(text)), None)

    def number(self, name: str) -> int | None:
        """Return a flag's whole number, or None if not given or invalid."""
        text = self.text(name)
        return None if text is None else known.whole_number(text)

    @cached_property
    def model_sizes(self) -> Sizes:
        """Sizes of the named model."""
        language = self.language
        mixtures = [kind.experts for kind in language.kinds if kind.experts is not None]
        return Sizes(
            layers=language.layers,
            hidden=language.hidden_size,
            heads=language.heads,
            query_groups=language.heads if self.is_latent else language.kv_heads,
            experts=max((mixture.experts for mixture in mixtures), default=0),
        )

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes that the trainer builds: flags other than 0 override the model's."""
        given: dict[str, Any] = {size: self.number(flag) for flag, size in SIZE_FLAGS.items()}
        return replace(self.model_sizes, **{size: n for size, n in given.items() if n})

    @property
    def changed_sizes(self) -> dict[str, tuple[int, int]]:
        """Sizes that flags change: (built, model's) by name."""
        built, model = asdict(self.sizes), asdict(self.model_sizes)
        return {size: (built[size], model[size]) for size in built if built[size] != model[size]}

    @property
    def is_latent(self) -> bool:
        """Whether the model has multi-latent attention."""
        return any(kind.latent is not None for kind in self.language.kinds)

    @property
    def linear(self) -> LinearAttention | None:
        """The model's gated delta net, if any."""
        return next((kind.linear for kind in self.language.kinds if kind.linear is not None), None)

    @property
    def grid(self) -> int:
        """Ranks per replica of the model: tensor x pipeline x context size."""
        return self.launch.tensor * self.launch.pipeline * self.launch.context

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Words of `--cp-comm-type`: one for all layers, or one per layer."""
        return known.split_words(self.text("cp-comm-type")) or ("p2p",)

    @property
    def exchange(self) -> ContextExchange:
        """Exchange to predict: heads if all layers exchange heads, else keys and values."""
        is_heads = set(self.exchanges) == {"a2a"}
        return ContextExchange.HEADS if is_heads else ContextExchange.GATHER

    @property
    def is_ring(self) -> bool:
        """Whether every layer uses ring attention."""
        return {"p2p", "a2a+p2p"}.issuperset(self.exchanges)

    @property
    def expert_tensor(self) -> int:
        """Expert tensor size; by default the tensor size for Megatron except ms-swift, else 1."""
        inherits = MEGATRON - {Launcher.MS_SWIFT}
        default = self.launch.tensor if self.launch.launcher in inherits else 1
        return self.launch.expert_tensor or default

    @property
    def expert_grid(self) -> int:
        """Ranks per replica of the experts: expert tensor x expert x pipeline size."""
        return self.expert_tensor * self.launch.expert * self.launch.pipeline

    @property
    def data(self) -> int | None:
        """Data-parallel size, or None if unknown or not whole."""
        gpus = self.launch.gpus
        return None if gpus is None or gpus % self.grid else gpus // self.grid

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a rank per step, 1 by default, or None if unknown or not whole."""
        launch = self.launch
        if self.data is None or launch.micro_batch is None:
            return None
        at_once = launch.micro_batch * self.data  # samples of a micro-batch, over all ranks
        # nanotron has this flag in place of a global batch.
        if (of_rank := self.number("tokens.batch-accumulation-per-replica")) is not None:
            return of_rank
        step_samples = launch.global_batch or at_once
        return None if step_samples % at_once else step_samples // at_once

    @cached_property
    def layout(self) -> PPLayout | LayoutError | None:
        """The parsed layout, its error, or None without a layout."""
        given = self.launch.layout
        try:
            return None if given is None else parse_layout(given, self.launch.pipeline)
        except LayoutError as error:
            return error

    @property
    def valid_layout(self) -> PPLayout | None:
        """The layout if it parses, with equally many chunks on every stage."""
        layout = self.layout
        is_valid = isinstance(layout, PPLayout) and not len(layout.chunks) % layout.pipeline
        return layout if isinstance(layout, PPLayout) and is_valid else None

    @property
    def layers_to_split(self) -> int:
        """Layers to split evenly over stages; embedding and loss may count as layers."""
        launch = self.launch
        return self.sizes.layers + launch.account_for_embedding + launch.account_for_loss

    @property
    def end_layers(self) -> dict[str, int]:
        """Given layers of the first and the last stage, by `first` and `last`."""
        ends = {"first": self.launch.first_layers, "last": self.launch.last_layers}
        return {end: count for end, count in ends.items() if count is not None}

    @property
    def has_even_split(self) -> bool:
        """Whether no flag sets an uneven split."""
        launch = self.launch
        uneven = (launch.first_layers, launch.last_layers, launch.layout, launch.layers_by_stage)
        return all(given is None for given in uneven)

    @property
    def virtual(self) -> int | None:
        """Chunks per stage, or None for one or an unknown number."""
        launch, chunks = self.launch, self.launch.virtual
        if isinstance(self.layout, PPLayout):
            chunks = None if self.valid_layout is None else self.valid_layout.virtual
        elif launch.layers_per_virtual_stage is not None:
            chunks = self.layers_to_split // launch.pipeline // launch.layers_per_virtual_stage
        return chunks if chunks is not None and chunks > 1 else None

    @property
    def chunk_group(self) -> int:
        """Micro-batches that a chunk runs before the next chunk's turn; by default the stages."""
        name = "microbatch-group-size-per-{}-stage".format
        given = map(self.number, (name("virtual-pipeline"), name("vp")))
        return next(filter(None, given), self.launch.pipeline)


def named_models(launch: Launch) -> list[str]:
    """Return names of a line's model: ms-swift's model, or Bridge recipes. Empty if none."""
    given = {known.canonical(name): text for name, text in launch.flags.items()}
    return [text for flag in _MODEL_FLAGS.get(launch.launcher, ()) if (text := given.get(flag))]


def line_of(launch: Launch, model: ModelConfig) -> LaunchLine:
    """Return a launch with its model. Raise UserError if a size flag is out of range."""
    line = LaunchLine(launch, model.language)
    for name in SIZE_FLAGS:
        limit, size = MAX_LAYERS if name == "num-layers" else MAX_COUNT, line.number(name)
        if size is not None and not 0 <= size <= limit:
            raise UserError(f"--{name} must be at most {limit:,}, got {size}; correct it")
    return line


def layers_by_chunk(line: LaunchLine) -> tuple[tuple[int, ...], ...]:
    """Return numbers of language model layers, [stages][chunks]."""
    # As in megatron-core's `get_num_layers_to_build` and LoongForge's
    # `convert_custom_pipeline_to_layout`.
    launch, stages, chunks = line.launch, line.launch.pipeline, line.virtual or 1
    if isinstance(line.layout, PPLayout):
        return line.layout.layers_by_chunk
    if launch.layers_by_stage is not None:
        if launch.is_by_chunk:
            return tuple(tuple(launch.layers_by_stage[stage::stages]) for stage in range(stages))
        # A stage's last chunks take the remainder.
        return tuple(
            tuple(count // chunks + (chunk >= chunks - count % chunks) for chunk in range(chunks))
            for count in launch.layers_by_stage
        )
    is_nanotron = launch.launcher is Launcher.NANOTRON
    layers = _split_by_weights(line) if is_nanotron else _split_by_flags(line)
    split = [[count // chunks] * chunks for count in layers]
    split[0][0] -= launch.account_for_embedding
    split[-1][-1] -= launch.account_for_loss
    return tuple(map(tuple, split))


def _split_by_weights(line: LaunchLine) -> list[int]:
    """Return nanotron's layers per stage, from equal shares of weights."""
    # `build_model` of its `trainer.py`: a stage ends with the layer that exceeds its share. The
    # head counts, embeddings do not.
    model, layers, stages = line.language, line.sizes.layers, line.launch.pipeline
    # Weights as if every layer had attention of all heads and a dense gated feed-forward.
    rows = 4 * model.heads * model.head_width + 3 * model.ffn_hidden_size
    work = [model.hidden_size * rows] * layers + [model.hidden_size * model.vocab_size]
    # Cumulative weights at the ends of all stages but the last, and layers held. [stages]
    ends, held, stage = [sum(work) * (n + 1) / stages for n in range(stages - 1)], [0] * stages, 0
    for layer, done in enumerate(accumulate(work)):
        held[stage] += layer < layers
        stage += stage < stages - 1 and done > ends[stage]
    # The last stages may hold only the head or the loss; middle stages take a layer of the fullest.
    for stage in range(stages - 2, 0, -1):
        if not held[stage]:
            fullest = max(range(stages), key=lambda other: held[other])
            held[fullest], held[stage] = held[fullest] - 1, 1
    return held


def _split_by_flags(line: LaunchLine) -> list[int]:
    """Return layers per stage, with embedding and loss counted as layers if set."""
    launch, stages = line.launch, line.launch.pipeline
    ends = {0: launch.first_layers, stages - 1: launch.last_layers}
    given = {stage: count for stage, count in ends.items() if count is not None}
    between = stages - len(given)
    share, more = divmod(line.layers_to_split - sum(given.values()), between) if between else (0, 0)
    if launch.launcher in MEGATRON:  # refuses a remainder
        more = 0
    return [given.get(stage, share + (stage < more)) for stage in range(stages)]


def even_ends(layers: int, stages: int, chunks: int) -> tuple[int, int, int] | None:
    """Return layers of the first, each middle and the last stage, most even, or None if impossible.

    All are multiples of `chunks`, and middle stages are equal.
    """
    if stages < 2:
        return None
    for middle in range(-(-layers // stages), 0, -1):
        ends = layers - middle * (stages - 2)
        if not middle % chunks and not ends % chunks and ends >= 2 * chunks:
            first = ends // chunks // 2 * chunks
            return first, middle, ends - first
    return None
