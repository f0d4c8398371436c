"""Training with data-parallel encoders."""

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from chunk_cases import with_chunks
from data_parallel_cases import data_parallel_plan, own_stream
from mixture_cases import MODEL as MIXTURE
from tensor_parallel_cases import Feed, model_of
from toy import toy_audio_encoder, toy_batch

# Packs of (tiles, text tokens) per step, dealt to data-parallel ranks in turn: fewer packs than
# slots, all images in one pack, no images, one pack for all ranks.
STEPS = [
    [[(2, 9), (1, 14)], [(0, 12), (0, 7)], [(3, 5)], [(1, 8), (0, 6), (2, 11)], [(1, 4)], [(0, 9)]],
    [[(0, 20)], [(6, 10), (5, 8)], [(0, 8)], [(0, 5)], [(0, 11)]],
    [[(0, 7)], [(0, 12), (0, 4)], [(0, 5)]],
    [[(2, 6)]],
]


@dataclass(frozen=True)
class Case:
    """A plan with data-parallel encoders, and its options."""

    sizes: dict
    pipelines: int = 1
    cuts: tuple[int, ...] = ()
    per_pass: int = 2
    kept: int = 2
    frozen: tuple[str, ...] = ()
    recompute: dict = field(default_factory=dict)
    drop_path: float = 0.0
    tied: bool = False
    audio: bool = False
    experts: bool = False
    sharded: int = 1
    chunks: int = 1
    schedule: str = "1f1b"


IN_PARTS = {"tensor": 2, "sequence_parallel": True, "data": 2}
# Units of the language model: 0 embed, 1-2 layers, 3 head.
CASES = {
    "pp2-dp2": Case({"data": 2}, pipelines=1, cuts=(2,), kept=1, drop_path=0.3),
    "pp2-dp2-one-group": Case(
        {"data": 2}, pipelines=2, cuts=(1,), kept=0, tied=True, frozen=("language",)
    ),
    "tp2-sp-dp2": Case(
        IN_PARTS, pipelines=2, kept=99, recompute={"language": (1,)}, frozen=("vision",),
    ),
    "dp4": Case({"data": 4}, pipelines=2, kept=1, frozen=("projector",)),
    "dp4-frozen": Case({"data": 4}, pipelines=4, frozen=("vision", "projector")),
    "pp4": Case({}, cuts=(1, 2, 3), per_pass=1, kept=1, drop_path=0.3),
    "pp2-of-two-chunks-dp2": Case(
        {"data": 2}, cuts=(1, 2, 3), kept=1, tied=True, chunks=2, schedule="interleaved",
    ),
    "tp2-sp-dp2-audio": Case(
        IN_PARTS, kept=1, audio=True, frozen=("audio", "audio_projector"),
    ),
    # Ranks with fewer packs compute empty packs to join collectives.
    "dp4-experts": Case({"data": 4, "expert": 4}, pipelines=2, kept=1, experts=True),
    "pp2-dp2-experts": Case({"data": 2, "expert": 2}, cuts=(2,), audio=True, experts=True),
    # Sharded encoders, with unequal numbers of passes per rank.
    "pp2-dp2-divided-by-two": Case(
        {"data": 2}, pipelines=2, cuts=(1,), kept=0, tied=True, frozen=("language",), sharded=2,
    ),
    "tp2-sp-dp2-divided": Case(
        IN_PARTS, kept=1, audio=True, frozen=("vision", "audio", "audio_projector"),
        recompute={"language": (1,)}, sharded=4,
    ),
    "dp4-all-divided": Case({"data": 4, "sharded": 4}, pipelines=2, kept=1, audio=True, sharded=4),
    "dp4-language-divided-frozen": Case(
        {"data": 4, "sharded": 4}, pipelines=2, kept=1, frozen=("language",), sharded=2,
    ),
    "pp2-dp2-all-divided": Case(
        {"data": 2, "sharded": 2}, pipelines=2, cuts=(2,), kept=1, sharded=4, tied=True,
        recompute={"language": (0,)},
    ),
    "dp4-frozen-divided": Case({"data": 4}, pipelines=4, frozen=("vision", "projector"), sharded=2),
    "pp2-tp2-zb-h1": Case({"tensor": 2}, cuts=(2,), kept=2, schedule="zb-h1"),
    "pp2-dp2-zb-v": Case(
        {"data": 2}, pipelines=2, cuts=(1, 2, 3), kept=1, tied=True, chunks=2, schedule="zb-v",
    ),
}  # fmt: skip


def model_of_case(case):
    model = model_of(vocabulary=49, kv_heads=2).with_tower("language", tied_head=case.tied)
    if case.experts:
        model = model.with_tower("language", runs=MIXTURE.language.runs)
    audio = {"audio": toy_audio_encoder(layers=2)} if case.audio else {}
    return model.model_copy(update={"encoders": model.encoders | audio})


def plan_of(case):
    plan = data_parallel_plan(
        model_of_case(case), case.cuts, pipelines=case.pipelines, per_pass=case.per_pass,
        kept=case.kept, frozen=case.frozen, recompute=case.recompute, divided=case.sharded,
        **case.sizes,
    )  # fmt: skip
    return with_chunks(plan, case.chunks, case.schedule)


def packs_of(model, number, packs, drop_path=0.0):
    """Yield the packs of a step, with loss weights that differ by position."""
    for index, samples in enumerate(packs):
        if model.takes_audio:  # in some packs without images, not in all with images
            samples = [(tiles, text, text % 3) for tiles, text in samples]
        batch = toy_batch(model, samples, seed=100 * number + index)
        weights = torch.linspace(0.5, 1.5, len(batch.labels_L))
        keys = torch.arange(batch.tiles) * 0x9E3779B97F4A7C + index if drop_path else None
        total = weights.sum().item()
        yield replace(batch, loss_weights_L=weights, loss_weight=total, drop_path_keys_T=keys)


def feed_of(drop_path=0.0):
    return Feed(partial(packs_of, drop_path=drop_path), own_stream, drop_path)
