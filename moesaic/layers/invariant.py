"""Operations whose bits do not depend on the rows beside a row: for deterministic mode.

torch picks its kernels by shape, and they sum in different orders: a token alone gets other bits
than in a batch. Here every shape that torch sees is fixed, or the kernel is our own.

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

# Rows and outputs of a product in torch: always exactly so many, the last ones zero.
PIECE_ROWS = 32
PIECE_OUTPUTS = 64


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """F.linear of rows that do not know each other, nor what other outputs the matrix has.

    With the compiled kernel (float32 with AVX-512, bfloat16 with AMX) the number of threads does
    not matter either. In torch it must stay as it is.
    """
    if x_TI.is_cuda:
        return linear_invariant(x_TI, weight_OI, bias_O)
    if kernel.fits(weight_OI) and x_TI.dtype == weight_OI.dtype:
        return kernel.run(x_TI, weight_OI, bias_O)
    outputs = len(weight_OI)
    pieces = list(weight_OI.split(PIECE_OUTPUTS))
    pieces[-1] = F.pad(pieces[-1], (0, 0, 0, PIECE_OUTPUTS - len(pieces[-1])))

    def product(x_CI: Tensor) -> Tensor:
        # Weights on the left: oneDNN reads them as they lie instead of repacking them.
        x_IC = x_CI.t()
        return torch.cat([widened.mm(piece, x_IC) for piece in pieces])[:outputs].t()

    y_TO = in_pieces(product, x_TI)
    return y_TO if bias_O is None else y_TO + bias_O


def in_pieces(function: Callable[[Tensor], Tensor], x_T: Tensor) -> Tensor:
    """function(x) of pieces of PIECE_ROWS rows, the last filled up with zeros, so that it only ever
    sees one shape."""
    tokens = len(x_T)
    missing = -tokens % PIECE_ROWS if tokens else PIECE_ROWS
    # A copy even where nothing is missing: some kernels choose by where memory is aligned.
    padded = x_T.new_zeros(tokens + missing, *x_T.shape[1:])
    padded[:tokens] = x_T
    pieces = [function(piece) for piece in padded.split(PIECE_ROWS)]
    return torch.cat(pieces)[:tokens]


def sigmoid(x: Tensor) -> Tensor:
    """torch.sigmoid by element: torch computes the last few of a float32 tensor, or of a thread's
    share, otherwise than the rest. It does not for exp, nor after rounding to 16 bits."""
    return 1 / (1 + torch.exp(-x)) if x.dtype == torch.float32 else torch.sigmoid(x)


def silu(x: Tensor) -> Tensor:
    """F.silu by element, as `sigmoid`."""
    return x / (1 + torch.exp(-x)) if x.dtype == torch.float32 else F.silu(x)
