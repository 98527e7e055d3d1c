"""Export of a live Megatron-Core model: Hugging Face tensors by the rules of `converters.rules`, plus parallelism only.

`LiveExporter` plans from metadata and streams tensors; `write_hf_folder` streams them into a Hugging Face folder.
Megatron-Core is imported only where its process groups are asked for.
"""

from __future__ import annotations

from converters.live.exporter import ExportedTensor, LiveExporter
from converters.live.folder import write_hf_folder
from converters.live.groups import ParallelGroups

__all__ = ["ExportedTensor", "LiveExporter", "ParallelGroups", "write_hf_folder"]
