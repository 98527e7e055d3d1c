"""How long a save holds training, and how long until it can be loaded: ours beside the limits and today's ways.

    python benchmarks/saves.py [--mb 1200] [--rounds 3] [--slow 15] [--ways ours,dcp_process,...] [--json FILE]

Two ranks with `--mb` MB each: bf16 weights and two fp32 optimizer states in tensors of 4 to 8 MB. Per way and round,
the largest over ranks of: seconds that the training thread was held; seconds until the checkpoint is on disk and
loadable; CPU seconds of the rank and its writer. In the same rounds the limits: `memcpy` into warm memory, and the same
bytes by plain parallel writers: `write_fsync` as a program usually writes, `write_push` with early write-back,
`write_direct` past the page cache (what the disk takes). Medians and ratios are printed; rounds are interleaved and
the first is a warm-up. With `--slow`, further saves are made while rank 1's writer is delayed by so many seconds.
Status 1 if a bound is missed: blocked 1.15 x memcpy, loadable 1.2 x `write_fsync`, 1 s from the last byte to loadable,
blocked by at most 10 % longer beside a delayed writer.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LIMITS = ("memcpy", "write_fsync", "write_push", "write_direct")
WAYS = ("ours", "mcore_sync", "mcore_fork", "dcp_sync", "dcp_process")
SLOW_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from benchmarks.saves import slow_writer; slow_writer()"


def slow_writer():
    """The writer program, held up for as long as the file named by the environment says (rank 1 only)."""
    from checkpoint import progress, writer

    plain = progress.Progress.enter

    def enter(self, phase):
        plain(self, phase)
        path = Path(os.environ["CHECKPOINT_BENCH_SLOW"])
        if phase == "write" and self.rank == 1 and path.exists():
            time.sleep(float(path.read_text()))

    progress.Progress.enter = enter
    writer.main()


def build(rank, mb):
    import torch

    elements = 1024 * 2048
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for i in range(max(1, int(mb * 1e6 / (elements * 10)))):
        tensors[f"model.{i}"] = torch.randn(1024, 2048, generator=generator).bfloat16()
        tensors[f"exp_avg.{i}"] = torch.randn(1024, 2048, generator=generator)
        tensors[f"exp_avg_sq.{i}"] = torch.rand(1024, 2048, generator=generator)
    return tensors


class Rank:
    """One rank of the benchmark."""

    def __init__(self, options):
        import torch
        import torch.distributed as dist

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        self.rank, self.world_size = options.rank, 2
        host, _, port = options.store.rpartition(":")
        timeout = datetime.timedelta(seconds=600)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2, timeout=timeout)
        self.dist, self.torch, self.root = dist, torch, Path(options.root)
        self.tensors = build(self.rank, options.mb)
        self.nbytes = sum(t.numel() * t.element_size() for t in self.tensors.values())
        store = torch.ones(self.nbytes + 4096, dtype=torch.uint8)
        self.flat = store[-store.data_ptr() % 4096 :][: self.nbytes]  # O_DIRECT wants whole pages
        self.found = {}

    def sync(self):
        self.dist.barrier()
        if self.rank == 0:
            os.sync()
        self.dist.barrier()

    def record(self, name, **values):
        everybody = [None] * self.world_size
        self.dist.all_gather_object(everybody, values)
        row = {key: max(v[key] for v in everybody) for key in values}
        self.found.setdefault(name, []).append(row)

    def memcpy(self):
        began, offset = time.monotonic(), 0
        for tensor in self.tensors.values():
            nbytes = tensor.numel() * tensor.element_size()
            self.flat[offset : offset + nbytes].copy_(tensor.view(-1).view(self.torch.uint8))
            offset += nbytes
        took = time.monotonic() - began
        self.record("memcpy", blocked_s=took, total_s=took)

    def write_fsync(self):
        """Through the page cache, as a plain program writes."""
        self.write_raw("write_fsync")

    def write_push(self):
        """Through the page cache, asking the kernel to write and forget every 8 MiB."""
        self.write_raw("write_push", push=True)

    def write_direct(self):
        """Past the page cache: what the disk takes."""
        self.write_raw("write_direct", direct=True)

    def write_raw(self, name, *, num_files=2, push=False, direct=False):
        view = memoryview(self.flat.numpy())
        half = -(-len(view) // num_files) + 4095 & ~4095
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | (os.O_DIRECT if direct else 0)
        written = {}

        def write(i):
            started = time.monotonic()
            fd = os.open(self.root / f"raw.{self.rank}.{i}", flags)
            part = view[i * half : (i + 1) * half]
            if direct and (rest := len(part) % 4096):
                part = part[: len(part) - rest]  # a file of whole blocks: less than a page is left out
            for at in range(0, len(part), 8 << 20):
                size = os.write(fd, part[at : at + (8 << 20)])
                if push:
                    os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)
            written[i] = time.monotonic() - started
            os.fsync(fd)
            os.close(fd)

        began, cpu = time.monotonic(), time.process_time()
        threads = [threading.Thread(target=write, args=(i,)) for i in range(num_files)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.monotonic() - began
        cpu = time.process_time() - cpu
        self.record(name, blocked_s=took, total_s=took, cpu_s=cpu, write_s=max(written.values()))
        for i in range(num_files):
            os.unlink(self.root / f"raw.{self.rank}.{i}")

    # Ours

    def start_ours(self):
        from checkpoint import Checkpointer, Retention, SaveConfig, process
        from checkpoint.plan import Shard, State

        process.PROGRAM = SLOW_PROGRAM.format(root=str(Path(__file__).resolve().parents[1]))
        os.environ["CHECKPOINT_BENCH_SLOW"] = str(self.root / "slow")
        config = SaveConfig(deadline_s=300, retention=Retention(keep_last=1))
        self.checkpointer = Checkpointer(self.root / "ours", rank=self.rank, world_size=2, config=config)
        self.state = State(
            shards=[
                Shard(key=key, tensor=t, global_shape=(2048, 2048), offset=(1024 * self.rank, 0), shape=tuple(t.shape))
                for key, t in self.tensors.items()
            ],
            common={"step": 7},
        )
        self.step = 0

    def ours(self, name="ours"):
        self.step += 1
        writer = Path(f"/proc/{self.checkpointer.writer_pid}/stat")
        cpu, other = time.process_time(), _cpu_s(writer)
        began = time.monotonic()
        handle = self.checkpointer.save(self.step, self.state)
        blocked, poll = time.monotonic() - began, 0.0
        while not handle.done:
            before = time.monotonic()
            self.checkpointer.poll()
            poll = max(poll, time.monotonic() - before)
            time.sleep(0.005)
        total = time.monotonic() - began
        assert handle.state == "committed", handle.error
        self.record(
            name,
            blocked_s=blocked,
            total_s=total,
            longest_poll_s=poll,
            cpu_s=time.process_time() - cpu + _cpu_s(writer) - other,
            after_last_seal_s=handle.result["times"].get("decided_after_last_seal_s", 0.0),
            write_s=handle.result["times"]["write_s"],
            sync_s=handle.result["times"]["sync_s"],
        )

    # Today's ways

    def sharded(self):
        from megatron.core.dist_checkpointing import ShardedTensor

        return {k: ShardedTensor.from_rank_offsets(k, t, (0, self.rank, 2)) for k, t in self.tensors.items()}

    def fresh(self, name):
        path = self.root / name
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        self.dist.barrier()
        return str(path)

    def until(self, done):
        while not done():
            time.sleep(0.005)

    def mcore_sync(self):
        from megatron.core import dist_checkpointing as dc

        path, began = self.fresh("mcore"), time.monotonic()
        dc.save(self.sharded(), path)
        took = time.monotonic() - began
        self.record("mcore_sync", blocked_s=took, total_s=took)

    def mcore_fork(self):
        """Asynchronous with forked writers; the copy to the host is made, as on CUDA, where stock makes none on CPU."""
        from megatron.core import dist_checkpointing as dc
        from megatron.core.dist_checkpointing.strategies import filesystem_async as fa
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        def preload(buckets, non_blocking=True):
            return [(f, k, (b, [(i, t.detach().clone()) for i, t in ts])) for f, k, (b, ts) in buckets]

        plain = fa.FileSystemWriterAsync.preload_tensors
        fa.FileSystemWriterAsync.preload_tensors = staticmethod(preload)
        queue = AsyncCallsQueue(persistent=False)
        try:
            path, began = self.fresh("mcore"), time.monotonic()
            queue.schedule_async_request(dc.save(self.sharded(), path, async_sharded_save=True))
            blocked = time.monotonic() - began

            def done():
                queue.maybe_finalize_async_calls(blocking=False)
                return queue.get_num_unfinalized_calls() == 0

            self.until(done)
        finally:
            fa.FileSystemWriterAsync.preload_tensors = staticmethod(plain)
        self.record("mcore_fork", blocked_s=blocked, total_s=time.monotonic() - began)

    def dcp_sync(self):
        import torch.distributed.checkpoint as dcp

        path, began = self.fresh("dcp"), time.monotonic()
        dcp.save({f"{self.rank}.{k}": t for k, t in self.tensors.items()}, checkpoint_id=path)
        took = time.monotonic() - began
        self.record("dcp_sync", blocked_s=took, total_s=took)

    def dcp_process(self):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        path, began = self.fresh("dcp"), time.monotonic()
        state = {f"{self.rank}.{k}": t for k, t in self.tensors.items()}
        future = dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        blocked = time.monotonic() - began
        future = getattr(future, "upload_completion", future)
        self.until(future.done)
        future.result()
        self.record("dcp_process", blocked_s=blocked, total_s=time.monotonic() - began)

    def run(self, options):
        ways = options.ways.split(",")
        with contextlib.ExitStack() as stack:
            if any(way.startswith("mcore") for way in ways):
                from weightsync.bench.megatron import cpu_runtime

                runtime = cpu_runtime
            else:
                runtime = contextlib.nullcontext
            if "ours" in ways:
                self.start_ours()
                stack.callback(self.checkpointer.close)
            for number in range(options.rounds + 1):
                for way in (*LIMITS, *ways):
                    self.sync()
                    with runtime() if way.startswith("mcore") else contextlib.nullcontext():
                        getattr(self, way)()
                if number == 0:
                    self.found.clear()
            if options.slow and "ours" in ways:
                if self.rank == 0:
                    (self.root / "slow").write_text(str(options.slow))
                for _ in range(options.slow_rounds):
                    self.sync()
                    self.ours("ours_slow_writer")
                self.sync()
        return self.found


def _cpu_s(stat):
    """User and system seconds of a process, from /proc/<pid>/stat."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(found, nbytes):
    """Medians by way, and their ratios to the limits of the same rounds."""
    median = {way: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for way, rows in found.items()}
    copy, write = median["memcpy"]["blocked_s"], median["write_fsync"]["total_s"]
    for values in median.values():
        values["blocked_over_memcpy"] = values["blocked_s"] / copy
        values["total_over_write_fsync"] = values["total_s"] / write
        if "sync_s" in values:
            # Both are the slowest rank's, and counted from the call of `save`.
            values["last_byte_to_loadable_s"] = values["total_s"] - values["write_s"]
    return {"bytes_per_rank": nbytes, "median": median, "rounds": found}


