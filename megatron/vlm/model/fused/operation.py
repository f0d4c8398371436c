"""Custom operations, each made of one function that checks its arguments and makes its outputs."""

from collections.abc import Callable
from typing import Any

import torch


def operation(
    name: str, write: Callable[..., Any]
) -> Callable[[Callable[..., Any]], torch.library.CustomOpDef]:
    """Make a custom operation of the decorated function, which gives its schema and is its fake.

    Args:
        name: within `omnibal::`.
        write: computes on a device: takes the outputs that the decorated function made and all
            arguments, and returns the outputs with their values.
    """

    def made_of(fake: Callable[..., Any]) -> torch.library.CustomOpDef:
        def run(*arguments: Any) -> Any:
            return write(fake(*arguments), *arguments)

        schema = torch.library.infer_schema(fake, mutates_args=())
        made = torch.library.custom_op(f"omnibal::{name}", run, mutates_args=(), schema=schema)
        made.register_fake(fake)
        return made

    return made_of
