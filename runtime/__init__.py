"""Floor 0: errors, platform set-up, the compile ledger and the compilation cache."""

from runtime.errors import UserError
from runtime.ledger import LEDGER, Compile, Program, UnplannedCompile, program
from runtime.platform import DTYPES, enable_compilation_cache, platform, resolve_dtype

__all__ = [
    "DTYPES",
    "LEDGER",
    "Compile",
    "Program",
    "UnplannedCompile",
    "UserError",
    "enable_compilation_cache",
    "platform",
    "program",
    "resolve_dtype",
]
