"""Predictions of the paper's tables, within stated tolerances."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

REPRODUCE = Path(__file__).parents[2] / "scripts" / "reproduce"
sys.path.insert(0, str(REPRODUCE))
import hbp  # noqa: E402
import measured_gpus  # noqa: E402
import orch_plan  # noqa: E402
import paper  # noqa: E402
from cli_cases import result  # noqa: E402

from omnibal.base.errors import DoesNotFit  # noqa: E402
from omnibal.base.files import read_toml_model  # noqa: E402
from omnibal.job.published_errors import ERRORS_FILE, JobKind, PublishedErrors  # noqa: E402
from omnibal.model.config import load_cluster  # noqa: E402
from omnibal.model.parallel import WeightSharding  # noqa: E402
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule  # noqa: E402

CLUSTER = paper.published_system(load_cluster(paper.CLUSTER))


@pytest.fixture(scope="module")
def data() -> paper.Data:
    return paper.Data(20_000, seed=0)


def test_the_share_of_the_published_system_is_the_calibrated_one():
    """Prevents tables called calibrated on a figure that they do not reproduce."""
    measured = np.array(paper.FIGURE_2_STAGE_MS)
    predicted = paper.figure_2_ms(CLUSTER.memory_efficiency, CLUSTER)
    off = np.abs(predicted / predicted.sum() - measured / measured.sum())
    assert off[0] < 0.002 and off.max() < 0.012


DENSE = json.loads(
    '{"device": "h100", "gpus": 16, "model": "llama3-8b", "layers": 12, "tp": 1, "pp": 2, '
    '"cp": 1, "ep": 1, "mbs": 1, "gbs": 32, "seq": 4096, "precision": "bf16", "step_ms": 900}'
)
LAYOUT = json.loads(
    '{"model": "1B", "layers": 16, "hidden": 2048, "ffn": 8192, "heads": 32, "vocab": 32000, '
    '"gpus": 8, "tp": 1, "pp": 1, "dp": 8, "micro_batch": 1, "global_batch": 16, '
    '"sequence": 2048, "zero": 1, "tokens_per_s_gpu": 20000}'
)
SAID = {"name": "x", "model": "qwen3-8b", "gpus": 8, "cluster": "h100", "measured": {"step_s": 3}}
BRIDGE = {"source": "Megatron-Bridge"}


@pytest.mark.parametrize(
    ("row", "in_line"),
    [
        (DENSE | {"recompute": True}, "--recompute-method uniform"),
        (DENSE | {"recompute": "block 3"}, "--recompute-method block --recompute-num-layers 3"),
        (DENSE | {"recompute": "moe_act"}, "--recompute-modules moe_act"),
        (DENSE | BRIDGE | {"recompute": "full"}, "model.recompute_granularity=full"),
        (DENSE | BRIDGE | {"sharded": 8}, "ddp.use_megatron_fsdp=true"),
        (DENSE | BRIDGE | {"extra": ["--peft", "lora"]}, "--peft lora"),
        (DENSE | {"precision": "MXFP8", "gpus": "16"}, "--fp8-recipe mxfp8"),
        (DENSE | {"layers": 13}, "--pipeline-model-parallel-layout 'Et*7|t*6L'"),
        (DENSE | {"group": "FSDP torchtitan h100"}, "pipeline_parallel_degree 2"),
        (DENSE | {"group": "FSDP Automodel", "sharded": 4}, "dp_replicate_size 2"),
        (LAYOUT | {"global_batch": 32}, "batch_accumulation_per_replica 4"),
        (SAID | {"config": "TP2 CP2 VPP 1 GBS 1024 32K fp8"}, "--context-parallel-size 2"),
        (SAID | {"config": "TP2 CP2 GBS 1024 32K fp8"}, "--seq-length 32768"),
    ],
)
def test_lines_say_what_rows_say(tmp_path, row, in_line):
    """Prevents a row predicted as another job because fields in other words are dropped."""
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [row]}))
    record = measured_gpus.compare_row(tmp_path / "rows.json", 0).record()
    assert in_line in record["line"] and record["predicted_ms"] > 0
    assert record["measured_ms"] > 0 and record["kind"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([], "give an object"),
        ({name: of for name, of in DENSE.items() if name != "gpus"}, "has no gpus"),
        (DENSE | {"tp": 3}, "are not its 16 GPUs"),
        (DENSE | {"layers": True}, "must be a positive number"),
        (DENSE | {"precision": "nvfp4"}, "got nvfp4"),
        (DENSE | {"recompute": "some"}, "must be none, selective"),
        (DENSE | {"group": "LoRA packed SQuAD h100"}, "give the adapters"),
        (DENSE | {"group": "FSDP torchtitan", "precision": "fp8"}, "fp8 cannot be set"),
        (DENSE | {"group": "FSDP llm-foundry"}, "pp cannot be set"),
        (DENSE | {"gbs": 12}, "12 is no multiple of the 8 samples"),
        (LAYOUT | {"global_batch": 12}, "no multiple of micro_batch x dp"),
        (LAYOUT | {"heads": 7}, "not a multiple of heads"),
        (LAYOUT | {"zero": None}, "has no zero"),
        (SAID | {"config": "no recompute"}, "must have a length and GBS"),
        (SAID | {"measured": 3, "line": "x"}, "must be an object"),
        (SAID | {"extra": ["--image-share"], "line": "x"}, "must be pairs"),
    ],
)
def test_rows_that_say_no_job_are_refused(tmp_path, row, why):
    """Prevents a traceback for a file of rows, or a row predicted as another job."""
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [row]}))
    record = measured_gpus.compare_row(tmp_path / "rows.json", 0).record()
    assert why in record["refused"] and "\n" not in record["refused"] and record["kind"]


@pytest.mark.parametrize(
    ("device", "preset"),
    [
        ("a100_40gb", "a100-40g"),
        ("A800", "a800-80g"),
        ("h200", "h200-141g"),
        ("gb200", "gb200-186g"),
        ("b300", "b300-288g"),
        ("gb300", "gb300-288g"),
    ],
)
def test_devices_have_presets(device, preset):
    """Prevents a device's rows predicted on another's rates, or refused."""
    assert measured_gpus.measured_row(DENSE | {"device": device}).cluster.name == preset


@pytest.fixture(scope="module")
def measured() -> list[measured_gpus.Compared]:
    """Return predictions of published steps and two sets of layouts."""
    files = [
        measured_gpus.FOLDER / f"{name}.json"
        for name in ("steps", "more_steps", "vlm_steps", "ms_swift")
    ]
    rows = measured_gpus.compare_rows(files)
    layouts = measured_gpus.FOLDER / "layouts_h100.json"
    for place, row in enumerate(json.loads(layouts.read_text())["rows"]):
        if (row["model"], row["gpus"]) in (("8B", 8), ("8B", 64)):
            rows.append(measured_gpus.compare_row(layouts, place))
    return rows


def test_published_steps_are_predicted_as_the_table_says(measured):
    """Prevents a cost term that moves predictions away from measured steps, and published errors of
    other predictions."""
    found = measured_gpus.errors_by_kind(measured)
    stated = read_toml_model(dict[str, list[PublishedErrors]], ERRORS_FILE, "")["errors"]
    for one, said in zip(found, stated, strict=True):
        assert one.model_copy(update={"median": 0, "least": 0, "most": 0}) == said.model_copy(
            update={"median": 0, "least": 0, "most": 0}
        )
        figures = [(each.median, each.least, each.most) for each in (one, said)]
        np.testing.assert_allclose(*figures, atol=2e-3)
    of_kind: dict[str, list[float]] = {}
    for one in measured:
        if one.error is not None and not one.calibrates and one.kind != measured_gpus.LAYOUTS:
            of_kind.setdefault(one.kind, []).append(one.error)
    most = {
        JobKind.DENSE: 0.04,
        JobKind.EXPERTS: 0.15,
        JobKind.VISION_LANGUAGE: 0.2,
        JobKind.SHARDED: 0.12,
        JobKind.ADAPTERS: 0.12,
        JobKind.LONG_CONTEXT: 0.12,
    }
    assert of_kind.keys() == most.keys()
    for kind, errors in of_kind.items():
        assert np.median(np.abs(errors)) <= most[kind], (kind, errors)


def test_layouts_are_ranked_and_judged(measured):
    """Prevents choosing a layout that is not the fastest measured, or runs out of memory, and
    tables that cannot be printed."""
    for table in (measured_gpus.KINDS_COLUMNS, measured_gpus.RANKING_COLUMNS):
        measured_gpus.print_table("", table, [[1] * len(table)])
    small, large = measured_gpus.ranking_table(measured)
    assert [row[3] for row in (small, large)] == pytest.approx([0, 0], abs=0.01)
    assert [row[4] for row in (small, large)] >= [0.9, 0.85]


def test_a_row_is_predicted_as_its_line(measured, capsys):
    """Prevents rows predicted differently from lint on a user's line."""
    trainers = dict[str, measured_gpus.Compared]()
    for one in measured:
        if one.predicted_ms is not None and one.kind != measured_gpus.LAYOUTS:
            trainers.setdefault(one.measured.line.split()[0] + one.kind, one)
    assert len(trainers) >= 8
    for one in trainers.values():
        if one.file == "steps":  # cut to fewer layers than their models
            continue
        found = result(capsys, "lint", one.measured.line, *one.measured.options, "--json")
        assert found["prediction"]["step_ms"] == pytest.approx(one.predicted_ms), one.measured.line
        assert found["prediction"]["fits"] == one.fits


