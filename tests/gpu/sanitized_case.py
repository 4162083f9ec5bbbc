"""One small forward and backward with every option, for compute-sanitizer (started by test_memory.py)."""

import torch

from treepack.kernels.ops import tree_attention


def main() -> None:
    position_ids = torch.cat([torch.arange(70), torch.arange(70, 110), torch.arange(70, 71), torch.arange(9)]).cuda()
    shapes = [(len(position_ids), heads, columns) for heads, columns in ((3, 80), (1, 80), (1, 64))]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    sinks = torch.zeros(3, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out, lse = tree_attention(
        q, k, v, position_ids=position_ids, sinks=sinks, sliding_window=50, softcap=20.0, return_lse=True
    )
    (out.float().sum() + lse.sum()).backward()
    torch.cuda.synchronize()
    assert all(t.grad is not None and bool(t.grad.isfinite().all()) for t in (q, k, v, sinks))


if __name__ == "__main__":
    main()
