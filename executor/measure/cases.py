"""Tasks to time: each kind on random inputs, forward and backward, as a step runs it."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor import compression, operations
from executor.attention.graph import EdgeGraph
from executor.attention.parts import Attended, merge_into
from executor.clipping import clip_flat_gradient_, scale_, sum_of_squares
from executor.compat import making_sparse_csr
from executor.compression import Factors
from executor.exchange import ExchangeLayout, RowExchange, exchange_rows
from executor.measure.batches import build_batch_case
from executor.measure.case import TASK_NAME, Case
from executor.measure.graphs import beyond_cache_ratio_of_edges
from executor.offload import HostMemory
from executor.operations import Operation, SparseFeatures
from executor.record import Recorder
from executor.train import TORCH_DTYPES
from simulator.costs import task_bytes
from simulator.specs.plan import Exchange
from simulator.specs.program import COMPRESSIONS, Phase, TaskKind
from simulator.specs.units import MIB, Dtype

# Between the writing of an activation and its use in the backward pass, and between two steps, a model of two or three
# layers touches about this many tensors of the size of one task's; a task that is run again at once finds its data in
# caches, which made step times up to 1.8 times as long as the sum of their tasks on a CPU.
STEP_TENSORS = 32
# Twice the last-level cache: 32 MiB of an AMD EPYC's core complex, 60 MB of an H200.
MAX_EVICTED_BYTES = {"cpu": 64 * MIB, "cuda": 128 * MIB}


def build_case(
    kind: TaskKind, shape: tuple[int, ...], dtype: Dtype, device: torch.device, group: dist.ProcessGroup | None
) -> Case:
    """Return a runnable case of a shape on random inputs; packing needs a group, attention `build_attention_case`."""
    make = _Inputs(TORCH_DTYPES[dtype], device, int(task_bytes(kind, Phase.FORWARD, shape, dtype)))
    match kind:
        case TaskKind.LINEAR | TaskKind.INPUT_LINEAR:
            rows, columns_in, columns_out = shape
            weight, bias = make.parameter(columns_out, columns_in), make.parameter(columns_out)
            if kind is TaskKind.INPUT_LINEAR:
                run = _leaf_runner(make, operations.INPUT_LINEAR, make.rows(rows, columns_in), weight, bias)
            else:
                run = _runner(make, operations.LINEAR, make.rows(rows, columns_in), weight, bias)
        case TaskKind.SPARSE_LINEAR:
            rows, entries, columns_in, columns_out = shape
            features = make.sparse(rows, entries, columns_in)
            weight = make.parameter(columns_in, columns_out)
            run = _leaf_runner(make, operations.SPARSE_LINEAR, features, weight, make.dtype)
        case TaskKind.PROJECTION:
            rows, columns_in, columns_out = shape
            run = _runner(
                make, operations.PROJECTION, make.rows(rows, columns_in), make.parameter(columns_out, columns_in)
            )
        case TaskKind.LAYER_NORM:
            columns = shape[1]
            # In a layer the norm's input is also the residual, so its gradient meets another one.
            run = _runner(
                make,
                operations.LAYER_NORM,
                make.rows(*shape),
                make.parameter(columns),
                make.parameter(columns),
                forked=True,
            )
        case TaskKind.GELU:
            run = _runner(make, operations.GELU, make.rows(*shape))
        case TaskKind.DROPOUT:
            run = _runner(make, operations.DROPOUT, make.rows(*shape), torch.arange(shape[0], device=device), 0.5, 7)
        case TaskKind.BIAS:
            run = _runner(make, operations.BIAS, make.rows(*shape), make.parameter(shape[1]))
        case TaskKind.RESIDUAL:
            run = _runner(make, operations.RESIDUAL, make.rows(*shape), make.rows(*shape))
        case TaskKind.COPY_ROWS:
            run = _runner(make, operations.CAST, make.rows(*shape))
        case TaskKind.MERGE:
            run = _merge_runner(make, shape)
        case TaskKind.HALO_PACK | TaskKind.PAD_ROWS:
            return _pack_case(kind, shape, dtype, make, group)
        case TaskKind.EDGE_BIAS:
            edges, heads = shape
            bucket_E = torch.randint(0, 16, (edges,), device=device, generator=make.generator)
            run = _leaf_runner(make, operations.EDGE_BIAS, make.parameter(16, heads), bucket_E)
        case TaskKind.LOSS:
            rows, labelled, columns = shape
            row_T = torch.randperm(rows, device=device, generator=make.generator)[:labelled].sort().values
            label_T = torch.randint(0, columns, (labelled,), device=device, generator=make.generator)
            run = _runner(make, operations.LOSS, make.rows(rows, columns), row_T, label_T, labelled)
        case TaskKind.TARGET_ROWS:
            rows, kept, columns = shape
            run = _runner(make, operations.TARGET_ROWS, make.rows(rows, columns), make.rows(rows, columns), kept)
        case TaskKind.CLUSTER_BATCH | TaskKind.SAMPLED_BATCH:
            return build_batch_case(kind, shape, dtype, device)
        case TaskKind.SHARD_COPY:
            run = _shard_copy_runner(shape, make)
        case TaskKind.CLIP | TaskKind.GRADIENT_NORM | TaskKind.GRADIENT_SCALE | TaskKind.OPTIMIZER:
            run = _update_runner(kind, shape, make)
        case TaskKind.HOST_OPTIMIZER:
            run = _update_runner(kind, shape, _Inputs(torch.float32, torch.device("cpu"), 4 * shape[0]))
        case TaskKind.COPY_TO_HOST | TaskKind.COPY_FROM_HOST:
            run = _copy_runner(kind, shape, make)
        case _ if kind in COMPRESSIONS:
            run = _compression_runner(kind, shape, make)
        case _:
            raise AssertionError(kind)
    return Case(kind=kind, dtype=dtype, shape=shape, run=run)


class _Inputs:
    """Makes random inputs of one number format on one device, and empties caches as a step does.

    Args:
        tensor_bytes: size of the task's largest tensor.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, tensor_bytes: int) -> None:
        self.dtype, self.device = dtype, device
        num_bytes = min(STEP_TENSORS * tensor_bytes, MAX_EVICTED_BYTES[device.type])
        self._evicting = torch.zeros(num_bytes // 4, device=device)
        self.generator = torch.Generator(device).manual_seed(0)

    def evict(self) -> None:
        """Touch as much memory as the rest of a step does between two uses of a tensor."""
        self._evicting.add_(1)

    def rows(self, *shape: int) -> Tensor:
        """Return activations."""
        return torch.randn(*shape, device=self.device, generator=self.generator).to(self.dtype)

    def parameter(self, *shape: int) -> Tensor:
        """Return an fp32 parameter whose gradient lies ready to be added to, as in a step."""
        parameter = torch.randn(*shape, device=self.device, generator=self.generator).requires_grad_()
        parameter.grad = torch.zeros_like(parameter)
        return parameter

    def sparse(self, rows: int, entries: int, columns: int) -> SparseFeatures:
        """Return sparse features with about `entries` entries at random places."""
        flat = torch.randint(0, rows * columns, (entries,), device=self.device, generator=self.generator).unique()
        index = torch.stack([flat // columns, flat % columns])
        values = torch.ones(index.shape[1], device=self.device)
        with making_sparse_csr():
            matrix = torch.sparse_coo_tensor(index, values, (rows, columns), is_coalesced=True)
            return SparseFeatures(rows=matrix.to_sparse_csr(), columns=matrix.t().coalesce().to_sparse_csr())


def _runner(
    make: _Inputs, operation: Operation, x: Tensor, *rest: Any, forked: bool = False
) -> Callable[[Recorder], None]:
    """Return a run of an operation on the result of another node, which bounds its backward pass."""
    leaf = x.requires_grad_()

    def run(recorder: Recorder) -> None:
        leaf.grad = None
        make.evict()
        before = recorder.run("before", _SCALE, leaf)
        result = recorder.run(TASK_NAME, operation, before, *rest)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        roots = [*outputs, before] if forked else outputs
        make.evict()
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    return run


def _merge_runner(make: _Inputs, shape: tuple[int, ...]) -> Callable[[Recorder], None]:
    """Return a run of the merge of attention over two sets of edges, in place; it has no backward pass of its own."""
    rows, merged, *heads = shape
    whole, part = _attended(make, rows, *heads), _attended(make, merged, *heads)

    def run(recorder: Recorder) -> None:
        make.evict()
        with recorder.task(TASK_NAME, TaskKind.MERGE, Phase.FORWARD, shape):
            merge_into(whole, part, rows - merged)

    return run


def _attended(make: _Inputs, rows: int, heads: int, head_size: int) -> Attended:
    """Return what attention gives; of 16 bits, with what makes them exact."""
    out = make.rows(rows, heads, head_size)
    exact = torch.zeros_like(out, dtype=torch.int8) if make.device.type == "cuda" else out.float()
    rest = out.new_empty(0) if make.dtype == torch.float32 else exact
    return Attended(out=out, lse=make.rows(rows, heads).float(), rest=rest)


def _leaf_runner(make: _Inputs, operation: Operation, *arguments: Any) -> Callable[[Recorder], None]:
    """Return a run of an operation whose inputs are data or parameters, so that its backward pass is the last."""

    def run(recorder: Recorder) -> None:
        make.evict()
        result = recorder.run(TASK_NAME, operation, *arguments)
        make.evict()
        torch.autograd.backward([result], [torch.ones_like(result)])

    return run


_SCALE = Operation(
    kind=TaskKind.RESIDUAL, function=lambda x: x * 1.0, shape=lambda x: (x.shape[0], x.shape[1] if x.ndim > 1 else 1)
)


def build_attention_case(
    graph: EdgeGraph, heads: int, head_size: int, dtype: Dtype, device: torch.device, *, cache_bytes: int
) -> Case:
    """Return a runnable attention over a graph on random inputs.

    Args:
        cache_bytes: of the device; 0 where unknown.
    """
    width = heads * head_size
    make = _Inputs(TORCH_DTYPES[dtype], device, dtype.num_bytes * width * (graph.num_edges + graph.num_sources))
    # Made here, as a step makes it once.
    _ = graph.transpose
    q_ND = make.rows(graph.num_targets, width).requires_grad_()
    kv_M2D = make.rows(graph.num_sources, 2 * width).requires_grad_()

    def run(recorder: Recorder) -> None:
        q_ND.grad = kv_M2D.grad = None
        make.evict()
        before_q, before_kv = recorder.run("before", _SCALE, q_ND), kv_M2D * 1.0
        out_ND = recorder.run(TASK_NAME, operations.ATTENTION, before_q, before_kv, None, graph, heads)
        make.evict()
        out_ND.backward(torch.ones_like(out_ND))

    return Case(
        kind=TaskKind.ATTENTION,
        dtype=dtype,
        shape=operations.ATTENTION.shape(q_ND, kv_M2D, None, graph, heads),
        run=run,
        beyond_cache_ratio=beyond_cache_ratio_of_edges(
            graph, row_bytes=2 * width * dtype.num_bytes, cache_bytes=cache_bytes
        ),
    )


def _shard_copy_runner(shape: tuple[int, ...], make: _Inputs) -> Callable[[Recorder], None]:
    """Return a run of the copy of a layer's gathered parameters, about ten tensors, to where they are used."""
    shares, elements = shape
    sizes = [len(chunk) for chunk in torch.empty(elements, device="meta").chunk(10)]
    gathered = torch.zeros(shares, elements, device=make.device)
    out = [torch.empty(shares, size, device=make.device) for size in sizes]

    def run(recorder: Recorder) -> None:
        make.evict()
        with recorder.task(TASK_NAME, TaskKind.SHARD_COPY, Phase.UPDATE, shape):
            torch.split_with_sizes_copy(gathered, sizes, dim=1, out=out)

    return run


def _update_runner(kind: TaskKind, shape: tuple[int, ...], make: _Inputs) -> Callable[[Recorder], None]:
    elements, tensors = shape
    flat = torch.randn(elements, device=make.device, generator=make.generator) * 1e-3
    parameters = [torch.zeros_like(chunk).requires_grad_() for chunk in flat.chunk(tensors)]
    for parameter, chunk in zip(parameters, flat.chunk(tensors), strict=True):
        parameter.grad = chunk
    gradients, weight_T = list(flat.chunk(tensors)), torch.ones(tensors, device=make.device)
    factor = torch.ones((), device=make.device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    def run(recorder: Recorder) -> None:
        make.evict()
        with recorder.task(TASK_NAME, kind, Phase.UPDATE, shape):
            if kind is TaskKind.CLIP:
                clip_flat_gradient_(flat, 1.0)
            elif kind is TaskKind.GRADIENT_NORM:
                sum_of_squares(gradients, weight_T)
            elif kind is TaskKind.GRADIENT_SCALE:
                scale_(gradients, factor)
            else:
                optimizer.step()
                schedule.step()
                flat.zero_()

    return run


def _copy_runner(kind: TaskKind, shape: tuple[int, ...], make: _Inputs) -> Callable[[Recorder], None]:
    """Return a run of a copy between the device and the host's memory, pinned on GPUs, on a stream of its own."""
    memory = HostMemory(make.device)
    on_host, on_device = memory.buffer("measured", shape[0]), memory.room(shape[0])
    target, source = (on_host, on_device) if kind is TaskKind.COPY_TO_HOST else (on_device, on_host)

    def run(recorder: Recorder) -> None:
        make.evict()
        with recorder.task(TASK_NAME, kind, Phase.FORWARD, shape), memory.copying(kind):
            target.copy_(source, non_blocking=True)
        memory.wait(memory.event(kind))

    return run


def _compression_runner(kind: TaskKind, shape: tuple[int, ...], make: _Inputs) -> Callable[[Recorder], None]:
    """Return a run of what compresses or restores one bucket of gradients; matrices are square."""
    task = _compression_task(kind, shape, make)

    def run(recorder: Recorder) -> None:
        make.evict()
        with recorder.task(TASK_NAME, kind, Phase.UPDATE, shape):
            task()

    return run


def _compression_task(kind: TaskKind, shape: tuple[int, ...], make: _Inputs) -> Callable[[], object]:
    gradient, residual = (torch.randn(shape[0], device=make.device, generator=make.generator) for _ in range(2))
    if kind is TaskKind.GRADIENT_CAST:
        half = torch.empty_like(gradient, dtype=torch.bfloat16)
        return lambda: compression.cast(half, gradient)
    if kind in (TaskKind.TOP_K_SELECT, TaskKind.TOP_K_SUM):
        kept = shape[1]
        messages = [torch.empty(2 * kept, dtype=torch.int32, device=make.device) for _ in range((*shape, 1)[2])]
        for message in messages:
            compression.select_entries(gradient, residual, message, kept)
        if kind is TaskKind.TOP_K_SELECT:
            return lambda: compression.select_entries(gradient, residual, messages[0], kept)
        return lambda: compression.sum_entries(gradient, messages, kept)
    elements, matrices, matrix_rank = shape
    side = math.isqrt(elements // matrices)
    right = torch.randn(matrices * side * matrix_rank, device=make.device, generator=make.generator)
    gradients, residuals = (flat.view(matrices, side, side).unbind() for flat in (gradient, residual))
    factors, no_loss = Factors(gradients, residuals, right, matrix_rank=matrix_rank), gradient[:0]
    message = compression.project(factors, no_loss)
    bases = compression.orthogonalise(factors, message)
    match kind:
        case TaskKind.LOW_RANK_PROJECT:
            return lambda: compression.project(factors, no_loss)
        case TaskKind.LOW_RANK_ORTHOGONALISE:
            return lambda: compression.orthogonalise(factors, message)
        case _:
            return lambda: compression.restore(factors, bases, message, no_loss)


def _pack_case(
    kind: TaskKind, shape: tuple[int, ...], dtype: Dtype, make: _Inputs, group: dist.ProcessGroup | None
) -> Case:
    """Return an exchange between the ranks, of which the packing is timed."""
    assert group is not None, kind
    rows, others, columns = shape
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = [0 if other == rank else others // (num_ranks - 1) for other in range(num_ranks)]
    rows_to = tuple(counts) if kind is TaskKind.HALO_PACK else (0,) * num_ranks
    row_S = torch.randint(0, rows, (sum(rows_to),), device=make.device, generator=make.generator)
    layout = ExchangeLayout(
        send_row_S=row_S,
        rows_to=rows_to,
        rows_from=rows_to,
        max_rows=others if kind is TaskKind.PAD_ROWS else rows,
        group=group,
    )
    exchange = Exchange.HALO if kind is TaskKind.HALO_PACK else Exchange.ALL_GATHER
    leaf = make.rows(rows, columns).requires_grad_()

    def run(recorder: Recorder) -> None:
        leaf.grad = None
        make.evict()
        before = recorder.run("before", _SCALE, leaf)
        rows_exchange = RowExchange(
            exchange=exchange, layout=layout, recorder=recorder, layer=TASK_NAME, dtype=make.dtype, wire=make.dtype
        )
        out = exchange_rows(before, rows_exchange)
        make.evict()
        out.backward(torch.ones_like(out))

    # Gradients are added to those of own rows in place, which packing copied.
    backward_shape = (0, others, columns) if kind is TaskKind.HALO_PACK else None
    return Case(kind=kind, dtype=dtype, shape=shape, backward_shape=backward_shape, run=run)
