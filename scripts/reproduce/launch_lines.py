"""Launch lines of ms-swift's examples: noted memory and time, and predictions of lint.

Notes are per GPU and iteration, without the kind of GPU. Only flags that `omnibal lint` reads are
kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paper import print_table

from omnibal.families.named import named_model
from omnibal.lint.command_line import read_launch
from omnibal.lint.launched import Launched, launched
from omnibal.lint.line import line_of
from omnibal.lint.predicted import predicted_line
from omnibal.model.config import load_cluster

_HUB = Path(__file__).parents[2] / "tests" / "planner" / "hub_configs"
_ALL = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
_TEXT = "--micro_batch_size 1 --max_length 8192 --packing true --sequence_parallel true"
_IMAGES = (
    "--freeze_llm false --freeze_vit true --freeze_aligner true --vit_gradient_checkpointing true "
    "--micro_batch_size 1 --max_length 2048 --packing true --sequence_parallel true"
)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A launch line of an example, with its notes."""

    name: str
    """Path in modelscope/ms-swift's examples/megatron, and commit."""
    model: str
    line: str
    noted_gib: int
    noted_s: float


EXAMPLES = (
    Example(
        name="multimodal/dense/full.sh@5fc0b69",
        model="qwen2.5-vl-7b",
        line="NPROC_PER_NODE=2 megatron sft --tensor_model_parallel_size 2 --global_batch_size 4 "
        f"{_IMAGES} {_ALL}",
        noted_gib=72,
        noted_s=4.1,
    ),
    Example(
        name="multimodal/moe/lora.sh@331b911",
        model="internvl3.5-30b-a3b",
        line="NPROC_PER_NODE=2 megatron sft --train_type lora --expert_model_parallel_size 2 "
        f"--global_batch_size 4 {_IMAGES} {_ALL}",
        noted_gib=43,
        noted_s=8.0,
    ),
    Example(
        name="multimodal/moe/glm4_5v.sh@0e518dd",
        model="glm-4.5v",
        line="NPROC_PER_NODE=4 megatron sft --train_type lora --tensor_model_parallel_size 4 "
        "--expert_tensor_parallel_size 1 --expert_model_parallel_size 4 --global_batch_size 2 "
        f"{_IMAGES} {_ALL}",
        noted_gib=66,
        noted_s=6.4,
    ),
    Example(
        name="moe/qwen3_moe.sh@7b55a0c",
        model=str(_HUB / "qwen3-30b-a3b"),
        line="NPROC_PER_NODE=8 NNODES=2 megatron sft --pipeline_model_parallel_size 2 "
        f"--expert_model_parallel_size 8 --global_batch_size 16 {_TEXT} {_ALL}",
        noted_gib=60,
        noted_s=9.6,
    ),
    Example(
        name="mcore_bridge/full/moe.sh@7b55a0c",
        model=str(_HUB / "qwen3-30b-a3b"),
        line="NPROC_PER_NODE=8 megatron sft --tensor_model_parallel_size 4 "
        "--pipeline_model_parallel_size 2 --decoder_first_pipeline_num_layers 25 "
        f"--expert_model_parallel_size 4 --global_batch_size 4 {_TEXT} {_ALL}",
        noted_gib=76,
        noted_s=3.0,
    ),
)
CLUSTERS = ("a100-80g", "h100-80g")


def of_example(example: Example, cluster: str) -> Launched:
    """The example's job on a preset's devices; half of the tokens are image tokens."""
    model = named_model(example.model)
    line = line_of(read_launch(example.line, {}), model)
    return launched(line, model, load_cluster(cluster), None, image_share=0.5)


def row(example: Example) -> Iterator[str]:
    yield example.name
    for cluster in CLUSTERS:
        job = of_example(example, cluster)
        line = predicted_line(job)
        if cluster == CLUSTERS[0]:
            gib = line.most_gib
            yield f"{example.noted_gib}"
            yield f"{gib:.0f}"
            yield f"{gib / example.noted_gib - 1:+.0%}"
            yield f"{example.noted_s:.1f}"
        yield f"{line.prediction.step_ms / 1e3:.1f}"


def main() -> None:
    """Print noted and predicted memory and time of every example."""
    times = (f"{cluster} s" for cluster in CLUSTERS)
    columns = ("example", "noted GiB", "predicted GiB", "gap", "noted s", *times)
    print_table("launch lines of ms-swift", columns, [[*row(example)] for example in EXAMPLES])


if __name__ == "__main__":
    main()
