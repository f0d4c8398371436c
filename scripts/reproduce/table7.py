"""Table 7: what balancing data, model and memory gains, one after the other, on 6B + 20B.

    python scripts/reproduce/table7.py [--samples 60000] [--cluster mine.toml]

Simulated, on costs that are calibrated on another figure (`calibration.py`). "none" is random data,
the parameter partition and full recomputation; then ISF, BMP and recomputation from the front of
each stage. Last what this project does instead: balanced packs, and the joint search.
"""

from paper import (
    ABLATION_JOB,
    TABLE_3_MODEL_ONLY,
    TABLE_7,
    Data,
    Predicted,
    arguments,
    cluster_of,
    described,
    print_table,
)

from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule


def main() -> None:
    given = arguments(__doc__)
    data, job = Data(given.samples, given.seed), Predicted(ABLATION_JOB, cluster_of(given))
    full, front = RecomputeRule.FULL, RecomputeRule.FRONT
    # The paper ran these: they fit its memory, whether or not they do by this model.
    parameter = job.stages(PartitionMethod.PARAMETER, full, data.isf, capped=False)
    bmp = job.stages(PartitionMethod.BMP, full, data.isf, capped=False)
    balanced = data.balanced(job.cost, job.model, job.job.parallel.data)
    ours = job.stages(PartitionMethod.OMNIBAL, RecomputeRule.CHEAPEST, balanced)
    cases = [
        (parameter, data.random),
        (parameter, data.isf),
        (bmp, data.isf),
        (job.stages(PartitionMethod.BMP, front, data.isf), data.isf),
    ]
    days = [job.gpu_days(stages, epoch) for stages, epoch in cases]
    paper = list(TABLE_7.values())
    rows = []
    for name, predicted, published, (stages, _) in zip(TABLE_7, days, paper, cases, strict=True):
        ratio, published_ratio = days[0] / predicted, paper[0] / published
        rows.append(
            [
                name,
                f"{published:.1f}",
                f"{predicted:.1f}",
                f"{predicted / published - 1:+.1%}",
                f"{published_ratio:.2f}",
                f"{ratio:.2f}",
                f"{ratio / published_ratio - 1:+.1%}",
                described(stages),
            ]
        )
    own_days = job.gpu_days(ours, balanced)
    rows.append(
        [
            "this project",
            "",
            f"{own_days:.1f}",
            "",
            "",
            f"{days[0] / own_days:.2f}",
            "",
            described(ours),
        ]
    )
    columns = ("balanced", "paper", "days", "error", "paper", "ratio", "error", "vision+language")
    print_table("Table 7: GPU days, and how much faster than without any", columns, rows)
    unbalanced = job.stages(PartitionMethod.BMP, full, data.random, capped=False)
    model_days = job.gpu_days(unbalanced, data.random)
    print(
        f"Model balance alone, on random data (Table 3): paper {TABLE_3_MODEL_ONLY}, "
        f"predicted {model_days:.1f} GPU days ({model_days / TABLE_3_MODEL_ONLY - 1:+.1%})"
    )


if __name__ == "__main__":
    main()
