"""Small real Megatron-Core models in float64 on the CPU, with weights by name that no sharding changes.

`Parallel` says how a group of ranks is laid out, `build` makes this rank's chunks, `full_weights` are the weights of
the whole model, `shard` the part of one tensor that a rank holds. The stand-ins (norm, attention) are plain maths in
the tensors' own dtype: Megatron's local ones refuse sequence parallelism, context parallelism and packed sequences.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import zlib
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend, get_mlp_module_spec_for_backend
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.tensor_parallel import random as mcore_random
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.overrides import TorchFunctionMode

from training_hooks.alignment import CpSplit, Layout
from weightsync.bench.megatron import cpu_runtime

VOCAB, HIDDEN, HEADS, GROUPS, LAYERS, EXPERTS = 32, 16, 4, 2, 4, 4


@dataclasses.dataclass(frozen=True)
class Parallel:
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    sp: bool = False


class _Unpinned(TorchFunctionMode):
    """Pinned memory, which rotary embeddings ask for under context parallelism, needs an accelerator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        return func(*args, **kwargs)


class _Stream:
    """What was copied on the side stream is there when the copy returns."""

    def wait_stream(self, stream):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


def _move_to_cpu(tensor, as_numpy=False, record_stream=False):
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@contextlib.contextmanager
def runtime():
    """Megatron-Core on the CPU, its random number tracker and its MoE code included."""
    with contextlib.ExitStack() as stack:
        replace = [
            (mcore_random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
            (mcore_random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
            (torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
            (token_dispatcher, "maybe_move_tensor_to_cpu", _move_to_cpu),
            (token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", _Stream()),
        ]
        if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 names it without Transformer Engine
            replace.append((moe_utils, "te_general_gemm", None))
        for owner, name, value in replace:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(cpu_runtime())
        stack.enter_context(_Unpinned())
        yield


class Norm(torch.nn.Module):
    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class _GatherCp(torch.autograd.Function):
    """[s, ...] of every context parallel rank, stacked; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(out, x.contiguous(), group=group)
        return torch.stack(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None


class Attention(torch.nn.Module):
    """Causal attention, grouped queries, [s, b, h, d] or packed [t, h, d], over context parallel ranks (zigzag)."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(self, q, k, v, attention_mask, packed_seq_params=None, **_):
        q, k, v = (x.unsqueeze(1) if x.dim() == 3 else x for x in (q, k, v))
        group = ps.get_context_parallel_group()
        total = q.shape[0] * group.size()
        if packed_seq_params is None:
            layout = Layout.padded([total], total)
            segment = torch.zeros(total, dtype=torch.int64)
        else:
            rooms = packed_seq_params.cu_seqlens_q_padded
            rooms = packed_seq_params.cu_seqlens_q if rooms is None else rooms
            layout = Layout.packed(rooms.tolist())
            segment = torch.bucketize(torch.arange(total), rooms[1:], right=True)
        columns = [CpSplit(size=group.size(), rank=r).local_columns(layout) for r in range(group.size())]
        mine, every = columns[group.rank()], torch.cat(columns)
        if group.size() > 1:
            k, v = (_GatherCp.apply(x, group).flatten(0, 1) for x in (k, v))
        allowed = (mine[:, None] >= every[None]) & (segment[mine][:, None] == segment[every][None])
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
        scores = torch.einsum("sbhd,tbhd->bhst", q, k) * self.scale
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2)


class Backend(LocalSpecProvider):
    def layer_norm(self, rms_norm=False, for_qk=False):
        return Norm

    def core_attention(self):
        return Attention


def init(parallel):
    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()
        # Megatron forgets its groups without destroying them: each keeps its gloo threads, thousands after many cases.
        for group in [g for g in dist.distributed_c10d._world.pg_map if g is not dist.group.WORLD]:
            dist.destroy_process_group(group)
    ps.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
    )
    destroy_num_microbatches_calculator()
    MTPLossLoggingHelper.tracker = {}
    mcore_random.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True, force_reset_rng=True)


def config(parallel, *, depths, dtype=torch.float64, moe=False, **changes):
    fields = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_query_groups": GROUPS,
        "ffn_hidden_size": 24, "mtp_num_layers": depths or None, "mtp_loss_scaling_factor": 0.1,
        "normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "params_dtype": dtype, "pipeline_dtype": dtype, "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp, "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp, "expert_model_parallel_size": parallel.ep,
        "sequence_parallel": parallel.sp, "use_cpu_initialization": True, "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False, "bias_activation_fusion": False, "masked_softmax_fusion": False,
        "apply_rope_fusion": False, "persist_layer_norm": False,
        # Interleaved stages with batched p2p mix up their messages on gloo, without an error.
        "batch_p2p_comm": parallel.vpp is None, "overlap_p2p_comm": parallel.vpp is not None,
    }  # fmt: skip
    if moe:
        fields |= {
            "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "moe_aux_loss_coeff": 0.05,
            "moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        }  # fmt: skip
    return TransformerConfig(**{**fields, **changes})


def build(parallel, *, depths, tied=False, dtype=torch.float64, moe=False, ddp=True, ddp_config=None, **changes):
    """This rank's chunks with the weights of `full_weights`; `depths=0` builds the same model without MTP layers."""
    cfg = config(parallel, depths=depths, dtype=dtype, moe=moe, **changes)
    backend = Backend()
    mlp = get_mlp_module_spec_for_backend(backend)
    if moe:
        mlp = get_moe_module_spec_for_backend(backend, num_experts=EXPERTS, moe_grouped_gemm=False)
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=backend.column_parallel_linear(),
                    core_attention=Attention,
                    linear_proj=backend.row_parallel_linear(),
                    q_layernorm=IdentityOp,
                    k_layernorm=IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    chunks = []
    for vp_stage in range(parallel.vpp) if parallel.vpp else [None]:
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        count = get_num_layers_to_build(cfg, vp_stage)
        chunk = GPTModel(
            cfg,
            TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm),
            vocab_size=VOCAB,
            max_sequence_length=64,
            pre_process=ps.is_pipeline_first_stage(**where),
            post_process=ps.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            mtp_block_spec=get_gpt_mtp_block_spec_for_backend(cfg, layer, backend, vp_stage=vp_stage)
            if depths
            else None,
            vp_stage=vp_stage,
        )
        fill(chunk)
        chunks.append(Float16Module(cfg, chunk) if cfg.fp16 else chunk)
    if ddp:
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=cfg.fp16, **(ddp_config or {}))
        chunks = [
            DistributedDataParallel(cfg, ddp_config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
        ]
        cfg.finalize_model_grads_func = finalize_model_grads
        if ddp_config.overlap_grad_reduce:
            cfg.no_sync_func = [c.no_sync for c in chunks] if parallel.vpp else chunks[0].no_sync
    return chunks


def inner(chunk):
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def global_name(module, name):
    """The name in the whole model: layers and experts numbered over all stages and ranks."""
    if (match := re.match(r"decoder\.layers\.(\d+)\.(.*)", name)) is not None:
        number = module.decoder.layers[int(match[1])].layer_number - 1
        name = f"decoder.layers.{number}.{match[2]}"
    if (match := re.match(r"(.*local_experts\.)(\d+)(\..*)", name)) is not None:
        per_rank = EXPERTS // ps.get_expert_model_parallel_world_size()
        name = f"{match[1]}{int(match[2]) + per_rank * ps.get_expert_model_parallel_rank()}{match[3]}"
    if name == "output_layer.weight" and module.share_embeddings_and_output_weights:
        name = "embedding.word_embeddings.weight"
    return name


def named(chunks):
    """(name in the whole model, parameter) of this rank; copies of the embedding come under one name."""
    for chunk in chunks:
        module = inner(chunk)
        tied = module.share_embeddings_and_output_weights
        for name, parameter in module.named_parameters():
            if name == "output_layer.weight" and tied and module.mtp_process:
                continue  # allocated on a last stage with MTP layers, but the embedding's copy is what is used
            yield global_name(module, name), parameter


def full_weight(name, shape, dtype):
    """The whole tensor `name`, drawn from its name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    value = 1 + 0.1 * drawn if name.endswith("norm.weight") else 0.25 * drawn
    return value.to(dtype)


def full_shape(parameter):
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= ps.get_tensor_model_parallel_world_size()
    return shape


def shard(name, parameter, full):
    """The part of `full` that this rank's `parameter` holds."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    size, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    if name.endswith("linear_fc1.weight"):  # gate and up are sharded one by one
        return torch.cat([half.chunk(size, 0)[rank] for half in full.chunk(2, 0)])
    return full.chunk(size, parameter.partition_dim)[rank]


@torch.no_grad()
def fill(module):
    for name, parameter in named([module]):
        full = full_weight(name, full_shape(parameter), parameter.dtype)
        parameter.copy_(shard(name, parameter, full))
