"""A trainer with expert parallelism publishes: what its source streams fills a target and a draft, each tensor once.

Layouts and bytes of every family are in tests/converters/test_semantic.py; here the stream goes through manifest,
buckets and routing into modules that load like an engine's.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from converters.semantic.tiny import tiny_config, write_tiny_folder
from tests.converters.live_ranks import load_folder
from tests.support import spawn_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

PUBLISHED = {
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
    },
}
LAYOUTS = {"ep2": {"ep": 2}, "tp2ep2etp1": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}}


def publish(rank, world_size, folders):
    """{(model, layout): names that arrived wrong, by role, and what the manifest says}, of the sender."""
    warnings.simplefilter("ignore")
    return {(m, name): publish_one(f, layout) for m, f in folders.items() for name, layout in LAYOUTS.items()}


def publish_one(folder, layout):
    from converters.live import load_hf_folder
    from converters.semantic import build_model
    from tests.converters.support import same
    from tests.weightsync.engine.toy import Toy, copy_to, draft_runner, parameter, target_runner
    from weightsync.engine.coverage import Loading
    from weightsync.engine.routing import build_routes
    from weightsync.plan import BucketPacker, build_manifest, segments_of
    from weightsync.sources.megatron import MegatronSource
    from weightsync.timeline import Timeline

    config = json.loads(Path(folder, "config.json").read_text())
    want = load_folder(folder)
    chunks = build_model(config, vocab_multiple=8, **layout)
    load_hf_folder(chunks, folder)
    # The config alone: a trainer has no folder to ask. Then copies that MTP layers may repeat are not published.
    source = MegatronSource(chunks, config, gather_bytes=1 << 13)
    specs = source.specs()
    roles = frozenset({"target", "draft"})
    if not source.is_sender:
        assert list(source.stream(roles, Timeline())) == []
        return None
    manifest = build_manifest([specs], bucket_bytes=1 << 14)
    runners = []
    for role, make in (("target", target_runner), ("draft", draft_runner)):
        own = [s for s in specs if s.role == role]
        if own:
            fields = {s.name: s.name.replace(".", "_") for s in own}
            module = Toy(
                {fields[s.name]: parameter(*s.shape, dtype=s.dtype) for s in own},
                {s.name: copy_to(fields[s.name]) for s in own},
            )
            runners.append(make(module))
    loading = Loading(build_routes(manifest, runners, scope="both"), runners, Timeline())
    buffers = []

    def acquire():
        buffers.append(torch.empty(manifest.bucket_bytes, dtype=torch.uint8))
        return buffers[-1]

    def sent(nbytes, bucket):
        loading.take(segments_of(manifest, bucket, buffers[-1]))
        buffers[-1].fill_(255)

    BucketPacker(manifest, 0).pack(source.stream(roles, Timeline()), acquire, sent, Timeline())
    loading.finish()
    held = {r.name: dict(r.module.named_parameters()) for r in runners}
    wrong = [
        s.name
        for s in specs
        if not same(held["target" if s.role == "target" else "draft[0]"][s.name.replace(".", "_")].data, want[s.name])
    ]
    copies = {name for name in want if name.endswith(("layers.2.embed_tokens.weight", "shared_head.head.weight"))}
    return {
        "wrong": wrong,
        "missing": sorted(want.keys() - {s.name for s in specs} - copies),
        "drafts": [s.name for s in specs if s.role == "draft"],
        "buckets": len(manifest.buckets),
        "experts": [s.name for s in specs if ".layers.1." in s.name and s.name.endswith("gate_proj.weight")],
    }


def test_experts_of_all_ranks_reach_target_and_draft(tmp_path):
    folders = {name: str(write_tiny_folder(tiny_config(c), tmp_path / name)) for name, c in PUBLISHED.items()}
    ranks = spawn_ranks(publish, 2, args=(folders,), gloo=True, deadline_s=100)
    for case, sender in ranks[0].items():
        assert ranks[1][case] is None
        assert (sender["wrong"], sender["missing"]) == ([], []), case
        assert sender["buckets"] > 3
        assert all(name.startswith("model.layers.2.") for name in sender["drafts"])
        assert bool(sender["drafts"]) == (case[0] == "deepseek_v3")
    numbers = [int(name.split(".")[5]) for name in ranks[0]["qwen3_moe", "ep2"]["experts"]]
    assert numbers == [0, 2, 1, 3], "share by share"
