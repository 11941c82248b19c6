"""How far predicted collectives are from public logs that the constants were not fitted to.

    python -m tests.bench.collectives [--json figures.json] [--refit]

For each log of `COUNTED` the constants of `simulator/nccl.py` are fitted to all others, then the log is predicted;
below 64 MB to those of other sites alone. Within a site, each size below 64 MB is interpolated from the other sizes of
its log, as a calibration with a user's log does. Errors are |predicted / measured - 1|, their mean over a log's rows,
and the mean of these over logs, so that a long log counts no more than a short one. `--refit` fits the constants that
come with the project to all counted logs and writes them.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from executor.environment import environment
from simulator.collectives import CollectiveCosts
from simulator.nccl import Floats
from simulator.nccl_constants import FITTED, flat
from simulator.nccl_fit import Measured, fit_constants, measured_of, predicted_seconds
from simulator.readers.nccl_tests import read_collective_log
from simulator.specs.cluster import BUILT_IN_CLUSTERS, DeviceKind
from simulator.specs.files import write_text_atomic
from simulator.specs.program import TaskKind
from simulator.specs.units import MIB
from tests.bench.result import Better, Figure, print_figures, write_figures
from tests.made import made_collective

SHARED = Path(os.environ.get("GRAPHPILOT_SHARED", Path(__file__).parents[2] / "../shared"))
LARGE_BYTES = 64 * MIB


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log to predict.

    Attributes:
        site: the machines that it is of.
        least_bytes: below which its rows say nothing of a collective; `reason` says why.
    """

    name: str
    site: str
    least_bytes: int = 0
    reason: str = ""


_LAUNCHES = "one thread launches for eight GPUs: calls of no bytes take as long, 33.5 us"
_ALONE = "calls are timed one by one on a virtual machine: below, much of it is the launch of 50 us (its README)"
COUNTED = (
    Log(name="a100_40g_oci_roce_allreduce_2n16g.txt", site="OCI A100"),
    Log(name="a100_nvlink_allgather_1n8g_superbench.txt", site="superbench", least_bytes=LARGE_BYTES, reason=_LAUNCHES),
    Log(name="a100_nvlink_allreduce_1n8g_superbench.txt", site="superbench", least_bytes=LARGE_BYTES, reason=_LAUNCHES),
    Log(
        name="a100_nvlink_reducescatter_1n8g_superbench.txt",
        site="superbench",
        least_bytes=LARGE_BYTES,
        reason=_LAUNCHES,
    ),
    Log(name="a100_nvlink_sendrecv_1n8g_liplus.txt", site="li-plus"),
    Log(name="a100_sxm_nvlink_nccl_aiconfigurator.txt", site="aiconfigurator A100"),
    Log(name="h100_1perNode_allreduce_2n2g_TREE_nccltests232_PARTIAL.txt", site="nccl-tests 232"),
    Log(name="h100_4gpuPerNode_allreduce_2n8g_crossnic0_nccl1411_PARTIAL.txt", site="nccl 1411"),
    Log(name="h100_4perNode_allreduce_2n8g_RING_nccltests252_PARTIAL.txt", site="nccl-tests 252"),
    Log(name="h100_ndr_allreduce_1n8g_nccltests290.txt", site="nccl-tests 290"),
    Log(name="h100_ndr_allreduce_2n16g_RING_minctas24_qps2_nccltests309_siteC.txt", site="309 C"),
    Log(name="h100_ndr_allreduce_2n16g_default_nccltests309_siteA.txt", site="309 A"),
    Log(name="h100_ndr_allreduce_2n16g_default_nccltests309_siteC.txt", site="309 C"),
    Log(name="h100_ndr_allreduce_2n16g_siteB_nebius_dstack_docs.txt", site="nebius"),
    Log(name="h100_ndr_allreduce_4n32g_default_nccltests309_siteA.txt", site="309 A"),
    Log(name="h100_ndr_allreduce_8n64g_minctas24_qps2_nccltests309_siteC.txt", site="309 C"),
    Log(name="h100_nvlink_allreduce_1n8g_dgxc.txt", site="dgxc"),
    Log(name="h100_sxm_nvlink_nccl_aiconfigurator.txt", site="aiconfigurator H100"),
    Log(name="h200_oci_allreduce_2n16g.txt", site="OCI H200"),
    Log(name="h200_roce400_allgather_2n16g_gcp_skypilot.txt", site="GCP"),
    Log(name="h200_sxm_nvlink_nccl_aiconfigurator.txt", site="aiconfigurator H200"),
    Log(name="comm.csv", site="own", least_bytes=LARGE_BYTES, reason=_ALONE),
)
# Predicted and printed, but not in the means: what the files leave open would be counted as an error of the model.
DOUBTFUL = {
    "a100_cx6_allreduce_2n16g_nccltests152_PARTIAL.txt": "GPU and number of cards are inferred, and unconfirmed",
    "b200_ndr_ag_rs_ar_4n32g_peak_together.txt": "no other log of a B200; the first set of settings is a faulty one",
    "h100_IB_allreduce_128node_large_nccltests322_PARTIAL.txt": "ranks, hosts and fabric are inferred",
    "h100_ndr_allreduce_coreweave_readme.txt": "ranks are unconfirmed, and switches may have reduced (SHARP)",
}
LEFT_OUT = {
    "h100_ndr_allreduce_2n16g_RING_DEGRADED_nccltests290.txt": "a faulty fabric, by its own words",
    "h100_400g_nccl_tuning_model_autoparallel.txt": "NCCL's own model, no measurements",
    "h200_sxm_nvlink_nccl_aiconfigurator_repeat_minmax.txt": "the machine of h200_sxm_nvlink_nccl_aiconfigurator.txt",
}


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of some rows of a log, as shares of what was measured."""

    log: str
    held_out: str
    is_forced: bool
    is_large: bool
    sizes: tuple[int, ...]
    shares: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the magnitudes."""
        return float(np.mean(np.abs(self.shares)))


