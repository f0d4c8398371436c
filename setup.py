"""Packaging: the planner by default, the trainer with the extra `train`."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

VERSION = re.search(r'VERSION = "(.+)"', Path("omnibal/base/version.py").read_text()).group(1)

PLANNER = [
    *("huggingface-hub", "jinja2", "matplotlib", "numpy", "pillow", "pyarrow", "pydantic>=2"),
    *("rich", "scipy", "sentencepiece", "soundfile", "tokenizers", "typer"),
]
# megatron-core is pinned: the trainer extends its block and replaces some of its functions. Its
# checkpoints need psutil, which it does not declare. Released checkpoints are in safetensors files.
# Before torch 2.11 varlen_attn has no window_size, which makes attention within packs causal.
TRAINER = ["einops", "megatron-core==0.16.1", "psutil", "safetensors", "torch>=2.11"]
VIDEO = ["av"]
# Tar shards as input. Energon brings webdataset; both are pinned since their parts are called.
WEBDATASET, ENERGON = ["webdataset==1.0.2"], ["megatron-energon==7.4.1", "webdataset==1.0.2"]
RAY = ["ray"]  # scans on a cluster
S3 = ["fsspec", "s3fs"]  # data by URLs; other storages need fsspec and their own library
# transformers: tests compare models and tokenizers with it. espeakng-loader: speech of
# tools/make_spoken_digits.py. mutmut: `make mutants`. moto with flask: an S3 server for tests.
DEVELOPMENT = [
    *("espeakng-loader", "hypothesis", "mutmut", "mypy", "pre-commit", "pytest", "pytest-xdist"),
    *("ruff", "scikit-learn", "tensorboard", "transformers", *VIDEO, *WEBDATASET),
    *(*RAY, *S3, "moto[s3]", "flask", "flask-cors"),
]

setup(
    name="omnibal",
    version=VERSION,
    description="Balanced training of vision-language models on many GPUs",
    long_description=Path("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",  # of megatron-core 0.16.1
    # No `megatron/__init__.py`, ever: it would hide the installed megatron.core.
    packages=find_namespace_packages(include=["omnibal*", "megatron.vlm*"]),
    package_data={
        "omnibal": [
            "families/*.toml",
            "presets/*.toml",
            "presets/*/*.toml",
            "data/templates/*.jinja",
            "report/*.css",
            "report/*.jinja",
            "report/*.mplstyle",
            "trainers/export/*.jinja",
        ],
        "megatron.vlm": ["conversion/*.jinja", "conversion/*.toml", "measure/fake_device/*.cpp"],
    },
    install_requires=PLANNER,
    extras_require={
        "train": TRAINER,
        "cuda": [*TRAINER, "transformer-engine[pytorch]", "flash-linear-attention>=0.6"],
        "webdataset": WEBDATASET,
        "energon": ENERGON,
        "video": VIDEO,
        "ray": RAY,
        "s3": S3,
        "dev": DEVELOPMENT,
    },
    entry_points={"console_scripts": ["omnibal = omnibal.__main__:main"]},
)
