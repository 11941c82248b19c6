"""Sizes that ranks bring to their collectives, by hand."""

import threading
from dataclasses import replace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from executor.agreement import Rows, Sizes, disagreement, misplacement, require_agreement
from simulator.errors import PlanError


def sizes(rows_to, rows_from, *, max_rows=10, ranks=(0, 1), **counts) -> Sizes:
    rows = Rows(ranks=ranks, rows_to=rows_to, rows_from=rows_from, max_rows=max_rows)
    return Sizes(counts={"parameters": 100, "plan": "12", **counts}, layouts={"step 1": rows})


FITTING = [sizes((0, 4), (0, 3)), sizes((3, 0), (4, 0))]


def test_sizes_that_fit_together_pass():
    assert disagreement(FITTING) == ""


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (sizes((3, 0), (5, 0)), "rank 0 sends 4 rows to rank 1 in step 1, but that expects 5"),
        (sizes((2, 0), (4, 0)), "rank 0 expects 3 rows of rank 1 in step 1, but that sends 2"),
        (
            sizes((3, 0), (4, 0), max_rows=11),
            "rank 0 holds at most 10 rows in step 1, but rank 1 counts 11",
        ),
        (sizes((3, 0), (4, 0), parameters=90), "rank 1 has parameters = 90, but rank 0 has 100"),
        (sizes((3, 0), (4, 0), plan="ab"), "rank 1 has another plan than rank 0"),
        (replace(FITTING[1], layouts={}), "rank 1 exchanges rows in nothing, but rank 0 in step 1"),
        (
            sizes((0,), (0,), ranks=(1,)),
            r"rank 0 exchanges rows with ranks (0, 1) in step 1, but rank 1 with (1,)",
        ),
    ],
)
def test_what_does_not_fit_is_named(second, sentence):
    assert disagreement([FITTING[0], second]) == sentence


def test_groups_side_by_side_are_compared_each_for_itself():
    pair = [sizes((0, 1), (0, 2), ranks=(2, 3)), sizes((2, 0), (1, 0), ranks=(2, 3))]
    assert disagreement([*FITTING, *pair]) == ""
    wrong = sizes((2, 0), (7, 0), ranks=(2, 3))
    assert disagreement([*FITTING, pair[0], wrong]) == "rank 2 sends 1 rows to rank 3 in step 1, but that expects 7"


def test_a_rank_on_another_host_than_its_hierarchical_exchange_counts_on_is_named():
    def started(*hosts: int, ranks_per_host: int | None = 2) -> list[Sizes]:
        return [replace(FITTING[0], host=host, ranks_per_host=ranks_per_host) for host in hosts]

    assert misplacement(started(0, 0, 1, 1)) == ""
    assert misplacement(started(0, 0, 1)) == ""
    assert misplacement(started(0, 0, 0, 0, ranks_per_host=None)) == ""
    assert misplacement(started(0, 0, 0, 1)) == (
        "rank 2 was started on host 0, but the plan's hierarchical exchange has it on host 1: start 2 ranks a host, or "
        "plan for these hosts"
    )
    assert "rank 1 was started on host 1" in misplacement(started(0, 1, 2, 3))


def test_all_ranks_give_the_same_reason():
    store, reasons = HashStore(), []

    def compare(rank: int, mine: Sizes) -> None:
        try:
            require_agreement(store, mine, about="sizes", rank=rank, num_ranks=2)
        except PlanError as error:
            reasons.append(str(error))

    threads = [
        threading.Thread(target=compare, args=(0, FITTING[0])),
        threading.Thread(target=compare, args=(1, sizes((3, 0), (5, 0)))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    sentence = "rank 0 sends 4 rows to rank 1 in step 1, but that expects 5: give all ranks the same plan, partition, "
    assert reasons == [f"{sentence}graph and version of graphpilot, and the same checkpoint"] * 2


def test_ranks_that_go_on_from_different_steps_are_told_so():
    ranks = [Sizes(counts={"steps done": done, "checkpoint": name}) for done, name in ((8, "ab"), (0, ""))]
    assert disagreement(ranks) == "rank 1 has steps done = 0, but rank 0 has 8"


def test_a_rank_alone_agrees_with_itself():
    require_agreement(HashStore(), FITTING[0], about="sizes", rank=0, num_ranks=1)
