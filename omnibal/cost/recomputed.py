"""Modules of a layer that backward recomputes (`--recompute-modules` of Megatron-core)."""

from collections.abc import Collection
from dataclasses import replace

from omnibal.cost.work import SECOND_OUTPUT, Unit, Working


def recomputed(layer: Unit, modules: Collection[str]) -> Unit:
    """Return a layer that repeats the forward of modules instead of keeping what they make.

    A block's activations are made again before its backward, and freed as those that are kept.
    """
    wanted = {*modules}
    lost = {line.what: line.bytes for line in layer.kept if wanted & {*line.modules}}
    again = [one for one in layer.forward if wanted & {*one.modules}]
    names = [line.what for line in layer.kept]
    of_second = set(names[names.index(SECOND_OUTPUT) :])

    def with_lost(moment: Working) -> Working:
        in_second = SECOND_OUTPUT not in moment.gone
        here = [what for what in lost if (what in of_second) == in_second]
        made = [lost[what] for what in here if what not in moment.gone]
        return replace(moment, bytes=sum(made, moment.bytes))

    return replace(
        layer,
        kernels=(*layer.kernels, *(replace(one, of="repeated") for one in again)),
        kept=tuple(line for line in layer.kept if line.what not in lost),
        working=tuple(map(with_lost, layer.working)),
    )
