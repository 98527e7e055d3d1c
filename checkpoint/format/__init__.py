"""The files of a Megatron `torch_dist` checkpoint, without Megatron-Core and without executing their pickles.

    TorchDistReader(path)    index, common state, objects, tensors and boxes of tensors by ranged reads
    TorchDistWriter(path)    a folder that stock Megatron-Core loads, from one process

The converters and the save path of `checkpoint` build on this; it depends on torch alone (digests: `xxhash`).
"""

from __future__ import annotations

from checkpoint.format.files import FileRecord, RecordFile, file_digest, put_file
from checkpoint.format.folder import TorchDistReader, TorchDistWriter, write_folder_metadata
from checkpoint.format.index import Chunk, Index, ObjectEntry, TensorEntry, dump_metadata, parse_metadata
from checkpoint.format.saved import load_object
from checkpoint.format.unpickle import Foreign

__all__ = [
    "Chunk",
    "FileRecord",
    "Foreign",
    "Index",
    "ObjectEntry",
    "RecordFile",
    "TensorEntry",
    "TorchDistReader",
    "TorchDistWriter",
    "dump_metadata",
    "file_digest",
    "load_object",
    "parse_metadata",
    "put_file",
    "write_folder_metadata",
]
