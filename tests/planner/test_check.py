"""Check: every way in which a plan directory can be wrong is found and named."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
from plan_cases import MODEL, example_lengths, example_profile, origin_of, request

from omnibal import training_job
from omnibal.base.errors import UserError
from omnibal.cost.profile import Measured, model_sha256
from omnibal.data.lengths import read_lengths, write_lengths
from omnibal.job.check import check_plan, open_plan, training_obstacles
from omnibal.job.plan import read_plan, write_plan
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import make_plan
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.encoders import TilingConfig
from omnibal.model.parallel import Parallel, check_parallel
from omnibal.model.targets import TargetName
from omnibal.packing.packs import Packs, ScheduledPacks, read_packs, write_packs
from omnibal.pipeline.stage import Span, Stage

pytestmark = pytest.mark.quick


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_plan(make_plan(request()), tmp_path / "plan")
    return tmp_path / "plan"


def rewrite_packs(directory: Path, change: Callable[[ScheduledPacks], ScheduledPacks]) -> None:
    """Write changed packs, and their hash and counts into the plan, as a careless tool would."""
    packs, plan = change(read_packs(directory / "packs.parquet")), read_plan(directory)
    write_packs(packs, directory / "packs.parquet")
    data = plan.data.model_copy(
        update={"packs_sha256": packs.sha256, "packs": len(packs), "steps": packs.steps}
    )
    write_plan(plan.model_copy(update={"data": data}), directory)


def with_entry(name: str, row: int, value: int) -> Callable[[ScheduledPacks], ScheduledPacks]:
    def change(packs: ScheduledPacks) -> ScheduledPacks:
        if name == "tiles":
            tiles = packs.column(name).copy()
            tiles[row] = value
            return replace(packs, items={name: tiles})
        column = getattr(packs, name).copy()
        column[row] = value
        return replace(packs, **{name: column})

    return change


def with_sample(position: int, sample: int) -> Callable[[ScheduledPacks], ScheduledPacks]:
    def change(packs: ScheduledPacks) -> ScheduledPacks:
        samples = packs.packs.samples.copy()
        samples[position] = sample
        return replace(packs, packs=Packs(samples=samples, offsets=packs.packs.offsets))

    return change


def without_row(row: int) -> Callable[[ScheduledPacks], ScheduledPacks]:
    return lambda packs: packs.take(np.delete(np.arange(len(packs)), row))


def swapped(row: int, other: int) -> Callable[[ScheduledPacks], ScheduledPacks]:
    def change(packs: ScheduledPacks) -> ScheduledPacks:
        order = np.arange(len(packs))
        order[[row, other]] = order[[other, row]]
        return packs.take(order)

    return change


def later_steps(packs: ScheduledPacks) -> ScheduledPacks:
    return replace(packs, step=packs.step + (packs.step >= 2))


def backward_epochs(packs: ScheduledPacks) -> ScheduledPacks:
    return replace(packs, epoch=1 - packs.epoch)


def test_a_good_plan_passes(directory):
    """Prevents checks that refuse what the planner makes."""
    assert len(check_plan(directory)) == 14


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_row(5), "epoch 0 leaves out"),
        (with_sample(0, 10_000), "names 1 that do not exist"),
        (with_sample(0, -1), "names 1 that do not exist"),
        (with_entry("tiles", 3, 7), "row 3 has other tiles"),
        (with_entry("tokens", 3, 7), "row 3 has other tokens"),
        (with_entry("dp_rank", 0, 2), "row 0 has no such dp_rank.*0 to 1"),
        (with_entry("dp_rank", 0, -1), "row 0 has no such dp_rank"),
        (with_entry("slot", 3, 6), "row 3 has no such slot.*0 to 5"),
        (swapped(0, 1), "row 1 is out of order"),
        (swapped(3, 4), "is out of order"),
        (with_entry("slot", 3, 2), "row 3 is out of order"),
        (later_steps, "leaves out a step"),
        (backward_epochs, "is of another epoch"),
    ],
)
def test_wrong_packs_are_refused(directory, change, expected):
    """Prevents training on packs that lose, repeat or misplace samples."""
    rewrite_packs(directory, change)
    with pytest.raises(UserError, match=expected):
        check_plan(directory)


def test_step_of_two_epochs_is_refused(tmp_path):
    """Prevents an epoch border inside a step, which no resumed run could find again."""
    two_epochs_of_a_step = request(
        lengths=example_lengths(count=3), packs_per_step=8, parallel=Parallel(pipeline=1)
    )
    save_plan(make_plan(two_epochs_of_a_step), tmp_path / "plan")
    rewrite_packs(
        tmp_path / "plan",
        lambda p: replace(p, step=p.step * 0, slot=np.arange(len(p), dtype=np.int32)),
    )
    with pytest.raises(UserError, match="is of another epoch"):
        check_plan(tmp_path / "plan")


def test_repeated_sample_is_refused(directory):
    """Prevents a sample from being trained twice in an epoch while another is left out."""
    first = int(read_packs(directory / "packs.parquet").packs.samples[0])
    rewrite_packs(directory, with_sample(1, first))
    with pytest.raises(UserError, match="leaves out 1 of 300 samples, repeats 1"):
        check_plan(directory)


def test_missing_slot_is_refused(directory):
    """Prevents a rank from waiting for a micro-batch that nobody has."""

    def change(packs: ScheduledPacks) -> ScheduledPacks:
        # A whole pack moves to the end of a rank's short last step, one slot too far.
        last = int(np.flatnonzero(packs.slot == 0)[-1])
        slot = packs.slot.copy()
        slot[last:] += 1
        return replace(packs, slot=slot)

    rewrite_packs(directory, change)
    with pytest.raises(UserError, match="leaves out a slot"):
        check_plan(directory)


EDITS = [
    ("data.lengths_sha256", "0" * 64, r"lengths\.parquet has the content hash"),
    ("data.packs_sha256", "0" * 64, r"packs\.parquet has the content hash"),
    ("data.samples", 299, "says 299 samples"),
    ("data.packs", 1, "says 1 packs"),
    ("data.steps", 1, "says 1 steps"),
    ("data.epochs", 3, "says 3 epochs"),
    ("data.caps.max_tokens", 300, "exceeds a cap"),
    ("data.seed", -1, "seed: .*greater than or equal to 0"),
    ("data.seed", 10**25, "seed: "),
    ("data.method", "best", "method: .*'balanced', 'isf', 'next_fit' or 'other'"),
    ("data.packs_per_step", 10**25, "packs_per_step: .*2147483647"),
    ("data.packs_per_step", 7, "micro_batches_per_step is 4, and must be 4|another number of"),
    ("data.packs_per_step", 2**31 - 1, "micro_batches_per_step is 4, and must be 1073741824"),
    ("data.micro_batches_per_step", 5, "micro_batches_per_step is 5, and must be 4"),
    ("data.steps_sha256", "0" * 64, "steps_sha256 is 000000000000, and the packs' steps have"),
    ("data", None, "neither data nor shapes, so no steps"),
    ("parallel.pipeline", 3, "2 entries in stages for pipeline size 3, which needs 3"),
    ("parallel.sharded", 3, "parallel: sharded 3, .* must divide data 2: choose a divisor of 2"),
    ("cluster.memory_gib", 1e-3, "is predicted to need"),
    ("frozen", ["vision", "vision"], "each part at most once and leave one to train"),
    ("frozen", ["vision", "projector", "language"], "at most once and leave one to train"),
    ("prediction.stages", [], r"0 entries for 2 stages.*remove `prediction`"),
    ("schema_version", 1, r"schema_version: .* 2 \(given: 1\); make the plan anew"),
    ("schema_version", 3, r"plan\.json"),
]
"""Of plan.json: a key, another value, and what is wrong with it."""


@pytest.mark.parametrize(("key", "value", "expected"), EDITS, ids=str)
def test_edited_plans_are_refused(directory, key, value, expected):
    """Prevents a traceback, a launch that cannot be built or fit, and a run of other steps."""
    path = directory / "plan.json"
    plan = json.loads(path.read_text())
    *outer, name = key.split(".")
    reduce(getitem, outer, plan)[name] = value
    path.write_text(json.dumps(plan))
    with pytest.raises(UserError, match=expected):
        check_plan(directory)


def test_changed_lengths_and_stages_are_refused(directory):
    """Prevents lengths that were edited after planning, and stages that trade places."""
    plan = read_plan(directory)
    write_plan(plan.model_copy(update={"stages": plan.stages[::-1]}), directory)
    with pytest.raises(UserError, match="model order"):
        check_plan(directory)
    write_plan(plan, directory)
    lengths = read_lengths([directory / "lengths.parquet"])
    changed = lengths.tokens + (np.arange(len(lengths)) == 0).astype(np.int32)
    write_lengths(replace(lengths, tokens=changed), directory / "lengths.parquet")
    with pytest.raises(UserError, match=r"lengths\.parquet has the content hash"):
        check_plan(directory)


def test_model_that_takes_shorter_samples_is_refused(directory):
    """Prevents an edited model from being trained on samples beyond its RoPE."""
    plan, most = read_plan(directory), int(example_lengths().tokens.max())
    for limit, passes in ((most, True), (most - 1, False)):
        language = plan.model.language.model_copy(update={"max_positions": limit})
        model = plan.model.model_copy(update={"language": language})
        update = {"model": model, "settings_sha256": None}
        write_plan(plan.model_copy(update=update), directory)
        if passes:
            check_plan(directory)
        else:
            with pytest.raises(UserError, match=f"has {most} tokens, but .* is {limit}"):
                check_plan(directory)


@pytest.mark.parametrize("keeps_prediction", [True, False])
def test_removed_recomputation_is_seen(tmp_path, keeps_prediction):
    """Prevents an out-of-memory after an edit, by trusting the prediction or for want of one."""
    roomy = make_plan(request()).plan
    peak_gib = max(stage.memory.peak_gib for stage in roomy.prediction.stages)
    memory = {"memory_gib": 0.7 * peak_gib / 0.9}
    result = make_plan(request(cluster=roomy.cluster.model_copy(update=memory)))
    plan = result.plan  # It recomputes, since without it does not fit.
    save_plan(result, tmp_path / "plan")
    check_plan(tmp_path / "plan")
    bare = tuple(stage.model_copy(update={"recompute": ()}) for stage in plan.stages)
    changes = {"stages": bare} | ({} if keeps_prediction else {"prediction": None})
    write_plan(plan.model_copy(update=changes), tmp_path / "plan")
    with pytest.raises(UserError, match="is predicted to need"):
        check_plan(tmp_path / "plan")


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: {"precision": "bf16"},
        lambda plan: {"parallel": plan.parallel.model_copy(update={"tensor": 2})},
        lambda plan: {"model": with_vocabulary(plan.model, 512), "settings_sha256": None},
        lambda plan: {"stages": (recomputing_all(plan.stages[0]), *plan.stages[1:])},
        lambda plan: {"prediction": plan.prediction.model_copy(update={"cost_source": "x"})},
        lambda plan: {"prediction": plan.prediction.model_copy(update={"step_ms": 1.0})},
        lambda plan: {"cluster": plan.cluster.model_copy(update={"link_latency_us": 1e4})},
    ],
)
def test_edited_plan_with_its_old_prediction_is_refused(directory, change):
    """Prevents a report of figures that the edited plan does not have."""
    plan = read_plan(directory)
    edited = plan.model_copy(update=change(plan))
    write_plan(edited, directory)
    with pytest.raises(UserError, match=r"prediction is of another plan.*remove `prediction`"):
        check_plan(directory)
    # Training needs no prediction: one of an earlier version must not stop a run under way.
    assert open_plan(directory, to_train=True).plan == edited
    write_plan(edited.model_copy(update={"prediction": None}), directory)
    assert check_plan(directory)


def other_than(value: object) -> list[object]:
    """Values that a careless edit may put in place of one: of a number, a text or nothing."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2, None]
    return [f"{value}x", 1] if isinstance(value, str) else [1, 0.5, "x", True]


