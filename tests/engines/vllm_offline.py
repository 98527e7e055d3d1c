"""Runs in vLLM's environment: an offline `LLM` published to from its own process. Prints one JSON object.

    python -m tests.engines.vllm_offline FOLDER CASE

With VLLM_ENABLE_V1_MULTIPROCESSING=0 the engine runs in this process, else in the one that vLLM starts by default.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.engines import vllm_models as models
from weightsync import errors
from weightsync.config import PublishConfig
from weightsync.publisher import Publisher


class Offline:
    def __init__(self, folder: Path, draft: str, *, by_extension: bool = False) -> None:
        from vllm import LLM

        from weightsync.engines.vllm.local import VllmControl

        self.draft = draft
        target, speculation = models.write_folders(folder, draft, 1)
        how: dict[str, Any] = {"weight_transfer_config": {"backend": "weightsync"}}
        if by_extension:
            how = {"worker_extension_cls": "weightsync.engines.vllm.extension.Extension"}
        self.llm = LLM(
            model=str(target), speculative_config=speculation, **how,
            skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=256, max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20, disable_log_stats=False,
        )  # fmt: skip
        self.control = VllmControl(self.llm)

    def generate(self, n: int = 12) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": models.PROMPT}]
        return list(self.llm.generate(prompts, sampling, use_tqdm=False)[0].outputs[0].token_ids)

    def serves(self) -> dict[str, Any]:
        before = self.control.status(deadline_s=5)["speculation_counts"]
        tokens = self.generate()
        after = self.control.status(deadline_s=5)["speculation_counts"]
        drafted, accepted = (after.get(k, 0) - before.get(k, 0) for k in ("draft_tokens", "accepted_tokens"))
        version = self.llm.get_weight_version()
        return {"tokens": tokens, "drafted": drafted, "accepted": accepted, "weight_version": version}

    def publisher(self, source: models.Weights) -> Publisher:
        config = PublishConfig(run_id="test", deadline_s=20, takeover=True, bucket_bytes=64 << 10)
        return Publisher(source, [self.control], config)

    def publish(self, source: models.Weights, version: int) -> str:
        """The outcome, or the error."""
        with self.publisher(source) as p:
            try:
                report = p.publish(version, force=True)
            except errors.WeightSyncError as e:
                return f"{type(e).__name__}: {e}"
        assert report.engines[0].bytes_received == (report.wire_bytes,)
        return report.outcome


def eagle(folder: Path) -> dict[str, Any]:
    engine = Offline(folder, "eagle")
    out: dict[str, Any] = {"fresh": engine.serves()}
    out["publish 2"] = engine.publish(models.Weights("eagle", 2), 2)
    out["after 2"] = engine.serves()
    # The drafter shares the target's embedding: published again under its own role, it must be the same bytes.
    shared = models.weights("eagle", 1)["target"]["model.embed_tokens.weight"]
    same = models.Weights("eagle", 1)
    same.changed["draft", "embed_tokens.weight"] = shared
    out["shared, equal"] = engine.publish(same, 3)
    out["after equal"] = engine.serves()
    other = models.Weights("eagle", 2)
    other.changed["draft", "embed_tokens.weight"] = shared
    out["shared, different"] = engine.publish(other, 4)
    try:
        engine.generate()
    except errors.EngineFenced as e:
        out["fenced"] = str(e)
    out["healed"] = engine.publish(models.Weights("eagle", 2), 5)
    out["after healed"] = engine.serves()
    out["status"] = engine.control.status(deadline_s=5)
    return out


def extension(folder: Path) -> dict[str, Any]:
    """What vLLM before 0.28 needs, and later ones take, too."""
    engine = Offline(folder, "eagle3", by_extension=True)
    out: dict[str, Any] = {"fresh": engine.serves(), "publish 2": engine.publish(models.Weights("eagle3", 2), 2)}
    out["after 2"] = engine.serves()
    broken = models.Weights("eagle3", 1)
    broken.at[8] = lambda: (_ for _ in ()).throw(OSError("test: cannot be read"))
    try:
        out["broken"] = engine.publish(broken, 3)
    except OSError as e:
        out["broken"] = str(e)
    out["healed"] = engine.publish(models.Weights("eagle3", 1), 4)
    out["after healed"] = engine.serves()
    out["status"] = engine.control.status(deadline_s=5)
    return out


def ngram(folder: Path) -> dict[str, Any]:
    engine = Offline(folder, "ngram")
    out: dict[str, Any] = {"fresh": engine.serves(), "publish 2": engine.publish(models.Weights("ngram", 2), 2)}
    out["after 2"] = engine.serves()
    out["status"] = engine.control.status(deadline_s=5)
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = {"eagle": eagle, "extension": extension, "ngram": ngram}[sys.argv[2]](Path(sys.argv[1]))
    print("RESULT " + json.dumps(result), flush=True)
