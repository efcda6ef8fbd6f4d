"""The compile ledger: what was built, for whom, and that nothing was built unasked."""

import inspect
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from runtime import LEDGER, UnplannedCompile, program


def new_entries(mark):
    return LEDGER.entries[mark:]


@pytest.fixture
def mark():
    return len(LEDGER.entries)


@pytest.fixture
def scale():
    """A program of its own for each test: nothing is compiled yet."""

    @program(static=("times",), weights=("params",))
    def scale(params, x, times=1):
        """x, scaled."""
        return x * params["w"].sum() * times

    return scale


PARAMS = {"w": np.ones((5, 7), np.float32)}
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_a_program_is_entered_once_with_its_name_its_shapes_and_who_asked(scale, mark):
    np.testing.assert_array_equal(scale(PARAMS, X), X * 35)
    [entry] = new_entries(mark)
    assert (entry.name, entry.shapes, entry.cached, entry.program) == ("scale", "float32[2,3] times=1", False, True)
    assert entry.asked_by.startswith("test_ledger.py:")
    assert 0 < entry.seconds < 60
    assert LEDGER.programs(mark) == [entry] and LEDGER.seconds(mark) == entry.seconds
    scale(PARAMS, X + 1)
    assert new_entries(mark) == [entry]


def test_weights_are_left_out_of_the_shapes_however_they_are_given(scale, mark):
    scale(x=X, params=PARAMS)
    assert [entry.shapes for entry in new_entries(mark)] == ["float32[2,3] times=1"]


def test_a_new_shape_and_a_new_static_value_are_new_executables(scale, mark):
    for x, times in ((X, 1), (X[:1], 1), (X, 2), (X, 2), (X[:1], 1)):
        np.testing.assert_array_equal(scale(PARAMS, x, times=times), x * 35 * times)
    assert [entry.shapes for entry in new_entries(mark)] == ["float32[2,3] times=1", "float32[1,3] times=1", "float32[2,3] times=2"]


def test_many_shapes_are_cut_short(mark):
    @program()
    def total(arrays):
        return sum(array.sum() for array in arrays)

    total([np.ones(size, np.int32) for size in range(1, 21)])
    [entry] = new_entries(mark)
    assert entry.shapes.split() == [*(f"int32[{size}]" for size in range(1, 13)), "..."]


def test_a_program_keeps_its_functions_name_and_words_and_runs_without_jit(scale, mark):
    assert (scale.name, scale.__doc__) == ("scale", "x, scaled.")
    np.testing.assert_array_equal(scale.function(PARAMS, X, 3), X * 105)
    assert not LEDGER.programs(mark)


def test_a_program_inside_a_program_is_part_of_the_outer_one(scale, mark):
    @program(weights=("params",))
    def outer(params, x):
        return scale(params, x) + 1

    np.testing.assert_array_equal(outer(PARAMS, X), X * 35 + 1)
    assert [(entry.name, entry.program) for entry in new_entries(mark)] == [("outer", True)]


def test_an_operation_outside_any_program_is_told_apart(mark):
    jnp.sin(np.ones((3, 1, 4), np.float32))  # a shape that nothing else has
    assert new_entries(mark) and not LEDGER.programs(mark)
    assert {entry.shapes for entry in new_entries(mark)} == {""}


def test_a_program_of_another_thread_has_its_own_name(scale, mark):
    @program()
    def outer(x):
        thread = threading.Thread(target=scale, args=(PARAMS, X))  # compiles while this one is being traced
        thread.start()
        thread.join()
        return x + 1

    outer(X)
    assert [(entry.name, entry.shapes) for entry in new_entries(mark)] == [("scale", "float32[2,3] times=1"), ("outer", "float32[2,3]")]


def test_building_ahead_leaves_nothing_to_compile(scale, mark):
    scale.build({"w": jax.ShapeDtypeStruct((5, 7), np.float32)}, jax.ShapeDtypeStruct((2, 3), np.float32), times=4)
    [entry] = new_entries(mark)
    assert (entry.name, entry.shapes) == ("scale", "float32[2,3] times=4")
    with LEDGER.sealed():
        np.testing.assert_array_equal(scale(PARAMS, X, times=4), X * 140)


