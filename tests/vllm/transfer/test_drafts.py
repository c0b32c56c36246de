"""Engines that decode with a draft model: what they are sent is the model, and the draft stays as it was."""

from __future__ import annotations

from tests.vllm.transfer.checking import check_refits
from tests.vllm.transfer.engines import Engines, ask, save


def test_engines_with_a_draft_answer_with_the_weights_that_were_sent(engines: Engines) -> None:
    """Though the draft, which begins as the first of these models, no longer fits them."""
    folders = [save("llama", engines.folder, seed) for seed in range(3)]
    draft = {"method": "draft_model", "model": str(folders[0]), "num_speculative_tokens": 2}
    hosts = engines.start(*folders[:2], tp=1, speculative_config=draft)
    check_refits(engines.pool(2), ask(hosts, folders[0], "fsdp", 2), hosts, folders)
