"""Operations whose bits for a row do not depend on the other rows, for deterministic mode.

Torch picks kernels by shape, and they sum in different orders: a token alone gets other bits than
in a batch. Here torch sees fixed shapes only, or the kernel is our own.

T tokens · I inputs · O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.cpu import linear as kernel
from moesaic.kernels.cpu import widened
from moesaic.kernels.linear import linear_invariant

# Rows and outputs of every product in torch, padded with zeros.
PIECE_ROWS = 32
PIECE_OUTPUTS = 64


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """F.linear whose rows and outputs are computed independently of each other.

    With the compiled kernel (float32 with AVX-512, bfloat16 with AMX) the bits do not depend on the
    number of threads either; with torch they do.
    """
    if x_TI.is_cuda:
        return linear_invariant(x_TI, weight_OI, bias_O)
    if kernel.fits(weight_OI) and x_TI.dtype == weight_OI.dtype:
        return kernel.run(x_TI, weight_OI, bias_O)
    outputs = len(weight_OI)
    pieces = list(weight_OI.split(PIECE_OUTPUTS))
    pieces[-1] = F.pad(pieces[-1], (0, 0, 0, PIECE_OUTPUTS - len(pieces[-1])))

    def product(x_CI: Tensor) -> Tensor:
        # Weights on the left: oneDNN reads them in place instead of repacking them.
        x_IC = x_CI.t()
        return torch.cat([widened.mm(piece, x_IC) for piece in pieces])[:outputs].t()

    y_TO = in_pieces(product, x_TI)
    return y_TO if bias_O is None else y_TO + bias_O


def in_pieces(function: Callable[[Tensor], Tensor], x_T: Tensor) -> Tensor:
    """Applies `function` to pieces of PIECE_ROWS rows, the last padded: it sees one shape."""
    tokens = len(x_T)
    missing = -tokens % PIECE_ROWS if tokens else PIECE_ROWS
    # Always a copy: some kernels choose by the alignment of memory.
    padded = x_T.new_zeros(tokens + missing, *x_T.shape[1:])
    padded[:tokens] = x_T
    pieces = [function(piece) for piece in padded.split(PIECE_ROWS)]
    return torch.cat(pieces)[:tokens]


def sigmoid(x: Tensor) -> Tensor:
    """torch.sigmoid per element: torch computes the last elements of a float32 tensor, or of a
    thread's share, differently. It does not for exp, nor after rounding to 16 bits."""
    return 1 / (1 + torch.exp(-x)) if x.dtype == torch.float32 else torch.sigmoid(x)


def silu(x: Tensor) -> Tensor:
    """F.silu per element, like `sigmoid`."""
    return x / (1 + torch.exp(-x)) if x.dtype == torch.float32 else F.silu(x)
