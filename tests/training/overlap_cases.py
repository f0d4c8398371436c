"""Steps of two data-parallel ranks of which one may have no pack."""

from tensor_parallel_cases import MODELS

# Dealt to two ranks in turn. In the first step one rank has no pack; in the second, the last pack
# of one has no image; in the third, none has, and the ranks have two packs and one.
STEPS = [
    [[(1, 8)]],
    [[(2, 9), (1, 14)], [(3, 5)], [(1, 8), (0, 6)], [(0, 12), (0, 7)]],
    [[(0, 7)], [(0, 12)], [(0, 5)]],
    [[(0, 21)], [(2, 8)]],
]
MODEL = MODELS["300M-like"]
