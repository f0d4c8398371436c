"""Launch lines of trainers without Megatron's flags, host time and expert dispatchers."""

import numpy as np
import pytest

from omnibal.base.errors import UserError
from omnibal.cost.host_waits import host_waits
from omnibal.cost.link_rates import all_to_all_line, pass_line, ring_ms_per_byte
from omnibal.job.job import JobSpec
from omnibal.model.config import load_cluster, load_model
from omnibal.model.parallel import Group, Parallel
from omnibal.trainers.lint.command_line import read_launch
from omnibal.trainers.lint.launch_settings import MEGATRON, Launcher
from omnibal.trainers.lint.line import layers_by_chunk, line_of
from omnibal.trainers.lint.line_job import LineJob, make_line_job
from omnibal.trainers.lint.predict_line import predict_line
from omnibal.trainers.lint.rules import can_start
from omnibal.trainers.lint.weights import ZeroStage, weight_shards, zero_stage

MODEL, CLUSTER = load_model("llama3.1-8b"), load_cluster("h100-80g")
TITAN = "torchrun --nproc_per_node 8 -m torchtitan.train --training.seq_len 4096"
FOUNDRY = "composer train.py max_seq_len=2048 device_train_microbatch_size=2"
NANO = "torchrun --nproc-per-node 8 run_train.py --tokens.sequence_length 4096"
ONE_SAMPLE = "--tokens.micro_batch_size 1 --tokens.batch_accumulation_per_replica 4"
BRIDGE = "run_recipe.py -tp 1 -pp 1 -mb 1 -gb 8 -sl 4096 ddp.use_megatron_fsdp=true"
AUTO = "torchrun --nproc-per-node 8 automodel/train_ft.py --dataset.seq_len 4096"
LM = "pretrain_gpt.py --bf16 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8"


def job_of(text: str, model=MODEL, gpus: int = 8, cluster=CLUSTER, **more: int) -> LineJob:
    line = line_of(read_launch(text, {}, None, gpus), model)
    return make_line_job(line, model, cluster, None, 0.0, **more)


@pytest.mark.parametrize(
    ("text", "launcher", "sizes", "stage"),
    [
        (
            f"{TITAN} --training.local_batch_size 2 --parallelism.tensor_parallel_degree 2",
            Launcher.TORCHTITAN,
            Parallel(tensor=2, pipeline=1, data=4, sequence_parallel=True, sharded=4),
            ZeroStage.WEIGHTS,
        ),
        (
            f"{TITAN} --training.local_batch_size 2 --parallelism.data_parallel_replicate_degree 2",
            Launcher.TORCHTITAN,
            Parallel(pipeline=1, data=8, sharded=4),
            ZeroStage.WEIGHTS,
        ),
        (
            f"{FOUNDRY} fsdp_config.sharding_strategy=SHARD_GRAD_OP",
            Launcher.LLM_FOUNDRY,
            Parallel(pipeline=1, data=8, sharded=8),
            ZeroStage.GRADIENTS,
        ),
        (
            f"{NANO} --parallelism.pp 2 {ONE_SAMPLE} --optimizer.zero_stage 1",
            Launcher.NANOTRON,
            Parallel(pipeline=2, data=4),
            ZeroStage.OPTIMIZER,
        ),
        (
            f"{AUTO} --step_scheduler.local_batch_size 1 --distributed.cp_size 2",
            Launcher.AUTOMODEL,
            Parallel(pipeline=1, data=8, sharded=8),
            ZeroStage.WEIGHTS,
        ),
        (
            f"{LM} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
            Launcher.MEGATRON_LM,
            Parallel(pipeline=1, data=8, sharded=8),
            ZeroStage.WEIGHTS,
        ),
        (
            f"{LM} --use-torch-fsdp2",
            Launcher.MEGATRON_LM,
            Parallel(pipeline=1, data=8, sharded=8),
            ZeroStage.WEIGHTS,
        ),
        (LM, Launcher.MEGATRON_LM, Parallel(pipeline=1, data=8), ZeroStage.NOTHING),
        (
            f"{LM} --use-distributed-optimizer",
            Launcher.MEGATRON_LM,
            Parallel(pipeline=1, data=8),
            ZeroStage.OPTIMIZER,
        ),
        (
            f"{BRIDGE} ddp.data_parallel_sharding_strategy=optim_grads_params",
            Launcher.MEGATRON_BRIDGE,
            Parallel(pipeline=1, data=8, sharded=8),
            ZeroStage.WEIGHTS,
        ),
    ],
)
def test_sizes_and_sharding_of_lines(text, launcher, sizes, stage):
    """Prevents silently ignoring sharding flags and other trainers' settings."""
    job = job_of(text)
    assert job.line.launch.launcher is launcher
    assert job.job.parallel == sizes
    assert zero_stage(job.line) is stage
    assert can_start(job.line, []) is (True if launcher in MEGATRON else None)
    assert predict_line(job).step_ms > 0


