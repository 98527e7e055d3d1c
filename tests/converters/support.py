"""Helpers of the converter tests."""

from __future__ import annotations

import torch

from converters import rules_for


def same(a, b):
    """Bitwise and dtype-strict equality."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def to_megatron(config, tensors, **options):
    """(rules, all Megatron tensors) of a whole Hugging Face model."""
    rules = rules_for(config, tensors, **options)
    out = {}
    for mapping in rules.mappings():
        names = mapping.hf_sources(tensors)
        if mapping.optional and not any(name in tensors for name in names):
            continue
        out |= mapping.to_mcore({name: tensors[name] for name in names})
    return rules, out


def to_hugging_face(rules, tensors):
    out = {}
    for mapping in rules.mappings():
        if not mapping.optional or mapping.mcore[0] in tensors:
            out |= mapping.to_hf({name: tensors[name] for name in mapping.mcore})
    return out


def random_like(shapes, dtype=torch.bfloat16, seed=0):
    """Random tensors for {name: shape}, in `dtype`; {name: (shape, dtype)} to choose another."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, spec in shapes.items():
        shape, own = (
            spec if isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[1], torch.dtype) else (spec, dtype)
        )
        values = torch.randn(tuple(shape), generator=generator)
        out[name] = (values * 100).to(own) if not own.is_floating_point else values.to(own)
    return out
