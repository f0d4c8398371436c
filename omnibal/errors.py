"""Exceptions for mistakes of the user; `omnibal.program` prints them and exits with status 2."""

EXIT_USER_ERROR = 2


class UserError(ValueError):
    """A mistake that the user can correct.

    The message says what was given, what must hold, and what to change. Anything else that is
    raised is a defect of this software and keeps its traceback.
    """


class DoesNotFit(UserError):
    """The model cannot be trained in the memory of the devices, however it is split.

    What to change is the last part of the message, behind a semicolon, and in general terms.
    """

    @property
    def need(self) -> str:
        """The message without the advice on what to change."""
        message = str(self)
        return message.rpartition("; ")[0] or message