def test_ablation(data: paper.Data):
    """Prevents a cost model with other gains from data, model or memory balance."""
    job = paper.Predicted(paper.ABLATION_JOB, CLUSTER)
    full, isf = RecomputeRule.FULL, data.isf
    parameter = job.stages(PartitionMethod.PARAMETER, full, isf, capped=False)
    bmp = job.stages(PartitionMethod.BMP, full, isf, capped=False)
    front = job.stages(PartitionMethod.BMP, RecomputeRule.FRONT, isf)
    days = [job.gpu_days(parameter, data.random)]
    days += [job.gpu_days(stages, isf) for stages in (parameter, bmp, front)]
    published = np.array(list(paper.TABLE_7.values()))
    np.testing.assert_allclose(days, published, rtol=0.12)
    ratios, known = days[0] / np.array(days), published[0] / published
    # The gain of data balance alone comes out 13 to 14 % too small.
    assert np.abs(ratios / known - 1)[1] < 0.15
    np.testing.assert_allclose(ratios[2:], known[2:], rtol=0.1)


@pytest.mark.parametrize("job", paper.TABLE_9, ids=lambda job: job.model)
def test_models_of_table_9(job: paper.Job, data: paper.Data):
    """Prevents a cost model that fits one size only, and a search slower than the paper's."""
    predicted = paper.Predicted(job, CLUSTER)
    parameter = predicted.stages(
        PartitionMethod.PARAMETER, RecomputeRule.FULL, data.random, capped=False
    )
    own = predicted.paper_stages(job.recomputed)
    baseline_days = predicted.gpu_days(parameter, data.random)
    days = predicted.gpu_days(own, data.isf)
    assert baseline_days / days == pytest.approx(job.speed_up, rel=0.155)
    assert [baseline_days, days] == pytest.approx([job.baseline_gpu_days, job.gpu_days], rel=0.15)
    bmp = predicted.stages(PartitionMethod.BMP, RecomputeRule.FRONT, data.isf)
    joint = predicted.stages(PartitionMethod.OMNIBAL, RecomputeRule.CHEAPEST, data.isf)
    joint_ms, bmp_ms, own_ms = (predicted.step_ms(stages, data.isf) for stages in (joint, bmp, own))
    assert joint_ms <= bmp_ms * 1.001
    layers = [stage.number_of_layers() for stage in joint]
    distance = np.abs(np.cumsum(layers) - np.cumsum(job.stage_layers)).max()
    assert distance <= 1 or joint_ms < own_ms


