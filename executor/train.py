"""One training step, then the loop."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from executor.batches import Batches, batch_shape
from executor.clipping import SharedClip, clip_flat_gradient_
from executor.data import Inputs as Inputs
from executor.data import RankData
from executor.dense import compiled_dense
from executor.exchange import ExchangeLayout
from executor.host_optimizer import HostAdamW
from executor.keyed import key_number
from executor.mesh import Place
from executor.model import ForwardSettings, GraphTransformer
from executor.offload import HostMemory
from executor.parallel import FlatGradients
from executor.pipeline import Pipeline, stage_layers
from executor.record import Recorder
from executor.shards import RankParameters, split_tensors
from executor.shared_out import SharedOutGradients, give_up_whole, share_out
from executor.step import CapturedFunction, CudaGraphs, cast_weights
from simulator.errors import RunError
from simulator.exchanges import wire_dtype
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, Offload, Plan, Recompute, StepMode
from simulator.specs.program import Phase, TaskKind
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from simulator.workload import parameter_shapes

# Steps before a capture: the first compiles kernels and makes the optimizer's state, the second finds them made.
_STEP_WARM_UPS, _EVALUATION_WARM_UPS = 2, 1
TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Shares of labelled nodes that are classified right, over all ranks."""

    train_accuracy_ratio: float
    val_accuracy_ratio: float
    test_accuracy_ratio: float


