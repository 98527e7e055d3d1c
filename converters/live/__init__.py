"""Export of a live Megatron-Core model: Hugging Face tensors by the rules of `converters.rules`, plus parallelism only.

`LiveExporter` plans from metadata and streams tensors; `write_hf_folder` streams them into a Hugging Face folder.
The other way, `load_hf_folder` and `load_tensors` fill a live model, each rank its own shards. `Topology` says before
anything is built whether sizes of parallel groups fit. Megatron-Core is imported only where its groups are asked for.
"""

from __future__ import annotations

from converters.live.exporter import ExportedTensor, LiveExporter
from converters.live.folder import write_hf_folder
from converters.live.groups import ParallelGroups
from converters.live.load import LoadReport, load_hf_folder, load_tensors
from converters.live.topology import Topology

__all__ = [
    "ExportedTensor",
    "LiveExporter",
    "LoadReport",
    "ParallelGroups",
    "Topology",
    "load_hf_folder",
    "load_tensors",
    "write_hf_folder",
]
