"""The benchmark of replays: what it asks of one setting to predict another, and that it really records and predicts."""

import json
import statistics
from dataclasses import asdict, replace

import pytest

from simulator.errors import SpecError
from simulator.readers.traces import read_recordings
from simulator.replay.run import rebuild, replay
from simulator.specs.cluster import DeviceKind
from simulator.specs.units import Dtype
from tests.bench import replay as bench
from tests.bench import replay_pairs
from tests.bench.replay import (
    as_recorded,
    batch_share,
    change_between,
    figures_of_pairs,
    other_steps_error,
    predict_pairs,
    with_typical_latencies,
)
from tests.bench.replay_pairs import NUM_TRACED_STEPS, Setting, read_settings, recorded_steps, settings
from tests.made_kineto import MAIN, MadeTrace
from tests.simulator.replay.test_run import run_of

BASE = Setting(name="base", width=128, num_nodes=10, num_edges=50, num_elements=1000, kept_edges=60)
US = 1e-6


def test_the_change_between_two_settings_names_what_differs():
    assert change_between(BASE, BASE) == ""
    wide = replace(BASE, width=256, num_elements=4000)
    # Width, and its multiples in the program: keys with values, three projections, feed-forward; a head of four.
    assert change_between(BASE, wide) == (
        "size:128=256, size:256=512, size:384=768, size:512=1024, size:768=1536, size:32=64, size:1000=4000"
    )
    assert change_between(BASE, replace(BASE, kept_edges=110)) == "edges:60=110"
    assert change_between(BASE, replace(BASE, precision=Dtype.BFLOAT16)) == "precision=bf16"
    assert change_between(BASE, replace(BASE, num_ranks=2)) == "ranks=2, all_reduce=4000 B"
    assert change_between(replace(BASE, num_ranks=2), BASE) == "ranks=1"


def test_on_two_gpus_there_are_at_least_eight_pairs_of_every_sort():
    known = {setting.name: setting for setting in settings(DeviceKind.CUDA, 2)}
    pairs = [(known[source], known[target]) for source, target in bench.PAIRS]
    assert len(pairs) >= 8
    for differs in ("width", "num_edges", "precision", "num_ranks"):
        assert sum(getattr(old, differs) != getattr(new, differs) for old, new in pairs) >= 2


def steps_of(lengths: list[float]) -> MadeTrace:
    trace = MadeTrace()
    begin = 0.0
    for number, length in enumerate(lengths):
        trace.kernel("gemm", launch=begin, ts=begin + 7, dur=length)
        trace.call("cudaDeviceSynchronize", begin + 6, length + 3)
        trace.step(number, begin, length + 10)
        begin += length + 10
    return trace


def test_steps_are_played_with_the_pieces_of_the_others(tmp_path):
    alike = run_of(tmp_path, steps_of([100, 100, 100]))
    assert other_steps_error(alike) == pytest.approx(0, abs=1e-9)
    # Steps of 100, 110 and 150 us: the first with 130 of kernel instead of 90, and so on.
    other = run_of(tmp_path, steps_of([90, 100, 140]))
    errors = sorted(abs(played / recorded - 1) for played, recorded in ((130, 100), (125, 110), (105, 150)))
    assert other_steps_error(other) == pytest.approx(errors[1])


def test_typical_latencies_are_medians(tmp_path):
    run = run_of(tmp_path, steps_of([100, 100]))
    assert replay(with_typical_latencies(run)).step_seconds == pytest.approx(run.recorded_step_seconds)
    assert as_recorded(run).unexplained_ratio == 0


def median_step(folder):
    return statistics.median(rebuild(read_recordings([step])).recorded_step_seconds for step in recorded_steps(folder))


def pairs_folder(folder, *, batch):
    """Write two steps of a setting and one of a wider one, whose host makes a batch for so many us of its 100."""
    rows = [asdict(replace(BASE, name=name, width=width)) for name, width in (("base", 128), ("wide", 256))]
    (folder / "settings.json").write_text(json.dumps({"settings": rows}))
    for path, length in (("base/step2", 60), ("base/step10", 80), ("wide", 90)):
        trace = steps_of([length])
        if path == "wide":
            trace.event("user_annotation", "batch", MAIN, 0, batch)
        (folder / path).mkdir(parents=True)
        trace.write(folder / path / "rank0.json.gz")


def test_medians_of_steps_are_compared(tmp_path):
    pairs_folder(tmp_path, batch=5)
    assert [step.name for step in recorded_steps(tmp_path / "base")] == ["step2", "step10"]
    found = predict_pairs(tmp_path)["base to wide"]
    # Kernels without shapes stay as they were: 60 and 80 us, 7 us after the launch, to the end of the step.
    assert found.predicted_seconds == pytest.approx(80 * US)
    assert found.recorded_seconds == pytest.approx(100 * US)
    assert found.left_out == ""


def test_a_step_that_makes_its_batch_is_printed_and_left_out_of_the_mean(tmp_path, capsys):
    pairs_folder(tmp_path, batch=50)
    figures = {figure.name: figure for figure in figures_of_pairs(predict_pairs(tmp_path))}
    assert figures["base to wide: step (left out of the mean)"].value == pytest.approx(20)
    assert figures["mean of all 2 pairs"].bar is None
    assert not any(figure.bar for figure in figures.values())
    assert bench.main(["--pairs", str(tmp_path)]) == 0
    assert "left out of the mean: base to wide: the host makes the batch within the step" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_folder_without_recordings_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"must be what tests\.bench\.replay_pairs wrote"):
        read_settings(tmp_path)


@pytest.mark.slow
def test_settings_are_recorded_by_the_executor_and_one_is_predicted_from_another(tmp_path, monkeypatch):
    both = settings(DeviceKind.CPU, 2)[:2] + settings(DeviceKind.CPU, 2)[-2:-1]
    monkeypatch.setattr(replay_pairs, "settings", lambda kind, num_devices: both)
    out = tmp_path / "pairs"
    assert replay_pairs.main(["--device", "cpu", "--out", str(out)]) == 0
    assert [one.name for one in read_settings(out)] == ["base", "wide", "two"]
    assert [len(recorded_steps(out / name)) for name in ("base", "wide", "two")] == [NUM_TRACED_STEPS - 1] * 3
    two = rebuild(read_recordings([recorded_steps(out / "two")[-1]]))
    assert batch_share(read_recordings([recorded_steps(out / "two")[-1]])) == 0  # its parts are kept
    assert (len(two.ranks), two.num_steps) == (2, 1)
    assert replay(two).step_seconds == pytest.approx(two.recorded_step_seconds)
    predicted = bench.predict_pairs(out)
    assert set(predicted) == {"base to wide", "wide to base"}
    as_it_was = median_step(out / "base")
    assert predicted["base to wide"].predicted_seconds > as_it_was
    assert predicted["base to wide"].recorded_seconds == median_step(out / "wide")
    with pytest.raises(SpecError, match="must hold no recordings yet"):
        replay_pairs.main(["--device", "cpu", "--out", str(out)])


def test_the_benchmark_writes_figures_with_their_bars(tmp_path, monkeypatch):
    path = steps_of([100, 100]).write(tmp_path / "rank0.json")
    monkeypatch.setattr(bench, "SAMPLES", {"made": (path.name, ())})
    assert bench.main(["--shared", str(tmp_path), "--json", str(tmp_path / "figures.json")]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "figures.json").read_text())["figures"]}
    assert rows["made: step as recorded"]["bar"] == bench.BAR_PERCENT
    assert rows["made: step as recorded"]["holds"]
