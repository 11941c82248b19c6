"""`graphpilot train --dry-run` as a user meets it: what it prints, refuses, and says of plans that are wrong."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import executor.dry_run
from executor.cli_dry_run import MAX_CLASSES_SHOWN
from executor.dry_run import dry_run
from executor.rehearsal import Rehearsal
from executor.run import PlanRun
from planner.hosts import host_rows
from simulator.readers.partitions import parts_sha256, read_partition
from simulator.specs.cluster import DeviceKind
from simulator.specs.files import read_plan, write_plan
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.plan import Exchange, ExchangePayload, Offload, Recompute
from simulator.specs.program import Program, TaskKind
from simulator.specs.units import GIB, Dtype
from simulator.workload import lower
from tests.executor.checkpoint_cases import NUM_SAVED_STEPS, SAVED, UNSAVED, graph_in, planned, saved
from tests.executor.commands import Done, run_here
from tests.made import made_cluster
from tests.plans import Choices

HALO, GATHER, HEADS = Exchange.HALO, Exchange.ALL_GATHER, Exchange.HEAD_ALL_TO_ALL
POWER_SGD = GradientCompression(kind=CompressionKind.POWER_SGD, matrix_rank=2)


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    """Runs commands in this process, in a fresh folder, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: run_here(monkeypatch, capfd, "train", "--dry-run", *arguments)


def found_by(done: Done) -> dict[str, Any]:
    """Return the JSON object that a dry run printed."""
    found = json.loads(done.out)
    assert isinstance(found, dict)
    return found


def rewritten(run: PlanRun, **changes) -> PlanRun:
    """Write a plan file anew with other fields."""
    write_plan(run.plan_path, replace(read_plan(run.plan_path), **changes))
    return run


def on_many_devices(run: PlanRun, *, memory_bytes: int = 64 * GIB) -> PlanRun:
    """Write a plan file anew for hosts of eight devices."""
    return rewritten(run, cluster=made_cluster(devices_per_host=8, memory_bytes=memory_bytes))


# --- Plans that run.

