"""What lines cost: as plans that say the same, by what fits, and what would be better."""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cli_cases import run
from launch_cases import CLUSTER, LINES, MADE_UP, model_of, of_line
from length_cases import lengths_of, texts

from omnibal.base.errors import UserError
from omnibal.export.directory import export_input, make_export
from omnibal.export.trainers import EXPORTS
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import MockData, shape_caps
from omnibal.job.plan_files import PlanFiles
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.lint.launched import Launched, Samples, recomputing
from omnibal.lint.predicted import Verdict, predicted, predicted_line
from omnibal.model.config import ModelConfig, Precision, load_model, with_imbalance
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TARGETS, TargetName
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.unit_runs import stages_from_cuts, unit_words


def plan_of(
    name: TargetName,
    model: ModelConfig,
    parallel: Parallel,
    tokens: int,
    precision: Precision = "bf16",
    chunks: int = 1,
) -> PlanFiles:
    """A plan of shapes for a trainer, of samples that are routed evenly and equally long, as
    made-up ones are."""
    runtime = TARGETS[name].runtime.model_copy(update={"sample_tokens": tokens})
    job = JobSpec(
        model=with_imbalance(model, 1.0),
        cluster=CLUSTER,
        parallel=parallel,
        precision=precision,
        trainer=TARGETS[name].model_copy(update={"runtime": runtime}),
    )
    data = MockData(
        caps=Caps.of(**shape_caps(model, {"tokens": tokens}, 0.5)),
        # Of a number that is no multiple of the stages, no chunks are better.
        micro_batches_per_step=8 if chunks > 1 else 5,
        image_tokens=1024 if model.images is not None else None,
    )
    schedule, effort = ONE_FORWARD_ONE_BACKWARD, 1.0
    if chunks > 1:
        schedule, effort = PipelineSchedule(name="interleaved", chunks=chunks), 0.02
    plan = make_plan(PlanRequest(job=job, data=data, schedule=schedule), effort).plan
    return PlanFiles(plan=plan, job=job, data=data.schedule(job))


EXPERTS = Parallel(tensor=2, pipeline=2, data=4, sequence_parallel=True, expert=8)
SIZES = {
    # With encoders recomputed, and with experts that ranks share out.
    "internvl3.5-8b": (Parallel(pipeline=2, data=2), 12_288),
    "qwen3-vl-30b-a3b": (EXPERTS, 9_088),
}


@pytest.mark.parametrize(
    ("name", "model", "precision"),
    [
        (TargetName.MEGATRON_LM, "internvl3.5-8b", "bf16"),
        (TargetName.MEGATRON_BRIDGE, "qwen3-vl-30b-a3b", "bf16"),
        (TargetName.MS_SWIFT, "internvl3.5-8b", "bf16"),
        (TargetName.MEGATRON_LM, "internvl3.5-8b", "fp8"),
        (TargetName.MEGATRON_BRIDGE, "qwen3-vl-30b-a3b", "fp8"),
        (TargetName.MS_SWIFT, "internvl3.5-8b", "fp8"),
    ],
)
def test_an_exported_line_costs_what_its_plan_does(name, model, precision, tmp_path: Path):
    """Prevents: a linter that calls a plan's own flags slower, larger or different."""
    files = plan_of(name, load_model(model), *SIZES[model], precision)
    plan = files.plan
    line = EXPORTS[name](export_input(files, TARGETS[name], None, tmp_path, 0)).command
    told = of_line(line, model)
    # In FP8, what is kept may fit as it is.
    assert any(stage.recompute for stage in plan.stages) or precision == "fp8"
    assert told.parts == plan.stages
    verdict = Verdict.of(told)
    assert verdict.line.prediction == plan.prediction
    assert verdict.finding is None and verdict.better is None