def leaves(value: object, place: tuple = ()) -> Iterator[tuple]:
    """Places of all values of a JSON document that are no tables or lists with entries."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in inner:
        if isinstance(entry, dict | list) and entry:
            yield from leaves(entry, (*place, key))
        else:
            yield (*place, key)


@pytest.mark.parametrize("has_samples", [True, False])
def test_every_edit_of_model_and_data_is_refused(tmp_path, has_samples):
    """Prevents another epsilon, base of RoPE, system message or seed from being trained than was
    planned, as these are in none of the figures."""
    lengths = example_lengths(origin_of(MODEL)) if has_samples else None
    directory = tmp_path / "plan"
    save_plan(make_plan(request(lengths=lengths)), directory)
    path, planned = directory / "plan.json", read_plan(directory)
    written = path.read_text()
    plan = json.loads(written)
    places = [*leaves({"model": plan["model"]}), *leaves({"data": plan["data"] or {}})]
    names = {place[-1] for place in places}
    assert {"norm_eps", "rope_base", "rope_scaling", "layer_scale_init", "vocab_size"} <= names
    assert not has_samples or {"method", "seed"} <= names
    refused = 0
    for *outer, name in places:
        for other in other_than(reduce(getitem, outer, plan)[name]):
            edited = json.loads(written)
            reduce(getitem, outer, edited)[name] = other
            path.write_text(json.dumps(edited))
            try:
                if read_plan(directory) == planned:
                    continue  # the same, left out or in another spelling
            except UserError:
                continue  # no plan at all
            with pytest.raises(UserError):
                check_plan(directory)
            refused += 1
    assert refused > 40


@pytest.mark.parametrize("data", [True, False])
def test_any_edited_figure_of_a_prediction_is_refused(tmp_path, data):
    """Prevents plausible figures in a report that nothing has predicted."""
    save_plan(make_plan(request() if data else request(lengths=None)), tmp_path / "plan")
    path = tmp_path / "plan" / "plan.json"
    text = path.read_text()
    predicted = json.loads(text)["prediction"]
    places = [
        place for place in leaves(predicted) if isinstance(reduce(getitem, place, predicted), float)
    ]
    assert len(places) == (30 if data else 28)

    def edited(factor: float, places: list[tuple]) -> str:
        plan = json.loads(text)
        step_ms = plan["prediction"]["step_ms"]
        for *parents, last in places:
            inner = reduce(getitem, parents, plan["prediction"])
            inner[last] = inner[last] * factor or (factor - 1) * step_ms
        return json.dumps(plan)

    path.write_text(edited(1 + 1e-9, places))  # as another machine rounds
    assert check_plan(tmp_path / "plan")
    for place in places:
        path.write_text(edited(1.001, [place]))
        with pytest.raises(UserError, match="prediction") as raised:
            check_plan(tmp_path / "plan")
        assert str(place[-1]) in str(raised.value)


def with_vocabulary(model: ModelConfig, size: int) -> ModelConfig:
    language = model.language.model_copy(update={"vocab_size": size})
    return model.model_copy(update={"language": language})


def recomputing_all(stage: Stage) -> Stage:
    return stage.model_copy(update={"recompute": (Span("vision", stage.layers("vision")),)})


@pytest.mark.parametrize(
    ("sizes", "changes", "expected"),
    [
        ({"tensor": 3}, {}, r"tensor size 3 does not divide vision.ffn_hidden_size = 128.*1, 2: "),
        ({"tensor": 4}, {}, "tensor size 4 does not divide language.kv_heads = 2"),
        ({"tensor": 2}, {"gpus_per_node": 1}, "tensor size 2 is more than the 1 devices"),
        ({"pipeline": 9}, {}, "pipeline size 9 is more than the 8 layers"),
    ],
)
def test_impossible_parallel_sizes_are_refused(directory, sizes, changes, expected):
    """Prevents a launch on thousands of devices that no tensor can be cut for."""
    plan = read_plan(directory)
    cluster = plan.cluster.model_copy(update={"gpus_per_node": 8} | changes)
    parallel = plan.parallel.model_copy(update=sizes)
    with pytest.raises(UserError, match=expected):
        make_plan(request(cluster=cluster, parallel=parallel))
    write_plan(plan.model_copy(update={"parallel": parallel, "cluster": cluster}), directory)
    with pytest.raises(UserError, match=expected):
        check_plan(directory)


def test_large_encoder_names_its_tensor_sizes():
    """Prevents guessing, and refusing sizes for InternViT-6B's 25 heads, which are padded."""
    model, cluster = load_model("internvl-chat-1.5-6b-20b"), load_cluster("h100-80g")
    check_parallel(model, Parallel(tensor=2, pipeline=4), cluster)
    expected = r"tensor size 5 does not divide language.heads = 48 .*; .* allows 1, 2, 4, 8: "
    with pytest.raises(UserError, match=expected):
        check_parallel(model, Parallel(tensor=5, pipeline=4), cluster)


