"""What is made again, when, and for how long it is there."""

import gc

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from executor.operations import GELU, LAYER_NORM, LINEAR
from executor.recompute import Here, Recomputation, storage_key
from executor.record import Recorder
from simulator.specs.program import Phase


class Feed(nn.Module):
    """Norm, a product, GELU and a product, as in the feed-forward part of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x_ND: torch.Tensor, recorder: Recorder) -> torch.Tensor:
        run = recorder.run
        normed = run("layer0.norm", LAYER_NORM, x_ND, self.norm.weight, self.norm.bias)
        hidden = run("layer0.act", GELU, run("layer0.up", LINEAR, normed, self.up.weight, self.up.bias))
        out_ND: torch.Tensor = run("layer0.down", LINEAR, hidden, self.down.weight, self.down.bias)
        return out_ND


def gradients(names: set[str], recorder: Recorder) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module, x_ND = Feed(), torch.randn(5, 6, requires_grad=True)
    with Recomputation(recorder, "layer0", names).forward():
        out = module(x_ND, recorder)
    out.square().sum().backward()
    found = [x_ND.grad, *(parameter.grad for parameter in module.parameters())]
    return [gradient for gradient in found if gradient is not None]


def test_gradients_are_those_of_kept_results_to_the_last_bit():
    right = gradients(set(), Recorder())
    for names in ({"norm"}, {"norm", "act"}, {"norm", "up", "act"}, {"up"}):
        assert all(map(torch.equal, gradients(names, Recorder()), right))


def test_each_operation_runs_again_once_where_it_is_first_needed():
    recorder = Recorder()
    recorder.start()
    gradients({"norm", "up", "act"}, recorder)
    marks = [(mark.name, mark.phase) for mark in recorder.stop()]
    again = [name for name, phase in marks if phase is Phase.RECOMPUTE]
    assert again == ["layer0.norm.recompute", "layer0.up.recompute", "layer0.act.recompute"]
    # They are marked before the backward task that asked for them ends.
    assert next(name for name, phase in marks if phase is Phase.BACKWARD) == "layer0.down.backward"


def test_what_was_made_again_is_gone_after_the_backward_pass_without_the_collector(monkeypatch):
    made: list[StorageWeakRef] = []
    run_again = Recomputation._run_again

    def look(self, *arguments):
        found = run_again(self, *arguments)
        made.extend(StorageWeakRef(each.untyped_storage()) for each in found.results)
        return found

    monkeypatch.setattr(Recomputation, "_run_again", look)
    gc.disable()
    try:
        gradients({"norm", "up", "act"}, Recorder())
        assert len(made) == 3
        assert all(each.expired() for each in made)
    finally:
        gc.enable()


def test_what_is_made_again_is_not_kept():
    kept = []

    def keep(tensor: torch.Tensor) -> Here:
        kept.append(storage_key(tensor))
        return Here(tensor)

    recorder = Recorder()
    module, x_ND = Feed(), torch.randn(5, 6, requires_grad=True)
    with Recomputation(recorder, "layer0", {"norm", "up", "act"}, keep, weights=module.parameters()).forward():
        module(x_ND, recorder)
    assert set(kept) == {storage_key(x_ND)}
