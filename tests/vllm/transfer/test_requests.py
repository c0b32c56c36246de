"""A request that is under way while weights arrive: no token is of new weights over keys of old ones."""

from __future__ import annotations

from tests.vllm.cases import VOCAB
from tests.vllm.transfer import inside, trainers
from tests.vllm.transfer.checking import TIMEOUT_S
from tests.vllm.transfer.engines import Engines, ask, save

PROMPT = [(3 + 37 * i) % VOCAB for i in range(16)]
TOKENS, OLD, BETWEEN = 32, 8, 4


def test_a_request_goes_on_as_if_all_before_were_computed_by_the_new_weights(
    engines: Engines,
) -> None:
    """Also where the engine goes on before the trainer says that the update is over."""
    folders = [save("llama", engines.folder, seed) for seed in range(2)]
    engine, other = engines.start(*folders, tp=1)
    pool = engines.pool(1)
    pool.run(trainers.join, ask([engine], folders[0], "none", 1), timeout=TIMEOUT_S)
    old = engine.ask(inside.begin, PROMPT, TOKENS, OLD)
    pool.run(trainers.send_between, folders[1], BETWEEN, timeout=TIMEOUT_S)
    made = engine.ask(inside.finish)
    assert made[: len(old)] == old and 0 < len(old) < TOKENS
    wanted = other.ask(inside.begin, PROMPT + old, TOKENS - len(old), -1)
    assert made[len(old) :] == wanted
    pool.run(trainers.leave)
