"""Published launch lines: those that run pass, broken ones are refused by the right rule."""

import re

import pytest
from launch_cases import BROKEN, GOOD, LINES, PublishedLine, model_of

from omnibal.lint.all_rules import findings_of
from omnibal.lint.command_line import read_launch
from omnibal.lint.launch import Finding
from omnibal.lint.line import line_of
from omnibal.lint.split import layers_by_chunk
from omnibal.model.levels import ContextExchange

pytestmark = pytest.mark.quick

each_good = pytest.mark.parametrize("published", GOOD, ids=lambda one: one.id)
each_broken = pytest.mark.parametrize("published", BROKEN, ids=lambda one: one.id)


def refusals(published: PublishedLine, line: str | None = None) -> list[Finding]:
    launch = read_launch(line or published.line, {})
    assert launch.launcher == published.launcher
    found = findings_of(launch, model_of(published.model))
    return [finding for finding in found if finding.is_refusal]


@each_good
def test_a_line_that_runs_is_not_refused(published: PublishedLine):
    """Prevents: a linter that cries wolf, which nobody asks twice."""
    assert refusals(published) == []


@each_broken
def test_a_broken_line_is_refused_by_its_rule(published: PublishedLine):
    """Prevents: a launch that ends in an assertion after the GPUs were taken."""
    found = refusals(published)
    assert published.rule in [finding.rule for finding in found]
    assert all(finding.source and finding.message.count("; ") >= 1 for finding in found)


@each_good
def test_all_layers_are_on_some_stage(published: PublishedLine):
    """Prevents: a cost or a drawing of a split that has lost a layer."""
    model = model_of(published.model)
    launch = read_launch(published.line, {})
    layers = layers_by_chunk(line_of(launch, model))
    assert len(layers) == launch.pipeline
    assert sum(map(sum, layers)) == model.language.layers


def test_a_name_that_is_nearly_a_flags_is_told():
    """Prevents: a misspelled size that is taken as not given, and questions about right flags."""
    for one in LINES:
        assert not line_of(read_launch(one.line, {}), model_of(one.model)).near_names
    line = "run --num-layer 4 --pipeline-model-parallel 2 --micro-batch-size 1"
    near = line_of(read_launch(line, {}), model_of(LINES[0].model)).near_names
    assert list(near.values()) == ["num-layers", "pipeline-model-parallel-size"]


@pytest.mark.parametrize(
    ("words", "exchange", "is_ring"),
    [
        ("", ContextExchange.GATHER, True),
        ("--cp-comm-type a2a+p2p", ContextExchange.GATHER, True),
        ("--cp-comm-type all_gather", ContextExchange.GATHER, False),
        ("--cp-comm-type a2a", ContextExchange.HEADS, False),
        ("--cp-comm-type a2a a2a", ContextExchange.HEADS, False),
        ("--cp-comm-type p2p p2p", ContextExchange.GATHER, True),
        ("--cp-comm-type p2p a2a", ContextExchange.GATHER, False),
    ],
)
def test_a_word_a_layer_is_read_as_one_for_all(
    words: str, exchange: ContextExchange, is_ring: bool
):
    """Prevents: an exchange that the level takes for one of heads, and its kernels for a ring."""
    launch = read_launch(f"run --context-parallel-size 2 --micro-batch-size 1 {words}", {})
    line = line_of(launch, model_of(LINES[0].model))
    assert (line.exchange, line.is_ring) == (exchange, is_ring)


def replaced(line: str, flag: str, value: str) -> str | None:
    """A line with another value of a flag, in any trainer's spelling; None where it has none."""
    name = flag.replace("-", "[-_]")
    new, count = re.subn(rf"((?:--|model\.|train\.){name}[ =])(\S+)", rf"\g<1>{value}", line)
    return new if count else None


def added(published: PublishedLine, flag: str, value: str) -> str:
    if published.launcher == "megatron-bridge":
        return f"{published.line} model.{flag.replace('-', '_')}={value}"
    name = flag.replace("-", "_") if published.launcher == "ms-swift" else flag
    return f"{published.line} --{name} {value}"


def mutations(published: PublishedLine) -> dict[str, str | None]:
    """Rules, each with the line changed so that it breaks that rule; None where it has no such
    flag."""
    line, model = published.line, model_of(published.model)
    launch = read_launch(line, {})
    layers, pipeline = model.language.layers, launch.pipeline
    odd_pipeline = next(size for size in range(2, 200) if layers % size)
    plain = launch.layers_by_stage is None and launch.layout is None
    plain = plain and launch.first_layers is None and launch.last_layers is None
    changed = {
        "heads-divide-tensor": replaced(line, "tensor-model-parallel-size", "11"),
        "experts-divide": replaced(line, "expert-model-parallel-size", "7"),
        "recompute-needs-method": re.sub(r"\S*recompute[-_]method[ =]\S+", "", line)
        if launch.recompute == "full"
        else None,
        "selective-without-number": added(published, "recompute-num-layers", "1")
        if launch.recompute == "selective"
        else None,
        "layout-layers": line.replace("'Et", "'Ett") if "'Et" in line else None,
        "listed-layers-add-up": re.sub(r"(pipeline-layers )\d+", r"\g<1>99", line)
        if launch.layers_by_stage
        else None,
        "layers-divide-stages": replaced(line, "pipeline-model-parallel-size", str(odd_pipeline))
        if plain
        else None,
        "recompute-words": added(published, "recompute-granularity", "most")
        if published.launcher != "ms-swift"
        else None,
        "middle-stages-and-layers": added(published, "decoder-first-pipeline-num-layers", "1")
        if plain and pipeline == 1 and published.launcher != "megatron-bridge"
        else None,
    }
    data = line_of(launch, model).data
    if data is not None and data > 1 and launch.global_batch is not None:
        changed["batch-divides"] = replaced(line, "global-batch-size", str(launch.global_batch + 1))
    return changed


@each_good
def test_a_line_with_one_flag_broken_is_refused(published: PublishedLine):
    """Prevents: rules that pass the good lines because they never refuse anything."""
    tried = {rule: line for rule, line in mutations(published).items() if line is not None}
    assert len(tried) >= 2
    for rule, line in tried.items():
        assert line != published.line
        assert rule in [finding.rule for finding in refusals(published, line)], (rule, line)


@each_good
def test_one_gpu_more_is_refused_where_sizes_do_not_divide_it(published: PublishedLine):
    """Prevents: a world size that no rule looks at, as it comes of no flag of the trainer."""
    launch = read_launch(published.line, {})
    model = model_of(published.model)
    line = line_of(launch, model)
    assert launch.gpus is not None
    more = read_launch(published.line, {}, gpus=launch.gpus + 1)
    rules = {finding.rule for finding in findings_of(more, model)}
    expected = {
        "gpus-divide-grid": (launch.gpus + 1) % line.grid != 0,
        "gpus-divide-expert-grid": (launch.gpus + 1) % line.expert_grid != 0
        and (launch.expert > 1 or launch.expert_tensor is not None),
    }
    for rule, is_broken in expected.items():
        assert (rule in rules) == is_broken
