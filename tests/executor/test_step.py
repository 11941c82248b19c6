"""Captured functions with a stand-in for CUDA graphs, cast weights, compiled parts; real CUDA graphs on a GPU."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from executor.data import build_rank_data
from executor.dense import Dropout, after_attention, before_attention, compiled_dense
from executor.keyed import key_word
from executor.mesh import Place
from executor.model import ForwardSettings, GraphTransformer, Layer
from executor.operations import Operation
from executor.record import Recorder
from executor.step import Captured, CapturedFunction, cast_weights
from executor.train import Inputs, Trainer
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, Recompute, StepMode
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from tests.executor.made_graphs import awkward_graph, plan_of, sparse_graph, spec_of

MODEL = ModelSpec(
    width=16, num_heads=2, num_layers=2, feed_forward_width=24, dropout_ratio=0.2, edge_bias=EdgeBias.DEGREE
)


# --- Captured functions.


@dataclass
class Replayer:
    """Stands in for CUDA graphs: a capture runs nothing, a replay computes into the captured output.

    Attributes:
        fails: captures raise.
    """

    fails: bool = False
    log: list[str] = field(default_factory=list)

    def warm_up(self, function: Callable[[], Tensor]) -> Tensor:
        self.log.append("warm-up")
        return function()

    def capture(self, function: Callable[[], Tensor]) -> Captured:
        self.log.append("capture")
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")
        output = torch.zeros(())

        def replay() -> None:
            self.log.append("replay")
            output.copy_(function())

        return Captured(replay=replay, output=output)


def counting() -> Callable[[], Tensor]:
    """Return a function that gives 1, 2, 3 and so on."""
    state = torch.zeros(())

    def count() -> Tensor:
        return state.add_(1).clone()

    return count


def test_a_function_is_captured_after_its_warm_ups_and_each_call_counts_once():
    graphs = Replayer()
    function = CapturedFunction("a count", counting(), graphs, num_warm_ups=2)
    was_captured, results = [], []
    for _ in range(5):
        results.append(function())
        was_captured.append(function.is_captured)
    assert [float(result) for result in results] == [1, 2, 3, 4, 5]  # replays leave earlier results alone
    assert graphs.log == ["warm-up", "warm-up", "capture", "replay", "replay", "replay"]
    assert was_captured == [False, False, True, True, True]


def test_a_function_that_cannot_be_captured_goes_on_as_it_is_and_says_so_once(caplog):
    graphs = Replayer(fails=True)
    function = CapturedFunction("a count", counting(), graphs, num_warm_ups=1)
    with caplog.at_level(logging.WARNING):
        assert [float(function()) for _ in range(4)] == [1, 2, 3, 4]
    assert graphs.log == ["warm-up", "capture"]
    assert not function.is_captured
    (message,) = caplog.messages
    assert message == (
        "a count is launched task by task, since no CUDA graph could be made of it: operation not permitted when "
        "stream is capturing"
    )


# --- Trainers whose steps are captured.


def trainer_of(
    mode: StepMode,
    *,
    device: str = "cpu",
    precision: Dtype = Dtype.FLOAT32,
    recompute: Recompute = Recompute.NONE,
    compile_dense: bool = False,
) -> Trainer:
    graph = sparse_graph()
    part_N = np.zeros(graph.num_nodes, np.int64)
    plan = plan_of(graph, part_N, 1, recompute=(recompute,) * MODEL.num_layers)
    place = Place(
        rank=0, num_ranks=1, replica=0, graph_rank=0, graph_group=None, world=None, device=torch.device(device)
    )
    return Trainer(
        replace(plan, step_mode=mode, precision=precision),
        spec_of(graph),
        MODEL,
        TrainSpec(num_steps=8, learning_rate=0.01, warmup_steps=3, seed=5, compile_dense=compile_dense),
        Inputs(graph=graph, part_N=part_N, encodings=None),
        place,
        Recorder(),
    )


def train(trainer: Trainer, *, traced: tuple[int, ...] = ()) -> tuple[list[float], list[float]]:
    """Return the losses of eight steps, and the accuracies after each."""
    losses, accuracies = [], []
    for step in range(8):
        if step in traced:
            trainer.recorder.start()
        losses.append(trainer.step(step, trainer.batch(step)))
        if step in traced:
            assert trainer.recorder.stop()
        accuracies.append(trainer.evaluate().train_accuracy_ratio)
    return [float(loss) for loss in losses], accuracies


@pytest.mark.parametrize("precision", Dtype)
@pytest.mark.parametrize("recompute", Recompute)
def test_replayed_steps_learn_as_eager_ones_do_traced_ones_among_them(monkeypatch, precision, recompute):
    graphs = Replayer()
    monkeypatch.setattr("executor.train.CudaGraphs", lambda: graphs)
    trainer = trainer_of(StepMode.CUDA_GRAPH, precision=precision, recompute=recompute)
    # The stand-in's outputs are scalars; an evaluation gives a flag for each node.
    monkeypatch.setattr(graphs, "capture", lambda function: _captured_like(function, graphs))
    found = train(trainer, traced=(4,))
    assert found == train(trainer_of(StepMode.EAGER, precision=precision, recompute=recompute))
    assert graphs.log.count("replay") > 8
    assert len(set(found[0])) == 8


def test_attention_of_another_kind_is_never_captured(monkeypatch):
    monkeypatch.setattr("executor.train.CudaGraphs", lambda: pytest.fail("a capture began"))
    trainer = trainer_of(StepMode.CUDA_GRAPH)
    trainer.settings = replace(trainer.settings, attend=lambda _, q_ND, kv_N2D: q_ND + kv_N2D[:, : q_ND.shape[1]])
    losses, _ = train(trainer)
    assert len(set(losses)) == 8


def _captured_like(function: Callable[[], Tensor], graphs: Replayer) -> Captured:
    output: list[Tensor] = []

    class Latest:
        """The output of the latest replay."""

        def clone(self) -> Tensor:
            return output[-1].clone()

    def replay() -> None:
        graphs.log.append("replay")
        output.append(function())

    return Captured(replay=replay, output=Latest())  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", Dtype)
@pytest.mark.parametrize("recompute", Recompute)
def test_cuda_graphs_learn_as_eager_steps_do(precision, recompute):
    trainer = trainer_of(StepMode.CUDA_GRAPH, device="cuda", precision=precision, recompute=recompute)
    losses, _ = train(trainer, traced=(5,))
    assert trainer._captured is not None
    assert [function.is_captured for function in trainer._captured] == [True, True]
    eager, _ = train(trainer_of(StepMode.EAGER, device="cuda", precision=precision, recompute=recompute))
    # The learning rate and the arithmetic are the same, and no kernel adds in an order that changes.
    assert losses == pytest.approx(eager, rel=1e-5 if precision is Dtype.FLOAT32 else 1e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler gives several, which differ between versions
def test_compiled_dense_parts_learn_as_eager_steps_do_on_a_gpu():
    losses, _ = train(trainer_of(StepMode.CUDA_GRAPH, device="cuda", compile_dense=True))
    eager, _ = train(trainer_of(StepMode.EAGER, device="cuda"))
    assert losses == pytest.approx(eager, rel=1e-3)


# --- Weights that are cast once.


def test_weights_cast_once_give_the_gradients_of_casts_at_each_use():
    graph = awkward_graph()
    data = build_rank_data(
        graph,
        None,
        np.zeros(graph.num_nodes, np.int64),
        graph_rank=0,
        exchanges=frozenset({Exchange.NONE}),
        degree_buckets=True,
        group=None,
        num_ranks=1,
        num_train_rows_of_step=10,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    model = GraphTransformer(spec_of(graph), MODEL, Recorder())
    settings = ForwardSettings(
        exchange=(Exchange.NONE,) * 2, recompute=(Recompute.NONE,) * 2, dropout_word=key_word(torch.tensor([0, 1]))
    )
    gradients = []
    for cast in (False, True):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        weights = cast_weights(dict(model.named_parameters()), torch.bfloat16) if cast else None
        model.loss(model(data, replace(settings, weights=weights)), data).backward()
        gradients.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    assert list(gradients[0]) == [name for name, _ in model.named_parameters()]
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradients[1][name], gradient), name


def test_weights_of_a_bf16_run_are_bf16_but_for_those_that_operations_take_in_fp32():
    model = GraphTransformer(spec_of(sparse_graph()), MODEL, Recorder())
    weights = cast_weights(dict(model.named_parameters()), torch.bfloat16)
    assert list(weights) == [name for name, _ in model.named_parameters()]
    in_fp32 = {name for name, value in weights.items() if value.dtype == torch.float32}
    assert in_fp32 == {"input.features", "layer0.edge_bias", "layer1.edge_bias"}
    parameters = dict(model.named_parameters())
    assert all(
        value is parameters[name] for name, value in cast_weights(dict(model.named_parameters()), torch.float32).items()
    )


# --- Compiled dense parts.


# torch's compiler looks at autograd functions in a way that it warns of itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("has_dropout", [False, True])
def test_compiled_dense_parts_give_what_the_tasks_give_one_by_one(has_dropout):
    compiled = compiled_dense("aot_eager")  # all of torch.compile but the code generator
    torch.manual_seed(0)
    weights = {name: torch.randn_like(value) for name, value in Layer(MODEL).named_parameters()}
    names = []

    def run(name: str, operation: Operation, *arguments: object) -> object:
        names.append(name)
        return operation.function(*arguments)

    rows = [torch.randn(30, MODEL.width) for _ in range(2)]
    seeds = tuple(torch.tensor(seed, dtype=torch.int32) for seed in (7, -3))
    dropout = Dropout(ratio=0.3, node_N=torch.arange(30), seeds=seeds) if has_dropout else None
    results = []
    for is_compiled in (False, True):
        leaves = [value.clone().requires_grad_() for value in (*weights.values(), *rows)]
        *values, h_ND, x_ND = leaves
        named = dict(zip(weights, values, strict=True))
        if is_compiled:
            outputs = (*compiled.before(named, h_ND), compiled.after(named, h_ND, x_ND, dropout))
        else:
            outputs = (*before_attention(run, named, h_ND), after_attention(run, named, h_ND, x_ND, dropout))
        torch.stack([output.square().sum() for output in outputs]).sum().backward()
        results.append([*outputs, *(leaf.grad for leaf in leaves)])
    for one_by_one, at_once in zip(*results, strict=True):
        assert (one_by_one is None) == (at_once is None)
        if one_by_one is not None:
            torch.testing.assert_close(at_once, one_by_one)
    assert ("attention_dropout" in names) == has_dropout


def columns_kept(function: Callable[..., object], *arguments: object) -> int:
    """Return the columns of rows that a function keeps for its backward pass, each tensor once."""
    kept: dict[int, int] = {}

    def look(saved: Tensor) -> Tensor:
        if saved.ndim == 2 and saved.shape[0] == 30:
            kept[saved.untyped_storage().data_ptr()] = saved.shape[1]
        return saved

    with torch.autograd.graph.saved_tensors_hooks(look, lambda saved: saved):
        function(*arguments)
    return sum(columns for columns in kept.values() if columns > 1)  # not mean and deviation of a row


def test_compiled_dense_parts_keep_only_what_they_are_given():
    compiled = compiled_dense("aot_eager_decomp_partition")  # all of torch.compile but the code generator
    weights = dict(Layer(MODEL).named_parameters())
    h_ND, x_ND = (torch.randn(30, MODEL.width, requires_grad=True) for _ in range(2))

    def run(_: str, operation: Operation, *arguments: object) -> object:
        return operation.function(*arguments)

    width, hidden = MODEL.width, MODEL.feed_forward_width
    assert columns_kept(before_attention, run, weights, h_ND) == 2 * width
    assert columns_kept(compiled.before, weights, h_ND) == width
    assert columns_kept(after_attention, run, weights, h_ND, x_ND, None) == 3 * width + 2 * hidden
    assert columns_kept(compiled.after, weights, h_ND, x_ND, None) == 2 * width  # h and x
