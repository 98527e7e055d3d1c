"""An offline `sglang.Engine` of two ranks with an MTP draft, published to from its own process; prints what it saw.

    python -m tests.engines.sglang_offline FOLDER      (in the environment of an SGLang release)

FOLDER holds version 1 as `sglang_models.write_folders` writes it. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.engines import sglang_models as models


def main(folder: Path) -> None:
    fault = folder / "fault"
    os.environ["TEST_FAULT"] = str(fault)
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "tests.engines.sglang_own_models"
    cores = sorted(os.sched_getaffinity(0))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"  # else a rank takes a NUMA node
    import sglang

    from weightsync import errors
    from weightsync.engines.sglang.control import SglangControl
    from weightsync.publisher import PublishConfig, Publisher

    engine = sglang.Engine(
        model_path=str(folder / "target"),
        tp_size=2,
        speculative_algorithm="EAGLE",
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=2,
        device="cpu",
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        dtype="float32",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        mem_fraction_static=0.1,
        max_total_tokens=2048,
        max_running_requests=4,
        context_length=256,
        log_level="error",
    )
    control = SglangControl(engine, name="offline")

    def decode() -> list:
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        reply = engine.generate(input_ids=models.PROMPT, sampling_params=sampling)
        return [reply["output_ids"], reply["meta_info"]["spec_accept_rate"]]

    out: dict[str, object] = {"disk": decode()}
    config = PublishConfig(run_id="test", deadline_s=60, control_s=60)
    with Publisher(models.Weights("mtp", 2), [control], config) as p:
        report = p.publish(2)
    out |= {
        "version 2": decode(),
        "world_size": control.status(deadline_s=60)["world_size"],
        "bytes": [n - report.wire_bytes for n in report.engines[0].bytes_received],
    }
    # That this vocabulary is too small shows only in the shard of the second rank.
    short = {"lm_head.weight": models.weights("mtp", 3)["target"]["lm_head.weight"][:300].clone()}
    with Publisher(models.Weights("mtp", 3, short), [control], config) as p:
        try:
            p.publish(3)
        except errors.WeightSyncError as e:
            out["refused"] = str(e)
    out["after refusal"] = decode()
    fault.touch()
    with Publisher(models.Weights("mtp", 3), [control], config) as p:
        try:
            p.publish(3)
        except errors.PublishAborted as e:
            out["aborted"] = str(e)
        out["fenced"] = control.status(deadline_s=60)["fenced"]
        try:
            out["answer"] = str(decode())
        except Exception as e:  # noqa: BLE001 - what SGLang raises for a request that its scheduler refused
            out["answer"] = f"{type(e).__name__}: {e}"
        fault.unlink()
        p.publish(3)
    out["version 3"] = decode()
    print(json.dumps(out), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
