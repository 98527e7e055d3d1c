"""What does not need a running SGLang: which release gets which row, what the launcher sets, what control calls say."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync import errors
from weightsync.engines.capabilities import OPT_IN, rows_of
from weightsync.engines.sglang import launch
from weightsync.engines.sglang.control import SglangControl
from weightsync.engines.sglang.launch import prepare
from weightsync.engines.sglang.rows import INTERNALS, PROBES, internals_for, stock_row
from weightsync.engines.sglang.stock import stock_control
from weightsync.protocol import PublishCall

EXTERNAL = "SGLANG_EXTERNAL_MODEL_PACKAGE"


@pytest.mark.parametrize(
    ("version", "first", "seam"),
    [
        ("0.5.10", "0.5.10", EXTERNAL),
        ("0.5.10.post1", "0.5.10", EXTERNAL),
        ("0.5.11", "0.5.11", "sglang.srt.plugins"),
        ("0.5.12.post1+cu130", "0.5.11", "sglang.srt.plugins"),
        ("0.5.13", "0.5.13", "sglang.srt.plugins"),
        ("0.5.20.post2", "0.5.13", "sglang.srt.plugins"),
        ("0.5.21", "0.5.21", "sglang.srt.plugins"),
        ("0.5.23", "0.5.21", "sglang.srt.plugins"),
    ],
)
def test_a_release_finds_its_row(version: str, first: str, seam: str) -> None:
    found = internals_for(version)
    assert (found.row.first, found.seam) == (first, seam)


def test_rows_leave_no_gap_and_name_first_generation_workers_where_they_exist() -> None:
    rows = rows_of("sglang")
    assert [r.below for r in rows[:-1]] == [r.first for r in rows[1:]]
    assert [i.row for i in INTERNALS] == list(rows)
    for i in INTERNALS:
        assert ("EAGLEWorker" in i.draft_paths) == ("spec v1 workers" in i.row.facts)
        assert i.row.relies_on <= i.row.facts


def test_releases_outside_are_refused_and_later_ones_can_be_opted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UnsupportedError, match="older than"):
        internals_for("0.5.9")
    with pytest.raises(errors.UnsupportedError, match=OPT_IN):
        internals_for("0.5.24")
    monkeypatch.setenv(OPT_IN, "1")
    assert internals_for("0.6.0") is INTERNALS[-1]


def test_the_launcher_sets_the_seam_and_passes_speculative_options_through() -> None:
    env: dict[str, str] = {}
    given = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--enable-draft-weights-cpu-backup"]
    _, arguments = prepare("0.5.10.post1", given, env)
    assert env == {EXTERNAL: "weightsync.engines.sglang.models"}
    assert arguments == ["--speculative-algorithm", "EAGLE", *given[2:]]
    _, arguments = prepare("0.5.23", ["--speculative-algorithm=NEXTN"], env := {})
    assert env == {}
    assert arguments == ["--speculative-algorithm=EAGLE"]


def test_the_launcher_does_not_take_a_seam_from_others() -> None:
    with pytest.raises(errors.ConfigError, match="import weightsync"):
        prepare("0.5.10.post1", [], {EXTERNAL: "their.models"})
    env = {"SGLANG_PLUGINS": "theirs"}
    prepare("0.5.23", [], env)
    assert env["SGLANG_PLUGINS"] == "theirs,weightsync"


class Link:
    """Answers with what it is given, and remembers what it was asked."""

    name = "link"

    def __init__(self, *replies: Any) -> None:
        self.replies, self.asked, self.version = list(replies), [], None

    def update_group(self, group_name: str, *, deadline_s: float) -> tuple[bool, str]:
        self.asked.append(json.loads(group_name)["op"])
        return True, json.dumps({"weightsync": self.replies.pop(0)})

    def set_weight_version(self, version: str, *, deadline_s: float) -> None:
        self.version = version


def control(*replies: Any) -> tuple[SglangControl, Link]:
    out, link = SglangControl("http://127.0.0.1:1"), Link(*replies)
    out.link = link
    return out, link


def test_a_pause_returns_once_the_engine_is_idle_or_says_what_it_waits_for() -> None:
    idle, busy = {"idle": True, "kept": []}, {"idle": False, "kept": []}
    c, link = control(busy, busy, idle)
    assert c.pause("wait", deadline_s=5)["idle"]
    assert link.asked == ["pause", "drain", "drain"]
    c, _ = control(*[busy] * 100)
    with pytest.raises(errors.EngineError, match="requests still run"):
        c.pause("wait", deadline_s=0.1)


@pytest.mark.parametrize(
    ("kind", "raised"), [("EngineFenced", errors.EngineFenced), ("UnsupportedError", errors.UnsupportedError)]
)
def test_what_the_engine_raises_is_raised_here(kind: str, raised: type[Exception]) -> None:
    c, _ = control({"error": {"type": kind, "message": "because", "rank": 1}})
    with pytest.raises(raised, match="because"):
        c.resume(deadline_s=1)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="expected http"):
        SglangControl("localhost")


def test_what_stock_servers_can_do_is_open_upward_and_refuses_those_whose_drafts_it_never_reaches() -> None:
    assert stock_row("0.6.1").tested == ("0.5.23",)
    with pytest.raises(errors.UnsupportedError, match="never reaches a draft"):
        stock_row("0.5.20")
    assert stock_row("0.5.21").facts <= frozenset(PROBES)


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"pp_size": 2}, "pp_size=2"),
        ({"dp_size": 2}, "dp_size=2"),
        ({"enable_multi_layer_eagle": True}, "last layer into every step"),
        ({"speculative_token_map": "map.pt"}, "sliced head"),
    ],
)
def test_stock_servers_that_their_own_way_would_corrupt_are_refused(info: dict[str, Any], says: str) -> None:
    replies = {"/server_info": {"version": "0.5.23", "tp_size": 1, **info}, "/model_info": {"weight_version": "1"}}

    class Answers:
        name = "engine"

        def get(self, path: str, *, deadline_s: float) -> tuple[int, Any]:
            return 200, replies[path]

    relay = stock_control("http://127.0.0.1:1", backend="gloo")
    relay._stock._link = Answers()  # type: ignore[attr-defined]
    with pytest.raises(errors.UnsupportedError, match=says):
        relay.status(deadline_s=1)


CALL = PublishCall(
    run_id="r",
    epoch=1,
    seq=0,
    nonce="n",
    version=7,
    manifest_digest="d",
    store_host="127.0.0.1",
    store_port=1,
    engine_index=0,
    first_group_rank=1,
    group_size=2,
    transport="gloo",
    num_buffers=2,
    deadline_s=1.0,
)


def test_a_flush_that_is_refused_is_tried_again_and_then_reported() -> None:
    refused, done = {"flushed": False}, {"flushed": True}
    c, link = control(refused, refused, done)
    assert c.commit(CALL, deadline_s=5) == done
    assert (link.asked, link.version) == (["commit"] * 3, "7")
    c, link = control(*[refused] * 100)
    with pytest.raises(errors.EngineError, match=r"could not be flushed within 0\.1 s; it keeps requests back"):
        c.commit(CALL, deadline_s=0.1)
    assert link.version is None


def test_the_launcher_says_in_one_line_what_it_cannot_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)  # as if it were not installed
    with pytest.raises(SystemExit, match=r"sglang is not installed for .*: use its environment"):
        launch.main()
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.10.post1"))
    monkeypatch.setenv(EXTERNAL, "their.models")
    with pytest.raises(SystemExit, match=r"their\.models is set"):
        launch.main()
