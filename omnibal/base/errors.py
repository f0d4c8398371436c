"""Exceptions for mistakes of the user; `omnibal.base.program` prints them, exit status 2."""

EXIT_USER_ERROR = 2  # as of typer and argparse


class UserError(ValueError):
    """A mistake that the user can correct.

    The message says what was given, what must hold, and what to change. Anything else that is
    raised is a defect of this software and keeps its traceback.
    """


class StorageError(UserError):
    """Data that cannot be reached or has changed: no mistake of one sample, which could be skipped.

    What was finished before stays good.
    """


class DoesNotFit(UserError):
    """The model cannot be trained in the memory of the devices, however it is split."""

    def __init__(self, need: str, advice: str):
        """Put the message together."""
        # Both are arguments of the base, so that the error can come from another process.
        super().__init__(need, advice)
        self.need, self.advice = need, advice

    def __str__(self) -> str:
        return f"{self.need}; {self.advice}"