def test_profile_is_kept_with_the_plan(tmp_path):
    """Prevents memory checked by other costs than the plan was made with."""
    profile = example_profile(activation_bytes=7_000_000)
    profile = profile.model_copy(update={"model_sha256": model_sha256(MODEL)})
    save_plan(make_plan(request(cost_source=Measured(profile))), tmp_path / "plan")
    assert check_plan(tmp_path / "plan")
    save_plan(make_plan(request(cost_source=Measured(profile))), tmp_path / "plan")
    (tmp_path / "plan/profile.json").unlink()
    with pytest.raises(UserError, match="costs from analytic:laptop-cpu"):
        check_plan(tmp_path / "plan")
    save_plan(make_plan(request()), tmp_path / "plan")
    assert not (tmp_path / "plan/profile.json").exists()


def test_plan_of_other_data_is_refused(tmp_path):
    """Prevents training on data or tiles that the lengths are not of."""
    directory = tmp_path / "plan"
    save_plan(make_plan(request(lengths=example_lengths(origin_of(MODEL)))), directory)
    assert len(check_plan(directory)) == 14
    plan = read_plan(directory)
    for origin, expected in (
        (None, "data.origin of plan.json is not that"),
        (origin_of(MODEL, data_sha256="other"), "data.origin of plan.json is not that"),
    ):
        data = plan.data.model_copy(update={"origin": origin})
        write_plan(plan.model_copy(update={"data": data}), directory)
        with pytest.raises(UserError, match=expected):
            check_plan(directory)
    cut = plan.model.with_tower("vision", tiling=TilingConfig(max_dynamic_patch=3))
    for model, expected in (
        (cut, "another tiling than model.tiling"),
        (plan.model.with_tower("vision", image_size=64), "tiles of 32 pixels"),
    ):
        write_plan(plan.model_copy(update={"model": model}), directory)
        with pytest.raises(UserError, match=expected):
            check_plan(directory)