@pytest.fixture(scope="module")
def texts() -> hbp.Data:
    return hbp.Data(hbp.SAMPLES, seed=0)


def test_hbps_system_is_calibrated_on_its_table_4():
    """Prevents tables called calibrated on figures that they do not reproduce."""
    assert hbp.calibrate_share() == pytest.approx(hbp.SHARE_OF_RATES, abs=0.005)
    system = hbp.System("llama3.1-8b", hbp.cluster_at())
    predicted = [system.iteration_s(group) for group in hbp.TABLE_4]
    np.testing.assert_allclose(predicted, list(hbp.TABLE_4.values()), rtol=0.045)


def test_table_6_of_hbp(texts: hbp.Data):
    """Prevents other gains from levels or balanced batches than published, on our data."""
    system = hbp.System("llama3.1-8b", hbp.cluster_at())
    one, levels, balanced = (texts.simulate(system, *way) for way in hbp.ways(hbp.GROUPS_8B))
    ratios = np.array([levels.seconds, balanced.seconds]) / one.seconds
    np.testing.assert_allclose(ratios, np.array([4.51, 3.73]) / 5.22, rtol=0.15)
    assert one.attention_balance_ratio == pytest.approx(0.506, rel=0.2)
    # The paper's ratio is over groups of eight ranks; over single ranks it is 0.62.
    assert levels.block_balance_ratio == pytest.approx(0.288, rel=0.2)
    assert balanced.attention_balance_ratio == pytest.approx(0.002, rel=0.2)
    assert one.communication_ratio == 1
    assert balanced.communication_ratio == pytest.approx(0.173, rel=0.2)


