"""Test stand-in, for machines without a GPU: lets real SGLang import and decode speculatively on a CPU.

Loaded by every Python process that has this folder on its path (SGLang spawns several). It touches nothing of loading,
scheduling or weights, which is what the tests are about: only what SGLang takes for granted of a CUDA machine.

- three names of torchvision, whose builds on PyPI need a CUDA torch; Transformers is still told that it is absent;
- `torch.cuda.synchronize`, called when MTP models share their embedding;
- the choice of kernels for trees of draft tokens, which else needs the compiled package `sgl_kernel` (see there).
"""

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def decode_jpeg(*_args, **_kwargs):
    raise NotImplementedError("torchvision is a stand-in here: no images in these tests")


def _torchvision():
    names = {
        "torchvision": {"__version__": "0+stand.in"},
        "torchvision.io": {"decode_jpeg": decode_jpeg},
        "torchvision.transforms": {"InterpolationMode": InterpolationMode},
        "torchvision.transforms.functional": {"InterpolationMode": InterpolationMode},
    }
    for name, contents in names.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    known = importlib.util.find_spec

    def find_spec(name, package=None):
        return None if name.partition(".")[0] == "torchvision" else known(name, package)

    importlib.util.find_spec = find_spec


def _no_cuda_to_wait_for(_module):
    import torch

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_args, **_kwargs: None


def _trees(module):
    import sgl_kernel

    if hasattr(module, "_is_cpu"):
        # Later releases: the form of the tree mask that the Triton attention backend reads.
        module._is_cpu = False
    else:
        module.sgl_build_tree_kernel_efficient = sgl_kernel.build_tree_kernel_efficient
        module._is_cuda = True


def _triton_instead_of_compiled(module):
    # These have a Triton kernel too, which the interpreter runs.
    module._is_cpu = False
    if module.__name__.endswith("cache_locs"):
        module._is_cuda = True  # its functions return nothing unless some platform is set


AFTER_IMPORT = {
    "sglang.srt.utils.common": _no_cuda_to_wait_for,
    "sglang.srt.speculative.eagle_utils": _trees,
    "sglang.kernels.ops.speculative.cache_locs": _triton_instead_of_compiled,
    "sglang.kernels.ops.speculative.eagle": _triton_instead_of_compiled,
    "sglang.kernels.ops.speculative.multi_layer_eagle": _triton_instead_of_compiled,
    "sglang.kernels.ops.kvcache.cache_move": _triton_instead_of_compiled,
    "sglang.srt.mem_cache.allocation": _triton_instead_of_compiled,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        then = AFTER_IMPORT.get(name)
        spec = None if then is None else importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            then(module)

        spec.loader.exec_module = exec_module
        return spec


_torchvision()
sys.meta_path.insert(0, _AfterImport())
