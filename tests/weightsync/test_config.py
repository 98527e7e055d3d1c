"""`PublishConfig` refuses what cannot work, when it is built."""

from __future__ import annotations

import dataclasses

import pytest

from weightsync import errors
from weightsync.config import PublishConfig


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"bucket_bytes": 100}, "bucket_bytes is 100"),
        ({"num_buffers": 1}, "num_buffers is 1"),
        ({"deadline_s": 0}, "deadline_s is 0"),
        ({"control_s": -1}, "control_s is -1"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s is nan"),
        ({"pause_mode": "stop"}, "pause_mode is 'stop'"),
        ({"on_engine_failure": "ignore"}, "on_engine_failure is 'ignore'"),
        ({"run_id": " "}, "run_id is empty"),
        ({"run_id": "a/b"}, "contains '/'"),
        ({"port_range": (5, 4)}, "port_range"),
        ({"port_range": (0, 70000)}, "port_range"),
        ({"bind_host": "0.0.0.0"}, "bind_host '0.0.0.0' means every address; say with advertise_host"),
        ({"bind_host": "::", "advertise_host": "0.0.0.0"}, "say with advertise_host"),
    ],
)
def test_bad_values_are_named(values: dict[str, object], says: str) -> None:
    with pytest.raises(errors.ConfigError, match=says.replace("(", r"\(")):
        PublishConfig(**values)  # type: ignore[arg-type]


def test_config_cannot_change_after_the_check() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PublishConfig().num_buffers = 1  # type: ignore[misc]
