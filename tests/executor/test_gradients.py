"""Reduction of gradients: against DDP and by hand among gloo ranks; what compressions lose, keep and learn."""

import contextlib
import math
from collections.abc import Sequence
from typing import cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from executor.compression import Factors
from executor.dense import after_attention, before_attention, compiled_dense
from executor.model import Layer
from executor.operations import Operation
from executor.parallel import FlatGradients
from executor.record import Recorder
from executor.reduction import BucketGradients, Wire, reduction
from simulator.errors import RunError
from simulator.gradients import is_factorised, reduction_schedule
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.model import ModelSpec
from simulator.specs.program import Phase, Stream
from tests.executor.gradient_ranks import (
    COMPRESSIONS,
    LARGE_BUCKETS,
    NUM_RANKS,
    NUM_STEPS,
    SETTINGS,
    SMALL_BUCKETS,
    RankResult,
    Reduced,
    Setting,
    loss_of,
    made_model,
    run_reductions,
)

# Stands in for a process group where no collective is called.
WORLD = cast(dist.ProcessGroup, object())


# --- Among gloo ranks.


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[RankResult]:
    return run_reductions(tmp_path_factory.mktemp("gradients"))


def of_ranks(results: list[RankResult], setting: Setting) -> list[Reduced]:
    return [result.reduced[setting] for result in results]


def settings_of(*names: str) -> list[Setting]:
    return [setting for setting in SETTINGS if setting.compression in names]


@pytest.mark.dist
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_rank_gets_the_same_bits_and_the_sum_of_the_losses(results, setting):
    found = of_ranks(results, setting)
    for other in found[1:]:
        assert other.losses == found[0].losses
        assert all(map(torch.equal, other.gradients, found[0].gradients))
    idle = {1} if setting.has_idle_parameter else set()
    for step, loss in enumerate(found[0].losses):
        losses = [loss_of(made_model(), rank, step, skips_first=rank in idle).item() for rank in range(NUM_RANKS)]
        assert loss == pytest.approx(sum(losses), rel=1e-6)


