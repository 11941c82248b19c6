"""compare_fan_outs(): how few neighbours a model may attend to, by the output of its attention and by its task.

Training and validation go through the same `GraphTransformer` and `Trainer` as any run, on one device, with another
attention in `ForwardSettings.attend`. A model is validated with the kind of neighbours that it was trained with, drawn
under keys that no step of the training has: what is found holds for inference at that cost too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from executor.attend import Attention, Rows, attention_of
from executor.data import RankData, build_rank_data, degree_buckets_of
from executor.encodings import cache_folder, positional_encodings
from executor.environment import local_kind
from executor.mesh import Place
from executor.record import Recorder
from executor.region import connected_region
from executor.train import TORCH_DTYPES, Inputs, Trainer, require_finite
from simulator.errors import PlanError
from simulator.readers.graphs import Graph
from simulator.specs.cluster import DeviceKind
from simulator.specs.fanout import FanoutComparison, FanoutRow, FanoutSpec, neighbours_text
from simulator.specs.graph import GraphSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, PartitionSpec, Plan, Recompute
from simulator.specs.run import RunSpec
from simulator.specs.sampling import NeighbourKind, NeighbourSpec
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype

ALL_EDGES = NeighbourSpec(kind=NeighbourKind.ALL)


def compare_fan_outs(
    run: RunSpec,
    spec: GraphSpec,
    graph: Graph,
    partition: PartitionSpec,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
) -> FanoutComparison:
    """Return how attention over few neighbours compares with that over all edges and, on small graphs, over all nodes.

    The better of the two is the reference. Outputs are compared on a connected region, layer by layer: with queries,
    keys and values of the model that the reference trained, as they are when the layers before attend as it does.
    All is computed in fp32 on this machine's first device.

    Args:
        run: model, training and `fanout`; its cluster and search are for plans.
        spec, graph: what `run.graph` names.
        partition: the graph as one part.

    Raises:
        PlanError: if the graph has no nodes to train on or to validate on.
        RunError: if a loss is not finite.
    """
    assert partition.num_parts == 1, partition.num_parts
    for mask, count in (("train_mask", spec.num_train_nodes), ("val_mask", spec.num_val_nodes)):
        if count == 0:
            path = spec.source.path
            raise PlanError(f"{path}: {mask} must hold a node to compare fan-outs, got none; save y and {mask} too")
    encodings = positional_encodings(graph, spec, run.model, cache_folder())
    device = torch.device("cuda", 0) if local_kind() is DeviceKind.CUDA else torch.device("cpu")
    work = _Workload(run=run, spec=spec, graph=graph, partition=partition, encodings=encodings, device=device)
    references = [ALL_EDGES] if spec.num_nodes > run.fanout.max_full_nodes else [None, ALL_EDGES]
    choices = [*references, *run.fanout.choices()]
    outcomes: list[_Outcome] = []
    trainers: list[Trainer] = []
    for index, choice in enumerate(choices):
        told = f"{neighbours_text(choice)}, choice {index + 1} of {len(choices)}"
        outcome, trainer = _trained(work, choice, told, on_progress)
        outcomes.append(outcome)
        if choice in references:
            trainers.append(trainer)
    best = max(range(len(references)), key=lambda index: outcomes[index].val_accuracy_ratio)
    on_progress("comparing outputs")
    region = _region_data(work)
    errors = _output_errors(work, region, trainers[best], references[best], choices)
    rows = tuple(
        FanoutRow(
            neighbours=choice,
            full_error_ratio=full_error,
            edges_error_ratio=edges_error,
            val_accuracy_ratio=outcome.val_accuracy_ratio,
            val_accuracy_range_ratio=max(outcome.accuracies) - min(outcome.accuracies),
            num_edges_per_step=outcome.num_edges_per_step,
        )
        for choice, outcome, (full_error, edges_error) in zip(choices, outcomes, errors, strict=True)
    )
    return FanoutComparison(
        spec=work.fanout,
        rows=rows,
        region_nodes=len(region.node_N),
        region_edges=region.edges[Exchange.NONE].num_edges,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Workload:
    """What is trained, and where.

    Attributes:
        encodings: positional encodings of all nodes, [N, columns], or None.
    """

    run: RunSpec
    spec: GraphSpec
    graph: Graph
    partition: PartitionSpec
    encodings: np.ndarray | None
    device: torch.device

    @property
    def model(self) -> ModelSpec:
        return self.run.model

    @property
    def fanout(self) -> FanoutSpec:
        return self.run.fanout

    def train(self, seed: int) -> TrainSpec:
        """Return how each choice is trained."""
        num_steps, given = self.fanout.num_steps, self.run.train
        warmup_steps = min(given.warmup_steps, num_steps)
        return replace(given, num_steps=num_steps, warmup_steps=warmup_steps, trace_steps=0, seed=seed)


# --- The task.


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What training with one choice came to, on each seed."""

    accuracies: tuple[float, ...]
    num_edges_per_step: float

    @property
    def val_accuracy_ratio(self) -> float:
        """The mean over seeds."""
        return sum(self.accuracies) / len(self.accuracies)


