"""RunSpec: all that a person writes down before a plan is sought."""

from dataclasses import dataclass, field

from simulator.specs.cluster import ClusterSpec
from simulator.specs.fanout import FanoutSpec
from simulator.specs.graph import GraphSource
from simulator.specs.model import ModelSpec
from simulator.specs.search import SearchSpec
from simulator.specs.train import TrainSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A workload and where it is to run, as `run.toml` holds it.

    Attributes:
        graph: a graph store, or the generator of one.
        cluster: None for the machine at hand (`name = "local"`), which only the machine itself can describe.
        search: which plans may be proposed.
        fanout: what `graphpilot fanout` compares.
    """

    graph: GraphSource
    model: ModelSpec
    cluster: ClusterSpec | None
    train: TrainSpec
    search: SearchSpec = field(default_factory=SearchSpec)
    fanout: FanoutSpec = field(default_factory=FanoutSpec)
