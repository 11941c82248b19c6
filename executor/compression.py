"""What is done to the gradients of a bucket before and after they travel.

Each function is one task of `simulator/gradients.py`. They take local tensors of one rank and give the same bits in
every run; what ranks must agree on, they compute from what was summed over all of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from simulator.gradients import is_factorised


def cast(target: Tensor, source: Tensor) -> None:
    """Write numbers into a buffer of another format."""
    target.copy_(source)


def select_entries(gradient: Tensor, residual: Tensor, message: Tensor, num_kept: int) -> None:
    """Write the largest entries of gradient plus residual into a message, and leave the others in the residual.

    Args:
        gradient, residual: fp32 [elements].
        message: int32 [2 * num_kept or more]; gets the bits of the values, then their indices.
    """
    residual.add_(gradient)
    index = torch.topk(residual.abs(), num_kept, sorted=False).indices
    message[:num_kept] = residual[index].view(torch.int32)
    message[num_kept : 2 * num_kept] = index
    residual[index] = 0


def sum_entries(gradient: Tensor, messages: Sequence[Tensor], num_kept: int) -> None:
    """Write the sum of the entries in all ranks' messages into a gradient, rank by rank and so always alike."""
    gradient.zero_()
    for message in messages:
        # Indices of one rank differ, so no two additions meet.
        gradient.index_add_(0, message[num_kept : 2 * num_kept], message[:num_kept].view(torch.float32))


class Factors:
    """The factorised gradients of one bucket in PowerSGD.

    Attributes:
        matrices: gradients [n, m], which are views of the bucket.
        residuals: what earlier steps did not send of each, [n, m].
        rights: right factors [m, matrix_rank], which are views of `right`; the last step's are the next one's start.
        right: all of them, which travel as one message.
        vectors: the other gradients.

    Source: Vogels, Karimireddy and Jaggi, PowerSGD, NeurIPS 2019, algorithms 1 and 2; sums instead of means.
    """

    def __init__(
        self, gradients: Sequence[Tensor], residuals: Sequence[Tensor], right: Tensor, *, matrix_rank: int
    ) -> None:
        pairs = list(zip(gradients, residuals, strict=True))
        factorised = [pair for pair in pairs if is_factorised(tuple(pair[0].shape), matrix_rank)]
        self.matrix_rank = matrix_rank
        self.matrices = [gradient for gradient, _ in factorised]
        self.residuals = [residual for _, residual in factorised]
        self.vectors = [gradient for gradient in gradients if not is_factorised(tuple(gradient.shape), matrix_rank)]
        self.right = right
        columns = [matrix.shape[1] for matrix in self.matrices]
        self.rights = list(right.view(-1, matrix_rank).split(columns)) if columns else []

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements, matrices, matrix rank."""
        return sum(matrix.numel() for matrix in self.matrices), len(self.matrices), self.matrix_rank


def project(factors: Factors, loss: Tensor) -> Tensor:
    """Return the message of left factors, with all that is not factorised behind them, and the loss.

    Args:
        loss: [1] in the bucket that carries it, else [0].
    """
    lefts = []
    for matrix, residual, right in zip(factors.matrices, factors.residuals, factors.rights, strict=True):
        matrix.add_(residual)
        lefts.append(matrix @ right)
    return torch.cat([*(left.flatten() for left in lefts), *(vector.flatten() for vector in factors.vectors), loss])


def orthogonalise(factors: Factors, message: Tensor) -> list[Tensor]:
    """Return orthonormal left factors; write right factors, and what the product of both leaves out.

    Args:
        message: left factors, summed over the ranks.
    """
    rows = [matrix.shape[0] for matrix in factors.matrices]
    lefts = message[: sum(rows) * factors.matrix_rank].view(-1, factors.matrix_rank).split(rows)
    bases = []
    for matrix, residual, left, right in zip(factors.matrices, factors.residuals, lefts, factors.rights, strict=True):
        basis = torch.linalg.qr(left).Q
        torch.mm(matrix.T, basis, out=right)
        torch.addmm(matrix, basis, right.T, alpha=-1, out=residual)
        bases.append(basis)
    return bases


def restore(factors: Factors, bases: Sequence[Tensor], message: Tensor, loss: Tensor) -> None:
    """Write the products of the factors, and what was not factorised, into the bucket; and the loss.

    Args:
        bases: orthonormal left factors.
        message: as `project` gave it, summed over the ranks.
    """
    for matrix, basis, right in zip(factors.matrices, bases, factors.rights, strict=True):
        torch.mm(basis, right.T, out=matrix)
    first = sum(basis.numel() for basis in bases)
    for vector in [*factors.vectors, loss]:
        vector.copy_(message[first : first + vector.numel()].view_as(vector))
        first += vector.numel()
