"""Model shapes: what the embedded engine can hold, read from a Hugging Face `config.json`.

`ModelConfig.from_hf` is called by whoever builds a model (`engine.py`, `known.py`, tests); anything that the
model would compute differently from Transformers is refused here, so that no run is silently wrong.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError

__all__ = ["SHAPES", "ModelConfig", "eagle3_config", "resolve_config"]

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MiMoForCausalLM": "mimo",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
}
_HF_NAME = {family: architecture for architecture, family in reversed(_ARCHITECTURES.items())}
_HF_TYPE = {"mimo": "mimo", "eagle3": "llama"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of one decoder, a target (perhaps with MTP layers) or an EAGLE3 drafter; sizes are of the whole model."""

    family: str
    """`llama`, `qwen2`, `qwen3`, `mimo` or `eagle3`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    """None, or the parameters of `llama3` scaling."""
    max_positions: int = 4096
    tie_word_embeddings: bool = False
    num_mtp_layers: int = 0
    """MiMo's layout (`model.mtp_layers.N`), whatever the family of the decoder."""
    draft_vocab_size: int | None = None
    """EAGLE3 only: rows of its own output layer."""
    target_hidden_size: int | None = None
    """EAGLE3 only: width of each of the three target states that `fc` reads."""
    aux_layers: tuple[int, ...] | None = None
    """EAGLE3 only: the target layers whose input it reads; None means 2, half and the third last."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} attention heads are not a multiple of {self.num_kv_heads} KV heads")
        if self.num_mtp_layers > 1:
            raise ConfigError(
                f"config has {self.num_mtp_layers} MTP layers: the embedded engine drafts with one; "
                "set num_nextn_predict_layers to 1"
            )

    @property
    def qkv_bias(self) -> bool:
        return self.family in ("qwen2", "mimo")

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    @property
    def is_eagle3(self) -> bool:
        return self.family == "eagle3"

    @classmethod
    def from_hf(cls, obj: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed `config.json`.

        Raises:
            ConfigError: an architecture or an option (bias, activation, sliding window, RoPE type) that the embedded
                engine does not compute, or a missing size.
        """
        architectures = obj.get("architectures") or [_HF_NAME.get(str(obj.get("model_type")), "")]
        family = _ARCHITECTURES.get(architectures[0])
        if family is None:
            raise ConfigError(
                f"config.json names architecture {architectures[0] or obj.get('model_type')!r}: the embedded engine "
                f"knows {sorted(_ARCHITECTURES)}"
            )
        for key, fine in (("hidden_act", "silu"), ("mlp_bias", False), ("use_sliding_window", False)):
            if obj.get(key, fine) != fine:
                raise ConfigError(
                    f"config.json sets {key}={obj[key]!r}: the embedded engine computes {key}={fine!r} only"
                )
        if obj.get("attention_bias", False) and family in ("llama", "qwen3", "eagle3"):
            raise ConfigError(f"config.json sets attention_bias: the embedded engine has none for {family}")
        rope = dict(obj.get("rope_parameters") or {})
        scaling = {**rope, **(obj.get("rope_scaling") or {})}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ConfigError(f"config.json sets RoPE type {kind!r}: the embedded engine knows default and llama3")
        try:
            heads = int(obj["num_attention_heads"])
            hidden = int(obj["hidden_size"])
            is_eagle3 = family == "eagle3"
            aux = (obj.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
            return cls(
                family=family,
                vocab_size=int(obj["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(obj["intermediate_size"]),
                num_layers=int(obj["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(obj.get("num_key_value_heads") or heads),
                head_dim=int(obj.get("head_dim") or hidden // heads),
                rms_norm_eps=float(obj.get("rms_norm_eps", 1e-6)),
                rope_theta=float(rope.get("rope_theta") or obj.get("rope_theta") or 10000.0),
                rope_scaling=scaling if kind == "llama3" else None,
                max_positions=int(obj.get("max_position_embeddings", 4096)),
                tie_word_embeddings=bool(obj.get("tie_word_embeddings", False)) and not is_eagle3,
                num_mtp_layers=0 if is_eagle3 else int(obj.get("num_nextn_predict_layers") or 0),
                draft_vocab_size=int(obj.get("draft_vocab_size") or obj["vocab_size"]) if is_eagle3 else None,
                target_hidden_size=int(obj.get("target_hidden_size") or hidden) if is_eagle3 else None,
                aux_layers=tuple(aux) if aux is not None else None,
            )
        except KeyError as e:
            raise ConfigError(f"config.json lacks {e.args[0]!r}, which {family} needs") from e

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` that `from_hf` reads back and, for the families that it knows, Transformers loads."""
        obj: dict[str, Any] = {
            "architectures": [_HF_NAME[self.family]],
            "model_type": _HF_TYPE.get(self.family, self.family),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_word_embeddings,
            "hidden_act": "silu",
        }
        if self.rope_scaling is not None:
            obj["rope_scaling"] = dict(self.rope_scaling)
        if self.family == "mimo":
            obj["attention_bias"] = True
        if self.num_mtp_layers:
            obj["num_nextn_predict_layers"] = self.num_mtp_layers
        if self.is_eagle3:
            obj |= {"draft_vocab_size": self.draft_vocab_size, "target_hidden_size": self.target_hidden_size}
            if self.aux_layers is not None:
                obj["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(self.aux_layers)}
        return obj


def eagle3_config(target: ModelConfig, *, draft_vocab_size: int | None = None) -> ModelConfig:
    """The shape of an EAGLE3 drafter for `target`; draft vocabulary by default a quarter of its, at most 32000."""
    return dataclasses.replace(
        target,
        family="eagle3",
        num_layers=1,
        num_mtp_layers=0,
        tie_word_embeddings=False,
        draft_vocab_size=draft_vocab_size or min(32000, max(target.vocab_size // 4, 2)),
        target_hidden_size=target.hidden_size,
        aux_layers=None,
    )


_TINY = ModelConfig(
    family="mimo",
    vocab_size=509,  # odd: TP2 pads it
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
    num_mtp_layers=1,
)
_QWEN3_06B = ModelConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    max_positions=40960,
    tie_word_embeddings=True,
)
SHAPES: Mapping[str, ModelConfig] = {
    "tiny": _TINY,
    "tiny-llama": dataclasses.replace(_TINY, family="llama", num_mtp_layers=0),
    "tiny-qwen2": dataclasses.replace(_TINY, family="qwen2", num_mtp_layers=0, tie_word_embeddings=True),
    "tiny-qwen3": dataclasses.replace(_TINY, family="qwen3", num_mtp_layers=0, head_dim=32),
    "qwen3-0.6b": _QWEN3_06B,
}
"""Built-in shapes by name; `tiny` is MiMo-shaped (Qwen2 with one MTP layer)."""


def resolve_config(model: str | Path | Mapping[str, Any] | ModelConfig) -> ModelConfig:
    """A shape name, a folder with `config.json`, a parsed `config.json`, or a `ModelConfig`.

    Raises:
        ConfigError: neither a known shape nor a folder with a config.json that this engine can hold.
    """
    if isinstance(model, ModelConfig):
        return model
    if isinstance(model, Mapping):
        return ModelConfig.from_hf(model)
    if str(model) in SHAPES:
        return SHAPES[str(model)]
    path = Path(model) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{str(model)!r} is neither a shape ({', '.join(SHAPES)}) nor a folder with a config.json")
    return ModelConfig.from_hf(json.loads(path.read_text()))
