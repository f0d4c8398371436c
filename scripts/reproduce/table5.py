"""Table 5: memory that is left on every stage of 6B + 20B, with everything recomputed and without.

    python scripts/reproduce/table5.py [--samples 60000] [--cluster mine.toml]

Table 9 lists the job with tensor size 2 and data size 4. This prints the memory of the paper's own
split under that and under the released configuration's tensor 4, each with the optimizer's state
sharded over data-parallel ranks and whole. Nothing here is calibrated. The paper's figures also
hold what a framework allocates outside the model, some gigabytes.
"""

import numpy as np
from paper import (
    ABLATION_JOB,
    GB_PER_GIB,
    TABLE_5,
    Data,
    Predicted,
    arguments,
    cluster_of,
    layer_counts,
    print_table,
)

from omnibal.cost.analytic import analytic_cost
from omnibal.model.parallel import Parallel
from omnibal.pipeline.stage_memory import stage_memories

DEVICE_GB = 80.0


def main() -> None:
    given = arguments(__doc__)
    data, job = Data(given.samples, given.seed), Predicted(ABLATION_JOB, cluster_of(given))
    splits = {
        "data + model": job.paper_stages(ABLATION_JOB.stage_layers),
        "data + model + memory": job.paper_stages(ABLATION_JOB.recomputed),
    }
    assert layer_counts(splits["data + model"]) == list(ABLATION_JOB.stage_layers)
    rows = []
    for tensor, data_size in ((4, 2), (2, 4)):
        parallel = Parallel(tensor=tensor, pipeline=4, data=data_size, sequence_parallel=True)
        workload = data.isf.workload(data_size)
        for sharded in (False, True):
            cost = analytic_cost(
                job.model, job.cluster, parallel, "bf16", distributed_optimizer=sharded
            )
            for name, left in TABLE_5.items():
                memories = stage_memories(cost, [splits[name]], workload)
                used = np.array([memory.peak_gib * GB_PER_GIB for memory in memories])
                published = DEVICE_GB - np.array(left)
                rows.append(
                    [
                        f"TP {tensor}, PP 4, DP {data_size}",
                        "sharded" if sharded else "whole",
                        name,
                        " ".join(f"{gb:5.1f}" for gb in published),
                        " ".join(f"{gb:5.1f}" for gb in used),
                        f"{np.abs(used / published - 1).mean():.0%}",
                    ]
                )
    columns = (
        "sizes",
        "optimizer",
        "balanced",
        "paper: GB used, by stage",
        "predicted",
        "mean error",
    )
    print_table("Table 5: memory in use", columns, rows)


if __name__ == "__main__":
    main()
