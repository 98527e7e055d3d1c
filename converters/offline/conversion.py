"""`convert`: one checkpoint into the other side's format, without a model, a process group or a GPU.

In this order: open the source and find the rules, map every tensor (`mapping`), lay out the files (`targets`), all of
it from headers; then, unless only a plan was asked for, check the disk, write (`move`) in a work folder (`journal`),
verify (`check`) and give the folder its name. `ckpt convert` is this function with the same words.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from checkpoint.disk import disk_left_bytes
from checkpoint.storage import is_url
from converters.errors import ConfigMismatch, FolderError, UnsupportedFamilyError
from converters.families import FAMILIES, family_of
from converters.hf_folder import read_folder
from converters.offline import check, places
from converters.offline.arguments import common_state, model_arguments
from converters.offline.journal import WorkFolder, check_target
from converters.offline.keys import Layers, Spec, fits_stacked
from converters.offline.mapping import KEEP_DTYPE, DtypePolicy, Mapped, to_hf, to_mcore
from converters.offline.move import MIN_MEMORY_BYTES, Budget, Values, write_files
from converters.offline.remote import place
from converters.offline.sources import HfSource, TorchDistSource
from converters.offline.targets import Files, hf_files, mcore_files
from converters.rules.ruleset import RuleSet
from converters.rules.table import build

__all__ = ["ConvertReport", "convert"]

Side = Literal["hf", "mcore"]
FORMAT = 1  # rises when the same plan would be written in other bytes


@dataclasses.dataclass(kw_only=True, slots=True)
class ConvertReport:
    """What a conversion did, or with `plan` would do. Sizes in bytes."""

    source: str
    target: str
    to: str
    family: str
    layout: str | None
    spec: str | None
    num_tensors: int
    num_stored: int
    """Tensors of the source that were used, before rules joined or split them."""
    source_bytes: int
    target_bytes: int
    files: list[str]
    dtypes: dict[str, int]
    """Bytes by dtype, as written."""
    casts: dict[str, int]
    decoded: int
    """Quantised weights that were decoded: they come back in the dtype named in `dtypes`."""
    mtp_layers: int
    unmapped: list[str] = dataclasses.field(default_factory=list)
    dropped: list[str] = dataclasses.field(default_factory=list)
    carried: list[str] = dataclasses.field(default_factory=list)
    ignored: list[str] = dataclasses.field(default_factory=list)
    optimizer_keys: int = 0
    """Keys of optimizer and random state, which is left out."""
    padding_elements: int = 0
    resumed: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    verified: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, **dataclasses.asdict(self)}


@dataclasses.dataclass(kw_only=True, slots=True)
class _Job:
    """Everything that is decided before the first byte moves."""

    source: places.AnySource
    side: Side
    rules: RuleSet
    mapped: Mapped
    files: Files
    report: ConvertReport
    folder: str
    """Where in the target the checkpoint lies: "." or the iteration's folder."""
    after: list[tuple[str, bytes]]
    """Small files of the target, written before `files.last`."""


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: Side | None = None,
    family: str | None = None,
    hf: str | os.PathLike[str] | None = None,
    iteration: str | None = None,
    layout: Layers | Literal["auto"] = "auto",
    spec: Spec = "te",
    extra_state: Literal["linear", "te", "none"] | None = None,
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = KEEP_DTYPE,
    drop: Collection[str] = (),
    carry: Collection[str] = (),
    shard_bytes: int | None = None,
    max_memory_bytes: int = 512 << 20,
    workers: int = 2,
    resume: bool = False,
    verify: Literal["all", "bits"] | None = None,
    plan: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Convert the checkpoint `src` into the new folder `dst`: Hugging Face -> Megatron `torch_dist`, or back.

    Args:
        src: a Hugging Face folder, or a Megatron checkpoint (an iteration's folder, or a root with several); also a URL
            that fsspec opens, of which only the ranges that are needed are read.
        dst: must not exist. For Megatron a root with a tracker and one iteration (`release` unless `iteration`).
        to: "hf" or "mcore"; follows from `src`, and is an error if it does not fit.
        family: name of the rules, where the config's architecture is not to decide.
        hf: towards Hugging Face: folder (or config.json) with config, tokenizer and index of the model; default: what
            the conversion to Megatron left in the checkpoint.
        iteration: of `src` or `dst`, whichever is Megatron's: "release" or a number.
        layout: of the Megatron keys; "auto" is stacked if all layers are alike. Read layouts are detected.
        spec: layer spec whose names are written, "te" or "local"; `extra_state` the empty entries beside the weights
            ("te", "linear", "none"; default: as `spec` needs).
        dtype: of floating tensors that do not match `keep_dtype`; default: as stored, and towards Hugging Face as the
            original was.
        drop, carry: patterns (`fnmatch`) of source tensors to leave out, or to copy though no rule knows them.
        shard_bytes: size of an output file (default 0.5 to 5 GB for Hugging Face, 1 GiB for Megatron).
        max_memory_bytes: for buffers, all workers together; the plan of a large model takes some more.
        resume: go on after an interrupted run, and keep what is written if this one fails.
        verify: "bits": read the result back through the inverse rules and compare it with the source, bit by bit.
            "all": also check the rules on a tiny random model of the family by its logits (`verify_semantics`), where
            Megatron-Core and Transformers are installed: before anything is written, since it takes half a minute.
        plan: only say what would be done.
        progress: called with bytes written and to be written, from any worker.

    Raises:
        FolderError: the source is damaged, the target exists or cannot be written, or `verify` found a difference.
        MappingError: source and rules do not fit; nothing was written.
        ConfigMismatch, UnsupportedFamilyError: the config.
    """
    started = time.monotonic()
    if max_memory_bytes < MIN_MEMORY_BYTES or workers < 1:
        raise ConfigMismatch(f"max memory {max_memory_bytes} bytes, {workers} workers: expected >= 64 MiB and >= 1")
    if is_url(os.fspath(dst)):
        raise FolderError(
            f"{dst}: a result gets its name by one rename, which object stores do not have: name a local folder, then "
            "copy it"
        )
    target = Path(dst)
    source = places.open_source(place(src), iteration=iteration if _is_megatron(place(src)) else None)
    try:
        side: Side = "mcore" if isinstance(source, HfSource) else "hf"
        if to is not None and to != side:
            raise FolderError(
                f"{src} is {'a Hugging Face folder' if side == 'mcore' else 'a Megatron checkpoint'} already"
            )
        if found := places.problems(source):
            more = f" (and {len(found) - 3} more: see `ckpt inspect`)" if len(found) > 3 else ""
            raise FolderError(f"{src}: {'; '.join(found[:3])}{more}")
        policy = {"dtype": dtype, "keep": tuple(keep_dtype)}
        if isinstance(source, HfSource):
            job = _to_mcore(
                source, family, policy, drop, carry, layout, spec, extra_state, shard_bytes or 1 << 30, iteration
            )
        else:
            job = _to_hf(source, family, policy, drop, carry, None if hf is None else place(hf), shard_bytes)
        job.report.source, job.report.target = str(src), os.fspath(dst)
        if plan:
            return job.report
        budget = Budget(max_memory_bytes=max_memory_bytes, workers=workers)
        _carry_out(job, target, budget, resume=resume, verify=verify, progress=progress)
    finally:
        source.close()
    job.report.seconds = time.monotonic() - started
    return job.report


def _is_megatron(path: Path) -> bool:
    return not (path / "config.json").exists()


def _rules(config: Mapping[str, Any], names: Collection[str] | None, family: str | None) -> RuleSet:
    if family is None:
        return build(family_of(config), config, names=names)
    table = next((f for f in FAMILIES if f.name == family), None)
    if table is None:
        raise UnsupportedFamilyError(f"no family {family!r}; known: {', '.join(sorted(f.name for f in FAMILIES))}")
    return build(table, config, names=names)


def _to_mcore(
    source: HfSource,
    family: str | None,
    policy: dict[str, Any],
    drop: Collection[str],
    carry: Collection[str],
    layout: Layers | Literal["auto"],
    spec: Spec,
    extra_state: str | None,
    shard_bytes: int,
    iteration: str | None,
) -> _Job:
    config = source.folder.config
    assert config is not None  # its absence is one of the problems
    rules = _rules(config, list(source.headers), family)
    what = str(source.folder.path)
    mapped = to_mcore(source.headers, rules, policy=DtypePolicy(**policy), drop=drop, carry=carry, what=what)
    weights = {n: tuple(o.layout.shape) for n, o in mapped.tensors.items() if n not in mapped.carried}
    layers: Layers = layout if layout != "auto" else "stacked" if fits_stacked(weights) else "per-layer"
    if layers == "stacked" and not fits_stacked(weights):
        raise ConfigMismatch("the decoder's layers differ: --layout stacked cannot hold them, per-layer can")
    if iteration is not None and iteration != "release" and not iteration.isdigit():
        raise ConfigMismatch(f"iteration {iteration!r}, expected `release` or a number")
    arguments = model_arguments(
        rules.config,
        qkv_bias=any(n.endswith("linear_qkv.bias") for n in weights),
        qk_norm=any(n.endswith("q_layernorm.weight") for n in weights),
        tied="output_layer.weight" not in weights,
    )
    step = int(iteration) if iteration and iteration.isdigit() else None
    files = mcore_files(
        mapped,
        layers=layers,
        spec=spec,
        extra_state=extra_state or ("te" if spec == "te" else "linear"),
        shard_bytes=shard_bytes,
        common=common_state(arguments, layers=layers, iteration=step),
    )
    folder = "release" if step is None else f"iter_{step:07d}"
    beside = [("config.json", _json(config)), *places.carried_files(source.folder.path)]
    beside.append((places.WEIGHTS, places.weights_record({n: h.dtype for n, h in source.headers.items()})))
    after = [(f"{folder}/{places.REFERENCE}/{name}", data) for name, data in beside]
    tracker = (folder if step is None else str(step)).encode()
    files = Files(
        tuple(dataclasses.replace(f, name=f"{folder}/{f.name}") for f in files.big),
        (*((f"{folder}/{name}", data) for name, data in files.last), (places.TRACKER, lambda: tracker)),
    )
    report = _report(source, mapped, files, rules, "mcore", layers, spec)
    return _Job(
        source=source, side="mcore", rules=rules, mapped=mapped, files=files, report=report, folder=folder, after=after
    )


def _to_hf(
    source: places.AnySource,
    family: str | None,
    policy: dict[str, Any],
    drop: Collection[str],
    carry: Collection[str],
    hf: Path | None,
    shard_bytes: int | None,
) -> _Job:
    assert not isinstance(source, HfSource)
    origin = places.reference(source, hf)
    rules = _rules(origin.config, list(origin.dtypes) or None, family)
    reference = DtypePolicy(**policy, reference=origin.dtypes)
    mapped = to_hf(source.headers, rules, policy=reference, drop=drop, carry=carry, what=str(source.path))
    files = hf_files(mapped, shard_bytes=shard_bytes)
    config = _config(origin.config, mapped)
    report = _report(source, mapped, files, rules, "hf", None, None)
    after = [*places.carried_files(origin.path), ("config.json", _json(config))]
    return _Job(
        source=source, side="hf", rules=rules, mapped=mapped, files=files, report=report, folder=".", after=after
    )


def _config(config: Mapping[str, Any], mapped: Mapped) -> Mapping[str, Any]:
    """The config, changed where it would be wrong: dtype, quantisation, MTP layers that were dropped."""
    out = dict(config)
    sizes: dict[torch.dtype, int] = {}
    for tensor in mapped.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.layout.numel() * tensor.dtype.itemsize
    dtype = str(max(sizes, key=lambda d: sizes[d])).removeprefix("torch.")
    for part in (out, *(v for v in out.values() if isinstance(v, dict))):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str) and part[key] != dtype:
                part[key] = dtype
    out.pop("quantization_config", None)  # what is written is the decoded weight
    if out.get("num_nextn_predict_layers") and not any(t.role == "draft" for t in mapped.tensors.values()):
        out["num_nextn_predict_layers"] = 0
    return out if out != dict(config) else config


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _report(
    source: places.AnySource,
    mapped: Mapped,
    files: Files,
    rules: RuleSet,
    to: Side,
    layers: str | None,
    spec: str | None,
) -> ConvertReport:
    dtypes: dict[str, int] = {}
    for tensor in mapped.tensors.values():
        key = str(tensor.dtype).removeprefix("torch.")
        dtypes[key] = dtypes.get(key, 0) + tensor.layout.numel() * tensor.dtype.itemsize
    left_out = {*mapped.dropped, *mapped.optimizer, *mapped.ignored}
    mtp = {name.split(".")[2] for m in rules.mappings() for name in m.mcore if name.startswith("mtp.layers.")}
    gone = not any(o.role == "draft" for o in mapped.tensors.values())
    return ConvertReport(
        source="",
        target="",
        to=to,
        family=rules.family,
        layout=layers,
        spec=spec,
        num_tensors=len(mapped.tensors),
        num_stored=sum(name not in left_out for name in source.headers),
        source_bytes=sum(h.nbytes for name, h in source.headers.items() if name not in left_out),
        target_bytes=files.nbytes,
        files=[f.name for f in files.big],
        dtypes=dtypes,
        casts=mapped.casts(),
        decoded=len(mapped.decoded),
        mtp_layers=0 if gone else len(mtp),
        dropped=mapped.dropped,
        carried=mapped.carried,
        ignored=mapped.ignored,
        optimizer_keys=len(mapped.optimizer),
        padding_elements=sum(mapped.padding.values()),
    )


def _carry_out(
    job: _Job,
    target: Path,
    budget: Budget,
    *,
    resume: bool,
    verify: Literal["all", "bits"] | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    check_target(target)
    values = Values(job.source, job.mapped.decoded)
    if job.mapped.equal:
        check.require_equal(job.mapped.equal, values, job.mapped.decoded, budget)
    semantic = _semantics(job) if verify == "all" else None
    with WorkFolder(target, _digest(job), resume=resume) as work:
        job.report.resumed = list(work.done)
        todo = [f for f in job.files.big if f.name not in work.done]
        _check_disk(work.path, sum(f.nbytes for f in todo) + sum(len(data) for _, data in job.after))
        for name in {os.path.dirname(name) for name, _ in job.after} | {os.path.dirname(f.name) for f in todo}:
            (work.path / name).mkdir(parents=True, exist_ok=True)
        total = sum(f.nbytes for f in job.files.big)
        count = total - sum(f.nbytes for f in todo)
        lock = threading.Lock()

        def advance(nbytes: int) -> None:
            nonlocal count
            with lock:
                count += nbytes
                if progress:
                    progress(count, total)

        write_files(todo, work.path, values, job.mapped.decoded, budget, progress=advance, done=work.mark)
        work.put([*((name, lambda data=data: data) for name, data in job.after), *job.files.last])
        if verify:
            job.report.verified = {**_verify(job, work.path / job.folder, budget), "semantic": semantic}
        work.publish()


def _semantics(job: _Job) -> str:
    """Whether the rules keep logits, in words; where that cannot be tried, why.

    Raises:
        MappingError: they do not.
    """
    from converters.semantic.verify import verify_semantics

    try:
        report = verify_semantics(job.rules.config.values)
    except UnsupportedFamilyError as e:
        return f"logits were not compared: {e}"
    return "logits of a tiny random model agree: " + ", ".join(
        f"{head.name} with {head.against} to {head.largest_difference:.1g}" for head in report.heads
    )


def _verify(job: _Job, written: Path, budget: Budget) -> dict[str, Any]:
    again = TorchDistSource(written) if job.side == "mcore" else HfSource(read_folder(written))
    try:
        return check.verify(job.source, job.mapped, again, job.rules, budget)
    finally:
        again.close()


def _check_disk(folder: Path, needed: int) -> None:
    if (left := disk_left_bytes(folder)) < needed:
        raise FolderError(
            f"{folder.parent} has {left / 1e9:.3f} GB left, {needed / 1e9:.3f} GB are needed: free space first"
        )


def _digest(job: _Job) -> str:
    """Changes with everything that decides the bytes written."""
    plan = {
        "format": FORMAT,
        "torch": torch.__version__,
        "source": job.source.identity,
        "report": {
            k: v for k, v in job.report.to_json().items() if k not in ("seconds", "resumed", "verified", "target")
        },
        "files": [[f.name, f.nbytes] for f in job.files.big],
        "tensors": [[n, str(o.dtype), list(o.layout.shape)] for n, o in job.mapped.tensors.items()],
        "small": [[name, hashlib.sha256(data).hexdigest()] for name, data in job.after],
    }
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
