"""Specs in words: what was trained, on what, and how."""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import PurePath

from simulator.specs.cluster import ClusterSpec
from simulator.specs.gradients import CompressionKind
from simulator.specs.graph import DEGREE_QUANTILES, GraphSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.order import NodeOrder
from simulator.specs.plan import ExchangePayload, Offload, Plan
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dimension, format_quantity


def seconds_text(seconds: float) -> str:
    """Return a duration with its unit, such as "12.3 ms"; from two minutes on in minutes or hours."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return format_quantity(seconds, Dimension.SECONDS)


def bytes_text(num_bytes: float) -> str:
    """Return a size with its unit, such as "1.5 GiB"."""
    return format_quantity(num_bytes, Dimension.BYTES)


def error_text(error_ratio: float | None) -> str:
    """Return an error in percent with its sign; a dash where it is not defined."""
    return "-" if error_ratio is None else f"{error_ratio:+.1%}"


def plural(count: int, noun: str) -> str:
    """Return a count and its noun, such as "2 ranks"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def graph_name(graph: GraphSpec) -> str:
    """Return the last part of the path of a graph's store, without the ending of its file."""
    return PurePath(graph.source.path).name.removesuffix(".npz") or graph.source.path


def graph_words(graph: GraphSpec) -> str:
    """Return a graph's size and degrees."""
    median_degree = graph.in_degree_quantiles[DEGREE_QUANTILES.index(0.5)]
    features = "sparse features" if graph.has_sparse_features else "features"
    return (
        f"{graph.source.path}: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges (incoming: median "
        f"{median_degree:,g}, largest {graph.in_degree_quantiles[-1]:,g}), {graph.num_features:,} {features}, "
        f"{graph.num_classes:,} classes, {graph.num_train_nodes:,} training nodes"
    )


def model_words(model: ModelSpec) -> str:
    """Return a model's sizes and options."""
    words = [
        f"{plural(model.num_layers, 'layer')} of width {model.width}",
        f"{plural(model.num_heads, 'head')} of {model.head_size}",
        f"feed-forward width {model.feed_forward_width}",
    ]
    if model.dropout_ratio:
        words.append(f"dropout {model.dropout_ratio:g}")
    if model.edge_bias is not EdgeBias.NONE:
        words.append(f"edge bias by {model.edge_bias}")
    if model.laplacian_encodings:
        words.append(f"{model.laplacian_encodings} Laplacian encodings")
    if model.random_walk_encodings:
        words.append(f"{model.random_walk_encodings} random-walk encodings")
    return ", ".join(words)


def cluster_words(cluster: ClusterSpec) -> str:
    """Return a cluster's hosts, devices and links."""
    words = [
        f"{cluster.name}: {plural(cluster.num_hosts, 'host')} with {cluster.devices_per_host} x {cluster.device.name}, "
        f"{bytes_text(cluster.device.memory_bytes)} each",
    ]
    links = [("inside a host", cluster.device_link, cluster.devices_per_host > 1)]
    links.append(("between hosts", cluster.host_link, cluster.num_hosts > 1))
    for place, link, is_used in links:
        if is_used:
            rate = format_quantity(link.bandwidth_bytes_per_second, Dimension.BYTES_PER_SECOND)
            words.append(f"{rate} and {format_quantity(link.latency_seconds, Dimension.SECONDS)} {place}")
    if cluster.network is not None and cluster.num_hosts > 1:
        switches = f"leaf switches: {cluster.num_leaves}, oversubscribed {cluster.network.oversubscription:g} to 1"
        words.append(switches + ", by rail" * cluster.network.rails)
    return "; ".join([*words, *fault_words(cluster)])


def fault_words(cluster: ClusterSpec) -> list[str]:
    """Return what of a cluster is slow or lost."""
    words = [f"device {each.device} takes {each.slowdown:g} times as long" for each in cluster.stragglers]
    for fault in cluster.link_faults:
        place = "" if fault.host is None else f" of host {fault.host}"
        rate = fault.bandwidth_bytes_per_second
        left = (
            f"{fault.bandwidth_ratio:g} of its rate"
            if rate is None
            else format_quantity(rate, Dimension.BYTES_PER_SECOND)
        )
        words.append(f"link from {fault.ends[0]} to {fault.ends[1]}{place}: {left}")
    return words + [f"jitter {cluster.jitter:g}"] * (cluster.jitter > 0)


