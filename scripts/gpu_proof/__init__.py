"""What one GPU says of this project: `scripts/gpu_proof.sh OUT`."""
