"""The commands of `ckpt` that look after saved checkpoints; `converters.cli` is their main."""
