"""Four ways to balance a three-modality job like OrchMLLM's, simulated.

    python scripts/reproduce/orch.py

The paper (arXiv 2503.23830) reports 84B parameters on 2,560 H100 at MFU 41.6 %, up to 3.1 times the
throughput of Megatron-LM. What it assumes beyond that is printed first (`orch_system.py`). A step
is the sum of its phases' busiest ranks and two exchanges of features and their gradients; the
table's imbalance is the busiest rank's time over the mean of what all need, padding not counted.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
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

from omnibal.config import ClusterConfig
from omnibal.dispatch.balance import balance_padded, balance_under_cap, longest_first
from omnibal.dispatch.bounds import load_bound
from omnibal.dispatch.items import share_items
from omnibal.dispatch.placement import place_on_ranks

PHASES = ("vision", "audio", "language")
_NCCL_PEER_GIB = 23.6 / 63
"""Buffers for each peer of a rank (NVIDIA/Megatron-LM#6378)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--samples-of-rank", type=int, default=SAMPLES_OF_RANK)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    job = Job.drawn(given.ranks, given.samples_of_rank, given.seed)
    print(f"{job.system.parameters() / 1e9:.1f}B parameters, {given.ranks:,} H100. Assumed:")
    print(ASSUMPTIONS)
    results = [job.simulated(name, way) for name, way in WAYS.items()]
    print_ways(job, results)


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
    def drawn(cls, ranks: int, samples_of_rank: int, seed: int) -> "Job":
        """A step of the mixture."""
        system, samples = System(), mixture(ranks * samples_of_rank, seed)
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

    def simulated(self, name: str, way: "Callable[[Job], Layout]") -> "Result":
        """Time of a step whose phases lie so."""
        layout = way(self)
        busiest = {
            "vision": self._busiest(self.tile, layout.tiles),
            "audio": self._padded(layout.recordings),
            "language": self._busiest(self.texts, layout.texts),
        }
        exchange = exchange_of(self, layout)
        forward_ms = sum(forward for forward, _ in busiest.values())
        step_ms = sum(step for _, step in busiest.values()) + 2 * exchange.ms
        flops = self.system.needed_flops(self.samples)
        peak = 1e9 * self.system.cluster.tflops("bf16") * self.ranks
        tokens = np.bincount(layout.texts, self.samples.tokens, self.ranks)
        return Result(
            name=name,
            imbalance={phase: busiest[phase][1] / ms for phase, ms in self.mean_ms().items()},
            step_ms=step_ms,
            mfu=flops / (step_ms * peak),
            exchange=exchange,
            overhead=exchange.ms / forward_ms,
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
class Result:
    """A simulated way."""

    name: str
    imbalance: dict[str, float]
    step_ms: float
    mfu: float
    exchange: Exchange
    overhead: float
    """Time of one exchange as a share of the forward pass."""
    most_tokens: float
    """Of any rank, over the mean."""


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
    tokens = job.samples.tokens
    found = balance_under_cap(job.texts.step_ms, job.ranks, tokens, job.cap, "tokens")
    return found.rank


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


def print_ways(job: Job, results: list[Result]) -> None:
    """The ways beside each other, and beside the paper."""
    rows = [
        [
            one.name,
            *(f"{one.imbalance[phase]:.3f}" for phase in PHASES),
            f"{one.most_tokens:.2f}",
            f"{one.step_ms / 1e3:.2f}",
            f"{results[0].step_ms / one.step_ms:.2f}",
            f"{one.mfu:.1%}",
            f"{one.exchange.ms:.1f}",
            f"{one.overhead:.2%}",
            f"{one.exchange.between_nodes:.0%}",
            str(one.exchange.most_peers),
        ]
        for one in results
    ]
    mean_ms, least_ms = job.mean_ms(), job.least_ms()
    bounds = (f"{max(least_ms[phase] / mean_ms[phase], 1):.3f}" for phase in PHASES)
    rows.append(["at least", *bounds, "1.00", *[""] * 7])
    columns = (
        "way", *PHASES, "most tokens", "step s", "speed", "MFU", "exchange ms", "of forward",
        "between nodes", "peers",
    )  # fmt: skip
    print_table(f"A step of {len(job.samples.text):,} samples, simulated", columns, rows)
    print(
        f"The paper: MFU {PAPER_MFU:.1%}, up to {PAPER_SPEED_UP} times Megatron-LM, dispatch below "
        f"{PAPER_OVERHEAD:.0%} of the forward pass; not fitted, and on data of its own."
    )
    peers = results[-1].exchange.most_peers
    print(f"{peers} peers take {_NCCL_PEER_GIB * peers:.1f} GiB of NCCL's buffers on a rank.")


if __name__ == "__main__":
    main()