@pytest.mark.parametrize(
    ("name", "model", "parallel", "tokens", "chunks"),
    [
        (TargetName.MEGATRON_LM, "internvl3.5-8b", Parallel(pipeline=2, data=2), 12_288, 2),
        (TargetName.MEGATRON_LM, "internvl3.5-8b", Parallel(pipeline=8), 8_192, 3),
        (TargetName.MEGATRON_LM, "llama3.1-8b", Parallel(pipeline=4, data=2), 8_192, 5),
        (TargetName.MEGATRON_BRIDGE, "llama3.1-8b", Parallel(pipeline=2, data=2), 16_384, 4),
        (TargetName.MEGATRON_BRIDGE, "qwen3-vl-30b-a3b", EXPERTS, 6_016, 2),
        (TargetName.MS_SWIFT, "internvl3.5-8b", Parallel(pipeline=4, data=2), 12_288, 3),
        (TargetName.MS_SWIFT, "llama3.1-8b", Parallel(pipeline=8), 8_192, 2),
    ],
)
def test_an_exported_line_with_chunks_costs_what_its_plan_does(
    name, model, parallel, tokens, chunks, tmp_path: Path
):
    """Prevents: chunks that are written on other stages than planned, or not at all."""
    files = plan_of(name, load_model(model), parallel, tokens, chunks=chunks)
    plan, given = files.plan, export_input(files, TARGETS[name], None, tmp_path, 0)
    exported = make_export(given, EXPORTS[name])
    told = of_line(exported.exported.command, model)
    assert (told.parts, told.schedule) == (plan.stages, plan.schedule)
    assert predicted_line(told).prediction == plan.prediction
    assert exported.expected.step_ms == plan.prediction.step_ms
    assert len(exported.expected.peak_gib) == parallel.pipeline


def published(name: str, samples: Samples = MADE_UP, line: str = "") -> Launched:
    (one,) = (each for each in LINES if each.id == name)
    return of_line(f"{one.line} {line}", model_of(one.model), samples)


@cache
def verdict_of(name: str) -> Verdict:
    return Verdict.of(published(name))


def test_what_starts_and_does_not_fit_is_told():
    """Prevents: a line that starts, takes its GPUs and ends out of memory, called good."""
    verdict = verdict_of("lf-q3vl-235b")
    assert verdict.finding is not None and verdict.finding.severity == "warning"
    heaviest = max(each.device_gib for each in verdict.line.memory)
    assert f"{heaviest:,.1f} GiB" in verdict.finding.message and heaviest > 80
    # Nothing fits on these GPUs: weights, gradients and optimizer state alone are too much.
    assert verdict.better is None and verdict.least is None
    state = verdict.line.prediction.stages[0].memory
    assert state.weights_gib + state.gradients_gib > 80


def test_advice_fits_and_is_read_back(tmp_path: Path):
    """Prevents: flags that do not start, mean other layers than were predicted, or do not fit."""
    for name in ("mb-q25vl-72b", "lf-q3vl-30b"):
        (one,) = (each for each in LINES if each.id == name)
        verdict = verdict_of(name)
        assert verdict.finding is not None
        for advised in (verdict.better, verdict.least):
            assert advised is not None
            assert max(each.device_gib for each in advised.memory) <= CLUSTER.memory_gib
            line = without_split(one.line) + " " + " ".join(advised.flags)
            told = of_line(line, model_of(one.model))
            assert told.schedule == advised.schedule
            if name == "lf-q3vl-30b" or not any(s.recomputed("vision") for s in advised.stages):
                assert told.parts == advised.parts
            assert verdict.better.prediction.step_ms <= verdict.least.prediction.step_ms * 1.001


def test_no_recomputation_is_never_some():
    """Prevents: a negative number that is taken as all layers but so many."""
    plain = "run_recipe.py -ng 8 -pp 2 -mb 1 -gb 64 -sl 4096"
    again = "recompute_granularity=full model.recompute_method=block model.recompute_num_layers"
    told = [of_line(f"{plain}{more}", "internvl3.5-8b") for more in ("", f" model.{again}=-3")]
    assert told[0].parts == told[1].parts


def without_split(line: str) -> str:
    of_layers = (
        "pipeline-model-parallel-layout|custom-(?:virtual-)?pipeline-layers|recompute[a-z-]*|"
        "num-virtual-stages-per-pipeline-rank"
    )
    return re.sub(rf"--(?:{of_layers}) \S+", "", line)


@pytest.mark.parametrize("memory_gib", [15, 17, 20])
def test_the_better_split_is_the_best_of_all(memory_gib):
    """Prevents: advice that another split and number of the same trainer would beat."""
    model = load_model("internvl3.5-8b").with_layers(vision=4, language=6)
    # Seven micro-batches a rank, which cannot be interleaved on two stages.
    line = "run_recipe.py -ng 16 -tp 1 -pp 2 -mb 1 -gb 56 -sl 4096"
    told = of_line(line, model, memory_gib=memory_gib)
    verdict = Verdict.of(told)
    first = len(unit_words(model)) - model.language.layers - 1
    tried = [
        predicted(told, tuple(recomputing(stage, number, encoders) for stage in stages))
        for layers in range(1, model.language.layers)
        for stages in [stages_from_cuts(model, [first + layers])]
        for number in range(model.language.layers + 1)
        for encoders in (0, 4)
    ]
    fitting = [
        one
        for one in tried
        if one.most_gib <= memory_gib and max(one.peaks_gib) <= told.job.memory_cap_gib
    ]
    best = min((one.step_ms for one in fitting), default=None)
    assert (verdict.finding is None) == (memory_gib == 20)
    assert (verdict.better is None) == (best is None) == (memory_gib == 15)
    if verdict.better is not None:
        assert verdict.better.step_ms == pytest.approx(best)


