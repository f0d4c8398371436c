# Sourced by other scripts: makes .venv-trainers with other trainers, on top of .venv for torch, numpy,
# transformers and megatron-core, as pip would install other builds. Installs again if trainers.txt
# or .venv is newer.

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" || return

install_trainers() {
    rm -rf .venv-trainers &&
        .venv/bin/python -m venv .venv-trainers &&
        .venv-trainers/bin/python -m pip install --quiet --no-deps --requirement trainers.txt &&
        .venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
            > "$(.venv-trainers/bin/python -c \
                'import sysconfig; print(sysconfig.get_paths()["purelib"])')/zz_project.pth" &&
        touch "$trainers_installed"
}

trainers_installed=.venv-trainers/installed
if [[ ! -e $trainers_installed || trainers.txt -nt $trainers_installed ||
    .venv/installed -nt $trainers_installed ]]; then
    echo "installing other trainers into .venv-trainers (about a minute, once)"
    if ! install_trainers; then
        refuse "the installation into .venv-trainers failed, for the reason above; fix that, and" \
            "start again"
        return 2
    fi
fi
