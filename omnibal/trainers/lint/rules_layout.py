"""Rules of pipeline layouts, as megatron-core's parser and check have them."""

from omnibal.trainers.export.layout import DECODER, EMBEDDING, ENCODER, LOSS, PREDICTION, Layout
from omnibal.trainers.lint.launch import MEGATRON, Launcher
from omnibal.trainers.lint.line import Line
from omnibal.trainers.lint.rule import CORE, SWIFT, Problems, RuleGroup

RULES = RuleGroup()
rule, core_config = RULES.rule, RULES.core_config
_LAYOUT = "core/transformer/pipeline_parallel_layer_layout.py"


def _whole(line: Line) -> Layout | None:
    """Return the layout if valid with equal numbers of chunks per stage."""
    layout = line.layout
    is_whole = isinstance(layout, Layout) and layout.pipeline == line.launch.pipeline
    return layout if isinstance(layout, Layout) and is_whole else None


@rule(f"{_LAYOUT}:282-321, {CORE}")
def layout_form(line: Line) -> Problems:
    """A layout must be of Megatron's form."""
    if isinstance(line.layout, str):
        given, _, change = line.layout.rpartition("; ")
        yield given, change


@rule(f"{_LAYOUT}:40, {CORE}")
def layout_divides_stages(line: Line) -> Problems:
    """The chunks of a layout must be a multiple of the stages."""
    layout, stages = line.layout, line.launch.pipeline
    if not isinstance(layout, Layout) or len(layout.chunks) % stages == 0:
        return
    chunks = len(layout.chunks)
    made_for = [
        f"PP {chunks // size}" + (f" with {size} chunks a stage" if size > 1 else "")
        for size in range(1, 9)
        if chunks % size == 0 and chunks // size > 1
    ]
    yield (
        f"the layout has {chunks} chunks for PP {stages}",
        f"it is one for {' or '.join(made_for) or 'one stage'}: set PP to that, or give another",
    )


@core_config("1344", launchers=MEGATRON - {Launcher.MS_SWIFT})
def layout_chunks(line: Line) -> Problems:
    """A layout's chunks a stage must be the virtual pipeline size, if that is given."""
    layout, given = _whole(line), line.launch.virtual
    if layout is not None and given is not None and given != layout.virtual:
        chunks = f"the layout has {layout.virtual} chunks for each of {layout.pipeline} stages"
        change = f"leave that size out, or give a layout of {given * layout.pipeline} chunks"
        yield f"{chunks}, and the virtual pipeline size is {given}", change


@rule(f"megatron_args.py:1096-1117, {SWIFT}", severity="ignored", launchers={Launcher.MS_SWIFT})
def layout_over_virtual_size(line: Line) -> Problems:
    """A layout stands above the virtual pipeline size."""
    layout, given = line.layout, line.launch.virtual
    if isinstance(layout, Layout) and given is not None and given != layout.virtual:
        chunks = f"the layout has {layout.virtual} chunks a stage"
        yield f"{chunks} and the virtual pipeline size is {given}", "leave that size out"


@core_config("1307-1324")
def layout_alone(line: Line) -> Problems:
    """A layout says all of the split by itself."""
    launch = line.launch
    beside = {
        "layers of the first stage": launch.first_layers is not None,
        "layers of the last stage": launch.last_layers is not None,
        "counting the embedding as a layer": launch.account_for_embedding,
        "counting the loss as a layer": launch.account_for_loss,
    }
    given = [name for name, is_given in beside.items() if is_given]
    if launch.layout is not None and given:
        yield f"a layout beside {', '.join(given)}", "leave one of them out"


@rule(f"{_LAYOUT}:94-105, {CORE}")
def layout_ends(line: Line) -> Problems:
    """A layout begins with the one embedding and ends with the one loss."""
    layout = _whole(line)
    if layout is None:
        return
    units = layout.units
    embeddings, losses = units.count(EMBEDDING), units.count(LOSS)
    if (units[:1], units[-1:], embeddings, losses) != ((EMBEDDING,), (LOSS,), 1, 1):
        shown = f"the layout {layout.short_text if ENCODER not in units else ''}".rstrip()
        given = f"{shown} has {embeddings} embeddings and {losses} losses"
        yield given, "begin it with E and end it with L"


@rule(f"{_LAYOUT}:106, {CORE}")
def layout_layers(line: Line) -> Problems:
    """A layout must have all layers of the model."""
    layout, layers = _whole(line), line.sizes.layers
    if layout is not None and (count := layout.units.count(DECODER)) != layers:
        yield (
            f"the layout has {count} layers (t), the model {layers}",
            f"add {layers - count}" if layers > count else f"take {count - layers} away",
        )


@rule(f"{_LAYOUT}:111, {CORE}")
def layout_prediction_layers(line: Line) -> Problems:
    """A layout must have as many layers of multi-token prediction as the flags."""
    layout, given = _whole(line), line.launch.prediction_layers
    if layout is None:
        return
    count, allowed = layout.units.count(PREDICTION), {given or 0}
    if given is None and line.launch.launcher is Launcher.MEGATRON_BRIDGE:
        allowed.add(line.sizes.prediction_layers)
    if count not in allowed:
        layers = f"the layout has {count} layers of multi-token prediction (m)"
        flags = f"the flags {'none' if given is None else given}"
        yield f"{layers}, {flags}", f"make both {count or given}"


@rule(f"{_LAYOUT}:116-135, {CORE}")
def layout_prediction_place(line: Line) -> Problems:
    """Multi-token prediction stands behind all layers, in one last chunk of a stage."""
    layout = _whole(line)
    if layout is None or PREDICTION not in layout.units:
        return
    if DECODER in layout.units[layout.units.index(PREDICTION) :]:
        yield "a layer (t) stands behind multi-token prediction (m)", "put m before L"
    held = [number for number, chunk in enumerate(layout.chunks) if PREDICTION in chunk]
    if len(held) > 1 or held[0] < (layout.virtual - 1) * layout.pipeline:
        places = ", ".join(map(layout.place, held))
        yield f"multi-token prediction (m) in {places}", "put all m before L"


@rule(f"{_LAYOUT}:147, {CORE}")
def layout_encoders(line: Line) -> Problems:
    """A layout cannot place encoders."""
    layout = _whole(line)
    if layout is not None and ENCODER in layout.units:
        yield "the layout places encoder layers", "leave them out: they are on the first stage"
