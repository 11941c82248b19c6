"""The ports of one host as its faults leave it, and what ranks on it put on them."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from simulator.rings import ring_loads
from simulator.routes import HostRoutes, Route, port_name
from simulator.specs.cluster import ClusterSpec
from simulator.specs.topology import DEVICE, HOST, NETWORK, NIC, LinkFault, LinkKind

Floats = NDArray[np.float64]


def left_rate(rate: float, ends: Iterable[str], faults: Iterable[LinkFault]) -> float:
    """Return what faults leave of a link's rate."""
    for fault in faults:
        if set(fault.ends) == set(ends):
            rate = fault.rate(rate)
    return rate


def nic_ports(nic: int) -> tuple[str, str]:
    """Return the names of the ports of a network card: out of the host and into it."""
    return port_name(f"{NIC}{nic}", NETWORK), port_name(NETWORK, f"{NIC}{nic}")


class HostPorts:
    """One host.

    Args:
        faults: of this host, or of all.

    Attributes:
        device_rates: bytes per second of each device's port.
        nic_rates: bytes per second of each network card; 0 where it is lost.
        link_rates: bytes per second of each direction of the links inside that are left.
        routes: over these links; None where devices share nothing but their ports.
        is_joined_by_nvlink: whether NVLink, or a switch like it, leads from every device to every other.
    """

    def __init__(self, cluster: ClusterSpec, faults: tuple[LinkFault, ...]) -> None:
        self._num_devices = cluster.devices_per_host
        rate = cluster.device_link.bandwidth_bytes_per_second
        self.device_rates = [left_rate(rate, (f"{DEVICE}{n}", HOST), faults) for n in range(self._num_devices)]
        rate = cluster.nic_bytes_per_second
        self.nic_rates = [left_rate(rate, (f"{NIC}{n}", NETWORK), faults) for n in range(cluster.num_nics)]
        links = () if cluster.host is None else cluster.host.links
        rates = {
            pair: left_rate(link.bandwidth_bytes_per_second, pair, faults) for link in links for pair in link.pairs()
        }
        left = {pair: rate for pair, rate in rates.items() if rate > 0}
        self.link_rates = {port_name(*ends): rate for pair, rate in left.items() for ends in (pair, pair[::-1])}
        lost = (frozenset(pair) for pair in rates if pair not in left)
        self.routes = None if cluster.host is None else HostRoutes(cluster.host, lost)
        self.has_routed_nics = cluster.host is not None and cluster.host.num_nics > 0
        for nic in range(cluster.num_nics):
            if all(self._distance(device, nic) is None for device in range(self._num_devices)):
                self.nic_rates[nic] = 0.0
        self.is_joined_by_nvlink = self.routes is None or self.routes.is_joined_by_nvlink()
        self._ports = list(self.link_rates)
        self._route_loads: Floats | None = None
        self.ring = cache(self._ring)
        self.nics_of = cache(self._nics_of)
        self.to_nic = cache(self._to_nic)
        self.from_nic = cache(self._from_nic)
        self.nearest_device = cache(self._nearest_device)

    def are_joined(self, source: int, target: int) -> bool:
        """Return whether anything leads from one device to another."""
        has_ports = self.device_rates[source] > 0 and self.device_rates[target] > 0
        return has_ports and (self.routes is None or self.routes.between_devices(source, target) is not None)

    def pairs(self, devices: Sequence[int], bytes_between: Floats) -> dict[str, float]:
        """Return what [source, target] bytes between some devices put on each link."""
        loads = np.einsum("ab,abp->p", bytes_between, self._loads()[np.ix_(devices, devices)])
        return {port: float(load) for port, load in zip(self._ports, loads, strict=True) if load > 0}

    def _nearest_device(self, nic: int) -> int:
        """Return the device that a network card serves or, where it serves none, that is next to it."""
        nics = frozenset(range(len(self.nic_rates)))
        served = (device for device in range(self._num_devices) if nic in self.nics_of(device, nics))
        far = (len(LinkKind), 0)
        nearest = min(range(self._num_devices), key=lambda device: (self._distance(device, nic) or far, device))
        return next(served, nearest)

    def _to_nic(self, device: int, nic: int) -> Route:
        """Return what a byte from a device to a network card puts on links; nothing where no link leads to it."""
        route = None if self.routes is None or not self.has_routed_nics else self.routes.to_nic(device, nic)
        return route or {}

    def _from_nic(self, nic: int, device: int) -> Route:
        """Return what a byte from a network card to a device puts on links."""
        route = None if self.routes is None or not self.has_routed_nics else self.routes.from_nic(nic, device)
        return route or {}

    def _ring(self, devices: tuple[int, ...]) -> Mapping[str, float]:
        """Return what a byte from each device to the next of a ring puts on each link."""
        capacities = np.array([self.link_rates[port] for port in self._ports])
        loads = ring_loads(self._loads()[np.ix_(devices, devices)], capacities)
        return {port: float(load) for port, load in zip(self._ports, loads, strict=True) if load > 0}

    def _loads(self) -> Floats:
        """Return [source, target, link], what a byte from one device to another puts on each link."""
        if self._route_loads is None:
            index = {port: number for number, port in enumerate(self._ports)}
            self._route_loads = np.zeros((self._num_devices, self._num_devices, len(index)))
            for source in range(self._num_devices):
                for target in range(self._num_devices):
                    route = self.routes.between_devices(source, target) if self.routes and source != target else None
                    for port, share in (route or {}).items():
                        self._route_loads[source, target, index[port]] = share
        return self._route_loads

    def _nics_of(self, device: int, usable: frozenset[int]) -> tuple[int, ...]:
        """Return the cards that serve a device: the nearest usable, shared out among devices that are as near."""
        nearest = [self._nearest(other, usable) for other in range(self._num_devices)]
        nics = nearest[device]
        alike = [other for other, theirs in enumerate(nearest) if theirs == nics]
        return _shared_out(nics, alike.index(device), len(alike))

    def _nearest(self, device: int, usable: frozenset[int]) -> tuple[int, ...]:
        found = {nic: self._distance(device, nic) for nic in sorted(usable)}
        least = min((distance for distance in found.values() if distance is not None), default=None)
        return tuple(nic for nic, distance in found.items() if distance is not None and distance == least)

    def _distance(self, device: int, nic: int) -> tuple[int, int] | None:
        if self.device_rates[device] == 0:
            return None
        return self.routes.distance(device, nic) if self.routes is not None and self.has_routed_nics else (0, 0)


def _shared_out(nics: tuple[int, ...], index: int, count: int) -> tuple[int, ...]:
    """Return the cards of one of several devices, in equal blocks; devices share cards where there are too few."""
    if len(nics) < count:
        return nics[index * len(nics) // count :][:1]
    return nics[index * len(nics) // count : (index + 1) * len(nics) // count]
