"""Multi-token prediction as an auxiliary loss of a live Megatron-Core model, while the model itself returns logits.

    hook = install_mtp(model_chunks, MTPConfig(scale=0.1))
    with hook.step(all_targets, index=iteration):        # every rank; one small all-reduce
        ...                                              # Megatron's schedule; in its forward step:
        with hook.micro_batch(targets):
            logits = model(input_ids, position_ids, attention_mask)
    log(hook.metrics())                                  # every rank that holds the MTP layers
    hook.remove()

`install_mtp` replaces methods of the instances, never of classes, and `remove` restores them exactly. What the MTP
layers read from the backbone is cut at the border of their block: the hidden states once, the embeddings of every
depth, the output head. So depth 2 still trains depth 1, and the gradients of the backbone are bit for bit those of a
model without MTP. Each position's targets come ready made from `training_hooks.alignment`: nothing is rolled here.

The wanted gradient is that of `scale / depths * sum_d (1 / N_d) sum_i loss_d[i]`, with N_d the supervised tokens of
depth d in the whole step: all data parallel and context parallel ranks, all micro-batches. What the trainer's own
gradient reduction divides by is multiplied in beforehand.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from training_hooks.alignment import MTPTargets
from training_hooks.errors import AlignmentError, HookError, SettingsError
from training_hooks.megatron.probe import INSTALLED, MTPModel, find_models
from training_hooks.vocab_parallel import DEFAULT_CHUNK_BYTES, row_losses

__all__ = ["MTPConfig", "MTPHook", "install_mtp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MTPConfig:
    """How MTP layers are trained.

    `scale`: weight of the MTP loss beside the main loss, or a function of the step's index. `loss_scale`: the
    optimizer's current loss scale; default: the model config's `grad_scale_func`, as for the main loss. `chunk_bytes`:
    bound of the temporaries of the cross entropy.
    """

    scale: float | Callable[[int], float] = 0.1
    loss_scale: Callable[[], float | torch.Tensor] | None = None
    chunk_bytes: int = DEFAULT_CHUNK_BYTES

    def __post_init__(self) -> None:
        if not callable(self.scale) and self.scale < 0:
            raise SettingsError(f"scale is {self.scale}: the weight of a loss is not negative")
        if self.chunk_bytes < 1:
            raise SettingsError(f"chunk_bytes is {self.chunk_bytes}: it must be positive")


def install_mtp(chunks: Sequence[Any], config: MTPConfig | None = None) -> MTPHook:
    """Hook MTP training into `chunks`, the list of model chunks of this rank (wrapped or not). Call it on every rank.

    Chunks without MTP layers are left alone, so the same trainer code runs on every pipeline stage.

    Raises:
        HookError: no Megatron language model here, or it is hooked already.
        SettingsError: settings that cannot hold together with MTP training.
    """
    return MTPHook(find_models(chunks), config or MTPConfig())


@dataclass(slots=True)
class _Step:
    """One optimizer step on a rank that holds MTP layers."""

    weights: list[float]
    expected: int
    done: int = 0
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """float64 [3, depths] of this rank: loss, correct predictions, supervised tokens."""


class MTPHook:
    """What `install_mtp` returns; also a context manager that removes itself."""

    def __init__(self, models: Sequence[MTPModel], config: MTPConfig) -> None:
        from megatron.core import parallel_state

        self.config = config
        self._model = next((m for m in models if m.layers), None)
        self._step: _Step | None = None
        self._finished: _Step | None = None
        self._current: MTPTargets | None = None
        self._depth = 0
        self._patched: list[tuple[Any, str, Any]] = []
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if self._model is None:
            return
        module = self._model.module
        self._tp: Any = getattr(getattr(module, "pg_collection", None), "tp", None)
        if self._tp is None:
            self._tp = parallel_state.get_tensor_model_parallel_group()
        self._patch(module, "_postprocess", self._wrap_postprocess(module))
        for layer in self._model.layers:
            self._patch(layer, "_get_embeddings", self._make_get_embeddings())
            if self._model.has_positional_checkpoint:
                self._patch(layer, "_checkpointed_forward", _make_checkpointed_forward(layer))

    # ---- what a trainer calls ----

    @property
    def is_active(self) -> bool:
        """Whether this rank holds MTP layers."""
        return self._model is not None

    @property
    def depths(self) -> int:
        return 0 if self._model is None else int(self._model.module.config.mtp_num_layers)

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """MTP parameters of this rank, named as in the language model."""
        if self._model is None:
            return []
        return [(f"mtp.{name}", p) for name, p in self._model.module.mtp.named_parameters()]

    @contextlib.contextmanager
    def step(self, targets: Sequence[MTPTargets], *, index: int = 0, main_tokens: int | None = None) -> Iterator[None]:
        """Around the forward and backward passes of one optimizer step, on every rank.

        Args:
            targets: those of all micro-batches of this rank, in any order; may be empty where no MTP layers are.
            index: number of the step, for a scheduled scale.
            main_tokens: with `calculate_per_token_loss`, the tokens that this rank's main loss counts in all
                micro-batches (Megatron divides every gradient by their global sum).

        Raises:
            SettingsError: a loss scale or a token count is missing.
            HookError: on leaving, a micro-batch was not run with its targets.
        """
        if self._step is not None:
            raise HookError("a step is open already: steps do not nest")
        if self._model is None:
            yield
            return
        self._step = self._begin(targets, index, main_tokens)
        try:
            yield
            if self._step.done != self._step.expected:
                raise HookError(
                    f"the step declared {self._step.expected} micro-batches, {self._step.done} ran with gradients: "
                    "their counts are in the denominators already; declare what you run"
                )
            self._finished = self._step
        finally:
            self._step = None
            self._current = None

    @contextlib.contextmanager
    def micro_batch(self, targets: MTPTargets) -> Iterator[None]:
        """Around one forward call of the model. Without gradients the targets are not used, and no MTP layer runs."""
        if self._model is None:
            yield
            return
        if self._step is None and torch.is_grad_enabled():
            raise HookError("micro_batch outside of step(): denominators are unknown; open a step around the schedule")
        self._current = targets
        try:
            yield
        finally:
            self._current = None

    def metrics(self) -> dict[str, float]:
        """Of the last finished step, over all its tokens: `mtp_loss/depth_d`, `mtp_accuracy/depth_d` (how often the top
        prediction is the label), `mtp_tokens/depth_d`, and `mtp_accept_length`: 1 + sum_k prod_(j<=k) accuracy_j, an
        estimate of tokens per decoding step that includes the target's own token. Collective over the data and context
        parallel ranks that hold the MTP layers; empty elsewhere.
        """
        if self._model is None:
            return {}
        if self._finished is None:
            raise HookError("no step has finished yet")
        sums = self._finished.sums.clone()
        dist.all_reduce(sums, group=self._group)
        out = {}
        accepted, length = 1.0, 1.0
        for depth, (loss, correct, tokens) in enumerate(sums.T.tolist(), 1):
            out[f"mtp_loss/depth_{depth}"] = loss / max(tokens, 1)
            out[f"mtp_accuracy/depth_{depth}"] = correct / max(tokens, 1)
            out[f"mtp_tokens/depth_{depth}"] = tokens
            accepted *= correct / max(tokens, 1)
            length += accepted
        out["mtp_accept_length"] = length
        return out

    def remove(self) -> None:
        """Restore every method that was replaced. Idempotent.

        Raises:
            HookError: another patch lies above ours: remove that one first. Nothing was restored.
        """
        for owner, name, replacement in self._patched:
            if vars(owner).get(name) is not replacement:
                raise HookError(f"{type(owner).__name__}.{name} was patched again after this hook: remove that first")
        while self._patched:
            owner, name, _ = self._patched.pop()
            delattr(owner, name)  # the class's own method shows again

    def __enter__(self) -> MTPHook:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    # ---- inside ----

    def _patch(self, owner: Any, name: str, replacement: Any) -> None:
        if name in vars(owner):
            self.remove()
            raise HookError(f"{type(owner).__name__}.{name} is patched on this instance already: by what?")
        setattr(owner, name, replacement)
        self._patched.append((owner, name, replacement))

    def _begin(self, targets: Sequence[MTPTargets], index: int, main_tokens: int | None) -> _Step:
        assert self._model is not None
        module, depths = self._model.module, self.depths
        config = module.config
        if config.fp16 and config.grad_scale_func is None and self.config.loss_scale is None:
            raise SettingsError(
                "fp16 without a loss scale: the optimizer would divide MTP gradients by a scale that they never got: "
                "set config.grad_scale_func = optimizer.scale_loss, or MTPConfig(loss_scale=...)"
            )
        if config.calculate_per_token_loss and main_tokens is None:
            raise SettingsError("calculate_per_token_loss divides by the tokens of the main loss: pass main_tokens")
        if not config.calculate_per_token_loss and main_tokens is not None:
            raise SettingsError("main_tokens only means something with calculate_per_token_loss, which is off")
        wrong = [t.depths for t in targets if t.depths != depths]
        if wrong:
            raise AlignmentError(f"targets have {wrong[0]} depths, the model has {depths} MTP layers")
        device = next(module.parameters()).device
        counts = [sum(t.counts[d] for t in targets) for d in range(depths)]
        total = torch.tensor([*counts, main_tokens or 0], dtype=torch.int64, device=device)
        dist.all_reduce(total, group=self._group)
        *global_counts, main = total.tolist()
        # Undoes what the gradient reduction will divide by; finalize_model_grads leaves gradients alone at 0 tokens.
        undo = max(main, 1) if config.calculate_per_token_loss else self._group.size()
        scale = self.config.scale(index) if callable(self.config.scale) else self.config.scale
        return _Step(
            weights=[scale / depths * undo / max(n, 1) for n in global_counts],
            expected=len(targets),
            sums=torch.zeros(3, depths, dtype=torch.float64, device=device),
        )

    def _wrap_postprocess(self, module: Any) -> Callable[..., Any]:
        original = module._postprocess
        signature = inspect.signature(original)

        def postprocess(*args: Any, **kwargs: Any) -> Any:
            call = dict(signature.bind(*args, **kwargs).arguments)
            if torch.is_grad_enabled():
                if self._current is not None:
                    call["hidden_states"] = self._with_mtp(module, call, self._current)
                elif self._step is not None:
                    raise HookError("a forward pass with gradients inside of step(), but outside of micro_batch()")
            # The rest is what the same model without MTP layers does.
            call["mtp_in_postprocess"] = False
            config = module.config
            module.config = copy.copy(config)
            module.config.mtp_num_layers = None
            try:
                return original(**call)
            finally:
                module.config = config

        setattr(postprocess, INSTALLED, True)
        return postprocess

    def _with_mtp(self, module: Any, call: dict[str, Any], targets: MTPTargets) -> torch.Tensor:
        """The hidden states of the backbone, unchanged, with the MTP loss hanging on their backward pass."""
        step = self._step
        assert step is not None
        if step.done == step.expected:
            raise HookError(f"more micro-batches than the {step.expected} that the step declared")
        hidden = call["hidden_states"]
        targets = targets.to(hidden.device)
        parts = self._tp.size() if module.config.sequence_parallel else 1
        got, want = (hidden.shape[0] * parts, hidden.shape[1]), tuple(targets.input_ids.shape[:0:-1])
        if got != want:
            raise AlignmentError(
                f"targets are for {want[1]} rows of {want[0]} columns, the model runs {got[1]} rows of {got[0]} (after "
                "context parallel slicing): were they built with another layout or split?"
            )
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        states = self._run_block(module, call, hidden, targets)
        weight, frozen = _frozen_head(module)
        for depth, state in enumerate(states):
            logits, _ = torch.func.functional_call(
                module.output_layer, frozen, (state,), {"weight": weight, "runtime_gather_output": False}
            )
            mask = targets.mask[depth].t()
            losses = row_losses(
                logits,
                mask,
                labels=targets.labels[depth].t(),
                group=self._tp,
                chunk_bytes=self.config.chunk_bytes,
            )
            assert losses.hard is not None
            numerator = losses.hard.sum(dtype=torch.float64)
            total = total + step.weights[depth] * numerator
            step.sums[:, depth] += torch.stack([numerator.detach(), losses.correct.sum(), mask.sum()])
        step.done += 1
        # What only a stage with MTP layers has, and nothing trains there: overlapped gradient reduction waits for every
        # parameter, and from its second step on fails without them.
        idle = None
        if not module.pre_process:
            tied = module.share_embeddings_and_output_weights
            idle = module.output_layer.weight if tied else module.embedding.word_embeddings.weight
        out: torch.Tensor = _Attach.apply(hidden, total, idle, self._loss_scale)  # type: ignore[no-untyped-call]
        return out

    def _run_block(
        self, module: Any, call: dict[str, Any], hidden: torch.Tensor, targets: MTPTargets
    ) -> tuple[torch.Tensor, ...]:
        """Hidden states of every depth, each [s, b, h] like `hidden`."""
        accepted = set(inspect.signature(module.mtp.forward).parameters)
        extra = call.get("extra_block_kwargs") or {}
        given = {k: v for k, v in call.items() if k in accepted and k != "extra_block_kwargs"}
        # Reentrant recomputation drops every gradient, silently, if none of its inputs wants one.
        given["hidden_states"] = hidden.detach().requires_grad_(True)
        self._depth = 0
        out = module.mtp(**given, embedding=module.embedding, **extra)
        if self._depth != targets.depths:
            raise HookError(f"the MTP block ran {self._depth} depths, expected {targets.depths}")
        return torch.chunk(out, 1 + targets.depths, dim=0)[1:]

    def _make_get_embeddings(self) -> Callable[..., Any]:
        assert self._model is not None
        returns_padding_mask = self._model.returns_padding_mask

        def get_embeddings(
            input_ids: torch.Tensor,
            position_ids: torch.Tensor | None,
            embedding: Any,
            hidden_states: torch.Tensor,
            packed_seq_params: Any = None,
            padding_mask: torch.Tensor | None = None,
        ) -> tuple[Any, ...]:
            from megatron.core.utils import make_viewless_tensor

            assert self._current is not None
            ids = self._current.input_ids[self._depth].to(hidden_states.device)
            positions = self._current.position_ids[self._depth].to(hidden_states.device)
            self._depth += 1
            with torch.no_grad():
                decoder_input = embedding(input_ids=ids, position_ids=positions)
            hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
            if returns_padding_mask:
                return input_ids, position_ids, padding_mask, decoder_input.detach(), hidden_states
            return input_ids, position_ids, decoder_input.detach(), hidden_states

        return get_embeddings

    def _loss_scale(self) -> float | torch.Tensor:
        assert self._model is not None
        if self.config.loss_scale is not None:
            return self.config.loss_scale()
        scale = self._model.module.config.grad_scale_func
        device = next(self._model.module.parameters()).device
        return 1.0 if scale is None else scale(torch.ones(1, device=device)).reshape(())


class _Attach(torch.autograd.Function):
    """Identity on `hidden`; its backward pass also starts that of `total`, scaled as the optimizer will unscale it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        total: torch.Tensor,
        idle: torch.Tensor | None,
        loss_scale: Callable[[], float | torch.Tensor],
    ) -> torch.Tensor:
        ctx.idle, ctx.loss_scale = idle, loss_scale
        ctx.like = total.dtype
        return hidden

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = torch.as_tensor(ctx.loss_scale(), dtype=ctx.like, device=grads[0].device)
        return grads[0], scale, None if ctx.idle is None else torch.zeros_like(ctx.idle), None


def _frozen_head(module: Any) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """(the weight to pass or None, every parameter of the output layer by name), without gradients."""
    weight = None
    if module.share_embeddings_and_output_weights:
        weight = module.shared_embedding_or_output_weight().detach()
    return weight, {name: p.detach() for name, p in module.output_layer.named_parameters()}


def _make_checkpointed_forward(layer: Any) -> Callable[..., Any]:
    """Full recomputation of one MTP layer that keeps what is no activation out of the checkpoint's arguments."""
    stock = layer._checkpointed_forward

    def checkpointed_forward(forward_func: Callable[..., Any], **kwargs: Any) -> Any:
        from megatron.core import tensor_parallel

        config = layer.config
        if config.fp8 or config.recompute_method != "uniform":
            return stock(forward_func, **kwargs)
        hidden, decoder_input = kwargs.pop("hidden_states"), kwargs.pop("decoder_input")

        def run(hidden: torch.Tensor, decoder_input: torch.Tensor) -> Any:
            return forward_func(hidden_states=hidden, decoder_input=decoder_input, **kwargs)

        return tensor_parallel.checkpoint(run, config.distribute_saved_activations, hidden, decoder_input)

    return checkpointed_forward
