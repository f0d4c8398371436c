"""Costs of models with several encoders, none, or experts, against published sizes, hand counts,
and costs of the parts."""

import re
from pathlib import Path

import numpy as np
import pytest
from cost_cases import analytic_cost, assumed_h100

from omnibal.base.errors import UserError
from omnibal.cost.analytic import ENCODER_UNITS
from omnibal.cost.model import CostModel
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import shape_caps
from omnibal.model.config import LanguageConfig, ModelConfig, load_model, preset_names
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.encoders import ENCODER_KINDS, EncoderLayers
from omnibal.model.layer_kinds import ExpertsConfig, LatentAttention, LayerRun, LinearAttention
from omnibal.model.levels import ContextExchange, Level, exchange_mistake
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.units import feature_names, model_parts

pytestmark = pytest.mark.quick

CLUSTER = assumed_h100()
VISION = load_model("internvl2-8b")
WHISPER = load_model("internvl3-8b-whisper").encoders["audio"]
OF_8 = ExpertsConfig(experts=8, experts_per_token=2, ffn_hidden_size=14336)
SIZES = {"layers": 32, "hidden_size": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden_size": 14336}
MIXTRAL = LanguageConfig(**SIZES, vocab_size=32000, runs=(LayerRun(layers=1, experts=OF_8),))
THREE = VISION.model_copy(update={"encoders": VISION.encoders | {"audio": WHISPER}})


def cost_of(model: ModelConfig, frozen: tuple[str, ...] = (), tensor: int = 1) -> CostModel:
    return analytic_cost(model, CLUSTER, Parallel(pipeline=2, tensor=tensor), "bf16", frozen)


def vector(model: ModelConfig, **features: float) -> np.ndarray:
    return np.array([{"fixed": 1.0, **features}.get(name, 0.0) for name in feature_names(model)])


def test_ranks_share_out_whole_experts_and_their_state():
    """Prevents experts divided by tensor parallelism, held by every rank despite expert
    parallelism, or reduced over ranks with other experts."""
    model, all_experts = ModelConfig(name="mixtral", language=MIXTRAL), 8 * 3 * 4096 * 14336
    sizes = {"pipeline": 1, "tensor": 2, "sequence_parallel": True, "data": 8}
    for expert in (1, 2, 8):
        cost = analytic_cost(model, CLUSTER, Parallel(**sizes, expert=expert), "bf16")
        layer = cost.units["language_layer_experts8"]
        assert layer.expert_parameters == all_experts // expert
        assert layer.trained_expert_parameters == layer.expert_parameters
        assert cost.expert_rates.optimizer_bytes == 12 * expert / 16
        # 2 x 8 ranks exceed a node; each group has ranks in both nodes.
        of_buffer, adapters = (16 / expert - 1) / (16 / expert), 8 / expert
        gb_per_s = min(CLUSTER.intra_node_gb_per_s, adapters * CLUSTER.inter_node_gb_per_s)
        between = of_buffer / (gb_per_s * 1e6 * CLUSTER.link_efficiency)
        assert cost.expert_rates.gradient_reduction_ms == pytest.approx(4 * between)
        assert cost.expert_rates.weight_gather_ms == pytest.approx(2 * between)
        trained = np.array([10.0, 7.0])
        others = (trained - 3) * cost.rates.optimizer_bytes
        found = cost.of_parameters("optimizer_bytes", trained, np.full(2, 3.0))
        assert found == pytest.approx(others + 3 * cost.expert_rates.optimizer_bytes)
    frozen = analytic_cost(model, CLUSTER, Parallel(**sizes), "bf16", ("language",))
    assert not frozen.units["language_layer_experts8"].trained_expert_parameters


@pytest.mark.parametrize(("expert", "sent"), [(1, 0), (8, 7 / 8), (16, 8 / 16)])
def test_expert_parallel_ranks_exchange_rows_of_the_fullest(expert, sent):
    """Prevents free exchanges, local rows counted as sent, the wrong link's rate, and a missing
    wait for the fullest rank."""
    runs, tokens = (LayerRun(layers=1, experts=OF_8.model_copy(update={"experts": 16})),), 1000
    model = ModelConfig(name="wide", language=MIXTRAL.model_copy(update={"runs": runs}))
    sizes = Parallel(pipeline=1, data=16, expert=expert)
    layer = analytic_cost(model, CLUSTER, sizes, "bf16").units["language_layer_experts16"]
    rate = CLUSTER.intra_node_gb_per_s if expert == 8 else CLUSTER.inter_node_gb_per_s
    rows = tokens * 2 * (1.2 if expert > 1 else 1.0)  # two experts per token
    row_bytes = 2 * 4096 * 2 + 4  # out and back in bf16, and its weight
    bytes_ms = sent * rows * row_bytes / (rate * 1e6 * CLUSTER.link_efficiency)
    latency_ms = CLUSTER.link_latency_us / 1e3 if expert > 1 else 0
    at = vector(model, tokens=tokens)
    assert at @ layer.collective_ms[0] == pytest.approx(bytes_ms + 4 * latency_ms)
    assert at @ layer.collective_ms[1] == pytest.approx(bytes_ms + 3 * latency_ms)


def test_shared_packs_need_attention_that_is_exchanged():
    """Prevents linear attention's state shared at no cost, and latent attention's heads counted as
    grouped keys."""
    level = Level(caps=Caps.of(tokens=4096), context=4, exchange=ContextExchange.HEADS)
    linear = LinearAttention(key_heads=2, value_heads=4, key_head_size=32, value_head_size=32)
    sizes = {"head_size": 32, "rotary_head_size": 16, "value_head_size": 32}
    latent = LatentAttention(key_value_rank=64, **sizes)
    for run, refused in (
        (LayerRun(layers=1, linear=linear), "linear attention"),
        (LayerRun(layers=1), "key-value heads"),
        (LayerRun(layers=1, latent=latent), None),
    ):
        language = MIXTRAL.model_copy(update={"kv_heads": 1, "runs": (run,)})
        model = ModelConfig(name="m", language=language)
        mistake = exchange_mistake(model, Parallel(pipeline=1), level)
        assert mistake is None if refused is None else refused in mistake


def test_a_window_costs_the_pairs_within_it():
    """Prevents attention priced beyond its window, or not at all."""
    dense = ModelConfig(
        name="full",
        language=LanguageConfig(
            layers=3, hidden_size=64, heads=4, kv_heads=2, ffn_hidden_size=96, vocab_size=50
        ),
    )
    model = dense.with_tower("language", runs=(LayerRun(layers=1, window=5),))
    full = cost_of(dense).units["language_layer"]
    windowed = cost_of(model).units["language_layer_window5"]
    at_full = vector(dense, tokens=9, squared_tokens=70)
    at_window = vector(model, tokens=9, squared_tokens=81, squared_tokens_window5=70)
    assert at_window @ windowed.forward_ms == pytest.approx(at_full @ full.forward_ms, rel=1e-12)
    assert windowed.parameters == full.parameters


def test_a_second_encoder_is_paid_for_beside_the_first():
    """Prevents audio priced in place of vision, or with its sizes."""
    audio = THREE.model_copy(update={"encoders": {"audio": WHISPER}})
    sizes = {"tokens": 3000.0, "squared_tokens": 2e6, "loss_tokens": 500.0}
    together, first, second = cost_of(THREE), cost_of(VISION), cost_of(audio)
    renamed = {"vision_projector": "projector", "audio_projector": "projector"}
    for name, cost in together.units.items():
        tower = name.split("_")[0]
        alone, model = (second, audio) if tower == "audio" else (first, VISION)
        items = {"audio": {"clips": 3.0}, "vision": {"tiles": 5.0}}.get(tower, {})
        other = alone.units[renamed.get(name, name)]
        for field in ("forward_ms", "backward_ms", "activation_bytes"):
            given = vector(THREE, **sizes, **items) @ getattr(cost, field)
            assert given == pytest.approx(vector(model, **sizes, **items) @ getattr(other, field))
    # Embedding writes words, tiles and clips, each by its own tokens.
    embed = together.units["language_embed"].transient_bytes.max(axis=0)
    width = 2 * VISION.language.hidden_size
    assert vector(THREE, tiles=1) @ embed - vector(THREE) @ embed == 256 * width
    assert vector(THREE, clips=1) @ embed - vector(THREE) @ embed == 750 * width


def test_cuts_behind_the_first_encoder_carry_its_features_on():
    """Prevents a cut inside the audio encoder that loses the images, or sends gradients of frozen
    encoders."""
    cost = cost_of(THREE)
    tokens_bytes = 256 * 2 * VISION.language.hidden_size
    tiles = vector(THREE, tiles=1)
    for name in ("vision_projector", "audio_embed", "audio_layer", "audio_projector"):
        assert tiles @ cost.units[name].output_bytes == tokens_bytes
        assert tiles @ cost.units[name].output_gradient_bytes == tokens_bytes
    assert not tiles @ cost.units["language_embed"].output_bytes
    frozen = cost_of(THREE, frozen=("vision", "vision_projector"))
    assert tiles @ frozen.units["audio_layer"].output_bytes == tokens_bytes
    assert not tiles @ frozen.units["audio_layer"].output_gradient_bytes
    assert vector(THREE, clips=1) @ frozen.units["audio_layer"].output_gradient_bytes


def test_a_frozen_encoder_behind_a_trained_one_has_no_backward():
    """Prevents input gradients of an encoder for the encoder listed before it."""
    for frozen, backward, forward_alone in (
        (("audio",), ("vision_layer", "audio_projector"), ("audio_embed", "audio_layer")),
        (("audio", "audio_projector"), ("language_layer",), ("audio_projector",)),
    ):
        units = cost_of(THREE, frozen).units
        assert all(units[name].backward_ms.any() for name in backward)
        assert not any(units[name].backward_ms.any() for name in forward_alone)


def test_the_documented_model_files_are_read(tmp_path):
    """Prevents a documented model file that is rejected, or differs from its description."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    whole, part = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "omni.toml").write_text(whole)
    model = load_model(str(tmp_path / "omni.toml"))
    assert model_parts(model) == (
        *("vision", "vision_projector", "audio", "audio_projector", "language"),
    )
    before, after = whole.split("[language]\nlayers = 32\n")
    (tmp_path / "runs.toml").write_text(f"{before}{part}{after}")
    kinds = load_model(str(tmp_path / "runs.toml")).language.kinds
    assert [kind.window for kind in kinds[:7]] == [1024] * 5 + [None, 1024] and len(kinds) == 48


class PointsEncoder(EncoderLayers):
    """An encoder kind with required fields only and no costs."""

    feature = "points"
    positions_per_item: int = 64
    tokens_per_item: int = 16


def test_every_kind_of_encoder_is_counted_or_refused_in_a_line():
    """Prevents a plan's traceback for an encoder kind that lacks a count."""
    models = map(load_model, preset_names("models"))
    towers = [tower for model in models for tower in model.encoders.values()]
    assert {tower.kind for tower in towers} == set(ENCODER_KINDS)
    assert {type(tower) for tower in towers} <= ENCODER_UNITS.keys()
    with pytest.raises(UserError, match="encoders of PointsEncoder have no costs") as error:
        cost_of(with_points())
    assert "\n" not in str(error.value)


def with_points() -> ModelConfig:
    fields = WHISPER.model_dump(include=set(EncoderLayers.model_fields))
    return VISION.model_copy(
        update={"encoders": VISION.encoders | {"points": PointsEncoder(**fields)}}
    )


def test_a_kind_of_encoder_is_data_parallel_or_refused():
    """Prevents a traceback or zero-size inputs for an encoder kind without item sizes, and
    non-image items counted as images."""
    job = {"cluster": CLUSTER, "parallel": Parallel(pipeline=2), "precision": "bf16"}
    job["placement"] = EncoderPlacement.DATA_PARALLEL
    for name, tower in JobSpec(model=THREE, **job).encoders_costs[1].encoders.items():
        values = {"vision": 3 * 448 * 448, "audio": 3_000 * 128}[name]
        assert tower.input_bytes == 4 * values
    with pytest.raises(UserError, match="encoders of PointsEncoder have no costs"):
        JobSpec(model=with_points(), **job)
    assert shape_caps(with_points(), {"tokens": 4096}, 0.5) == {"tokens": 4096, "tiles": 8}
