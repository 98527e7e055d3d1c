"""Whether the rules of a family mean what they say: logits of a tiny random model, before and after.

`verify_semantics` is what `ckpt convert --verify` calls: a process of its own makes a Hugging Face folder of the same
structure as the given config, loads it into a real Megatron-Core model by the rules, and compares logits with
Transformers and, for MTP layers too, with a plain fp64 reference. What the rules give back is compared with the folder
bit by bit. A swap that is made in both directions alike passes every round trip; here it does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from converters.errors import ConverterError, MappingError, UnsupportedFamilyError
from converters.families import rules_for
from converters.live import LiveExporter, load_hf_folder
from converters.rules import RuleSet
from converters.semantic.model import build_model, forward_logits
from converters.semantic.reference import has_reference, reference_logits
from converters.semantic.tiny import tiny_config, write_tiny_folder

__all__ = ["BOUND", "Head", "SemanticReport", "check_semantics", "compare_heads", "main", "tokens", "verify_semantics"]

BOUND = 1e-5
"""Largest difference of two logits, in fp32; those of the tiny models are of the order of 1."""

PACKAGES = {"megatron.core": "megatron-core", "transformers": "transformers", "safetensors": "safetensors"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """One output of the model (`main`, `mtp 1`, ...), compared `against` "transformers" or "fp64 reference"."""

    name: str
    against: str
    largest_difference: float

    @property
    def ok(self) -> bool:
        return self.largest_difference < BOUND  # False for NaN


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SemanticReport:
    """`changed` names tensors that the rules did not give back as they were: bits, dtype or shape."""

    family: str
    heads: tuple[Head, ...]
    changed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.heads) and all(head.ok for head in self.heads) and not self.changed

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ok": self.ok, "bound": BOUND}

    def check(self) -> None:
        """Raises MappingError if something differs."""
        wrong = [f"{h.name} head is {h.largest_difference:.2g} off {h.against}" for h in self.heads if not h.ok]
        if self.changed:
            wrong.append(f"{len(self.changed)} tensors do not come back as they were ({', '.join(self.changed[:3])})")
        if wrong or not self.heads:
            raise MappingError(
                f"the {self.family} rules do not keep what a model computes (tiny random model, fp32, bound {BOUND:g})"
                f": {'; '.join(wrong) or 'nothing was compared'}"
            )


def verify_semantics(hf_config: Mapping[str, Any], *, deadline_s: float = 180.0) -> SemanticReport:
    """Check the rules of the family of `hf_config` (a parsed config.json) in a process of its own.

    Raises:
        UnsupportedFamilyError: no rules for the family or no way to run it (docs/reference/families.md), or a package
            is absent; the message names it.
        MappingError: logits or tensors differ.
        ConverterError: the process failed otherwise, or took longer than `deadline_s`.
    """
    _require_packages()
    tiny_config(hf_config)  # says what is not supported without a process
    try:
        done = subprocess.run(
            [sys.executable, "-c", "from converters.semantic.verify import main; main()"],
            input=json.dumps(dict(hf_config)),
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise ConverterError(f"semantic verification took longer than {deadline_s:g} s") from e
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConverterError(f"semantic verification failed with exit code {done.returncode}: {last}")
    value = json.loads(done.stdout.splitlines()[-1])
    if "error" in value:
        kind = UnsupportedFamilyError if value["kind"] == "UnsupportedFamilyError" else MappingError
        raise kind(value["error"])
    report = SemanticReport(
        family=value["family"], heads=tuple(Head(**h) for h in value["heads"]), changed=tuple(value["changed"])
    )
    report.check()
    return report


def check_semantics(
    hf_config: Mapping[str, Any],
    *,
    load: Callable[[Sequence[Any], Path], object] = load_hf_folder,
    rules: Callable[[Mapping[str, Any], Any], RuleSet] = rules_for,
    changes: Mapping[str, Any] | None = None,
) -> SemanticReport:
    """The check itself, in this process, which must not have a default process group.

    `load` fills model chunks from the folder; `rules` are those of the way back; `changes` go into the tiny config.
    """
    config = tiny_config(hf_config, **(changes or {}))
    with tempfile.TemporaryDirectory(prefix="ckpt-verify-") as scratch, _alone():
        folder = write_tiny_folder(config, Path(scratch))
        config = json.loads((folder / "config.json").read_text())
        # A padded vocabulary: a converter that leaves the padding in shows.
        chunks = build_model(config, vocab_multiple=8)
        load(chunks, folder)
        logits = forward_logits(chunks, tokens(config))
        assert logits is not None
        heads = compare_heads(folder, config, logits)
        stored = _tensors(folder)
        exporter = LiveExporter(chunks, rules(config, stored))
        changed = dict.fromkeys(stored, True)
        for tensor, value in exporter.export():
            changed[tensor.name] = tensor.name not in stored or not _same(value, stored[tensor.name])
    return SemanticReport(
        family=rules(config, stored).family,
        heads=heads,
        changed=tuple(name for name, differs in changed.items() if differs),
    )


def compare_heads(folder: Path, config: Mapping[str, Any], logits: Sequence[torch.Tensor]) -> tuple[Head, ...]:
    """Megatron's `logits` (main head first) of a tiny folder, against every witness that knows the model."""
    asked = tokens(config)
    wanted: list[tuple[str, list[torch.Tensor]]] = []
    if config["model_type"] != "mimo":
        wanted.append(("transformers", [_transformers_logits(folder, asked)]))
    if has_reference(config):
        wanted.append(("fp64 reference", reference_logits(_tensors(folder), config, asked)))
    heads = []
    for against, expected in wanted:
        if against != "transformers" and len(expected) != len(logits):
            raise MappingError(
                f"the model has {len(logits) - 1} MTP heads, {against} computes {len(expected) - 1}: "
                "does the config say how many there are?"
            )
        for k, want in enumerate(expected):
            # Depth k knows no tokens for the last k positions.
            valid = want.shape[1] - k
            got = logits[k][:, :valid, : want.shape[-1]].double()
            difference = (got - want[:, :valid].double()).abs().max().item()
            heads.append(Head(name=f"mtp {k}" if k else "main", against=against, largest_difference=difference))
    return tuple(heads)


def tokens(config: Mapping[str, Any]) -> torch.Tensor:
    """Token ids [2, 12] that all are asked about."""
    return torch.randint(0, config["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(5))


def _require_packages() -> None:
    def absent(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is None
        except ModuleNotFoundError:  # of the package that it is in
            return True

    if missing := [package for module, package in PACKAGES.items() if absent(module)]:
        raise UnsupportedFamilyError(
            f"semantic verification needs {', '.join(missing)}: pip install {' '.join(missing)}, or verify bits only"
        )


def _transformers_logits(folder: Path, asked: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(asked).logits
    return logits


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A default process group of one, for the length of the block."""
    if dist.is_initialized():
        raise ConverterError("this process has a default process group: call verify_semantics, which starts its own")
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def main() -> None:
    """The process of `verify_semantics`: a config on stdin, a report or an error on stdout."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        value = check_semantics(json.load(sys.stdin)).to_json()
    except ConverterError as e:
        value = {"error": str(e), "kind": type(e).__name__}
    print(json.dumps(value))
