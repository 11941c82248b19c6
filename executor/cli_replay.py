"""Commands on recorded traces: `graphpilot replay` and `graphpilot export`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from executor.cli_errors import require_writable
from executor.cli_output import Output, percent_text, seconds_text
from simulator.errors import SpecError
from simulator.readers.traces import read_recordings
from simulator.replay.apply import apply_change
from simulator.replay.changes import cluster_called, parse_change
from simulator.replay.chrome import write_replay
from simulator.replay.run import rebuild, replay
from simulator.replay.whatif import Shares, WhatIf, what_if
from simulator.specs.files import read_traces, write_traces
from simulator.specs.kineto import write_kineto
from simulator.specs.recording import Recording
from simulator.specs.trace import Trace

# Ranks that a table shows one by one; of more it shows the one that waited least and the one that waited most.
MAX_RANKS_SHOWN = 8


def replay_command(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="Traces of one run: of torch.profiler (.json, .json.gz), a file a rank, or a folder of them; host "
            "traces of ExecutionTraceObserver with them; or measured.json."
        ),
    ],
    change: Annotated[
        list[str] | None,
        typer.Option(
            help="What to change, such as kernel:matrix_product=2x, host=2x, device=H100, network=h100x8-ndr, "
            "device_link='900 GB/s', host_link='25 GB/s', ranks=16, all_reduce='25 MiB', overlap=off, straggler=none, "
            "size:128=256, edges:100=200, precision=bf16; joined by commas, all at once. Give it several times for "
            "several changes; without it, those that are usually asked for."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Where it was recorded: a built-in cluster, or a file; else by the device's name."),
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(help="Rank of a file that does not tell it, in the order of such files.", min=0)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the recording and the replay with the first change, if any, for Perfetto."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Replay a recorded run of any PyTorch program: as it was, and with changes; say what each change is worth.

    Example: graphpilot replay rank0.json.gz rank1.json.gz --change host=2x
    """
    output = Output(json, quiet)
    changes = [parse_change(text) for text in change or ()]
    recorded_on = None if cluster is None else cluster_called(cluster)
    if out is not None:
        require_writable(out)
    recordings = read_recordings(traces, ranks=rank or ())
    run = rebuild(recordings)
    found = what_if(run, changes, recorded_on)
    if out is not None:
        changed = apply_change(run, changes[0], recorded_on).run if changes else run
        name = f"replayed with {changes[0].text}," if changes else "replayed"
        write_replay(out, run, replay(changed), name=name)
    content = replay_json(found, recordings)
    if out is not None:
        content["out"] = str(out)
    output.result(content, *replay_tables(found, recordings), *([f"written to {out}"] if out is not None else []))


