"""The values of a Hugging Face `config.json` that rules read, with a family's defaults and clear errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from converters.errors import ConfigMismatch

__all__ = ["ModelConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`values` is the parsed config, `defaults` what the family's own config class assumes for absent keys.

    `names` are the Hugging Face tensor names of the source, where known: some facts stand only there.
    """

    family: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: frozenset[str] = frozenset()

    def get(self, key: str) -> Any:
        """The value, the family's default where the key is absent or null, or None."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def integer(self, key: str) -> int:
        """An integer >= 0.

        Raises:
            ConfigMismatch: absent, or something else.
        """
        value = self.get(key)
        if value is None:
            raise ConfigMismatch(f"config has no {key!r}, which the {self.family} rules need")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigMismatch(f"config has {key} = {value!r}, expected an integer >= 0")
        return value

    def flag(self, key: str) -> bool:
        return bool(self.get(key))

    def stores(self, ending: str, *, within: str = "") -> bool:
        """Whether the source has a tensor whose name ends so: experts packed or one by one, and the like."""
        return any(name.endswith(ending) and name.startswith(within) for name in self.names)

    @property
    def hidden(self) -> int:
        return self.integer("hidden_size")

    @property
    def heads(self) -> int:
        return self.integer("num_attention_heads")

    @property
    def groups(self) -> int:
        """Query groups: key/value heads."""
        groups = self.heads if self.get("num_key_value_heads") is None else self.integer("num_key_value_heads")
        if groups < 1 or self.heads % groups:
            raise ConfigMismatch(f"config has {self.heads} attention heads for {groups} key/value heads")
        return groups

    @property
    def head_dim(self) -> int:
        """`head_dim` if given: it need not be hidden_size / heads."""
        if self.get("head_dim") is not None:
            return self.integer("head_dim")
        if self.hidden % self.heads:
            raise ConfigMismatch(f"config has hidden_size {self.hidden} for {self.heads} heads and no head_dim")
        return self.hidden // self.heads
