"""Four ways to balance a three-modality job like OrchMLLM's, simulated.

    python scripts/reproduce/orch.py

The paper (arXiv 2503.23830) reports 84B parameters on 2,560 H100 at MFU 41.6 %, up to 3.1 times the
throughput of Megatron-LM. What is assumed beyond that, such as 16 samples a rank in every step, is
printed first: `ASSUMPTIONS` of `orch_system.py` is the rest of the list, `mixture` has the lengths.
A step is the sum of its phases' busiest ranks and two exchanges of features and their gradients;
the table's imbalance is the busiest rank's time over the mean of what all need, padding not
counted, and "most tokens" what the memory of some rank would have to hold of them, over the mean.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from orch_dispatch import balance_padded, place_on_ranks
from orch_system import (
    ASSUMPTIONS,
    PAPER_MFU,
    PAPER_OVERHEAD,
    PAPER_SPEED_UP,
    RANKS,
    ROOM_FOR_TOKENS,
    SAMPLES_OF_RANK,
    TOKENS_PER_TILE,
    Samples,
    System,
    Work,
    mixture,
)
from paper import print_table

from omnibal.dispatch.balance import balance, longest_first
from omnibal.dispatch.items import share_items
from omnibal.dispatch.load_bounds import load_bound
from omnibal.model.config import ClusterConfig

PHASES = ("vision", "audio", "language")
_NCCL_PEER_GIB = 23.6 / 63
"""Buffers for each peer of a rank (NVIDIA/Megatron-LM#6378)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--samples-of-rank", type=int, default=SAMPLES_OF_RANK)
    parser.add_argument("--steps", type=int, default=5, help="of which all figures are the mean")
    given = parser.parse_args()
    system = System()
    jobs = [
        Job.drawn(system, given.ranks, given.samples_of_rank, seed) for seed in range(given.steps)
    ]
    print(f"{system.parameters() / 1e9:.1f}B parameters, {given.ranks:,} H100. Assumed:")
    print(f"- {given.samples_of_rank} samples a rank in every step, drawn at random")
    print(ASSUMPTIONS)
    print_ways(jobs)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """Samples of a step and their costs."""

    system: System
    samples: Samples
    ranks: int
    tile: Work
    recordings: Work
    texts: Work
    heard: np.ndarray
    """Samples that have a recording."""

    @classmethod
    def drawn(cls, system: System, ranks: int, samples_of_rank: int, seed: int) -> "Job":
        """A step of the mixture."""
        samples = mixture(ranks * samples_of_rank, seed)
        heard = np.flatnonzero(samples.seconds)
        return cls(
            system=system,
            samples=samples,
            ranks=ranks,
            tile=system.tile(),
            recordings=system.recordings(samples.seconds[heard]),
            texts=system.texts(samples),
            heard=heard,
        )

    @property
    def cap(self) -> int:
        """Most tokens of a rank."""
        return int(ROOM_FOR_TOKENS * self.samples.tokens.sum() / self.ranks)

    @property
    def drawn_rank(self) -> np.ndarray:
        """Rank of every sample as it is drawn. [n]"""
        samples = len(self.samples.text)
        return np.arange(samples) * self.ranks // samples

    def mean_ms(self) -> dict[str, float]:
        """Time of a rank by phase if all were equal and nothing were padded."""
        total_ms = (
            self.samples.tiles.sum() * self.tile.step_ms,
            self.recordings.step_ms.sum(),
            self.texts.step_ms.sum(),
        )
        return {phase: float(ms) / self.ranks for phase, ms in zip(PHASES, total_ms, strict=True)}

    def least_ms(self) -> dict[str, float]:
        """Lower bounds of the busiest rank's time by phase."""
        tiles = np.full(int(self.samples.tiles.sum()), self.tile.step_ms)
        return {
            "vision": load_bound(tiles, self.ranks),
            "audio": balance_padded(self.recordings.step_ms, self.ranks).bound,
            "language": load_bound(self.texts.step_ms, self.ranks),
        }

    def simulated(self, way: "Callable[[Job], Layout]") -> "Step":
        """A step whose phases lie so."""
        layout = way(self)
        busiest = {
            "vision": self._busiest(self.tile, layout.tiles),
            "audio": self._padded(layout.recordings),
            "language": self._busiest(self.texts, layout.texts),
        }
        tokens = np.bincount(layout.texts, self.samples.tokens, self.ranks)
        return Step(
            busiest_ms={phase: step for phase, (_, step) in busiest.items()},
            forward_ms=sum(forward for forward, _ in busiest.values()),
            exchange=exchange_of(self, layout),
            most_tokens=float(tokens.max() / tokens.mean()),
        )

    def _busiest(self, work: Work, rank: np.ndarray) -> tuple[float, float]:
        """Forward, and all of a step, of a phase's busiest rank."""
        each = np.ones(len(rank))
        forward, rest = (
            float(np.bincount(rank, ms * each, self.ranks).max())
            for ms in (work.forward_ms, work.step_ms - work.forward_ms)
        )
        return forward, forward + rest

    def _padded(self, rank: np.ndarray) -> tuple[float, float]:
        count = np.bincount(rank, minlength=self.ranks)
        work = self.recordings
        times = []
        for ms in (work.forward_ms, work.step_ms - work.forward_ms):
            longest = np.zeros(self.ranks)
            np.maximum.at(longest, rank, ms)
            times.append(float((count * longest).max()))
        return times[0], sum(times)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """The rank of every item in every phase."""

    tiles: np.ndarray
    """[tiles], in the order of samples"""
    recordings: np.ndarray
    """[samples with a recording]"""
    texts: np.ndarray
    """[n]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """The exchange of features, from where they are encoded to where they are read."""

    ms: float
    between_nodes: float
    """Share of all features' bytes that pass between nodes."""
    most_peers: int
    """Most ranks that one sends to."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """A simulated step."""

    busiest_ms: dict[str, float]
    """Of the busiest rank in every phase, forward and backward."""
    forward_ms: float
    """Of all phases."""
    exchange: Exchange
    most_tokens: float
    """Of any rank, over the mean."""

    @property
    def ms(self) -> float:
        """Time of the step."""
        return sum(self.busiest_ms.values()) + 2 * self.exchange.ms

    @property
    def overhead(self) -> float:
        """Time of an exchange as a share of the forward pass."""
        return self.exchange.ms / self.forward_ms


def nothing_balanced(job: Job) -> Layout:
    """Every rank computes the samples that it has drawn."""
    rank = job.drawn_rank
    return Layout(tiles=rank.repeat(job.samples.tiles), recordings=rank[job.heard], texts=rank)


def language_alone(job: Job) -> Layout:
    """Encoders run where samples were drawn, the language model is balanced."""
    rank = job.drawn_rank
    return Layout(
        tiles=rank.repeat(job.samples.tiles), recordings=rank[job.heard], texts=_language(job)
    )


def one_rule(job: Job) -> Layout:
    """Samples are dealt longest first on squared lengths, in every phase."""
    samples = job.samples
    vision = longest_first(samples.tiles.astype(np.float64) ** 2, job.ranks)
    return Layout(
        tiles=vision.repeat(samples.tiles),
        recordings=longest_first(samples.seconds[job.heard] ** 2, job.ranks),
        texts=longest_first(samples.tokens.astype(np.float64) ** 2, job.ranks),
    )


def each_its_own(job: Job) -> Layout:
    """Every phase by its own cost; encoders' batches lie near where their features are read."""
    texts, samples = _language(job), job.samples
    runs = share_items(
        {"vision": samples.tiles},
        texts,
        pipelines=job.ranks,
        ranks_of_pipeline=1,
        item_ms={"vision": float(job.tile.step_ms)},
    )["vision"]
    in_order = np.lexsort((runs.first, runs.pack))
    batch = balance_padded(job.recordings.step_ms, job.ranks).rank
    needed_bytes = np.zeros((job.ranks, job.ranks))
    np.add.at(
        needed_bytes,
        (batch, texts[job.heard]),
        job.system.feature_bytes_per_token * samples.audio_tokens[job.heard],
    )
    place = place_on_ranks(needed_bytes, job.system.cluster.gpus_per_node)
    return Layout(
        tiles=runs.rank[in_order].repeat(runs.count[in_order]),
        recordings=place[batch],
        texts=texts,
    )


WAYS: dict[str, Callable[[Job], Layout]] = {
    "no balancing": nothing_balanced,
    "language model alone": language_alone,
    "one rule: longest first on l²": one_rule,
    "ours: each phase by its cost": each_its_own,
}


def _language(job: Job) -> np.ndarray:
    rank = balance(job.texts.step_ms, job.ranks).rank
    most = int(np.bincount(rank, job.samples.tokens).max())
    if most > job.cap:  # a rank's time is nearly linear in its tokens
        raise SystemExit(f"a rank would have {most:,} tokens, and memory has room for {job.cap:,}")
    return rank


def exchange_of(job: Job, layout: Layout) -> Exchange:
    """One exchange of all features."""
    samples, each = job.samples, job.system.feature_bytes_per_token
    source = np.concatenate([layout.tiles, layout.recordings])
    target = np.concatenate([layout.texts.repeat(samples.tiles), layout.texts[job.heard]])
    sent = np.concatenate(
        [
            np.full(len(layout.tiles), TOKENS_PER_TILE * each),
            samples.audio_tokens[job.heard] * each,
        ]
    )
    return _exchanged(source, target, sent, job.ranks, job.system.cluster)


def _exchanged(
    source: np.ndarray, target: np.ndarray, sent: np.ndarray, ranks: int, cluster: ClusterConfig
) -> Exchange:
    """An exchange whose slowest rank decides: latency of its messages, and bytes at each rate."""
    moves = source != target
    leaves = source // cluster.gpus_per_node != target // cluster.gpus_per_node
    pairs = np.unique(source[moves] * ranks + target[moves])
    peers = np.bincount(pairs // ranks, minlength=ranks)
    rank_ms = np.zeros(ranks)
    for end in (source, target):
        ms = 1e-3 * cluster.link_latency_us * peers
        for chosen, gb_per_s in (
            (moves & ~leaves, cluster.intra_node_gb_per_s),
            (leaves, cluster.inter_node_gb_per_s),
        ):
            moved = np.bincount(end[chosen], sent[chosen], ranks)
            ms = ms + moved / (1e6 * gb_per_s * cluster.link_efficiency)
        rank_ms = np.maximum(rank_ms, ms)
    return Exchange(
        ms=float(rank_ms.max()),
        between_nodes=float(sent[leaves].sum() / sent.sum()),
        most_peers=int(peers.max()),
    )


def print_ways(jobs: Sequence[Job]) -> None:
    """The ways beside each other, and beside the paper."""
    system = jobs[0].system
    mean_ms, least_ms = _sums([job.mean_ms() for job in jobs]), _sums([j.least_ms() for j in jobs])
    flops_of_rank = sum(system.needed_flops(job.samples) for job in jobs) / jobs[0].ranks
    rows, first_ms, most_peers = [], 0.0, 0
    for name, way in WAYS.items():
        steps = [job.simulated(way) for job in jobs]
        busiest_ms, total_ms = _sums([step.busiest_ms for step in steps]), sum(s.ms for s in steps)
        first_ms = first_ms or total_ms
        most_peers = max(step.exchange.most_peers for step in steps)
        mfu = flops_of_rank / (1e9 * system.cluster.tflops("bf16") * total_ms)
        rows.append(
            [
                name,
                *(f"{busiest_ms[phase] / mean_ms[phase]:.3f}" for phase in PHASES),
                f"{max(step.most_tokens for step in steps):.2f}",
                f"{1e-3 * total_ms / len(steps):.2f}",
                f"{first_ms / total_ms:.2f}",
                f"{mfu:.1%}",
                f"{np.mean([step.exchange.ms for step in steps]):.1f}",
                f"{max(step.overhead for step in steps):.2%}",
                f"{np.mean([step.exchange.between_nodes for step in steps]):.0%}",
                str(most_peers),
            ]
        )
    bounds = (f"{least_ms[phase] / mean_ms[phase]:.3f}" for phase in PHASES)
    rows.append(["at least", *bounds, *[""] * 8])
    columns = (
        "way", *PHASES, "most tokens", "step s", "speed", "MFU", "exchange ms", "of forward",
        "between nodes", "peers",
    )  # fmt: skip
    samples = len(jobs[0].samples.text)
    print_table(f"{len(jobs)} steps of {samples:,} samples, simulated", columns, rows)
    print(
        f"The paper: MFU {PAPER_MFU:.1%}, up to {PAPER_SPEED_UP} times Megatron-LM, dispatch below "
        f"{PAPER_OVERHEAD:.0%} of the forward pass; not fitted, and on data of its own."
    )
    gib = _NCCL_PEER_GIB * most_peers
    print(f"{most_peers} peers would take {gib:.1f} GiB of NCCL's buffers on a rank.")


def _sums(of_steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sums over steps, by phase."""
    return {phase: sum(each[phase] for each in of_steps) for phase in PHASES}


if __name__ == "__main__":
    main()