def path_of(name: str) -> Path:
    """Return where a log lies."""
    return SHARED / ("measured/h200x2" if name == "comm.csv" else "nccl_logs") / name


def counted_rows() -> Measured:
    """Return the rows of all counted logs that say something of a collective."""
    logs = [read_collective_log(path_of(log.name)) for log in COUNTED]
    least = {log.name: log.least_bytes for log in COUNTED}
    measured = measured_of(logs)
    sizes = measured.calls.num_bytes
    return measured.subset([size >= least[name] for name, size in zip(measured.logs, sizes, strict=True)])


def errors_of(measured: Measured, predicted: Floats, *, held_out: str) -> list[Errors]:
    """Return errors log by log, large and small sizes apart."""
    shares = predicted / measured.seconds - 1
    sizes = measured.calls.num_bytes
    found = []
    for log in dict.fromkeys(measured.logs):
        for is_large in (True, False):
            rows = [
                index
                for index, name in enumerate(measured.logs)
                if name == log and (sizes[index] >= LARGE_BYTES) == is_large
            ]
            if rows:
                found.append(
                    Errors(
                        log=log,
                        held_out=held_out,
                        is_forced=any(measured.rows[index].algorithm for index in rows),
                        is_large=is_large,
                        sizes=tuple(int(sizes[index]) for index in rows),
                        shares=tuple(float(shares[index]) for index in rows),
                    )
                )
    return found


def held_out_errors(measured: Measured) -> Iterator[Errors]:
    """Yield errors of each log: large sizes with the log held out, small ones with its site held out."""
    sites = {log.name: log.site for log in COUNTED}
    names = np.array(measured.logs)
    of_site = np.array([sites[name] for name in measured.logs])
    for log in COUNTED:
        mine = measured.subset(names == log.name)
        without_log = fit_constants(measured.subset(names != log.name))
        yield from (e for e in errors_of(mine, predicted_seconds(mine, without_log), held_out="log") if e.is_large)
        if sum(other.site == log.site for other in COUNTED) > 1:
            without_log = fit_constants(measured.subset(of_site != log.site))
        yield from errors_of(mine, predicted_seconds(mine, without_log), held_out="site")


