"""Runs in vLLM's environment: an `LLM` from a folder, asked once. Prints one JSON object.

    python -m tests.engines.vllm_converted FOLDER PROMPT [SPECULATION]

PROMPT is a JSON list of tokens, SPECULATION vLLM's speculative config as JSON.
"""

from __future__ import annotations

import json
import sys

import torch


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, prompt = sys.argv[1], json.loads(sys.argv[2])
    speculation = json.loads(sys.argv[3]) if len(sys.argv) > 3 else None
    llm = LLM(
        model=folder, speculative_config=speculation, skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
        max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=64 << 20, disable_log_stats=False,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
    counts = {
        m.name.removeprefix("vllm:spec_decode_num_"): m.value
        for m in llm.get_metrics()
        if "spec_decode_num" in m.name and hasattr(m, "value")
    }
    print("RESULT " + json.dumps({"tokens": list(output.token_ids), "counts": counts}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
