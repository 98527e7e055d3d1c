"""Megatron-Core ranks with expert parallelism publish models like GLM-4.5 and DeepSeek-V3, with MTP, to real engines.

Latent attention, experts, shared experts, the router's fp32 correction and the MTP layer's own experts arrive in the
engines' fused layouts: after a publish every parameter of target and draft is the one that the engine had fresh from
the folder.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from converters.semantic.tiny import tiny_config, write_tiny_folder
from tests.engines import sglang_server, vllm_server
from tests.support import spawn_ranks

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(400)]

# vLLM's attention on the CPU has no heads below 32, and its latent attention these sizes only.
SIZES = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 512, "moe_intermediate_size": 32,
}  # fmt: skip
CONFIGS = {
    "glm4_moe": {
        **tiny_config(
            {
                "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_nextn_predict_layers": 1,
                "use_qk_norm": True, "attention_bias": True,
            },
            **SIZES,
        ),
        "head_dim": 32,
    },
    "deepseek_v3": {
        **tiny_config(
            {
                "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
                "num_nextn_predict_layers": 1,
            },
            **SIZES,
        ),
        "q_lora_rank": 48, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
}  # fmt: skip
LAYOUTS = {"ep2": {"ep": 2}, "tp2ep2etp1": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}}


def write_folder(folder: Path, family: str, version: int, dtype: torch.dtype) -> Path:
    path = folder / f"v{version}"
    if not path.exists():
        write_tiny_folder(CONFIGS[family], path, dtype=dtype, seed=version)
    return path


class Vllm(vllm_server.Server):
    dtype = torch.bfloat16
    kind = "vllm"

    def __init__(self, folder, family):
        self.family, self.block_size = family, 16 if family == "deepseek_v3" else 32
        super().__init__(folder, "mtp")

    def folders(self, version):
        folder = write_folder(self.folder, self.family, version, self.dtype)
        return folder, {"method": "mtp", "num_speculative_tokens": 1}

    def tokens(self):
        return self.generate()[0]

    def held(self):
        facts = self.facts()[0]
        return {(runner, name): digest for runner in ("target", "draft") for name, (digest, _) in facts[runner].items()}


class Sglang(sglang_server.Server):
    dtype = torch.float32
    kind = "sglang"

    def __init__(self, folder, family):
        options = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1"]
        options += ["--speculative-num-draft-tokens", "2"]
        options += ["--model-path", str(write_folder(folder, family, 1, self.dtype))]
        super().__init__(folder, "0.5.23", "mtp", options=options)
        self.wait()

    def tokens(self):
        return self.decode()[0]

    def held(self):
        return {
            (runner, name): facts["digest"]
            for runner, weights in self.weights().items()
            for name, facts in weights.items()
            if "rotary_emb" not in name
        }


def publish(rank, world_size, kind, url, folder, layout, version):
    """One publish of live ranks; (outcome, bytes received, bytes on the wire) of the sender."""
    warnings.simplefilter("ignore")
    from converters.live import load_hf_folder
    from converters.semantic import build_model
    from weightsync.config import PublishConfig
    from weightsync.engine.control import HttpControl
    from weightsync.engines.sglang.control import SglangControl
    from weightsync.publisher import Publisher
    from weightsync.sources.megatron import MegatronSource

    config = json.loads(Path(folder, "config.json").read_text())
    chunks = build_model(config, dtype=getattr(torch, config["torch_dtype"]), vocab_multiple=8, **LAYOUTS[layout])
    load_hf_folder(chunks, folder)
    control = {"vllm": HttpControl, "sglang": SglangControl}[kind]
    engines = [control(url, api_key="test-key", name=kind)] if rank == 0 else []
    settings = PublishConfig(deadline_s=40, control_s=30, run_id="experts", takeover=True, bucket_bytes=64 << 10)
    with Publisher(MegatronSource(chunks, config), engines, settings) as publisher:
        report = publisher.publish(version, force=True)
        return (report.outcome, report.engines[0].bytes_received, report.wire_bytes) if rank == 0 else None


@pytest.mark.parametrize(("family", "start"), [("glm4_moe", Vllm), ("deepseek_v3", Vllm), ("glm4_moe", Sglang)])
def test_experts_of_all_ranks_become_what_a_fresh_engine_has(family, start, tmp_path):
    server = start(tmp_path, family)
    try:
        fresh_tokens, fresh = server.tokens(), server.held()
        assert {name.rpartition(".")[2] for _, name in fresh} >= {"w13_weight", "w2_weight", "e_score_correction_bias"}
        for version, layout in ((2, "ep2"), (1, "tp2ep2etp1")):
            folder = str(write_folder(tmp_path, family, version, server.dtype))
            args = (server.kind, server.url, folder, layout, version)
            outcome, received, wire_bytes = spawn_ranks(publish, 2, args=args, gloo=True, deadline_s=100)[0]
            assert (outcome, received) == ("committed", (wire_bytes,))
            held = server.held()
            assert held.keys() == fresh.keys()
            if version == 2:
                assert [name for name in held if held[name] == fresh[name]] == []
                assert server.tokens() != fresh_tokens
        assert [name for name in held if held[name] != fresh[name]] == []
        assert server.tokens() == fresh_tokens
    finally:
        server.close()
