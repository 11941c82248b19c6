"""In which order ranks of a pipeline run their passes, and what they keep meanwhile. Simulator and executor ask here.

The orders are those of `ScheduleGPipe`, `Schedule1F1B` and `ScheduleInterleaved1F1B` of torch.distributed.pipelining.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from simulator.specs.plan import PipelineSchedule, Plan
from simulator.specs.program import Phase

LOSS_SUM = "pipeline.loss"  # what tells all stages the loss


@dataclass(frozen=True, slots=True)
class Action:
    """A pass of a stage over a micro-batch: forward, or backward with what is computed again for it."""

    stage: int
    micro_batch: int
    phase: Phase

    def source(self, num_stages: int) -> int | None:
        """Return the stage that sends what this pass begins with; None where it begins with no message."""
        found = self.stage - 1 if self.phase is Phase.FORWARD else self.stage + 1
        return found if 0 <= found < num_stages else None

    @property
    def scope(self) -> str:
        """What the names of its tasks begin with, where a step has several passes."""
        return f"mb{self.micro_batch}."


def output_name(stage: int) -> str:
    """Return the name of the message with what a stage gives to the next one; backward, with its gradient."""
    return f"stage{stage}.output"


def rank_actions(plan: Plan, pipeline_rank: int) -> tuple[Action, ...]:
    """Return what a rank does in a step, by its place in its pipeline, in order."""
    degree, num_batches = plan.pipeline_parallel_degree, plan.num_micro_batches
    return _actions(plan.pipeline_schedule, degree, num_batches, plan.num_stages // degree, pipeline_rank)


@lru_cache(maxsize=1024)
def _actions(
    schedule: PipelineSchedule, degree: int, num_batches: int, num_chunks: int, rank: int
) -> tuple[Action, ...]:
    num_passes = num_batches * num_chunks
    forward = [_pass(number, degree, num_chunks, rank, Phase.FORWARD) for number in range(num_passes)]
    backward = [_pass(number, degree, num_chunks, rank, Phase.BACKWARD) for number in range(num_passes)]
    match schedule:
        case _ if degree == 1:
            warm_up = 1
        case PipelineSchedule.GPIPE:
            warm_up = num_passes
        case PipelineSchedule.ONE_F_ONE_B:
            warm_up = degree - rank
        case PipelineSchedule.INTERLEAVED:
            # Twice as many further ones for each rank behind: their forward passes and their backward passes.
            warm_up = (num_chunks - 1) * degree + 2 * (degree - 1 - rank) + 1
    return tuple(_merged(forward, backward, min(warm_up, num_passes)))


def _pass(number: int, degree: int, num_chunks: int, rank: int, phase: Phase) -> Action:
    """Return a rank's pass by its number among those of a phase; stages take turns of as many batches as ranks."""
    if num_chunks == 1:
        return Action(rank, number, phase)
    turn, place = divmod(number, degree * num_chunks)
    chunk, batch = divmod(place, degree)
    chunk = chunk if phase is Phase.FORWARD else num_chunks - 1 - chunk
    return Action(chunk * degree + rank, turn * degree + batch, phase)


def _merged(forward: list[Action], backward: list[Action], warm_up: int) -> Iterator[Action]:
    """Yield forward passes, then a backward and a forward pass in turn, then the backward passes that are left."""
    yield from forward[:warm_up]
    for index, action in enumerate(backward):
        yield action
        yield from forward[warm_up + index : warm_up + index + 1]


def most_kept(actions: tuple[Action, ...], bytes_of: Callable[[int, int], int]) -> int:
    """Return the most bytes that passes keep for their backward passes at a time.

    Args:
        bytes_of: what the pass of a stage over a micro-batch keeps.
    """
    held = most = 0
    for action in actions:
        num_bytes = bytes_of(action.stage, action.micro_batch)
        held += num_bytes if action.phase is Phase.FORWARD else -num_bytes
        most = max(most, held)
    return most
