"""A step in several passes: of a rank's stages over micro-batches, with messages between stages as named tasks.

The order is that of `simulator/pipeline.py`. A message goes from a rank to the one with the next stage of the same
rows, heads and columns. Both know how many rows a micro-batch has there, since all stages make the same batches, so
messages have just these rows. The sender goes on; the receiver waits when its pass begins, one pass after it has begun
to receive.

torch.distributed.pipelining has the same schedules, but its runtime pads all micro-batches to the rows of the largest,
finds shapes by passes and messages of its own in the first step, and sends and receives in bundles that are no tasks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from executor.data import RankData
from executor.exchange import SPEC_DTYPES
from executor.mesh import Place
from executor.model import ForwardSettings, GraphTransformer, StageLayers
from executor.record import Recorder
from executor.reduction import Launched
from simulator.pipeline import LOSS_SUM, Action, output_name, rank_actions
from simulator.specs.plan import Plan
from simulator.specs.program import Phase, Stream, TaskKind
from simulator.specs.units import Dtype


@dataclass(kw_only=True)
class _Pass:
    """What a forward pass leaves for its backward pass.

    Attributes:
        given: rows from the stage before, whose gradient goes back there; None of the first stage.
        made: rows for the next stage, or the loss.
        sent: the message with these rows, which live until it has arrived; None of the last stage.
    """

    given: Tensor | None
    made: Tensor
    sent: Launched | None


class Pipeline:
    """Runs this rank's stages, one alone or all of a model included.

    Args:
        model: with the layers of this rank's stages.
    """

    def __init__(self, plan: Plan, model: GraphTransformer, recorder: Recorder, place: Place) -> None:
        self._plan, self._model, self._recorder, self._place = plan, model, recorder, place
        self._actions = rank_actions(plan, place.pipeline_rank)
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._arriving: dict[Action, tuple[Launched, Tensor]] = {}

    def train(self, batches: Sequence[RankData], settings: ForwardSettings) -> Tensor:
        """Add up the gradients of all micro-batches; return the sum of their losses, zero but on the last stage."""
        position = self._recorder.position
        loss = torch.zeros((), device=self._place.device)
        sent: list[tuple[Launched, Tensor]] = []  # gradients, which live until they have arrived
        self._begin_arrival(self._actions[0], batches)
        for action, following in itertools.zip_longest(self._actions, self._actions[1:]):
            if following is not None:
                self._begin_arrival(following, batches)
            with self._recorder.inside(action.scope), position.passing():
                data = batches[action.micro_batch]
                given = self._arrived(action)
                if action.phase is Phase.FORWARD:
                    loss += self._forward(action, given, data, settings)
                elif (gradient := self._backward(action, given)) is not None:
                    target = (action.stage, action.stage - 1)
                    sent.append((self._send(gradient, *target, action.phase), gradient))
        with position.passing():
            for message, _ in sent:
                message.wait()
        return loss

    def evaluate(self, data: RankData, settings: ForwardSettings) -> Tensor:
        """Return the logits of all rows on the ranks of the last stage; of the others, what their last stage makes."""
        made: Tensor | None = None
        with self._recorder.position.passing():
            for stage in self._plan.stages_of(self._place.pipeline_rank):
                given = None
                if stage > 0:
                    message, given = self._receive(stage - 1, stage, Phase.FORWARD, data)
                    message.wait()
                made = self._model.run_stage(stage_layers(self._plan, stage), given, data, settings)
                if stage < self._plan.num_stages - 1:
                    sent = self._send(made, stage, stage + 1, Phase.FORWARD)
                    sent.wait()
        assert made is not None, "a rank has a stage"
        return made

    def sum_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the last stage on all ranks of a pipeline, from theirs, of which the others are zero."""
        group = self._place.pipeline_group
        if group is not None:
            ranks = tuple(dist.get_process_group_ranks(group))
            task = self._recorder.task
            with task(LOSS_SUM, TaskKind.ALL_REDUCE, Phase.UPDATE, (loss.nbytes,), ranks, Dtype.FLOAT32):
                dist.all_reduce(loss, group=group)
        return loss

    def _begin_arrival(self, action: Action, batches: Sequence[RankData]) -> None:
        """Begin to receive what a pass begins with, if that is a message."""
        source = action.source(self._plan.num_stages)
        if source is not None:
            with self._recorder.inside(action.scope):
                data = batches[action.micro_batch]
                self._arriving[action] = self._receive(source, action.stage, action.phase, data)

    def _arrived(self, action: Action) -> Tensor | None:
        """Return what a pass begins with, once it is there; None where that is no message."""
        if action not in self._arriving:
            return None
        message, rows = self._arriving.pop(action)
        message.wait()
        return rows

    def _forward(
        self, action: Action, given: Tensor | None, data: RankData, settings: ForwardSettings
    ) -> Tensor | float:
        """Run a forward pass and send on what it made; return its loss, zero but of the last stage."""
        stage, sent = action.stage, None
        if given is not None:
            given.requires_grad_()
        made = self._model.run_stage(stage_layers(self._plan, stage), given, data, settings)
        is_last = stage == self._plan.num_stages - 1
        if is_last:
            made = self._model.loss(made, data)
        else:
            sent = self._send(made.detach(), stage, stage + 1, Phase.FORWARD)
        self._passes[stage, action.micro_batch] = _Pass(given=given, made=made, sent=sent)
        return made.detach() if is_last else 0.0

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """Run a backward pass from the gradient of what its stage made; return that of what the stage was given."""
        done = self._passes.pop((action.stage, action.micro_batch))
        if done.sent is not None:
            done.sent.wait()  # it has arrived, or its gradient would not have come
        torch.autograd.backward(done.made, gradient)
        return None if done.given is None else done.given.grad

    def _receive(self, source: int, target: int, phase: Phase, data: RankData) -> tuple[Launched, Tensor]:
        """Begin to receive the rows that a stage made, or their gradient; return them with what to wait for."""
        earlier, recorder = min(source, target), self._recorder
        num_rows = data.num_input_rows(self._plan.layers_of_stage(earlier + 1)[0])
        rows = torch.empty(num_rows, self._model.model.width, dtype=data.dtype, device=self._place.device)
        ranks, name = self._plan.stage_group(self._place.rank, source, target), output_name(earlier)
        with recorder.task(name, TaskKind.RECEIVE, phase, (rows.nbytes,), ranks, SPEC_DTYPES[rows.dtype]) as mark:
            work = dist.irecv(rows, src=ranks[0], group=self._channel(ranks, phase))
        recorder.pause()
        assert work is not None, f"this rank is not among those of {name}"
        recorder.follow(mark, work)
        return Launched(name=name, work=work, mark=mark, recorder=recorder), rows

    def _send(self, rows: Tensor, source: int, target: int, phase: Phase) -> Launched:
        """Begin to send rows from a stage to another one."""
        ranks = self._plan.stage_group(self._place.rank, source, target)
        name, message, recorder = output_name(min(source, target)), rows.contiguous(), self._recorder
        with recorder.task(name, TaskKind.SEND, phase, (message.nbytes,), ranks, SPEC_DTYPES[message.dtype]) as mark:
            work = dist.isend(message, dst=ranks[1], group=self._channel(ranks, phase))
        recorder.pause()
        assert work is not None, f"this rank is not among those of {name}"
        if mark is not None:
            mark.stream = Stream.SENT_ACTIVATIONS if phase is Phase.FORWARD else Stream.SENT_GRADIENTS
        return Launched(name=name, work=work, mark=mark, recorder=recorder)

    def _channel(self, ranks: tuple[int, int], phase: Phase) -> dist.ProcessGroup:
        return self._place.channels[phase, ranks[1] > ranks[0]]


def stage_layers(plan: Plan, stage: int) -> StageLayers:
    """Return what a stage runs."""
    return StageLayers(layers=plan.layers_of_stage(stage), is_first=stage == 0, is_last=stage == plan.num_stages - 1)
