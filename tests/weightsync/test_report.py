"""What reports say of acceptance and of guarantees, from what engines say; publishes themselves: `test_publish`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from weightsync.acceptance import AcceptanceMeter
from weightsync.config import PublishConfig
from weightsync.errors import ConfigError, EngineError, UnsupportedError
from weightsync.guarantees import GUARANTEES, check_required, missing
from weightsync.report import EngineReport, PublishReport, acceptance


def counts(drafts: int, proposed: int, accepted: int) -> dict[str, float]:
    return {"drafts": drafts, "draft_tokens": proposed, "accepted_tokens": accepted}


class Engine:
    name = "e"

    def __init__(self, **status: Any) -> None:
        self.said = {"instance": "i", **status}

    def status(self, *, deadline_s: float) -> Mapping[str, Any]:
        if self.said.get("dead"):
            raise EngineError("gone")
        return self.said


def report_of(**fields: Any) -> PublishReport:
    engine = EngineReport(name="e", outcome="committed", **fields)
    return PublishReport(version=1, outcome="committed", scope="both", run_id="r", engines=(engine,))


def test_acceptance_is_of_the_tokens_between_two_readings() -> None:
    assert acceptance({}, counts(10, 20, 15)) == {"spec_accept_rate": 0.75, "spec_accept_length": 2.5}
    assert acceptance(counts(10, 20, 15), counts(14, 28, 15)) == {"spec_accept_rate": 0.0, "spec_accept_length": 1.0}
    assert acceptance(counts(10, 20, 15), counts(10, 20, 15)) == acceptance({}, {}) == {}


def test_before_ends_and_after_begins_with_the_commit() -> None:
    meter = AcceptanceMeter()
    meter.new_publish()
    # Eight more tokens drained between the status and the commit.
    status = {"instance": "i", "speculation_counts": counts(10, 10, 10)}
    meter.committed(status, {"speculation_counts": counts(18, 18, 14)})
    assert meter.before(status, committed=True)["spec_accept_rate"] == 14 / 18
    assert meter.before(status, committed=False)["spec_accept_rate"] == 1.0
    engine = Engine(speculation_counts=counts(28, 28, 24))
    after = meter.measure(report_of(), [engine], 1.0)
    assert after.engines[0].speculation_after == {"spec_accept_rate": 1.0, "spec_accept_length": 2.0}
    assert after.metrics()["weightsync/spec_accept_length_after"] == 2.0
    assert "weightsync/spec_accept_length_before" not in after.metrics()
    assert meter.measure(report_of(), [Engine(instance="restarted")], 1.0).engines[0].speculation_after == {}
    assert meter.measure(report_of(), [Engine(dead=True)], 1.0).engines[0].speculation_after == {}
    meter.new_publish()
    meter.committed(engine.said, {})
    assert meter.before(engine.said, committed=True)["spec_accept_rate"] == 1.0


def test_a_required_guarantee_that_an_engine_lacks_is_refused_by_name() -> None:
    status = {"missing_guarantees": {"routing": "names alone decide: use the adapter"}}
    check_required("e", status, ["all_rank_acks"])
    check_required("e", {}, list(GUARANTEES))
    with pytest.raises(UnsupportedError, match=r"routing .*names alone decide: use the adapter"):
        check_required("e", status, ["all_rank_acks", "routing"])
    for wrong in (["fast"], "routing"):
        with pytest.raises(ConfigError, match="expected a list of guarantees out of all_rank_acks"):
            PublishConfig(require=wrong)


def test_a_report_keeps_what_is_missing_through_json_and_metrics() -> None:
    report = report_of(missing_guarantees=missing({"missing_guarantees": {"routing": "why"}}))
    again = PublishReport.from_json(report.to_json())
    assert again == report
    assert again.metrics("")["guarantees_missing"] == 1.0
    assert report_of().metrics("")["guarantees_missing"] == 0.0
