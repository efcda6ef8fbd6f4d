"""`--task=quantize`: what its flags mean, and the folder that it writes."""

import jax
import numpy as np
import pytest

import sampling
from kernels import QuantArray, cpu
from quantization import Scheme, quantize
from runtime import UserError
from sampling.pack import UNFINISHED, pack_model, scheme_of


def test_flags_name_a_scheme():
    assert scheme_of(4, None, True) == Scheme("uint4", 64)
    assert scheme_of(3, 32, False) == Scheme("uint3", 32, symmetric=False)
    assert scheme_of(8, None, True) == Scheme("int8") == scheme_of(8, 0, True)
    assert scheme_of(4, 0, True) == Scheme("uint4", None)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "line"),
    [
        (5, None, True, "--bits=5 is not supported: use 3, 4 or 8"),
        (4, 48, True, "--group=48 is no multiple of 32: use 32, 64 or 128, or 0 for whole rows"),
        (4, -32, True, "--group=-32 is no multiple of 32"),
        (8, None, False, "--nosymmetric is of fewer bits"),
    ],
)
def test_flags_that_name_none_are_refused(bits, group, symmetric, line):
    with pytest.raises(UserError, match=line):
        scheme_of(bits, group, symmetric)


def test_the_folder_is_loaded_packed_and_nothing_unfinished_is_left(lm, tmp_path):
    scheme, told = Scheme("uint4", 32), []
    done = pack_model(lm, tmp_path / "out", "rtn", scheme, progress=lambda *each: told.append(each[:2]))
    assert told == [(1, 2), (2, 2)] and not (tmp_path / f"out{UNFINISHED}").exists()
    again = sampling.load(tmp_path / "out", kernels="xla")
    assert jax.tree.structure(again.params) == jax.tree.structure(done.params)
    jax.tree.map(np.testing.assert_array_equal, again.params, done.params)
    assert again.params["embedding"].code == "int8"
    want = quantize(lm.params["layer_1"]["mlp"]["w_down"], scheme)
    jax.tree.map(np.testing.assert_array_equal, again.params["layer_1"]["mlp"]["w_down"], want)
    wide = sampling.load(tmp_path / "out", weights="f32", compute="f32")
    assert not any(isinstance(leaf, QuantArray) for leaf in jax.tree.leaves(wide.params, is_leaf=lambda leaf: isinstance(leaf, QuantArray)))
    chosen = sampling.load(tmp_path / "out", activations="int16" if cpu.reason() is None else "auto")  # whatever kernels run here
    for each in (wide, chosen):
        (first,), (other,) = (sampling.generate(lm, ["abc"], raw=True, max_new_tokens=8, ignore_eos=True) for lm in (again, each))
        assert first.tokens == other.tokens


def test_the_head_may_stay_as_it_is(lm, tmp_path):
    done = pack_model(lm, tmp_path / "out", "rtn", Scheme("int8"), head="f32")
    np.testing.assert_array_equal(done.params["embedding"], lm.params["embedding"])


def test_a_short_text_is_refused_before_anything_is_written(lm, tmp_path):
    (tmp_path / "text").write_text("abc")
    with pytest.raises(UserError, match=r"calibration text of .*: give a longer text, or --method=rtn"):
        pack_model(lm, tmp_path / "out", "gptq", Scheme("uint4", 32), calibration=str(tmp_path / "text"))
    assert list(tmp_path.iterdir()) == [tmp_path / "text"]
