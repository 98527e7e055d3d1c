"""A real vLLM starts from folders that went to Megatron-Core's format and back, and says what the originals say."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch

from converters import convert
from tests.engines import vllm_models as models
from tests.engines.vllm_server import PYTHON, ROOT, environment, require_vllm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(400)]

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
PROMPT = [3, 14, 15, 92, 65]


def there_and_back(original: Path, folder: Path) -> Path:
    convert(original, folder / "megatron")
    convert(folder / "megatron", folder / "back")
    return folder / "back"


def served(folder: Path, prompt: list[int], *speculation: dict[str, Any]) -> dict[str, Any]:
    require_vllm()
    command = [str(PYTHON), "-m", "tests.engines.vllm_converted", str(folder), json.dumps(prompt)]
    done = subprocess.run(
        command + [json.dumps(s) for s in speculation],
        cwd=ROOT,
        env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe"])
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**SIZES, **(MOE if family == "Qwen3Moe" else {}))
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)  # far from ties between tokens
    model.save_pretrained(tmp_path / "original")
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert (
        served(there_and_back(tmp_path / "original", tmp_path), PROMPT)["tokens"] == tokens[0, len(PROMPT) :].tolist()
    )


def test_an_mtp_draft_is_right_after_the_way_there_and_back(tmp_path: Path) -> None:
    original, speculation = models.write_folders(tmp_path, "mtp", 1)
    file = original / "config.json"
    as_vllm_reads_it = json.loads(file.read_text())
    file.write_text(json.dumps(as_vllm_reads_it | {"model_type": "mimo"}))
    back = there_and_back(original, tmp_path)
    (back / "config.json").write_text(json.dumps(as_vllm_reads_it))
    answer = served(back, models.PROMPT, speculation)
    assert answer["tokens"] == models.expected("mtp", 1, 12)
    # Halves of the MTP projection swapped on the way, in both directions alike, would not show in the weights: here.
    assert answer["counts"]["accepted_tokens"] == answer["counts"]["draft_tokens"] > 0


def test_an_eagle3_drafter_is_right_after_the_way_there_and_back(tmp_path: Path) -> None:
    target, speculation = models.write_folders(tmp_path, "eagle3", 1)
    answer = served(target, models.PROMPT, speculation | {"model": str(there_and_back(tmp_path / "draft", tmp_path))})
    assert answer["tokens"] == models.expected("eagle3", 1, 12)
    assert answer["counts"]["accepted_tokens"] == answer["counts"]["draft_tokens"] > 0
