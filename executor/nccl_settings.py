"""Tells NCCL what a cluster asks for: NCCL_ALGO and NCCL_PROTO."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from simulator.errors import RunError
from simulator.specs.cluster import ClusterSpec
from simulator.specs.communication import Algorithm


@contextmanager
def told_nccl(cluster: ClusterSpec) -> Iterator[None]:
    """Set NCCL's variables while communicators are made, and put them back afterwards.

    Raises:
        RunError: if the environment asks for something else.
    """
    settings = nccl_settings(cluster)
    for name, value in settings.items():
        if os.environ.get(name, value) != value:
            raise RunError(
                f"{name} must be what the plan's cluster asks for, {value!r}, got {os.environ[name]!r}: unset it, or "
                f"plan with it in the cluster"
            )
    missing = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def nccl_settings(cluster: ClusterSpec) -> dict[str, str]:
    """Return NCCL's variables; all-reduces alone have other ways than rings, so the rest is told to take these."""
    settings = {}
    if cluster.nccl_algorithm is Algorithm.RING:
        settings["NCCL_ALGO"] = "Ring"
    elif cluster.nccl_algorithm is not None:
        settings["NCCL_ALGO"] = f"Ring;allreduce:{cluster.nccl_algorithm.value}"
    if cluster.nccl_protocol is not None:
        settings["NCCL_PROTO"] = cluster.nccl_protocol.value
    return settings
