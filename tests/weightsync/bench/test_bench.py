"""Whole runs of `weightsync bench` at the tiny shape: what it prints, what the bytes are, what decoding shows."""

import json

import pytest

from weightsync import cli
from weightsync.bench.config import BenchConfig
from weightsync.bench.weights import model_configs
from weightsync.embedded.known import known_argmax, write_hf_folder
from weightsync.embedded.loading import checkpoint_shapes
from weightsync.timeline import PHASES

pytestmark = pytest.mark.multiproc

SUMMARY = {
    "acceptance_after", "acceptance_before", "first_publish_s", "limit_parts", "limit_s", "num_buckets", "num_tensors",
    "padding_bytes", "peak_extra_bytes", "publish_s", "ratio_to_limit", "unique_bytes", "wire_bytes_per_engine_rank",
}  # fmt: skip


def bench(capsys, *arguments):
    """(stdout, stderr) of a run that succeeds."""
    base = ["--model", "tiny", "--publishes", "2", "--warmup", "1", "--bucket-mib", "0.25", "--deadline", "60"]
    assert cli.main(["--debug", "bench", *base, *arguments]) == 0
    return capsys.readouterr()


def unique_bytes(draft):
    """By the shapes alone."""
    target, drafter = model_configs(BenchConfig(model="tiny", draft=draft))
    shapes = checkpoint_shapes(target)
    if drafter is not None:
        shapes["draft"] = checkpoint_shapes(drafter)["draft"]
    total = 0
    for named in shapes.values():
        for name, shape in named.items():
            count = 1
            for n in shape:
                count *= n
            total += count * {"d2t": 8, "t2d": 1}.get(name, 2)
    return total


def check_result(result, draft, processes):
    assert result["schema_version"] == 1
    assert set(result) >= {"summary", "phases", "compare", "versions", "machine", "config", "date", "title"}
    summary = result["summary"]
    assert set(summary) == SUMMARY
    assert summary["unique_bytes"] == unique_bytes(draft)
    assert summary["wire_bytes_per_engine_rank"] - summary["padding_bytes"] == summary["unique_bytes"]
    assert summary["padding_bytes"] < summary["unique_bytes"] / 1000
    assert 0 < summary["publish_s"]["median"] <= summary["publish_s"]["p99"]
    assert set(summary["peak_extra_bytes"]) == processes
    assert all(v is None or 0 <= v < 64 << 20 for v in summary["peak_extra_bytes"].values())
    if draft == "none":
        assert summary["acceptance_before"] is summary["acceptance_after"] is None
    else:
        assert summary["acceptance_before"] < 0.1
        assert summary["acceptance_after"] == 1.0
    expected = set(PHASES) - {"convert"} - ({"load_draft"} if draft == "none" else set())
    assert set(result["phases"]) >= expected
    for phase in ("pack", "wire", "load_target"):
        assert result["phases"][phase]["nbytes"] > 0
    assert {"python", "torch", "weightsync"} <= set(result["versions"])
    assert {"cpu", "cores", "memory_bytes", "kernel"} <= set(result["machine"])


def test_gloo_with_an_mtp_draft_beside_the_limit_and_other_ways(capsys, tmp_path):
    files = [tmp_path / name for name in ("result.json", "trace.json", "plot.png")]
    flags = [x for pair in zip(("--json", "--trace", "--plot"), map(str, files), strict=True) for x in pair]
    pytest.importorskip("matplotlib")
    out, err = bench(capsys, "--engines", "2", "--compare", *flags)
    assert err == ""  # no progress off a terminal
    for line in (
        "whole publish",
        "limit",
        "draft acceptance: 0.000",
        "1.000 with the draft",
        "two_pass_full",
        "engine1 rank 0",
    ):
        assert line in out
    result = json.loads(files[0].read_text())
    check_result(result, "mtp", {"trainer rank 0", "engine0 rank 0", "engine1 rank 0"})
    assert result["summary"]["limit_parts"][1] == "memcpy"
    assert result["summary"]["ratio_to_limit"] > 0
    ways = {w["name"]: w for w in result["compare"]}
    unique = result["summary"]["unique_bytes"]
    assert ways["per_tensor_broadcast"]["wire_bytes_per_engine_rank"] == unique
    assert ways["two_pass_full"]["wire_bytes_per_engine_rank"] == 2 * unique
    assert unique < ways["two_pass_subset"]["wire_bytes_per_engine_rank"] < 2 * unique
    assert ways["flattened_bucket"]["ratio_to_ours"] > 0

    trace = json.loads(files[1].read_text())["traceEvents"]
    names = {e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert {"trainer stage 0", "engine0 rank 0", "engine1 rank 0"} <= names
    spans = [e for e in trace if e["ph"] == "X"]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in spans)
    # One clock: both publishes, lanes between them, end within the run.
    assert max(e["ts"] + e["dur"] for e in spans) < 120e6
    assert files[2].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_shared_memory_with_an_eagle3_draft_and_sharded_engines(capsys):
    out, err = bench(capsys, "--transport", "shm", "--draft", "eagle3", "--engine-tp", "2", "--json", "--compare")
    result = json.loads(out)  # nothing else on stdout
    assert err == ""
    check_result(result, "eagle3", {"trainer rank 0", "engine0 rank 0", "engine0 rank 1"})
    assert result["summary"]["limit_parts"] == ["shared_copy_in", "shared_copy_out"]


def test_a_folder_without_a_draft_is_published_as_it_is(capsys, tmp_path):
    shape, _ = model_configs(BenchConfig(model="tiny-qwen3", draft="none"))
    folder = write_hf_folder(tmp_path / "my-model", shape, known_argmax(shape, seed=3)["target"], shard_bytes=100_000)
    out, _ = bench(capsys, "--model", str(folder), "--draft", "none", "--json")
    result = json.loads(out)
    sizes = sum(t.nbytes for t in known_argmax(shape, seed=3)["target"].values())
    assert result["summary"]["unique_bytes"] == sizes
    assert result["compare"] == []
    assert result["summary"]["ratio_to_limit"] is None
    assert result["config"]["model"] == "my-model"
    assert str(tmp_path) not in out


@pytest.mark.slow
def test_a_live_megatron_trainer_publishes_what_a_state_dict_would(capsys):
    pytest.importorskip("megatron.core")
    out, _ = bench(capsys, "--trainer", "tp=2,pp=2", "--json")
    result = json.loads(out)
    trainers = {f"trainer rank {r}" for r in range(4)}
    assert set(result["summary"]["peak_extra_bytes"]) == trainers | {"engine0 rank 0"}
    assert result["phases"]["gather"]["nbytes"] > 0
    assert result["phases"]["convert"]["nbytes"] > 0
    summary = result["summary"]
    assert summary["wire_bytes_per_engine_rank"] - summary["padding_bytes"] == summary["unique_bytes"]
    assert summary["acceptance_before"] < 0.1
    assert summary["acceptance_after"] == 1.0


def test_a_trainer_that_fails_is_one_line_and_leaves_nothing(capsys, monkeypatch):
    from weightsync.bench import harness

    monkeypatch.setattr(harness, "SEED", "no number")
    status = cli.main(["bench", "--model", "tiny", "--draft", "none"])
    out, err = capsys.readouterr()
    assert status == 1
    assert out == ""
    assert err.count("\n") == 1
    assert "trainer rank 0, load: " in err
