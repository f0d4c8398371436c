"""Layouts compared with Megatron-core's own parser."""

import random
from itertools import pairwise

import pytest
import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from omnibal.base.errors import UserError
from omnibal.model.config import ModelConfig, load_model, preset_names
from omnibal.model.units import projector_unit
from omnibal.pipeline.stage_units import Stage
from omnibal.trainers.export.layout import (
    LAYOUT_WORDS,
    PPLayout,
    layout_of,
    parse_layout,
    split_flags,
)

Chunks = tuple[str, ...]  # letters of every chunk
LETTERS = {word: letter for letter, word in LAYOUT_WORDS.items()} | {"encoder": "e"}


def core_chunks(layout: str | list, pipeline: int) -> Chunks | None:
    """Return the units of every chunk as Megatron-core reads them. None if it refuses them."""
    try:
        read = PipelineParallelLayerLayout(layout, pipeline)
    except AssertionError:
        return None
    by_turn = zip(*read.layout, strict=True)
    return tuple(
        "".join(LETTERS[unit.name] for unit in chunk) for turn in by_turn for chunk in turn
    )


def our_chunks(layout: str | list, pipeline: int) -> Chunks | None:
    try:
        chunks = parse_layout(layout, pipeline).chunks
    except UserError:
        return None
    return None if len(chunks) % pipeline else chunks


def random_stages(model: ModelConfig, pipeline: int, rng: random.Random) -> tuple[Stage, ...]:
    """Return stages with random numbers of language layers, all encoders on the first."""
    first = []
    for name, tower in model.encoders.items():
        first += [f"{name} embed", f"{name} 0..{tower.layers - 1}", projector_unit(model, name)]
    layers = model.language.layers
    cuts = [0, *sorted(rng.sample(range(1, layers), pipeline - 1)), layers]
    units = [[f"language {start}..{stop - 1}"] for start, stop in pairwise(cuts)]
    units[0] = [*first, "language embed", *units[0]]
    units[-1] += ["head"]
    return tuple(Stage.parse(*each) for each in units)