@pytest.mark.dist
@pytest.mark.parametrize("setting", settings_of("none", "all entries"), ids=str)
def test_what_is_sent_as_it_is_or_with_all_entries_is_the_sum_of_the_gradients(results, setting):
    found = of_ranks(results, setting)
    for step in range(NUM_STEPS):
        expected = torch.stack([rank.own_gradients[step] for rank in found]).sum(0)
        torch.testing.assert_close(found[0].gradients[step], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["none", "bf16"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bucket_bytes", [SMALL_BUCKETS, LARGE_BUCKETS])
def test_gradients_are_those_of_ddp(results, name, overlap, bucket_bytes):
    setting = Setting(compression=name, overlap=overlap, bucket_bytes=bucket_bytes)
    largest = max(gradient.abs().max() for gradient in results[0].ddp["none"])
    # DDP gives means; three numbers of 8 bits may be added in another order, which rounds partial sums otherwise.
    bound = (1e-6 if name == "none" else 2**-7) * float(NUM_RANKS * largest)
    for ours, theirs in zip(results[0].reduced[setting].gradients, results[0].ddp[name], strict=True):
        assert float((ours - NUM_RANKS * theirs).abs().max()) <= bound
    exact = results[0].ddp["none"][0]
    error = float((results[0].reduced[setting].gradients[0] - NUM_RANKS * exact).abs().max())
    assert (error == 0 or name == "none") == (error <= 1e-6 * float(NUM_RANKS * largest))


@pytest.mark.dist
@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("bucket_bytes", [SMALL_BUCKETS, LARGE_BUCKETS])
def test_a_reduction_beside_the_backward_pass_gives_the_bits_of_one_behind_it(results, name, bucket_bytes):
    behind, beside = (
        results[0].reduced[Setting(compression=name, overlap=overlap, bucket_bytes=bucket_bytes)]
        for overlap in (False, True)
    )
    assert beside.losses == behind.losses
    assert all(map(torch.equal, beside.gradients, behind.gradients))
    assert torch.equal(beside.residual, behind.residual)


@pytest.mark.dist
@pytest.mark.parametrize("setting", settings_of("top-k", "PowerSGD"), ids=str)
def test_what_was_received_and_what_ranks_keep_is_the_sum_of_all_gradients(results, setting):
    found = of_ranks(results, setting)
    total = torch.stack([gradient for rank in found for gradient in rank.own_gradients]).sum(0)
    kept = torch.stack([rank.residual for rank in found]).sum(0)
    assert float(kept.abs().max()) > 0.01
    torch.testing.assert_close(torch.stack(found[0].gradients).sum(0) + kept, total, rtol=1e-5, atol=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["none", "top-k", "PowerSGD"])
def test_gradients_go_on_from_a_saved_state_to_the_last_bit(results, name):
    for rank in range(NUM_RANKS):
        resumed, through = (
            results[rank].reduced[Setting(compression=name, is_resumed=is_resumed)] for is_resumed in (True, False)
        )
        assert all(map(torch.equal, resumed.gradients, through.gradients))
        assert torch.equal(resumed.residual, through.residual)


@pytest.mark.dist
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tasks_are_marked_in_the_order_and_with_the_bytes_that_are_planned(results, setting):
    shapes = [(name, tuple(parameter.shape)) for name, parameter in made_model().named_parameters()]
    schedule = reduction_schedule(
        shapes,
        [str(layer) for layer in range(6)],
        bucket_bytes=setting.bucket_bytes,
        compression=COMPRESSIONS[setting.compression],
        overlaps=setting.overlap,
        num_ranks=NUM_RANKS,
    )
    planned = schedule.before_backward()
    for layer in reversed(range(6)):
        planned += schedule.after_backward_of(str(layer))
    planned += schedule.rest()
    for result in results:
        marks = result.reduced[setting].marks
        assert [(mark.name, mark.kind, mark.shape, mark.dtype) for mark in marks] == [
            (task.name, task.kind, task.shape, task.dtype) for task in planned
        ]
        for mark in marks:
            is_beside = setting.overlap and mark.kind.is_collective
            assert mark.stream is (Stream.GRADIENTS if is_beside else None)
            assert mark.phase is Phase.UPDATE
            assert mark.end_seconds > mark.start_seconds
            assert mark.group == (tuple(range(NUM_RANKS)) if mark.kind.is_collective else ())


@pytest.mark.dist
def test_buckets_begin_within_the_backward_pass_but_where_a_gradient_never_comes(results):
    # The last layer's bucket begins first; its all-reduce is marked before the backward pass goes on.
    complete, idle = (Setting(compression="none", overlap=True, has_idle_parameter=flag) for flag in (False, True))
    for setting in (complete, idle):
        names = [mark.name for mark in results[1].reduced[setting].marks]
        assert names == [f"gradients.bucket{index}" for index in range(len(names))]
        assert len(names) >= 3


# --- Without other ranks.


def test_a_backward_pass_of_somebody_else_begins_nothing_and_a_second_one_is_noticed(monkeypatch):
    begun = []
    monkeypatch.setattr(Wire, "all_reduce", lambda _, name, tensor: begun.append(name))
    model = made_model()
    gradients = FlatGradients(
        dict(model.named_parameters()), Recorder(), WORLD, bucket_bytes=SMALL_BUCKETS, overlap=True
    )
    loss_of(model, 0, 0).backward()
    assert begun == []
    gradients.zero()
    gradients.begin(loss := loss_of(model, 0, 0))
    loss.backward()
    in_backward = list(begun)
    assert in_backward == [f"gradients.bucket{index}" for index in range(len(in_backward))]
    assert float(gradients.reduce()) == loss.item()
    assert begun == in_backward  # all began within
    gradients.begin(loss := loss_of(model, 0, 1))
    loss.backward()
    with pytest.raises(AssertionError, match="one backward pass a step"):
        loss_of(model, 0, 2).backward()


def test_a_single_rank_keeps_its_gradients_and_loss():
    model, alone = made_model(), made_model()
    gradients = FlatGradients(dict(model.named_parameters()), Recorder(), None, bucket_bytes=SMALL_BUCKETS)
    gradients.begin(loss := loss_of(model, 0, 0))
    loss.backward()
    assert float(gradients.reduce()) == loss.item()
    loss_of(alone, 0, 0).backward()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert gradients.state_dict() == {}


def test_a_state_of_another_compression_is_refused():
    top_k, as_they_are = (
        FlatGradients(
            dict(made_model().named_parameters()),
            Recorder(),
            None,
            bucket_bytes=SMALL_BUCKETS,
            compression=COMPRESSIONS[name],
        )
        for name in ("top-k", "none")
    )
    with pytest.raises(RunError, match=r"must hold nothing, got residual \(\d+,\), right \(0,\): resume with"):
        as_they_are.load_state_dict(top_k.state_dict())
    with pytest.raises(RunError, match=r"must hold residual \(\d+,\), right \(0,\), got nothing"):
        top_k.load_state_dict({})


# torch's compiler looks at autograd functions in a way that it warns of itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_buckets_begin_within_the_backward_pass_of_compiled_parts_too(monkeypatch):
    begun: list[str] = []
    monkeypatch.setattr(Wire, "all_reduce", lambda _, name, tensor: begun.append(name))
    layer = Layer(ModelSpec(width=16, num_heads=2, num_layers=1, feed_forward_width=24))
    h_ND, x_ND = (torch.randn(30, 16) for _ in range(2))
    compiled = compiled_dense("aot_eager")  # all of torch.compile but the code generator

    def run(_: str, operation: Operation, *arguments: object) -> object:
        return operation.function(*arguments)

    found = []
    for is_compiled in (False, True):
        begun.clear()
        gradients = FlatGradients(
            dict(layer.named_parameters()), Recorder(), WORLD, bucket_bytes=SMALL_BUCKETS, overlap=True
        )
        weights: dict[str, Tensor] = dict(layer.named_parameters())
        if is_compiled:
            q_ND, kv_N2D = compiled.before(weights, h_ND)
            out_ND = compiled.after(weights, h_ND, x_ND, None)
        else:
            q_ND, kv_N2D = before_attention(run, weights, h_ND)
            out_ND = after_attention(run, weights, h_ND, x_ND, None)
        loss = torch.stack([out.square().sum() for out in (q_ND, kv_N2D, out_ND)]).sum()
        gradients.begin(loss)
        loss.backward()
        within = list(begun)
        gradients.reduce()
        found.append(gradients.flat.clone())
        assert within == begun
        assert len(begun) > 3
    torch.testing.assert_close(found[1], found[0])


# --- Ranks played one after another, collective by collective.


class PlayedWire:
    """Stands in for `Wire`: notes where the result of a collective goes and what a rank gives to it."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = tuple(range(num_ranks))
        self.noted: tuple[Tensor, Tensor] | None = None

    def all_reduce(self, _: str, tensor: Tensor) -> None:
        self.noted = (tensor, tensor)

    def all_gather(self, _: str, gathered: Tensor, given: Tensor) -> None:
        self.noted = (gathered, given)

    def task(self, *_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def play(buckets: Sequence[BucketGradients], how: GradientCompression) -> None:
    """Reduce a bucket over ranks of this process, in place."""
    wires = [PlayedWire(len(buckets)) for _ in buckets]
    running = [reduction(bucket, how, cast(Wire, wire)) for bucket, wire in zip(buckets, wires, strict=True)]
    while [next(steps, PlayedWire) for steps in running] == [None] * len(running):
        noted = [wire.noted for wire in wires if wire.noted is not None]
        given = torch.stack([given for _, given in noted])
        for target, mine in noted:
            target.copy_(given.sum(0) if target is mine else given.flatten())


def made_buckets(shapes: Sequence[tuple[int, ...]], how: GradientCompression, num_ranks: int) -> list[BucketGradients]:
    """Return a bucket with gradients of these shapes and the loss, for each rank."""
    sizes = [math.prod(shape) for shape in shapes]
    columns = sum(shape[1] for shape in shapes if how.matrix_rank and is_factorised(shape, how.matrix_rank))
    start = torch.randn(columns * how.matrix_rank, generator=torch.Generator().manual_seed(1))
    buckets = []
    for _ in range(num_ranks):
        whole, residual = torch.zeros(sum(sizes) + 1), torch.zeros(sum(sizes))
        gradients, residuals = (
            [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
            for flat in (whole[:-1], residual)
        )
        factors = Factors(gradients, residuals, start.clone(), matrix_rank=how.matrix_rank) if columns else None
        buckets.append(
            BucketGradients(
                name="bucket", flat=whole[:-1], loss=whole[-1:], whole=whole, residual=residual, factors=factors
            )
        )
    return buckets


def top_k(kept_ratio: float) -> GradientCompression:
    return GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=kept_ratio)


def power_sgd(matrix_rank: int) -> GradientCompression:
    return GradientCompression(kind=CompressionKind.POWER_SGD, matrix_rank=matrix_rank)


shapes_of_buckets = st.lists(
    st.tuples(st.integers(1, 12)) | st.tuples(*[st.integers(1, 12)] * 2), min_size=1, max_size=4
)


@given(
    shapes=shapes_of_buckets,
    how=st.floats(0.01, 1).map(top_k) | st.integers(1, 3).map(power_sgd),
    num_ranks=st.integers(1, 4),
    num_steps=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_nothing_of_a_gradient_is_ever_lost(shapes, how, num_ranks, num_steps, seed):
    generator = torch.Generator().manual_seed(seed)
    buckets = made_buckets(shapes, how, num_ranks)
    total, received = torch.zeros_like(buckets[0].flat), torch.zeros_like(buckets[0].flat)
    for _ in range(num_steps):
        for rank, bucket in enumerate(buckets):
            bucket.flat.copy_(torch.randn(bucket.flat.numel(), generator=generator))
            bucket.loss.fill_(rank + 1)
            total += bucket.flat
        play(buckets, how)
        for bucket in buckets:
            assert torch.equal(bucket.whole, buckets[0].whole)
        assert float(buckets[0].loss) == num_ranks * (num_ranks + 1) / 2
        received += buckets[0].flat
    kept = torch.stack([bucket.residual for bucket in buckets]).sum(0)
    torch.testing.assert_close(received + kept, total, rtol=1e-4, atol=1e-4)


@given(shapes=shapes_of_buckets, kept_ratio=st.floats(0.01, 1), num_ranks=st.integers(1, 3), seed=st.integers(0, 100))
def test_top_k_sends_the_largest_entries_of_each_rank(shapes, kept_ratio, num_ranks, seed):
    generator = torch.Generator().manual_seed(seed)
    buckets = made_buckets(shapes, top_k(kept_ratio), num_ranks)
    expected = torch.zeros_like(buckets[0].flat)
    for bucket in buckets:
        bucket.flat.copy_(torch.randn(bucket.flat.numel(), generator=generator))
        order = sorted(range(bucket.flat.numel()), key=lambda index: -abs(float(bucket.flat[index])))
        for index in order[: math.ceil(kept_ratio * bucket.flat.numel())]:
            expected[index] += bucket.flat[index]
    play(buckets, top_k(kept_ratio))
    torch.testing.assert_close(buckets[0].flat, expected)


@given(
    num_ranks=st.integers(1, 3),
    rows=st.integers(8, 14),
    columns=st.integers(8, 14),
    matrix_rank=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_power_sgd_sends_gradients_of_no_higher_rank_as_they_are(num_ranks, rows, columns, matrix_rank, seed):
    generator = torch.Generator().manual_seed(seed)
    how = power_sgd(matrix_rank)
    buckets = made_buckets([(rows, columns), (columns,)], how, num_ranks)
    right = torch.randn(matrix_rank, columns, generator=generator)  # of all ranks, so that their sum has this rank too
    for bucket in buckets:
        left = torch.randn(rows, matrix_rank, generator=generator)
        bucket.flat.copy_(torch.cat([(left @ right).flatten(), torch.randn(columns, generator=generator)]))
    expected = torch.stack([bucket.flat for bucket in buckets]).sum(0)
    play(buckets, how)
    torch.testing.assert_close(buckets[0].flat, expected, rtol=1e-3, atol=1e-3)
    # A rank keeps of its own what the others' made up for.
    assert float(torch.stack([bucket.residual for bucket in buckets]).sum(0).abs().max()) < 1e-3


@pytest.mark.parametrize("matrix_rank", [6, 7])
def test_power_sgd_at_full_rank_is_the_sum(monkeypatch, matrix_rank):
    # Factors as wide as the matrix, or wider, are no smaller: it is sent as it is. Forced to send factors, it is the
    # same to rounding.
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randn(3, 9 * 6, generator=generator)
    for is_forced in (False, True):
        if is_forced:
            matrix_rank = 6
            for module in ("executor.compression", "tests.executor.test_gradients"):
                monkeypatch.setattr(f"{module}.is_factorised", lambda shape, _: len(shape) == 2)
        buckets = made_buckets([(9, 6)], power_sgd(matrix_rank), 3)
        assert (buckets[0].factors is not None) == is_forced
        for bucket, gradient in zip(buckets, drawn, strict=True):
            bucket.flat.copy_(gradient)
        play(buckets, power_sgd(matrix_rank))
        torch.testing.assert_close(buckets[0].flat, drawn.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("how", "ratio"),
    [
        (GradientCompression(), 1.0001),
        (COMPRESSIONS["bf16"], 1.01),
        (top_k(0.1), 1.01),
        (top_k(0.01), 1.05),
        (power_sgd(1), 1.01),
        (power_sgd(2), 1.01),
    ],
    ids=str,
)
def test_every_compression_learns_what_uncompressed_gradients_learn(how, ratio):
    # Least squares of three ranks with data of their own; the best loss is that of their normal equations.
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(40, 12, generator=generator) for _ in range(3)]
    targets = [torch.randn(40, 10, generator=generator) + 2 * rows[:, :10] for rows in data]
    best = torch.linalg.lstsq(torch.cat(data), torch.cat(targets)).solution
    weight = torch.zeros(12, 10)

    def loss_at(point: Tensor) -> float:
        return sum(float((rows @ point - wanted).square().sum()) for rows, wanted in zip(data, targets, strict=True))

    buckets = made_buckets([(12, 10)], how, 3)
    for step in range(600):
        for bucket, rows, wanted in zip(buckets, data, targets, strict=True):
            bucket.flat.copy_((2 * rows.T @ (rows @ weight - wanted)).flatten())
        play(buckets, how)
        weight -= 5e-4 * (1 - step / 600) * buckets[0].flat.view(12, 10)
    assert loss_at(weight) < ratio * loss_at(best)
    assert loss_at(torch.zeros(12, 10)) > 3 * loss_at(best)
