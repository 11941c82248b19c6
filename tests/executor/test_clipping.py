import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from executor.clipping import SharedClip, sum_of_squares
from executor.record import Recorder


def test_squares_are_summed_by_the_weights_of_their_tensors():
    gradients = [torch.tensor([3.0, 4.0]), torch.zeros(0), torch.tensor([[2.0]])]
    assert float(sum_of_squares(gradients, torch.tensor([1.0, 1.0, 0.5]))) == pytest.approx(25 + 2)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_two_ranks_clip_what_they_share_and_what_both_hold_as_torch_clips_the_whole(monkeypatch, max_norm):
    generator = torch.Generator().manual_seed(1)
    split, common = torch.randn(2, 6, generator=generator), torch.randn(5, generator=generator)
    whole = [torch.zeros(12, requires_grad=True), torch.zeros(5, requires_grad=True)]
    for parameter, gradient in zip(whole, (split.flatten(), common), strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(whole, max_norm)
    weight_T = torch.tensor([1.0, 0.5])
    squares = [sum_of_squares([split[rank], common], weight_T) for rank in (0, 1)]

    def all_reduce(tensor: Tensor, **_: object) -> None:
        assert any(torch.equal(tensor, mine) for mine in squares)
        tensor.copy_(squares[0] + squares[1])

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    for rank in (0, 1):
        gradients = [split[rank].clone(), common.clone()]
        clip = SharedClip(recorder=Recorder(), group=None, weight_T=weight_T)  # type: ignore[arg-type]
        clip.clip_(gradients, max_norm)
        for found, parameter, part in zip(gradients, whole, (slice(6 * rank, 6 * rank + 6), slice(None)), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(found, parameter.grad[part])