def test_the_least_recomputation_is_the_least():
    """Prevents: advice to recompute layers that would fit anyway."""
    verdict = verdict_of("mb-q25vl-72b")
    assert verdict.least is not None
    launched = verdict.launched
    counts = [len(part.recomputed("language")) for part in verdict.least.parts]
    number = max(counts)
    fewer = [recomputing(part, number - 1, 0) for part in launched.parts]
    least = predicted(launched, fewer, launched.schedule)
    assert least.most_gib > launched.job.cluster.memory_gib


def test_samples_of_a_micro_batch_attend_for_themselves():
    """Prevents: a micro-batch of four samples predicted as one of four times their length."""
    line = "-ng 8 -tp 1 -pp 2 -gb 32"
    parts = []
    for samples, tokens in ((4, 2048), (1, 8192)):
        sizes = f"{line} -mb {samples} -sl {tokens}".replace("-gb 32", f"-gb {8 * 4 * samples}")
        told = of_line(f"run_recipe.py {sizes}", "internvl3.5-8b")
        assert told.workload.features.shape[0] == 32
        assert int(told.packs.tokens.sum()) == 32 * 8192
        parts.append(predicted(told, told.parts).prediction.step_ms)
    assert parts[0] < 0.99 * parts[1]


def test_context_parallel_ranks_share_samples():
    """Prevents: memory of whole samples on every rank, or time as if ranks had nothing to do."""
    line = "run_recipe.py -ng 8 -tp 1 -pp 2 -mb 1 -gb 8 -sl 16384 -cp {}"
    one, two = (of_line(line.format(size), "internvl3.5-8b") for size in (1, 2))
    assert (one.job.parallel.data, two.job.parallel.data) == (4, 4)
    alone, shared = (predicted(told, told.parts).prediction for told in (one, two))
    kept = [each.stages[0].memory.activations_gib for each in (alone, shared)]
    # As many packs are in flight, of half as many tokens on each rank.
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.02)
    # Of half the work, and of what it exchanges for attention.
    forward = [each.stages[1].forward_ms for each in (alone, shared)]
    assert forward[0] / 2 < forward[1] < forward[0]
    assert "context-parallel" in " ".join(two.notes)


