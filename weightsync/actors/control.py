"""An engine that lives in a Ray actor, on both sides of the handle.

In the actor `EngineActor` holds the engine: whatever a function returns that has the methods of `EngineControl`, or
gives such an object from `control()`. On the publisher's side `RayControl` is that engine. Each step of a publish is
one actor call with JSON in and out; errors travel as JSON, too, since an exception raised across the actor's call would
arrive as a class of Ray's. Weights never take this way: engine ranks connect to the trainer's store and receive from
its senders.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from weightsync import errors
from weightsync.actors.calls import Place, answer
from weightsync.engine.http import error_body
from weightsync.protocol import PublishCall

__all__ = ["EngineActor", "RayControl"]

_METHODS = ("commit", "pause", "preflight", "receive", "resume", "status")
_STEPS = 8
"""Threads of an engine actor for the steps of a publish: a receive that hangs holds one; the status call beside it must
find another."""
_CALLS = 64
"""Threads for everything else, made as they are needed: with a pause generations hold theirs until the publish ends."""
_MARGIN_S = 0.5
"""How much longer than the engine's own deadline its actor is listened to: its words say more than our silence."""
T = TypeVar("T")


class EngineActor:
    """Base of a Ray actor that holds one engine. An async actor: the engine's calls run on threads of its own.

        class Rollout(EngineActor):
            def __init__(self, model):
                super().__init__(launch, EngineConfig(model=model, host=node_host()))

            async def generate(self, prompts):
                return await self.run(self.engine.generate, prompts, max_tokens=16)

        actor = ray.remote(num_cpus=1)(Rollout).remote("/models/m")
        publisher = Publisher(source, [RayControl(actor, name="rollout0")], ...)

    Args:
        start: called here, in the actor, with the other arguments; returns the engine.

    Raises:
        ConfigError: what it returns is no engine.
    """

    def __init__(self, start: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        self._steps = concurrent.futures.ThreadPoolExecutor(_STEPS, thread_name_prefix="weightsync-actor-step")
        self._calls = concurrent.futures.ThreadPoolExecutor(_CALLS, thread_name_prefix="weightsync-actor-call")
        self.engine = start(*args, **kwargs)
        control = getattr(self.engine, "control", self.engine)
        self._control = control() if callable(control) else control
        if missing := [m for m in _METHODS if not callable(getattr(self._control, m, None))]:
            raise errors.ConfigError(
                f"{type(self.engine).__name__} is no engine: it has no {', '.join(missing)} (see EngineControl), and "
                "no `control` that does"
            )

    async def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`fn(*args, **kwargs)` on a thread, 64 at once: what blocks must not block the actor's event loop."""
        return await _on(self._calls, fn, *args, **kwargs)

    async def weightsync_place(self) -> Place:
        """Where this actor runs."""
        return Place.here()

    async def weightsync_control(self, method: str, argument: Any, deadline_s: float) -> Mapping[str, Any]:
        """One step of a publish, for `RayControl`: `{"reply", "place"}` or `{"error"}`; raises nothing."""
        try:
            if isinstance(argument, Mapping):
                argument = PublishCall.from_json(argument)
            given = () if argument is None else (argument,)
            step = {name: getattr(self._control, name) for name in _METHODS}[method]
            reply = await _on(self._steps, step, *given, deadline_s=deadline_s)
        except Exception as e:  # noqa: BLE001 - whatever it was, the publisher gets it as JSON
            return error_body(e)[1]
        return {"reply": dict(reply), "place": Place.here()}

    async def weightsync_stop(self) -> None:
        """End the engine, if it can be told to (`stop`); the actor itself stays."""
        stop = getattr(self.engine, "stop", None)
        if callable(stop):
            await _on(self._steps, stop)


async def _on(pool: concurrent.futures.Executor, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, functools.partial(fn, *args, **kwargs))


class RayControl:
    """One engine behind the handle of an `EngineActor`: an `EngineControl`.

    Args:
        actor: the handle; also one from `ray.get_actor`.
        name: for messages and reports; default `actor-` and the beginning of the actor's id.

    Raises:
        ConfigError: the actor is of another kind of class.

    Picklable with its handle, so it may be made in a driver and passed to the trainer's actors. Every method raises
    `errors.EngineError` (the actor died or is out of reach: actor, node and process are named; silent until the
    deadline; or the engine failed), or the class that the engine itself named (`EngineFenced`, `RoutingError`, ...).
    """

    def __init__(self, actor: Any, *, name: str | None = None) -> None:
        self._actor = actor
        self._id = str(actor._actor_id.hex())
        if not hasattr(actor, "weightsync_control"):
            raise errors.ConfigError(
                f"{actor!r} is of no class that derives from EngineActor: let it, or wrap its engine"
            )
        self._name = name if name is not None else f"actor-{self._id[:8]}"
        self._place: Place | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def place(self) -> str:
        """Which actor this is and, once it has answered, where it runs; for messages."""
        return f"Ray actor {self._id[:8]}" + (f" on {self._place}" if self._place is not None else "")

    def status(self, *, deadline_s: float) -> Mapping[str, Any]:
        if self._place is None:
            end = time.monotonic() + deadline_s
            self._place = self._wait("status", self._actor.weightsync_place.remote(), deadline_s)
            deadline_s = max(end - time.monotonic(), 0.1)
        return self._call("status", None, deadline_s)

    def preflight(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        return self._call("preflight", call.to_json(), deadline_s)

    def pause(self, mode: str, *, deadline_s: float) -> Mapping[str, Any]:
        return self._call("pause", mode, deadline_s)

    def receive(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        return self._call("receive", call.to_json(), deadline_s)

    def commit(self, call: PublishCall, *, deadline_s: float) -> Mapping[str, Any]:
        return self._call("commit", call.to_json(), deadline_s)

    def resume(self, *, deadline_s: float) -> Mapping[str, Any]:
        return self._call("resume", None, deadline_s)

    def _call(self, method: str, argument: Any, deadline_s: float) -> Mapping[str, Any]:
        said = self._wait(
            method, self._actor.weightsync_control.remote(method, argument, deadline_s), deadline_s + _MARGIN_S
        )
        if "error" in said:
            raise self._rebuilt(method, said["error"])
        # Ray may have restarted the actor (`max_restarts`): messages name the process that answered last.
        self._place = said["place"]
        reply: Mapping[str, Any] = said["reply"]
        return reply

    def _wait(self, method: str, ref: Any, deadline_s: float) -> Any:
        where = f"engine {self.name}, {method}: {self.place}"
        try:
            return answer(ref, deadline_s, self._place)
        except errors.TransferTimeout as e:
            text = f"{where}: {e}: stopped or busy with other calls; look at its log, or raise the deadline"
            raise errors.EngineError(text, engine=self.name, phase=method) from e
        except errors.PeerLost as e:
            text = f"{where}: {e}: start it anew and publish again: a new engine gets a full publish"
            raise errors.EngineError(text, engine=self.name, phase=method) from e
        except Exception as e:
            # The actor's own code answers with an error, it raises none: this is Ray's.
            raise errors.EngineError(f"{where}: {type(e).__name__}: {e}", engine=self.name, phase=method) from e

    def _rebuilt(self, method: str, error: Mapping[str, Any]) -> errors.WeightSyncError:
        """The error that the engine raised, as the class it was: a publisher treats it as that of any other client."""
        text, kind = str(error["message"]), getattr(errors, error["type"], None)
        if not (isinstance(kind, type) and issubclass(kind, errors.WeightSyncError)):
            text, kind = f"engine {self.name}, {method}: {error['type']}: {text}", errors.EngineError
        if not issubclass(kind, errors.EngineError):
            return kind(text)
        return kind(
            text,
            engine=self.name,
            rank=error.get("rank"),
            phase=error.get("phase") or method,
            remote=error.get("remote"),
        )
