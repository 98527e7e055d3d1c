"""Test stand-in for SGLang's compiled kernel package, which needs CUDA or AVX512 builds.

Every name can be imported and refuses to be called, so that a kernel which a test really reaches fails by its name. The
exceptions are the few that decoding with greedy verification reaches; they are written out here for one draft token per
step (`topk=1`), where the tree of draft tokens is a chain.
"""

import ctypes
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0+stand.in"

FULL_MASK, QLEN_ONLY = 0, 1


class Absent:
    """A kernel that this machine does not have; has attributes, since SGLang looks some up while it is imported."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *_args, **_kwargs):
        raise NotImplementedError(f"{self.__name__} is a compiled kernel: not there in CPU tests")


def _names_of(module):
    def getattribute(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module}.{name}")

    return getattribute


__getattr__ = _names_of("sgl_kernel")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        ours = name.startswith("sgl_kernel.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _names_of(spec.name)
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Submodules())


def build_tree_kernel_efficient(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode=FULL_MASK,
):
    """Of a chain: token t follows token t - 1 and sees the prompt and the tokens up to itself."""
    if topk != 1 or int(tree_mask_mode) not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"the stand-in builds chains only: topk={topk}, tree_mask_mode={tree_mask_mode}")
    row = 0
    for request, prompt in enumerate(verified_seq_len.tolist()):
        seen_before = prompt if int(tree_mask_mode) == FULL_MASK else 0
        for t in range(draft_token_num):
            row += seen_before
            tree_mask[row : row + t + 1] = True
            tree_mask[row + t + 1 : row + draft_token_num] = False
            row += draft_token_num
            positions[request * draft_token_num + t] = prompt + t
            retrive_index[request, t] = request * draft_token_num + t
            retrive_next_token[request, t] = t + 1 if t + 1 < draft_token_num else -1
            retrive_next_sibling[request, t] = -1


def verify_tree_greedy(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Of a chain: draft tokens are accepted up to the first that is not the target's choice after its predecessor."""
    choice = target_predict.reshape(candidates.shape).tolist()
    for request, tokens in enumerate(candidates.tolist()):
        accepted = 0
        while accepted + 1 < accept_index.shape[1] and tokens[accepted + 1] == choice[request][accepted]:
            accepted += 1
        for t in range(accepted + 1):
            accept_index[request, t] = retrive_index[request, t]
            predicts[int(retrive_index[request, t])] = choice[request][t]
        accept_token_num[request] = accepted


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Rows `src_loc` to `tgt_loc` of every layer, all read before any is written."""
    moves = list(zip(tgt_loc.tolist(), src_loc.tolist(), strict=True))
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * stride, stride) for _, source in moves]
        for (target, _), row in zip(moves, rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


build_tree_kernel_efficient_cpu = build_tree_kernel_efficient
verify_tree_greedy_cpu = verify_tree_greedy
