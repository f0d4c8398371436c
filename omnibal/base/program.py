"""Exit of programs: a user's mistake prints a line on stderr, with exit status 2."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, cast

import typer

from omnibal.base.errors import EXIT_USER_ERROR, UserError
from omnibal.base.printable import printable

# Error of an unknown option, missing argument or bad value; typer has no public name.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)
_MAX_MESSAGE = 2000  # characters, as a message may quote a whole file


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def run_app(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit. Default arguments: the process's."""
    with one_line_errors():
        given = sys.argv[1:] if arguments is None else list(arguments)
        check_arguments(given)
        status = typer.main.get_command(app).main(given, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        if status == 128 + signal.SIGINT:  # typer catches Ctrl-C without a line
            raise KeyboardInterrupt
        sys.exit(status or 0)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise UserError for a NUL, which no path can contain."""
    for argument in arguments:
        if "\0" in argument:
            raise UserError(f"{argument!r}: holds a NUL character, which no path can: remove it")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Exit with one line on stderr for user mistakes, OS errors, lack of memory and Ctrl-C."""
    try:
        yield
    except BrokenPipeError:
        # The reader, such as `head`, is gone. Buffered data would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        sys.exit(128 + signal.SIGINT)
    except _UsageError as error:
        hint = f"; see {error.ctx.command_path} --help" if error.ctx else ""
        # Errors of validators have pydantic's prefix.
        _fail(error.format_message().replace("Value error, ", "").rstrip(".") + hint)
    except UserError as error:
        _fail(str(error))
    except OSError as error:
        reason = error.strerror or f"{type(error).__name__}: {error}"
        _fail(f"{error.filename}: {reason}" if error.strerror and error.filename else reason)
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        _fail(f"the memory of this machine does not suffice{reason}; give it less to do")


def _fail(message: str) -> NoReturn:
    line = printable(" ".join(message.split()))
    if len(line) > _MAX_MESSAGE:
        line = f"{line[: _MAX_MESSAGE // 2]} ... {line[-_MAX_MESSAGE // 2 :]}"
    sys.stderr.write(f"error: {line}\n")
    sys.exit(EXIT_USER_ERROR)
