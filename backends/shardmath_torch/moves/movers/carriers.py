"""Carriers: the transfer of a move's bytes from sources to destinations.

1. A carrier is prepared before ranks vote; an error then is an objection. An error while it carries is its rank's
   failure.
2. It carries into the destination, or next to it: then `Arrived.put` changes the destination once all ranks have
   promised.
3. `Whole` carries all bytes of a plan, by an engine. Carriers of changes only are in `changes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from shardmath.plans.programs.messages import Round
from shardmath.plans.programs.part import RankProgram
from shardmath_torch.moves.commits.shadows import Shadows, put_in_place
from shardmath_torch.moves.exchange.local import Tensors
from shardmath_torch.moves.exchange.memory import mark_written
from shardmath_torch.moves.exchange.task import Engine
from shardmath_torch.moves.observing.stopwatch import Stopwatch

__all__ = ["Arrived", "Carrier", "Whole", "make_shadows"]


class Arrived(NamedTuple):
    """The tensors that have arrived, by name, and `put`, a function that copies them into the destinations. `put` can
    be called repeatedly, and does nothing if the bytes were received directly into the destinations."""

    tensors: Tensors
    put: Callable[[], None]


class Carrier(Protocol):
    """The interface of the objects that move a mover's bytes: into the destinations or, if `is_beside` is True, into
    separate memory of the same size (shadows), where the bytes stay until the move is committed."""

    @property
    def is_beside(self) -> bool: ...

    @property
    def posted(self) -> Sequence[Round]:
        """The rounds of messages that this rank sends and receives in a move that sends everything, not only
        changes."""

    @property
    def staging_bytes(self) -> int:
        """The bytes of staging memory that stay allocated between moves."""

    @property
    def shadow_bytes(self) -> int:
        """The bytes of shadows that stay allocated between moves. Shadows are second buffers, as large as the
        destinations, that hold received bytes until the move is committed."""

    def word(self, how: object) -> str:
        """Return a word for the kind of move that the caller's option `how` selects: "move" if everything is sent, or
        "changes" if only changed elements are sent. Ranks compare the word when they vote."""

    def prepare(self, src: Tensors, dst: Tensors, held: bool) -> None:
        """Allocate memory for moves of tensors with the strides and device of `src` and `dst`; `held` means that all
        moves are between these same tensors."""

    def load(self, src: Tensors, dst: Tensors, how: object, watch: Stopwatch) -> None:
        """Find and remember the elements of `src` that the next `carry` has to send. A carrier of changes looks for
        those that changed since the last move, or takes all if its option `how` asks for it; others do nothing."""

    def carry(self, src: Tensors, dst: Tensors, held: bool, watch: Stopwatch) -> Arrived:
        """Move the bytes from `src` to `dst`, time phases by `watch`, and return what arrived; `held` means that later
        moves are of these same tensors. Raises PeerFailure if a rank fails or does not answer in time."""

    def keep(self, part: RankProgram, make_engine: Callable[[Engine], Engine]) -> Carrier | None:
        """Return a carrier for `part`, this rank's part of another plan, that reuses this carrier's tensors and memory;
        None if that is impossible. `make_engine` takes this carrier's engine and returns the new carrier's engine."""

    def let_go(self) -> None:
        """Drop references to the caller's tensors, and free the memory allocated for moves. Before the next move,
        `prepare` must be called again."""

    def list_torn(self) -> tuple[str, ...]:
        """Return the keys of destinations whose values might be partly updated; call it after `carry` has raised."""

    def end(self) -> None:
        """Record, at the end of a move, that the destinations hold the sent values. The next move can then send only
        changes.

        Never raises.
        """

    def forget(self) -> None:
        """Make the next move send all bytes, since the destinations' content is unknown. Call it on all ranks."""


class Whole:
    """The carrier that moves all bytes in each move: into shadows if destinations have them, else into destinations."""

    def __init__(self, part: RankProgram, engine: Engine, shadows: Shadows | None = None) -> None:
        self._part = part
        self._engine = engine
        self._shadows = shadows
        # The tensors that the engine writes: shadows, and destinations without one.
        self._into: Tensors = {}

    def keep(self, part: RankProgram, make_engine: Callable[[Engine], Engine]) -> Whole:
        kept = Whole(part, make_engine(self._engine), self._shadows)
        kept._into = self._into
        return kept

    @property
    def is_beside(self) -> bool:
        return self._shadows is not None

    @property
    def posted(self) -> Sequence[Round]:
        return self._engine.posted

    @property
    def staging_bytes(self) -> int:
        return self._engine.staging_bytes

    @property
    def shadow_bytes(self) -> int:
        return 0 if self._shadows is None else self._shadows.nbytes

    def word(self, how: object) -> str:
        return "move"

    def prepare(self, src: Tensors, dst: Tensors, held: bool) -> None:
        self._into = dst
        if self._shadows is not None:
            received = self._shadows.receive_into(self._shadows.select(dst))
            # If all have shadows, the shadows' own mapping, by which the engine recognizes held tensors.
            self._into = received if len(received) == len(dst) else {**dst, **received}
        self._engine.prepare(src, self._into, held=held)

    def load(self, src: Tensors, dst: Tensors, how: object, watch: Stopwatch) -> None:
        pass

    def carry(self, src: Tensors, dst: Tensors, held: bool, watch: Stopwatch) -> Arrived:
        if self._shadows is None:
            mark_written(dst.values())
            self._engine.move(src, dst, watch)
            return Arrived(dst, lambda: None)  # nothing is left to be put in place
        self._engine.move(src, self._into, watch)
        pairs = self._shadows.pair(self._shadows.select(dst), held)

        def put() -> None:
            mark_written(dst.values())
            put_in_place(pairs)

        return Arrived(self._into, put)

    def let_go(self) -> None:
        self._into = {}
        self._engine.let_go()
        if self._shadows is not None:
            self._shadows.let_go()

    def list_torn(self) -> tuple[str, ...]:
        return self._part.list_torn(self._engine.begun)

    def end(self) -> None:
        pass

    def forget(self) -> None:
        pass


def make_shadows(part: RankProgram, own: frozenset[str]) -> Shadows:
    """Return a Shadows, which allocates a second buffer for each destination in `part`, this rank's part of a plan;
    received bytes stay there until they are committed. Destinations named in `own`, which are internal memory of a
    move, get none."""
    layouts = {key: stored.layout for key, stored in part.destinations.items() if key not in own}
    return Shadows(layouts, part.rank)
