"""Rules of pipeline layouts, as megatron-core's parser and check have them."""

from collections.abc import Callable

from omnibal.export.layout import DECODER, EMBEDDING, ENCODER, LOSS, PREDICTION, Layout
from omnibal.lint.launch import Launcher
from omnibal.lint.line import Line
from omnibal.lint.rule import CORE, SWIFT, Broken, Rule

_LAYOUT = "core/transformer/pipeline_parallel_layer_layout.py"
_CONFIG = "core/transformer/transformer_config.py"


def _of_layout(
    broken: Callable[[Line, Layout], Broken | None],
) -> Callable[[Line], Broken | None]:
    """A rule of a layout that can be read and has equally many chunks for every stage."""

    def checked(line: Line) -> Broken | None:
        layout = line.layout
        is_whole = isinstance(layout, Layout) and layout.pipeline == line.launch.pipeline
        return broken(line, layout) if isinstance(layout, Layout) and is_whole else None

    return checked


def _form(line: Line) -> Broken | None:
    if not isinstance(line.layout, str):
        return None
    given, _, change = line.layout.rpartition("; ")
    return Broken(given, change)


def _stages(line: Line) -> Broken | None:
    layout, stages = line.layout, line.launch.pipeline
    if not isinstance(layout, Layout) or len(layout.chunks) % stages == 0:
        return None
    chunks = len(layout.chunks)
    made_for = [
        f"PP {chunks // size}" + (f" with {size} chunks a stage" if size > 1 else "")
        for size in range(1, 9)
        if chunks % size == 0 and chunks // size > 1
    ]
    return Broken(
        f"the layout has {chunks} chunks for PP {stages}",
        f"it is one for {' or '.join(made_for) or 'one stage'}: set PP to that, or give another",
    )


def _virtual(line: Line, layout: Layout) -> Broken | None:
    given = line.launch.virtual
    if given is None or given == layout.virtual:
        return None
    return Broken(
        f"the layout has {layout.virtual} chunks for each of {layout.pipeline} stages, and the "
        f"virtual pipeline size is {given}",
        f"leave that size out, or give a layout of {given * layout.pipeline} chunks",
    )


def _alone(line: Line) -> Broken | None:
    launch = line.launch
    others = {
        "layers of the first stage": launch.first_layers is not None,
        "layers of the last stage": launch.last_layers is not None,
        "counting the embedding as a layer": launch.account_for_embedding,
        "counting the loss as a layer": launch.account_for_loss,
    }
    given = [words for words, holds in others.items() if holds]
    if launch.layout is None or not given:
        return None
    return Broken(f"a layout beside {', '.join(given)}", "leave one of them out")


def _ends(line: Line, layout: Layout) -> Broken | None:
    units = layout.units
    begins = units[:1] == (EMBEDDING,) and units.count(EMBEDDING) == 1
    ends = units[-1:] == (LOSS,) and units.count(LOSS) == 1
    if begins and ends:
        return None
    return Broken(
        f"the layout {layout.short_text if ENCODER not in units else ''}".rstrip()
        + f" has {units.count(EMBEDDING)} embeddings and {units.count(LOSS)} losses",
        "begin it with E and end it with L",
    )


def _layers(line: Line, layout: Layout) -> Broken | None:
    count, layers = layout.units.count(DECODER), line.sizes.layers
    if count == layers:
        return None
    difference = layers - count
    change = f"add {difference}" if difference > 0 else f"take {-difference} away"
    return Broken(f"the layout has {count} layers (t), the model {layers}", change)


def _prediction_count(line: Line, layout: Layout) -> Broken | None:
    count = layout.units.count(PREDICTION)
    given = line.launch.prediction_layers
    allowed = {given or 0}
    if given is None and line.launch.launcher is Launcher.MEGATRON_BRIDGE:
        allowed.add(line.sizes.prediction_layers)
    if count in allowed:
        return None
    return Broken(
        f"the layout has {count} layers of multi-token prediction (m), the flags "
        f"{'none' if given is None else given}",
        f"make both {count or given}",
    )


def _prediction_place(line: Line, layout: Layout) -> Broken | None:
    if PREDICTION not in layout.units:
        return None
    units = layout.units
    if DECODER in units[units.index(PREDICTION) :]:
        return Broken("a layer (t) stands behind multi-token prediction (m)", "put m before L")
    held = [number for number, chunk in enumerate(layout.chunks) if PREDICTION in chunk]
    last_turn = (layout.virtual - 1) * layout.pipeline
    if held[0] >= last_turn and len(held) == 1:
        return None
    places = ", ".join(map(layout.place, held))
    return Broken(f"multi-token prediction (m) in {places}", "put all m before L")


def _encoders(line: Line, layout: Layout) -> Broken | None:
    if ENCODER not in layout.units:
        return None
    return Broken("the layout places encoder layers", "leave them out: they are on the first stage")


def _swift_virtual(line: Line) -> Broken | None:
    layout, given = line.layout, line.launch.virtual
    if not isinstance(layout, Layout) or given is None or layout.virtual == given:
        return None
    return Broken(
        f"the layout has {layout.virtual} chunks a stage and the virtual pipeline size is {given}",
        "leave that size out",
    )


LAYOUT_RULES = (
    Rule(
        name="layout-form",
        holds="a layout must be of Megatron's form",
        source=f"{_LAYOUT}:282-321, {CORE}",
        broken=_form,
    ),
    Rule(
        name="layout-divides-stages",
        holds="the chunks of a layout must be a multiple of the stages",
        source=f"{_LAYOUT}:40, {CORE}",
        broken=_stages,
    ),
    Rule(
        name="layout-chunks",
        holds="a layout's chunks a stage must be the virtual pipeline size, if that is given",
        source=f"{_CONFIG}:1344, {CORE}",
        broken=_of_layout(_virtual),
        launchers=frozenset(Launcher) - {Launcher.MS_SWIFT},
    ),
    Rule(
        name="layout-over-virtual-size",
        holds="a layout stands above the virtual pipeline size",
        source=f"megatron_args.py:1096-1117, {SWIFT}",
        broken=_swift_virtual,
        severity="ignored",
        launchers=frozenset((Launcher.MS_SWIFT,)),
    ),
    Rule(
        name="layout-alone",
        holds="a layout says all of the split by itself",
        source=f"{_CONFIG}:1307-1324, {CORE}",
        broken=_alone,
    ),
    Rule(
        name="layout-ends",
        holds="a layout begins with the one embedding and ends with the one loss",
        source=f"{_LAYOUT}:94-105, {CORE}",
        broken=_of_layout(_ends),
    ),
    Rule(
        name="layout-layers",
        holds="a layout must have all layers of the model",
        source=f"{_LAYOUT}:106, {CORE}",
        broken=_of_layout(_layers),
    ),
    Rule(
        name="layout-prediction-layers",
        holds="a layout must have as many layers of multi-token prediction as the flags",
        source=f"{_LAYOUT}:111, {CORE}",
        broken=_of_layout(_prediction_count),
    ),
    Rule(
        name="layout-prediction-place",
        holds="multi-token prediction stands behind all layers, in one last chunk of a stage",
        source=f"{_LAYOUT}:116-135, {CORE}",
        broken=_of_layout(_prediction_place),
    ),
    Rule(
        name="layout-encoders",
        holds="a layout cannot place encoders",
        source=f"{_LAYOUT}:147, {CORE}",
        broken=_of_layout(_encoders),
    ),
)
