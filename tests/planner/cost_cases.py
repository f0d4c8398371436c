"""Small models and random cost models for the planner's tests."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from omnibal.cost import analytic, encoder_phase_costs
from omnibal.cost.encoder_phase_costs import EncodersCost
from omnibal.cost.model import CostModel, ParameterRates, UnitCost
from omnibal.cost.setting import CostSetting
from omnibal.model.config import ClusterConfig, LanguageConfig, ModelConfig, load_cluster
from omnibal.model.encoders import ClipsEncoder, TilesEncoder
from omnibal.model.layer_kinds import LayerRun
from omnibal.model.units import feature_names, unit_kinds
from omnibal.pipeline.passes import Passes
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.workload import Workload

SIZES = {"hidden_size": 8, "heads": 2, "ffn_hidden_size": 16}
ENCODER = SIZES | {"normalization": "LayerNorm", "qkv_bias": True, "qk_norm": False}
ENCODERS = {
    "vision": TilesEncoder(**ENCODER, layers=1, image_size=8, patch_size=2),
    "audio": ClipsEncoder(**ENCODER, layers=1, frames=8, mel_bins=4),
}


def analytic_cost(*sizes: Any, **options: Any) -> CostModel:
    return analytic.analytic_cost(CostSetting(*sizes, **options))


def encoders_cost(*sizes: Any, sharded: int = 1) -> EncodersCost:
    return encoder_phase_costs.encoders_cost(CostSetting(*sizes), sharded=sharded)


def small_model(vision_layers: int, language_layers: int) -> ModelConfig:
    return model_of("vision language", vision_layers, language_layers)


def model_of(towers: str, *layers: int) -> ModelConfig:
    """Return a small model of the named towers, with `layers` in model order.

    "vision language" is InternVL's; "runs" is a language model with two alternating layer kinds.
    """
    numbers = dict(zip(towers.split(), layers, strict=True))
    runs = (LayerRun(layers=2, window=4), LayerRun(layers=1)) if "runs" in numbers else ()
    return ModelConfig(
        name=f"small {towers}",
        encoders={
            name: ENCODERS[name].model_copy(update={"layers": number})
            for name, number in numbers.items()
            if name in ENCODERS
        },
        language=LanguageConfig(**SIZES, layers=layers[-1], kv_heads=1, vocab_size=32, runs=runs),
    )


def assumed_h100() -> ClusterConfig:
    """Return an H100 with round efficiencies for all shapes, so formulas can be checked by hand."""
    shares = {"matmul_efficiency": 0.55, "fp8_efficiency": 0.48, "memory_efficiency": 0.8}
    links = {"link_efficiency": 0.5, "network_efficiency": None, "link_latency_us": 10}
    tables: dict[str, Any] = {"rates": {}, "rates_of": None, "basis": "assumed"}
    return load_cluster("h100-80g").model_copy(
        update=shares | links | tables | {"kernel_us": 4, "host_us": 0.0}
    )


def random_cost(rng: np.random.Generator, model: ModelConfig | None = None) -> CostModel:
    """Return costs of comparable units. A unit's activations include its input.

    They fit any number of layers of the model's kinds; the default model is InternVL's.
    """
    model = model or small_model(1, 1)
    features = feature_names(model)

    def unit(parameters: int) -> UnitCost:
        boundary_bytes, output_bytes = rng.uniform(0, 1e6, (2, len(features)))
        forward_ms, backward_ms = rng.uniform(0, 1, len(features)), rng.uniform(0, 2, len(features))
        return UnitCost(
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            weight_ms=backward_ms * np.linspace(0.2, 0.5, len(features)),
            recompute_ms=0.7 * forward_ms + 0.1 * forward_ms[::-1],
            collective_ms=0.1 * np.stack([forward_ms, backward_ms]),
            padding_ms=np.zeros((2, len(features))),
            context_ms=np.zeros((3, len(features))),
            activation_bytes=boundary_bytes + rng.uniform(0, 8e6, len(features)),
            boundary_bytes=boundary_bytes,
            output_bytes=output_bytes,
            output_gradient_bytes=output_bytes,
            transient_bytes=rng.uniform(0, 3e6, (2, len(features))),
            two_part_bytes=np.stack([boundary_bytes, 0.7 * output_bytes]),
            late_bytes=np.outer((0.3, 0.6, 0.2), boundary_bytes + output_bytes),
            passing_bytes=np.zeros(len(features)),
            shared_bytes=rng.uniform(0, 1e6, len(features)),
            parameters=parameters,
            trained_parameters=parameters,
        )

    return CostModel(
        features=features,
        kinds=unit_kinds(model),
        units={kind.name: unit(int(rng.integers(1_000_000))) for kind in unit_kinds(model)},
        rates=ParameterRates(
            weight_bytes=2,
            gradient_bytes=4,
            optimizer_bytes=12,
            optimizer_ms=1e-6,
            gradient_reduction_ms=1e-6,
        ),
        optimizer_ms_fixed=0.5,
        link_latency_ms=rng.uniform(0, 0.1),
        link_ms_per_byte=rng.uniform(0, 1e-7),
        source="random",
    )


def workload_of_a_step(features: np.ndarray) -> Workload:
    """Return one step of one rank: micro-batches with these features [m, features]."""
    slot = np.arange(len(features))
    return Workload(
        features=features, step=0 * slot, dp_rank=0 * slot, slot=slot, data_parallel_size=1
    )


def random_features(rng: np.random.Generator, packs: int, count: int = 5) -> np.ndarray:
    """Return features [packs, count]. No pack is the largest in all features."""
    features = rng.uniform(0, 4, (packs, count))
    features[:, 0] = 1
    return features


def passes_of(
    own: np.ndarray, others: np.ndarray, links: float | np.ndarray = 0, kind: Any = Pass.FORWARD
) -> Passes:
    """Return 1F1B passes of one kind, with these tensors on their links."""
    return Passes(
        chunk=0, chunks=1, link_buffers=tuple(((tensor, 0),) for tensor in range(4)),
        largest=own.max(axis=0), row=np.arange(len(own)), kind=np.zeros(len(own), int) + kind,
        own=own, others=others[:, None], links=np.zeros((len(own), 4)) + links,
    )  # fmt: skip


@dataclass
class LinksInTime:
    """A stage's link buffers over its operations: receives ahead, sends until the next send.

    In the order of `omnibal.pipeline.passes.CUT_TENSORS`.
    """

    micro_batches: int
    forwards: int = 0
    backwards: int = 0

    def before(self, kind: Pass) -> list[bool]:
        """Return which buffers are live while the next pass of this kind computes."""
        taken = kind is Pass.FORWARD, kind is Pass.BACKWARD
        came, gradients = self.forwards + taken[0], self.backwards + taken[1]
        return [
            self.forwards > 0 and came < self.micro_batches,
            self.backwards > 0,
            self.forwards > 0,
            self.backwards > 0 and gradients < self.micro_batches,
        ]

    def run(self, kind: Pass) -> None:
        self.forwards += kind is Pass.FORWARD
        self.backwards += kind is Pass.BACKWARD
