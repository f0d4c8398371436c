"""Operations that are one kernel on a CUDA device, each beside what it does in plain torch."""
