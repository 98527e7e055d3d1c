"""No models: importing this package puts the weightsync bridge into the importing process of SGLang.

Set `SGLANG_EXTERNAL_MODEL_PACKAGE=weightsync.engines.sglang.models` for releases without plugins (0.5.10); SGLang then
imports it in every process, and does not start if that fails. A package of models of your own imports it instead:

    import weightsync.engines.sglang.models
"""

import sys

from weightsync.engines.sglang.plugin import install

__all__: list[str] = []

# Outside of SGLang there is nothing to put it into: importing has no effect.
if "sglang" in sys.modules:
    install()
