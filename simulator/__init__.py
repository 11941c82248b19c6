"""Predicts what a plan takes: lowers it to tasks, prices them from measurements, plays them out."""

from simulator.simulation import simulate
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec, DeviceSpec, LinkSpec
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Plan
from simulator.specs.program import Program, Task
from simulator.specs.topology import HostLink, HostTopology, LinkFault, LinkKind, NetworkSpec, Straggler
from simulator.specs.trace import Span, Trace
from simulator.specs.train import TrainSpec

__all__ = [
    "Calibration",
    "ClusterSpec",
    "DeviceSpec",
    "GraphSpec",
    "HostLink",
    "HostTopology",
    "LinkFault",
    "LinkKind",
    "LinkSpec",
    "ModelSpec",
    "NetworkSpec",
    "Plan",
    "Program",
    "Span",
    "Straggler",
    "Task",
    "Trace",
    "TrainSpec",
    "simulate",
]