def test_a_donated_argument_can_not_be_used_again():
    @program(donated=("x",))
    def add_one(x):
        return x + 1

    x = jnp.ones((4,))
    np.testing.assert_array_equal(add_one(x), 2 * np.ones(4))
    assert x.is_deleted()


def test_a_sealed_ledger_lets_calls_pass_that_compile_nothing(scale, mark):
    scale(PARAMS, X)
    with LEDGER.sealed():
        scale(PARAMS, X + 5)
    assert len(new_entries(mark)) == 1


def test_a_compile_in_a_sealed_ledger_is_an_error_that_names_it(scale):
    before = len(LEDGER.unplanned)
    with pytest.raises(UnplannedCompile, match=r"^scale\(float32\[2,3\] times=1\) asked by test_ledger\.py:\d+$"), LEDGER.sealed():
        np.testing.assert_array_equal(scale(PARAMS, X), X * 35)  # the work itself is done
    assert [entry.name for entry in LEDGER.unplanned[before:]] == ["scale"]
    scale(PARAMS, X[:1])  # the seal is off
    assert len(LEDGER.unplanned) == before + 1


def test_a_sealed_ledger_may_warn_and_count_instead(scale, caplog):
    before = len(LEDGER.unplanned)
    with caplog.at_level(logging.WARNING, "diptych"), LEDGER.sealed("warn"):
        scale(PARAMS, X)
    assert len(LEDGER.unplanned) == before + 1
    assert [record.getMessage().split(" asked by ")[0] for record in caplog.records] == ["unplanned compile: scale(float32[2,3] times=1)"]


def test_an_unknown_way_to_seal_is_an_error():
    with pytest.raises(ValueError, match="on_compile 'log' is not known; use 'raise' or 'warn'"), LEDGER.sealed("log"):
        pass


def test_a_seal_inside_another_ends_alone(scale):
    with pytest.raises(UnplannedCompile, match=r"^scale\(float32\[2,3\] times=1\)"), LEDGER.sealed():
        with LEDGER.sealed():
            pass
        scale(PARAMS, X)  # still sealed


def test_what_a_warning_seal_counted_is_an_error_for_the_one_around_it(scale):
    with pytest.raises(UnplannedCompile, match="scale"), LEDGER.sealed():
        with LEDGER.sealed("warn"):
            scale(PARAMS, X)
        scale(PARAMS, X)


def test_an_error_inside_a_seal_is_the_one_that_is_seen(scale):
    with pytest.raises(KeyError, match="mine"), LEDGER.sealed():
        scale(PARAMS, X)
        raise KeyError("mine")
    scale(PARAMS, X[:1])  # and the seal is off


def test_a_call_that_fails_leaves_no_trace_in_later_names(scale, mark):
    with pytest.raises(KeyError):
        scale({}, X)
    jnp.cos(np.ones((3, 1, 5), np.float32))
    assert new_entries(mark) and not LEDGER.programs(mark)


@pytest.fixture
def cache_on_disk(tmp_path):
    """JAX's compilation cache in a new folder, and afterwards as it was."""
    wanted = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    compilation_cache.reset_cache()
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_an_executable_from_the_cache_on_disk_says_so(cache_on_disk, mark):
    def make():
        @program()
        def triple(x):
            return x * 3

        return triple

    for _ in range(2):  # two programs with the same text
        np.testing.assert_array_equal(make()(X), X * 3)
    assert [(entry.name, entry.cached) for entry in new_entries(mark)] == [("triple", False), ("triple", True)]
    assert list(cache_on_disk.iterdir())


def test_however_a_call_is_spelled_it_is_one_executable(scale, mark):
    scale(PARAMS, X, times=3)
    scale(PARAMS, x=X, times=3)
    scale(params=PARAMS, x=X, times=3)
    scale.build(x=X, params=PARAMS, times=3)
    assert len(new_entries(mark)) == 1


@pytest.mark.parametrize("name", ["platform", "program", "LEDGER", "resolve_dtype"])
def test_a_name_of_the_room_is_never_one_of_its_files(name):
    import runtime
    import runtime.devices
    import runtime.ledger

    assert not inspect.ismodule(getattr(runtime, name))
