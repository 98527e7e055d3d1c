"""A conversion that is killed anywhere and resumed writes the bytes of an unbroken one; till then it has no name."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
from pathlib import Path

import pytest

import converters
from tests.converters.offline.support import fingerprint, write_folder
from tests.converters.test_families import mimo
from tests.support import spawn_ranks
from tests.support.forks import Fork

pytestmark = pytest.mark.multiproc

KILLS = 10


def convert_and_die(source, target, count, options):
    """Ends itself by SIGKILL in place of its system call number `count` that writes, syncs, renames or removes."""
    from checkpoint.format import files
    from converters.offline import move

    left = count

    def counted(call):
        def run(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return run

    move.write_at = counted(move.write_at)
    files.write_some = counted(files.write_some)
    for name in ("fsync", "rename", "unlink", "write"):
        setattr(os, name, counted(getattr(os, name)))
    converters.convert(source, target, resume=True, workers=1, **options)
    return count - left


def kill_and_resume(rank, world_size, source, golden, root, options):
    """For each of several random points: (point, files resumed, whether the bytes are those of an unbroken run)."""
    root = Path(root)
    import torch.distributed.checkpoint.filesystem  # noqa: F401 - else each fork imports it

    faulthandler.cancel_dump_traceback_later()  # a thread, which must not be there at a fork
    with Fork(convert_and_die, source, str(root / "count"), 10**9, options) as whole:
        calls = whole.result(30)
    assert fingerprint(root / "count") == golden
    found = []
    for point in sorted(random.Random(7).sample(range(1, calls), KILLS)):
        target = root / f"killed-{point}"
        died = pytest.raises(AssertionError, match="died without a result")
        with Fork(convert_and_die, source, str(target), point, options) as child, died:
            child.result(30)
        complete = target.exists()
        if complete:  # killed after the rename: it is all there
            got = {k: v for k, v in fingerprint(target).items() if k != ".journal"}
            found.append((point, None, got == golden))
            continue
        with Fork(resume, source, str(target), options) as child:
            resumed = child.result(30)
        found.append((point, resumed, fingerprint(target) == golden))
    return found


def resume(source, target, options):
    return len(converters.convert(source, target, resume=True, **options).resumed)


@pytest.mark.parametrize("to", ["mcore", "hf"])
def test_killed_at_ten_random_points_and_resumed_gives_the_same_bytes(tmp_path, to):
    config, tensors = mimo(1)
    source = write_folder(tmp_path / "src", config, tensors)
    options = {"shard_bytes": 4000}
    if to == "hf":
        converters.convert(source, tmp_path / "m")
        source = tmp_path / "m"
    converters.convert(source, tmp_path / "golden", **options)
    golden = fingerprint(tmp_path / "golden")
    (tmp_path / "work").mkdir()
    args = (str(source), golden, str(tmp_path / "work"), options)
    (found,) = spawn_ranks(kill_and_resume, 1, args=args, deadline_s=100)
    assert len(found) == KILLS
    assert [point for point, _, same in found if not same] == []
    assert any(resumed for _, resumed, _ in found), "no run had anything to go on with"