def test_wrong_sharding_is_refused():
    """Prevents an unknown strategy, or an indivisible number of replicas, read as another."""
    line = f"{LM} --use-megatron-fsdp --data-parallel-sharding-strategy all"
    with pytest.raises(UserError, match="must be no_shard or"):
        job_of(line)
    titan = f"{TITAN} --training.local_batch_size 2 --parallelism.data_parallel_replicate_degree 3"
    with pytest.raises(UserError, match="3 replicas"):
        weight_shards(line_of(read_launch(titan, {}, None, 8), MODEL), 8)


def test_weights_kept_to_backward_cost_memory_and_save_a_gather():
    """Prevents ZeRO-2 predicted as ZeRO-3 or as replicated weights."""
    full, kept = (
        predict_line(job_of(f"{FOUNDRY} fsdp_config.sharding_strategy={name}", gpus=64))
        for name in ("FULL_SHARD", "SHARD_GRAD_OP")
    )
    weights_gib = 2 * 8.03e9 / 2**30
    assert kept.step_ms < full.step_ms
    assert 0.8 * weights_gib < kept.peaks_gib[0] - full.peaks_gib[0] < 1.1 * weights_gib


def test_every_stage_of_sharding_needs_less_memory():
    """Prevents replicated optimizer state predicted as sharded, and confused ZeRO stages."""
    fsdp = "--use-megatron-fsdp --data-parallel-sharding-strategy"
    options = (
        "",
        "--use-distributed-optimizer",
        f"{fsdp} optim_grads",
        f"{fsdp} optim_grads_params",
    )
    gib = [predict_line(job_of(f"{LM} {option}")).peaks_gib[0] for option in options]
    assert gib == sorted(gib, reverse=True)
    state_gib = 12 * 8.03e9 / 2**30
    assert gib[0] - gib[1] == pytest.approx(state_gib * 7 / 8, rel=0.02)
    (none,) = predict_line(job_of(f"{LM} {fsdp} no_shard")).peaks_gib
    assert none == gib[0]


def test_replicated_state_is_updated_whole_and_reduced_twice_around():
    """Prevents a step without a distributed optimizer predicted as fast as a step with it."""
    bare, shared = (
        predict_line(job_of(f"{LM} {option}")).step_ms
        for option in ("", "--use-distributed-optimizer")
    )
    assert bare > shared * 1.02


@pytest.mark.parametrize("stages", [3, 5, 8])
def test_torchs_stages_hold_all_layers(stages):
    """Prevents all layers beyond a multiple of the stages on the last stage."""
    text = f"{TITAN} --training.local_batch_size 2 --parallelism.pipeline_parallel_degree {stages}"
    job = job_of(text, gpus=stages)
    counts = [part.number_of_layers() for part in job.parts]
    assert sum(counts) == 32 and max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("text", "gpus", "words"),
    [
        (f"{LM} --tensor-model-parallel-size 3", 8, "8 GPUs are no multiple"),
        (
            LM.replace("batch-size 8", "batch-size 12"),
            8,
            "12 is no multiple of the 8 samples",
        ),
        (f"{LM} --pipeline-model-parallel-size 5", 5, "hold 30 of 32 layers"),
        (f"{NANO} {ONE_SAMPLE} --optimizer.zero_stage 4", 8, "zero-stage must be 0 or 1, got 4"),
    ],
)
def test_lines_that_are_no_whole_job_say_why(text, gpus, words):
    """Prevents an indivisible size predicted as another job, or refused as missing."""
    text = text.replace("global-batch-size 8", "global-batch-size 1") if gpus == 5 else text
    with pytest.raises(UserError, match=words):
        job_of(text, gpus=gpus)


def test_experts_of_torch_are_not_divided_by_tensor_size():
    """Prevents Megatron's default expert tensor size in trainers with another default."""
    text = f"{AUTO} --step_scheduler.local_batch_size 1 --distributed.tp_size 2"
    job = job_of(f"{text} --distributed.ep_size 4", load_model("qwen3-30b-a3b"))
    assert job.job.parallel.expert == 4