def test_what_cannot_be_trained_is_said(tmp_path):
    """Prevents a queue's wait for a plan that the trainer then refuses."""
    cases = {
        "shapes": (request(lengths=None), "shapes only"),
        "origin": (request(), "do not say which data"),
    }
    for name, (asked, expected) in cases.items():
        result = make_plan(asked)
        save_plan(result, tmp_path / name)
        check_plan(tmp_path / name)
        assert expected in training_obstacles(result.plan)[-1]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"data": 4, "sharded": 3}, "choose a divisor of 4"),
        ({"data": 2, "sharded": 4}, "sharded 4, .* must divide data 2"),
        ({"data": 6, "expert": 3, "sharded": 2}, "3 data-parallel ranks that share out experts"),
    ],
)
def test_groups_that_shard_weights_divide_the_ranks(sizes, expected):
    """Prevents groups of which some ranks wait for ever for others of another group."""
    with pytest.raises(ValueError, match=expected):
        Parallel(pipeline=1, **sizes)


@pytest.mark.parametrize(
    ("sizes", "changes", "expected"),
    [
        (
            {"sharded": 2, "pipeline": 1},
            {"precision": "fp8"},
            'parallel.sharded is 2 of parallel.data 2, .* without precision "fp8"',
        ),
        ({}, {"made_for": TargetName.XTUNER}, r"sharded is 1 of .* XTuner v1, .* are full \(2\)"),
        (
            {"sharded": 2},
            {"made_for": TargetName.MEGATRON_LM},
            r"Megatron-LM, which made_for names, are replicated \(1\): set parallel.sharded so",
        ),
    ],
)
@pytest.mark.parametrize("to_train", [False, True])
def test_an_edited_way_to_hold_weights_is_refused_by_its_keys(
    directory, sizes, changes, expected, to_train
):
    """Prevents: a message that tells who edits plan.json of options that nobody gave."""
    plan = read_plan(directory)
    parallel = plan.parallel.model_copy(update=sizes)
    write_plan(plan.model_copy(update={"parallel": parallel, **changes}), directory)
    with pytest.raises(UserError, match=expected) as error:
        open_plan(directory, to_train=to_train)
    assert "--" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("trainer", ["xtuner", "ms-swift-deepspeed"])
