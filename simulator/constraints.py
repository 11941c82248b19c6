"""Why a plan cannot run here, in sentences."""

from simulator.exchanges import rank_heads, rows_per_message, wire_dtype
from simulator.fabric import fabric_of
from simulator.gradients import MAX_TOP_K_ELEMENTS, buckets_of, is_factorised
from simulator.recompute import RECOMPUTED
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.gradients import CompressionKind
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import (
    ROW_EXCHANGES,
    Exchange,
    ExchangePayload,
    Offload,
    PipelineSchedule,
    Plan,
    Recompute,
    StepMode,
)
from simulator.specs.train import TrainSpec
from simulator.workload import rank_parameter_shapes

_ALONE = "data_parallel_degree and graph_parallel_degree are 1"


def violations(plan: Plan, graph: GraphSpec, model: ModelSpec, cluster: ClusterSpec) -> list[str]:
    """Say why `plan` cannot train `model` on `graph` here, one sentence a reason; empty if it can.

    Memory is not judged here but by `simulator/memory.py`.
    """
    mesh = [*_mesh_violations(plan, graph, cluster), *_tensor_violations(plan, model)]
    if not tensor_degree_fits(plan.tensor_parallel_degree, model):
        return mesh  # how many heads a rank has is not known
    if stages := _stage_violations(plan, model):
        return [*mesh, *stages]  # which parameters a rank has is not known
    return [
        *mesh,
        *_pipeline_violations(plan),
        *_sharing_violations(plan, model),
        *_batch_violations(plan),
        *_sample_violations(plan, model),
        *_loading_violations(plan),
        *_layer_violations(plan, model),
        *_exchange_violations(plan, model),
        *_host_violations(plan, cluster),
        *_share_violations(plan, model),
        *_link_violations(plan, cluster),
        *_step_violations(plan, cluster),
        *_gradient_violations(plan, graph, model),
        *_offload_violations(plan),
    ]


def training_violations(plan: Plan, train: TrainSpec, cluster: ClusterSpec) -> list[str]:
    """Say why `plan` cannot be trained with these settings here, one sentence a reason; empty if it can."""
    found = []
    if train.compile_dense and cluster.device.kind is not DeviceKind.CUDA:
        found.append(f"train.compile_dense must be false on devices of kind {cluster.device.kind}: it is for cuda")
    if train.compile_dense and plan.tensor_parallel_degree > 1:
        found.append(
            f"train.compile_dense must be false when {plan.tensor_parallel_degree=}: between the dense operations of a "
            "layer its ranks sum, and each piece would be compiled for itself"
        )
    if train.compile_dense and plan.shares_out:
        found.append(
            f"train.compile_dense must be false when shard_parameters is {plan.shard_parameters}: the weights of a "
            "layer come and go"
        )
    if train.compile_dense and not plan.is_full_graph:
        found.append(
            "train.compile_dense must be false when batches are clusters or sampled: their shapes differ, and each "
            "would be compiled for itself"
        )
    if train.compile_dense and any(RECOMPUTED.get(kind) for kind in plan.recompute):
        kinds = ", ".join(sorted({kind.value for kind in plan.recompute if RECOMPUTED.get(kind)}))
        found.append(
            f"train.compile_dense must be false when recompute is {kinds}: compiled parts choose for themselves what "
            "they compute again; use none or layer"
        )
    if train.compile_dense and Offload.ACTIVATIONS in plan.offload:
        found.append(
            "train.compile_dense must be false when offload is activations: compiled parts keep what they save apart"
        )
    return found


def _mesh_violations(plan: Plan, graph: GraphSpec, cluster: ClusterSpec) -> list[str]:
    found = []
    if plan.num_ranks > cluster.num_devices:
        found.append(
            f"{plan.num_ranks=} must not exceed {cluster.num_devices=}: lower data_parallel_degree, "
            "graph_parallel_degree, tensor_parallel_degree or pipeline_parallel_degree"
        )
    num_nodes = sum(part.num_nodes for part in plan.partition.parts)
    if num_nodes != graph.num_nodes:
        found.append(f"the parts of the plan own {num_nodes} nodes, but {graph.num_nodes=}: partition this graph again")
    num_edges = sum(part.num_edges for part in plan.partition.parts)
    if num_edges != graph.num_edges:
        found.append(
            f"the parts of the plan hold {num_edges} edges, but {graph.num_edges=}: partition this graph again"
        )
    return found


