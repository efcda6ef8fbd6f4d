"""What a user writes as a mesh, what the rule tables make of it, and what is read of a compiled program."""

import dataclasses
import itertools

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from model import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig, Rope, RouterConfig, find_loop, fit
from model.loop import Loop
from runtime import UserError
from sharding import MESH_AXES, STRATEGIES, Placement, axes, collectives, format_mesh, make_mesh, parse_mesh, rules_for


@given(st.dictionaries(st.sampled_from(sorted(MESH_AXES)), st.integers(1, 64), min_size=1))
def test_what_is_formatted_is_parsed_in_the_order_of_the_axes(sizes):
    parsed = parse_mesh(format_mesh(sizes))
    assert parsed == sizes and list(parsed) == [name for name in MESH_AXES if name in sizes]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model", "'model' is not AXIS=SIZE: write for example --mesh=data=2,model=4"),
        ("model=two", "'model=two' is not AXIS=SIZE"),
        ("model=-2", "'model=-2' is not AXIS=SIZE"),
        ("", "'' is not AXIS=SIZE"),
        ("tensor=2", "axis 'tensor' is not known: use data, fsdp, expert, seq, model"),
        ("model=2,data=2,model=4", "axis 'model' is named twice: name it once, as model=8"),
        ("model=0", "model=0 is below 1: give at least 1, or leave the axis out"),
    ],
)
def test_what_is_no_mesh_is_refused(text, message):
    with pytest.raises(UserError) as refused:
        parse_mesh(text)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_mesh_of_another_number_of_devices_is_refused_with_one_that_fits():
    with pytest.raises(UserError, match=r"--mesh=data=2,model=4 is of 8 devices, but there are 1: give --mesh=model=1"):
        make_mesh({"data": 2, "model": 4}, jax.devices()[:1])
    with pytest.raises(UserError, match=r"is of 8 devices, but there are 16: give --mesh=data=4,model=4"):
        make_mesh({"data": 2, "model": 4}, list(range(16)))


def abstract(**sizes):
    """A placement without devices: enough for what depends on sizes alone."""
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
    return Placement(mesh, rules_for(sizes))


def test_tables_name_known_axes_only():
    assert STRATEGIES.keys() == MESH_AXES.keys()
    for mesh_axis, table in STRATEGIES.items():
        assert table.keys() <= axes.AXES and set(table.values()) == {mesh_axis}


def test_an_axis_of_the_mesh_splits_an_array_once():
    placement = abstract(data=2, fsdp=2, model=4)
    assert placement.spec((axes.BATCH, axes.TOKENS, axes.EMBED)) == P(("data", "fsdp"))
    assert placement.spec((axes.VOCAB, axes.EMBED)) == P("model", "fsdp")
    assert placement.spec((axes.KV_HEADS, axes.MLP, None)) == P("model")
    assert placement.shards(axes.BATCH) == 4 and placement.shards(axes.SAMPLED) == 16 and placement.shards(axes.NORM) == 1


def model(num_heads=8, num_kv_heads=2, hidden=96, vocab_size=101, mlp=None):
    attention = AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8, rope=Rope(theta=1e4, dim=8))
    layer = LayerConfig(attention, mlp or MLPConfig(hidden=hidden))
    return ModelConfig(vocab_size=vocab_size, width=48, layers=(layer,) * 2, norm_eps=1e-5, tie_embeddings=True, context_length=64)


