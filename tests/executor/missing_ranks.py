"""Ranks that train nothing but meet as a training does, of which one misbehaves.

    python -m torch.distributed.run --nproc-per-node 3 -m tests.executor.missing_ranks NAME FOLDER

does under torchrun what `ended_ranks` does without a launcher, as on hosts that know nothing of each other.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # not in __all__

from executor.cli_errors import told_status
from executor.heartbeat import Heartbeat, backstop_seconds
from executor.launch import is_first_to_tell, run_as_rank
from executor.mesh import joined_mesh
from executor.position import Position
from executor.record import Recorder
from simulator.errors import RunError
from simulator.specs.cluster import DeviceKind
from simulator.specs.files import write_atomic
from simulator.specs.program import Phase, TaskKind

NUM_RANKS, BAD_RANK, BAD_STEP = 3, 2, 2
TIMEOUT_SECONDS = 2.0
_LONG_SECONDS = 60.0
# A rank rests so long in its last task, for its beat to tell of it.
_REST_SECONDS = 0.6


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What happens.

    Attributes:
        name: of the way in which a rank misbehaves, one of `WAYS`.
        folder: in which ranks leave unfinished files.
        num_ranks: that meet.
        bad_rank: that misbehaves.
        kind: of their devices.
    """

    name: str
    folder: Path
    num_ranks: int = NUM_RANKS
    bad_rank: int = BAD_RANK
    kind: DeviceKind = DeviceKind.CPU


def _sleep() -> None:
    time.sleep(_LONG_SECONDS)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise() -> None:
    raise RunError("the loss of step 2 is nan")


def _be_slow() -> None:
    time.sleep(0.55 * TIMEOUT_SECONDS)


WAYS = {"sleep": _sleep, "kill": _kill, "stop": _stop, "raise": _raise, "slow": _be_slow, "stuck inside": _sleep}


def misbehave(scene: Scene, store: Store, rank: int) -> None:
    """Run three steps of two layers; the bad rank misbehaves in the second one."""
    position = Position()
    heartbeat = Heartbeat(store, position, rank=rank, num_ranks=scene.num_ranks, folder=scene.folder)
    with heartbeat, heartbeat.failures_told():
        position.enter("the meeting of all ranks")
        mesh = joined_mesh(
            scene.kind,
            store,
            rank=rank,
            local_rank=rank,
            graph_parallel_degree=scene.num_ranks,
            timeout_seconds=backstop_seconds(TIMEOUT_SECONDS),
        )
        with mesh as place, heartbeat.failures_told():
            heartbeat.timeout_seconds = TIMEOUT_SECONDS
            recorder = Recorder(position=position)
            dist.barrier(place.world)
            for step in range(3):
                position.reach(f"step {step + 1}")
                is_bad = step + 1 == BAD_STEP and rank == scene.bad_rank
                numbers = torch.ones(1, device=place.device)
                for layer in range(2):
                    _layer(scene, recorder, layer, numbers, is_bad=is_bad)
                with position.waiting("the sum"):
                    numbers.item()


def _layer(scene: Scene, recorder: Recorder, layer: int, numbers: Tensor, *, is_bad: bool) -> None:
    bad = WAYS[scene.name] if is_bad else None
    slow = bad if scene.name == "slow" else None
    with recorder.task(f"layer{layer}.attention", TaskKind.ATTENTION, Phase.FORWARD, ()):
        if bad is not None and (layer == 1 or slow) and scene.name != "stuck inside":
            time.sleep(_REST_SECONDS)
            bad()
    with recorder.task(f"layer{layer}.feed_forward", TaskKind.LINEAR, Phase.FORWARD, ()):
        if slow:
            slow()
    group = tuple(range(scene.num_ranks))
    with recorder.task(f"layer{layer}.exchange", TaskKind.ALL_REDUCE, Phase.FORWARD, (4,), group):
        if bad is not None and layer == 1 and scene.name == "stuck inside":
            bad()
        dist.all_reduce(numbers)


def misbehave_while_writing(scene: Scene, store: Store, rank: int) -> None:
    """Do the same in the middle of writing a file, which nobody else removes."""
    write_atomic(scene.folder / f"result{rank}.json", lambda _: misbehave(scene, store, rank))


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks ended.

    Attributes:
        statuses: exit status of each rank.
        errors: what each said on standard error.
        seconds: from their start to the end of all.
    """

    statuses: tuple[int | None, ...]
    errors: tuple[str, ...]
    seconds: float


def ended_ranks(
    scene: Scene, *, store_on_rank_0: bool = False, wait_for: Sequence[int] = tuple(range(NUM_RANKS))
) -> Ended:
    """Return how ranks ended that no launcher looks after.

    Args:
        store_on_rank_0: keep the store in the process of rank 0 and not in one that stays.
        wait_for: ranks that are to end by themselves.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    store = None if store_on_rank_0 else TCPStore("localhost", 0, None, True, wait_for_workers=False)
    port = _free_port() if store is None else store.port
    ranks = [context.Process(target=_rank, args=(scene, rank, port, store is None)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    started = time.monotonic()
    for rank in wait_for:
        ranks[rank].join(_LONG_SECONDS)
    ended = Ended(
        statuses=tuple(process.exitcode for process in ranks),
        errors=tuple((scene.folder / f"rank{rank}.err").read_text() for rank in range(NUM_RANKS)),
        seconds=time.monotonic() - started,
    )
    for process in ranks:
        process.kill()
        process.join()
    return ended


def _rank(scene: Scene, rank: int, port: int, store_on_rank_0: bool) -> None:
    with (scene.folder / f"rank{rank}.err").open("wb") as file:
        os.dup2(file.fileno(), 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "made",
        "TORCHELASTIC_USE_AGENT_STORE": str(not store_on_rank_0),
    }
    sys.exit(_status(scene))


def _status(scene: Scene) -> int:
    try:
        run_as_rank(misbehave_while_writing, scene)
    except BaseException as error:
        return told_status(error, debug=False, may_tell=is_first_to_tell)
    return 0


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(_status(Scene(name=sys.argv[1], folder=Path(sys.argv[2]))))
