"""A layer's exchange of rows whose start and end are apart, forward and back, so that other work runs in between.

On GPUs a collective runs on a stream of its own, waits for what was launched before its call, and `Work.wait` lets
later kernels wait for it, not the host; until then a `Sent` keeps its tensors alive, so none of their memory is given
away while the other stream uses it.
"""

from dataclasses import dataclass

from torch import Tensor

from executor.exchange import RowExchange, Sent, bring_rows, return_gradients
from executor.record import Recorder
from simulator.specs.plan import Exchange
from simulator.specs.program import Phase


@dataclass(kw_only=True)
class Flight:
    """An exchange between its start and its end.

    Attributes:
        sent: messages of the pass under way, in order of sending.
        received: what they bring forward, or, backward, what they were made of; in the number format of messages.
    """

    sent: list[Sent]
    received: Tensor

    def wait(self, recorder: Recorder) -> list[Tensor]:
        """Return what the messages bring."""
        sent, self.sent = self.sent, []
        return [message.wait(recorder) for message in sent]


@dataclass(frozen=True, kw_only=True)
class ApartExchange:
    """An exchange whose start and end are apart.

    Attributes:
        exchange: HALO or ALL_GATHER; of a hierarchical one, what crosses hosts.
        inside: of a hierarchical exchange, the one inside the host that passes on what the first brought; None without.
        is_alone: of a hierarchical exchange, whether the host has no other ranks.
    """

    exchange: RowExchange
    inside: RowExchange | None
    is_alone: bool
    graph_rank: int

    @property
    def recorder(self) -> Recorder:
        """Marks the tasks."""
        return self.exchange.recorder

    @property
    def has_own_rows(self) -> bool:
        """Whether own rows lie before those that the exchange brings; an all-gather brings them too."""
        return self.exchange.exchange is Exchange.HALO

    def new_sources(self, like_NC: Tensor, columns: int, *, own: bool) -> tuple[Tensor, Tensor]:
        """Return room for the rows of all sources, and the part of it for those that arrive.

        Args:
            own: whether own rows have a place of their own before these.
        """
        num_own = len(like_NC) if own and self.has_own_rows else 0
        num_passed = 0 if self.inside is None else self.inside.num_received
        rows_MC = like_NC.new_empty(num_own + self.exchange.num_received + num_passed, columns)
        return rows_MC, rows_MC[num_own:]

    def own_rows_of(self, rows_MC: Tensor, num_rows: int) -> Tensor:
        """Return room for own rows: their place among those of all sources, or elsewhere if it is not in one piece.

        What a message brings in another number format, or one of several messages, has other places.
        """
        if self.has_own_rows:
            return rows_MC[:num_rows]
        if self.exchange.sends_in_place:
            return rows_MC[self.exchange.own_slot(self.graph_rank)][:num_rows]
        return rows_MC.new_empty(num_rows, rows_MC.shape[1])

    def start(self, rows_NC: Tensor, arrival_MC: Tensor, *, are_placed: bool) -> Flight:
        """Send own rows; arguments as of `bring_rows`.

        Args:
            are_placed: they lie where `own_rows_of` made room for them.
        """
        exchange = self.exchange
        arrival_MC = arrival_MC[: exchange.num_received]
        received = arrival_MC.new_empty(arrival_MC.shape, dtype=exchange.wire) if exchange.converts else arrival_MC
        in_place = are_placed and exchange.sends_in_place
        slot = received[exchange.own_slot(self.graph_rank)] if in_place else None
        sent = [
            exchange.send(rows_NC, received, index, slot=slot, async_op=True) for index in range(exchange.num_messages)
        ]
        return Flight(sent=sent, received=received)

    def finish(self, flight: Flight, rows_NC: Tensor, arrival_MC: Tensor) -> None:
        """Wait for the rows of others, and pass on inside the host what it needs of them."""
        exchange = self.exchange
        flight.wait(self.recorder)
        came_MC, passed_MC = arrival_MC[: exchange.num_received], arrival_MC[exchange.num_received :]
        if exchange.converts:
            exchange.widen(flight.received, self.recorder.phase, out=came_MC)
            if not self.has_own_rows:
                exchange.restore_own(rows_NC, came_MC, self.graph_rank)
        self._note_without_peers()
        if self.inside is not None:
            bring_rows(came_MC, passed_MC, self.inside)

    def start_back(self, grad_MC: Tensor) -> Flight:
        """Send the gradients of what arrived, contiguous, to their owners; those of what was passed on first."""
        exchange, num_came = self.exchange, self.exchange.num_received
        if self.inside is not None:
            return_gradients(grad_MC[:num_came], grad_MC[num_came:], self.inside, num_came)
        self._note_without_peers()
        grad_MC = grad_MC[:num_came]
        grad_MC = exchange.widen(grad_MC, Phase.BACKWARD) if exchange.converts else grad_MC
        messages = reversed(range(exchange.num_messages))
        return Flight(sent=[exchange.send_back(grad_MC, index, async_op=True) for index in messages], received=grad_MC)

    def finish_back(self, flight: Flight, own_NC: Tensor | None, num_rows: int) -> Tensor:
        """Wait for the gradients of own rows that others have; return them with those from this rank itself.

        Args:
            own_NC: gradients from this rank, contiguous, which are added to in place; None where others have them all.
        """
        self.recorder.pause()
        grad_NC = None
        messages = reversed(range(self.exchange.num_messages))
        for index, summed in zip(messages, flight.wait(self.recorder), strict=True):
            grad_NC = self.exchange.take_back(own_NC, summed, index, out=grad_NC, num_rows=num_rows)
        assert grad_NC is not None, "every exchange has a message"
        return grad_NC

    def _note_without_peers(self) -> None:
        """Note an exchange that this rank, alone on its host, has no part in: all ranks note as many, in one order."""
        if self.is_alone:
            with self.recorder.position.waiting(f"{self.exchange.layer}.host_exchange"):
                pass