def _trained(
    work: _Workload, choice: NeighbourSpec | None, told: str, on_progress: Callable[[str], None]
) -> tuple[_Outcome, Trainer]:
    """Return what training with one choice comes to, and the trainer of the first seed.

    Args:
        told: the choice in words, put before all progress.
    """
    trainers: list[Trainer] = []
    accuracies, num_edges = [], 0
    for seed in range(work.run.train.seed, work.run.train.seed + work.fanout.num_seeds):
        train = work.train(seed)
        trainer = _trainer(work, train)
        attention = attention_of(_rows(work, trainer.batch(0), seed), choice)
        trainer.settings = replace(trainer.settings, attend=attention)
        best = 0.0
        for step in range(train.num_steps):
            attention.begin(step)
            loss = trainer.step(step, trainer.batch(step))
            num_edges += attention.num_edges
            if (step + 1) % train.evaluate_every_steps == 0 or step == train.num_steps - 1:
                require_finite(float(loss), step)
                attention.begin(train.num_steps + step)
                best = max(best, trainer.evaluate().val_accuracy_ratio)
                on_progress(
                    f"{told}: seed {seed}, step {step + 1} of {train.num_steps}, validation accuracy {best:.3f}"
                )
        trainers = trainers or [trainer]
        accuracies.append(best)
    num_steps = work.fanout.num_steps * work.fanout.num_seeds
    return _Outcome(accuracies=tuple(accuracies), num_edges_per_step=num_edges / num_steps), trainers[0]


def _trainer(work: _Workload, train: TrainSpec) -> Trainer:
    """Return a trainer on the whole graph and one device, in fp32."""
    inputs = Inputs(graph=work.graph, part_N=np.zeros(work.spec.num_nodes, dtype=np.int32), encodings=work.encodings)
    place = Place(rank=0, num_ranks=1, replica=0, graph_rank=0, graph_group=None, world=None, device=work.device)
    return Trainer(_plan(work), work.spec, work.model, train, inputs, place, Recorder())


def _plan(work: _Workload) -> Plan:
    """Return the plan of one rank that holds the whole graph."""
    num_layers = work.model.num_layers
    return Plan(
        data_parallel_degree=1,
        graph_parallel_degree=1,
        partition=work.partition,
        parts_per_batch=1,
        exchange=(Exchange.NONE,) * num_layers,
        recompute=(Recompute.NONE,) * num_layers,
        precision=Dtype.FLOAT32,
    )


def _rows(work: _Workload, data: RankData, seed: int) -> Rows:
    """Return the rows of a batch as attention of any kind needs them."""
    node_N = data.node_N.cpu().numpy()
    has_bias = work.model.edge_bias is EdgeBias.DEGREE
    bucket_N = degree_buckets_of(work.graph)[node_N] if has_bias else None
    return Rows(
        edges=data.edges[Exchange.NONE],
        node_N=data.node_N,
        degree_N=torch.from_numpy(work.graph.in_degree_N[node_N]).to(work.device),
        degree_bucket_N=None if bucket_N is None else torch.from_numpy(bucket_N).to(work.device),
        num_heads=work.model.num_heads,
        seed=seed,
        num_graph_nodes=work.spec.num_nodes,
        structure_weight=work.fanout.structure_weight,
    )


# --- The output of attention.


def _region_data(work: _Workload) -> RankData:
    """Return a connected region as a batch without the rest of the graph."""
    region = connected_region(work.graph, work.fanout.subgraph_nodes, seed=work.run.train.seed)
    owner_N = np.full(work.spec.num_nodes, -1, dtype=np.int64)
    owner_N[region] = 0
    return build_rank_data(
        work.graph,
        work.encodings,
        owner_N,
        graph_rank=0,
        num_ranks=1,
        exchanges=frozenset({Exchange.NONE}),
        group=None,
        num_train_rows_of_step=1,
        degree_buckets=work.model.edge_bias is EdgeBias.DEGREE,
        dtype=TORCH_DTYPES[Dtype.FLOAT32],
        device=work.device,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _LayerInputs:
    """What a layer's attention takes."""

    weights: Mapping[str, Tensor]
    q_ND: Tensor
    kv_N2D: Tensor


@torch.no_grad()
def _output_errors(
    work: _Workload,
    region: RankData,
    trainer: Trainer,
    reference: NeighbourSpec | None,
    choices: list[NeighbourSpec | None],
) -> list[tuple[float, float]]:
    """Return for each choice the relative errors of its outputs against full attention and against all edges."""
    rows = _rows(work, region, work.run.train.seed)
    layers: list[_LayerInputs] = []
    attention = attention_of(rows, reference)

    def attend(weights: Mapping[str, Tensor], q_ND: Tensor, kv_N2D: Tensor) -> Tensor:
        layers.append(_LayerInputs(weights=weights, q_ND=q_ND, kv_N2D=kv_N2D))
        return attention(weights, q_ND, kv_N2D)

    trainer.model(region, replace(trainer.settings, attend=attend))
    of_full = _outputs(attention_of(rows, None), layers)
    of_edges = _outputs(attention_of(rows, ALL_EDGES), layers)
    errors = []
    for choice in choices:
        found = _outputs(attention_of(rows, choice), layers)
        errors.append((_mean_error_ratio(found, of_full), _mean_error_ratio(found, of_edges)))
    return errors


def _outputs(attention: Attention, layers: list[_LayerInputs]) -> list[Tensor]:
    """Return what each layer's attention gives under the key of step 0."""
    attention.begin(0)
    return [attention(layer.weights, layer.q_ND, layer.kv_N2D) for layer in layers]


def _mean_error_ratio(found: list[Tensor], right: list[Tensor]) -> float:
    """Return the mean over layers of the norm of the difference over the norm of what is right; 0 of zeros."""
    ratios = [
        float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-300))
        for x, y in zip(found, right, strict=True)
    ]
    return sum(ratios) / len(ratios)
