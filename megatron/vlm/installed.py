"""Whether Transformer Engine can be imported, found out before Megatron-core is imported."""

import importlib
import importlib.util
import sys


def import_failure(package: str, module: str) -> str | None:
    """Return the error of importing a module of an installed package, else None.

    A package that fails counts as not installed from then on: Megatron-core only handles a missing
    package, and a broken one, such as with a missing shared library, would end core's own import.
    """
    if importlib.util.find_spec(package) is None:
        return None
    try:
        importlib.import_module(module)
    except Exception as error:  # compiled packages raise any type
        sys.modules[package] = None  # type: ignore[assignment]  # makes `import` raise ImportError
        first_line = next(iter(str(error).splitlines()), "")
        return f"{type(error).__name__}: {first_line}"
    return None


TRANSFORMER_ENGINE_FAILURE = import_failure("transformer_engine", "transformer_engine.pytorch")
"""Error of importing Transformer Engine if it is installed and broken, else None."""
