"""Plan files for tests and benchmarks, made from choices instead of a search."""

from dataclasses import dataclass, replace
from pathlib import Path

from planner.neighbourhoods import expected_batches
from planner.partition import partition_graph
from planner.shares import part_shares
from simulator.memory import peak_memory
from simulator.readers.graphs import Graph
from simulator.readers.partitions import read_partition
from simulator.specs.cluster import ClusterSpec
from simulator.specs.decision import PlanFile, Prediction
from simulator.specs.files import write_plan
from simulator.specs.gradients import GradientCompression
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import (
    Exchange,
    ExchangePayload,
    Offload,
    ParameterSharding,
    PartitionSpec,
    PipelineSchedule,
    Plan,
    Recompute,
    StepMode,
)
from simulator.specs.train import TrainSpec
from simulator.specs.units import MIB, Dtype

AS_THEY_ARE = GradientCompression()


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a plan chooses; layers are alike unless tuples say otherwise.

    Attributes:
        num_parts: parts of the graph; 0 for a full graph with one part a rank.
        parts_per_batch: 0 for one part a rank of the graph group.
        fan_outs, seeds_per_batch: of sampled neighbourhoods; empty and 0 for batches of parts.
        part_ranks: of a full graph, ranks that serve each part; empty for one each.
    """

    data_parallel_degree: int = 1
    graph_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    shard_parameters: ParameterSharding = ParameterSharding.NONE
    pipeline_parallel_degree: int = 1
    stages: tuple[int, ...] = ()
    pipeline_schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    num_micro_batches: int = 1
    num_parts: int = 0
    parts_per_batch: int = 0
    exchange: Exchange | tuple[Exchange, ...] = Exchange.HALO
    recompute: Recompute | tuple[Recompute, ...] = Recompute.NONE
    precision: Dtype = Dtype.FLOAT32
    gradient_bucket_bytes: int = 25 * MIB
    overlap_gradients: bool = False
    gradient_compression: GradientCompression = AS_THEY_ARE
    step_mode: StepMode = StepMode.EAGER
    between_edges: bool = True
    fan_outs: tuple[int, ...] = ()
    seeds_per_batch: int = 0
    keep_batches: bool = False
    prefetch_batches: int = 0
    overlap_exchange: bool = False
    exchange_payload: ExchangePayload = ExchangePayload.KEYS_AND_VALUES
    exchange_precision: Dtype | None = None
    exchange_chunk_bytes: int | None = None
    part_ranks: tuple[int, ...] = ()
    offload: Offload | tuple[Offload, ...] = ()
    offload_min_bytes: int = 1 * MIB
    offload_optimizer: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the plan."""
        of_stage = self.data_parallel_degree * self.graph_parallel_degree * self.tensor_parallel_degree
        return of_stage * self.pipeline_parallel_degree


def plan_of(
    choices: Choices,
    graph: Graph,
    model: ModelSpec,
    folder: Path,
    *,
    seed: int = 0,
    partition: PartitionSpec | None = None,
) -> Plan:
    """Return the plan; without a partition METIS's is taken, whose file goes to `folder`."""
    num_parts = choices.num_parts or len(choices.part_ranks) or choices.graph_parallel_degree
    exchange = choices.exchange if choices.graph_parallel_degree > 1 else Exchange.NONE
    recompute = choices.recompute
    sampled = None
    if choices.fan_outs:
        sampled = expected_batches(
            graph,
            choices.fan_outs,
            seeds_per_batch=choices.seeds_per_batch,
            data_parallel_degree=choices.data_parallel_degree * choices.num_micro_batches,
        )
    partition = partition or partition_graph(graph, num_parts, seed=seed, folder=folder)
    if choices.part_ranks:
        part_N = read_partition(partition, folder=folder, num_nodes=graph.num_nodes)
        partition = replace(partition, shares=part_shares(graph, part_N, choices.part_ranks))
    return Plan(
        data_parallel_degree=choices.data_parallel_degree,
        graph_parallel_degree=choices.graph_parallel_degree,
        tensor_parallel_degree=choices.tensor_parallel_degree,
        shard_parameters=choices.shard_parameters,
        pipeline_parallel_degree=choices.pipeline_parallel_degree,
        stages=choices.stages,
        pipeline_schedule=choices.pipeline_schedule,
        num_micro_batches=choices.num_micro_batches,
        partition=partition,
        parts_per_batch=num_parts
        if sampled or choices.part_ranks
        else choices.parts_per_batch or choices.graph_parallel_degree,
        exchange=exchange if isinstance(exchange, tuple) else (exchange,) * model.num_layers,
        recompute=recompute if isinstance(recompute, tuple) else (recompute,) * model.num_layers,
        precision=choices.precision,
        gradient_bucket_bytes=choices.gradient_bucket_bytes,
        overlap_gradients=choices.overlap_gradients,
        gradient_compression=choices.gradient_compression,
        step_mode=choices.step_mode,
        between_edges=choices.between_edges,
        sampled=sampled,
        keep_batches=choices.keep_batches,
        prefetch_batches=choices.prefetch_batches,
        overlap_exchange=choices.overlap_exchange,
        exchange_payload=choices.exchange_payload,
        exchange_precision=choices.exchange_precision,
        exchange_chunk_bytes=choices.exchange_chunk_bytes,
        offload=(choices.offload,) * model.num_layers if isinstance(choices.offload, Offload) else choices.offload,
        offload_min_bytes=choices.offload_min_bytes,
        offload_optimizer=choices.offload_optimizer,
    )


def plan_file_of(
    plan: Plan, graph: GraphSpec, model: ModelSpec, cluster: ClusterSpec, train: TrainSpec, path: Path
) -> PlanFile:
    """Write and return a plan file whose prediction is a placeholder of a second."""
    file = PlanFile(
        graph=graph,
        model=model,
        cluster=cluster,
        train=train,
        plan=plan,
        prediction=Prediction(
            p10_step_seconds=1.0,
            p50_step_seconds=1.0,
            p90_step_seconds=1.0,
            epoch_seconds=1.0,
            peak_memory_bytes=peak_memory(plan, graph, model, cluster),
        ),
        ranking=(),
        rejected=(),
        calibration_sha256="",
    )
    write_plan(path, file)
    return file
