"""Checks on a pretended device: python tests/training/pretended_cases.py NAME.

Each runs in a process of its own, that has prepared Megatron-core for no other device.
Shapes: T tokens, N heads, D head size.
"""

import sys
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from megatron.vlm.measure.pretended.kernels import RefusedByDeviceError
from megatron.vlm.measure.pretended.mode import Pretence, pretended_cuda

MIB = 1 << 20


def on_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def memory() -> None:
    """Bytes of tensors that were counted by hand."""
    with pretended_cuda() as pretence:
        now = torch.cuda.memory_allocated
        assert now() == 0
        one = on_device(100, dtype=torch.float32)  # 400 bytes, in one block of 512
        assert now() == 512
        view = one[10:]
        assert now() == 512, "a view has no memory of its own"
        empty = on_device(0)
        assert now() == 512
        other = on_device(1025, dtype=torch.uint8)
        assert now() == 512 + 1536
        del one
        assert now() == 512 + 1536, "the view still holds it"
        del view, other, empty
        assert now() == 0 and torch.cuda.max_memory_allocated() == 2048
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        _kept_for_backward(pretence)
    assert not torch.cuda.is_available(), "the calls are taken back"


def _kept_for_backward(pretence: Pretence) -> None:
    """What a product, a norm and an attention keep, and need besides."""
    now, watch = torch.cuda.memory_allocated, pretence.device.memory
    x_TD = on_device(1024, 512).requires_grad_()  # 1 MiB
    weight = on_device(512, 512).requires_grad_()  # half
    y_TD = F.linear(x_TD, weight)
    assert now() == 2.5 * MIB
    normed_TD = F.rms_norm(y_TD, (512,), on_device(512), 1e-6)
    assert now() == 3.5 * MIB + 1024 + 4 * 1024, "its output, weight and a number a row"
    watch.watch()
    normed_TD.backward(torch.empty_like(normed_TD))
    # Input, weight and both results, and gradients of input and weight.
    assert now() == 5 * MIB, now()
    assert sum(size for _, size in watch.contents().values()) == watch.highest_bytes


def attention() -> None:
    """Flash attention keeps its inputs, output and a number a row; its backward needs a float32
    query gradient."""
    with pretended_cuda() as pretence:
        qkv = [on_device(1024, 8, 64).requires_grad_() for _ in range(3)]  # 1 MiB each
        borders = torch.tensor([0, 512, 1024], dtype=torch.int32).to("cuda")
        before = torch.cuda.memory_allocated()
        out = varlen_attn(*qkv, borders, borders, 512, 512, window_size=(-1, 0))
        kept = torch.cuda.memory_allocated() - before
        assert kept == MIB + 4 * 8 * 1024 + 512, kept
        pretence.device.memory.watch()
        gradient = torch.empty_like(out)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out.backward(gradient)
        rows = 8 * (1024 + 2 * 128)
        most = torch.cuda.max_memory_allocated() - before
        # What it is not asked for has a gradient too: zeros.
        assert most == 3 * MIB + rows * (64 + 1) * 4 + 4 * 8 * 1024 + 512, most
        heads = torch.ops.aten.scaled_dot_product_attention
        vision = [on_device(2, 4, 64, 128).requires_grad_() for _ in range(3)]
        before = torch.cuda.memory_allocated()
        out = heads(*vision)
        assert torch.cuda.memory_allocated() - before <= 2 * 4 * 64 * (128 * 2 + 4) + 4 * 512
        assert any(
            one.operation == "aten::_scaled_dot_product_flash_attention"
            for one in pretence.device.counts.operations()
        )


def refusals() -> None:
    """What a real device refuses, and fake tensors do not."""
    with pretended_cuda():
        host = torch.empty(8, 8, dtype=torch.bfloat16)
        mixed = (on_device(8, 8), on_device(8, 8, dtype=torch.float32))
        borders = torch.tensor([0, 8], dtype=torch.int64).to("cuda")
        summed = on_device(8, 8, dtype=torch.float32)
        torch.addmm(
            summed, on_device(8, 8), on_device(8, 8), out_dtype=torch.float32, out=summed
        )  # a sum in the type that is asked for
        cases = {
            "a matrix product": lambda: torch.addmm(summed, on_device(8, 8), on_device(8, 8)),
            "one type": lambda: torch.mm(*mixed),
            "on the device": lambda: torch.mm(on_device(8, 8), host),
            "devices": lambda: on_device(8, 8) + host,
            "contiguous": lambda: F.scaled_dot_product_attention(
                *(on_device(1, 1, 64, 8).transpose(2, 3) for _ in range(3))
            ),
            "int32": lambda: varlen_attn(
                *(on_device(8, 2, 64) for _ in range(3)), borders, borders, 8, 8
            ),
        }
        for words, wrong in cases.items():
            try:
                wrong()
            except (RefusedByDeviceError, RuntimeError) as error:
                assert words in str(error), (words, error)
            else:
                raise AssertionError(f"nothing refused: {words}")


def host_reads() -> None:
    """Values that the host waits for, by where they are read; what is on the host is free."""
    with pretended_cuda() as pretence:
        tensor = on_device(4)
        torch.tensor([1, 2, 3]).tolist()
        assert not pretence.device.counts.host_reads()
        tensor.sum().item()
        tensor.cpu()
        torch.tensor([tensor[0], tensor[1]])
        reads = pretence.device.counts.host_reads()
        assert sum(read.count for read in reads) == 4, reads
        assert all("pretended_cases.py" in read.where for read in reads), reads


def counts() -> None:
    """Launches, arithmetic and bytes of operations that were counted by hand."""
    with pretended_cuda() as pretence:
        left, right = on_device(64, 32), on_device(32, 16)
        left.view(-1)
        assert not pretence.device.counts.operations()
        product = left @ right
        product.zero_()
        product + product
        torch.mm(on_device(8, 30), on_device(30, 8))
        counted = {one.operation: one for one in pretence.device.counts.operations()}
        assert set(counted) == {"aten::mm", "aten::zero_", "aten::add"}
        assert counted["aten::mm"].kernels == 2
        flop = 2 * 64 * 32 * 16 + 2 * 8 * 30 * 8
        assert round(counted["aten::mm"].tflop * 1e12) == flop
        moved = 2 * (64 * 32 + 32 * 16 + 64 * 16) + 2 * (2 * 8 * 30 + 64)
        assert round(counted["aten::mm"].gigabytes * 1e9) == moved
        assert round(counted["aten::zero_"].gigabytes * 1e9) == 2 * 64 * 16
        assert round(counted["aten::add"].gigabytes * 1e9) == 3 * 2 * 64 * 16
        [odd] = pretence.device.counts.unaligned()
        assert odd.sizes == (8, 30, 8) and 30 in odd.leading_dimensions


CASES = (memory, attention, refusals, host_reads, counts)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    chosen = sys.argv[1:]
    for case in CASES:
        if not chosen or case.__name__ in chosen:
            case()
            print(f"passed {case.__name__}")
