"""One training step, then the loop."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from executor.data import RankData, build_rank_data
from executor.dense import compiled_dense
from executor.exchange import ExchangeLayout
from executor.keyed import key_word
from executor.mesh import Place
from executor.model import ForwardSettings, GraphTransformer
from executor.parallel import FlatGradients
from executor.record import Recorder
from executor.step import CapturedFunction, CudaGraphs, cast_weights
from simulator.errors import RunError
from simulator.exchanges import rows_per_message, wire_dtype
from simulator.readers.graphs import Graph
from simulator.specs.graph import GraphSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, Plan, Recompute, StepMode, batch_parts
from simulator.specs.program import Phase, TaskKind
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from simulator.workload import owned_parts

# Steps before a capture: the first compiles kernels and makes the optimizer's state, the second finds them made.
_STEP_WARM_UPS, _EVALUATION_WARM_UPS = 2, 1
TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A run's arrays, the same on every rank.

    Attributes:
        part_N: part of each node.
        encodings: positional encodings, [N, columns], or None.
        order_N: the nodes in the plan's order; None for the natural one.
    """

    graph: Graph
    part_N: np.ndarray
    encodings: np.ndarray | None
    order_N: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Shares of labelled nodes that are classified right, over all ranks."""

    train_accuracy_ratio: float
    val_accuracy_ratio: float
    test_accuracy_ratio: float


class Trainer:
    """The state of a run on one rank: parameters, optimizer, batches.

    `rank_states` holds by name what has state of this rank alone that checkpoints keep, such as a gradient reducer with
    error feedback; its state is a flat table of tensors that stay where they are.

    Args:
        place: this rank in the plan's mesh.
    """

    def __init__(
        self,
        plan: Plan,
        graph: GraphSpec,
        model: ModelSpec,
        train: TrainSpec,
        inputs: Inputs,
        place: Place,
        recorder: Recorder,
    ) -> None:
        self.plan, self.graph, self.train_spec, self.inputs, self.place = plan, graph, train, inputs, place
        self.recorder = recorder
        torch.manual_seed(train.seed)  # parameters are drawn on the CPU, so alike on every rank and device
        self.model = GraphTransformer(graph, model, recorder).to(place.device)
        self.gradients = FlatGradients(
            self.model,
            recorder,
            place.world,
            bucket_bytes=plan.gradient_bucket_bytes,
            overlap=plan.overlap_gradients,
            compression=plan.gradient_compression,
        )
        # What changes from step to step lies on the device, where a CUDA graph reads it.
        self.learning_rate = torch.zeros((), device=place.device)
        self.dropout_word = torch.zeros((), dtype=torch.int32, device=place.device)
        self._rate_factor = learning_rate_schedule(train)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.learning_rate,
            weight_decay=train.weight_decay,
            fused=True,
        )
        compiled = compiled_dense() if train.compile_dense else None
        self.settings = ForwardSettings(
            exchange=plan.exchange,
            recompute=plan.recompute,
            overlaps=plan.overlap_exchange,
            payload=plan.exchange_payload,
            wire=TORCH_DTYPES[wire_dtype(plan)],
            compiled=compiled,
        )
        self.rank_states: dict[str, Stateful] = {"gradients": self.gradients}
        self._batches: OrderedDict[tuple[int, ...], RankData] = OrderedDict()
        self._evaluation_data: RankData | None = None
        self._captured: tuple[CapturedFunction, CapturedFunction] | None = None

    def step(self, step: int, data: RankData) -> Tensor:
        """Update the parameters once; return the loss of all ranks as a tensor on the device."""
        self.recorder.position.reach(f"step {step + 1}")
        self.learning_rate.fill_(self.train_spec.learning_rate * self._rate_factor(step))
        self.dropout_word.fill_(int(key_word(torch.tensor([self.train_spec.seed, step]))))
        if self.plan.step_mode is StepMode.CUDA_GRAPH and not self.recorder.is_on:
            return self._captured_functions()[0]()
        return self._update_on(data, self.settings)

    def _update_on(self, data: RankData, settings: ForwardSettings) -> Tensor:
        settings = replace(settings, dropout_word=self.dropout_word)
        loss = self.model.loss(self.model(data, settings), data)
        self.gradients.begin(loss)
        loss.backward()
        step_loss = self.gradients.reduce()
        self.update()
        return step_loss

    def _captured_functions(self) -> tuple[CapturedFunction, CapturedFunction]:
        """Return a step on the whole graph, and which nodes are classified right, as CUDA graphs."""
        if self._captured is None:
            data, graphs = self.batch(0), CudaGraphs()

            def settings() -> ForwardSettings:
                weights = cast_weights(self.model, TORCH_DTYPES[self.plan.precision])
                return replace(self.settings, weights=weights)

            self._captured = (
                CapturedFunction(
                    "a step", lambda: self._update_on(data, settings()), graphs, num_warm_ups=_STEP_WARM_UPS
                ),
                CapturedFunction(
                    "an evaluation",
                    lambda: self._is_right(data, settings()),
                    graphs,
                    num_warm_ups=_EVALUATION_WARM_UPS,
                ),
            )
        return self._captured

    def _is_right(self, data: RankData, settings: ForwardSettings) -> Tensor:
        logits_NC: Tensor = self.model(data, settings)
        return logits_NC.argmax(1) == data.label_N

    def update(self) -> None:
        """Clip the gradients, move the parameters, forget the gradients."""
        flat = self.gradients.flat
        shape = (flat.numel(), len(self.optimizer.param_groups[0]["params"]))
        with self.recorder.task("clip", TaskKind.CLIP, Phase.UPDATE, shape):
            clip_flat_gradient_(flat, self.train_spec.max_gradient_norm)
        with self.recorder.task("optimizer", TaskKind.OPTIMIZER, Phase.UPDATE, shape):
            # Fused, it can be captured as it is; torch wants to be told in a capture, and warns outside of one.
            is_capturing = flat.is_cuda and torch.cuda.is_current_stream_capturing()
            self.optimizer.param_groups[0]["capturable"] = is_capturing
            self.optimizer.step()
            self.gradients.zero()

    def state_dict(self) -> dict[str, Any]:
        """Return all that later steps depend on beside their numbers and the specs; it is alike on every rank.

        Returns:
            Tables of the tensors in use, by the parameters' names: "model" and "optimizer"; and "random", copies of the
            states of torch's generators. To go on from other values, write them into the tensors: captured steps read
            them where they are.
        """
        parameters = {name: value.detach() for name, value in self.model.named_parameters()}
        random = {"cpu": torch.get_rng_state()}
        if self.place.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.place.device)
        return {"model": parameters, "optimizer": self._optimizer_state(), "random": random}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; every tensor keeps its place in memory, so captured steps go on from it too.

        Args:
            state: as `state_dict` gives it, on any device; generators may be missing, and stay as they are then.
        """
        own = self.state_dict()
        for name, value in own["model"].items():
            value.copy_(state["model"][name])
            for key, moment in own["optimizer"][name].items():
                moment.copy_(state["optimizer"][name][key])
        if "cpu" in state["random"]:
            torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"] and self.place.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], self.place.device)

    def _optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's tensors by parameter; they are made first where no step has made them."""
        parameters = dict(self.model.named_parameters())
        if not self.optimizer.state:
            # A step by nothing: gradients are zero between steps, and so is the rate, which also scales the decay.
            self.learning_rate.zero_()
            self.optimizer.step()
            for made in self.optimizer.state.values():
                made["step"].zero_()
        return {name: dict(self.optimizer.state[value]) for name, value in parameters.items()}

    def batch(self, step: int) -> RankData:
        """Return this rank's share of a step's batch; the last ones are kept on the device."""
        batches = batch_parts(self.plan, step=step, seed=self.train_spec.seed)
        parts = batches[self.place.replica]
        num_train_rows = sum(
            self.plan.partition.parts[part].num_train_nodes for batch in set(batches) for part in batch
        )
        num_train_rows = max(num_train_rows, 1)  # a step without labels has a loss of 0, not 0 / 0
        if parts in self._batches and self._batches[parts].num_train_rows_of_step == num_train_rows:
            self._batches.move_to_end(parts)
            return self._batches[parts]
        data = self._batches.pop(parts, None)
        if data is None:
            data = self._build(parts, num_train_rows)
        self._batches[parts] = replace(data, num_train_rows_of_step=num_train_rows)
        if len(self._batches) > self.plan.partition.num_parts:
            self._batches.popitem(last=False)
        return self._batches[parts]

    def _build(self, parts: tuple[int, ...], num_train_rows: int) -> RankData:
        owner_of_part = np.full(self.plan.partition.num_parts, -1, np.int64)
        for graph_rank in range(self.plan.graph_parallel_degree):
            owner_of_part[list(owned_parts(self.plan, parts, graph_rank))] = graph_rank
        return self._rank_data(
            owner_of_part,
            graph_rank=self.place.graph_rank,
            num_ranks=self.plan.graph_parallel_degree,
            exchanges=frozenset(self.plan.exchange),
            group=self.place.graph_group,
            num_train_rows=num_train_rows,
            overlaps=self.plan.overlap_exchange,
            ranks_per_host=self.plan.ranks_per_host,
        )

    def _rank_data(
        self,
        owner_of_part: np.ndarray,
        *,
        graph_rank: int,
        num_ranks: int,
        exchanges: frozenset[Exchange],
        group: dist.ProcessGroup | None,
        num_train_rows: int,
        overlaps: bool = False,
        ranks_per_host: int | None = None,
    ) -> RankData:
        return build_rank_data(
            self.inputs.graph,
            self.inputs.encodings,
            owner_of_part[self.inputs.part_N],
            order_N=self.inputs.order_N,
            graph_rank=graph_rank,
            num_ranks=num_ranks,
            exchanges=exchanges,
            group=group,
            num_train_rows_of_step=num_train_rows,
            degree_buckets=self.model.model.edge_bias is EdgeBias.DEGREE,
            dtype=TORCH_DTYPES[self.plan.precision],
            device=self.place.device,
            overlaps=overlaps,
            rows_per_message=self._rows_per_message(Exchange.HALO, num_ranks),
            head_rows_per_message=self._rows_per_message(Exchange.HEAD_ALL_TO_ALL, num_ranks),
            ranks_per_host=ranks_per_host,
            host_group=self.place.host_group,
        )

    def _rows_per_message(self, exchange: Exchange, num_ranks: int) -> int | None:
        found = rows_per_message(self.plan, self.model.model, exchange, num_ranks=num_ranks)
        # An evaluation by more ranks than the plan's graph groups have sends a row to each of them at least.
        return None if found is None else max(found, 1)

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Return accuracies on the whole graph, every rank on its own parts, whatever the plan trains on."""
        data = self._whole_graph()
        exchange = Exchange.HALO if self.plan.num_ranks > 1 else Exchange.NONE
        num_layers = len(self.plan.exchange)
        if self.plan.step_mode is StepMode.CUDA_GRAPH:
            right_N = self._captured_functions()[1]()
        elif self.plan.is_full_graph:
            right_N = self._is_right(data, self.settings)
        else:
            settings = replace(
                self.settings,
                exchange=(exchange,) * num_layers,
                recompute=(Recompute.NONE,) * num_layers,
                overlaps=False,
                compiled=None,
            )
            right_N = self._is_right(data, settings)
        with self.recorder.position.waiting("accuracies"):
            counts = [[right_N[rows].sum(), torch.tensor(rows.numel())] for rows in data.mask_rows.values()]
            totals = torch.tensor([[int(right), int(total)] for right, total in counts], device=self.place.device)
            if self.place.world is not None:
                dist.all_reduce(totals, group=self.place.world)
            train, val, test = (right / max(total, 1) for right, total in totals.tolist())
        return Evaluation(train_accuracy_ratio=train, val_accuracy_ratio=val, test_accuracy_ratio=test)

    def layouts(self) -> dict[str, ExchangeLayout]:
        """Return the rows that this rank exchanges with others, in the first step and in an evaluation."""
        data = self.batch(0)
        found = {"step 1": data.layout, "an evaluation": self._whole_graph().layout}
        if data.hosts is not None:
            found |= {"step 1 between hosts": data.hosts.between, "step 1 inside a host": data.hosts.inside}
        return {name: layout for name, layout in found.items() if layout.group is not None}

    def _whole_graph(self) -> RankData:
        if self.plan.is_full_graph:
            return self.batch(0)
        if self._evaluation_data is None:
            num_ranks = self.plan.num_ranks
            self._evaluation_data = self._rank_data(
                np.arange(self.plan.partition.num_parts) % num_ranks,
                graph_rank=self.place.rank,
                num_ranks=num_ranks,
                exchanges=frozenset({Exchange.HALO if num_ranks > 1 else Exchange.NONE}),
                group=self.place.world,
                num_train_rows=1,
            )
        return self._evaluation_data


def clip_flat_gradient_(flat: Tensor, max_norm: float) -> None:
    """Scale a gradient down to a norm, in place and without a device sync; a smaller one stays."""
    norm = torch.linalg.vector_norm(flat)
    flat.mul_((max_norm / norm.clamp(min=1e-12)).clamp(max=1.0))


def learning_rate_schedule(train: TrainSpec) -> Callable[[int], float]:
    """Return the factor of the learning rate by step: a linear rise, then half a cosine down to zero."""

    def factor(step: int) -> float:
        if step < train.warmup_steps:
            return (step + 1) / train.warmup_steps
        progress = (step - train.warmup_steps) / max(train.num_steps - train.warmup_steps, 1)
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

    return factor


class StepClock:
    """Durations of steps: by the host on CPUs, by device events between steps on GPUs, without a sync a step."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: list[float] = []
        self._started = 0.0

    def start(self) -> None:
        """Begin a step."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((event, torch.cuda.Event(enable_timing=True)))
        self._started = time.perf_counter()

    def stop(self) -> None:
        """End the step."""
        if self._on_gpu:
            self._events[-1][1].record()
        else:
            self._seconds.append(time.perf_counter() - self._started)

    def seconds(self) -> list[float]:
        """Return the duration of every step so far."""
        if self._on_gpu:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) / 1e3 for start, end in self._events]
        return list(self._seconds)


def require_finite(loss: float, step: int) -> None:
    """Stop a run whose loss is not a number.

    Raises:
        RunError: if `loss` is infinite or not a number.
    """
    if not math.isfinite(loss):
        raise RunError(
            f"the loss of step {step + 1} is {loss}: lower train.learning_rate or train.max_gradient_norm, or train in "
            "fp32"
        )