def tensor_degree_fits(degree: int, model: ModelSpec) -> bool:
    """Return whether so many ranks can share the heads and feed-forward columns of a model evenly."""
    return model.num_heads % degree == 0 and model.feed_forward_width % degree == 0


def _tensor_violations(plan: Plan, model: ModelSpec) -> list[str]:
    degree = plan.tensor_parallel_degree
    fitting = [str(other) for other in range(1, model.num_heads + 1) if tensor_degree_fits(other, model)]
    found = [
        f"tensor_parallel_degree = {degree} must divide {name} = {count}, which the ranks share evenly: use "
        f"{' or '.join(filter(None, (', '.join(fitting[:-1]), fitting[-1])))}"
        for name, count in (("num_heads", model.num_heads), ("feed_forward_width", model.feed_forward_width))
        if count % degree
    ]
    if degree > 1 and Exchange.HIERARCHICAL_HALO in plan.exchange:
        found.append(
            f"tensor_parallel_degree must be 1 with {Exchange.HIERARCHICAL_HALO}, got {degree}: its ranks of a host "
            "follow one another, and those of a graph group do not; use halo"
        )
    return found


def _stage_violations(plan: Plan, model: ModelSpec) -> list[str]:
    """Say why the layers of a model cannot be cut into stages as a plan asks."""
    degree, stages = plan.pipeline_parallel_degree, plan.stages
    if degree == 1:
        if stages:
            return [f"stages must be left out when {plan.pipeline_parallel_degree=}, got {stages}: all layers are one"]
        return []
    if degree > model.num_layers:
        return [
            f"{plan.pipeline_parallel_degree=} must not exceed {model.num_layers=}: a stage has a layer at least; use "
            "graph_parallel_degree or data_parallel_degree"
        ]
    found = []
    if not stages or len(stages) % degree:
        found.append(
            f"stages must hold as many numbers for each of {plan.pipeline_parallel_degree=}, got {len(stages)}: give "
            f"the layers of {degree} stages, or of several times as many"
        )
    if sum(stages) != model.num_layers:
        found.append(f"stages must add up to {model.num_layers=}, got {sum(stages)} layers in {stages}")
    is_interleaved = plan.pipeline_schedule is PipelineSchedule.INTERLEAVED
    if not found and is_interleaved != (len(stages) > degree):
        found.append(
            f"pipeline_schedule must be {PipelineSchedule.INTERLEAVED} just where ranks have several stages, got "
            f"{plan.pipeline_schedule} with {len(stages)} stages on {degree} ranks"
        )
    return found


def _pipeline_violations(plan: Plan) -> list[str]:
    """Say which choices do not go with stages or micro-batches, or would have no effect."""
    found, degree, batches = [], plan.pipeline_parallel_degree, plan.num_micro_batches
    if degree == 1 and plan.pipeline_schedule is not PipelineSchedule.ONE_F_ONE_B:
        found.append(
            f"pipeline_schedule must be left out when {plan.pipeline_parallel_degree=}, got {plan.pipeline_schedule}: "
            "there is one stage"
        )
    if plan.pipeline_schedule is PipelineSchedule.INTERLEAVED and batches % degree:
        found.append(
            f"{plan.num_micro_batches=} must be a multiple of {plan.pipeline_parallel_degree=} with "
            f"{plan.pipeline_schedule}, whose stages take turns of as many: use {-(-batches // degree) * degree} or "
            f"{PipelineSchedule.ONE_F_ONE_B}"
        )
    if plan.is_full_graph and batches > 1:
        found.append(
            f"{plan.num_micro_batches=} must be 1 when parts_per_batch takes all {plan.partition.num_parts} parts: "
            "each micro-batch would repeat the same work; cut the graph into more parts"
        )
    if not plan.cuts_steps:
        return found
    field = f"pipeline_parallel_degree = {degree} and num_micro_batches = {batches}"
    if plan.shares_out:
        found.append(
            f"shard_parameters must be none with {field}, got {plan.shard_parameters}: a layer would be gathered for "
            "each micro-batch; a pipeline shares layers out already"
        )
    if plan.overlap_gradients:
        found.append(
            f"overlap_gradients must be false with {field}: gradients of all micro-batches are added up before they "
            "are reduced"
        )
    if plan.offload_optimizer or Offload.ACTIVATIONS in plan.offload:
        found.append(
            f"offload and offload_optimizer must be left out with {field}: what several passes keep would share the "
            "copies of one; recompute layers, or use more stages"
        )
    if plan.step_mode is not StepMode.EAGER:
        found.append(f"step_mode must be eager with {field}, got {plan.step_mode}: a step is several passes")
    if degree > 1 and Exchange.HIERARCHICAL_HALO in plan.exchange:
        found.append(
            f"{plan.pipeline_parallel_degree=} must be 1 with {Exchange.HIERARCHICAL_HALO}: its ranks of a host are "
            "those of one stage; use halo"
        )
    return found