def test_a_data_set_is_packed_to_the_line():
    """Prevents: samples per second of made-up samples, or of packs longer than the line's."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(300, 4000, 600).astype(np.int32)
    lengths = lengths_of(tiles=tokens // 600, tokens=tokens, loss_tokens=tokens // 2)
    line = "run_recipe.py -ng 4 -tp 1 -pp 2 -mb 1 -gb 16 -sl 8192"
    told = of_line(line, "internvl3.5-8b", Samples(lengths=lengths, image_share=0, image_tokens=1))
    assert int(told.packs.tokens.max()) <= 8192
    line_cost = predicted(told, told.parts)
    per_second = line_cost.prediction.samples_per_second_per_gpu
    assert per_second is not None
    seconds = line_cost.prediction.step_ms / 1e3 * told.packs.steps
    assert per_second * 4 * seconds == pytest.approx(len(told.packs.packs.samples))
    made_up = of_line(line, "internvl3.5-8b")
    assert predicted(made_up, made_up.parts).prediction.samples_per_second_per_gpu is None


MEGATRON = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --use-distributed-optimizer "
    "--micro-batch-size 1 --seq-length 4096 --context-parallel-size {} --global-batch-size 16"
)
SWIFT = (
    "NPROC_PER_NODE=8 megatron sft --context_parallel_size {} --global_batch_size 16 "
    "--max_length 4096 --packing true"
)


@pytest.mark.parametrize("line", [MEGATRON, SWIFT])
def test_ranks_that_share_samples_share_a_datasets_packs(line):
    """Prevents: a traceback, or micro-batches that are counted once for every rank that shares
    them."""
    tokens = np.random.default_rng(0).integers(300, 4000, 800)
    samples = Samples(lengths=texts(tokens), image_share=0, image_tokens=1)
    steps = {}
    for context in (1, 2, 4):
        told = of_line(line.format(context), "llama3.1-8b", samples)
        assert set(np.bincount(told.packs.step).tolist()) == {16}
        assert int(told.packs.slot.max()) + 1 == 2 * context
        runtime = told.job.trainer.runtime
        assert runtime.ring_tokens is not None and 2000 < runtime.ring_tokens < 4000
        steps[context] = predicted_line(told).step_ms
    # As much work a device, and what is exchanged.
    assert steps[1] * 0.95 < steps[2] < 1.4 * steps[1] and steps[2] < steps[4] < 1.8 * steps[1]


@pytest.mark.parametrize("flag", ["--task lora", "--peft lora", "peft=lora", "peft.dim=8"])
def test_adapters_are_told_by_any_of_their_names(flag: str):
    """Prevents: a line of LoRA that is predicted as if all weights were trained."""
    line = "run_recipe.py -ng 8 -tp 2 -pp 4 -mb 1 -gb 32 -sl 4096"
    told = of_line(f"{line} {flag}", "llama3.1-8b")
    assert told.job.adapters is not None and of_line(line, "llama3.1-8b").job.adapters is None
    assert told.job.adapters.rank == (8 if "dim" in flag else 32)


@pytest.mark.parametrize(
    ("flags", "rank", "targets"),
    [
        ("--tuner_type lora", 8, ("all-linear",)),
        ("--train_type lora --lora_rank 64 --target_modules q_proj v_proj", 64, None),
        ("--tuner_type lora --target_modules linear_qkv linear_proj", 8, ("all-linear",)),
    ],
)
def test_rank_and_targets_of_adapters_are_the_lines(flags: str, rank: int, targets: tuple | None):
    """Prevents: memory of adapters of another rank, or beside linears that the line leaves out."""
    adapters = published("sw-ivl35-30b-lora", line=flags).job.adapters
    assert adapters.rank == rank and adapters.targets == (targets or ("q_proj", "v_proj"))


def test_adapters_have_no_state_of_the_model():
    """Prevents: a line of LoRA that runs on two GPUs called 180 GiB too large."""
    told = published("sw-ivl35-30b-lora", line="--tuner_type lora --freeze_llm true")
    verdict = Verdict.of(told)
    memory = verdict.line.prediction.stages[0].memory
    # Rank 8 beside all linears, half of 128 experts' among them.
    assert 0 < memory.gradients_gib + memory.optimizer_gib < 0.25 * memory.weights_gib
    assert verdict.finding is None and any("adapters" in note for note in told.notes)


def test_chunks_of_a_stage_wait_less_and_keep_more():
    """Prevents: a launch line with chunks that is told the bubble of one without."""
    line, model = "run_recipe.py -ng 4 -tp 1 -pp 4 -mb 1 -gb 16 -sl 4096", model_of("qwen2.5-72b")
    told = of_line(f"{line} -vp 4", model)
    plain, chunked = predicted_line(of_line(line, model)), predicted_line(told)
    # Three quarters less of the time that stages wait for the first and the last micro-batch.
    idle = [each.step_ms * each.prediction.bubble_fraction for each in (plain, chunked)]
    assert 0.2 < idle[1] / idle[0] < 0.5
    assert all(more > less for more, less in zip(chunked.peaks_gib, plain.peaks_gib, strict=True))
    assert len(told.parts) == 16 and not told.notes
    other = of_line(f"{line} -vp 4 model.microbatch_group_size_per_vp_stage=8", model)
    assert other.parts == told.parts and "groups of 8 micro-batches" in other.notes[0]


_OF_MEGATRON = (
    "--bf16 --use-distributed-optimizer --tensor-model-parallel-size 4 --sequence-parallel "
    "--pipeline-model-parallel-size 4 --micro-batch-size 1 --seq-length 8192"
)
_OF_SWIFT = (
    "--tensor_model_parallel_size 4 --sequence_parallel true --pipeline_model_parallel_size 4 "
    "--packing true --max_length 8192"
)
LAUNCHED = {
    "megatron-bridge": "run_recipe.py -ng 16 -tp 4 -pp 4 -mb 1 -sl 8192 -gb",
    "megatron-lm": f"torchrun --nproc-per-node 16 pretrain.py {_OF_MEGATRON} --global-batch-size",
    "ms-swift": f"NPROC_PER_NODE=16 megatron sft {_OF_SWIFT} --global_batch_size",
    "loongforge": f"torchrun --nproc-per-node 16 loongforge.py {_OF_MEGATRON} --global-batch-size",
}
"""A line of every trainer, up to the number of its global batch."""


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_advice_has_chunks_where_the_trainer_takes_them(launcher: str):
    """Prevents: advice of one chunk a stage that is slower than what the trainer can be told,
    chunks that it refuses, and flags that say other ones than were predicted."""
    sizes, model = LAUNCHED[launcher], load_model("internvl3.5-8b")
    verdict = Verdict.of(of_line(f"{sizes} 8", model))
    better = verdict.better
    assert better is not None and better.schedule.name == "interleaved"
    assert better.step_ms < 0.9 * verdict.line.step_ms and better.most_gib <= CLUSTER.memory_gib
    told = of_line(f"{sizes} 8 {' '.join(better.flags)}", model)
    assert (told.parts, told.schedule) == (better.parts, better.schedule)
    assert predicted_line(told).prediction == better.prediction
    # Seven micro-batches a rank on four stages.
    odd = Verdict.of(of_line(f"{sizes} 7", model)).better
    assert odd is None or odd.schedule.name == "1f1b"


@pytest.mark.parametrize("virtual", [2, 4, 8])
def test_advice_is_never_slower_than_a_line_with_chunks(virtual: int):
    """Prevents: a split by 1F1B, or of fewer chunks, advised in place of a faster line."""
    model = load_model("llama3.1-8b")
    verdict = Verdict.of(of_line(f"{LAUNCHED['megatron-bridge']} 8 -vp {virtual}", model))
    assert verdict.line.schedule.chunks == virtual and verdict.finding is None
    better = verdict.better
    assert better is None or better.step_ms <= 0.995 * verdict.line.step_ms


def test_chunks_that_are_not_simulated_are_not_called_slow():
    """Prevents: a split by 1F1B advised in place of chunks of which one is empty."""
    line = "run_recipe.py -ng 4 -tp 1 -pp 4 -mb 1 -gb 16 -sl 4096 model.recompute_method=block "
    line += "model.recompute_granularity=full model.recompute_num_layers=9 "
    told = of_line(f"{line} 'model.pipeline_model_parallel_layout=E||t*2|t*2|t*8|t*8|t*8|t*8L'",
                   load_model("llama3.1-8b").with_layers(language=36))  # fmt: skip
    assert len(told.parts) == 4 and "one run of layers" in told.notes[0]
    verdict = Verdict.of(told)
    assert verdict.finding is None and verdict.better is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("-ng 8 -pp 2 -mb 1 -gb 8", "sequence length"),
        ("-pp 2 -mb 1 -gb 8 -sl 4096", "number of GPUs"),
        ("-ng 8 -pp 2 -gb 8 -sl 4096", "micro-batch size"),
        ("-ng 8 -pp 2 -mb 1 -gb 8 -sl 4096 model.num_layers=20", "builds a model with layers 20"),
    ],
)
def test_what_is_missing_is_asked_for(line, told):
    """Prevents: a cost of a default that the line does not have."""
    with pytest.raises(UserError, match=told):
        of_line(f"run_recipe.py {line}", "internvl3.5-8b")


def lint(line: str, *options: str) -> None:
    run("lint --model internvl3.5-8b", line, *options)


def test_command_tells_cost(capsys):
    """Prevents: keys that a script cannot trust, and --no-cost that predicts."""
    line = "run_recipe.py -ng 8 -tp 1 -pp 2 -mb 1 -gb 8 -sl 16384"
    lint(line, "--json")
    printed = json.loads(capsys.readouterr().out)
    told = of_line(line, "internvl3.5-8b")
    expected = predicted(told, told.parts)
    assert printed["prediction"]["step_ms"] == expected.prediction.step_ms
    stages = printed["prediction"]["stages"]
    assert [each["language_layers"] for each in stages] == [18, 18]
    assert [each["vision_layers"] for each in stages] == [24, 0]
    assert printed["prediction"]["fits"] == (max(each["device_gib"] for each in stages) <= 80)
    for each in stages:
        assert each["peak_gib"] == each["allocated_gib"] < each["reserved_gib"] < each["device_gib"]
    assert {"step_ms", "stages", "flags", "saved_fraction"} <= printed["better"].keys()
    lint(line)
    assert "tokens per second" in capsys.readouterr().out
    lint(line, "--no-cost", "--json")
    assert json.loads(capsys.readouterr().out)["prediction"] is None