def test_table_6_of_hbp_for_the_large_model(texts: hbp.Data):
    """Prevents a cost model that fits one size only. The ranks that share 128K are assumed."""
    system = hbp.System("llama3.1-70b", hbp.cluster_at())
    published = np.array(hbp.DAYS_70B[1:]) / hbp.DAYS_70B[0]
    for context, tolerance in ((16, 0.22), (8, 0.18)):
        ways = hbp.ways(hbp.groups_70b(context))
        seconds = [texts.simulate(system, *way).seconds for way in ways]
        np.testing.assert_allclose(np.array(seconds[1:]) / seconds[0], published, rtol=tolerance)


def test_hbps_rule_and_the_search_beside_it(texts: hbp.Data):
    """Prevents a rule other than HBP's, or a search worse than the rule."""
    assert hbp.levels_of_table_19() == ((16, 1), (128, 8))
    some = texts.made.take(np.random.default_rng(0).permutation(len(texts.made))[:6_000])
    of_rule, found, least_ms = hbp.level_search(some, seed=0)
    assert least_ms < found.ms_per_sample < of_rule.ms_per_sample


def test_orchmllms_encoders_are_too_large_to_be_data_parallel():
    """Prevents a plan that replicates 11B of encoders on devices of 80 GB."""
    lengths = orch_plan.draw_mixture(2_000)
    media = 256 * lengths.column("tiles") + 250 * lengths.column("clips")
    expected = lengths.loss_tokens + media
    np.testing.assert_array_equal(lengths.tokens, expected)
    with pytest.raises(DoesNotFit, match=r"needs 9\d\.\d+ GiB"):
        orch_plan.plan_cells(lengths, "h100-80g", (WeightSharding.REPLICATED,))


def test_memory_of_launch_lines_is_near_what_they_note(measured):
    """Prevents fit verdicts off by a quarter on other trainers' examples."""
    errors = [one.memory_error for one in measured if one.file == "ms_swift"]
    assert len(errors) == 5 and -0.23 < min(errors) and max(errors) < 0.02