def _sharing_violations(plan: Plan, model: ModelSpec) -> list[str]:
    """Say why parameters cannot be shared out as a plan asks, or which of its choices would have no effect then."""
    if not plan.shares_out:
        return []
    found, field = [], f"shard_parameters is {plan.shard_parameters}"
    if plan.num_row_ranks == 1:
        return [
            f"shard_parameters must be none when {_ALONE}, got {plan.shard_parameters}: there is no rank to share with"
        ]
    if model.width % plan.num_row_ranks:
        found.append(
            f"data_parallel_degree * graph_parallel_degree = {plan.num_row_ranks} must divide {model.width=} when "
            f"{field}: ranks share columns evenly; use another number of ranks, or none"
        )
    if plan.overlap_gradients:
        found.append(f"overlap_gradients must be false when {field}: gradients are summed layer by layer anyway")
    if plan.gradient_compression.kind is not CompressionKind.NONE:
        found.append(
            f"gradient_compression must be none when {field}, got {plan.gradient_compression}: each rank gets the sum "
            "of its share"
        )
    if plan.step_mode is not StepMode.EAGER:
        found.append(
            f"step_mode must be eager when {field}, got {plan.step_mode}: memory of parameters is given up and taken "
            "again in each step"
        )
    return found


def _batch_violations(plan: Plan) -> list[str]:
    found = []
    has_shares = plan.partition.shares is not None
    if plan.graph_parallel_degree > 1 and not has_shares and plan.parts_per_batch != plan.graph_parallel_degree:
        found.append(
            f"{plan.parts_per_batch=} must equal {plan.graph_parallel_degree=}: each rank of a graph group trains on "
            "one part"
        )
    if plan.is_full_graph and plan.data_parallel_degree > 1:
        found.append(
            f"{plan.data_parallel_degree=} must be 1 when parts_per_batch takes all {plan.partition.num_parts} parts: "
            "replicas would repeat the same work; use graph_parallel_degree or more parts"
        )
    if not plan.between_edges and plan.parts_per_batch == 1:
        found.append("between_edges must be true when plan.parts_per_batch=1: no edges join the parts of such batches")
    if not plan.between_edges and plan.graph_parallel_degree > 1:
        found.append(
            f"between_edges must be true when {plan.graph_parallel_degree=}: without them the ranks of a graph group "
            "have nothing to exchange; use data_parallel_degree"
        )
    parts_per_step = plan.parts_per_batch * plan.data_parallel_degree * plan.num_micro_batches
    if plan.sampled is None and parts_per_step > plan.partition.num_parts:
        batches = " * num_micro_batches" if plan.num_micro_batches > 1 else ""
        found.append(
            f"data_parallel_degree * parts_per_batch{batches} = {parts_per_step} must not exceed "
            f"{plan.partition.num_parts=}: cut the graph into more parts"
        )
    return found


