"""Full tensors on one rank from the DTensors of FSDP2 and the like: which mesh, which placements, gathers in buckets.

`StateDictSource` asks `describe` what each value is, and drives one `MeshGather` on every rank of the stage. Tensors
sharded evenly or unevenly along dimension 0 and replicated elsewhere travel together, several in one message; any other
placement takes DTensor's own `full_tensor()`, one collective for each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from converters.live.gather import BucketGather, GatherBucket, Piece, Scratch, assemble, plan_buckets
from weightsync.errors import ConfigError, ManifestError
from weightsync.timeline import Timeline

__all__ = ["Held", "MeshGather", "describe", "full_tensor"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One tensor of a state dict as this rank holds it.

    `shape` is the full one, `local` this rank's part. `mesh_dim` is the mesh dimension along which rows are sharded;
    None with `whole` False means that only `full_tensor()` knows how the parts fit.
    """

    name: str
    value: torch.Tensor
    local: torch.Tensor
    shape: tuple[int, ...]
    mesh: Any
    mesh_dim: int | None
    whole: bool

    @property
    def nbytes(self) -> int:
        """Of the full tensor."""
        return math.prod(self.shape) * self.value.dtype.itemsize


def describe(name: str, value: torch.Tensor) -> Held:
    """What `value` is; refuses what has no bytes to publish.

    Raises:
        ManifestError: no tensor, or one without storage (meta, offloaded), without strides, of a wrapper class whose
            bytes are not its values (quantised, float8); a partial DTensor.
    """
    if not isinstance(value, torch.Tensor):
        raise ManifestError(f"{name!r} is a {type(value).__name__}, not a tensor: leave it out")
    mesh: Any = None
    mesh_dim: int | None = None
    whole = True
    local = value
    if hasattr(value, "device_mesh") and hasattr(value, "placements"):
        from torch.distributed.tensor import Replicate, Shard

        mesh = value.device_mesh
        if mesh.get_coordinate() is None:
            raise ManifestError(f"{name!r} lies on a device mesh that this rank is not part of: {mesh}")
        if any(p.is_partial() for p in value.placements):
            raise ManifestError(f"{name!r} is a partial DTensor ({value.placements}): reduce it before it is published")
        cut = [(dim, p) for dim, p in enumerate(value.placements) if type(p) is not Replicate and mesh.size(dim) > 1]
        whole = not cut or not value.numel()
        if not whole and len(cut) == 1 and type(cut[0][1]) is Shard and cut[0][1].dim == 0:
            mesh_dim = cut[0][0]
        with torch.no_grad():
            local = value.to_local()  # type: ignore[attr-defined]
        if mesh_dim is not None:
            _check_rows(name, value, local, mesh, mesh_dim)
        if not value.numel():
            local = local.new_empty(value.shape)
    local = local.detach()
    if is_traceable_wrapper_subclass(local):
        raise ManifestError(
            f"{name!r} is a {type(local).__name__}: its bytes are not its values; publish a dequantised copy"
        )
    if local.layout is not torch.strided:
        raise ManifestError(f"{name!r} has layout {local.layout}: only dense tensors are published")
    if local.device.type == "meta" or (local.numel() and not local.untyped_storage().nbytes()):
        raise ManifestError(f"{name!r} has no memory behind it (meta device or offloaded): load it before publishing")
    return Held(
        name=name, value=value, local=local, shape=tuple(value.shape), mesh=mesh, mesh_dim=mesh_dim, whole=whole
    )


