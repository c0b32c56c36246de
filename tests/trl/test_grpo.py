"""TRL's GRPO trains on two real processes, each of which sends its own shards to a real vLLM server.

The policy is written by tiny_policy.py of docs/trl.md, and trained by grpo.py, as both stand there.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from peft import LoraConfig

import shardmath_trl
from shardmath_trl import ShardGRPOTrainer
from tests.distributed.pool import free_port
from tests.vllm.served.sessions import run

ROOT = Path(__file__).parents[2]
WATCHED = str(ROOT / "tests/trl/watched.py")
ENGINE, MEETING = "http://127.0.0.1:8000", "29600"
RANKS = 2
TIMEOUT_S = 280.0
FSDP2 = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
"""What `accelerate launch --use_fsdp` sets, which it does not together with `--cpu`."""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]

# Of which most is the start of the server.
pytestmark = pytest.mark.timeout(600)


def train(
    programs: dict[str, str], folder: Path, url: str, out: Path, words: list[str], **env: str
) -> list[dict[str, Any]]:
    """What is seen of the page's program on each rank."""
    text = programs["grpo.py"]
    assert ENGINE in text
    assert MEETING in text
    text = text.replace(ENGINE, url).replace(MEETING, str(free_port()))
    (out / "grpo.py").write_text(text)
    command = [*words, WATCHED, str(out), "grpo.py", str(folder / "tiny")]
    run(command, env, out / "log", timeout=TIMEOUT_S)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def check(seen: list[dict[str, Any]]) -> None:
    """Raise AssertionError unless the policy learned, and the server had its weights at every step."""
    first = seen[0]
    rewards = first["rewards"]
    quarter = len(rewards) // 4
    begin, end = sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter
    print(f"rewards: {rewards}")
    assert begin + 0.4 < end
    # In a run with every second sync left out, they were 0.6 to 3.1 with old weights, and 0.004 to 0.07 with new ones.
    print(f"largest differences of log probabilities: {first['gaps']}")
    assert len(first["gaps"]) == len(rewards)
    assert max(first["gaps"]) < 0.2
    assert first["server"] == first["policy"]
    # One before each step, and the program's own after the last.
    assert len(first["syncs"]) == len(rewards) + 1


def show(seen: list[dict[str, Any]]) -> None:
    """Print what each sync moved and took, beside the gather."""
    for number, each in enumerate(zip(*(one["syncs"] for one in seen), strict=True)):
        sent, gathered = (sum(sync[key] for sync in each) for key in ("sent", "gathered"))
        first = each[0]
        print(
            f"sync {number}: all ranks sent {sent:,} B in {first['seconds']:.3f} s; to gather the weights, "
            f"all ranks received {gathered:,} B in {first['gather_seconds']:.3f} s"
        )


def test_fsdp2(programs: dict[str, str], folder: Path, url: str, tmp_path: Path) -> None:
    """The page's grpo.py under FSDP2: no rank sends more than its shards, in the server's dtype."""
    seen = train(programs, folder, url, tmp_path, TORCHRUN, **FSDP2)
    for one in seen:
        assert one["kind"] == "FSDP"
        assert one["parameters"] == ["DTensor"]
    check(seen)
    show(seen)
    for sync in zip(*(one["syncs"] for one in seen), strict=True):
        # Whole weights are float32, and the server's are bfloat16. Each of its two workers gets the norms.
        whole = sync[0]["whole"] / 2
        assert whole <= sum(one["sent"] for one in sync) < 1.02 * whole


def test_ddp(programs: dict[str, str], folder: Path, url: str, tmp_path: Path) -> None:
    """The page's command for CPUs, without accelerate patched."""
    seen = train(programs, folder, url, tmp_path, TORCHRUN)
    for one in seen:
        assert one["kind"] == "MULTI_CPU"
        assert one["parameters"] == ["Parameter"]
    check(seen)


def test_layers_wrapped_by_accelerate_are_an_error(
    programs: dict[str, str], folder: Path, url: str, tmp_path: Path
) -> None:
    env = {**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"}
    with pytest.raises(
        AssertionError, match="ValueError: fsdp_activation_checkpointing wraps layers"
    ):
        train(programs, folder, url, tmp_path, TORCHRUN, **env)


def construct(kind: Any, folder: Path, url: str, out: Path, **more: Any) -> Any:
    """A trainer of one process."""
    peft = more.pop("peft_config", None)
    fields = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
    config = trl.GRPOConfig(str(out), use_cpu=True, bf16=False, report_to=[], **(fields | more))
    data = Dataset.from_dict({"prompt": ["w4"]})
    return kind(
        str(folder / "tiny"), lambda completion_ids, **_: [0.0], config, data, peft_config=peft
    )


def test_trl_s_own_refuses_cpus(folder: Path, url: str, tmp_path: Path) -> None:
    """What the page says of TRL's own trainer."""
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        construct(trl.GRPOTrainer, folder, url, tmp_path)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"vllm_mode": "colocate"}, "vllm_mode='colocate' has no server"),
        ({"use_vllm": False}, "without a vLLM server"),
        ({"peft_config": LoraConfig(task_type="CAUSAL_LM")}, "PEFT adapters"),
    ],
    ids=["colocate", "no-vllm", "peft"],
)
def test_what_cannot_send_shards_is_an_error(
    folder: Path, url: str, tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        construct(ShardGRPOTrainer, folder, url, tmp_path, **more)
    # What is given to TRL while a trainer is constructed is taken back.
    assert trl.trainer.grpo_trainer.VLLMGeneration is trl.generation.VLLMGeneration


def test_another_version_of_trl_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    with pytest.warns(
        UserWarning, match=re.escape("tested with TRL 1.16.0 only, and this is TRL 1.17.0")
    ):
        importlib.reload(shardmath_trl.trainer)
