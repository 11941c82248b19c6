"""Adds logs of collectives to a calibration."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from simulator.curves import given_bytes
from simulator.errors import CalibrationError, SpecError
from simulator.fabric_check import Finding, check_fabric, is_degraded
from simulator.readers.collective_log import CollectiveLog, LogRow
from simulator.readers.nccl_tests import read_collective_log
from simulator.specs.calibration import Calibration, CollectiveSample
from simulator.specs.communication import Operation
from simulator.specs.program import TaskKind

SOURCE = "nccl-tests"
_KINDS = {
    Operation.ALL_REDUCE: TaskKind.ALL_REDUCE,
    Operation.ALL_GATHER: TaskKind.ALL_GATHER,
    Operation.REDUCE_SCATTER: TaskKind.REDUCE_SCATTER,
    Operation.ALL_TO_ALL: TaskKind.ALL_TO_ALL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedLog:
    """What became of a log.

    Attributes:
        num_samples: that the calibration took.
        left_out: what it did not take, and what is uncertain, a sentence each.
        findings: what the log shows of the fabric.
    """

    name: str
    num_samples: int
    left_out: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether the fabric is as expected."""
        return not is_degraded(self.findings)


def log_path(text: str) -> Path:
    """Return the file that `nccl-tests:FILE` names.

    Raises:
        SpecError: if the text is of another form.
    """
    source, separator, path = text.partition(":")
    if source != SOURCE or not separator or not path:
        raise SpecError(f"--from must be {SOURCE}:FILE, got {text!r}; FILE is what nccl-tests printed or wrote with -J")
    return Path(path)


def with_logs(
    calibration: Calibration, paths: Sequence[Path], *, force: bool = False
) -> tuple[Calibration, tuple[AddedLog, ...]]:
    """Return a calibration with the curves of some logs in the place of what it had of the same shapes.

    Args:
        force: take logs of other devices and of degraded fabrics too.

    Raises:
        SpecError: if a file holds no times of collectives.
        CalibrationError: if a log is of another device, or its fabric is degraded.
    """
    added = []
    for path in paths:
        log = read_collective_log(path)
        _require_device(log, calibration, path, force=force)
        findings = check_fabric(log)
        if is_degraded(findings) and not force:
            suspected = "; ".join(finding.text for finding in findings if not finding.is_note)
            raise CalibrationError(f"{path}: the fabric is degraded: {suspected}; mend it, or go on with --force")
        samples, left_out = _samples(log, calibration)
        if not samples:
            raise SpecError(f"{path}: must hold rows that a calibration takes, got none: {'; '.join(left_out)}")
        keys = {_key(sample) for sample in samples}
        kept = [sample for sample in calibration.collectives if _key(sample) not in keys]
        calibration = replace(calibration, collectives=(*kept, *samples))
        added.append(AddedLog(name=str(path), num_samples=len(samples), left_out=left_out, findings=findings))
    return calibration, tuple(added)


def _key(sample: CollectiveSample) -> tuple[object, ...]:
    return sample.kind, sample.num_ranks, sample.num_hosts, sample.algorithm, sample.protocol


def _require_device(log: CollectiveLog, calibration: Calibration, path: Path, *, force: bool) -> None:
    if log.device and log.device not in calibration.device_name and not force:
        raise CalibrationError(
            f'{path}: must be of the calibration\'s device, "{calibration.device_name}", got "{log.device}"; calibrate '
            "there, or go on with --force"
        )


def _samples(log: CollectiveLog, calibration: Calibration) -> tuple[list[CollectiveSample], tuple[str, ...]]:
    host_seconds = median(sample.host_seconds for sample in calibration.collectives) if calibration.collectives else 0.0
    by_point: dict[tuple[object, ...], CollectiveSample] = {}
    left_out: dict[str, int] = {}
    for row in log.rows:
        if reason := _reason(row):
            left_out[reason] = left_out.get(reason, 0) + 1
            continue
        sample = _sample(row, log.name, host_seconds)
        by_point[(*_key(sample), sample.num_bytes)] = sample
    told = [f"{count} rows were left out: {reason}" for reason, count in left_out.items()]
    return list(by_point.values()), (*told, *log.cautions)


def _reason(row: LogRow) -> str:
    """Return why a calibration does not take a row; empty if it does."""
    if row.operation not in _KINDS:
        return f"{row.operation} is not among what plans do"
    if row.variant:
        return f"they are of special settings ({row.variant})"
    return "they are of no bytes" if row.num_bytes == 0 else ""


def _sample(row: LogRow, name: str, host_seconds: float) -> CollectiveSample:
    return CollectiveSample(
        kind=_KINDS[row.operation],
        num_ranks=row.shape.num_ranks,
        num_hosts=row.shape.num_hosts,
        num_bytes=round(given_bytes(row.operation, row.shape.num_ranks, row.num_bytes)),
        seconds=row.seconds,
        low_seconds=row.low_seconds,
        high_seconds=row.high_seconds,
        host_seconds=host_seconds,
        origin=f"{SOURCE} {name}",
        algorithm=row.algorithm,
        protocol=row.protocol,
    )
