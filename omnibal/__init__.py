"""OmniBal's planner: sample lengths and a cost model in, a validated training plan out.

Never imports torch or megatron (tests/planner/test_imports.py). docs/python.md shows its functions.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from omnibal.base.version import VERSION as __version__  # noqa: F401

if TYPE_CHECKING:
    from omnibal.library import (
        Free,
        Goal,
        Planned,
        Samples,
        adapters_of,
        check,
        export_plan,
        lint_line,
        open_plan,
        pack,
        plan,
        read_lengths,
        report_plan,
        save_plan,
        simulate,
        training_job,
    )

__all__ = [
    "Free",
    "Goal",
    "Planned",
    "Samples",
    "adapters_of",
    "check",
    "export_plan",
    "lint_line",
    "open_plan",
    "pack",
    "plan",
    "read_lengths",
    "report_plan",
    "save_plan",
    "simulate",
    "training_job",
]


def __getattr__(name: str) -> object:
    # On first use only: `omnibal.library` imports scipy, which takes about a second.
    if name not in __all__:
        raise AttributeError(f"module 'omnibal' has no attribute {name!r}")
    return import_module("omnibal.library").__dict__[name]