def missed(median):
    """Bounds that ours does not keep, in words."""
    if "ours" not in median:
        return []
    ours, slow = median["ours"], median.get("ours_slow_writer")
    bounds = [
        ("blocked over memcpy", ours["blocked_over_memcpy"], 1.15),
        ("loadable over write and fsync", ours["total_over_write_fsync"], 1.2),
        ("seconds from the last byte to loadable", ours["last_byte_to_loadable_s"], 1.0),
    ]
    if slow:
        bounds.append(("blocked beside a delayed writer over without", slow["blocked_s"] / ours["blocked_s"], 1.1))
    return [f"{what} {value:.2f}, bound {bound}" for what, value, bound in bounds if value > bound]


def machine():
    """Where and with what it was measured."""
    import torch

    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {"cpu": cpu, "cores": os.cpu_count(), "kernel": platform.release()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=1200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--slow-rounds", type=int, default=3)
    parser.add_argument("--ways", default="ours,dcp_sync,dcp_process")
    parser.add_argument("--root", help="folder on the disk to measure; default: a temporary one")
    parser.add_argument("--json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.ways.split(",")) - set(WAYS):
        parser.error(f"unknown ways {sorted(unknown)}; there are {', '.join(WAYS)}")
    if options.rank is not None:
        member = Rank(options)
        found = member.run(options)
        if options.rank == 0:
            Path(options.root, "result.json").write_text(json.dumps(summary(found, member.nbytes)))
        member.dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # the savers of others leave processes and threads that are never joined
    from checkpoint.store import HostedStore

    hosted = HostedStore()
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        command = [sys.executable, __file__, "--mb", str(options.mb), "--rounds", str(options.rounds)]
        command += [
            "--slow",
            str(options.slow),
            "--slow-rounds",
            str(options.slow_rounds),
            "--ways",
            options.ways,
            "--root",
            root,
            "--store",
            hosted.address,
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [subprocess.Popen([*command, "--rank", str(r)], env=env, start_new_session=True) for r in range(2)]
        try:
            codes = [process.wait(1800) for process in ranks]
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
        if any(codes):
            return 1
        result = json.loads(Path(root, "result.json").read_text())
    print(f"{result['bytes_per_rank'] / 1e9:.2f} GB per rank, medians of {options.rounds} rounds")
    for way, row in result["median"].items():
        extra = "".join(
            f"  {key} {row[key]:.3f}"
            for key in ("cpu_s", "write_s", "last_byte_to_loadable_s", "longest_poll_s")
            if key in row
        )
        print(
            f"{way:18s} blocked {row['blocked_s']:7.3f} s ({row['blocked_over_memcpy']:6.2f} x memcpy)   "
            f"loadable {row['total_s']:7.3f} s ({row['total_over_write_fsync']:5.2f} x write+fsync){extra}"
        )
    result["missed"] = missed(result["median"])
    if options.json:
        Path(options.json).write_text(json.dumps({**machine(), **result}, indent=1) + "\n")
    for line in result["missed"]:
        print(f"checkpoint: {line}", file=sys.stderr)
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
