"""The sampler as the compilers of a TPU and a GPU see it: no order of the vocabulary, and few temporaries."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling.options import BIAS_SLOTS, SamplingOptions, SamplingParams
from sampling.sample import sample

pytestmark = pytest.mark.slow

BATCH, VOCABULARY = 32, 262_144


@pytest.fixture(scope="module")
def tpu(chip):
    pytest.importorskip("libtpu", reason="the TPU's compiler is not installed: pip install -e '.[tpu]'")
    return chip


@pytest.fixture(scope="module")
def gpu():
    pytest.importorskip("jax_plugins.xla_cuda12", reason="the GPU's compiler is not installed: pip install -e '.[gpu-compiler]'")
    from jax.experimental import topologies

    from tests.aot.hopper import H200

    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


@pytest.mark.parametrize(("platform", "most"), [("tpu", 3.1), ("gpu", 5.1)])  # logits after each step that changes them
def test_the_vocabulary_is_not_sorted_and_temporaries_are_a_few_times_the_logits(platform, most, request, capsys):
    device = request.getfixturevalue(platform)

    def on_device(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)

    wide = (BATCH, VOCABULARY)
    params = SamplingParams.stack([SamplingOptions(temperature=1.0, top_k=40, top_p=0.9, min_p=0.1, seed=0)] * BATCH, ())
    arguments = (
        jax.ShapeDtypeStruct(wide, jnp.float32),
        params,
        np.zeros(BATCH, np.int32),
        jax.ShapeDtypeStruct(wide, bool),
        jax.ShapeDtypeStruct(wide, jnp.int32),
    )
    program = jax.jit(sample).lower(*jax.tree.map(on_device, arguments)).compile()
    text = program.as_text()
    logits = 4 * BATCH * VOCABULARY
    temporaries = program.memory_analysis().temp_size_in_bytes
    with capsys.disabled():
        print(f"\n{platform}: {temporaries / 2**20:.1f} MiB of temporaries, {temporaries / logits:.2f} of the logits")
    assert " while(" in text
    assert " conditional(" in text
    sorts = re.findall(r" = .*\b(?:sort|topk)\(.*", text)  # on a TPU, the places of a scatter: those of the biases, 300 a row
    sizes = [math.prod(map(int, shape.split(","))) for line in sorts for shape in re.findall(r"\[([\d,]+)\]", line)]
    assert all(size <= BATCH * BIAS_SLOTS for size in sizes), sorts
    assert 'custom_call_target="TopK' not in text
    assert temporaries < most * logits
