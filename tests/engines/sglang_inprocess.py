"""A real SGLang scheduler with its real speculative worker, built in this process and published to; prints what moved.

    python -m tests.engines.sglang_inprocess KIND FOLDER      (in the environment of an SGLang release)

For workers that cannot serve on a CPU: their models, loaders and the bridge are real, only forwards are not run. The
last line of the output is JSON, for `test_sglang_workers`.

    v2          EAGLEWorkerV2 with an MTP draft (MiMo)
    layers-v1   MultiLayerEagleWorker, two MTP layers (MiMo-V2-Flash). 0.5.10.post1 cannot import it, for a missing name
                in an annotation: that name is put into builtins here
    layers-v2   MultiLayerEagleWorkerV2, likewise
    mla         no drafts, a dense DeepSeek-V2: absorbed projections that SGLang derives from `kv_b_proj`
"""

from __future__ import annotations

import builtins
import collections
import inspect
import json
import os
import sys
import threading
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.engines.folders import write_plain

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, STEPS = 320, 64, 4, 2, 16, 128, 2
MLA = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 318,
    "eos_token_id": 319,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def write_layers_model(folder: Path) -> None:
    """A dense MiMo-V2-Flash with two MTP layers, random."""
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 0.1

    def layer(prefix: str, second_norm: str) -> dict[str, torch.Tensor]:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return {
            f"{attention}.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
            f"{attention}.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{attention}.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{attention}.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
            f"{mlp}.gate_proj.weight": random(WIDTH, HIDDEN),
            f"{mlp}.up_proj.weight": random(WIDTH, HIDDEN),
            f"{mlp}.down_proj.weight": random(HIDDEN, WIDTH),
            f"{prefix}.input_layernorm.weight": random(HIDDEN),
            f"{prefix}.{second_norm}.weight": random(HIDDEN),
        }

    tensors = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN),
        "model.norm.weight": random(HIDDEN),
        "lm_head.weight": random(VOCAB, HIDDEN),
    }
    for i in range(2):
        tensors |= layer(f"model.layers.{i}", "post_attention_layernorm")
    for i in range(STEPS):
        prefix = f"model.mtp.layers.{i}"
        tensors |= layer(prefix, "pre_mlp_layernorm")
        tensors |= {f"{prefix}.{n}.weight": random(HIDDEN) for n in ("enorm", "hnorm", "final_layernorm")}
        tensors[f"{prefix}.eh_proj.weight"] = random(HIDDEN, 2 * HIDDEN)
    heads = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM,
    }
    config = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": STEPS,
        **heads,
        **{f"swa_{name}": value for name, value in heads.items()},
        "sliding_window": 64,
        "sliding_window_size": 64,
        "use_sliding_window": False,
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 0],
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "layernorm_epsilon": 1e-5,
    }
    write_plain(folder, COMMON | config, tensors)


def write_mla_model(folder: Path) -> None:
    """A dense DeepSeek-V2 without a low-rank query, random."""
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 0.1

    rank, nope, rope, value = MLA["kv_lora_rank"], MLA["qk_nope_head_dim"], MLA["qk_rope_head_dim"], MLA["v_head_dim"]
    tensors = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN),
        "model.norm.weight": random(HIDDEN),
        "lm_head.weight": random(VOCAB, HIDDEN),
    }
    for i in range(2):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        tensors |= {
            f"{attention}.q_proj.weight": random(HEADS * (nope + rope), HIDDEN),
            f"{attention}.kv_a_proj_with_mqa.weight": random(rank + rope, HIDDEN),
            f"{attention}.kv_a_layernorm.weight": random(rank),
            f"{attention}.kv_b_proj.weight": random(HEADS * (nope + value), rank),
            f"{attention}.o_proj.weight": random(HIDDEN, HEADS * value),
            f"{mlp}.gate_proj.weight": random(WIDTH, HIDDEN),
            f"{mlp}.up_proj.weight": random(WIDTH, HIDDEN),
            f"{mlp}.down_proj.weight": random(HIDDEN, WIDTH),
            f"model.layers.{i}.input_layernorm.weight": random(HIDDEN),
            f"model.layers.{i}.post_attention_layernorm.weight": random(HIDDEN),
        }
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 2,
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        **MLA,
        "q_lora_rank": None,
        # SGLang has no other position embedding for MLA on a CPU.
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    write_plain(folder, COMMON | config, tensors)


