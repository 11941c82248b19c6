"""Shares of cores by hand, and the threads of this process."""

import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor import affinity
from executor.affinity import cores_of_masks, cores_of_rank, cores_text, neighbourhood, pinned, share_of_cores
from executor.environment import environment, environment_differences
from simulator.specs.cluster import DeviceKind

EIGHT = frozenset(range(8))


def write_topology(system, nodes, siblings):
    for node, cores in enumerate(nodes):
        (system / f"node/node{node}").mkdir(parents=True)
        (system / f"node/node{node}/cpulist").write_text(f"{cores}\n")
    for core, threads in siblings.items():
        (system / f"cpu/cpu{core}/topology").mkdir(parents=True)
        (system / f"cpu/cpu{core}/topology/thread_siblings_list").write_text(f"{threads}\n")


def test_ranks_divide_the_cores_of_the_host_between_them():
    shares = [share_of_cores([EIGHT] * 3, rank, sorted(EIGHT)) for rank in range(3)]
    assert shares == [(0, 1), (2, 3, 4), (5, 6, 7)]


def test_ranks_on_gpus_divide_the_cores_near_their_gpus():
    near = [frozenset({0, 1, 2, 3}), frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7}), frozenset({4, 5, 6, 7})]
    shares = [share_of_cores(near, rank, sorted(EIGHT)) for rank in range(4)]
    assert shares == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_more_ranks_than_cores_are_kept_from_none():
    assert [share_of_cores([frozenset({3, 5})] * 3, rank, [3, 5]) for rank in range(3)] == [(3, 5)] * 3


@given(count=st.integers(1, 12), cores=st.frozensets(st.integers(0, 40), min_size=1, max_size=24))
def test_shares_are_disjoint_equal_but_for_one_and_leave_no_core_out(count, cores):
    shares = [share_of_cores([cores] * count, rank, sorted(cores)) for rank in range(count)]
    if len(cores) < count:
        assert all(frozenset(share) == cores for share in shares)
        return
    assert sorted(core for share in shares for core in share) == sorted(cores)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_threads_of_a_core_and_cores_of_a_node_are_neighbours(tmp_path):
    # Two nodes of two cores with two threads each, numbered as Linux does on x86: first threads first.
    siblings = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}
    write_topology(tmp_path, ["0-1,4-5", "2-3,6-7"], siblings)
    assert neighbourhood(EIGHT, tmp_path) == [0, 4, 1, 5, 2, 6, 3, 7]


def test_cores_follow_their_numbers_where_the_system_says_nothing(tmp_path):
    assert neighbourhood(frozenset({5, 1, 3}), tmp_path) == [1, 3, 5]


def test_nvmls_masks_are_words_of_64_cores():
    assert cores_of_masks([0b101, 1 << 63 | 1]) == {0, 2, 64, 127}


def test_a_rank_on_a_gpu_runs_near_it_as_far_as_it_may_run_there(monkeypatch):
    allowed = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(affinity, "cores_near_gpu", lambda index: frozenset({allowed[index], 10_000}))
    assert cores_of_rank("cuda", 0, 1) == (allowed[0],)
    monkeypatch.setattr(affinity, "cores_near_gpu", lambda index: frozenset({10_000}))
    assert cores_of_rank("cuda", 0, 1) == tuple(allowed)


def test_cores_are_written_as_the_system_does():
    assert [cores_text(cores) for cores in [(0,), (3, 0, 1, 2), (8, 0, 1)]] == ["0", "0-3", "0-1,8"]


def test_all_threads_keep_to_the_cores_and_get_the_others_back_afterwards():
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    begun, go_on, found = threading.Event(), threading.Event(), []

    def run() -> None:
        begun.set()
        go_on.wait(10)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait(10)
    num_threads = torch.get_num_threads()
    with pinned((min(before),)):
        assert os.sched_getaffinity(0) == {min(before)}
        assert torch.get_num_threads() == 1  # no more threads than cores
        go_on.set()
        thread.join()
    assert found == [{min(before)}]
    assert os.sched_getaffinity(0) == before
    assert torch.get_num_threads() == num_threads


def test_without_cores_nothing_changes():
    before = os.sched_getaffinity(0)
    with pinned(None):
        assert os.sched_getaffinity(0) == before


def test_the_environment_of_a_run_tells_the_cores_of_each_rank_and_a_calibration_does_not_mind():
    entries = environment(DeviceKind.CPU, cores=[(0, 1), None])
    assert dict(entries)["cores"] == "0-1 | any"
    assert environment_differences(environment(DeviceKind.CPU), entries) == []
