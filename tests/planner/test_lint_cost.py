"""Predicted cost of launch lines: equal to their plans, with memory verdicts and advice."""

import re
from functools import cache

import numpy as np
import pytest
from cli_cases import printed, result
from launch_cases import CLUSTER, LINES, model_of, of_line
from length_cases import lengths_of, texts

from omnibal.base.errors import UserError
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import MockData, shape_caps
from omnibal.job.plan_files import PlanFiles
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import load_model, with_imbalance
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TARGETS, TargetName
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.unit_runs import stages_from_cuts, unit_spans
from omnibal.trainers.export.directory import EXPORTS, export_input, make_export
from omnibal.trainers.lint.line_job import LineJob, recompute_first
from omnibal.trainers.lint.predict_line import Verdict, predict_line, predict_stages

INTERNVL, LLAMA = "internvl3.5-8b", "llama3.1-8b"
RECIPE = "run_recipe.py -tp 1 -pp 2 -mb 1"


EXPERTS = Parallel(tensor=2, pipeline=2, data=4, sequence_parallel=True, expert=8)
TWO, EIGHT = Parallel(pipeline=2, data=2), Parallel(pipeline=8)
LM, BRIDGE, SWIFT = TargetName.MEGATRON_LM, TargetName.MEGATRON_BRIDGE, TargetName.MS_SWIFT


@pytest.mark.parametrize(
    ("name", "model", "parallel", "tokens", "precision", "chunks"),
    [
        # With recomputed encoders, and with expert parallelism.
        (LM, INTERNVL, TWO, 12_288, "bf16", 1),
        (LM, INTERNVL, TWO, 12_288, "fp8", 1),
        (BRIDGE, "qwen3-vl-30b-a3b", EXPERTS, 9_472, "bf16", 1),
        (BRIDGE, "qwen3-vl-30b-a3b", EXPERTS, 9_088, "fp8", 1),
        (SWIFT, INTERNVL, TWO, 12_288, "bf16", 1),
        (SWIFT, INTERNVL, TWO, 12_288, "fp8", 1),
        (LM, INTERNVL, TWO, 12_288, "bf16", 2),
        (LM, INTERNVL, EIGHT, 8_192, "bf16", 3),
        (LM, LLAMA, Parallel(pipeline=4, data=2), 8_192, "bf16", 5),
        (BRIDGE, LLAMA, TWO, 16_384, "bf16", 4),
        (BRIDGE, "qwen3-vl-30b-a3b", EXPERTS, 6_016, "bf16", 2),
        (SWIFT, INTERNVL, Parallel(pipeline=4, data=2), 12_288, "bf16", 3),
        (SWIFT, LLAMA, EIGHT, 8_192, "bf16", 2),
    ],
)
def test_an_exported_line_costs_what_its_plan_does(
    name, model, parallel, tokens, precision, chunks, tmp_path
):
    """Prevents calling a plan's own exported flags slower, larger or different."""
    sizes, target = load_model(model), TARGETS[name]
    # Evenly routed samples of equal length, as in mock data.
    runtime = target.runtime.model_copy(update={"sample_tokens": tokens})
    job = JobSpec(
        model=with_imbalance(sizes, 1.0),
        cluster=CLUSTER,
        parallel=parallel,
        precision=precision,
        trainer=target.model_copy(update={"runtime": runtime}),
    )
    data = MockData(
        caps=Caps.of(**shape_caps(sizes, {"tokens": tokens}, 0.5)),
        # If the stages do not divide this number, no chunks are better.
        micro_batches_per_step=8 if chunks > 1 else 5,
        image_tokens=1024 if sizes.images is not None else None,
    )
    schedule, effort = ONE_FORWARD_ONE_BACKWARD, 1.0
    if chunks > 1:
        schedule, effort = PipelineSchedule(name="interleaved", chunks=chunks), 0.02
    plan = make_plan(PlanRequest(job=job, data=data, schedule=schedule), effort).plan
    files = PlanFiles(plan=plan, job=job, data=data.schedule(job))
    exported = make_export(export_input(files, target, None, tmp_path, 0), EXPORTS[name])
    told = of_line(exported.exported.command, model)
    assert (told.parts, told.schedule) == (plan.stages, plan.schedule)
    assert exported.expected.step_ms == plan.prediction.step_ms
    assert len(exported.expected.peak_gib) == parallel.pipeline
    if chunks > 1:
        assert predict_line(told).prediction == plan.prediction
        return
    # In FP8, all activations may fit without recomputation.
    assert any(stage.recompute for stage in plan.stages) or precision == "fp8"
    verdict = Verdict.predict(told)
    assert verdict.line.prediction == plan.prediction
    assert verdict.finding is None and verdict.better is None


