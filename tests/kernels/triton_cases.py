"""Where Triton's kernels are tested: on the GPU if there is one, else under its interpreter."""

import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter computes bfloat16 wrongly.
FLOATS = (torch.float32, torch.float16, *((torch.bfloat16,) if GPU else ()))


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Of a whole tensor, by its norm; nan where anything is not finite."""
    out64, expected64 = out.double(), expected.double()
    return float((out64 - expected64).norm() / expected64.norm().clamp(min=1e-30))
