"""Models with towers other than InternVL's, from the command line to the plan and its check."""

import json
from pathlib import Path

import pytest
from cli_cases import status
from cost_cases import model_of

from omnibal.base.errors import UserError
from omnibal.job.check import check_plan, training_obstacles
from omnibal.job.plan import Plan, PlannedLevel, read_plan, write_plan
from omnibal.model.config import ModelConfig, config_toml, load_cluster, load_model
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel, check_parallel
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import check_stages, stages_from_cuts, unit_spans

pytestmark = pytest.mark.quick

TOWERS = {
    "language": (5,),
    "runs": (7,),
    "vision language": (3, 4),
    "vision runs": (2, 5),
    "vision audio language": (3, 2, 4),
}
TWO, THREE = model_of("vision language", 3, 4), model_of("vision audio language", 3, 2, 4)


def plan_shapes(model: ModelConfig, directory: Path, *options: str) -> int:
    """Plan the model's shapes on two stages; return the exit status."""
    (directory / "model.toml").write_text(config_toml(model))
    caps = Caps.of(tokens=64, **dict.fromkeys(model.item_features, 2))
    command = f"plan --cluster laptop-cpu {' '.join(caps.options)} --pp 2 --precision fp32"
    return status(command, "--model", directory / "model.toml", "-o", directory / "plan", *options)


def plan_of(model: ModelConfig, directory: Path) -> Plan:
    assert plan_shapes(model, directory) == 0
    return read_plan(directory / "plan")


@pytest.mark.parametrize(("towers", "layers"), TOWERS.items())
def test_any_towers_are_planned_checked_and_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, towers: str, layers: tuple[int, ...]
) -> None:
    """Prevents commands that assume InternVL's towers, and plan.json losing the encoders' order."""
    model = model_of(towers, *layers)
    assert plan_shapes(model, tmp_path, "--json") == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    names = [name.replace("runs", "language") for name in towers.split()]
    for name, count in zip(names, layers, strict=True):
        assert sum(stage[f"{name}_layers"] for stage in stages) == count
        assert all(stage[f"recompute_{name}"] == 0 for stage in stages)
    if "vision" not in names:
        assert all(stage["vision_layers"] == stage["recompute_vision"] == 0 for stage in stages)
    plan = read_plan(tmp_path / "plan")
    assert tuple(plan.model.encoders) == tuple(model.encoders)
    units = [unit for stage in plan.stages for span in stage.units for unit in span.units]
    assert units == list(unit_spans(model))
    assert check_plan(tmp_path / "plan")
    for command in ("check", "simulate"):
        assert status(command, tmp_path / "plan") == 0
    assert status("report", tmp_path / "plan", "-o", tmp_path / "report.html") == 0
    page = (tmp_path / "report.html").read_text()
    assert all(f"{name} layer</text>" in page for name in names)
    can_train = "runs" not in towers
    assert len(training_obstacles(plan)) == 1 + (not can_train)


def test_what_the_trainer_lacks_is_named(tmp_path: Path) -> None:
    """Prevents queueing for a plan no trainer can build, and audio tokens without features on their
    rank."""
    renamed = dict.fromkeys(("vision", "sound"), THREE.encoders["audio"])
    for model, expected in (
        (
            THREE.model_copy(update={"encoders": renamed}),
            "has an encoder vision of clips, an encoder sound of clips (supported",
        ),
        (model_of("runs", 7), "has layers of kind language_layer_window4 (supported"),
        (
            model_of("language", 4).with_tower("language", post_norms=True, prediction_layers=2),
            "has language.post_norms True, 2 prediction layers (supported",
        ),
        (
            model_of("language", 4).with_tower("language", activation="gelu", positions="alibi"),
            "has language.activation gelu, language.positions alibi (supported",
        ),
        (
            model_of("language", 4).with_tower("language", bias=True, norm_bias=True, sinks=True),
            "has language.bias True, language.norm_bias True, language.sinks True (supported",
        ),
    ):
        assert expected in training_obstacles(plan_of(model, tmp_path))[-1]
    plan, found = plan_of(THREE, tmp_path), []
    for context in (1, 2):
        level = PlannedLevel.model_construct(context=context)
        found.append(training_obstacles(plan.model_copy(update={"levels": (level,)})))
    assert [len(obstacles) for obstacles in found] == [1, 2]
    assert "need its audio features exchanged, which the trainer does not" in found[1][-1]


@pytest.mark.parametrize(
    ("towers", "frozen", "message"),
    [
        ("vision language", "audio", "has only the parts vision"),
        ("vision audio language", "projector", "vision, vision_projector, audio, audio_projector,"),
        ("language", "language", "leave a part to train"),
    ],
)
def test_parts_to_freeze_are_the_model_s(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, towers: str, frozen: str, message: str
) -> None:
    """Prevents a misspelled part name that trains the entire model."""
    model = model_of(towers, *TOWERS[towers])
    assert plan_shapes(model, tmp_path, "--freeze", frozen) == 2
    assert message in capsys.readouterr().err