def published_line(name: str, line: str = "") -> LineJob:
    (one,) = (each for each in LINES if each.id == name)
    # Only sizes are listed; LoongForge's scripts give this flag.
    usual = " --use-distributed-optimizer" if "loongforge" in one.line else ""
    return of_line(f"{one.line}{usual} {line}", model_of(one.model))


@cache
def verdict_of(name: str) -> Verdict:
    return Verdict.predict(published_line(name))


def test_what_starts_and_does_not_fit_is_told():
    """Prevents passing a line that starts and then runs out of memory."""
    verdict = verdict_of("lf-q3vl-235b")
    assert verdict.finding is not None and verdict.finding.severity == "warning"
    heaviest = max(each.device_gib for each in verdict.line.memory)
    assert f"{heaviest:,.1f} GiB" in verdict.finding.message and heaviest > 80
    # Nothing fits: weights, gradients and optimizer state alone exceed the memory.
    assert verdict.better is None and verdict.least is None
    state = verdict.line.prediction.stages[0].memory
    assert state.weights_gib + state.gradients_gib > 80


def test_advice_fits_and_is_read_back(tmp_path):
    """Prevents advised flags that do not start, do not fit or mean other layers than predicted."""
    for name in ("mb-q25vl-72b", "lf-q3vl-30b"):
        (one,) = (each for each in LINES if each.id == name)
        verdict = verdict_of(name)
        assert verdict.finding is not None
        for advised in (verdict.better, verdict.least):
            assert advised is not None
            assert max(each.device_gib for each in advised.memory) <= CLUSTER.memory_gib
            line = drop_split(one.line) + " " + " ".join(advised.flags)
            told = of_line(line, model_of(one.model))
            assert told.schedule == advised.schedule
            if name == "lf-q3vl-30b" or not any(s.recomputed_in("vision") for s in advised.stages):
                assert told.parts == advised.parts
            assert verdict.better.prediction.step_ms <= verdict.least.prediction.step_ms * 1.001


def test_no_recomputation_is_never_some():
    """Prevents a negative number of recomputed layers read as all layers but that number."""
    plain = f"{RECIPE} -ng 8 -gb 64 -sl 4096"
    again = "recompute_granularity=full model.recompute_method=block model.recompute_num_layers"
    told = [of_line(plain + more, INTERNVL) for more in ("", f" model.{again}=-3")]
    assert told[0].parts == told[1].parts


def drop_split(line: str) -> str:
    of_layers = (
        "pipeline-model-parallel-layout|custom-(?:virtual-)?pipeline-layers|recompute[a-z-]*|"
        "num-virtual-stages-per-pipeline-rank"
    )
    return re.sub(rf"--(?:{of_layers}) \S+", "", line)


@pytest.mark.parametrize("memory_gib", [15, 17, 20])
def test_the_better_split_is_the_best_of_all(memory_gib):
    """Prevents advice that another split or recompute count of the trainer beats."""
    model = load_model(INTERNVL).with_layers(vision=4, language=6)
    # Seven micro-batches per rank cannot be interleaved on two stages.
    told = of_line(f"{RECIPE} -ng 16 -gb 56 -sl 4096", model, memory_gib=memory_gib)
    verdict = Verdict.predict(told)
    first = len(unit_spans(model)) - model.language.layers - 1
    tried = [
        predict_stages(told, tuple(recompute_first(stage, number, encoders) for stage in stages))
        for layers in range(1, model.language.layers)
        for stages in [stages_from_cuts(model, [first + layers])]
        for number in range(model.language.layers + 1)
        for encoders in (0, 4)
    ]
    best = min(
        (
            one.step_ms
            for one in tried
            if one.max_device_gib <= memory_gib and max(one.peaks_gib) <= told.job.memory_cap_gib
        ),
        default=None,
    )
    assert (verdict.finding is None) == (memory_gib == 20)
    assert (verdict.better is None) == (best is None) == (memory_gib == 15)
    if verdict.better is not None:
        assert verdict.better.step_ms == pytest.approx(best)


