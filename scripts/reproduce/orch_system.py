"""A three-modality job like OrchMLLM's (arXiv 2503.23830), and its phases as predicted here.

Of the paper are: 84B parameters, a ViT, a Whisper-like encoder and a Qwen2 language model, 2,560
H100, MFU 41.6 %, up to 3.1 times the throughput of Megatron-LM, and dispatch below 2 % of the
forward pass. Its tables of sizes and data were not at hand: `ASSUMPTIONS` lists what is assumed
instead, before any result. Nothing is fitted.

Costs are this project's counts of operations on its H100 preset, per item, so that every phase is
a sum of per-item times, or for padded audio a number of recordings times the longest one's.

Shapes: n samples of all ranks, d ranks.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from omnibal.cost.analytic import analytic_cost, model_flops
from omnibal.cost.model import CostModel
from omnibal.model.config import ClusterConfig, ModelConfig, load_cluster, load_model
from omnibal.model.encoders import ClipsEncoder
from omnibal.model.parallel import Parallel
from omnibal.model.units import feature_names, unit_names

RANKS = 2_560
SAMPLES_OF_RANK = 16
CLUSTER = "h100-80g"
PAPER_MFU, PAPER_SPEED_UP, PAPER_OVERHEAD = 0.416, 3.1, 0.02
FRAMES_PER_SECOND = 100
TOKENS_PER_SECOND = 25
LONGEST_RECORDING_S = 30.0
TOKENS_PER_TILE = 256
ROOM_FOR_TOKENS = 1.1
"""Tokens that a rank's memory holds, over the mean of all ranks."""
_FEATURE_BYTES = 2
_LENGTHS_S = (2.0, 10.0, 30.0)
"""Lengths of a recording at which its cost is counted; between them it is a parabola."""

ASSUMPTIONS = f"""\
- language model: Qwen2-72B (80 layers of 8,192); vision: 48 layers of 4,096; audio: Whisper large's
  32 layers, widened from 1,280 to 1,920; two-layer projectors
- sharded data parallelism over all ranks, which meet after each phase of the forward and of the
  backward pass
- every layer is recomputed; gathers of sharded weights, the reduction of gradients and the update
  are hidden or left out, for all ways alike
- 30 % speech recognition, 25 % spoken question answering, 30 % images, 15 % text, of assumed
  lengths (`mixture`); text and audio correlate in the first alone
- a rank's memory holds {ROOM_FOR_TOKENS} times the mean tokens, which "no balancing" and "one rule"
  ignore
- {TOKENS_PER_TILE} tokens of a tile and {TOKENS_PER_SECOND} of a second of sound, features in bf16
- costs are counts of operations at the preset's rates; no rank's are slower than another's
- recordings, of at most {LONGEST_RECORDING_S:.0f} s, are padded to the longest of a batch; text has
  no padding, and tokens attend within their sample
- ranks read what they encode, so that features alone are exchanged, at the preset's rates
"""


