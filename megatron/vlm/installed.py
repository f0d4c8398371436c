"""Transformer Engine as this machine has it, found out before Megatron-core is imported."""

import importlib
import importlib.util
import sys


def import_failure(package: str, module: str) -> str | None:
    """Why importing a module of an optional package fails; None where it does not, or is not there.

    A package that fails is as none from then on. Megatron-core does without one that is missing,
    but what one raises that is broken, as by a shared library that is not found, ends its own
    import, whichever provider is asked for.
    """
    if importlib.util.find_spec(package) is None:
        return None
    try:
        importlib.import_module(module)
    except Exception as error:  # packages of compiled code raise whatever they like
        sys.modules[package] = None  # type: ignore[assignment]
        first_line = next(iter(str(error).splitlines()), "")
        return f"{type(error).__name__}: {first_line}"
    return None


TRANSFORMER_ENGINE_FAILURE = import_failure("transformer_engine", "transformer_engine.pytorch")
"""Why Transformer Engine cannot be imported, though it is installed; None otherwise."""