def absorbed(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> tuple[list[int], list[bool]]:
    """Where the absorbed projections of every layer lie, and whether they are those of `tensors`."""
    nope, value = MLA["qk_nope_head_dim"], MLA["v_head_dim"]
    pointers, equal = [], []
    for i, layer in enumerate(module.model.layers):
        whole = tensors[f"model.layers.{i}.self_attn.kv_b_proj.weight"].view(HEADS, nope + value, -1)
        key, val = whole.split([nope, value], dim=1)
        attention = layer.self_attn
        pointers += [attention.w_kc.data_ptr(), attention.w_vc.data_ptr()]
        equal += [torch.equal(attention.w_kc, key), torch.equal(attention.w_vc, val.transpose(1, 2))]
    return pointers, equal


def build(kind: str, folder: Path):
    """The scheduler of one rank, as SGLang's scheduler process builds it."""
    layers = kind.startswith("layers")
    speculation = {
        # EAGLE would choose the second generation by itself.
        "speculative_algorithm": "NEXTN" if kind == "layers-v1" else "EAGLE",
        "speculative_num_steps": STEPS if layers else 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": STEPS + 1 if layers else 2,
    }
    if kind.endswith("v2"):
        os.environ["SGLANG_ENABLE_SPEC_V2"] = "1"
    if kind == "layers-v1":
        builtins.ModelRunner = object
    from sglang.srt.managers import scheduler as module
    from sglang.srt.server_args import PortArgs, ServerArgs

    options = {"enable_multi_layer_eagle": True, "disable_hybrid_swa_memory": True} if layers else {}
    args = ServerArgs(
        model_path=str(folder),
        **(speculation if kind != "mla" else {}),
        device="cpu",
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        dtype="float32",
        disable_cuda_graph=True,
        disable_overlap_schedule=not kind.endswith("v2") or hasattr(module, "publish"),
        skip_tokenizer_init=True,
        mem_fraction_static=0.1,
        max_total_tokens=2048,
        max_running_requests=4,
        context_length=256,
        log_level="error",
        **options,
    )
    ports = PortArgs.init_new(args)
    if hasattr(module, "publish"):
        world = module.spawn_world_rank(args, tp_rank=0, pp_rank=0)
        module.publish(args, role="scheduler", ranks=module.SpawnRanks(world_rank=world, dp_rank=None, gpu_id=0))
        return module.Scheduler(args, ports)
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(args)
    if layers:
        # This worker takes a CUDA attention backend for its drafts whatever the options say; nothing is run with it.
        from sglang.srt.speculative import multi_layer_eagle_worker_v2

        multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker.init_attention_backend = lambda self: None
    known = {"server_args": args, "port_args": ports, "dp_rank": None}
    names = list(inspect.signature(module.Scheduler.__init__).parameters)[1:]
    scheduler = module.Scheduler(**{n: known.get(n, 0) for n in names})
    scheduler.result_queue = collections.deque()  # as the loop that is not run here starts with
    return scheduler


class Direct:
    """A link that calls the bridge in this process, one call at a time, as the scheduler's loop would."""

    name = "direct"

    def __init__(self, scheduler) -> None:
        import sglang

        from weightsync.engines.sglang.rows import internals_for

        self.scheduler, self.internals = scheduler, internals_for(sglang.__version__)
        self.turn = threading.Lock()

    def update_group(self, group_name: str, *, deadline_s: float) -> tuple[bool, str]:
        from weightsync.engines.sglang.bridge import answer

        with self.turn:
            return True, answer(self.scheduler, self.internals, group_name)

    def set_weight_version(self, version: str, *, deadline_s: float) -> None:
        self.weight_version = version


def main(kind: str, folder: Path) -> None:
    from weightsync.engines.sglang.control import SglangControl
    from weightsync.publisher import PublishConfig, Publisher
    from weightsync.sources.state_dict import StateDictSource

    if kind.startswith("layers"):
        write_layers_model(folder)
    if kind == "mla":
        write_mla_model(folder)
    scheduler = build(kind, folder)
    target = scheduler.tp_worker.model_runner.model
    mark = ".mtp.layers." if kind.startswith("layers") else ".mtp_layers."
    disk = load_file(folder / "model.safetensors")
    before = absorbed(target, disk) if kind == "mla" else None
    g = torch.Generator().manual_seed(7)
    new = {name: torch.randn(t.shape, generator=g) for name, t in disk.items()}
    drafts = {"draft": lambda: {n: t for n, t in new.items() if mark in n}} if kind != "mla" else {}
    source = StateDictSource(lambda: {n: t for n, t in new.items() if mark not in n}, drafts=drafts)
    control = SglangControl("http://127.0.0.1:1", name="direct")
    control.link = Direct(scheduler)
    with Publisher(source, [control], PublishConfig(run_id="test", deadline_s=30, control_s=60)) as p:
        status = control.status(deadline_s=60)
        if kind == "v2":
            scheduler.result_queue.append("a forward")
            # The result of a forward that runs ahead (overlap): its pause is not over, and nothing may be written.
            out_of_rest = control.call("pause", {"mode": "wait"}, deadline_s=60)["idle"]
            scheduler.result_queue.clear()
            at_rest = control.call("drain", {}, deadline_s=60)["idle"]
            control.resume(deadline_s=60)
        report = p.publish(1)
    bridge = scheduler.weightsync_bridge
    embedding = bridge.runners[0].module.model.embed_tokens.weight
    drafts = [r.module for r in bridge.runners if r.name != "target"]
    out = {
        "worker": status["worker"],
        "outcome": report.outcome,
        "bytes": [list(e.bytes_received) for e in report.engines],
        "wire_bytes": report.wire_bytes,
        "loaded": dict(report.engines[0].loaded),
        "embed": torch.equal(embedding[: len(new["model.embed_tokens.weight"])], new["model.embed_tokens.weight"]),
        "shared": [d.model.embed_tokens.weight.data_ptr() == embedding.data_ptr() for d in drafts],
    }
    if kind.startswith("layers"):
        projections = [new[f"model.mtp.layers.{i}.eh_proj.weight"] for i in range(STEPS)]
        out["steps"] = [[torch.equal(d.model.eh_proj.weight, p) for p in projections] for d in drafts]
        # What loading by name alone does, as SGLang's own fan-out: every step takes every layer, and keeps the last.
        for d in drafts:
            d.load_weights([(n, t) for n, t in new.items() if mark in n])
        out["steps_by_name"] = [[torch.equal(d.model.eh_proj.weight, p) for p in projections] for d in drafts]
    elif kind == "mla":
        after = absorbed(target, new)
        out |= {"from_disk": before[1], "absorbed": after[1], "in_place": before[0] == after[0]}
    else:
        out["idle"] = [out_of_rest, at_rest]
        out["steps"] = [torch.equal(drafts[0].model.input_proj.weight, new["model.mtp_layers.0.input_proj.weight"])]
    print(json.dumps(out), flush=True)
    os._exit(0)  # SGLang leaves threads behind that never end


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
