"""Steps of two data-parallel ranks, some without a pack on one rank."""

from tensor_parallel_cases import MODELS

# Dealt to two ranks in turn. Step 1: one rank has no pack. Step 2: one rank's last pack has no
# image. Step 3: no images, two packs and one pack.
STEPS = [
    [[(1, 8)]],
    [[(2, 9), (1, 14)], [(3, 5)], [(1, 8), (0, 6)], [(0, 12), (0, 7)]],
    [[(0, 7)], [(0, 12)], [(0, 5)]],
    [[(0, 21)], [(2, 8)]],
]
MODEL = MODELS["300M-like"]
