"""Logs of collective times, as nccl-tests and others write them: each file is read, or refused with a sentence."""

import json
from pathlib import Path

import pytest

from simulator.errors import SpecError
from simulator.group_shape import even_shape
from simulator.readers.collective_log import CollectiveLog
from simulator.readers.nccl_tests import read_collective_log
from simulator.readers.own_logs import log_text
from simulator.specs.communication import Algorithm, Operation, Protocol, bus_factor
from tests.conftest import SHARED

FOLDERS = (SHARED / "nccl_logs", SHARED / "measured/h200x2")
FILES = sorted(
    path for folder in FOLDERS for path in folder.glob("*") if folder.name == "nccl_logs" or path.suffix == ".csv"
)
# These hold no times of collectives: what the folder holds, and of compute kernels.
REFUSED = {"00_INDEX.txt", "README.md", "kernels.csv"}
# Rows as the index of the folder counts them; the tables of peaks have a row for each set of settings, of which those
# of a switch's own reduction are not modelled.
INDEX = (
    {
        line.split()[0]: int(line.split("rows=")[1].split()[0])
        for line in (FOLDERS[0] / "00_INDEX.txt").read_text().splitlines()
        if " rows=" in line
    }
    if FOLDERS[0].is_dir()
    else {}
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_read_or_refused_with_a_sentence(path):
    if path.name in REFUSED:
        with pytest.raises(SpecError, match=f"{path.name}.*must") as refused:
            read_collective_log(path)
        assert "\n" not in str(refused.value)
        return
    log = read_collective_log(path)
    counted = len(log.rows) + len(log.estimates)
    if path.name in INDEX:
        expected = {"b200_ndr_ag_rs_ar_4n32g_peak_together.txt": 6 * 3}.get(path.name, INDEX[path.name])
        assert counted == expected
    assert counted > 0
    for row in log.rows:
        assert 0 < row.low_seconds <= row.seconds <= row.high_seconds < 1
        assert row.shape.num_ranks >= 2


def test_the_folder_is_there_where_the_team_works(shared_logs):
    assert len(INDEX) == 28
    assert set(INDEX) == {path.name for path in shared_logs.iterdir()} - REFUSED


def test_a_row_by_hand(shared_logs):
    log = read_collective_log(shared_logs / "h100_ndr_allreduce_2n16g_default_nccltests309_siteA.txt")
    row = log.rows[0]
    assert (row.operation, row.num_bytes, row.shape) == (Operation.ALL_REDUCE, 8, even_shape(16, 2))
    assert (row.seconds, row.high_seconds) == pytest.approx((24.70e-6, 68.52e-6))  # in-place is faster
    assert (log.device, log.cards_per_host, log.card_bytes_per_second) == ("H100", 8, 50e9)
    assert not log.is_roce
    assert log.has_nvls


@pytest.mark.parametrize("path", [path for path in FILES if path.name not in REFUSED], ids=lambda path: path.name)
def test_bandwidths_follow_from_times_as_the_files_print_them(path):
    """Recompute bus bandwidths that files print, from times, bytes and ranks: errors in units or columns show."""
    log = read_collective_log(path)
    words = [line.split() for line in path.read_text().splitlines() if line[:1].isspace() and "float" in line]
    rows = [row for row in log.rows if row.num_bytes >= 2**26]
    for row in rows if words else ():
        rate = row.num_bytes * bus_factor(row.operation, row.shape.num_ranks) / row.seconds / 1e9
        printed = [
            float(found[index + 2])
            for found in words
            if int(found[0]) == row.num_bytes
            for index, word in enumerate(found[:-2])
            if word.replace(".", "").isdigit() and float(word) == pytest.approx(row.seconds * 1e6, abs=1e-3)
        ]
        assert any(rate == pytest.approx(each, rel=0.01) for each in printed), (row, printed)


def test_uncertain_ranks_follow_from_the_bandwidths(shared_logs):
    log = read_collective_log(shared_logs / "h100_ndr_allreduce_coreweave_readme.txt")
    assert log.rows[0].shape.num_ranks == 96  # the file itself says about 96
    assert "ngpus is uncertain" in log.cautions


def test_what_nccl_believes_is_no_measurement(shared_logs):
    log = read_collective_log(shared_logs / "h100_400g_nccl_tuning_model_autoparallel.txt")
    assert log.rows == ()
    first = log.estimates[0]
    assert (first.algorithm, first.protocol, first.shape) == (Algorithm.RING, Protocol.LL, even_shape(2, 2))
    assert (first.latency_seconds, first.bytes_per_second) == pytest.approx((11.6e-6, 48e9))
    assert first.operations == (Operation.ALL_GATHER, Operation.REDUCE_SCATTER)


def test_repetitions_give_the_least_and_the_most(shared_logs):
    row = read_collective_log(shared_logs / "h200_sxm_nvlink_nccl_aiconfigurator_repeat_minmax.txt").rows[0]
    assert (row.low_seconds, row.high_seconds) == pytest.approx((5.17e-6, 5.31e-6))
    assert row.seconds == pytest.approx((5.17 * 5.31) ** 0.5 * 1e-6)


TABLE = """\
# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809
# Collective test starting: reduce_scatter_perf
# nThread 1 nGpus 1 minBytes 1024 maxBytes 2048 step: 2(factor) warmup iters: 1 iters: 20
# Using devices
#
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
        1024            64     float     sum      -1    12.50    0.08    0.06       0    12.00    0.09    0.06       0
  1073741824      16777216     float     sum      -1   5000.0  214.75  161.06       0   5100.0  210.54  157.90     N/A
"""
RANKS = """\
#  Rank  0 Group  0 Pid  100 on      node1 device  0 [0000:07:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  101 on      node1 device  1 [0000:0a:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  102 on      node2 device  0 [0000:07:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  103 on      node2 device  1 [0000:0a:00] NVIDIA H100 80GB HBM3
"""
HEAD = "some line of a launcher\n"
TAIL = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 80.0\n"
TEXT = HEAD + "".join(f"[1,0]<stdout>:{line}\n" for line in (RANKS + TABLE).splitlines()) + TAIL


def test_a_users_text_with_lines_of_others_around_it_needs_no_more(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(TEXT)
    log = read_collective_log(path)
    assert [row.operation for row in log.rows] == [Operation.REDUCE_SCATTER] * 2
    assert [row.seconds for row in log.rows] == pytest.approx([12e-6, 5e-3])
    assert log.rows[0].shape == even_shape(4, 2)
    assert log.device == "H100"


def json_content() -> dict[str, object]:
    """Return what `-J` of nccl-tests writes (its src/util.cu), shortened."""
    device = {"group": 0, "pid": 1, "device": 0, "device_hex": "0000:07:00", "device_info": "NVIDIA H200"}
    place = {"time": 20.5, "alg_bw": 0.05, "bus_bw": 0.09, "nwrong": 0.0}
    result = {"size": 1024, "count": 256, "type": "float", "redop": "sum", "root": "    -1"}
    return {
        "version": 1,
        "args": ["/opt/nccl-tests/build/all_reduce_perf", "-b", "1K"],
        "env": ["NCCL_ALGO=Ring", "HOME=/root"],
        "nccl_version": 22809,
        "config": {
            "nthreads": 1,
            "devices": [{**device, "rank": rank, "hostname": f"node{rank // 2}"} for rank in range(4)],
        },
        "results": [
            {**result, "out_of_place": place, "in_place": {**place, "time": 19.5}},
            {**result, "size": 2048, "out_of_place": None, "in_place": place},
            {**result, "size": 4096, "out_of_place": None, "in_place": None},
        ],
    }


def test_json_of_nccl_tests(tmp_path):
    path = tmp_path / "log.json"
    path.write_text(json.dumps(json_content()))
    log = read_collective_log(path)
    assert [(row.num_bytes, row.seconds) for row in log.rows] == [(1024, pytest.approx(19.5e-6)), (2048, 20.5e-6)]
    assert log.rows[0].shape == even_shape(4, 2)
    assert log.rows[0].algorithm is Algorithm.RING
    assert log.device == "H200"
    assert ("NCCL_ALGO", "Ring") in log.environment
    assert log.cautions == ("1 rows without a time were left out",)


def test_a_log_of_ours_comes_back_equal(tmp_path, shared_logs):
    log = read_collective_log(shared_logs / "h100_1perNode_allreduce_2n2g_TREE_nccltests232_PARTIAL.txt")
    path = tmp_path / log.name
    path.write_text(log_text(log))
    found = read_collective_log(path)
    assert isinstance(found, CollectiveLog)
    assert found == log


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["must hold times of collectives"]),
        ("hello", ["must hold times of collectives"]),
        (TABLE, ["number of hosts must be known", "# META"]),
        (TABLE.replace("reduce_scatter_perf", "x"), ["operation must be known"]),
        (
            "# META op=all_reduce ngpus=4 nnodes=2\n" + TABLE.replace("reduce_scatter_perf", "x"),
            ["busbw over algbw", "1.500"],
        ),
        ("{", ["must be JSON"]),
        ("{}", ['must have "results"']),
        ('{"results": [], "args": ["all_reduce_perf"]}', ['must have "devices"']),
        ("# META gpu=H100\n# op ngpus bytes time_us\nall_reduce 2 1024\n", ["line 3", "4 columns", "got 3"]),
        ("# META gpu=H100\n# op ngpus bytes time_us\nscan 2 1024 3.5\n", ["operation must be one of", "'scan'"]),
        ("op,bytes,ranks,seconds\nall_reduce,1024,2,x\n", ["line 2", "must hold op"]),
    ],
)
def test_what_cannot_be_told_is_refused_with_file_and_fix(tmp_path, text, words):
    path = tmp_path / "log.txt"
    path.write_text(text)
    with pytest.raises(SpecError) as refused:
        read_collective_log(path)
    assert "\n" not in str(refused.value)
    for word in ("log.txt", *words):
        assert word in str(refused.value)


def test_p3_a_broken_log_is_not_accepted(tmp_path):
    whole = json.dumps(json_content())
    path = tmp_path / "cut.json"
    for length in range(1, len(whole), 97):
        path.write_text(whole[:length])
        with pytest.raises(SpecError, match=r"cut\.json"):
            read_collective_log(path)


def test_p3_rows_that_were_cut_short_are_counted(tmp_path):
    path = tmp_path / "cut.txt"
    path.write_text(RANKS + TABLE + "        2048           128     float     sum\n")
    log = read_collective_log(path)
    assert len(log.rows) == 2
    assert log.cautions == ("1 rows without a time were left out",)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"nowhere\.txt: must be a readable text file"):
        read_collective_log(Path(tmp_path / "nowhere.txt"))
