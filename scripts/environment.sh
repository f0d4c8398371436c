# Sourced by other scripts: makes .venv with the project, and activates it. Installs again if
# setup.py or constraints.txt is newer than the last installation.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# End the sourcing script with one line; a shell that sources this by hand stays open.
refuse() {
    echo "error: $*" >&2
    return 2
}

# Make .venv with this Python.
install() {
    # torch first, so that no other requirement installs another build.
    "$1" -m venv .venv &&
        .venv/bin/python -m pip install --quiet --constraint constraints.txt torch &&
        .venv/bin/python -m pip install --quiet --constraint constraints.txt \
            --editable '.[train,dev]' &&
        touch "$installed"
}

installed=.venv/installed
if [[ ! -e $installed || setup.py -nt $installed || constraints.txt -nt $installed ]]; then
    python=${PYTHON:-python3}
    if ! command -v "$python" >/dev/null; then
        refuse "no $python; install Python 3.11, 3.12 or 3.13, or set PYTHON=/path/to/python3.11"
        return 2
    fi
    if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
        refuse "found $("$python" --version), but 3.11, 3.12 or 3.13 is needed;" \
            "set PYTHON=/path/to/python3.11"
        return 2
    fi
    echo "installing into .venv (about a minute, once)"
    if ! install "$python"; then
        refuse "the installation into .venv failed, for the reason above; fix that (pip needs a" \
            "package index, and the module venv), and start again"
        return 2
    fi
fi
PATH="$PWD/.venv/bin:$PATH"
