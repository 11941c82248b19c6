"""Ranks agree on their plan and on the sizes of their messages before any collective.

gloo ends a process from C++ where two ranks give a collective different sizes, and NCCL waits for ever. Sizes differ
where hosts hold other files or versions; compared through the store, that is a sentence.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from executor.exchange import ExchangeLayout
from simulator.errors import PlanError

_FIX = "give all ranks the same plan, partition, graph and version of graphpilot, and the same checkpoint"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What one rank brings to the collectives of its run.

    Attributes:
        counts: numbers, by what they count, and hashes, by what they are of, that are the same on all ranks.
        layouts: by what they are for, the rows that a rank exchanges.
        host: on which it was started.
        ranks_per_host: that its hierarchical exchange counts on; None without one.
    """

    counts: Mapping[str, int | str]
    layouts: Mapping[str, "Rows"] = field(default_factory=dict)
    host: int = 0
    ranks_per_host: int | None = None


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows that a rank exchanges.

    Attributes:
        ranks: of its group, in order.
        rows_to, rows_from: of each of them.
        max_rows: own rows of the largest rank of the group.
    """

    ranks: tuple[int, ...]
    rows_to: tuple[int, ...]
    rows_from: tuple[int, ...]
    max_rows: int


def rows_of(layout: ExchangeLayout) -> Rows:
    """Return the rows of a layout that has a group."""
    return Rows(
        ranks=layout.ranks,
        rows_to=tuple(layout.rows_to),
        rows_from=tuple(layout.rows_from),
        max_rows=layout.max_rows,
    )


def require_agreement(store: Store, mine: Sizes, *, about: str, rank: int, num_ranks: int) -> None:
    """Return when all ranks have told their sizes and these fit together.

    Args:
        about: tells several agreements of a run apart.

    Raises:
        PlanError: if they do not; the same on all ranks.
    """
    if num_ranks == 1:
        return
    keys = [f"{about} of rank {other}" for other in range(num_ranks)]
    store.set(keys[rank], json.dumps(asdict(mine)))
    while not store.check(keys):  # the heartbeat ends a wait that lasts too long
        time.sleep(0.01)
    sizes = [_sizes_from_json(text) for text in store.multi_get(keys)]
    if found := misplacement(sizes):
        raise PlanError(found)
    if found := disagreement(sizes):
        raise PlanError(f"{found}: {_FIX}")


def misplacement(ranks: Sequence[Sizes]) -> str:
    """Return which rank was started on another host than a hierarchical exchange has it on; empty if none was."""
    for rank, sizes in enumerate(ranks):
        if sizes.ranks_per_host is not None and sizes.host != rank // sizes.ranks_per_host:
            return (
                f"rank {rank} was started on host {sizes.host}, but the plan's hierarchical exchange has it on host "
                f"{rank // sizes.ranks_per_host}: start {sizes.ranks_per_host} ranks a host, or plan for these hosts"
            )
    return ""


def disagreement(ranks: Sequence[Sizes]) -> str:
    """Return the first thing in which ranks differ, in a sentence; empty if all fits together."""
    first = ranks[0]
    for rank, sizes in enumerate(ranks):
        for name, there in first.counts.items():
            here = sizes.counts[name]
            if here != there and isinstance(here, str):
                return f"rank {rank} has another {name} than rank 0"
            if here != there:
                return f"rank {rank} has {name} = {here}, but rank 0 has {there}"
        if sizes.layouts.keys() != first.layouts.keys():
            return f"rank {rank} exchanges rows in {_listed(sizes)}, but rank 0 in {_listed(first)}"
    for name in first.layouts:
        if found := _misfit(name, [sizes.layouts[name] for sizes in ranks]):
            return found
    return ""


def _misfit(name: str, rows_of_rank: Sequence[Rows]) -> str:
    """Return a pair of ranks of which one sends other rows than the other expects."""
    for rank, mine in enumerate(rows_of_rank):
        for peer, rows_to, rows_from in zip(mine.ranks, mine.rows_to, mine.rows_from, strict=True):
            other = rows_of_rank[peer]
            if other.ranks != mine.ranks:
                return (
                    f"rank {rank} exchanges rows with ranks {mine.ranks} in {name}, but rank {peer} with {other.ranks}"
                )
            place = mine.ranks.index(rank)
            if rows_to != other.rows_from[place]:
                return (
                    f"rank {rank} sends {rows_to} rows to rank {peer} in {name}, but that expects "
                    f"{other.rows_from[place]}"
                )
            if rows_from != other.rows_to[place]:
                return (
                    f"rank {rank} expects {rows_from} rows of rank {peer} in {name}, but that sends "
                    f"{other.rows_to[place]}"
                )
            if mine.max_rows != other.max_rows:
                return (
                    f"rank {rank} holds at most {mine.max_rows} rows in {name}, but rank {peer} counts {other.max_rows}"
                )
    return ""


def _listed(sizes: Sizes) -> str:
    return ", ".join(sizes.layouts) or "nothing"


def _sizes_from_json(text: str | bytes) -> Sizes:
    plain = json.loads(text)
    layouts = {
        name: Rows(
            ranks=tuple(rows["ranks"]),
            rows_to=tuple(rows["rows_to"]),
            rows_from=tuple(rows["rows_from"]),
            max_rows=rows["max_rows"],
        )
        for name, rows in plain["layouts"].items()
    }
    return Sizes(counts=plain["counts"], layouts=layouts, host=plain["host"], ranks_per_host=plain["ranks_per_host"])