def test_a_model_with_fewer_kv_heads_than_shards_gets_copies_of_them_and_a_vocabulary_that_divides():
    fitted = fit(model(), abstract(model=8))
    attention = fitted.layers[0].attention
    assert (attention.num_kv_heads, attention.kv_copies, attention.queries_per_kv) == (8, 4, 1)
    assert (fitted.vocab_size, fitted.vocab_padding, fitted.num_tokens) == (104, 3, 101)
    assert fit(fitted, abstract(model=8)) == fitted and fit(model(), abstract(data=8)) == model()


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        (model(9, 3, 1536), {"model": 2}, "9 query heads can't be split evenly by model=2: sizes that work for this model are 1, 3"),
        (model(8, 2, 90), {"model": 4}, "90 hidden units can't be split evenly by model=4: sizes that work for this model are 1, 2"),
        (model(), {"data": 2, "expert": 2}, "expert=2 shards no array, as the model has no experts: give for example data=2,model=2"),
        (
            model(mlp=MoEConfig(RouterConfig(6, 2), MLPConfig(hidden=32))),
            {"expert": 4},
            "6 experts can't be split evenly by expert=4: sizes that work for this model are 1, 2, 3, 6",
        ),
        (model(), {"fsdp": 5}, "48 channels can't be split evenly by fsdp=5"),
        (model(), {"tp": 2}, "mesh axis 'tp' shards no array: use data, fsdp, expert, seq, model"),
    ],
)
def test_what_can_not_be_split_is_refused_with_what_would_work(config, sizes, message):
    with pytest.raises(UserError) as refused:
        fit(config, abstract(**sizes))
    assert message in str(refused.value) and "\n" not in str(refused.value)


@given(st.lists(st.sampled_from("ab"), max_size=14))
def test_a_loop_is_of_layers_that_repeat(layers):
    loop = find_loop(layers)
    if loop is None:
        assert all(first != second for first, second in itertools.pairwise(layers))
        return
    inside = layers[loop.first : loop.stop]
    assert loop.times > 1 and inside == inside[: loop.period] * loop.times
    for number in range(len(layers)):
        place, turn = loop.place((f"layer_{number}", "mlp"))
        if turn is None:
            assert place == (f"layer_{number}", "mlp") and not loop.first <= number < loop.stop
        else:
            assert place == ("loop", f"layer_{(number - loop.first) % loop.period}", "mlp")
            assert loop.first + turn * loop.period + (number - loop.first) % loop.period == number


def test_hybrids_are_loops_too():
    assert find_loop([*"aaaaab" * 5, *"aaaa"]) == Loop(0, 6, 5)
    assert find_loop([*"bbb", *"a" * 58]) == Loop(3, 1, 58)
    assert find_loop("abcdef") is None


HLO = """
HloModule jit_run, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (f32[2,4], s32[])) -> (f32[2,4], s32[]) {
  %one = f32[2,4]{1,0} all-reduce(%x), channel_id=1, to_apply=%add
  %two = (f32[1,4]{1,0}, f32[2,4]{1,0}) all-gather-start(%y), channel_id=2
  %three = f32[2,4]{1,0} all-gather-done(%two)
}

%condition (p: (f32[2,4], s32[])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p0: f32[2,4]) -> f32[2,4] {
  %loop = (f32[2,4], s32[]) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"30"}}
  %other = (f32[2,4], s32[]) while(%init), condition=%condition, body=%body
  %sums = (bf16[16]{0}, bf16[8]{0}) all-reduce(%q, %r), to_apply=%add
}
"""


def test_collectives_are_counted_as_often_as_their_loops_run():
    found = {(each.kind, each.shapes, each.looped): (each.count, each.nbytes) for each in collectives(HLO)}
    assert found == {
        ("all-reduce", "f32[2,4]", False): (30, 32),
        ("all-reduce", "f32[2,4]", True): (1, 32),
        ("all-gather", "f32[2,4]", False): (30, 32),
        ("all-gather", "f32[2,4]", True): (1, 32),
        ("all-reduce", "bf16[16] bf16[8]", False): (1, 48),
    }


def test_a_mesh_with_explicit_axes_is_refused():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
    with pytest.raises(UserError, match=r"mesh axis 'model' is of type Explicit or Manual.*make the mesh with axis_types"):
        Placement.on(mesh)


def test_a_placement_is_one_value_however_it_is_made():
    first, second = abstract(data=2, model=2), abstract(data=2, model=2)
    assert first == second and hash(first) == hash(second) and dataclasses.replace(first, rules=()) != first
