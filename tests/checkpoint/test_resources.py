"""Disk, memory and shared memory: what preflight refuses, and floors that are told of before they are hit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import psutil
import pytest

from checkpoint.disk import check_need, disk_left_bytes, filesystem_of, memory_left_bytes, shm_left_bytes
from checkpoint.errors import ConfigError, DiskError
from checkpoint.resources import Floors, ResourceWatch
from checkpoint.retention import Retention

KIB, MIB = 1 << 10, 1 << 20
NOTHING = {"memory_bytes": None, "shm_bytes": None, "disk_bytes": None}


def wait_for(found, deadline_s=20.0):
    end = time.monotonic() + deadline_s
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_save_that_does_not_fit_is_refused_with_the_figures(tmp_path):
    (tmp_path / "other").write_bytes(bytes(100 * KIB))
    keep = Retention(keep_last=2)
    fits = check_need(tmp_path, keep, node_bytes=200 * KIB, staging_bytes=MIB, disk_limit_bytes=600 * KIB)
    assert (fits.disk_peak_bytes, fits.disk_held_bytes) == (600 * KIB, 100 * KIB)
    with pytest.raises(
        DiskError, match=rf"will hold up to {800 * KIB} bytes .* holds {100 * KIB}, and only {500 * KIB}"
    ):
        # One more stays while it is being drained.
        check_need(tmp_path, keep, node_bytes=200 * KIB, staging_bytes=MIB, disk_limit_bytes=600 * KIB, drains=True)
    with pytest.raises(DiskError, match="lower keep_last, or free space"):
        check_need(tmp_path, Retention(), node_bytes=disk_left_bytes(tmp_path), staging_bytes=MIB)
    with pytest.raises(DiskError, match="set staging_bytes to stream"):
        check_need(tmp_path, keep, node_bytes=KIB, staging_bytes=memory_left_bytes() * 2)


@pytest.mark.multiproc
def test_a_limit_that_the_filesystem_does_not_tell_is_found_by_reserving(tmp_path):
    if filesystem_of(tmp_path).kind not in ("ext4", "xfs", "btrfs"):
        pytest.skip("reserves on ext4, xfs and btrfs only")
    # RLIMIT_FSIZE stands for a quota: statvfs knows of neither.
    program = """
import resource, signal, sys
from checkpoint.disk import check_need
from checkpoint.errors import DiskError
from checkpoint.retention import Retention

def check():
    check_need(sys.argv[1], Retention(keep_last=1), node_bytes=1 << 20, staging_bytes=0, reserve=True)

check()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    check()
except DiskError as e:
    print(e)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert re.search(r"has no room for \d+ more bytes, although its filesystem tells of room", done.stdout)
    assert os.listdir(tmp_path) == []


def test_the_kind_of_a_filesystem_is_told_with_what_it_means(tmp_path):
    found = filesystem_of(tmp_path / "not" / "there")
    assert found.kind not in ("", "?")
    assert str(tmp_path).startswith(found.mount)
    if os.path.ismount("/dev/shm"):
        assert filesystem_of("/dev/shm").kind == "tmpfs"
        assert "lies in memory" in filesystem_of("/dev/shm/x").caution


def test_the_readings_are_the_machines(tmp_path):
    floors = Floors(memory_bytes=1, shm_bytes=1, disk_bytes=1)
    low = []
    with ResourceWatch(tmp_path, floors, low.append) as watch:
        readings = watch.readings
    assert abs(readings["disk"].left_bytes - psutil.disk_usage(str(tmp_path)).free) < 1 << 30
    assert 0 < readings["memory"].left_bytes <= psutil.virtual_memory().total
    assert ("shm" in readings) == (shm_left_bytes() is not None)
    assert low == []


def test_a_floor_is_told_of_before_it_is_hit_once_and_again_after_a_recovery(tmp_path):
    low = []
    floors = Floors(**{**NOTHING, "disk_bytes": 300 * KIB})
    with ResourceWatch(tmp_path, floors, low.append, every_s=0.01, lead_s=0.5, disk_limit_bytes=1000 * KIB) as watch:
        wait_for(lambda: watch.readings["disk"].window_s > 0.2)
        assert low == []
        (tmp_path / "a").write_bytes(bytes(400 * KIB))
        wait_for(lambda: low)
        # 600 left, floor 300: not hit yet, but another 400 would.
        assert (low[0].resource, low[0].left_bytes, low[0].lost_bytes) == ("disk", 600 * KIB, 400 * KIB)
        assert "disk nears its floor: 614400 bytes left, floor 307200" in str(low[0])
        # Nothing more is lost: after the window that loss is history.
        wait_for(lambda: not watch.readings["disk"].low)
        assert len(low) == 1
        (tmp_path / "b").write_bytes(bytes(350 * KIB))
        wait_for(lambda: len(low) == 2)
        assert low[1].left_bytes == 250 * KIB
        assert "is at its floor" in str(low[1])
        (tmp_path / "b").unlink()
        (tmp_path / "a").unlink()
        wait_for(lambda: not watch.readings["disk"].low)
        (tmp_path / "c").write_bytes(bytes(800 * KIB))
        wait_for(lambda: len(low) == 3)


def test_memory_that_is_taken_is_seen_and_a_callback_that_fails_stops_nothing(tmp_path, caplog):
    left = memory_left_bytes()
    called = []

    def fail(reading):
        called.append(reading)
        raise RuntimeError("callback")

    floors = Floors(**{**NOTHING, "memory_bytes": left + (1 << 40), "disk_bytes": 1 << 60})
    with ResourceWatch(tmp_path, floors, fail, every_s=0.01):
        wait_for(lambda: len(called) == 2)
    assert {reading.resource for reading in called} == {"memory", "disk"}
    assert "the callback of memory failed" in caplog.text


def test_what_cannot_be_watched_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="disk_bytes must be a number of bytes or None"):
        Floors(disk_bytes=-1)
    with pytest.raises(ConfigError, match="every_s must be positive"):
        ResourceWatch(tmp_path, Floors(), print, every_s=0)
