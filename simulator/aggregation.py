"""Fewer flows for a collective that has one for each pair of its ranks.

Of p ranks that send to one another there are p (p - 1) flows over 2 p ports, and max-min shares would be solved at the
end of each. One flow a port, with the bytes of all that cross it, ends when that port has carried them, and the last
of these ends, T, is close to when the flows of pairs end, U, if nothing else is under way:

- T <= U, for no port is faster than its rate and no flow than its cap.
- U <= k T for flows over at most k ports each that no cap holds back: a flow is slowed by a port that is full, so all
  of its time some port that it crosses is full, and each is so for T at most. Caps add one to k.
- T = U where all flows are equal and all ports carry as many for their rate: all go at one rate until the end.
- T = U where one port that is no faster than the others carries all flows: it is full until the end.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from simulator.specs.cost import Flow, Port


def aggregated(flows: Sequence[Flow]) -> tuple[Flow, ...]:
    """Return flows of one collective as they are, or, where they are more than their ports, one of each port.

    The flow of a port is as many equal ones as crossed it, so that beside others the collective gets its share. Where
    caps are stated, the flow that takes longest alone stays too, without its ports.
    """
    if len({port for flow in flows for port in flow.ports} or flows) >= len(flows):
        return tuple(flows)
    loads: Counter[Port] = Counter()
    num_bytes: dict[Port, float] = defaultdict(float)
    caps: dict[Port, float] = defaultdict(float)
    for flow in flows:
        if flow.num_bytes > 0:
            for port, load in zip(flow.ports, flow.loads, strict=True):
                loads[port] += load
                num_bytes[port] += load * flow.num_bytes
                caps[port] = max(caps[port], flow.max_bytes_per_second)
    of_ports = [
        Flow(num_bytes=num_bytes[port] / load, ports=(port,), max_bytes_per_second=caps[port], alike=(load,))
        for port, load in loads.items()
    ]
    longest = max(flows, key=lambda flow: flow.num_bytes / flow.max_bytes_per_second)
    if longest.max_bytes_per_second == inf:
        return tuple(of_ports)
    return (*of_ports, replace(longest, ports=(), alike=()))