@pytest.mark.parametrize("stages", [1, 2, 4, 5, 8, 16])
def test_nanotron_divides_layers_and_head_by_their_weights(stages):
    """Prevents a last stage with the head and a full share of layers."""
    text = f"{NANO} --parallelism.pp {stages} --tokens.micro_batch_size 1 --parallelism.dp 1"
    line = line_of(read_launch(text, {}, None, stages), MODEL)
    (layers,) = zip(*layers_by_chunk(line), strict=True)
    assert sum(layers) == 32 and min(layers[:-1], default=1) >= 1
    of_layer = 4096 * (4 * 4096 + 3 * 14336)
    work = np.array(layers, float) * of_layer
    work[-1] += 4096 * 128256
    assert work.max() <= work.sum() / stages + of_layer


def test_a_pass_takes_at_least_the_hosts_time():
    """Prevents small micro-batches predicted without host time, and large micro-batches with it."""
    costly = CLUSTER.model_copy(update={"host_us": 80.0})
    free = CLUSTER.model_copy(update={"host_us": 0.0})
    slow, fast = (
        JobSpec(model=MODEL, cluster=each, parallel=Parallel(pipeline=1), precision="bf16")
        for each in (costly, free)
    )
    names = list(fast.cost.features)
    layer, bare = slow.cost.units["language_layer"], fast.cost.units["language_layer"]
    for tokens in (64, 512, 2048, 16_384):
        own = {"fixed": 1, "tokens": tokens, "squared_tokens": tokens**2, "loss_tokens": tokens}
        given = np.zeros((1, len(slow.cost.features)))
        for name, value in own.items():
            given[0, names.index(name)] = value
        filled = host_waits(slow.cost, given)
        for of_pass, name in enumerate(("forward_ms", "backward_ms")):
            device_ms = float(given[0, : len(names)] @ getattr(bare, name))
            (taken_ms,) = filled @ getattr(layer, name)
            assert taken_ms == pytest.approx(max(device_ms, layer.host_ms[of_pass]))
    assert layer.host_ms[1] > 1.5 * layer.host_ms[0] > 0


def test_graphs_take_the_hosts_time_away():
    """Prevents CUDA graphs that leave a small micro-batch as slow as without."""
    text = LM.replace("4096", "128").replace("batch-size 8", "batch-size 256")
    bare, graphs = (predict_line(job_of(text + more)) for more in ("", " --enable-cuda-graph"))
    assert graphs.step_ms < 0.8 * bare.step_ms
    large = LM.replace("4096", "32768")
    bare, graphs = (predict_line(job_of(large + more)) for more in ("", " --enable-cuda-graph"))
    assert graphs.step_ms == pytest.approx(bare.step_ms)


@pytest.mark.parametrize("nodes", [1, 4])
def test_flex_dispatch_sends_a_token_once_to_a_rank_or_node(nodes):
    """Prevents link traffic that differs from random routing."""
    copies, group = 8, Group(8 * nodes)
    lines = [
        all_to_all_line(CLUSTER, group, "bf16", copies=copies, dispatcher=name)
        for name in ("alltoall", "flex")
    ]
    ranks = np.random.default_rng(0).integers(0, 8 * nodes, (20_000, copies))
    places = ranks // 8 if nodes > 1 else ranks
    once = np.mean([len(set(token) - {0}) for token in places.tolist()])
    each = np.mean((places != 0).sum(axis=1))
    assert lines[1].each_ms / lines[0].each_ms == pytest.approx(once / each, rel=0.02)


def test_latency_grows_with_the_ranks_of_a_ring():
    """Prevents small-bucket reductions over hundreds of ranks at the cost of eight, and network
    latency within a node."""
    few, many = (
        ring_ms_per_byte(CLUSTER, Group(ranks), "bf16", bucket_bytes=25 * 2**20)
        for ranks in (16, 512)
    )
    bare = ring_ms_per_byte(CLUSTER, Group(512), "bf16")
    assert many > 2 * few and many > bare
    assert pass_line(CLUSTER, Group(512), "bf16").fixed_ms > 1
    assert pass_line(CLUSTER, Group(8), "bf16", blocking=True).fixed_ms < 0.02
    waited = pass_line(CLUSTER, Group(32), "bf16", blocking=True)
    assert waited.fixed_ms == pytest.approx(31 * CLUSTER.link_latency_us / 1e3)


def test_short_samples_in_packs_attend_to_less():
    """Prevents fine-tuning on packed short samples predicted as one sample per pack."""
    text = LM.replace("4096", "16384")
    whole, short = job_of(text), job_of(text, sample_tokens=256)
    tokens = [job.packs.packs.sums(job.lengths.tokens) for job in (whole, short)]
    np.testing.assert_array_equal(*tokens)
    assert predict_line(short).step_ms < 0.9 * predict_line(whole).step_ms
