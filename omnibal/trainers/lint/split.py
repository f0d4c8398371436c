"""How a line divides the language model's layers over stages and their chunks."""

from itertools import accumulate

from omnibal.trainers.export.layout import DECODER, Layout
from omnibal.trainers.lint.launch import MEGATRON, Launcher
from omnibal.trainers.lint.line import Line


def layers_by_chunk(line: Line) -> tuple[tuple[int, ...], ...]:
    """Language model layers, [stages][chunks].

    As in megatron-core's `get_num_layers_to_build` and LoongForge's
    `convert_custom_pipeline_to_layout`.
    """
    launch, stages, chunks = line.launch, line.launch.pipeline, line.virtual or 1
    if isinstance(line.layout, Layout):
        return tuple(
            tuple(chunk.count(DECODER) for chunk in line.layout.of_stage(stage))
            for stage in range(stages)
        )
    if launch.layers_by_stage is not None:
        if launch.is_by_chunk:
            return tuple(tuple(launch.layers_by_stage[stage::stages]) for stage in range(stages))
        # A stage's later chunks take what does not divide.
        return tuple(
            tuple(count // chunks + (chunk >= chunks - count % chunks) for chunk in range(chunks))
            for count in launch.layers_by_stage
        )
    layers = _by_work(line) if launch.launcher is Launcher.NANOTRON else _stages(line)
    split = [[count // chunks] * chunks for count in layers]
    split[0][0] -= launch.account_for_embedding
    split[-1][-1] -= launch.account_for_loss
    return tuple(map(tuple, split))


def _by_work(line: Line) -> list[int]:
    """Return nanotron's layers per stage: a stage ends where its share of the weights is exceeded.

    As in `build_model` of its `trainer.py`; the head counts, embeddings do not.
    """
    sizes, stages = line.sizes, line.launch.pipeline
    work = [sizes.layer_weights] * sizes.layers + [sizes.head_weights]
    ends, layers, stage = [sum(work) * (n + 1) / stages for n in range(stages - 1)], [0] * stages, 0
    for layer, done in enumerate(accumulate(work)):
        layers[stage] += layer < sizes.layers
        stage += stage < stages - 1 and done > ends[stage]
    for stage in range(
        stages - 2, 0, -1
    ):  # nanotron's last stages may hold the head or the loss alone
        if not layers[stage]:
            fullest = max(range(stages), key=lambda other: layers[other])
            layers[fullest], layers[stage] = layers[fullest] - 1, 1
    return layers


def _stages(line: Line) -> list[int]:
    """Return layers per stage, counting embedding and loss as layers if set."""
    launch, stages = line.launch, line.launch.pipeline
    ends = {0: launch.first_layers, stages - 1: launch.last_layers}
    given = {stage: count for stage, count in ends.items() if count is not None}
    between = stages - len(given)
    rest = line.layers_to_split - sum(given.values())
    each, more = divmod(rest, between) if between else (0, 0)
    if launch.launcher in MEGATRON:  # which refuses what does not divide
        more = 0
    return [given.get(stage, each + (stage < more)) for stage in range(stages)]


def even_ends(layers: int, stages: int, chunks: int) -> tuple[int, int, int] | None:
    """Return first, middle and last stages' layers, most even with whole chunks, or None."""
    if stages < 2:
        return None
    for middle in range(-(-layers // stages), 0, -1):
        rest = layers - middle * (stages - 2)
        if middle % chunks or rest % chunks or rest < 2 * chunks:
            continue
        first = rest // chunks // 2 * chunks
        return first, middle, rest - first
    return None
