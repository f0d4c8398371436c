"""Multi-process tests fork their ranks from this process, which has imported torch and Megatron.

A launched process would spend ten seconds on imports; a forked one starts in a fifth of a second.
"""

import torch

from megatron.vlm.backend import prepare_megatron_core

# Before any parallel region: a forked child cannot use its parent's threads.
torch.set_num_threads(1)
prepare_megatron_core()
