"""Reduces gradients of a small model among three gloo ranks, and by torch's DDP, and keeps what each rank got."""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in __all__
from torch.nn.parallel import DistributedDataParallel

from executor.launch import launch
from executor.mesh import Place, joined_mesh
from executor.parallel import FlatGradients
from executor.record import Mark, Recorder
from simulator.specs.cluster import DeviceKind
from simulator.specs.gradients import CompressionKind, GradientCompression

NUM_RANKS, NUM_STEPS = 3, 4
SMALL_BUCKETS, LARGE_BUCKETS = 600, 10**6  # bytes; the model's gradients are 1,980
COMPRESSIONS = {
    "none": GradientCompression(),
    "bf16": GradientCompression(kind=CompressionKind.BF16),
    "top-k": GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=0.2),
    "all entries": GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=1.0),
    "PowerSGD": GradientCompression(kind=CompressionKind.POWER_SGD, matrix_rank=2),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How gradients are reduced.

    Attributes:
        compression: key of `COMPRESSIONS`.
        has_idle_parameter: the first layer gets no gradient on rank 1.
        is_resumed: the state goes into gradients of another object after two steps.
    """

    compression: str
    overlap: bool = False
    bucket_bytes: int = SMALL_BUCKETS
    has_idle_parameter: bool = False
    is_resumed: bool = False


SETTINGS = [
    *(
        Setting(compression=name, overlap=overlap, bucket_bytes=bucket_bytes)
        for name in COMPRESSIONS
        for overlap in (False, True)
        for bucket_bytes in (SMALL_BUCKETS, LARGE_BUCKETS)
    ),
    *(
        Setting(compression=name, overlap=overlap, has_idle_parameter=True)
        for name in ("none", "PowerSGD")
        for overlap in (False, True)
    ),
    *(Setting(compression=name, is_resumed=True) for name in ("none", "top-k", "PowerSGD")),
]


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What one rank got.

    Attributes:
        losses: of each step, over all ranks.
        gradients: of each step, all parameters in a row.
        own_gradients: of each step, before they were reduced.
        residual: what it did not send in the end; empty where everything is sent.
        marks: of the last step.
    """

    losses: list[float]
    gradients: list[Tensor]
    own_gradients: list[Tensor]
    residual: Tensor
    marks: list[Mark]


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank got from each setting, and from DDP with a hook by name: its mean gradients of each step."""

    reduced: dict[Setting, Reduced]
    ddp: dict[str, list[Tensor]]


def made_model() -> nn.Sequential:
    """Return a model of two hidden layers, the same each time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 15), nn.Tanh(), nn.Linear(15, 15), nn.LayerNorm(15), nn.Tanh(), nn.Linear(15, 5))


def loss_of(model: nn.Module, rank: int, step: int, *, skips_first: bool = False) -> Tensor:
    """Return a rank's loss in a step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    layers = list(next(model.modules()).children())
    rows = torch.randn(6, 15 if skips_first else 10, generator=generator)
    for layer in layers[1:] if skips_first else layers:
        rows = layer(rows)
    return rows.square().sum()


def run_reductions(folder: Path) -> list[RankResult]:
    """Return what each rank got."""
    launch(_work, folder, num_ranks=NUM_RANKS, folder=folder)
    return [pickle.loads(_path(folder, rank).read_bytes()) for rank in range(NUM_RANKS)]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"reduced{rank}.pickle"


def _work(folder: Path, store: Store, rank: int) -> None:
    with joined_mesh(
        DeviceKind.CPU, PrefixStore("all", store), rank=rank, local_rank=rank, data_parallel_degree=NUM_RANKS
    ) as place:
        result = RankResult(
            reduced={setting: _reduced(setting, place) for setting in SETTINGS},
            ddp={name: list(_by_ddp(hook, place)) for name, hook in (("none", None), ("bf16", _in_bf16))},
        )
    _path(folder, rank).write_bytes(pickle.dumps(result))


def _gradients_of(model: nn.Module, recorder: Recorder, setting: Setting, place: Place) -> FlatGradients:
    return FlatGradients(
        dict(model.named_parameters()),
        recorder,
        place.world,
        bucket_bytes=setting.bucket_bytes,
        overlap=setting.overlap,
        compression=COMPRESSIONS[setting.compression],
    )


def _reduced(setting: Setting, place: Place) -> Reduced:
    model, recorder = made_model(), Recorder()
    gradients = _gradients_of(model, recorder, setting, place)
    skips_first = setting.has_idle_parameter and place.rank == 1
    losses, found, own = [], [], []
    for step in range(NUM_STEPS):
        if setting.is_resumed and step == 2:
            state = pickle.loads(pickle.dumps(gradients.state_dict()))
            model = made_model()
            gradients = _gradients_of(model, recorder, setting, place)
            gradients.load_state_dict(state)
        own.append(_own_gradients(place.rank, step, skips_first=skips_first))
        recorder.start()
        loss = loss_of(model, place.rank, step, skips_first=skips_first)
        gradients.begin(loss)
        loss.backward()
        losses.append(float(gradients.reduce()))
        found.append(gradients.flat.clone())
        gradients.zero()
        marks = recorder.stop()
    residual = gradients.state_dict().get("residual", torch.zeros(0))
    return Reduced(losses=losses, gradients=found, own_gradients=own, residual=residual, marks=marks)


def _own_gradients(rank: int, step: int, *, skips_first: bool) -> Tensor:
    """Return a rank's gradients, the last parameter's first."""
    model = made_model()
    loss_of(model, rank, step, skips_first=skips_first).backward()
    return _in_a_row(model)


def _in_a_row(model: nn.Module) -> Tensor:
    parameters = reversed(list(model.parameters()))
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def _by_ddp(hook: Callable[..., torch.futures.Future[Tensor]] | None, place: Place) -> Iterator[Tensor]:
    """Yield the mean gradients of each step by torch's DDP."""
    model = made_model()
    parallel = DistributedDataParallel(model)
    if hook is not None:
        parallel.register_comm_hook(None, hook)
    for step in range(NUM_STEPS):
        rows = torch.randn(6, 10, generator=torch.Generator().manual_seed(100 * place.rank + step))
        parallel(rows).square().sum().backward()
        yield _in_a_row(model).clone()
        model.zero_grad()


def _in_bf16(_: object, bucket) -> torch.futures.Future[Tensor]:
    """Do what torch's `bf16_compress_hook` does, which refuses gloo; dividing after the sum, so by rounding less."""
    half = bucket.buffer().to(torch.bfloat16)
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].float() / NUM_RANKS)  # type: ignore[no-any-return]