def the_model(frames: int = 3_000) -> ModelConfig:
    """The assumed model, with clips of so many frames."""
    base = load_model("internvl2.5-78b").with_tower(
        "vision", layers=48, hidden_size=4_096, heads=32, ffn_hidden_size=16_384
    )
    audio = ClipsEncoder(
        layers=32,
        hidden_size=1_920,
        heads=30,
        ffn_hidden_size=7_680,
        normalization="LayerNorm",
        qkv_bias=True,
        qk_norm=False,
        frames=frames,
        positions_per_token=2,
    )
    return base.model_copy(
        update={"name": "orch-84b", "encoders": {"vision": base.vision, "audio": audio}}
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """What every sample holds, [n]."""

    tiles: np.ndarray
    seconds: np.ndarray
    """Length of its recording, 0 where it has none."""
    text: np.ndarray
    """Tokens of text."""

    @property
    def audio_tokens(self) -> np.ndarray:
        """Tokens of its recording. [n]"""
        return np.ceil(TOKENS_PER_SECOND * self.seconds).astype(np.int64)

    @property
    def tokens(self) -> np.ndarray:
        """Tokens that the language model sees. [n]"""
        return self.text + TOKENS_PER_TILE * self.tiles + self.audio_tokens


def mixture(samples: int, seed: int) -> Samples:
    """Draw samples of the assumed mixture, in random order."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(4, samples, p=[0.30, 0.25, 0.30, 0.15])
    heard, asked, seen, read = (kind == each for each in range(4))

    def drawn(median: float, sigma: float, least: float, most: float) -> np.ndarray:
        return np.clip(median * rng.lognormal(0, sigma, samples), least, most)

    seconds = np.where(heard, drawn(9, 0.6, 1, LONGEST_RECORDING_S), 0.0)
    seconds = np.where(asked, drawn(5, 0.5, 1, LONGEST_RECORDING_S), seconds)
    images = np.where(rng.random(samples) < 0.8, 1, rng.integers(2, 5, samples))
    tiles_of_image = rng.choice([1, 3, 5, 7, 10, 13], samples, p=[0.2, 0.1, 0.2, 0.25, 0.15, 0.1])
    text = np.select(
        [heard, asked, seen, read],
        [
            20 + 3.3 * seconds * drawn(1, 0.15, 0.5, 2),
            drawn(250, 0.9, 16, 4_096),
            drawn(200, 1.0, 16, 4_096),
            drawn(700, 1.1, 16, 8_192),
        ],
    )
    return Samples(
        tiles=np.where(seen, images * tiles_of_image, 0),
        seconds=seconds,
        text=np.round(text).astype(np.int64),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Work:
    """Time of items of one phase, in ms."""

    forward_ms: np.ndarray
    step_ms: np.ndarray
    """Forward, second forward and backward."""


class System:
    """The job's costs of single items on one device."""

    def __init__(self) -> None:
        self.cluster: ClusterConfig = load_cluster(CLUSTER)
        self.model = the_model()
        self._cost = self._counted(self.model)

    def _counted(self, model: ModelConfig) -> CostModel:
        parallel = Parallel(pipeline=1, data=RANKS)
        return analytic_cost(model, self.cluster, parallel, "bf16")

    def _times_ms(self, model: ModelConfig, cost: CostModel, tower: str) -> np.ndarray:
        """Forward, and all of a step, of a tower with its projector. [2, features]"""
        kinds = {kind.name: kind for kind in cost.kinds if kind.tower == tower}
        units = [(kinds[name], cost.units[name]) for name in unit_names(model) if name in kinds]
        forward_ms = np.sum([unit.forward_ms for _, unit in units], axis=0)
        rest_ms = np.sum(
            [unit.backward_ms + unit.recompute_ms * kind.is_layer for kind, unit in units], axis=0
        )
        return np.stack([forward_ms, forward_ms + rest_ms])

    def tile(self) -> Work:
        """One tile."""
        index = self._cost.features.index("tiles")
        return Work(**_named(self._times_ms(self.model, self._cost, "vision")[:, index]))

    @cached_property
    def _parabola(self) -> np.ndarray:
        """Coefficients of a recording's times over its seconds, [3, 2]."""
        times = []
        for seconds in _LENGTHS_S:
            model = the_model(round(FRAMES_PER_SECOND * seconds))
            cost = self._counted(model)
            index = cost.features.index("clips")
            times.append(self._times_ms(model, cost, "audio")[:, index])
        return np.polyfit(_LENGTHS_S, np.array(times), 2)

    def recordings(self, seconds: np.ndarray) -> Work:
        """Recordings of these lengths, [any]."""
        powers = np.stack([seconds**2, seconds, np.ones_like(seconds)], axis=-1)
        return Work(**_named((powers @ self._parabola).T))

    def texts(self, samples: Samples) -> Work:
        """The language model on every sample, [n]."""
        return Work(**_named(self._times_ms(self.model, self._cost, "language") @ _features(
            self._cost.features, samples).T))  # fmt: skip

    def needed_flops(self, samples: Samples) -> float:
        """Operations of a step that training needs, without recomputation and padding."""
        names = feature_names(self.model)
        flops = model_flops(self.model, self.cluster, ())
        rest = float((_features(names, samples) @ flops).sum())
        rest += float(samples.tiles.sum()) * flops[names.index("tiles")]
        at = []
        for seconds in _LENGTHS_S:
            model = the_model(round(FRAMES_PER_SECOND * seconds))
            at.append(model_flops(model, self.cluster, ())[names.index("clips")])
        audio = np.polyval(np.polyfit(_LENGTHS_S, at, 2), samples.seconds[samples.seconds > 0])
        return rest + float(audio.sum())

    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(self._cost.units[name].parameters for name in unit_names(self.model))

    @property
    def feature_bytes_per_token(self) -> int:
        """Bytes of a token's features after the projector."""
        return _FEATURE_BYTES * self.model.language.hidden_size


def _named(times: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(("forward_ms", "step_ms"), times, strict=True))


def _features(names: tuple[str, ...], samples: Samples) -> np.ndarray:
    """Features of every sample's tokens, [n, features]."""
    columns = {
        "tokens": samples.tokens,
        "squared_tokens": samples.tokens**2,
        "loss_tokens": samples.text,
    }
    none = np.zeros(len(samples.text))
    return np.stack([columns.get(name, none) for name in names], axis=1).astype(np.float64)
