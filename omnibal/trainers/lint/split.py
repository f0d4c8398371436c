"""Layers of the language model per stage and chunk, by a line's flags."""

from itertools import accumulate

from omnibal.trainers.export.layout import PPLayout
from omnibal.trainers.lint.launch_settings import MEGATRON, Launcher
from omnibal.trainers.lint.line import LaunchLine


def layers_by_chunk(line: LaunchLine) -> tuple[tuple[int, ...], ...]:
    """Return numbers of language model layers, [stages][chunks]."""
    # As in megatron-core's `get_num_layers_to_build` and LoongForge's
    # `convert_custom_pipeline_to_layout`.
    launch, stages, chunks = line.launch, line.launch.pipeline, line.virtual or 1
    if isinstance(line.layout, PPLayout):
        return line.layout.layers_by_chunk
    if launch.layers_by_stage is not None:
        if launch.is_by_chunk:
            return tuple(tuple(launch.layers_by_stage[stage::stages]) for stage in range(stages))
        # A stage's last chunks take the remainder.
        return tuple(
            tuple(count // chunks + (chunk >= chunks - count % chunks) for chunk in range(chunks))
            for count in launch.layers_by_stage
        )
    is_nanotron = launch.launcher is Launcher.NANOTRON
    layers = _split_by_weights(line) if is_nanotron else _split_by_flags(line)
    split = [[count // chunks] * chunks for count in layers]
    split[0][0] -= launch.account_for_embedding
    split[-1][-1] -= launch.account_for_loss
    return tuple(map(tuple, split))


def _split_by_weights(line: LaunchLine) -> list[int]:
    """Return nanotron's layers per stage, from equal shares of weights."""
    # `build_model` of its `trainer.py`: a stage ends with the layer that exceeds its share. The
    # head counts, embeddings do not.
    model, layers, stages = line.language, line.sizes.layers, line.launch.pipeline
    # Weights as if every layer had attention of all heads and a dense gated feed-forward.
    rows = 4 * model.heads * model.head_width + 3 * model.ffn_hidden_size
    work = [model.hidden_size * rows] * layers + [model.hidden_size * model.vocab_size]
    # Cumulative weights at the ends of all stages but the last, and layers held. [stages]
    ends, held, stage = [sum(work) * (n + 1) / stages for n in range(stages - 1)], [0] * stages, 0
    for layer, done in enumerate(accumulate(work)):
        held[stage] += layer < layers
        stage += stage < stages - 1 and done > ends[stage]
    # The last stages may hold only the head or the loss; middle stages take a layer of the fullest.
    for stage in range(stages - 2, 0, -1):
        if not held[stage]:
            fullest = max(range(stages), key=lambda other: held[other])
            held[fullest], held[stage] = held[fullest] - 1, 1
    return held


def _split_by_flags(line: LaunchLine) -> list[int]:
    """Return layers per stage, with embedding and loss counted as layers if set."""
    launch, stages = line.launch, line.launch.pipeline
    ends = {0: launch.first_layers, stages - 1: launch.last_layers}
    given = {stage: count for stage, count in ends.items() if count is not None}
    between = stages - len(given)
    share, more = divmod(line.layers_to_split - sum(given.values()), between) if between else (0, 0)
    if launch.launcher in MEGATRON:  # refuses a remainder
        more = 0
    return [given.get(stage, share + (stage < more)) for stage in range(stages)]


def even_ends(layers: int, stages: int, chunks: int) -> tuple[int, int, int] | None:
    """Return layers of the first, each middle and the last stage, most even, or None if impossible.

    All are multiples of `chunks`, and middle stages are equal.
    """
    if stages < 2:
        return None
    for middle in range(-(-layers // stages), 0, -1):
        ends = layers - middle * (stages - 2)
        if not middle % chunks and not ends % chunks and ends >= 2 * chunks:
            first = ends // chunks // 2 * chunks
            return first, middle, ends - first
    return None
