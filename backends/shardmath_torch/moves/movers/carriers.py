"""Carriers: how the bytes of a move come from sources to destinations.

1. A carrier is made ready before ranks vote; what it raises then is an objection. What it raises while it carries is
   its rank's failure.
2. It carries into the destination itself, or beside it (`Arrived.put`): then the destination changes once all ranks
   have promised.
3. `Whole` carries all bytes of a plan, by an engine. What carries less of them has a place of its own (`changes`).
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
    """What has come, by local buffer key, and what puts it in place, however often it is called."""

    tensors: Tensors
    put: Callable[[], None]


class Carrier(Protocol):
    """Carries the bytes of one plan. `is_beside`: next to the destination, and not into it."""

    @property
    def is_beside(self) -> bool: ...

    @property
    def posted(self) -> Sequence[Round]:
        """The rounds of a move of all bytes, their messages as they are posted."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging, held between moves."""

    @property
    def shadow_bytes(self) -> int:
        """Bytes beside the destination, held between moves."""

    def word(self, how: object) -> str:
        """What moves, as claims have it, where a caller asks for it like this; of anything, also what means nothing."""

    def prepare(self, src: Tensors, dst: Tensors, held: bool) -> None:
        """Get ready for tensors that lie in memory like these. `held` ones stay there from move to move."""

    def load(self, src: Tensors, dst: Tensors, how: object, watch: Stopwatch) -> None:
        """Get ready for one move of such tensors, as a caller asks for it."""

    def carry(self, src: Tensors, dst: Tensors, held: bool, watch: Stopwatch) -> Arrived:
        """Carry them; each thing that is done is a lap. Raises PeerFailure."""

    def keep(self, part: RankProgram, make_engine: Callable[[Engine], Engine]) -> Carrier | None:
        """One for a part of the same tensors, by the engine that is made of this one's; None where there is none."""

    def let_go(self) -> None:
        """Keep nothing of the tensors that were prepared for, nor what a move needs, until there is another."""

    def list_torn(self) -> tuple[str, ...]:
        """The destinations that may be neither old nor new, where `carry` was left."""

    def end(self) -> None:
        """What was carried is in place. Raises nothing."""

    def forget(self) -> None:
        """What lies at destinations is not known any more: carry all of it next. All ranks forget alike."""


class Whole:
    """Carries all bytes; beside the destinations that have shadows."""

    def __init__(self, part: RankProgram, engine: Engine, shadows: Shadows | None = None) -> None:
        self._part = part
        self._engine = engine
        self._shadows = shadows
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
            beside = self._shadows.receive_into(self._shadows.select(dst))
            # The very mapping where all have shadows: by it the engine knows what is held.
            self._into = beside if len(beside) == len(dst) else {**dst, **beside}
        self._engine.prepare(src, self._into, held=held)

    def load(self, src: Tensors, dst: Tensors, how: object, watch: Stopwatch) -> None:
        pass

    def carry(self, src: Tensors, dst: Tensors, held: bool, watch: Stopwatch) -> Arrived:
        if self._shadows is None:
            mark_written(dst.values())
            self._engine.move(src, dst, watch)
            return Arrived(dst, lambda: None)
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
    """Memory beside a rank's destinations, but for those that are nobody's but our `own`."""
    layouts = {key: stored.layout for key, stored in part.destinations.items() if key not in own}
    return Shadows(layouts, part.rank)
