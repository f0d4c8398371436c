"""Program exit: a user's mistake prints one line on stderr and exits with status 2."""

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
_LONGEST = 2000  # characters of a message, which may quote a whole file


class ArgumentParser(argparse.ArgumentParser):
    """Argument parser that raises UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def run_app(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit; `arguments` default to the process's."""
    with one_line_errors():
        given = sys.argv[1:] if arguments is None else list(arguments)
        check_arguments(given)
        status = typer.main.get_command(app).main(given, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        if status == 128 + signal.SIGINT:  # Typer catches Ctrl-C
            raise KeyboardInterrupt
        sys.exit(status or 0)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise on arguments that no path can contain."""
    for argument in arguments:
        if "\0" in argument:
            raise UserError(f"{argument!r}: holds a NUL character, which no path can: remove it")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Exit cleanly on user mistakes, full disks and lack of memory."""
    try:
        yield
    except BrokenPipeError:
        # The reader closed the output. Buffered data would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        sys.exit(128 + signal.SIGINT)
    except _UsageError as error:
        hint = f"; see {error.ctx.command_path} --help" if error.ctx else ""
        # Typer's enumerations complain in pydantic's words.
        _fail(error.format_message().replace("Value error, ", "").rstrip(".") + hint)
    except UserError as error:
        _fail(str(error))
    except OSError as error:
        _fail(_system_error(error))
    except MemoryError as error:
        why = f" ({error})" if str(error) else ""
        _fail(f"the memory of this machine does not suffice{why}; give it less to do")


def _system_error(error: OSError) -> str:
    if error.strerror is None:
        return f"{type(error).__name__}: {error}"
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _fail(message: str) -> NoReturn:
    line = printable(" ".join(message.split()))
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    sys.stderr.write(f"error: {line}\n")
    sys.exit(EXIT_USER_ERROR)
