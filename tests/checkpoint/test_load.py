"""checkpoint.load: a tiny llama GGUF written here, with known weights, and what must be refused."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoint
from model import Rope, abstract_params
from runtime import UserError

N, K, H, D, F, V, LAYERS = 4, 2, 8, 32, 64, 50, 2
G = N // K


def weights(seed=0):
    """Every tensor as published checkpoints hold it: [out, in], q and k in half-split order."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    out = {"token_embd.weight": normal(V, D), "output_norm.weight": normal(D)}
    for number in range(LAYERS):
        shapes = {
            "attn_norm": (D,), "attn_q": (N * H, D), "attn_k": (K * H, D), "attn_v": (K * H, D), "attn_output": (D, N * H),
            "ffn_norm": (D,), "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F),
        }  # fmt: skip
        out |= {f"blk.{number}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
    return out


def interleaved(weight):
    """Row order of q and k in GGUF files of this architecture: row 2i of a head is i of its first half, 2i + 1 of its second."""
    return np.concatenate([np.stack([head[: H // 2], head[H // 2 :]], axis=1).reshape(H, -1) for head in weight.reshape(-1, H, D)])


def write(path, tensors, architecture="llama", skip=(), packed=None, **metadata):
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "context_length": 128, "embedding_length": D, "block_count": LAYERS, "feed_forward_length": F,
        "attention.head_count": N, "attention.head_count_kv": K,
    } | metadata  # fmt: skip
    for key, value in values.items():
        if key not in skip:
            add = writer.add_string if isinstance(value, str) else writer.add_uint32
            add(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 5000.0)
    for name, (data, kind) in (packed or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    for name, tensor in tensors.items():
        if name in (packed or {}):
            continue
        writer.add_tensor(name, interleaved(tensor) if name.endswith(("attn_q.weight", "attn_k.weight")) else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


def test_the_config_is_what_the_metadata_say(path):
    config = checkpoint.load(write(path, weights())).config
    attention = config.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.rope) == (N, K, H, Rope(theta=5000.0, dim=H))
    assert (config.vocab_size, config.width, len(config.layers), config.layers[1].mlp.hidden) == (V, D, LAYERS, F)
    assert (config.norm_eps, config.context_length, config.tie_embeddings) == (1e-5, 128, True)


def test_every_weight_lands_in_its_place(path):
    source = weights()
    params = checkpoint.load(write(path, source)).params
    np.testing.assert_array_equal(params["embedding"], source["token_embd.weight"])
    np.testing.assert_array_equal(params["final_norm"]["scale"], source["output_norm.weight"])
    layer = params["layer_1"]
    for k in range(K):
        for g in range(G):
            q_rows = source["blk.1.attn_q.weight"].reshape(N, H, D)[k * G + g]
            np.testing.assert_array_equal(layer["attention"]["wqkv"][k, g], q_rows)
            out_columns = source["blk.1.attn_output.weight"].reshape(D, N, H)[:, k * G + g]
            np.testing.assert_array_equal(layer["attention"]["wo"][:, k, g], out_columns)
        np.testing.assert_array_equal(layer["attention"]["wqkv"][k, G], source["blk.1.attn_k.weight"].reshape(K, H, D)[k])
        np.testing.assert_array_equal(layer["attention"]["wqkv"][k, G + 1], source["blk.1.attn_v.weight"].reshape(K, H, D)[k])
    np.testing.assert_array_equal(layer["mlp"]["w_gate_up"][0], source["blk.1.ffn_gate.weight"])
    np.testing.assert_array_equal(layer["mlp"]["w_gate_up"][1], source["blk.1.ffn_up.weight"])
    np.testing.assert_array_equal(layer["mlp"]["w_down"], source["blk.1.ffn_down.weight"])
    np.testing.assert_array_equal(layer["attention_norm"]["scale"], source["blk.1.attn_norm.weight"])
    np.testing.assert_array_equal(layer["mlp_norm"]["scale"], source["blk.1.ffn_norm.weight"])


def test_an_untied_head_is_a_weight_of_its_own(path):
    head = np.random.default_rng(1).normal(size=(V, D)).astype(np.float32)
    loaded = checkpoint.load(write(path, weights() | {"output.weight": head}))
    assert not loaded.config.tie_embeddings
    np.testing.assert_array_equal(loaded.params["head"], head)


def test_the_tree_is_the_abstract_tree_in_the_dtype_asked_for(path):
    loaded = checkpoint.load(write(path, weights()), jnp.bfloat16)
    promised = jax.tree.map(lambda box: box.value.shape, abstract_params(loaded.config), is_leaf=lambda leaf: hasattr(leaf, "names"))
    assert promised == jax.tree.map(lambda leaf: leaf.shape, loaded.params)
    for leaf in jax.tree.leaves(loaded.params):
        assert leaf.dtype == (jnp.float32 if leaf.ndim == 1 else jnp.bfloat16)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.F16])
def test_quantized_tensors_load_as_the_values_they_stand_for(path, kind):
    name = "blk.0.ffn_down.weight"
    packed = gguf.quants.quantize(weights()[name], kind)
    params = checkpoint.load(write(path, weights(), packed={name: (packed, kind)})).params
    np.testing.assert_array_equal(params["layer_0"]["mlp"]["w_down"], gguf.quants.dequantize(packed, kind))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'; supported: deepseek2, gemma2,"),
        ({"rope.scaling.type": "dynamic"}, "rotary scaling 'dynamic' is not supported"),
        ({"attention.head_count_kv": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"skip": ("block_count",)}, "no metadata 'llama.block_count'"),
        ({"block_count": 3}, r"9 tensors are missing: model.layers.2.input_layernorm.weight \(32,\), .* and 1 more, up to"),
        ({"block_count": 1}, r"9 tensors have no place in the model: model.layers.1.input_layernorm.weight \(32,\)"),
        ({"feed_forward_length": 65}, r"gate_proj.weight has shape \(64, 32\) instead of \(65, 32\)"),
        ({"attention.head_count": 8}, r"4 tensors have another shape .*k_proj.weight has shape \(16, 32\) instead of \(8, 32\)"),
    ],
)
def test_what_the_file_asks_for_and_is_not_there_is_refused_by_name(path, change, message):
    with pytest.raises(UserError, match=message):
        checkpoint.load(write(path, weights(), **change))


def test_a_tensor_with_no_place_is_not_dropped(path):
    with pytest.raises(UserError, match=r"1 tensors have no place in the model: model.layers.0.self_attn.q_proj.bias \(32,\)"):
        checkpoint.load(write(path, weights() | {"blk.0.attn_q.bias": np.zeros(N * H, np.float32).reshape(N * H)}))