PLANS = {
    "one rank": Choices(),
    "2 ranks, halo": Choices(graph_parallel_degree=2, exchange=HALO),
    "3 ranks, all-gather of rows, recomputed": Choices(
        graph_parallel_degree=3,
        exchange=GATHER,
        exchange_payload=ExchangePayload.ROWS,
        recompute=(Recompute.LAYER, Recompute.NONE),
    ),
    "5 ranks, more than heads": Choices(graph_parallel_degree=5, exchange=HEADS),
    "7 ranks, parts on 2, 3, 1 and 1": Choices(graph_parallel_degree=7, part_ranks=(2, 3, 1, 1)),
    "8 ranks, halo and heads, overlapped, bf16, buckets beside": Choices(
        graph_parallel_degree=8,
        exchange=(HALO, GATHER),
        overlap_exchange=True,
        precision=Dtype.BFLOAT16,
        overlap_gradients=True,
        gradient_bucket_bytes=4096,
    ),
    "2 replicas of 3 ranks, clusters made ahead, chunks, PowerSGD": Choices(
        data_parallel_degree=2,
        graph_parallel_degree=3,
        num_parts=12,
        exchange=(GATHER, HALO),
        exchange_chunk_bytes=2048,
        prefetch_batches=1,
        gradient_compression=POWER_SGD,
    ),
    "4 replicas, sampled": Choices(data_parallel_degree=4, num_parts=4, fan_outs=(3, 2), seeds_per_batch=5),
    "2 replicas of 2 stages of 2 graph ranks, micro-batches": Choices(
        data_parallel_degree=2,
        pipeline_parallel_degree=2,
        stages=(1, 1),
        num_micro_batches=3,
        graph_parallel_degree=2,
        num_parts=12,
        exchange=HALO,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_runs_has_nothing_wrong(command, tmp_path, name):
    choices = PLANS[name]
    run = on_many_devices(planned(tmp_path, "a", choices, UNSAVED))
    done = command(run.plan_path, "--json")
    assert (done.status, done.err) == (0, "")
    found = found_by(done)
    assert (found["findings"], found["misfit"]) == ([], "")
    assert found["num_ranks"] == choices.num_ranks == sum(len(each["ranks"]) for each in found["memory"])
    assert len(found["ranks_run"]) == found["num_rank_classes"]
    assert found["mesh"] == {
        "dp": choices.data_parallel_degree,
        "pp": choices.pipeline_parallel_degree,
        "gp": choices.graph_parallel_degree,
        "tp": choices.tensor_parallel_degree,
    }
    assert any("edges and halo rows of all parts" in sentence for sentence in found["checked"])
    assert not run.out.exists()


def test_a_plan_of_gpus_that_keeps_layers_on_the_host_goes_through_on_cores(command, tmp_path):
    # In 16 bits GPUs keep other tensors than cores, so that other bytes would be copied there.
    choices = Choices(
        graph_parallel_degree=2,
        exchange=(HALO, GATHER),
        overlap_exchange=True,
        precision=Dtype.BFLOAT16,
        recompute=(Recompute.SELECTIVE, Recompute.NONE),
        offload=Offload.ACTIVATIONS,
        offload_min_bytes=1,
        offload_optimizer=True,
    )
    run = planned(tmp_path, "a", choices, UNSAVED)
    cluster = made_cluster(kind=DeviceKind.CUDA, memory_bytes=64 * GIB)
    found = found_by(command(rewritten(run, cluster=cluster).plan_path, "--json"))
    assert (found["findings"], len(found["ranks_run"])) == ([], 2)
    on_gpus, on_cores = (
        lower(file.plan, file.graph, file.model, each).tasks[0]
        for file in (read_plan(run.plan_path),)
        for each in (cluster, made_cluster())
    )
    copies = [[task.shape for task in tasks if task.kind is TaskKind.COPY_TO_HOST] for tasks in (on_gpus, on_cores)]
    assert copies[0] != copies[1]


def test_a_hierarchical_exchange_goes_through_on_hosts_of_unequal_numbers_of_ranks(command, tmp_path):
    run = planned(tmp_path, "a", Choices(graph_parallel_degree=3, exchange=HALO), UNSAVED)
    file, (_, graph) = read_plan(run.plan_path), graph_in(tmp_path)
    part_N = read_partition(file.plan.partition, folder=run.plan_path.parent, num_nodes=graph.num_nodes)
    partition = replace(file.plan.partition, hosts=host_rows(graph, part_N, 3, ranks_per_host=2))
    plan = replace(file.plan, partition=partition, exchange=(Exchange.HIERARCHICAL_HALO, HALO))
    rewritten(run, plan=plan, cluster=made_cluster(num_hosts=2, devices_per_host=2))
    found = found_by(command(run.plan_path, "--json"))
    assert (found["findings"], found["ranks_run"]) == ([], [0, 1, 2])


def test_it_is_told_in_eighty_columns_what_was_looked_at_and_what_was_not(command, tmp_path):
    run = on_many_devices(
        planned(tmp_path, "a", PLANS["8 ranks, halo and heads, overlapped, bf16, buckets beside"], UNSAVED)
    )
    done = command(run.plan_path)
    assert done.status == 0
    lines = done.out.splitlines()
    assert lines[0].startswith("8 ranks (1 dp x 1 pp x 8 gp x 1 tp); ")
    assert "fits every device" in lines
    assert "ran a step on fake tensors: ranks 0-7" in lines
    assert any(line.startswith("checked: sends and receives of all 8 ranks") for line in lines)
    assert "not checked: numbers, speed, evaluations and the writing of checkpoints" in lines
    assert lines[-1].startswith("nothing wrong; took ")
    table = [line for line in lines if line.endswith((" B", "iB"))]
    assert 1 <= len(table) <= MAX_CLASSES_SHOWN + 1
    assert all(len(line) <= 80 for line in table)


def test_quiet_prints_nothing(command, tmp_path):
    run = planned(tmp_path, "a", train=UNSAVED)
    done = command(run.plan_path, "--quiet")
    assert (done.status, done.out, done.err) == (0, "", "")


def test_without_its_graph_a_plan_is_checked_by_its_counts_and_says_so(command, tmp_path):
    run = planned(tmp_path, "a", Choices(graph_parallel_degree=2, exchange=HALO), UNSAVED)
    (tmp_path / "graph").rename(tmp_path / "elsewhere")
    found = found_by(command(run.plan_path, "--json"))
    assert (found["findings"], found["ranks_run"]) == ([], [0, 1])
    assert "nodes of all parts, counted in the partition file" in found["checked"]
    assert any(
        "graph is not here: rows and edges are those that the plan counts" in each for each in found["unchecked"]
    )


def test_of_many_ranks_that_differ_some_go_through_a_step_and_the_others_are_counted(command, tmp_path, monkeypatch):
    monkeypatch.setattr(executor.dry_run, "MOST_TASKS", 1)
    monkeypatch.setattr(executor.dry_run, "LEAST_RANKS", 3)
    run = on_many_devices(planned(tmp_path, "a", Choices(graph_parallel_degree=8, exchange=HALO), UNSAVED))
    found = found_by(command(run.plan_path, "--json"))
    assert (len(found["ranks_run"]), found["num_rank_classes"]) == (3, 8)
    fullest, emptiest = found["memory"][0], found["memory"][-1]
    assert fullest["peak_bytes"] > emptiest["peak_bytes"]
    assert {fullest["ranks"][0], emptiest["ranks"][0]} <= set(found["ranks_run"])
    assert "5 of 8 ranks that differ went through no step: their counts alone match" in found["unchecked"]


# --- Plans that do not.


def refusal(done: Done, status: int) -> str:
    """Return the one sentence of a dry run that refused before it had a result."""
    assert (done.status, done.out) == (status, ""), done.err
    (sentence,) = [line for line in done.err.splitlines() if line.startswith("graphpilot: ")]
    assert "Traceback" not in done.err
    return sentence


def test_a_plan_that_does_not_fit_is_told_with_the_rank_and_ends_with_three(command, tmp_path):
    run = on_many_devices(
        planned(tmp_path, "a", Choices(graph_parallel_degree=2, exchange=HALO), UNSAVED), memory_bytes=GIB // 4
    )
    done = command(run.plan_path, "--json")
    assert done.status == 3
    assert "does not fit: rank " in done.err
    assert "of 256 MiB" in done.err
    found = found_by(done)
    assert found["misfit"].startswith("rank ")
    assert [each["fits"] for each in found["memory"]] == [False, False]
    assert found["findings"] == []


def test_a_plan_for_more_devices_than_there_are_is_refused_as_training_refuses_it(command, tmp_path):
    run = planned(tmp_path, "a", Choices(graph_parallel_degree=4, exchange=HALO), UNSAVED)
    rewritten(run, cluster=made_cluster(devices_per_host=2))
    assert "plan.num_ranks=4 must not exceed cluster.num_devices=2" in refusal(command(run.plan_path), 2)


def test_a_partition_of_other_counts_than_the_plan_s_is_named(command, tmp_path):
    run = planned(tmp_path, "a", Choices(graph_parallel_degree=3, exchange=HALO), UNSAVED)
    file = read_plan(run.plan_path)
    path = run.plan_path.parent / file.plan.partition.path
    part_N = np.load(path)
    moved = int(np.flatnonzero(part_N == 0)[0])
    part_N[moved] = 1
    np.save(path, part_N)
    # A file that was changed is named by its hash, as training names it;
    assert "sha256 must be" in refusal(command(run.plan_path), 2)
    # counts that were made of another file, by the part.
    partition = replace(file.plan.partition, sha256=parts_sha256(part_N))
    rewritten(run, plan=replace(file.plan, partition=partition))
    sentence = refusal(command(run.plan_path), 2)
    assert str(path) in sentence
    num_nodes = file.plan.partition.parts[0].num_nodes
    assert f"part 0 must own {num_nodes} nodes as in the plan, got {num_nodes - 1}" in sentence


def test_a_program_whose_ranks_do_not_match_is_named_and_ends_with_five(command, tmp_path, monkeypatch):
    def with_a_rank_that_sends_less(*arguments, **fields) -> Program:
        program = lower(*arguments, **fields)
        tasks = [
            replace(task, shape=(task.shape[0], max(task.shape[1] - 4, 0))) if task.name == "layer1.exchange" else task
            for task in program.tasks[0]
        ]
        return Program(tasks=(tuple(tasks), *program.tasks[1:]))

    monkeypatch.setattr(executor.dry_run, "lower", with_a_rank_that_sends_less)
    run = planned(tmp_path, "a", Choices(graph_parallel_degree=2, exchange=HALO), UNSAVED)
    done = command(run.plan_path, "--json")
    assert done.status == 5
    findings = found_by(done)["findings"]
    assert findings[0].startswith("step 1: rank 0 sends ")
    assert 'to rank 1 in "layer1.exchange" (all_to_all of ranks 0-1), but that expects ' in findings[0]
    # The step of that rank sends other bytes than its program says, which is found apart from that.
    assert any(each.startswith("rank 0, layer1.exchange: shape must be ") for each in findings[1:])
    assert "a run would fail: step 1: rank 0 sends " in done.err


def test_an_earlier_run_s_checkpoints_are_told_as_training_tells_them(command, tmp_path):
    run = planned(tmp_path, "a", train=SAVED)
    checkpoint = run.out / "checkpoints" / "step00000006"
    checkpoint.mkdir(parents=True)
    assert "is of an earlier run: go on from it with --resume auto" in refusal(
        command(run.plan_path, "--out", run.out), 2
    )
    sentence = refusal(command(run.plan_path, "--out", run.out, "--resume", "auto"), 2)
    assert f"{checkpoint}/manifest.json" in sentence
    assert checkpoint.exists()


def test_choices_that_would_have_no_effect_are_refused(command, tmp_path, monkeypatch):
    run = planned(tmp_path, "a", train=UNSAVED)
    assert "--kineto must be left out" in refusal(command(run.plan_path, "--kineto", "k"), 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "0")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("executor.cli_dry_run.is_under_torchrun", lambda: True)
    monkeypatch.setattr("executor.cli._may_tell", lambda: True)
    assert "--dry-run must be started alone" in refusal(command(run.plan_path), 2)


def test_a_step_that_cannot_run_without_numbers_is_said_to_be_unchecked(tmp_path, monkeypatch):
    run = planned(tmp_path, "a", train=UNSAVED)
    monkeypatch.setattr(
        executor.dry_run,
        "rehearse",
        lambda file, rank, tasks, **_: Rehearsal(rank=rank, findings=(), unchecked=("layer0: why",)),
    )
    found = dry_run(run)
    assert found.ranks_run == ()
    assert "rank 0, layer0: why" in found.unchecked
    assert not any("on fake tensors" in sentence for sentence in found.checked)


@pytest.mark.dist
def test_a_checkpoint_fits_the_plan_that_it_is_of_and_no_other(command, monkeypatch, capfd, tmp_path):
    run = planned(tmp_path, "a", train=replace(SAVED, num_steps=NUM_SAVED_STEPS + 1))
    assert run_here(monkeypatch, capfd, "train", run.plan_path, "--out", run.out, "--quiet").status == 0
    resume = (run.plan_path, "--out", run.out, "--resume", "auto", "--json")
    found = found_by(command(*resume))
    assert f"{saved(run)} fits the plan" in found["checked"]
    rewritten(run, train=replace(SAVED, seed=SAVED.seed + 1))
    assert f"train.seed must be {SAVED.seed} as in the checkpoint" in refusal(command(*resume), 2)