def _sample_violations(plan: Plan, model: ModelSpec) -> list[str]:
    if plan.sampled is None:
        return []
    found = []
    if len(plan.sampled.fan_outs) != model.num_layers:
        found.append(
            f"sampled.fan_outs has {len(plan.sampled.fan_outs)} entries, but {model.num_layers=}: give one for each "
            "layer"
        )
    if plan.graph_parallel_degree > 1:
        found.append(
            f"{plan.graph_parallel_degree=} must be 1 when batches are sampled: a rank samples its neighbourhoods from "
            "the whole graph and trains on them alone; use data_parallel_degree"
        )
    if plan.parts_per_batch != plan.partition.num_parts:
        found.append(
            f"{plan.parts_per_batch=} must equal {plan.partition.num_parts=} when batches are sampled: their nodes are "
            "of all parts"
        )
    if not plan.between_edges:
        found.append("between_edges must be true when batches are sampled, got false: their nodes are of all parts")
    return found


def _loading_violations(plan: Plan) -> list[str]:
    found = []
    if plan.keep_batches and (plan.is_full_graph or plan.sampled is not None or plan.parts_per_batch > 1):
        found.append(
            "keep_batches must be false unless batches are clusters of one part: others do not come again, and the "
            "full graph is kept anyway"
        )
    if plan.prefetch_batches > 0 and not plan.loads_batches:
        found.append(f"{plan.prefetch_batches=} must be 0 when batches are kept: none is made in a step")
    return found


def _layer_violations(plan: Plan, model: ModelSpec) -> list[str]:
    found = []
    if len(plan.exchange) != model.num_layers:
        found.append(f"exchange has {len(plan.exchange)} entries, but {model.num_layers=}: give one for each layer")
    several = plan.graph_parallel_degree > 1
    for index, exchange in enumerate(plan.exchange):
        if several and exchange is Exchange.NONE:
            found.append(
                f"exchange[{index}] must not be none when {plan.graph_parallel_degree=}: use halo, all_gather or "
                "head_all_to_all"
            )
        if not several and exchange is not Exchange.NONE:
            found.append(f"exchange[{index}] must be none when {plan.graph_parallel_degree=}, got {exchange}")
    return found


def _gradient_violations(plan: Plan, graph: GraphSpec, model: ModelSpec) -> list[str]:
    found = []
    compression = plan.gradient_compression
    if plan.num_row_ranks == 1 and plan.overlap_gradients:
        found.append(f"overlap_gradients must be false when {_ALONE}: nothing is reduced")
    if plan.num_row_ranks == 1 and compression.kind is not CompressionKind.NONE:
        found.append(f"gradient_compression must be none when {_ALONE}, got {compression}: nothing is sent")
    if plan.overlap_gradients and plan.step_mode is not StepMode.EAGER:
        found.append(
            f"overlap_gradients must be false when step_mode is {plan.step_mode}: there all weights are cast at once, "
            "so that all their gradients come at once"
        )
    if plan.overlap_gradients and has_ranks_without_heads(plan, model):
        found.append(
            f"overlap_gradients must be false when head_all_to_all leaves ranks without heads "
            f"(graph_parallel_degree = {plan.graph_parallel_degree}, num_heads = {rank_heads(plan, model)}): they have "
            "fewer tasks, and would begin buckets in another place"
        )
    if plan.num_row_ranks == 1 or plan.shares_out:
        return found
    buckets = [
        bucket
        for rank in plan.mesh.group(("pp",), 0)
        for bucket in buckets_of(rank_parameter_shapes(plan, graph, model, rank), plan.gradient_bucket_bytes)
    ]
    largest = max(bucket.num_elements for bucket in buckets)
    if compression.kind is CompressionKind.TOP_K and largest > MAX_TOP_K_ELEMENTS:
        found.append(
            f"gradient_bucket_bytes must give buckets of at most {MAX_TOP_K_ELEMENTS} numbers with top_k, whose "
            f"indices are int32, got one of {largest}"
        )
    shapes = [shape for bucket in buckets for _, shape in bucket.parameters]
    matrix_rank = compression.matrix_rank
    if compression.kind is CompressionKind.POWER_SGD and not any(is_factorised(shape, matrix_rank) for shape in shapes):
        found.append(
            f"gradient_compression.matrix_rank must make the factors of some parameter smaller than the parameter, got "
            f"{matrix_rank}: lower it, or send gradients as they are"
        )
    return found


