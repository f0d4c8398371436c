"""Tests and measurements of this project on one GPU: `scripts/gpu_proof.sh OUT`."""