def test_the_least_recomputation_is_the_least():
    """Prevents advice to recompute layers that fit without it."""
    verdict = verdict_of("mb-q25vl-72b")
    launched = verdict.line_job
    number = max(len(part.recomputed_in("language")) for part in verdict.least.parts)
    fewer = [recompute_first(part, number - 1, 0) for part in launched.parts]
    least = predict_stages(launched, fewer, launched.schedule)
    assert least.max_device_gib > launched.job.cluster.memory_gib


def test_samples_of_a_micro_batch_attend_for_themselves():
    """Prevents a micro-batch of four samples predicted as one sample of four times the length."""
    step_ms = []
    for samples, tokens in ((4, 2048), (1, 8192)):
        line = f"run_recipe.py -ng 8 -tp 1 -pp 2 -gb {32 * samples} -mb {samples} -sl {tokens}"
        told = of_line(line, INTERNVL)
        assert told.workload.features.shape[0] == 32
        assert int(told.packs.tokens.sum()) == 32 * 8192
        step_ms.append(predict_line(told).step_ms)
    assert step_ms[0] < 0.99 * step_ms[1]


def test_context_parallel_ranks_share_samples():
    """Prevents full-sample memory on every context-parallel rank, or time without their work."""
    told = [of_line(f"{RECIPE} -ng 8 -gb 8 -sl 16384 -cp {size}", INTERNVL) for size in (1, 2)]
    assert [one.job.parallel.data for one in told] == [4, 4]
    stages = [predict_line(one).prediction.stages for one in told]
    # An equal number of packs in flight, with half the tokens on each rank.
    alone, shared = (each[0].memory.activations_gib for each in stages)
    assert shared == pytest.approx(alone / 2, rel=0.02)
    # Half the work, plus the attention exchange.
    alone, shared = (each[1].forward_ms for each in stages)
    assert alone / 2 < shared < alone
    assert "context-parallel" in " ".join(told[1].notes)


