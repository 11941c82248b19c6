"""TaskCost, CollectiveCost, Flow: the prices that the engine plays out."""

from dataclasses import dataclass

Port = tuple[str, int]  # kind of port, such as "device_out", and its index in the cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCost:
    """Price of a compute task.

    Attributes:
        host_seconds: for which the host thread is busy issuing it.
        device_seconds: for which its stream is busy.
    """

    host_seconds: float
    device_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes that cross some ports together; concurrent flows share each port max-min fairly.

    Attributes:
        num_bytes: through each of the ports.
        ports: that the flow needs at the same time.
        max_bytes_per_second: rate that it cannot exceed even alone.
        alike: how many flows like this one, itself included, go through each of the ports side by side; one each if
            empty.
    """

    num_bytes: float
    ports: tuple[Port, ...]
    max_bytes_per_second: float
    alike: tuple[int, ...] = ()

    @property
    def loads(self) -> tuple[int, ...]:
        """How many flows like this one each port carries."""
        return self.alike or (1,) * len(self.ports)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Price of a collective once its last rank has arrived: a fixed time, then flows side by side.

    Attributes:
        host_seconds: for which each host thread is busy issuing it.
        latency_seconds: before the flows start.
        flows: all of which must end.
        extrapolated: what of it lies beyond measurements, such as "16 hosts, measured up to 8"; empty if nothing does.
    """

    host_seconds: float
    latency_seconds: float
    flows: tuple[Flow, ...]
    extrapolated: tuple[str, ...] = ()