def _offload_violations(plan: Plan) -> list[str]:
    """Say why what a plan keeps on the host cannot lie there."""
    found = []
    for index, (offload, recompute) in enumerate(zip(plan.offload, plan.recompute, strict=False)):
        if offload is Offload.ACTIVATIONS and recompute is Recompute.LAYER:
            found.append(
                f"offload[{index}] must be none when recompute[{index}] is layer: only the layer's input is kept, "
                "which stays; use attention or dense"
            )
    for field, is_asked in (
        ("offload", Offload.ACTIVATIONS in plan.offload),
        ("offload_optimizer", plan.offload_optimizer),
    ):
        if is_asked and plan.step_mode is not StepMode.EAGER:
            found.append(
                f"{field} must be left out when step_mode is {plan.step_mode}: replayed steps do not wait for the "
                "host; use eager"
            )
    shares = []
    if plan.tensor_parallel_degree > 1:
        shares.append(f"tensor_parallel_degree is {plan.tensor_parallel_degree}")
    if plan.shares_out:
        shares.append(f"shard_parameters is {plan.shard_parameters}")
    for field in shares:
        if plan.offload_optimizer:
            found.append(
                f"offload_optimizer must be left out when {field}: ranks join shares of the optimizer's state for "
                "checkpoints, which they do on their devices"
            )
    return found


def _exchange_violations(plan: Plan, model: ModelSpec) -> list[str]:
    """Say which choices of how rows travel no layer of the plan would follow, or none can."""
    found = []
    if not ROW_EXCHANGES.intersection(plan.exchange):
        where = f"when no layer exchanges by {' or '.join(sorted(ROW_EXCHANGES))}"
        if plan.overlap_exchange:
            found.append(f"overlap_exchange must be false {where}: attention by heads needs all rows before it begins")
        if plan.exchange_payload is not ExchangePayload.KEYS_AND_VALUES:
            found.append(f"exchange_payload must be keys_and_values {where}, got {plan.exchange_payload}")
    if plan.exchange_precision is not None and wire_dtype(plan).num_bytes >= plan.precision.num_bytes:
        found.append(
            f"exchange_precision must be shorter than {plan.precision=!s} or left out, got {plan.exchange_precision}"
        )
    exchanges = sorted({exchange for exchange in plan.exchange if exchange is not Exchange.NONE})
    if not exchanges:
        for field in ("exchange_precision", "exchange_chunk_bytes"):
            if getattr(plan, field) is not None:
                found.append(f"{field} must be left out when no layer exchanges, got {getattr(plan, field)}")
    for exchange in exchanges:
        if rows_per_message(plan, model, exchange) == 0:
            found.append(
                f"exchange_chunk_bytes must hold a row for each other rank in {exchange}, got "
                f"{plan.exchange_chunk_bytes}: raise it or leave it out"
            )
    return found


def _host_violations(plan: Plan, cluster: ClusterSpec) -> list[str]:
    """Say why a hierarchical exchange cannot run on the hosts of a cluster."""
    if Exchange.HIERARCHICAL_HALO not in plan.exchange:
        return []
    name, per_host, hosts = Exchange.HIERARCHICAL_HALO, cluster.devices_per_host, plan.partition.hosts
    found = []
    if plan.num_ranks <= per_host:
        found.append(
            f"exchange must not be {name} when all {plan.num_ranks} ranks sit on one host of {per_host} devices: use "
            "halo"
        )
    if not plan.is_full_graph:
        found.append(
            f"{plan.parts_per_batch=} must be all {plan.partition.num_parts} parts with {name}: what a host needs "
            "depends on the parts that meet there; use halo"
        )
    if hosts is None:
        found.append(f"partition.hosts must count the rows of hosts with {name}, got none: plan again")
    elif hosts.ranks_per_host != per_host:
        found.append(
            f"partition.hosts.ranks_per_host must equal devices_per_host = {per_host} of the cluster, got "
            f"{hosts.ranks_per_host}: plan again for this cluster"
        )
    if plan.exchange_chunk_bytes is not None:
        found.append(
            f"exchange_chunk_bytes must be left out with {name}, got {plan.exchange_chunk_bytes}: it sends no chunks; "
            "use halo where buffers would not fit"
        )
    return found