def test_a_data_set_is_packed_to_the_line():
    """Prevents samples per second of mock samples, or packs longer than the line allows."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(300, 4000, 600).astype(np.int32)
    lengths = lengths_of(tiles=tokens // 600, tokens=tokens, loss_tokens=tokens // 2)
    line = f"{RECIPE} -ng 4 -gb 16 -sl 8192"
    told = of_line(line, INTERNVL, lengths)
    assert int(told.packs.tokens.max()) <= 8192
    line_cost = predict_line(told).prediction
    per_second, seconds = line_cost.samples_per_second_per_gpu, line_cost.step_ms / 1e3
    assert per_second * 4 * seconds * told.packs.steps == pytest.approx(
        len(told.packs.packs.samples)
    )
    made_up = predict_line(of_line(line, INTERNVL)).prediction
    assert made_up.samples_per_second_per_gpu is None


@pytest.mark.parametrize("launcher", ["megatron-lm", "ms-swift"])
def test_ranks_that_share_samples_share_a_datasets_packs(launcher):
    """Prevents a traceback, or micro-batches counted once per context-parallel rank."""
    line = {
        "megatron-lm": "torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --micro-batch-size 1 "
        "--use-distributed-optimizer --seq-length 4096 --global-batch-size 16 "
        "--context-parallel-size",
        "ms-swift": "NPROC_PER_NODE=8 megatron sft --global_batch_size 16 --max_length 4096 "
        "--packing true --context_parallel_size",
    }[launcher]
    tokens = np.random.default_rng(0).integers(300, 4000, 800)
    samples = texts(tokens)
    steps = {}
    for context in (1, 2, 4):
        told = of_line(f"{line} {context}", LLAMA, samples)
        assert set(np.bincount(told.packs.step).tolist()) == {16}
        assert int(told.packs.slot.max()) + 1 == 2 * context
        runtime = told.job.trainer.runtime
        assert runtime.ring_tokens is not None and 2000 < runtime.ring_tokens < 4000
        steps[context] = predict_line(told).step_ms
    # Equal work per device, plus the exchange.
    assert steps[1] * 0.95 < steps[2] < 1.4 * steps[1] and steps[2] < steps[4] < 1.8 * steps[1]


@pytest.mark.parametrize("flag", ["--task lora", "--peft lora", "peft=lora", "peft.dim=8"])
def test_adapters_are_told_by_any_of_their_names(flag):
    """Prevents a LoRA line predicted as if all weights were trained."""
    line = "run_recipe.py -ng 8 -tp 2 -pp 4 -mb 1 -gb 32 -sl 4096"
    assert of_line(line, LLAMA).job.adapters is None
    assert of_line(f"{line} {flag}", LLAMA).job.adapters.rank == (8 if "dim" in flag else 32)


@pytest.mark.parametrize(
    ("flags", "rank", "targets"),
    [
        ("--tuner_type lora", 8, ("all-linear",)),
        ("--train_type lora --lora_rank 64 --target_modules q_proj v_proj", 64,
         ("q_proj", "v_proj")),
        ("--tuner_type lora --target_modules linear_qkv linear_proj", 8, ("all-linear",)),
    ],
)  # fmt: skip
def test_rank_and_targets_of_adapters_are_the_lines(flags, rank, targets):
    """Prevents adapter memory for another rank, or on linears that the line leaves out."""
    adapters = published_line("sw-ivl35-30b-lora", line=flags).job.adapters
    assert (adapters.rank, adapters.targets) == (rank, targets)


def test_adapters_have_no_state_of_the_model():
    """Prevents calling a LoRA line that runs on two GPUs 180 GiB too large."""
    told = published_line("sw-ivl35-30b-lora", line="--tuner_type lora --freeze_llm true")
    verdict = Verdict.predict(told)
    memory = verdict.line.prediction.stages[0].memory
    # Rank 8 on all linear layers, including half of 128 experts.
    assert 0 < memory.gradients_gib + memory.optimizer_gib < 0.25 * memory.weights_gib
    assert verdict.finding is None and any("adapters" in note for note in told.notes)


def test_chunks_of_a_stage_wait_less_and_keep_more():
    """Prevents a launch line with chunks predicted with the bubble of a line without."""
    line, model = "run_recipe.py -ng 4 -tp 1 -pp 4 -mb 1 -gb 16 -sl 4096", model_of("qwen2.5-72b")
    told = of_line(f"{line} -vp 4", model)
    plain, chunked = predict_line(of_line(line, model)), predict_line(told)
    # Chunks remove three quarters of the wait for the first and the last micro-batch.
    idle = [each.step_ms * each.prediction.bubble_fraction for each in (plain, chunked)]
    assert 0.2 < idle[1] / idle[0] < 0.5
    assert all(more > less for more, less in zip(chunked.peaks_gib, plain.peaks_gib, strict=True))
    assert len(told.parts) == 16 and not told.notes
    other = of_line(f"{line} -vp 4 model.microbatch_group_size_per_vp_stage=8", model)
    assert other.parts == told.parts and "groups of 8 micro-batches" in other.notes[0]


_OF_MEGATRON = (
    "--bf16 --use-distributed-optimizer --tensor-model-parallel-size 4 --sequence-parallel "
    "--pipeline-model-parallel-size 4 --micro-batch-size 1 --seq-length 8192 --global-batch-size"
)
LAUNCHED = {
    "megatron-bridge": "run_recipe.py -ng 16 -tp 4 -pp 4 -mb 1 -sl 8192 -gb",
    "megatron-lm": f"torchrun --nproc-per-node 16 pretrain.py {_OF_MEGATRON}",
    "ms-swift": "NPROC_PER_NODE=16 megatron sft --tensor_model_parallel_size 4 --packing true "
    "--sequence_parallel true --pipeline_model_parallel_size 4 --max_length 8192 "
    "--global_batch_size",
    "loongforge": f"torchrun --nproc-per-node 16 loongforge.py {_OF_MEGATRON}",
}
"""A launch line of every trainer, up to the global batch size."""


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_advice_has_chunks_where_the_trainer_takes_them(launcher):
    """Prevents slower advice without chunks, and flags of other chunks than predicted."""
    sizes, model = LAUNCHED[launcher], load_model(INTERNVL)
    verdict = Verdict.predict(of_line(f"{sizes} 8", model))
    better = verdict.better
    assert better is not None and better.schedule.name == "interleaved"
    assert verdict.saving > 0.1 and better.max_device_gib <= CLUSTER.memory_gib
    told = of_line(f"{sizes} 8 {' '.join(better.flags)}", model)
    assert (told.parts, told.schedule) == (better.parts, better.schedule)
    assert predict_line(told).prediction == better.prediction
    # Seven micro-batches per rank on four stages.
    odd = Verdict.predict(of_line(f"{sizes} 7", model)).better
    assert odd is None or odd.schedule.name == "1f1b"


@pytest.mark.parametrize("virtual", [2, 4, 8])
def test_advice_is_never_slower_than_a_line_with_chunks(virtual):
    """Prevents advising a 1F1B split, or fewer chunks, in place of a faster line."""
    model = load_model(LLAMA)
    verdict = Verdict.predict(of_line(f"{LAUNCHED['megatron-bridge']} 8 -vp {virtual}", model))
    assert verdict.line.schedule.chunks == virtual and verdict.finding is None
    better = verdict.better
    assert better is None or better.step_ms <= 0.995 * verdict.line.step_ms


def test_chunks_that_are_not_simulated_are_not_called_slow():
    """Prevents advising a 1F1B split in place of chunks that are not simulated, as one is empty."""
    line = "run_recipe.py -ng 4 -tp 1 -pp 4 -mb 1 -gb 16 -sl 4096 model.recompute_method=block "
    line += "model.recompute_granularity=full model.recompute_num_layers=9 "
    told = of_line(f"{line} 'model.pipeline_model_parallel_layout=E||t*2|t*2|t*8|t*8|t*8|t*8L'",
                   load_model(LLAMA).with_layers(language=36))  # fmt: skip
    assert len(told.parts) == 4 and "predicted as one" in told.notes[0]
    verdict = Verdict.predict(told)
    assert verdict.finding is None and verdict.better is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("-ng 8 -pp 2 -mb 1 -gb 8", "does not set -sl"),
        ("-pp 2 -mb 1 -gb 8 -sl 4096", "number of GPUs"),
        ("-ng 8 -pp 2 -gb 8 -sl 4096", "does not set -mb"),
        ("-ng 8 -pp 2 -mb 1 -gb 8 -sl 4096 model.num_layers=20", "model has layers 20"),
    ],
)
def test_what_is_missing_is_asked_for(line, told):
    """Prevents a cost predicted from a default that the line does not have."""
    with pytest.raises(UserError, match=told):
        of_line(f"run_recipe.py {line}", INTERNVL)


def test_command_tells_cost(capsys):
    """Prevents JSON keys that scripts cannot rely on, and predictions with --no-cost."""
    line = f"{RECIPE} -ng 8 -gb 8 -sl 16384"
    lint = (f"lint --model {INTERNVL}", line)
    told = result(capsys, *lint)
    expected, cost = predict_line(of_line(line, INTERNVL)).prediction, told["prediction"]
    assert cost["step_ms"] == expected.step_ms
    layers = [(each["vision_layers"], each["language_layers"]) for each in cost["stages"]]
    assert layers == [(24, 18), (0, 18)]
    assert cost["fits"] == (max(each["device_gib"] for each in cost["stages"]) <= 80)
    for each in cost["stages"]:
        assert each["peak_gib"] == each["allocated_gib"] < each["reserved_gib"] < each["device_gib"]
    assert {"step_ms", "stages", "flags", "saved_fraction"} <= told["better"].keys()
    assert "tokens per second" in printed(capsys, *lint)
    assert result(capsys, *lint, "--no-cost")["prediction"] is None
