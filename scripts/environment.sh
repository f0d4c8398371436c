# Sourced by the other scripts: makes .venv with the project in it, once, and activates it.
# Installs again when setup.py or constraints.txt is newer than the last installation.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

installed=.venv/installed
if [[ ! -e $installed || setup.py -nt $installed || constraints.txt -nt $installed ]]; then
    python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
        echo "error: found $("$python" --version), but 3.11, 3.12 or 3.13 is needed;" \
            "set PYTHON=/path/to/python3.11" >&2
        exit 2
    fi
    echo "installing into .venv (about a minute, once)"
    "$python" -m venv .venv
    # torch first: with it in place no other requirement brings another build.
    .venv/bin/python -m pip install --quiet --constraint constraints.txt torch
    .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
    touch $installed
fi
PATH="$PWD/.venv/bin:$PATH"
