"""Contexts in which linears multiply in FP8, and what was multiplied in them."""

from contextlib import contextmanager


class FP8GlobalStateManager:
    """The recipe of the context that is entered, if any."""

    recipe = None
    products: list = []  # noqa: RUF012 (the real one's state is the class's, too)
    """Recipe and input shape of every product in FP8."""

    @classmethod
    def is_fp8_enabled(cls):
        return cls.recipe is not None


@contextmanager
def fp8_autocast(enabled=True, fp8_recipe=None, fp8_group=None):
    before = FP8GlobalStateManager.recipe
    FP8GlobalStateManager.recipe = fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before