@pytest.mark.parametrize("seed", range(3))
def test_every_preset_is_written_as_core_reads_it(seed):
    """Prevents Megatron-core from placing layers on other stages than the layout's plan."""
    rng = random.Random(seed)
    for name in preset_names("models"):
        model = load_model(name)
        for pipeline in (1, 2, 3, 8):
            if pipeline > model.language.layers:
                continue
            most = max(model.language.layers // pipeline, 1) if pipeline > 1 else 1
            turns = rng.randint(1, min(most, 4))
            stages = random_stages(model, pipeline * turns, rng)
            layout = layout_of(stages, model.language.prediction_layers, turns)
            assert layout.virtual == turns
            lists = [[LAYOUT_WORDS[letter] for letter in chunk] for chunk in layout.chunks]
            for written in (layout.text, layout.short_text, lists):
                assert core_chunks(written, pipeline) == layout.chunks
                assert parse_layout(written, pipeline) == layout
            read = PipelineParallelLayerLayout(layout.short_text, pipeline)
            read.validate_layer_layout(model.language.layers, model.language.prediction_layers)
            of_parts = [len(stage.layers("language")) for stage in stages]
            for stage, chunks in enumerate(read.layout):
                counts = [chunk.count(LayerType.decoder) for chunk in chunks]
                assert counts == of_parts[stage::pipeline]


@pytest.mark.parametrize("seed", range(3))
def test_any_text_is_read_or_refused_as_core_does(seed):
    """Prevents a linter that passes layouts refused by Megatron-core, or the reverse."""
    rng = random.Random(seed)
    taken = 0
    for _ in range(1_500):
        text = "".join(rng.choices("EtttmL|||(()))***231, x", k=rng.randint(0, 14)))
        pipeline = rng.randint(1, 3)
        chunks = our_chunks(text, pipeline)
        assert chunks == core_chunks(text, pipeline), (text, pipeline)
        taken += chunks is not None
    assert 50 < taken < 1_450


REPEATS = (
    "E(tt|)*29,m|L", "Et*3|(tt|)*4tt|L", "E|(t|)*4L", "(t*2|)*3L", "(tt)*2*3", "t(*3)*1",
    "((t)*2)*2", "t*2*2", "()*3", "(t)", "t*0|", "|*3", "Et |L", "", "et|L", "t**2", "t*",
)  # fmt: skip
LISTS = (
    [["embedding", "decoder"], ["Decoder ", "LOSS"]],
    [["embedding"], ["encoder", "loss"]],
    [["embedding", "t"], ["loss"]],
    [[], ["embedding", "loss"]],
    [["embedding"], ["decoder"], ["loss"]],
)


@pytest.mark.parametrize(("layouts", "pipeline"), [(REPEATS, 1), (LISTS, 2)])
def test_repeats_and_lists_are_read_or_refused_as_core_does(layouts, pipeline):
    """Prevents repeats parsed differently from core, and lists with unknown units."""
    for layout in layouts:
        assert our_chunks(layout, pipeline) == core_chunks(layout, pipeline), layout


def test_chunks_of_a_stage_are_those_of_core():
    """Prevents chunks counted stage by stage instead of round by round."""
    text = "Ett|t|ttt|tttt|t|tL"
    layout = parse_layout(text, 3)
    read = PipelineParallelLayerLayout(text, 3)
    assert layout.virtual == read.virtual_pipeline_model_parallel_size == 2
    for stage in range(3):
        held = tuple("".join(LETTERS[unit.name] for unit in part) for part in read.layout[stage])
        assert layout.chunks[stage::3] == held
    assert layout.layers == (6, 2, 4)
    assert layout.place(4) == "chunk 1 of stage 1"


FIRST, LAST = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
LAYOUT = "pipeline-model-parallel-layout"
_FIELDS = {
    FIRST: "num_layers_in_first_pipeline_stage",
    LAST: "num_layers_in_last_pipeline_stage",
    LAYOUT: "pipeline_model_parallel_layout",
}
"""Fields of Megatron-core's configuration set by Megatron-LM's flags."""


def test_the_shortest_flags_that_express_a_split():
    """Prevents a layout if shorter flags suffice, and shorter flags for another split."""

    def flags(*layers: int) -> dict[str, str]:
        chunks = ["t" * count for count in layers]
        chunks[0], chunks[-1] = "E" + chunks[0], chunks[-1] + "L"
        return split_flags(PPLayout(pipeline=len(layers), chunks=tuple(chunks)))

    assert flags(7) == flags(4, 4, 4) == {}
    assert flags(3, 5) == {FIRST: "3", LAST: "5"}
    assert flags(3, 6, 6, 4) == {FIRST: "3", LAST: "4"}
    assert flags(3, 6, 5, 4) == {LAYOUT: "Et*3|t*6|t*5|t*4L"}
    assert flags(0, 5) == {LAYOUT: "E|t*5L"}
    even = PPLayout(pipeline=2, chunks=("Et", "t", "t", "L"))
    assert split_flags(even) == {LAYOUT: "Et|t|t|L"}


def core_layers(layout: PPLayout, predicted: int) -> tuple[int, ...]:
    """Return the number of layers that Megatron-core builds on every stage for the flags."""
    flags = split_flags(layout)
    told = {_FIELDS[name]: int(v) if v.isdigit() else v for name, v in flags.items()}
    config = TransformerConfig(
        num_layers=sum(layout.layers), hidden_size=8, num_attention_heads=1,
        pipeline_model_parallel_size=layout.pipeline, pipeline_dtype=torch.bfloat16,
        mtp_num_layers=predicted or None, **told,
    )  # fmt: skip
    stages = range(layout.pipeline)
    read = config.pipeline_model_parallel_layout
    if read is not None:  # core would query a process group
        return tuple(read.get_num_layers_to_build(pp_rank=stage) for stage in stages)
    return tuple(get_num_layers_to_build(config, pp_rank=stage) for stage in stages)


def test_core_builds_the_layers_of_the_flags():
    """Prevents flags that core refuses or splits into other layers."""
    rng = random.Random(0)
    for name in ("internvl3.5-8b", "deepseek-v3"):
        model = load_model(name)
        predicted = model.language.prediction_layers
        for pipeline in (1, 2, 3, 4):
            for _ in range(5):
                layout = layout_of(random_stages(model, pipeline, rng), predicted)
                assert core_layers(layout, predicted) == layout.layers
        layers = model.language.layers
        for first in (1, 2):
            rest, left = divmod(layers - first, 3)
            chunks = [first, rest, rest, rest + left]
            layout = parse_layout(f"E{'|'.join('t' * n for n in chunks)}{'m' * predicted}L", 4)
            assert layout.end_layers and layout.layers == tuple(chunks)
            assert core_layers(layout, predicted) == layout.layers


def test_errors_name_the_place():
    """Prevents an error that does not name the wrong letter, chunk or word."""
    for layout, pipeline, message in (
        ("Ett|txt|L", 1, "'x' in chunk 1, 'txt'"),
        ([["embedding"], ["layer", "loss"]], 2, "the layout has the word 'layer'"),
        ("Et*999999999|L", 2, "999,999,999 letters"),
        ("t*" + "9" * 4_999, 1, "5,001 letters"),
    ):
        with pytest.raises(UserError, match=message):
            parse_layout(layout, pipeline)
    with pytest.raises(UserError, match="stage 0 does not hold the language embed"):
        layout_of([Stage.parse("vision embed"), Stage.parse("language embed", "head")], 0)
