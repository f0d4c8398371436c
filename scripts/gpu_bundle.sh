#!/usr/bin/env bash
# Make a folder for a GPU machine without a network: scripts/gpu_bundle.sh FOLDER [PYTHON]
# It has the packages of scripts/gpu_proof.sh for this version of Python (3.12) on x86-64, without
# torch and files that the proof does not import, and digits to train on.
set -euo pipefail
if [[ $# -lt 1 || $# -gt 2 ]]; then
    echo "usage: $0 FOLDER [PYTHON]" >&2
    exit 2
fi
if [[ -e $1 ]] || ! mkdir -p "$1"; then
    echo "error: $1 must be a new folder; give another" >&2
    exit 2
fi
bundle=$(cd "$1" && pwd) most_mib=60
trap 'rm -rf "$bundle"' EXIT # unless it is complete
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

packages=(einops jinja2 numpy pillow psutil pyarrow pydantic rich safetensors scipy sentencepiece
    soundfile tokenizers typer)
fetch=(python -m pip download --quiet --dest "$bundle/wheels" --constraint constraints.txt
    --only-binary :all: --python-version "${2:-3.12}" --implementation cp)
for tag in 2014 _2_17 _2_24 _2_27 _2_28; do
    fetch+=(--platform "manylinux${tag}_x86_64")
done
# --no-deps: megatron-core requires torch.
"${fetch[@]}" "${packages[@]}" && "${fetch[@]}" --no-deps megatron-core ||
    refuse "pip found no wheels for Python ${2:-3.12}, for the reason above; fix that, and start again"

# tokenizers needs these only to load from a hub.
rm -f "$bundle"/wheels/{huggingface_hub,hf_xet,httpx2,httpcore2,anyio,h11,idna,truststore}-*
for wheel in "$bundle"/wheels/*.whl; do
    python -m zipfile -e "$wheel" "$bundle/packages"
done
(
    cd "$bundle/packages"
    rm -rf scipy/{stats,signal,io,ndimage,interpolate,integrate,cluster,odr,datasets,differentiate}
    find . -depth \( -name tests -o -path './*/include' \) -exec rm -r {} +
    find . -regextype posix-extended -regex \
        '.*(\.(pxd|pyx|pxi|h|hpp|cc|pyi|a)|avif.*|/pyarrow/.*(flight|_s3|_orc|azure|_hdfs|gcsfs|encryption|python\.so$|\.1\.0$).*)' \
        -delete
)
tar -C "$bundle/packages" -c . | xz --x86 --lzma2=preset=9,dict=64MiB >"$bundle/packages.tar.xz"
rm -r "$bundle/wheels" "$bundle/packages"
python tools/make_digits_dataset.py --output "$bundle/digits" --samples 600 --heldout-samples 10
size=$(du -sm --apparent-size "$bundle" | cut -f1)
[[ $size -le $most_mib ]] || refuse "$bundle has $size MiB, and must have at most $most_mib"
trap - EXIT
echo "$bundle: $size MiB, for scripts/gpu_proof.sh"
