"""What a communication library does: operations, and the algorithms and protocols of NCCL."""

from enum import StrEnum


class Operation(StrEnum):
    """What ranks do together; the values of collectives are those of `TaskKind`."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND_RECEIVE = "send_receive"  # each rank sends to one and receives from one


class Algorithm(StrEnum):
    """How NCCL moves bytes; the values are those of its variable NCCL_ALGO, but for pairwise messages."""

    RING = "Ring"
    TREE = "Tree"
    NVLS = "NVLS"
    NVLS_TREE = "NVLSTree"
    PAIRWISE = "Pairwise"


class Protocol(StrEnum):
    """How NCCL tells the receiver that data are there; the values are those of its variable NCCL_PROTO."""

    LL = "LL"
    LL128 = "LL128"
    SIMPLE = "Simple"


# What `ClusterSpec.nccl_algorithm` may ask for: pairwise messages have no other way.
CHOOSABLE = (Algorithm.RING, Algorithm.TREE, Algorithm.NVLS, Algorithm.NVLS_TREE)


def bus_factor(operation: Operation, num_ranks: int) -> float:
    """Return bytes through a rank's port over the bytes of the full buffer.

    Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
    """
    match operation:
        case Operation.ALL_REDUCE:
            return 2 * (num_ranks - 1) / num_ranks
        case Operation.ALL_GATHER | Operation.REDUCE_SCATTER | Operation.ALL_TO_ALL:
            return (num_ranks - 1) / num_ranks
        case _:
            return 1.0
