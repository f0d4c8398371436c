"""Exceptions of user mistakes; `omnibal.base.program` prints them and exits with status 2."""

EXIT_USER_ERROR = 2  # as of typer and argparse


class UserError(ValueError):
    """User mistake: its message has the input, the requirement and the remedy."""

    # Other exceptions are defects, and keep their traceback.


class StorageError(UserError):
    """Unreachable or changed data: not a bad sample, which could be skipped."""


class DoesNotFit(UserError):
    """The model does not fit in device memory under any split."""

    def __init__(self, need: str, advice: str):
        # Exceptions are pickled by their base arguments.
        super().__init__(need, advice)
        self.need, self.advice = need, advice

    def __str__(self) -> str:
        return f"{self.need}; {self.advice}"