def export_command(
    traces: Annotated[list[Path], typer.Argument(help="predicted.json, measured.json, or both.")],
    out: Annotated[
        Path | None, typer.Option(help="Write all of them side by side into this file, which opens in Perfetto.")
    ] = None,
    hta: Annotated[
        Path | None,
        typer.Option(help="Write the one trace as rank0.json and so on into this folder, for HolisticTraceAnalysis."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Put predicted and measured steps side by side for Perfetto, or write a trace for HolisticTraceAnalysis.

    Example: graphpilot export predicted.json measured.json --out both.json
    """
    if out is None and hta is None:
        raise SpecError("export must be told where to write: --out FILE for Perfetto, or --hta FOLDER")
    found: dict[str, Trace] = {}
    for path in traces:
        for name, trace in read_traces(path).items():
            if name in found:
                raise SpecError(f'{path}: holds a trace called "{name}", as an earlier file does; give one of each')
            found[name] = trace
    if hta is not None and len(found) != 1:
        raise SpecError(f"--hta must be given one trace, got {len(found)} ({', '.join(found)}); export each by itself")
    written = []
    if out is not None:
        require_writable(out)
        write_traces(out, found)
        written.append(str(out))
    if hta is not None:
        require_writable(hta / "rank0.json")
        written += [str(path) for path in write_kineto(hta, next(iter(found.values())))]
    Output(json, quiet).result({"out": written, "traces": list(found)}, f"{', '.join(found)} written to {written[0]}")


def add_replay_commands(app: typer.Typer) -> None:
    """Add the commands of this file to the one command."""
    app.command(name="replay")(replay_command)
    app.command(name="export")(export_command)


def replay_tables(found: WhatIf, recordings: list[Recording]) -> list[Table | Text | str]:
    """Return how well the replay fits, where the time went, and what each change is worth."""
    of_ranks = "" if found.num_ranks is None else f" of {found.num_ranks}"
    is_one = found.num_ranks_recorded == 1 and found.num_ranks in (None, 1)
    device = f" on {found.device_name}" if found.device_name else ""
    ranks = f"{found.num_ranks_recorded}{of_ranks} rank{'' if is_one else 's'}"
    steps = f"{found.num_steps} step{'s' if found.num_steps > 1 else ''}"
    lines: list[Table | Text | str] = [
        f"{ranks}{device}, {steps}, {found.num_pieces:,} pieces, {found.num_inferred:,} dependencies told by times",
        Text(
            f"recorded step {seconds_text(found.recorded_step_seconds)}, replayed as recorded "
            f"{seconds_text(found.replayed_step_seconds)}: {percent_text(found.step_error_ratio)}",
            style="bold",
        ),
        "",
        _shares_table(found),
        "",
        _outcomes_table(found),
        "",
    ]
    if found.straggler_rank is not None:
        lines.append(f"the others waited longest for rank {found.straggler_rank}")
    return [*lines, *_remarks(found, recordings)]


def _shares_table(found: WhatIf) -> Table:
    """Return where the time of a step went, rank by rank, in milliseconds."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("ms a step", no_wrap=True)
    columns = ("compute", "communicating", "waiting", "not hidden", "device idle", "unexplained")
    for column in columns:
        table.add_column(column, justify="right", min_width=len(column), no_wrap=True)
    for share in _shown(found.shares):
        compute = sum(seconds for _, seconds in share.kernels)
        seconds = (
            compute,
            share.communicating_seconds,
            share.waiting_seconds,
            share.exposed_seconds,
            share.device_idle_seconds,
            share.unexplained_seconds,
        )
        table.add_row(f"rank {share.rank}", *(f"{1e3 * value:.3f}" for value in seconds))
    return table


def _shown(shares: tuple[Shares, ...]) -> list[Shares]:
    if len(shares) <= MAX_RANKS_SHOWN:
        return list(shares)
    by_wait = sorted(shares, key=lambda share: share.waiting_seconds)
    return [by_wait[0], by_wait[-1]]


def _outcomes_table(found: WhatIf) -> Table:
    table = Table("change", box=None, header_style="bold", pad_edge=False)
    for column in ("step", "saved", "of step"):
        table.add_column(column, justify="right", no_wrap=True)
    for outcome in sorted(found.outcomes, key=lambda outcome: -outcome.saved_seconds):
        ratio = outcome.saved_seconds / found.replayed_step_seconds
        table.add_row(
            Text(outcome.change),
            seconds_text(outcome.step_seconds),
            f"{1e3 * outcome.saved_seconds:.3f} ms",
            percent_text(ratio),
        )
    return table


def _remarks(found: WhatIf, recordings: list[Recording]) -> list[str]:
    """Return what was dropped, assumed, or not reached, a sentence each."""
    lines = []
    dropped: dict[str, int] = {}
    for recording in recordings:
        for category, reason, count in recording.dropped:
            dropped[f"{category} ({reason})"] = dropped.get(f"{category} ({reason})", 0) + count
    if dropped:
        lines.append("not kept of the files: " + ", ".join(f"{count:,} {name}" for name, count in dropped.items()))
    if found.left_out:
        lines.append("not replayed: " + ", ".join(f"{count:,} {reason}" for reason, count in found.left_out))
    lines += [f"note: {note}" for note in found.notes]
    lines += [f"note: {outcome.change}: {note}" for outcome in found.outcomes for note in outcome.notes]
    return lines


def replay_json(found: WhatIf, recordings: list[Recording]) -> dict[str, Any]:
    """Return the same for programs; README of `simulator/` explains every key and its unit."""
    files = [
        {
            "file": recording.name,
            "rank": recording.rank,
            "read": dict(recording.read_counts),
            "kept": recording.num_kept,
            "dropped": [
                {"category": category, "reason": reason, "count": count}
                for category, reason, count in recording.dropped
            ],
        }
        for recording in recordings
    ]
    content = asdict(found)
    content["shares"] = [{**asdict(share), "kernels": dict(share.kernels)} for share in found.shares]
    content["left_out"] = dict(found.left_out)
    return {**content, "files": files}
