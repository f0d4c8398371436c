"""Exceptions of user mistakes; `omnibal.base.program` prints them and exits with status 2."""

EXIT_USER_ERROR = 2  # as of typer and argparse


class UserError(ValueError):
    """User mistake. Its message states the wrong input, the requirement and the remedy."""

    # Other exceptions are defects, so they keep their traceback.


def refuse_if(is_wrong: object, message: str) -> None:
    """Raise UserError with the message if `is_wrong` is true."""
    if is_wrong:
        raise UserError(message)


class StorageError(UserError):
    """Data that cannot be reached, or changed. Never skipped, as a bad sample may be."""


class DoesNotFit(UserError):
    """No split found fits device memory: `need` says why, `advice` has the remedies."""

    def __init__(self, need: str, advice: str):
        # Unpickling calls the class with the base arguments, so it gets both.
        super().__init__(need, advice)
        self.need, self.advice = need, advice

    def __str__(self) -> str:
        return f"{self.need}; {self.advice}"
