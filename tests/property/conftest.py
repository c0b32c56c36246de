"""Shared by the property tests: exact error messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardmath import ShardError


@pytest.fixture
def fails() -> Callable[[Callable[[], object], type[ShardError], str], None]:
    """fails(make, kind, message): make() raises exactly this kind with exactly this message."""

    def check(make: Callable[[], object], kind: type[ShardError], message: str) -> None:
        with pytest.raises(ShardError) as caught:
            make()
        assert (type(caught.value), str(caught.value)) == (kind, message)

    return check