def train_words(train: TrainSpec) -> str:
    """Return the length of the training and the optimizer's settings."""
    return (
        f"{plural(train.num_steps, 'step')}, learning rate {train.learning_rate:g} after "
        f"{plural(train.warmup_steps, 'warm-up step')}, weight decay {train.weight_decay:g}, seed {train.seed}"
    )


def plan_words(plan: Plan) -> str:
    """Return all choices of a plan."""
    partition = plan.partition
    words = [
        f"{plural(plan.num_ranks, 'rank')}: {plural(plan.data_parallel_degree, 'replica')} of "
        f"{plural(plan.num_replica_ranks, 'rank')}",
    ]
    if plan.tensor_parallel_degree > 1:
        words.append(f"heads and feed-forward columns shared by {plan.tensor_parallel_degree} ranks with the same rows")
    if plan.pipeline_parallel_degree > 1:
        words.append(
            f"layers in {plan.num_stages} stages of {', '.join(map(str, plan.stages))} on "
            f"{plan.pipeline_parallel_degree} ranks ({plan.pipeline_schedule})"
        )
    if plan.num_micro_batches > 1:
        words.append(f"{plan.num_micro_batches} micro-batches a step, each of:")
    if plan.shares_out:
        words.append(f"parameters, gradients and optimizer state shared out ({plan.shard_parameters})")
    if plan.is_full_graph:
        words.append("the full graph in each step")
    elif plan.sampled is not None:
        fan_outs = " and ".join(map(str, plan.sampled.fan_outs))
        words.append(
            f"up to {plan.sampled.seeds_per_batch:,} nodes to train on for each replica in a step, with up to "
            f"{fan_outs} sampled neighbours, layer by layer"
        )
    else:
        without = "" if plan.between_edges else " without the edges between them"
        words.append(f"{plan.parts_per_batch} of {partition.num_parts} parts{without} for each replica in a step")
    if plan.loads_batches:
        ahead = f"at most {plan.prefetch_batches:,} ahead of it" if plan.prefetch_batches else "in it"
        words.append(f"each batch made {ahead}")
    if partition.num_parts > 1:
        words.append(
            f"{plural(partition.num_parts, 'part')} by {partition.method} ({partition.num_cut_edges:,} edges cut, "
            f"halo {partition.halo_ratio:.0%} of the nodes, largest part {partition.edge_imbalance:.2f} x the mean "
            "in edges)"
        )
    if plan.partition.shares is not None:
        words.append(f"parts served by {', '.join(map(str, plan.part_ranks))} ranks, each with heads of its own")
    if plan.order.kind is not NodeOrder.NATURAL:
        words.append(f"node order {plan.order.kind.replace('_', '-')}")
    words.append(f"exchange {_by_layer(plan.exchange)}{_exchange_choices(plan)}")
    words.append(f"recompute {_by_layer(plan.recompute)}")
    if Offload.ACTIVATIONS in plan.offload:
        words.append(f"activations on the host {_by_layer(plan.offload)}")
    if plan.offload_optimizer:
        words.append("optimizer on the host")
    words.append(f"{plan.precision}")
    beside = ", reduced beside the backward pass" if plan.overlap_gradients else ""
    compression = plan.gradient_compression
    sent = f", sent as {compression}" if compression.kind is not CompressionKind.NONE else ""
    words.append(f"gradients in buckets of {bytes_text(plan.gradient_bucket_bytes)}{beside}{sent}")
    return "; ".join(words)


def _exchange_choices(plan: Plan) -> str:
    """Return how rows travel, where a plan says so."""
    words = ""
    if plan.exchange_payload is ExchangePayload.ROWS:
        words += ", normed rows travel"
    if plan.overlap_exchange:
        words += ", overlapped with attention over own rows"
    if plan.exchange_precision is not None:
        words += f", in {plan.exchange_precision}"
    if plan.exchange_chunk_bytes is not None:
        words += f", at most {bytes_text(plan.exchange_chunk_bytes)} a message"
    return words


def _by_layer(choices: Sequence[StrEnum]) -> str:
    """Return the choices of the layers, in a word if all are the same."""
    counts = Counter(choice.value.replace("_", "-") for choice in choices)
    if len(counts) == 1:
        return f"{next(iter(counts))} in every layer"
    return ", ".join(f"{choice} in {plural(count, 'layer')}" for choice, count in counts.items())
