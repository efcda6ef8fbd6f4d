"""The compile ledger: every executable that this process builds, who asked for it and what it cost.

A compile in the middle of serving is a pause of seconds that no profile of the model shows. JAX reports each
compile to `jax.monitoring`; the ledger listens, adds the program's name and shapes, and can be sealed: while it is
sealed a compile is an error (tests) or a counted warning (production).
"""

import contextlib
import dataclasses
import functools
import inspect
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.monitoring

from runtime.devices import platform

_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass(frozen=True)
class Compile:
    """One executable.

    Attributes:
      name: the program's name, or JAX's own name for an operation outside any program.
      shapes: the arguments that are not weights, as `int32[1,32] float32[30,1,3,512,64] steps=8`; empty outside a program.
      seconds: wall time of what the compile held up: for a program the whole call that built it (which returns before its result is
        there), for a single operation tracing, lowering and compiling.
      cached: whether the executable came from the compilation cache on disk.
      asked_by: `file:line` of the nearest caller outside JAX and this file.
      program: whether it is one of ours (built by `program`) and not a single operation outside jit.
    """

    name: str
    shapes: str
    seconds: float
    cached: bool
    asked_by: str
    program: bool


class UnplannedCompile(RuntimeError):
    """An executable was built while the ledger was sealed with `on_compile="raise"`."""


class Ledger:
    """Collects `Compile` entries of the whole process; one instance, `runtime.LEDGER`, since compiles are process-wide."""

    def __init__(self):
        self.entries: list[Compile] = []
        self.unplanned: list[Compile] = []
        self._calls = threading.local()
        self._sealed: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def seconds(self, since: int = 0) -> float:
        """Seconds spent compiling since entry number `since`."""
        return sum(entry.seconds for entry in self.entries[since:])

    def programs(self, since: int = 0) -> list[Compile]:
        """The entries since number `since` that are programs of ours."""
        return [entry for entry in self.entries[since:] if entry.program]

    @contextlib.contextmanager
    def sealed(self, on_compile: str = "raise") -> Iterator[None]:
        """While open, no executable may be built.

        Args:
          on_compile: "raise" raises `UnplannedCompile` when the block ends; "warn" logs each and counts it in `unplanned`.
        """
        if on_compile not in ("raise", "warn"):
            raise ValueError(f"on_compile {on_compile!r} is not known; use 'raise' or 'warn'")
        before = len(self.unplanned)
        self._sealed.append(on_compile)
        try:
            yield
        finally:
            self._sealed.pop()
        late = self.unplanned[before:]
        if late and on_compile == "raise":
            raise UnplannedCompile("; ".join(f"{entry.name}({entry.shapes}) asked by {entry.asked_by}" for entry in late))

    @contextlib.contextmanager
    def _call(self, name: str, arguments: tuple) -> Iterator[None]:
        stack = self._calls.__dict__.setdefault("stack", [])
        stack.append((name, arguments))
        began = time.perf_counter()
        self._calls.entries = []
        try:
            yield
        finally:
            stack.pop()
            mine = self._calls.entries
            if mine and not stack:
                # JAX's own figures leave out hashing the program and loading the executable, a third of the whole on a cache hit.
                rest = sum(entry.seconds for entry in mine[:-1])
                at = max(index for index, entry in enumerate(self.entries) if entry is mine[-1])  # other threads append as well
                self.entries[at] = dataclasses.replace(mine[-1], seconds=time.perf_counter() - began - rest)

    def _on_event(self, event: str, **_: Any) -> None:
        if event == _CACHE_HIT:
            self._calls.hit = True

    def _on_duration(self, event: str, seconds: float, fun_name: str = "", **_: Any) -> None:
        if event in (_TRACE, _LOWER):
            # A nested jit is traced inside its caller: its seconds are in the caller's, so keep the last (outermost) of each.
            self._calls.__dict__.setdefault("parts", {})[event] = seconds
        if event != _COMPILE:
            return
        stack = self._calls.__dict__.get("stack") or []
        name, arguments = stack[-1] if stack else (fun_name, ())
        entry = Compile(
            name=name,
            shapes=_describe(arguments),
            seconds=seconds + sum(self._calls.__dict__.pop("parts", {}).values()),
            cached=self._calls.__dict__.pop("hit", False),
            asked_by=_caller(),
            program=bool(stack),
        )
        self.entries.append(entry)
        self._calls.__dict__.setdefault("entries", []).append(entry)
        if self._sealed:
            self.unplanned.append(entry)
            logging.getLogger("diptych").warning("unplanned compile: %s(%s) asked by %s", entry.name, entry.shapes, entry.asked_by)


LEDGER = Ledger()


def _describe(arguments: tuple) -> str:
    leaves = jax.tree.leaves(arguments)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    shapes = [f"{leaf.dtype}{list(leaf.shape)}".replace(" ", "") for leaf in arrays[:12]]
    return " ".join([*shapes, *["..."][: len(arrays) > 12], *(leaf for leaf in leaves if isinstance(leaf, str))])


def _caller() -> str:
    for frame in reversed(traceback.extract_stack()):
        if "/jax/" not in frame.filename and "contextlib" not in frame.filename and frame.filename != __file__:
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return "unknown"


class Program:
    """A jitted function that the ledger knows by name. Call it like the function; `.function` is the function without jit."""

    def __init__(self, function: Callable, static: Sequence[str], donated: Sequence[str], weights: Sequence[str]):
        self.function = function
        self.name = function.__name__
        self._weights = frozenset(weights)
        self._static = frozenset(static)
        self._jit = functools.partial(jax.jit, function, static_argnames=tuple(static), donate_argnames=tuple(donated))
        self._signature = inspect.signature(function)
        self.__doc__ = function.__doc__

    @functools.cached_property
    def _jitted(self) -> Callable:
        # LLVM's last passes find nothing in programs whose time goes into dots: they cost a third of the compile and save no time.
        return self._jit(compiler_options={"xla_backend_optimization_level": 1} if platform() == "cpu" else None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._arguments(args, kwargs)
        shown = self._shown(arguments)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(shown)):
            return self.function(*arguments.values())  # inside somebody's jit: a part of that program
        with LEDGER._call(self.name, shown):
            return self._jitted(*arguments.values())

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Compiles for these arguments (arrays, or `jax.ShapeDtypeStruct`s) without running: a later call compiles nothing."""
        arguments = self._arguments(args, kwargs)
        with LEDGER._call(self.name, self._shown(arguments)):
            self._jitted.lower(*arguments.values()).compile()

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """`jax.jit(...).lower`: for ahead-of-time compiles for any platform; arguments may be `jax.ShapeDtypeStruct`s."""
        return self._jit().lower(*self._arguments(args, kwargs).values())

    def _arguments(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """All arguments by name and in order, defaults included: JAX compiles once more for each way of spelling a call."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _shown(self, arguments: dict[str, Any]) -> tuple:
        named = arguments.items()
        settings = [f"{name}={value}" for name, value in named if name in self._static and isinstance(value, (int, str))]
        return (*(value for name, value in named if name not in self._weights | self._static), *settings)


def program(*, static: Sequence[str] = (), donated: Sequence[str] = (), weights: Sequence[str] = ()) -> Callable[[Callable], Program]:
    """Decorator: `jax.jit` with a name in the ledger.

    Args:
      static: arguments that are compiled in; each new value is a new executable. Everything else is traced.
      donated: arguments whose buffers the call may reuse; the caller must not touch them again.
      weights: arguments that the ledger leaves out of `shapes` (the model's parameters would drown the rest).
    """
    return lambda function: Program(function, static, donated, weights)
