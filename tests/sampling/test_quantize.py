"""sampling.quantize_model: every layer packed, by every method, over what the packed layers before it give; and going on after a stop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kv
from kernels import is_packed
from model import MLAConfig, MLPConfig, MoEConfig, Rope, RouterConfig, Transformer, init_params, prefill
from quantization import Scheme, gptq, quantize
from runtime import UserError
from sampling import quantize as driver
from sampling import quantize_model

INT4 = Scheme("uint4", group=32)
MATRICES = {"attention/wqkv": (2, 4, 8, 32), "attention/wo": (32, 32), "mlp/w_gate_up": (2, 64, 32), "mlp/w_down": (32, 64)}
SHORT = {"windows": 4, "window": 32}
GPTQ = pytest.param("gptq", marks=pytest.mark.slow)
LEARNED = pytest.param("learned", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def text(lm):
    return np.random.default_rng(3).integers(0, lm.config.vocab_size, 150).tolist()


def leaves(tree):
    return dict(jax.tree_util.tree_leaves_with_path(tree))


def assert_same(one, other):
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other[path]), err_msg=str(path))


def streams(lm, params, windows):
    """[n, T, D] before each layer and after the last, by the model itself over no cache."""
    n = len(windows)
    step = kv.Step(rows=None, start=jnp.zeros((n,), jnp.int32), count=jnp.full((n,), windows.shape[1], jnp.int32))
    _, state = lm.model.apply({"params": params}, windows, step, kv.fresh(lm.config, n), "all", mutable=["intermediates"])
    found = state["intermediates"]
    return [jnp.take(params["embedding"], windows, axis=0), *(found[f"stream_{i}"][0] for i in range(len(lm.config.layers)))]


def rms_norm(x):  # of a norm whose scale is 1
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("method", [*(m for m in driver.METHODS if m not in ("gptq", "learned")), GPTQ, LEARNED])
def test_all_matrices_of_all_layers_are_packed_and_the_model_runs_with_them(lm, text, method):
    packed = quantize_model(lm, method, INT4, text, steps=4, **SHORT)
    for number in range(2):
        flat = driver._flat(packed[f"layer_{number}"])
        assert {path: leaf.shape for path, leaf in flat.items() if is_packed(leaf)} == MATRICES
    for name in ("embedding", "head"):
        assert packed[name] is lm.params[name]
    tokens = np.asarray(text[:64], np.int32).reshape(4, 16)
    logits, exact = (prefill(lm.model, p, kv.fresh(lm.config, 4), tokens, np.full(4, 16), logits="all")[0] for p in (packed, lm.params))
    assert 0.5 < np.corrcoef(np.ravel(logits), np.ravel(exact))[0, 1] < 0.9999


def test_rtn_is_rounding_to_the_nearest_and_needs_no_text(lm):
    packed = quantize_model(lm, "rtn", INT4)
    layer = lm.params["layer_1"]
    assert_same(packed["layer_1"]["mlp"]["w_down"], quantize(layer["mlp"]["w_down"], INT4))
    assert_same(packed["layer_1"]["attention"]["wo"], quantize(layer["attention"]["wo"].reshape(32, 32), INT4))


def test_a_layer_is_rounded_by_what_the_packed_layers_before_it_give(lm, text):
    windows = driver.calibration_windows(lm, text, **SHORT)
    packed = quantize_model(lm, "gptq", INT4, text, **SHORT)
    inputs = rms_norm(streams(lm, packed, windows)[1]).reshape(-1, 32)  # of the second layer, after its norm
    seen = driver._observe(*observed(lm, 1), jnp.asarray(streams(lm, packed, windows)[1]))["attention/wqkv"]
    np.testing.assert_allclose(seen[0], inputs.T @ inputs, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(seen[1], np.abs(inputs).mean(0), rtol=1e-4)
    expected = gptq(lm.params["layer_1"]["attention"]["wqkv"], jnp.asarray(inputs.T @ inputs, jnp.float32), INT4)
    same = np.mean(np.asarray(expected.planes[0]) == np.asarray(packed["layer_1"]["attention"]["wqkv"].planes[0]))
    others = quantize_model(lm, "rtn", INT4)["layer_1"]["attention"]["wqkv"]
    assert same > 0.99 > 0.9 > np.mean(np.asarray(others.planes[0]) == np.asarray(packed["layer_1"]["attention"]["wqkv"].planes[0]))


def observed(lm, number):
    plan = driver._plan(lm.config, number, "gptq", INT4)
    layer = driver._flat(lm.params[f"layer_{number}"])
    return plan.run, tuple(path for path, _ in plan.matrices), layer


def test_every_matrix_is_seen_with_its_own_inputs(lm, text):
    windows = driver.calibration_windows(lm, text, **SHORT)
    stream = streams(lm, lm.params, windows)[0]
    seen = driver._observe(*observed(lm, 0), stream)
    assert {path: hessian.shape[0] for path, (hessian, _) in seen.items()} == {path: shape[-1] for path, shape in MATRICES.items()}
    w = np.asarray(lm.params["layer_0"]["attention"]["wo"], np.float64).reshape(32, 32)
    after = streams(lm, lm.params | {"layer_0": no_mlp(lm.params["layer_0"])}, windows)[1]  # attention's outputs, added to the stream
    out = np.asarray(after - stream, np.float64).reshape(-1, 32)
    np.testing.assert_allclose(w @ np.asarray(seen["attention/wo"][0]) @ w.T, out.T @ out, rtol=1e-3, atol=1e-2)


def no_mlp(layer):
    return layer | {"mlp": layer["mlp"] | {"w_down": jnp.zeros_like(layer["mlp"]["w_down"])}}


@pytest.mark.parametrize("method", ["gptq", LEARNED])
def test_better_than_the_nearest_at_predicting_like_the_model(lm, text, method):
    def distance(params):
        tokens = np.asarray(text[:128], np.int32).reshape(4, 32)
        logits, exact = (prefill(lm.model, p, kv.fresh(lm.config, 4), tokens, np.full(4, 32), logits="all")[0] for p in (params, lm.params))
        return float(jnp.mean((logits - exact) ** 2))

    found = quantize_model(lm, method, INT4, text, windows=4, window=32, steps=40)
    assert distance(found) < 0.9 * distance(quantize_model(lm, "rtn", INT4))


@pytest.mark.parametrize("method", ["gptq", LEARNED])
def test_a_run_goes_on_where_it_stopped_bit_for_bit(lm, text, tmp_path, method):
    more = dict(SHORT, steps=4, act_order=True)
    whole = quantize_model(lm, method, INT4, text, **more)

    class Stopped(Exception):
        pass

    def stop(done, total, seconds_left):
        raise Stopped

    with pytest.raises(Stopped):
        quantize_model(lm, method, INT4, text, out_state=tmp_path / "state", progress=stop, **more)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["layer_000.npz"]
    told = []
    resumed = quantize_model(lm, method, INT4, text, out_state=tmp_path / "state", progress=lambda *told_: told.append(told_[:2]), **more)
    assert told == [(1, 2), (2, 2)]
    assert_same(resumed, whole)
    assert resumed["layer_0"]["mlp"]["w_down"].code == "uint4"
    assert_same(quantize_model(lm, method, INT4, text, out_state=tmp_path / "state", **more), whole)  # all of it read


def test_a_finished_layer_is_not_made_again(lm, text, tmp_path, monkeypatch):
    quantize_model(lm, "awq", INT4, text, out_state=tmp_path, **SHORT)
    monkeypatch.setattr(driver, "_round_layer", lambda *args: pytest.fail("a layer was rounded again"))
    quantize_model(lm, "awq", INT4, text, out_state=tmp_path, **SHORT)


@pytest.mark.parametrize("other", ["scheme", "text", "weights"])
def test_the_state_of_another_run_is_refused(lm, text, tmp_path, other):
    quantize_model(lm, "awq", INT4, text, out_state=tmp_path, **SHORT)
    scheme = dataclasses.replace(INT4, symmetric=False) if other == "scheme" else INT4
    tokens = [text[0] ^ 1, *text[1:]] if other == "text" else text
    changed = dataclasses.replace(lm, params=lm.params | {"final_norm": {"scale": jnp.full((32,), 2.0)}}) if other == "weights" else lm
    with pytest.raises(UserError, match=r"layer_000.npz is of another model, text, method or scheme than this run's: give another folder"):
        quantize_model(changed, "awq", scheme, tokens, out_state=tmp_path, **SHORT)


def test_a_damaged_state_is_refused(lm, tmp_path):
    quantize_model(lm, "rtn", INT4, out_state=tmp_path)
    data = (tmp_path / "layer_001.npz").read_bytes()
    (tmp_path / "layer_001.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"layer_001.npz can't be read .*: delete it"):
        quantize_model(lm, "rtn", INT4, out_state=tmp_path)


@pytest.mark.parametrize("code", ["int8", "float8", "float4", "uint3"])
def test_every_code_survives_the_state(lm, tmp_path, code):
    scheme = Scheme(code, group=32, symmetric=code != "uint3")
    assert_same(quantize_model(lm, "rtn", scheme, out_state=tmp_path), quantize_model(lm, "rtn", scheme))
    assert_same(quantize_model(lm, "rtn", scheme, out_state=tmp_path), quantize_model(lm, "rtn", scheme))


def test_windows_are_spread_over_the_text_and_begin_with_bos_where_the_model_wants_one(lm):
    text = list(range(90))
    np.testing.assert_array_equal(driver.calibration_windows(lm, text, 3, 10)[:, 0], [0, 40, 80])
    wants_bos = dataclasses.replace(lm, tokenizer=dataclasses.replace(lm.tokenizer, adds_bos=True, bos_id=94))
    found = driver.calibration_windows(wants_bos, text, 9, 11)
    np.testing.assert_array_equal(found, np.concatenate([np.full((9, 1), 94), np.arange(90).reshape(9, 10)], axis=1))


def other_model(lm, attention=None, mlp=None):
    layer = lm.config.layers[0]
    layer = dataclasses.replace(layer, attention=attention or layer.attention, mlp=mlp or layer.mlp)
    config = dataclasses.replace(lm.config, layers=(layer,) * 2)
    return dataclasses.replace(lm, model=Transformer(config))


@pytest.mark.slow
def test_latent_attention_is_packed_but_for_what_the_cache_multiplies_with(lm, text):
    mla = MLAConfig(num_heads=2, q_rank=32, kv_rank=32, nope_dim=16, rope=Rope(theta=1e4, dim=16), value_dim=16, scale=0.2)
    latent = other_model(lm, attention=mla)
    latent = dataclasses.replace(latent, params=init_params(latent.config, seed=2))
    flat = driver._flat(quantize_model(latent, "gptq", INT4, text, **SHORT)["layer_1"])
    packed = {path for path, leaf in flat.items() if is_packed(leaf)}
    assert packed == {*(f"attention/{name}" for name in ("wq_a", "wq", "wkv_a", "wo")), "mlp/w_gate_up", "mlp/w_down"}
    assert flat["attention/wo"].shape == (32, 32)  # [D, N * Hv]


@pytest.mark.slow
def test_experts_are_rounded_to_the_nearest(lm):
    mixture = other_model(lm, mlp=MoEConfig(expert=MLPConfig(hidden=32), router=RouterConfig(num_experts=4, top_k=2)))
    mixture = dataclasses.replace(mixture, params=init_params(mixture.config, seed=2))
    layer = quantize_model(mixture, "rtn", INT4)["layer_0"]["mlp"]
    assert_same(layer["w_down"], quantize(mixture.params["layer_0"]["mlp"]["w_down"], INT4))
    assert layer["w_gate_up"].shape == (4, 2, 32, 32) and not is_packed(layer["w_router"])


def test_errors_name_the_value_the_limit_and_the_remedy(lm, text):
    with pytest.raises(UserError, match=r"--method=magic is not known: use one of rtn, awq, gptq, learned"):
        quantize_model(lm, "magic", INT4, text)
    with pytest.raises(UserError, match=r"windows of 512 tokens are wanted of a calibration text of 150: give a longer text"):
        quantize_model(lm, "awq", INT4, text)
    with pytest.raises(UserError, match=r"a group of 64 does not divide the 32 inputs of layer 0's attention/wo: give one of 32"):
        quantize_model(lm, "rtn", Scheme("uint4", group=64))
    with pytest.raises(UserError, match=r"act_order orders GPTQ's columns, .* use --method=gptq or learned"):
        quantize_model(lm, "rtn", INT4, act_order=True)
    with pytest.raises(UserError, match=r"the rounding of float4 is not learned, .* or --method=gptq"):
        quantize_model(lm, "learned", Scheme("float4", group=32), text)
    with pytest.raises(UserError, match="is packed already"):
        quantize_model(dataclasses.replace(lm, params=quantize_model(lm, "rtn", INT4)), "rtn", INT4)
    with pytest.raises(UserError, match="load it on one device with layer_loop='unrolled'"):
        quantize_model(dataclasses.replace(lm, model=Transformer(lm.config, layer_loop="scan")), "rtn", INT4)
    experts = MoEConfig(expert=MLPConfig(hidden=32), router=RouterConfig(num_experts=4, top_k=2))
    with pytest.raises(UserError, match=r"layer 0 is a mixture of experts, .* use --method=rtn"):
        quantize_model(other_model(lm, mlp=experts), "gptq", INT4, text, **SHORT)
