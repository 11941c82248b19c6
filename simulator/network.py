"""Max-min shares of ports among the flows under way, and the instants at which these flows end."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

import simpy

from simulator.specs.cost import Flow, Port


def call_at(env: simpy.Environment, at_seconds: float, callback: Callable[[simpy.Event], None]) -> simpy.Event:
    """Call back at an instant, or now if rounding has put it into the past; return the event that does so."""
    event = env.timeout(max(0.0, at_seconds - env.now))
    event.callbacks.append(callback)
    return event


def max_min_rates(flows: Sequence[Flow], capacities: Mapping[Port, float]) -> list[float]:
    """Return the max-min fair rate of each flow, in bytes per second.

    Progressive filling: all rates rise together; a flow stops at its own cap or when one of its ports is full. Plain
    Python, for a heap touches only the ports of the flows that stop: 64 flows take 0.1 ms, and rounds in NumPy over all
    flows took two to four times as long at every size from 8 to 4,000 flows.

    Args:
        flows: that move at the same time; their bytes do not matter.
        capacities: bytes per second of each port.

    Source: Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2.
    """
    for flow in flows:
        _check(flow, capacities)
    return _fill(flows, capacities)


def _fill(flows: Sequence[Flow], capacities: Mapping[Port, float]) -> list[float]:
    """Return what `max_min_rates` says, for flows that have been checked."""
    filling = _Filling(flows, capacities)
    caps = sorted((flow.max_bytes_per_second, index) for index, flow in enumerate(flows))
    num_capped = 0
    # The fair share of a port only grows while flows stop, so an entry of the heap is a lower bound.
    shares = [(filling.share(port), port) for port in filling.port_numbers.values()]
    heapify(shares)
    while shares:
        bound, port = shares[0]
        share = filling.share(port)
        if share == inf:
            heappop(shares)
        elif num_capped < len(caps) and caps[num_capped][0] <= bound:
            filling.stop(caps[num_capped][1], caps[num_capped][0])
            num_capped += 1
        elif share > bound:
            heapreplace(shares, (share, port))
        else:
            heappop(shares)
            for index in filling.users[port]:
                filling.stop(index, share)
    for cap, index in caps[num_capped:]:  # flows without ports
        filling.stop(index, cap)
    return filling.rates


class _Filling:
    """Progressive filling half-way: which flows have stopped at which rate, and what that leaves of each port."""

    def __init__(self, flows: Sequence[Flow], capacities: Mapping[Port, float]) -> None:
        self.rates = [-1.0] * len(flows)
        self.port_numbers: dict[Port, int] = {}  # in order of first use, so that ties have one order
        self.users: list[list[int]] = []
        self._left: list[float] = []
        self._num_rising: list[int] = []
        self._flow_ports: list[list[tuple[int, int]]] = []
        for index, flow in enumerate(flows):
            numbers = []
            for port, load in zip(flow.ports, flow.loads, strict=True):
                number = self.port_numbers.setdefault(port, len(self.users))
                if number == len(self.users):
                    self.users.append([])
                    self._left.append(capacities[port])
                    self._num_rising.append(0)
                self.users[number].append(index)
                self._num_rising[number] += load
                numbers.append((number, load))
            self._flow_ports.append(numbers)

    def share(self, port: int) -> float:
        """Return the rate at which a port is full if all that still rises there is equal; inf if nothing does."""
        return self._left[port] / self._num_rising[port] if self._num_rising[port] else inf

    def stop(self, flow: int, rate: float) -> None:
        """Fix the rate of a flow, unless it has stopped before."""
        if self.rates[flow] < 0:
            self.rates[flow] = rate
            for port, load in self._flow_ports[flow]:
                self._left[port] -= load * rate
                self._num_rising[port] -= load


def _check(flow: Flow, capacities: Mapping[Port, float]) -> None:
    for port in flow.ports:
        assert port in capacities, f"no capacity is stated for port {port} of {flow}"
        assert 0 < capacities[port] < inf, f"capacity of port {port} must be above 0 and finite, got {capacities[port]}"
    assert len(set(flow.ports)) == len(flow.ports), f"a flow must name each port once, got {flow}"
    assert len(flow.loads) == len(flow.ports), f"alike must say how many flows each port carries, got {flow}"
    assert min(flow.loads, default=1) >= 1, f"each port of a flow must carry it, got {flow}"
    assert flow.max_bytes_per_second > 0, flow
    assert flow.ports or flow.max_bytes_per_second < inf, f"nothing limits {flow}"
    assert 0 <= flow.num_bytes < inf, flow


@dataclass(slots=True)
class _Transfer:
    """Flows that belong together, and the event that tells of their common end."""

    ended: simpy.Event
    num_moving: int


@dataclass(slots=True, eq=False)
class _Moving:
    """A flow under way: `left_bytes` were left at `since_seconds`, from when on it has moved at one rate."""

    sequence: int
    flow: Flow
    transfer: _Transfer
    since_seconds: float
    left_bytes: float
    rate_bytes_per_second: float = 0.0
    end_seconds: float = inf

    def set_rate(self, rate_bytes_per_second: float, now_seconds: float) -> None:
        """Go on at another rate from now on."""
        moved_bytes = self.rate_bytes_per_second * (now_seconds - self.since_seconds)
        self.left_bytes = max(0.0, self.left_bytes - moved_bytes)
        self.since_seconds = now_seconds
        self.rate_bytes_per_second = rate_bytes_per_second
        self.end_seconds = now_seconds + self.left_bytes / rate_bytes_per_second


def _may_change(moving: _Moving, floor: float) -> bool:
    rate = moving.rate_bytes_per_second
    return rate == 0 or rate >= floor  # it has none before its first solve


class Network:
    """Ports shared by concurrent flows, max-min fairly, whose shares change when a flow starts or ends.

    Only flows that share ports with one that started or ended, directly or through others, are solved again, once for
    all that happens at one instant; the end of any other flow stays the number that it was. Nor are those solved that
    are slower than every flow that ended, and than an equal share of every port of one that started: progressive
    filling goes the same way with and without these flows until it reaches such a rate.

    Args:
        env: whose clock runs in seconds.
        capacities: bytes per second of each port.
    """

    def __init__(self, env: simpy.Environment, capacities: Mapping[Port, float]) -> None:
        self._env = env
        self._capacities = capacities
        self._num_started = 0
        self._checked: dict[int, Flow] = {}  # by identity: a step's flows come again in the next
        self._on_port: dict[Port, dict[_Moving, None]] = {}  # dicts, since sets have no order of insertion
        self._load_on_port: dict[Port, int] = {}  # flows, those that are alike counted each
        self._touched: dict[_Moving, None] = {}
        self._slowest_ended = inf  # rate of the flows that ended since the last solve
        self._ends: list[tuple[float, int, _Moving]] = []  # heap; stale where the flow now ends at another instant
        self._solve_is_due = False
        self._alarm: simpy.Event | None = None
        self._alarm_seconds = inf

    def transfer(self, flows: Iterable[Flow]) -> simpy.Event:
        """Start these flows now and return the event that succeeds when all of them have ended."""
        transfer = _Transfer(self._env.event(), 0)
        for flow in flows:
            if id(flow) not in self._checked:
                _check(flow, self._capacities)
                self._checked[id(flow)] = flow
            if flow.num_bytes > 0:
                self._start(flow, transfer)
        if transfer.num_moving == 0:
            transfer.ended.succeed()
        return transfer.ended

    def _start(self, flow: Flow, transfer: _Transfer) -> None:
        moving = _Moving(self._num_started, flow, transfer, self._env.now, flow.num_bytes)
        self._num_started += 1
        transfer.num_moving += 1
        for port, load in zip(flow.ports, flow.loads, strict=True):
            self._on_port.setdefault(port, {})[moving] = None
            self._load_on_port[port] = self._load_on_port.get(port, 0) + load
        self._touched[moving] = None
        self._solve_soon()

    def _solve_soon(self) -> None:
        """Solve at this instant, but after all that is already about to happen at it."""
        if not self._solve_is_due:
            self._solve_is_due = True
            call_at(self._env, self._env.now, self._solve)

    def _solve(self, _: simpy.Event) -> None:
        """Bring the rates of all flows that a start or an end has touched up to date."""
        self._solve_is_due = False
        moving, left = self._reached(self._floor())
        self._touched.clear()
        self._slowest_ended = inf
        for each, rate in zip(moving, _fill([each.flow for each in moving], left), strict=True):
            if rate != each.rate_bytes_per_second:
                each.set_rate(rate, self._env.now)
                heappush(self._ends, (each.end_seconds, each.sequence, each))
        self._set_alarm()

    def _floor(self) -> float:
        """Return a rate below which no flow's share has changed, less what rounding may take."""
        floor = self._slowest_ended
        for moving in self._touched:
            if moving.rate_bytes_per_second == 0:
                for port in moving.flow.ports:
                    floor = min(floor, self._capacities[port] / self._load_on_port[port])
        return floor * (1 - 1e-9)

    def _reached(self, floor: float) -> tuple[list[_Moving], dict[Port, float]]:
        """Return the flows that share ports with touched ones, directly or through others, and what others leave them.

        Args:
            floor: flows that are slower stay as they are.
        """
        reached = {each: None for each in self._touched if _may_change(each, floor)}
        pending = list(reached)
        left: dict[Port, float] = {}
        while pending:
            for port in pending.pop().flow.ports:
                if port not in left:
                    left[port] = self._capacities[port]
                    for each in self._on_port.get(port, ()):
                        if not _may_change(each, floor):
                            left[port] -= each.rate_bytes_per_second * each.flow.loads[each.flow.ports.index(port)]
                        elif each not in reached:
                            reached[each] = None
                            pending.append(each)
        return list(reached), left

    def _set_alarm(self) -> None:
        """Wake up at the end of the flow that ends next."""
        while self._ends and self._ends[0][0] != self._ends[0][2].end_seconds:
            heappop(self._ends)
        next_seconds = self._ends[0][0] if self._ends else inf
        if next_seconds != self._alarm_seconds:
            self._alarm_seconds = next_seconds
            self._alarm = call_at(self._env, next_seconds, self._end_flows) if self._ends else None

    def _end_flows(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:  # set before a rate changed
            return
        while self._ends and self._ends[0][0] <= self._alarm_seconds:
            end_seconds, _, moving = heappop(self._ends)
            if end_seconds == moving.end_seconds:
                self._end(moving)
        self._alarm, self._alarm_seconds = None, inf
        if self._touched:
            self._solve_soon()
        else:
            self._set_alarm()

    def _end(self, moving: _Moving) -> None:
        for port, load in zip(moving.flow.ports, moving.flow.loads, strict=True):
            on_port = self._on_port[port]
            del on_port[moving]
            self._load_on_port[port] -= load
            self._touched.update(on_port)
        self._slowest_ended = min(self._slowest_ended, moving.rate_bytes_per_second)
        self._touched.pop(moving, None)
        moving.end_seconds = -inf  # leaves its other entries of the heap stale
        moving.transfer.num_moving -= 1
        if moving.transfer.num_moving == 0:
            moving.transfer.ended.succeed()
