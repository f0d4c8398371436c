"""OmniBal's planner: sample lengths and a cost model in, a checked training plan out.

Nothing under `omnibal` may import torch or megatron (tests/planner/test_imports.py proves it), so a
plan is made and read on any laptop in seconds.
"""

__version__ = "0.1.0"
