"""What a bench reports: one JSON object (`build`) and the table made from it (`table`).

The keys are documented in docs/reference/cli.md; `SCHEMA_VERSION` rises when one changes its meaning or goes away.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.bench.compare import Way
from weightsync.bench.config import BenchConfig
from weightsync.bench.limit import Limit
from weightsync.bench.machine import describe_machine, describe_versions
from weightsync.bench.stats import quantiles
from weightsync.report import PublishReport
from weightsync.timeline import PHASES

__all__ = ["SCHEMA_VERSION", "Measured", "build", "table"]

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What `harness` hands over."""

    seconds: Sequence[float]
    """Of each publish, from the call to the last engine serving, on the slowest trainer rank."""
    reports: Sequence[PublishReport]
    first_publish_s: float
    """The first publish of the run, whose buffers, groups and plan were not there yet."""
    peak_extra_bytes: Mapping[str, int | None]
    """Process -> peak memory of the run minus that after load, shared pages counted on the sender alone.

    None where the kernel lets no one measure it.
    """
    acceptance_before: float | None
    acceptance_after: float | None
    engine_versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of real engines, by kind."""
    cluster: Mapping[str, Any] | None = None
    """Where everything ran (`Launcher.describe`); None: on this machine."""
    limit: Limit | None = None
    ways: Sequence[Way] = ()


def build(config: BenchConfig, measured: Measured) -> dict[str, Any]:
    """The result as JSON values; sizes in bytes, times in seconds."""
    publish = quantiles(measured.seconds)
    limit = measured.limit.quantiles if measured.limit else None
    last = measured.reports[-1]
    received = [n for engine in last.engines for n in engine.bytes_received]
    return {
        "schema_version": SCHEMA_VERSION,
        "title": config.title,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        # Results are published: no paths and addresses.
        "config": {k: v for k, v in config.to_json().items() if k not in ("engine_python", "address")}
        | {"model": config.model_name},
        "summary": {
            "publish_s": publish.to_json(),
            "limit_s": limit.to_json() if limit else None,
            "ratio_to_limit": publish.median / limit.median if limit else None,
            "limit_parts": list(measured.limit.parts) if measured.limit else [],
            "first_publish_s": measured.first_publish_s,
            "unique_bytes": last.payload_bytes,
            "wire_bytes_per_engine_rank": max(received),
            "padding_bytes": last.wire_bytes - last.payload_bytes,
            "num_tensors": last.num_tensors,
            "num_buckets": last.num_buckets,
            "peak_extra_bytes": dict(measured.peak_extra_bytes),
            "acceptance_before": measured.acceptance_before,
            "acceptance_after": measured.acceptance_after,
        },
        "phases": _phases(measured.reports),
        "compare": [
            {
                "name": way.name,
                "median_s": way.quantiles.median,
                "p99_s": way.quantiles.p99,
                "wire_bytes_per_engine_rank": way.wire_bytes,
                "ratio_to_ours": way.quantiles.median / publish.median,
            }
            for way in measured.ways
        ],
        "versions": describe_versions() | dict(measured.engine_versions),
        "machine": describe_machine(),
        "cluster": measured.cluster,
    }


def _phases(reports: Sequence[PublishReport]) -> dict[str, Any]:
    """Phase -> seconds of its slowest process, bytes, GB/s; phases that this kind of publish lacks are left out."""
    out: dict[str, Any] = {}
    for phase in PHASES:
        seconds = [r.phases[phase] for r in reports if phase in r.phases]
        if not seconds:
            continue
        spent = quantiles(seconds)
        nbytes = reports[-1].phase_bytes.get(phase, 0)
        rate = nbytes / spent.median / 1e9 if nbytes and spent.median else None
        out[phase] = {"seconds": spent.to_json(), "nbytes": nbytes, "gb_per_s": rate}
    return out


def table(result: Mapping[str, Any]) -> str:
    """The result for a reader at a terminal."""
    summary = result["summary"]
    publish, limit = summary["publish_s"], summary["limit_s"]
    lines = [result["title"], ""]
    lines.append(f"{'phase (they overlap)':24}{'median s':>10}{'p99 s':>10}{'GB':>9}{'GB/s':>8}")
    for name, row in result["phases"].items():
        lines.append(_row(name.replace("_", " "), row["seconds"], row["nbytes"]))
    lines.append(_row("whole publish", publish, summary["unique_bytes"]))
    if limit:
        parts = " + ".join(summary["limit_parts"])
        lines.append(_row("limit", limit, summary["unique_bytes"]) + f"  {parts}")
        lines.append(f"{'ratio to limit':24}{summary['ratio_to_limit']:10.2f}")
    lines.append(f"{'first publish':24}{summary['first_publish_s']:10.4f}  plan, groups and buffers are made")
    if result["compare"]:
        lines += ["", f"{'other ways':24}{'median s':>10}{'p99 s':>10}{'GB':>9}{'x ours':>8}"]
        for way in result["compare"]:
            gb = way["wire_bytes_per_engine_rank"] / 1e9
            lines.append(
                f"{way['name']:24}{way['median_s']:10.4f}{way['p99_s']:10.4f}{gb:9.4f}{way['ratio_to_ours']:8.2f}"
            )
    lines += [
        "",
        f"received by each engine rank: {summary['wire_bytes_per_engine_rank']:,} bytes, of these padding "
        f"{summary['padding_bytes']:,}; unique: {summary['unique_bytes']:,} "
        f"({summary['num_tensors']} tensors, {summary['num_buckets']} buckets)",
    ]
    if summary["acceptance_after"] is not None:
        lines.append(
            f"draft acceptance: {_share(summary['acceptance_before'])} with the target alone published, "
            f"{_share(summary['acceptance_after'])} with the draft"
        )
    peaks = ", ".join(f"{n} {_mib(b)}" for n, b in summary["peak_extra_bytes"].items())
    lines.append(f"peak memory above that after load, MiB: {peaks}")
    versions, machine = result["versions"], result["machine"]
    lines.append(", ".join(f"{n} {v}" for n, v in versions.items()))
    lines.append(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['kernel']}"
        + "".join(f", {d}" for d in machine["cuda_devices"])
    )
    if (cluster := result["cluster"]) is not None:
        on = ", ".join(f"{name} on {number}" for name, number in cluster["on_node"].items())
        lines.append(f"Ray {cluster['ray']}, {len(cluster['nodes'])} nodes: {on}")
    return "\n".join(lines)


def _row(name: str, seconds: Mapping[str, float], nbytes: int) -> str:
    row = f"{name:24}{seconds['median']:10.4f}{seconds['p99']:10.4f}"
    if nbytes:
        row += f"{nbytes / 1e9:9.4f}{nbytes / seconds['median'] / 1e9:8.2f}" if seconds["median"] else ""
    return row


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _mib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 2**20:.1f}"