class Trainer:
    """The state of a run on one rank: parameters, optimizer, batches. To be closed where batches are made ahead.

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
        drawn = GraphTransformer(graph, model, recorder)
        drawn.keep([stage_layers(plan, stage) for stage in plan.stages_of(place.pipeline_rank)])
        self.model = drawn if place.device.type == "cpu" else drawn.to(place.device)  # fake tensors cannot be moved
        if place.tensor_mesh is not None:
            split_tensors(self.model, place.tensor_mesh)
        if place.row_mesh is not None and plan.shares_out:
            share_out(self.model, place.row_mesh, plan.shard_parameters, recorder)
        self.parameters = RankParameters(
            self.model,
            dict(parameter_shapes(graph, model)),
            place.tensor_mesh,
            place.row_mesh if plan.shares_out else None,
            place.pipeline_group,
            lambda name: plan.stage_of(name) % plan.pipeline_parallel_degree,
        )
        self.pipeline = Pipeline(plan, self.model, recorder, place)
        self.gradients = self._made_gradients()
        # What changes from step to step lies on the device, where a CUDA graph reads it.
        rate_device = "cpu" if plan.offload_optimizer else place.device
        self.learning_rate = torch.tensor(0.0, device=rate_device)  # whose value is known where tensors are fake
        self.dropout_word = torch.zeros((), dtype=torch.int32, device=place.device)
        self._rate_factor = learning_rate_schedule(train)
        memory, parameters = HostMemory(place.device), list(self.parameters.own.values())
        rate, decay = self.learning_rate, train.weight_decay
        self.host_optimizer: HostAdamW | None = None
        if plan.offload_optimizer:
            self.host_optimizer = HostAdamW(parameters, memory, learning_rate=rate, weight_decay=decay)
            self.optimizer = self.host_optimizer.optimizer
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=True)
        compiled = compiled_dense() if train.compile_dense else None
        self.settings = ForwardSettings(
            exchange=plan.exchange,
            recompute=plan.recompute,
            overlaps=plan.overlap_exchange,
            payload=plan.exchange_payload,
            wire=TORCH_DTYPES[wire_dtype(plan)],
            weights=None if place.tensor_group is None or plan.shares_out else self.parameters.own,
            compiled=compiled,
            tensor_group=place.tensor_group,
            offloads=tuple(map(plan.offloads, range(model.num_layers))),
            offload_min_bytes=plan.offload_min_bytes,
            host_memory=memory if Offload.ACTIVATIONS in plan.offload else None,
        )
        self._clip = self._shared_clip()
        self.rank_states: dict[str, Stateful] = {"gradients": self.gradients}
        self.batches = Batches(plan, inputs, place, model, dtype=TORCH_DTYPES[plan.precision], seed=train.seed)
        self._captured: tuple[CapturedFunction, CapturedFunction] | None = None

    def _made_gradients(self) -> FlatGradients | SharedOutGradients:
        """Return what sums the gradients of this rank."""
        plan, group = self.plan, self.place.gradient_group
        if plan.shares_out:
            assert group is not None, "parameters are shared out among several ranks"
            return SharedOutGradients(self.model, self.parameters, self.recorder, group)
        return FlatGradients(
            self.parameters.own,
            self.recorder,
            group,
            bucket_bytes=plan.gradient_bucket_bytes,
            overlap=plan.overlap_gradients,
            compression=plan.gradient_compression,
        )

    def step(self, step: int, *batches: RankData) -> Tensor:
        """Update the parameters once; return the loss of all ranks as a tensor on the device.

        Args:
            batches: the micro-batches of the step.
        """
        self.recorder.position.reach(f"step {step + 1}")
        self.learning_rate.fill_(self.train_spec.learning_rate * self._rate_factor(step))
        self.dropout_word.fill_(key_number(self.train_spec.seed, step))
        if self._is_replayed and not self.recorder.is_on:
            return self._captured_functions()[0]()
        if self.plan.cuts_steps:
            return self._update_in_passes(batches)
        (data,) = batches
        return self._update_on(data, self.settings)

    def _update_in_passes(self, batches: Sequence[RankData]) -> Tensor:
        """Update the parameters by the gradients of several micro-batches, or of this rank's stages."""
        assert len(batches) == self.plan.num_micro_batches, f"a step takes all micro-batches, got {len(batches)}"
        loss = self.pipeline.train(batches, replace(self.settings, dropout_word=self.dropout_word))
        self.gradients.begin(loss)
        step_loss = self.pipeline.sum_loss(self.gradients.reduce())
        self.update()
        return step_loss

    @property
    def _is_replayed(self) -> bool:
        """Whether steps are replayed; attention of another kind may differ from step to step."""
        return self.plan.step_mode is StepMode.CUDA_GRAPH and self.settings.attend is None

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
                weights = cast_weights(self.parameters.own, TORCH_DTYPES[self.plan.precision])
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
        if self.plan.pipeline_parallel_degree == 1:
            logits_NC: Tensor = self.model(data, settings)
            return logits_NC.argmax(1) == data.label_N
        made_NC = self.pipeline.evaluate(data, settings)
        is_last = self.plan.num_stages - 1 in self.plan.stages_of(self.place.pipeline_rank)
        return made_NC.argmax(1) == data.label_N if is_last else torch.zeros_like(data.label_N, dtype=torch.bool)

    def update(self) -> None:
        """Clip the gradients, move the parameters, forget the gradients."""
        own, max_norm = list(self.parameters.own.values()), self.train_spec.max_gradient_norm
        shape = (sum(value.numel() for value in own), len(own))
        if self._clip is None:
            assert isinstance(self.gradients, FlatGradients), "ranks that share parameters out clip together"
            with self.recorder.task("clip", TaskKind.CLIP, Phase.UPDATE, shape):
                clip_flat_gradient_(self.gradients.flat, max_norm)
        else:
            self._clip.clip_([value.grad for value in own if value.grad is not None], max_norm)
        if self.host_optimizer is not None:
            assert isinstance(self.gradients, FlatGradients), "an optimizer on the host updates all parameters"
            self.host_optimizer.step(self.gradients, self.recorder)
            return
        with self.recorder.task("optimizer", TaskKind.OPTIMIZER, Phase.UPDATE, shape):
            # Fused, it can be captured as it is; torch wants to be told in a capture, and warns outside of one.
            is_capturing = own[0].is_cuda and torch.cuda.is_current_stream_capturing()
            self.optimizer.param_groups[0]["capturable"] = is_capturing
            self.optimizer.step()
            self.gradients.zero()

    def _shared_clip(self) -> SharedClip | None:
        """Return what clips gradients that several ranks share; None where each has all of them."""
        parameters = self.parameters
        group = self.place.world if self.plan.shares_out else self.place.model_group
        if group is None:
            return None
        weights = [1.0 if parameters.is_split(name) else 1 / parameters.tensor_degree for name in parameters.own]
        return SharedClip(recorder=self.recorder, group=group, weight_T=torch.tensor(weights, device=self.place.device))

    def whole_weights(self) -> dict[str, Tensor]:
        """Return copies of all parameters on the CPU, whole; every rank calls this together."""
        own = self.parameters.own
        with self.recorder.position.waiting("the parameters of all ranks"):
            found = self.parameters.gathered({name: value.detach() for name, value in own.items()})
            return {name: value.cpu().clone() for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return all that later steps depend on beside their numbers and the specs; it is alike on ranks of a stage.

        Returns:
            Tables of the tensors in use, by the parameters' names: "model" and "optimizer", DTensors where ranks share
            them; and "random", copies of the states of torch's generators. To go on from other values, write them into
            the tensors: captured steps read them where they are.
        """
        stored = self.parameters.stored
        parameters = {name: stored(name, value.detach()) for name, value in self.parameters.own.items()}
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
        if self.host_optimizer is not None:
            self.host_optimizer.load_parameters()
        random = state.get("random", {})
        if "cpu" in random:
            torch.set_rng_state(random["cpu"])
        if "cuda" in random and self.place.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], self.place.device)

    def _optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's tensors by parameter; they are made first where no step has made them."""
        updated = dict(zip(self.parameters.own, self.optimizer.param_groups[0]["params"], strict=True))
        if not self.optimizer.state:
            # A step by nothing: gradients are zero between steps, and so is the rate, which also scales the decay.
            self.learning_rate.zero_()
            for value in updated.values():
                value.grad = torch.zeros_like(value) if value.grad is None else value.grad
            self.optimizer.step()
            self.gradients.zero()
            for made in self.optimizer.state.values():
                made["step"].zero_()
        stored = self.parameters.stored
        return {
            name: {key: stored(name, moment) for key, moment in self.optimizer.state[value].items()}
            for name, value in updated.items()
        }

    def batch(self, step: int) -> RankData:
        """Return this rank's share of a step's first micro-batch, as `micro_batches` does."""
        return self.micro_batches(step)[0]

    def micro_batches(self, step: int) -> Sequence[RankData]:
        """Return this rank's share of a step's micro-batches; if they are made in the step, that is one of its tasks.

        Raises:
            Exception: what making it raised, here or in the thread that makes batches ahead.
        """
        if not self.plan.loads_batches or self.plan.prefetch_batches > 0:
            return self.batches.micro_batches(step)
        with self.recorder.task("batch", self.batch_kind, Phase.FORWARD, ()):
            batches = self.batches.micro_batches(step)
            self.recorder.shaped(batch_shape(batches, self.graph.num_nodes))
        return batches

    @property
    def batch_kind(self) -> TaskKind:
        """Kind of the task that makes a batch."""
        return TaskKind.CLUSTER_BATCH if self.plan.sampled is None else TaskKind.SAMPLED_BATCH

    def close(self) -> None:
        """End the thread that makes batches ahead, if there is one."""
        self.batches.close()

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Return accuracies on the whole graph, every rank on its own parts, whatever the plan trains on."""
        data = self.batches.whole_graph()
        exchange = Exchange.HALO if self.plan.num_row_ranks > 1 else Exchange.NONE
        num_layers = len(self.plan.exchange)
        if self._is_replayed:
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
        if self.plan.shares_out:
            give_up_whole(self.model)
        with self.recorder.position.waiting("accuracies"):
            counts = [[right_N[rows].sum(), torch.tensor(rows.numel())] for rows in data.mask_rows.values()]
            totals = torch.tensor([[int(right), int(total)] for right, total in counts], device=self.place.device)
            if self.place.gradient_group is not None:
                dist.all_reduce(totals, group=self.place.gradient_group)
            if self.place.pipeline_group is not None:  # ranks of the last stage alone know what is right
                dist.all_reduce(totals, op=dist.ReduceOp.MAX, group=self.place.pipeline_group)
            train, val, test = (right / max(total, 1) for right, total in totals.tolist())
        return Evaluation(train_accuracy_ratio=train, val_accuracy_ratio=val, test_accuracy_ratio=test)

    def layouts(self, step: int) -> dict[str, ExchangeLayout]:
        """Return the rows that this rank exchanges with others, in a step and in an evaluation; none of a lone rank."""
        if self.place.gradient_group is None:
            return {}
        data, name = self.batch(step), f"step {step + 1}"
        found = {name: data.layout, "an evaluation": self.batches.whole_graph().layout}
        if data.hosts is not None:
            found |= {f"{name} between hosts": data.hosts.between, f"{name} inside a host": data.hosts.inside}
        return {name: layout for name, layout in found.items() if layout.group is not None}


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
