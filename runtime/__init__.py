"""Floor 0: errors, files, platform set-up, the compile ledger and the compilation cache."""

import importlib
from typing import Any

from runtime.errors import UserError

_MODULES = {
    "LEDGER": "runtime.ledger",
    "Compile": "runtime.ledger",
    "Program": "runtime.ledger",
    "UnplannedCompile": "runtime.ledger",
    "program": "runtime.ledger",
    "DTYPES": "runtime.devices",
    "KV_DTYPES": "runtime.devices",
    "cpu_multiplies_bf16": "runtime.devices",
    "enable_compilation_cache": "runtime.devices",
    "use_huge_pages": "runtime.huge_pages",
    "platform": "runtime.devices",
    "resolve_dtype": "runtime.devices",
    "runs_on_cpu": "runtime.virtual",
    "virtual_devices": "runtime.virtual",
}

__all__ = ["UserError", *_MODULES]


def __getattr__(name: str) -> Any:
    """Imports JAX, which takes a second, only when something that needs it is asked for: an error need not wait for it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULES[name])
    globals().update({each: getattr(module, each) for each, home in _MODULES.items() if home == _MODULES[name]})
    return globals()[name]