def test_a_job_for_a_trainer_that_always_shards_says_so(trainer):
    """Prevents: a job that is another one than it was made as."""
    job = training_job(
        "qwen3-8b", "h100-80g", parallel=Parallel(pipeline=1, data=8), trainer=trainer
    )
    assert job.parallel.sharded == 8
    whole = job.parallel.model_copy(update={"sharded": 1})
    with pytest.raises(UserError, match="--sharding replicated was given"):
        replace(job, parallel=whole)


def test_plan_of_shapes_is_held_to_its_memory(tmp_path):
    """Prevents a plan without data from passing whatever it needs."""
    result = make_plan(request(lengths=None))
    save_plan(result, tmp_path / "plan")
    check_plan(tmp_path / "plan")
    cluster = result.plan.cluster.model_copy(update={"memory_gib": 1e-3})
    write_plan(result.plan.model_copy(update={"cluster": cluster}), tmp_path / "plan")
    with pytest.raises(UserError, match="is predicted to need"):
        check_plan(tmp_path / "plan")


@pytest.mark.parametrize("content", ["", "{}"])
def test_foreign_plan_json_is_refused(directory, content):
    """Prevents a traceback for a file that is not a plan of this version."""
    (directory / "plan.json").write_text(content)
    with pytest.raises(UserError, match=r"plan\.json"):
        check_plan(directory)
