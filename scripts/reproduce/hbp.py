"""Tables 4, 6 and 11 of the HBP paper beside this project's prediction of its system.

    python scripts/reproduce/hbp.py

GPU days are compared as ratios to the first row's, since the paper's own tables give different
seconds for equal settings. Attention is balanced over the packs of an iteration, or ("by block")
over four groups of eight ranks, whatever shares a pack: the paper does not say which, and its
figure for levels without balanced batches is that of groups.

Then HBP's rule is given Table 19, and its levels are simulated beside those of this project's
search, in this project's trainer on the same costs: with greedy filling as in the paper, packs in
balanced rows, and for both the least recomputation that the memory of the H100 allows. Steps are
long, so that the exchange of gradients, which both have, counts little.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hbp_system import (
    CONTEXTS_70B,
    RANKS,
    SAMPLES,
    TABLE_4,
    TABLE_6_8B,
    TABLE_11,
    TABLE_19,
    Data,
    Group,
    K,
    Published,
    System,
    calibrated_share,
    cluster_at,
    table_6_70b,
)
from paper import print_table

from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.model.config import load_model
from omnibal.model.levels import FillRule, Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.search.hbp_levels import ProfiledLength, hbp_levels
from omnibal.search.level_sets import LevelRequest, search_levels
from omnibal.search.level_trial import LevelTrial, LevelTrials
from omnibal.steps.pack_settings import PackSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of the mixture")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    data = Data(given.samples, given.seed)
    small, large = (System(name, cluster_at()) for name in ("llama3.1-8b", "llama3.1-70b"))
    print_calibration(small)
    print_ways("Table 6, Llama3.1-8B", data, small, TABLE_6_8B)
    for context in CONTEXTS_70B:
        title = f"Table 6, Llama3.1-70B, {context} ranks to 128K (assumed)"
        print_ways(title, data, large, table_6_70b(context))
    print_ways("Table 11, Llama3.1-8B", data, small, TABLE_11)
    print_search(level_search(data.made, given.seed))


def print_calibration(system: System) -> None:
    """Table 4, which the share of the rates is calibrated on."""
    rows = []
    for group, known in TABLE_4.items():
        predicted = system.iteration_s(group)
        setting = f"{group.kilotokens}K", str(group.context), str(group.recomputed)
        rows.append([*setting, f"{known:.2f}", f"{predicted:.2f}", f"{predicted / known - 1:+.1%}"])
    columns = ("length", "ranks", "recomputed", "paper s", "predicted s", "difference")
    share = calibrated_share()
    print_table(f"Table 4 (calibration: {share:.3f} of the preset's rates)", columns, rows)


def print_ways(title: str, data: Data, system: System, ways: Sequence[Published]) -> None:
    """Ways to pack and batch, as ratios to the first."""
    simulated = [data.simulated(system, way) for way in ways]
    rows = []
    for way, one in zip(ways, simulated, strict=True):
        known = way.gpu_days / ways[0].gpu_days
        ratio = one.seconds / simulated[0].seconds
        lengths = " + ".join(f"{group.kilotokens}K/{group.context}" for group in way.groups)
        rows.append(
            [
                lengths + (", balanced" if way.balanced else ""),
                f"{way.gpu_days:.2f}",
                f"{ratio * ways[0].gpu_days:.2f}",
                f"{ratio / known - 1:+.1%}",
                _number(way.attention_balance_ratio),
                f"{one.attention_balance_ratio:.4f}",
                f"{one.block_balance_ratio:.4f}",
                _number(way.communication_ratio),
                f"{one.communication_ratio:.3f}",
                f"{one.fill:.1%}",
            ]
        )
    columns = (
        "lengths/ranks", "paper days", "predicted", "difference", "paper ABR", "ABR",
        "by block", "paper CR", "CR", "full",
    )  # fmt: skip
    print_table(title, columns, rows)


MICRO_BATCHES = 16
_SIMULATED_SAMPLES = 60_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """HBP's levels and those of the search, simulated on the same samples."""

    published: tuple[tuple[int, int], ...]
    """Thousands of tokens and ranks that HBP's rule gives for Table 19."""
    hbp: LevelTrial
    searched: LevelTrial
    least_ms_per_sample: float
    """Lower bound over all sets of levels, context sizes and recomputed layers."""


def level_search(lengths: Lengths, seed: int) -> Comparison:
    """Search for levels of Llama3.1-8B on 32 H100, and simulate HBP's beside them."""
    job = JobSpec(
        model=load_model("llama3.1-8b"),
        cluster=cluster_at(),
        parallel=Parallel(pipeline=1, data=RANKS),
        precision="bf16",
    )
    data = SampleData(
        settings=PackSettings(seed=seed),
        lengths=lengths,
        levels=(Level(caps=Caps.of(tokens=128 * K)),),
        packs_per_step=RANKS * MICRO_BATCHES,
    )
    found = search_levels(LevelRequest(job=job, data=data), lambda done: None)
    assert found.tokens_per_step is not None and found.least_ms_per_sample is not None
    chosen = chosen_from_table_19()
    greedy = LevelTrials(
        job=job,
        data=replace(data, settings=replace(data.settings, fill=FillRule.GREEDY)),
        tokens_per_step=found.tokens_per_step,
        longest=data.least_caps(),
    )
    _, hbp = greedy.drawn(_SIMULATED_SAMPLES)(
        tuple(
            Group(kilotokens=length, context=context, recomputed=0).level
            for length, context in chosen
        )
    )
    assert isinstance(hbp, LevelTrial), hbp
    return Comparison(
        published=chosen,
        hbp=hbp,
        searched=found.ranking[0],
        least_ms_per_sample=found.least_ms_per_sample,
    )


def chosen_from_table_19() -> tuple[tuple[int, int], ...]:
    """Thousands of tokens and ranks of the levels that HBP's rule takes from its own figures."""
    return hbp_levels(
        [
            ProfiledLength(tokens=group.kilotokens, context=group.context, ms=1e3 * seconds)
            for group, seconds in TABLE_19.items()
        ]
    )


def print_search(compared: Comparison) -> None:
    """HBP's levels beside those of the search."""
    words = " + ".join(f"{length}K/{context}" for length, context in compared.published)
    print(f"HBP's rule on Table 19: {words}; the paper has 16K/1 + 128K/8\n")
    rows = []
    for name, trial in (("HBP's", compared.hbp), ("search's", compared.searched)):
        described = " + ".join(f"{one.caps['tokens'] / K:g}K/{one.context}" for one in trial.levels)
        ratio = trial.ms_per_sample / compared.hbp.ms_per_sample
        again = " + ".join(map(str, trial.recomputed_layers))
        rows.append([name, described, again, f"{trial.ms_per_sample:.3f}", f"{ratio - 1:+.1%}"])
    least_ms = compared.least_ms_per_sample
    change = least_ms / compared.hbp.ms_per_sample - 1
    rows.append(["lower bound", "", "", f"{least_ms:.3f}", f"{change:+.1%}"])
    columns = ("levels", "lengths/ranks", "recomputed layers", "ms a sample", "difference")
    print_table("Search beside HBP, Llama3.1-8B on 32 H100, simulated", columns, rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
