"""Progress where stderr is no terminal: plain lines, seldom."""

import pytest

from omnibal.cli.console import progress, progress_lines

pytestmark = pytest.mark.quick


def test_a_log_has_a_line_about_every_half_minute(capsys):
    """Prevents: a search of minutes that says nothing in a job's log, or a line a candidate."""
    seconds = iter([0.0, 10.0, 40.0, 50.0, 100.0])
    advance = progress_lines("trying caps", 40, lambda: next(seconds))
    for newly in (5, 5, 5, 5):
        advance(newly)
    assert capsys.readouterr().err.splitlines() == [
        "trying caps: 10 of 40 in 0.7 min, 0.2/s, at this rate 2.0 min more",
        "trying caps: 20 of 40 in 1.7 min, 0.2/s, at this rate 1.7 min more",
    ]


def test_short_work_says_nothing_in_a_log(capsys):
    """Prevents: control sequences or empty bars among a log's lines."""
    with progress("scanning", 3) as advance:
        advance(3)
    assert capsys.readouterr().err == ""
