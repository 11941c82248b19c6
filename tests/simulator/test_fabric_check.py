"""Healthy fabrics are told from degraded ones, with what is suspected."""

from dataclasses import replace

import pytest

from simulator.errors import SpecError
from simulator.fabric_check import GPUDIRECT_OFF, RAIL, FindingKind, check_fabric, is_degraded
from simulator.group_shape import even_shape
from simulator.readers.collective_log import CollectiveLog, LogRow
from simulator.readers.nccl_tests import read_collective_log
from simulator.specs.communication import Operation
from simulator.specs.units import MIB
from tests.simulator.readers.test_collective_logs import FILES, REFUSED

FAULTY = {
    "h100_ndr_allreduce_2n16g_RING_DEGRADED_nccltests290.txt",
    "b200_ndr_ag_rs_ar_4n32g_peak_together.txt",  # one of its sets of settings had four wrong cards
}
LOGS = [path for path in FILES if path.name not in REFUSED]


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_the_faulty_logs_are_recognised_and_no_healthy_one_is(path):
    # What the file says of its quality is taken away: the numbers decide.
    log = replace(read_collective_log(path), is_degraded=False)
    assert is_degraded(check_fabric(log)) == (path.name in FAULTY)


def log_of(name: str, folder) -> CollectiveLog:
    return read_collective_log(folder / name)


def test_a_degraded_log_says_how_many_cards_carry_and_what_to_look_at(shared_logs):
    log = log_of("h100_ndr_allreduce_2n16g_RING_DEGRADED_nccltests290.txt", shared_logs)
    text = " ".join(finding.text for finding in check_fabric(log))
    # By the file's own words: "only ~2 rails' worth of bandwidth".
    for words in ("90 GB/s", "2 of 8 network cards", "NCCL_IB_HCA", "GPUDirect"):
        assert words in text


def test_only_the_faulty_settings_of_several_are_named(shared_logs):
    findings = check_fabric(log_of("b200_ndr_ag_rs_ar_4n32g_peak_together.txt", shared_logs))
    assert all("(buggy)" in finding.text for finding in findings if not finding.is_note)
    assert "4 of 8 network cards" in findings[0].text  # four wrong rails, the file says


def test_p13_a_size_with_unstable_times_is_named(shared_logs):
    findings = check_fabric(log_of("h100_ndr_allreduce_8n64g_minctas24_qps2_nccltests309_siteC.txt", shared_logs))
    unstable = [finding.text for finding in findings if finding.kind is FindingKind.UNSTABLE]
    # 889 us out of place, 391 us in place.
    assert len(unstable) == 1
    assert "unstable at 8,388,608 bytes" in unstable[0]
    assert "2.3 times its fastest" in unstable[0]


def test_doubted_cards_are_no_verdict(shared_logs):
    findings = check_fabric(log_of("a100_cx6_allreduce_2n16g_nccltests152_PARTIAL.txt", shared_logs))
    assert [finding.kind for finding in findings] == [FindingKind.UNCERTAIN]
    assert "not sure" in findings[0].text


def test_slow_launches_are_a_note(shared_logs):
    findings = check_fabric(read_collective_log(shared_logs.parent / "measured/h200x2/comm.csv"))
    assert FindingKind.LATENCY in {finding.kind for finding in findings}
    assert not is_degraded(findings)


def row(
    operation: Operation, seconds: float, variant: str = "", *, hosts: int = 2, num_bytes: int = 256 * MIB
) -> LogRow:
    return LogRow(
        operation=operation,
        shape=even_shape(8 * hosts if not variant.startswith(RAIL) else hosts, hosts),
        num_bytes=num_bytes,
        seconds=seconds,
        low_seconds=seconds,
        high_seconds=seconds,
        variant=variant,
    )


def made(*rows: LogRow) -> CollectiveLog:
    return CollectiveLog(
        name="made",
        source="",
        device="H100",
        cards_per_host=8,
        card_bytes_per_second=50e9,
        fabric="IB",
        is_degraded=False,
        environment=(),
        cautions=(),
        rows=rows,
    )


def test_a_slow_rail_is_named():
    rails = [row(Operation.SEND_RECEIVE, 11e-3 if rail == 3 else 5.6e-3, f"{RAIL} {rail}") for rail in range(8)]
    findings = check_fabric(made(*rails))
    assert [finding.text.split(" takes")[0] for finding in findings if not finding.is_note] == ["rail 3"]
    assert check_fabric(made(*rails[:3])) == ()


@pytest.mark.parametrize(("off_seconds", "kinds"), [(1.32e-3, [FindingKind.GPUDIRECT]), (3e-3, [])])
def test_gpudirect_that_makes_no_difference_is_suspected(off_seconds, kinds):
    rows = (row(Operation.ALL_REDUCE, 1.3e-3), row(Operation.ALL_REDUCE, off_seconds, GPUDIRECT_OFF))
    assert [finding.kind for finding in check_fabric(made(*rows))] == kinds


def test_a_slow_host_is_suspected_of_its_links():
    findings = check_fabric(made(row(Operation.ALL_REDUCE, 12e-3, hosts=1)))
    assert "NVLink may be down" in findings[0].text


def test_gloo_is_not_judged():
    log = replace(made(row(Operation.ALL_REDUCE, 1.0)), environment=(("device_kind", "cpu"),))
    assert check_fabric(log) == ()


def test_refused_files_are_not_judged(shared_logs):
    with pytest.raises(SpecError):
        log_of("README.md", shared_logs)