def _share_violations(plan: Plan, model: ModelSpec) -> list[str]:
    """Say why parts cannot be served by as many ranks as a plan gives them."""
    shares = plan.partition.shares
    if shares is None:
        return []
    found, where = [], f"partition.shares gives parts {shares.part_ranks} ranks"
    if shares.num_ranks != plan.graph_parallel_degree:
        found.append(
            f"{plan.graph_parallel_degree=} must be {shares.num_ranks} when {where}: give each part its ranks, or plan "
            "again"
        )
    if not plan.is_full_graph:
        found.append(
            f"{plan.parts_per_batch=} must be all {plan.partition.num_parts} parts when {where}, and batches must not "
            "be sampled: which part of a batch has most work differs from step to step"
        )
    if max(shares.part_ranks) == 1:
        found.append(f"partition.shares must be left out when {where}: no part has several")
    for part, count in enumerate(shares.part_ranks):
        if count > model.num_heads:
            found.append(
                f"part {part} has {count} ranks, which must not exceed {model.num_heads=}: each attends with heads of "
                "its own"
            )
    if plan.tensor_parallel_degree > 1:
        found.append(
            f"{plan.tensor_parallel_degree=} must be 1 when {where}: heads are shared out part by part; use one of both"
        )
    if plan.pipeline_parallel_degree > 1:
        found.append(
            f"{plan.pipeline_parallel_degree=} must be 1 when {where}: the ranks of a part hold all layers; use one of "
            "both"
        )
    for index, exchange in enumerate(plan.exchange):
        if exchange is not Exchange.HALO:
            found.append(f"exchange[{index}] must be halo when {where}, got {exchange}")
    if plan.overlap_exchange:
        found.append(f"overlap_exchange must be false when {where}: attention begins once rows of all its ranks came")
    if plan.exchange_payload is not ExchangePayload.KEYS_AND_VALUES:
        found.append(
            f"exchange_payload must be keys_and_values when {where}, got {plan.exchange_payload}: rows would travel "
            "with all heads"
        )
    for field in ("exchange_precision", "exchange_chunk_bytes"):
        if getattr(plan, field) is not None:
            found.append(
                f"{field} must be left out when {where}, got {getattr(plan, field)}: keys and values travel at once, "
                "as they are"
            )
    if others := sorted(set(plan.recompute) - {Recompute.NONE, Recompute.LAYER}):
        found.append(f"recompute must be none or layer when {where}, got {', '.join(others)}")
    return found


def _link_violations(plan: Plan, cluster: ClusterSpec) -> list[str]:
    """Say between which ranks of a plan no link is left."""
    pair = fabric_of(cluster).missing_pair(tuple(range(min(plan.num_ranks, cluster.num_devices))))
    if pair is None:
        return []
    return [
        f"link_faults leave no way from rank {pair[0]} to rank {pair[1]}: train on fewer ranks, or mend a link of host "
        f"{cluster.host_of(pair[0])}"
    ]


def has_ranks_without_heads(plan: Plan, model: ModelSpec) -> bool:
    """Return whether an exchange of heads leaves some ranks of a graph group without any."""
    return Exchange.HEAD_ALL_TO_ALL in plan.exchange and plan.graph_parallel_degree > rank_heads(plan, model)


def step_mode_of(*, num_ranks: int, is_full_graph: bool, cluster: ClusterSpec) -> StepMode:
    """Return how a search launches the steps of a plan.

    A replay repeats shapes and addresses, so batches must not change. Steps of several ranks may be replayed with their
    collectives, where a plan asks for it; then gradients are not reduced beside the backward pass.
    """
    fits = num_ranks == 1 and is_full_graph and cluster.device.kind is DeviceKind.CUDA
    return StepMode.CUDA_GRAPH if fits else StepMode.EAGER


def _step_violations(plan: Plan, cluster: ClusterSpec) -> list[str]:
    if plan.step_mode is StepMode.EAGER:
        return []
    found = []
    if cluster.device.kind is not DeviceKind.CUDA:
        found.append(f"step_mode must be eager on devices of kind {cluster.device.kind}, got {plan.step_mode}")
    if not plan.is_full_graph:
        found.append(
            f"step_mode must be eager when {plan.parts_per_batch=} of {plan.partition.num_parts=}, got "
            f"{plan.step_mode}: the shapes of batches differ"
            if plan.sampled is None
            else f"step_mode must be eager when batches are sampled, got {plan.step_mode}: their shapes differ"
        )
    return found