def _check_rows(name: str, value: torch.Tensor, local: torch.Tensor, mesh: Any, mesh_dim: int) -> None:
    parts, rank = mesh.size(mesh_dim), mesh.get_coordinate()[mesh_dim]
    chunk = -(-value.shape[0] // parts)
    rows = min(chunk, max(0, value.shape[0] - rank * chunk))
    if tuple(local.shape) != (rows, *value.shape[1:]):
        raise ManifestError(
            f"{name!r}: rank {rank} of {parts} holds a shard of shape {tuple(local.shape)} of {tuple(value.shape)}, "
            f"expected {rows} rows"
        )


class MeshGather:
    """The ranks of one pipeline stage and what they do together. Every rank makes the same calls in the same order.

    `group` are the ranks of the stage, rank 0 of it the sender; by default the mesh of the DTensors, else the default
    group, else this process alone. `gather_bytes` bounds a bucket over all ranks; the sender holds two of them.
    """

    def __init__(self, group: dist.ProcessGroup | None, num_stages: int, gather_bytes: int) -> None:
        self._group = group
        self._num_stages = num_stages
        self._gather_bytes = gather_bytes
        self._gathers: dict[tuple[Any, int], BucketGather] = {}
        self._scratch: Scratch | None = None
        self._groups: list[dist.ProcessGroup] = []
        self._device = torch.device("cpu")
        self.is_sender = True

    def join(self, held: Sequence[Held]) -> None:
        """Learn from the tensors who belongs to the stage; no communication.

        Raises:
            ConfigError: it does not follow from them.
        """
        meshes = list(dict.fromkeys(h.mesh for h in held if h.mesh is not None))
        at_origin = all(not any(mesh.get_coordinate()) for mesh in meshes)
        if self._group is not None:
            self._groups = [self._group]
            self.is_sender = dist.get_rank(self._group) == 0
            if self.is_sender and not at_origin:
                raise ConfigError(
                    "rank 0 of `group` is not the first rank of the DTensors' mesh: the sender is the rank with all "
                    "mesh coordinates 0, so order the group's ranks like the mesh"
                )
        elif len(meshes) > 1:
            raise ConfigError(f"the DTensors lie on {len(meshes)} meshes: pass `group`, the ranks of this stage")
        elif meshes:
            self._groups = [meshes[0].get_group(dim) for dim in range(meshes[0].ndim)]
            self.is_sender = at_origin
        elif dist.is_initialized() and dist.get_world_size() > 1:
            if self._num_stages == 1:
                assert dist.group.WORLD is not None
                self._groups = [dist.group.WORLD]
                self.is_sender = dist.get_rank() == 0
            elif dist.get_world_size() != self._num_stages:
                raise ConfigError(
                    f"{dist.get_world_size()} ranks for {self._num_stages} stages and no DTensor tells which belong "
                    "together: pass `group`, the ranks of this stage"
                )
        if meshes:
            self._device = _current_device(meshes[0].device_type)
        elif self._groups:
            config = dist.distributed_c10d.get_backend_config(self._groups[0])
            self._device = _current_device("cpu" if "cpu" in config else config.split(":")[0])

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum of int64 values over the ranks of the stage."""
        if not self._groups or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        for group in self._groups:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        return [int(v) for v in tensor.tolist()]

    def agree(self, problem: Exception | None) -> None:
        """Raise on every rank if one has a problem: the others would wait in a gather for its shards."""
        any_problem = self.maximum([0 if problem is None else 1])[0]
        if problem is not None:
            raise problem
        if any_problem:
            raise ManifestError("another trainer rank of this stage cannot publish: its error says why")

    def gather(self, held: Sequence[Held], timeline: Timeline) -> Iterator[torch.Tensor]:
        """On the sender: full, contiguous tensors in the order of `held`, each valid until the next is asked for.

        Other ranks must exhaust the iterator, which yields them nothing. Closed early, it takes part in what is left
        all the same, so that nobody waits for this rank.
        """
        flight = _Flight(held, self._plan(held))
        closed = False
        for i, h in enumerate(held):
            tensor: torch.Tensor | None = h.local
            if not h.whole:
                with timeline.span("gather", h.nbytes if self.is_sender else 0):
                    if h.mesh_dim is None:
                        tensor = full_tensor(h)
                    else:
                        tensor = self._from_bucket(i, h, flight) if _takes_part(h) else None
            if self.is_sender and not closed:
                assert tensor is not None
                try:
                    yield tensor.contiguous()
                except GeneratorExit:
                    closed = True

    def _plan(self, held: Sequence[Held]) -> list[_Leg]:
        """Buckets of neighbours on one mesh dimension; pieces are named by their number in `held`."""
        runs: list[tuple[BucketGather, list[Piece]]] = []
        for i, h in enumerate(held):
            if h.mesh_dim is None or not _takes_part(h):
                continue
            key = (h.mesh, h.mesh_dim)
            if key not in self._gathers:
                self._gathers[key] = BucketGather(h.mesh.get_group(h.mesh_dim), _current_device(h.mesh.device_type))
            gather = self._gathers[key]
            if not runs or runs[-1][0] is not gather:
                runs.append((gather, []))
            runs[-1][1].append(_piece(i, h))
        return [
            _Leg(gather=gather, bucket=bucket, pieces={pieces[unit].name: pieces[unit] for unit in bucket.units})
            for gather, pieces in runs
            for bucket in plan_buckets([(piece,) for piece in pieces], self._gather_bytes)
        ]

    def _from_bucket(self, number: int, h: Held, flight: _Flight) -> torch.Tensor | None:
        rows, leg = flight.leg_of(number)
        if not self.is_sender:
            return None
        if self._scratch is None:
            self._scratch = Scratch(rows.device)
        self._scratch.reset()
        name = str(number)
        return assemble(leg.pieces[name], rows, leg.bucket.offsets[name], self._scratch)[: h.shape[0]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Leg:
    """One message of every rank to the sender."""

    gather: BucketGather
    bucket: GatherBucket
    pieces: dict[str, Piece]


class _Flight:
    """The legs of one pass: the current one, and the next one under way."""

    def __init__(self, held: Sequence[Held], legs: Sequence[_Leg]) -> None:
        self._held = held
        self._left = iter(legs)
        self._rows = torch.empty(0)
        self._current: _Leg | None = None
        self._next = self._start()

    def leg_of(self, number: int) -> tuple[torch.Tensor, _Leg]:
        """Bytes [ranks, nbytes] and layout of the leg that tensor `number` is in: the current one or the next."""
        if self._current is None or str(number) not in self._current.pieces:
            assert self._next is not None
            self._current = self._next
            self._rows = self._current.gather.finish()
            self._next = self._start()
        return self._rows, self._current

    def _start(self) -> _Leg | None:
        leg = next(self._left, None)
        if leg is not None:
            leg.gather.start(
                leg.bucket, {name: _shard(piece, self._held[int(name)]) for name, piece in leg.pieces.items()}
            )
        return leg


def _takes_part(h: Held) -> bool:
    """Replicas of the sender's shards have nothing to add."""
    return not any(c for dim, c in enumerate(h.mesh.get_coordinate()) if dim != h.mesh_dim)


def _piece(number: int, h: Held) -> Piece:
    """Shards as DTensor cuts them: `ceil(rows / ranks)` rows each; what the last ranks lack is padding at the end."""
    parts = h.mesh.size(h.mesh_dim)
    return Piece(
        name=str(number), shape=(-(-h.shape[0] // parts), *h.shape[1:]), dtype=h.value.dtype, dim=0, parts=parts
    )


def _shard(piece: Piece, h: Held) -> torch.Tensor:
    local = h.local.to(_current_device(h.mesh.device_type))
    if local.shape[0] == piece.shape[0]:
        return local
    padded = local.new_zeros(piece.shape)
    padded[: local.shape[0]] = local
    return padded


def full_tensor(h: Held) -> torch.Tensor:
    """All of `h`, on every rank of its mesh; a collective of its own."""
    with torch.no_grad():
        full: torch.Tensor = h.value.full_tensor()  # type: ignore[attr-defined]
    return full.detach()


def _current_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
