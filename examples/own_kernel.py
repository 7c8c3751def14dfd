"""A kernel of your own: register it, prove it, see it chosen, and see why.

pip install -e .
"""

import torch

import layerzero as lz


@lz.register_kernel("norm.rms", "mine.rms_norm", platform="cpu", supported_dtypes=["float32"], priority=80)
def rms_norm(input: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:  # its name
    """Get required tensors by position, and by name exactly those further arguments that are in the signature."""
    scale = torch.rsqrt(input.square().mean(-1, keepdim=True) + eps)
    return input * scale if weight is None else input * scale * weight


def main() -> None:
    """Check it against the reference, call it, and ask why it was chosen."""
    rows, weight = torch.randn(4, 64), torch.rand(64)
    for found in lz.vet(kernels=["mine.rms_norm"], modules=["own_kernel"], again=True):  # in a child process
        print(found)
    with lz.scope(unmeasured="priority"):  # no time is known for it; else torch's own kernel would stay
        ours = lz.rms_norm(rows, weight)
        print(lz.explain("rms_norm", rows, weight))
    error = (ours - torch.nn.functional.rms_norm(rows, (64,), weight)).abs().max()
    print(f"off by {error:.1e}")


if __name__ == "__main__":
    main()