def test_tensor_sizes_divide_every_tower() -> None:
    """Prevents a tensor-parallel size that does not divide a tower's width."""
    model = model_of("vision audio language", 1, 1, 1).with_tower("audio", ffn_hidden_size=15)
    cluster = load_cluster("h100-80g")
    with pytest.raises(UserError, match=r"does not divide audio\.ffn_hidden_size = 15"):
        check_parallel(model, Parallel(tensor=2, pipeline=1), cluster)
    with pytest.raises(UserError, match="more than the 3 layers"):
        check_parallel(model, Parallel(pipeline=4), cluster)


def test_stages_have_the_parts_and_the_recomputed_layers_of_their_units() -> None:
    """Prevents gradients sent to a frozen stage or missing at a trained one, and recomputing layers
    of the wrong kind."""
    assert [set(stage.parts) for stage in stages_from_cuts(THREE, (4, 6, 9, 11))] == [
        *({"vision"}, {"vision_projector", "audio"}, {"audio", "audio_projector"}),
        *({"language"}, {"language"}),
    ]
    model = model_of("vision runs", 2, 6)  # windows in language layers 0, 1, 3 and 4
    first, second = stages_from_cuts(model, (8,), [(1, 1, 1), (0, 2, 1)])
    assert [str(span) for span in first.recompute] == ["vision 0", "language 0", "language 2"]
    assert [str(span) for span in second.recompute] == ["language 3..5"]


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        ("vison 0..2", r"stage 0 holds vision embed, vison 0.* but .* vision embed, vision 0\.\.2"),
        ("vision 0..3", r"stage 0 holds vision embed, vision 0\.\.3, .* small vision language"),
        ("vision 0-2", "stage 0 holds vision embed, vision 0-2"),
        ("vision 2..0", r"'vision 2\.\.0' must name layers from a first to a last one"),
        ("vision 0..99999", "below 1,000"),
        (7, 'must be words such as "vision embed"'),
        (None, "must be words such as"),
    ],
)
def test_mistakes_in_words_are_told(tmp_path: Path, unit: object, message: str) -> None:
    """Prevents a traceback, or other layers than intended, from a hand-written plan."""
    plan_of(TWO, tmp_path)
    path = tmp_path / "plan/plan.json"
    plan = json.loads(path.read_text())
    plan["stages"][0]["units"][1] = unit
    path.write_text(json.dumps(plan))
    with pytest.raises(UserError, match=message):
        check_plan(tmp_path / "plan")


def test_words_may_be_written_in_other_ways(tmp_path: Path) -> None:
    """Prevents refusing a stage written with more spans or spaces."""
    plan = plan_of(TWO, tmp_path)
    [one] = stages_from_cuts(TWO, ())
    other = Stage.parse(
        *("vision  embed", "vision 0", "vision 1..2", "projector", "language embed"),
        *("language 0..1", " language 2..3 ", "head"),
        recompute=["language 3", "vision 0..1"],
    )
    check_stages(TWO, [other])
    assert other.parts == one.parts
    assert other.layers("vision") == range(3) and other.layers("language") == range(4)
    assert other.recomputed_in("vision") == (0, 1) and other.recomputed_in("language") == (3,)
    sizes = {"stages": (other,), "parallel": Parallel(pipeline=1)}
    alone = plan.model_copy(update=sizes | {"prediction": None})
    write_plan(alone, tmp_path / "plan")
    assert read_plan(tmp_path / "plan") == alone
    assert check_plan(tmp_path / "plan")


def test_limits_of_other_items_are_found_by_a_check(tmp_path: Path) -> None:
    """Prevents a hand-written plan with a limit on items that the model lacks."""
    plan = plan_of(model_of("language", 5), tmp_path)
    assert plan.shapes is not None
    wrong = plan.shapes.model_copy(update={"caps": Caps.of(clips=3, tokens=64)})
    write_plan(plan.model_copy(update={"shapes": wrong}), tmp_path / "plan")
    with pytest.raises(UserError, match=r"cannot have clips"):
        check_plan(tmp_path / "plan")


def test_an_encoder_says_its_kind(tmp_path: Path) -> None:
    """Prevents a bare parser message for an encoder without a kind."""
    (tmp_path / "model.toml").write_text("name = 'x'\n[encoders.eyes]\nlayers = 2\n")
    with pytest.raises(UserError, match=r'eyes needs a kind.*"tiles" or "clips".*docs/models\.md'):
        load_model(str(tmp_path / "model.toml"))
