"""RunSpec: all that a person writes down before a plan is sought."""

from dataclasses import dataclass, field

from simulator.specs.checks import require
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

    def __post_init__(self) -> None:
        fan_outs, num_layers = self.search.fan_outs, self.model.num_layers
        rule = f"has fan_outs, which must hold one for each of model.num_layers = {num_layers}"
        require(not fan_outs or len(fan_outs) == num_layers, "search", rule, list(fan_outs))
