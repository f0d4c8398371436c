"""Share of an H100's FP8 peak at which published FP8 steps take as much less than BF16 as noted.

NVIDIA/dgxc-benchmarking v25.02 (NeMo on Megatron-core, DGX H100, Llama 3.1, sequences of 8,192)
notes the same jobs in BF16 and in FP8 with delayed scaling. One share for both jobs is fitted to
the ratios of their steps; the rates of BF16 are the cluster's. Fit again when these change.
"""

from dataclasses import dataclass

import numpy as np
from paper import print_table
from scipy.optimize import minimize_scalar

from omnibal.config import ClusterConfig, load_cluster
from omnibal.families.named import named_model
from omnibal.lint.command_line import read_launch
from omnibal.lint.launched import Samples, launched
from omnibal.lint.line import line_of
from omnibal.lint.predicted import predicted_line

_ALIKE = (
    "torchrun pretrain_gpt.py --bf16 --use-distributed-optimizer --sequence-parallel "
    "--context-parallel-size 2 --micro-batch-size 1 --global-batch-size 128 --seq-length 8192"
)
_FP8 = "--fp8-format hybrid --fp8-recipe delayed --fp8-param-gather"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that was noted in both precisions."""

    model: str
    gpus: int
    sizes: str
    bf16_s: float
    fp8_s: float

    @property
    def noted(self) -> float:
        """Time of a step in FP8, of that in BF16."""
        return self.fp8_s / self.bf16_s

    def step_s(self, cluster: ClusterConfig, precision: str = "") -> float:
        """Time of a step as predicted."""
        text = f"{_ALIKE} {self.sizes} {precision}"
        line = line_of(read_launch(text, {}, gpus=self.gpus), named_model(self.model))
        samples = Samples(lengths=None, image_share=0.0, image_tokens=0)
        job = launched(line, named_model(self.model), cluster, samples)
        return predicted_line(job).step_ms / 1e3

    def ratio(self, cluster: ClusterConfig, share: float) -> float:
        """The ratio of both as predicted, with so much of the FP8 peak."""
        in_fp8 = cluster.model_copy(update={"fp8_efficiency": share})
        return self.step_s(in_fp8, _FP8) / self.step_s(cluster)


JOBS = (
    Job(
        model="llama3.1-8b", gpus=8, bf16_s=12.8, fp8_s=9.44,
        sizes="--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1",
    ),
    Job(
        model="llama3.1-70b", gpus=64, bf16_s=14.6, fp8_s=10.46,
        sizes="--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
        "--num-virtual-stages-per-pipeline-rank 5",
    ),
)  # fmt: skip


def fitted_share(cluster: ClusterConfig) -> float:
    """The share with the least squares of relative errors of the jobs' ratios."""

    def error(share: float) -> float:
        ratios = [job.ratio(cluster, share) / job.noted for job in JOBS]
        return float(np.square(np.log(ratios)).sum())

    return float(minimize_scalar(error, bounds=(0.2, 1.0), method="bounded").x)


def main() -> None:
    """Fit, and print ratios beside those that were noted."""
    cluster = load_cluster("h100-80g")
    share = fitted_share(cluster)
    rows = []
    for job in JOBS:
        in_fp8 = cluster.model_copy(update={"fp8_efficiency": share})
        bf16_s, fp8_s = job.step_s(cluster), job.step_s(in_fp8, _FP8)
        noted = (job.bf16_s, job.fp8_s, job.noted)
        rows.append([job.model, *(f"{x:.3g}" for x in (*noted, bf16_s, fp8_s, fp8_s / bf16_s))])
    titles = ["job", "BF16 s", "FP8 s", "ratio", "predicted BF16", "FP8", "ratio"]
    about = f"fp8_efficiency {share:.3f}, beside {cluster.matmul_efficiency} of BF16"
    print_table(about, titles, rows)


if __name__ == "__main__":
    main()