def within_site_errors(measured: Measured) -> Iterator[Errors]:
    """Yield errors of small sizes, each interpolated by logarithms from its neighbours in the same curve."""
    curves: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(measured.rows):
        curves.setdefault((measured.logs[index], row.operation, row.shape), []).append(index)
    predicted = measured.seconds.copy()
    inner = np.zeros(len(predicted), bool)
    for indices in curves.values():
        ordered = sorted(indices, key=lambda index: measured.calls.num_bytes[index])
        for before, index, after in zip(ordered, ordered[1:], ordered[2:], strict=False):
            at = [math.log(measured.calls.num_bytes[each]) for each in (before, index, after)]
            logs = [math.log(measured.seconds[each]) for each in (before, after)]
            predicted[index] = math.exp(np.interp(at[1], (at[0], at[2]), logs))
            inner[index] = True
    kept = measured.subset(inner)
    yield from (e for e in errors_of(kept, predicted[inner], held_out="size") if not e.is_large)


def figures_of(errors: Sequence[Errors]) -> list[Figure]:
    """Return the means over logs with their bars."""

    def mean(held_out: str, *, is_large: bool, is_forced: bool | None = None) -> float:
        kept = [
            found.mean
            for found in errors
            if (found.held_out, found.is_large) == (held_out, is_large) and is_forced in (None, found.is_forced)
        ]
        return 100 * float(np.mean(kept))

    def figure(name: str, value: float, bar: float | None) -> Figure:
        return Figure(name=name, value=value, unit="%", bar=bar, better=Better.LOWER)

    return [
        figure("at least 64 MB, log held out", mean("log", is_large=True, is_forced=False), 6.0),
        figure("at least 64 MB, algorithm forced", mean("log", is_large=True, is_forced=True), 12.0),
        figure("at least 64 MB, site held out", mean("site", is_large=True, is_forced=False), None),
        figure("below 64 MB, site held out", mean("site", is_large=False), 18.0),
        figure("below 64 MB, within a site", mean("size", is_large=False), 6.0),
        Figure(name="priced", value=priced_per_second(), unit="1/s", bar=None, better=Better.HIGHER),
    ]


def priced_per_second() -> float:
    """Return how many all-reduces of sizes not seen before are priced in a second."""
    costs = CollectiveCosts(BUILT_IN_CLUSTERS["h100x8-ndr"], None)
    calls = [made_collective(TaskKind.ALL_REDUCE, 10**6 + size, 16) for size in range(500)]
    started = time.perf_counter()
    for tasks in calls:
        costs.price(tasks)
    return len(calls) / (time.perf_counter() - started)


def print_errors(errors: Sequence[Errors]) -> None:
    """Print every error, in percent by bytes."""
    for found in errors:
        rows = " ".join(f"{size}:{100 * share:+.1f}" for size, share in zip(found.sizes, found.shares, strict=True))
        forced = " forced" if found.is_forced else ""
        print(f"{found.log} [{found.held_out} held out{forced}] mean {100 * found.mean:.1f} %: {rows}")


def refit(measured: Measured) -> None:
    """Write the constants that come with the project."""
    constants = fit_constants(measured, max_steps=200)
    origin = {
        "command": "python -m tests.bench.collectives --refit",
        "folder": "../shared/nccl_logs and ../shared/measured/h200x2",
        "logs": [log.name for log in COUNTED],
    }
    content = {"origin": origin, "constants": {name: float(f"{value:.5g}") for name, value in flat(constants).items()}}
    write_text_atomic(FITTED, json.dumps(content, indent=1) + "\n")
    print(f"written to {FITTED}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--refit", action="store_true", help="fit the constants that come with the project")
    arguments = parser.parse_args()
    measured = counted_rows()
    if arguments.refit:
        refit(measured)
        return
    for log in COUNTED:
        if log.reason:
            print(f"{log.name}: rows below {log.least_bytes} bytes are left out, since {log.reason}")
    for name, reason in LEFT_OUT.items():
        print(f"{name}: left out, since it is {reason}")
    errors = [*held_out_errors(measured), *within_site_errors(measured)]
    print_errors(errors)
    doubtful = measured_of([read_collective_log(path_of(name)) for name in DOUBTFUL])
    found = errors_of(doubtful, predicted_seconds(doubtful, fit_constants(measured)), held_out="log")
    print("not counted:")
    for name, reason in DOUBTFUL.items():
        print(f"{name}: {reason}")
    print_errors(found)
    figures = figures_of(errors)
    print_figures(figures, title="collectives of public logs")
    if arguments.json:
        write_figures(arguments.json, figures, dict(environment(DeviceKind.CPU)))


if __name__ == "__main__":
    main()
