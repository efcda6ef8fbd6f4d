"""Export and import of rows: what is moved, exactly; and that a row goes on as if it had not been."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kv
import kv.export
import kv.layout
import kv.transfer
from model import LayerConfig, MLPConfig, Transformer, decode_step, prefill
from runtime import LEDGER, UserError
from tests.kv import caches
from tests.kv.caches import BATCH, CAPACITY, CODECS, LATENT, LAYOUTS, WINDOW, WINDOWED, addresses, filled, first_kept, format_of, same_bits
from tests.model.hybrids import CONFIGS, attention, random_params
from tests.model.hybrids import model as model_of


@pytest.fixture(autouse=True, scope="module")
def short_calls():
    """Rows of a few tokens are moved in several calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv.transfer, "SMALLEST", 8)
        patch.setattr(kv.transfer, "LARGEST", 8)
        patch.setattr(kv.layout, "BLOCK", 16)
        yield


def check_export(cache: kv.Cache, row: int, export: kv.Export) -> None:
    """The arrays are those of the cache, by position."""
    length = int(cache.lengths[row])
    assert export.manifest["length"] == length
    for group, (spec, tensors) in enumerate(zip(cache.specs, caches.stored(cache), strict=True)):
        first = first_kept(spec.window, length, cache.margin)
        assert export.manifest["groups"][group]["first"] == first
        leads, slots = caches.where(cache, group, row, range(first, length))
        for name, parts in tensors.items():
            for part, what in zip(parts, ("values", "scales"), strict=False):
                array = export.arrays[f"{group}.{name}.{what}"]
                np.testing.assert_array_equal(array.view(f"u{array.dtype.itemsize}"), part[:, leads, slots])


def check_import(cache: kv.Cache, row: int, export: kv.Export) -> kv.Cache:
    """The arrays' tokens that the row needs are where it has them, and nothing else has changed."""
    want, length, own = caches.stored(cache), export.manifest["length"], export.manifest["groups"]
    for group, (spec, tensors) in enumerate(zip(cache.specs, want, strict=True)):
        begin = max(own[group]["first"], first_kept(spec.window, length, cache.margin))
        leads, slots = caches.where(cache, group, row, range(begin, length))
        for name, parts in tensors.items():
            for part, what in zip(parts, ("values", "scales"), strict=False):
                array = export.arrays[f"{group}.{name}.{what}"].view(f"u{part.dtype.itemsize}")
                part[:, leads, slots] = array[:, begin - own[group]["first"] :]
    lengths = np.asarray(cache.lengths).copy()
    lengths[row] = length
    cache = kv.import_row(cache, row, export)
    np.testing.assert_array_equal(cache.lengths, lengths)
    jax.tree.map(np.testing.assert_array_equal, caches.stored(cache), want)
    return cache


NAMES = list(LAYOUTS)
# Each layout gives to two others, and takes from two; every pair of tokens' places is met by some number format.
PAIRS = [(source, NAMES[(index + far) % len(NAMES)]) for index, source in enumerate(NAMES) for far in (1, 3)]
BITS, FLOATS = ("pages of 4", "pages of 16, packed as on TPU"), ("dense", "pages of 4")
OFTEN = [("windows", "bf16", FLOATS), ("windows", "fp8", FLOATS), ("latent", "int8", BITS)]
PLAIN = [PAIRS[index] for index in (0, 1, 3, 5, 6, 9, 10, 13)]  # of f32: each layout gives, and each takes
CASES = [
    pytest.param(
        layers,
        codec,
        source,
        target,
        id=f"{name} {codec} {source} to {target}",
        marks=[pytest.mark.slow] * ((source, target) not in PLAIN if codec == "f32" else (name, codec, (source, target)) not in OFTEN),
    )
    for name, layers in (("windows", WINDOWED), ("latent", LATENT))
    for codec in CODECS
    for source, target in PAIRS
    if (name, codec) != ("latent", "f32")
]


@pytest.mark.parametrize(("layers", "codec", "source", "target"), CASES)
def test_every_token_that_a_later_query_sees_is_moved_and_no_other_bit_changes(layers, codec, source, target):
    giver = filled(layers, format_of(source, codec), seed=1, lengths=(CAPACITY, 13, 30))
    taker = filled(layers, format_of(target, codec), seed=2)
    for row, to in ((2, 0), (1, 2), (0, 1)):
        export = kv.export_row(giver, row)
        check_export(giver, row, export)
        assert {array.dtype.kind for array in export.arrays.values()} <= set("uif")
        taker = check_import(taker, to, export)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, CAPACITY),
    st.integers(0, BATCH - 1),
    st.integers(0, BATCH - 1),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(list(LAYOUTS)),
)
def test_rows_of_any_length_are_moved(length, row, to, source, target):
    giver = filled(WINDOWED, format_of(source, "f32"), seed=length, lengths=(length,) * BATCH)
    export = kv.export_row(giver, row)
    check_export(giver, row, export)
    check_import(filled(WINDOWED, format_of(target, "f32"), seed=99), to, export)


@given(st.sampled_from([caches.LOCAL, caches.GLOBAL]), st.integers(1, 5000), st.integers(0, 100), st.data())
def test_any_positions_are_cut_into_calls_of_few_shapes(spec, capacity, margin, data):
    cache = kv.fresh(WINDOWED, 1).replace(specs=(spec,), capacity=capacity, margin=margin)
    length = data.draw(st.integers(0, capacity))
    first = data.draw(st.integers(first_kept(spec.window, length, margin), length))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv.transfer, "SMALLEST", 16)
        patch.setattr(kv.transfer, "LARGEST", 1024)
        calls = list(kv.transfer._calls(cache, 0, first, length))
    slots = capacity if spec.window is None else min(capacity, spec.window + margin)
    assert [start + at for start, count, _ in calls for at in range(count)] == list(range(first, length))
    assert {size for _, _, size in calls} <= {16, 32, 64, 128, 256, 512, 1024, slots}
    assert all(count <= size <= slots and size <= max(16, 2 * count) for _, count, size in calls)
    assert len(calls) == max(1, -(-(length - first) // min(1024, slots)))


def test_floats_kept_as_bits_and_as_floats_are_the_same_export():
    floats, bits = (kv.Format(**CODECS["bf16"], as_bits=as_bits, margin=3) for as_bits in (False, True))
    cache = filled(WINDOWED, floats)
    export = kv.export_row(cache, 1)
    there = check_import(filled(WINDOWED, bits, seed=5), 0, export)
    assert kv.export_row(there, 0).manifest == export.manifest
    back = check_import(filled(WINDOWED, floats, seed=6), 1, kv.export_row(there, 0))
    same_bits(kv.export_row(back, 1).arrays, export.arrays)


def test_a_manifest_is_json_and_says_what_the_arrays_are():
    cache = filled(WINDOWED, format_of("ring", "int8"), lengths=(30, 30, 30))
    export = kv.export_row(cache, 0, namespace="a model")
    manifest = export.manifest
    assert json.loads(json.dumps(manifest)) == manifest
    assert {key: manifest[key] for key in ("version", "namespace", "length")} == {"version": 1, "namespace": "a model", "length": 30}
    assert manifest["format"] == {"dtype": "int8", "group": 2, "scale": "float16"}
    spec = {"kind": "LayerSpec", "num_kv_heads": 2, "key_dim": 8, "value_dim": 6}
    assert manifest["groups"] == [
        {"spec": spec | {"window": WINDOW}, "layers": [0, 2], "first": 23},
        {"spec": spec | {"window": None}, "layers": [1], "first": 0},
    ]
    shapes = {name: (array["dtype"], array["shape"]) for name, array in manifest["arrays"].items()}
    assert shapes["0.k.values"] == ("|i1", [2, 7, 2, 8])
    assert shapes["1.v.scales"] == ("<u2", [1, 30, 2, 3])
    assert len(shapes) == 8
    there = kv.import_row(
        filled(WINDOWED, format_of("dense", "int8")), 0, export.replace(manifest=json.loads(json.dumps(manifest))), "a model"
    )
    assert int(there.lengths[0]) == 30


def decoded(name: str, source: kv.Format, target: kv.Format, back: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits of three decode steps of rows that stay where they were filled, and of the same rows moved to others of another cache."""
    config, order = MODELS[name], np.asarray([2, 0, 1])
    transformer, params = Transformer(config), random_params(config, 2)
    tokens = jax.random.randint(jax.random.key(7), (BATCH, CAPACITY), 0, config.vocab_size)
    lengths = jnp.asarray([30, 4, 17])
    _, stays = prefill(transformer, params, filled(config, source, seed=3, lengths=(0,) * BATCH), tokens, lengths)
    moved = filled(config, target, seed=4)
    for row, to in enumerate(order):
        moved = kv.import_row(moved, int(to), kv.export_row(stays, row))
    stays, moved = stays.rewind(lengths - back), moved.rewind((lengths - back)[np.argsort(order)])
    stayed_logits, moved_logits = [], []
    for step in range(3):
        new = jax.random.randint(jax.random.key(step), (BATCH,), 0, config.vocab_size)
        logits, stays = decode_step(transformer, params, stays, new)
        stayed_logits.append(np.asarray(logits))
        logits, moved = decode_step(transformer, params, moved, new[np.argsort(order)])
        moved_logits.append(np.asarray(logits)[order])
    return np.stack(stayed_logits), np.stack(moved_logits)


SLOW = pytest.mark.slow
WINDOWS = model_of(*(LayerConfig(attention(window=window), MLPConfig(hidden=32)) for window in (WINDOW, None)))
MODELS = {"windows": WINDOWS, "gemma": CONFIGS["gemma"], "deepseek": CONFIGS["deepseek"]}
DECODED = [
    (name, codec, *pair)
    for name, codec in (("gemma", "f32"), ("gemma", "int8"), ("deepseek", "int8"))
    for pair in (*PAIRS, *((each, each) for each in LAYOUTS))
]
SAME = [("windows", "int8", "ring", "ring")]
OTHER = [("windows", "int8", "ring", "pages of 4")]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=" ".join(case), marks=[SLOW] * (case not in SAME)) for case in SAME + DECODED if case[2] == case[3]]
)
def test_a_moved_row_decodes_to_the_same_bits(case):
    name, codec, source, target = case
    stayed, moved = decoded(name, format_of(source, codec), format_of(target, codec))
    np.testing.assert_array_equal(moved, stayed)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=" ".join(case), marks=[SLOW] * (case not in OTHER)) for case in OTHER + DECODED if case[2] != case[3]]
)
def test_a_row_moved_into_another_layout_decodes_to_the_same_logits(case):
    name, codec, source, target = case
    stayed, moved = decoded(name, format_of(source, codec), format_of(target, codec))
    np.testing.assert_allclose(moved, stayed, rtol=0, atol=1e-4 * np.abs(stayed).max())


@pytest.mark.parametrize("target", ["ring", "pages of 4"])
def test_a_moved_row_can_be_rewound_by_the_margin(target):
    stayed, moved = decoded("windows", format_of("ring", "int8"), format_of(target, "int8"), back=3)
    np.testing.assert_allclose(moved, stayed, rtol=0, atol=1e-4 * np.abs(stayed).max())


def test_pages_that_were_given_back_are_not_exported():
    cache = filled(WINDOWED, format_of("pages of 4", "int8"), lengths=(30,) * BATCH)
    local = cache.stores[0].layout.group
    table = np.array(cache.tables[local])
    assert first_kept(WINDOW, 30, cache.margin) == 23
    table[0, :6] = cache.stores[0].num_pages  # positions 0..23
    tables = tuple(jnp.asarray(table) if group == local else each for group, each in enumerate(cache.tables))
    export = kv.export_row(cache.replace(tables=tables), 0)
    assert [group["first"] for group in export.manifest["groups"]] == [24, 0]
    whole = kv.export_row(cache, 0)
    np.testing.assert_array_equal(export.arrays["0.k.values"], whole.arrays["0.k.values"][:, 1:])
    check_import(filled(WINDOWED, format_of("ring", "int8"), seed=2), 1, export)

    table[0, 6] = cache.stores[0].num_pages  # positions 24..27; the query at 30 sees 26..30
    cache = cache.replace(tables=tuple(jnp.asarray(table) if group == local else each for group, each in enumerate(cache.tables)))
    with pytest.raises(UserError, match="row 0 holds 30 tokens, but pages from position 28 on only, and its next query sees 26"):
        kv.export_row(cache, 0)


def small() -> tuple[kv.Cache, kv.Export]:
    """A cache, and what its first row holds."""
    cache = filled(WINDOWED, format_of("ring", "int8"), lengths=(30, 30, 30))
    return cache, kv.export_row(cache, 0)


def refused(cache: kv.Cache, export: kv.Export, message: str, row: int = 1, **more) -> None:
    """The import is, and the cache is as it was."""
    before = caches.stored(cache)
    with pytest.raises(UserError, match=message) as caught:
        kv.import_row(cache, row, export, **more)
    assert "\n" not in str(caught.value)
    jax.tree.map(np.testing.assert_array_equal, caches.stored(cache), before)


def signed(manifest: dict) -> dict:
    """With the checksum that belongs to it."""
    return manifest | {"crc32": kv.export._checksum(manifest)}


def test_another_version_is_refused():
    cache, export = small()
    newer = signed(export.manifest | {"version": kv.export.VERSION + 1})
    refused(cache, export.replace(manifest=newer), "layout version 2, this program reads 1")
    refused(cache, export.replace(manifest={}), "layout version None")
    refused(cache, export.replace(manifest=None), "layout version None")


def test_a_changed_manifest_is_refused():
    cache, export = small()
    manifest = export.manifest
    groups = [group | {"first": group["first"] + 1} for group in manifest["groups"]]
    for change in ({"length": 29}, {"groups": groups}, {"format": manifest["format"] | {"group": 4}}, {"crc32": 1}, {"more": 1}):
        refused(cache, export.replace(manifest=manifest | change), "manifest is damaged, CRC-32 [0-9]+ instead of [0-9]+: transfer")
    refused(cache, export.replace(manifest={key: value for key, value in manifest.items() if key != "order"}), "manifest is damaged")


def test_what_another_model_made_is_refused():
    cache, export = small()
    wider = caches.Layers((dataclasses.replace(caches.LOCAL, window=6), caches.GLOBAL, dataclasses.replace(caches.LOCAL, window=6)))
    shifted = caches.Layers((caches.LOCAL, caches.LOCAL, caches.GLOBAL))
    fewer = caches.Layers((caches.LOCAL, caches.GLOBAL))
    refused(filled(wider, format_of("ring", "int8")), export, r"layers \[0, 2\] of .*'window': 5.* where the cache has .*'window': 6")
    refused(filled(shifted, format_of("ring", "int8")), export, r"layers \[0, 2\] of .* where the cache has layers \[0, 1\]")
    refused(filled(fewer, format_of("ring", "int8")), export, "import what the same model made")
    refused(filled(caches.Layers((caches.LOCAL,)), format_of("ring", "int8")), export, "import what the same model made")
    refused(filled(LATENT, format_of("ring", "int8")), export, "import what the same model made")
    refused(cache, export, "of namespace '', the row of 'a model': import", namespace="a model")


def test_another_number_format_is_refused():
    cache, export = small()
    refused(
        filled(WINDOWED, format_of("ring", "f32")), export, "the export holds int8 in groups of 2 with float16 scales, the cache float32"
    )
    fp8 = kv.export_row(filled(WINDOWED, format_of("ring", "fp8"), lengths=(9, 9, 9)), 0)
    refused(cache, fp8, "the export holds float8_e4m3fn in groups of 2")
    one_spec = caches.Layers((kv.LayerSpec(2, 8, 8),))
    pair, four = (kv.Format(np.dtype(np.int8), group=group, as_bits=True) for group in (2, 4))
    refused(filled(one_spec, four), kv.export_row(filled(one_spec, pair), 0), "int8 in groups of 2 .* the cache int8 in groups of 4")


def test_more_tokens_than_a_row_can_hold_are_refused():
    _, export = small()
    refused(filled(WINDOWED, format_of("ring", "int8"), capacity=29), export, "the export holds 30 tokens, a row 29: make the cache")


def test_every_array_has_to_be_there_as_described():
    cache, export = small()
    for name, array in export.arrays.items():
        rest = {other: each for other, each in export.arrays.items() if other != name}
        refused(cache, export.replace(arrays=rest), f"array {name} of the export is missing, 8 are named")
        refused(cache, export.replace(arrays=rest | {name: array[:, 1:]}), f"array {name} of the export is .* instead of")
        other = np.dtype(f"i{array.dtype.itemsize}") if array.dtype.kind == "u" else np.dtype(f"u{array.dtype.itemsize}")
        refused(cache, export.replace(arrays=rest | {name: array.view(other)}), f"array {name} of the export is .* instead of")
    refused(cache, export.replace(arrays=export.arrays | {"9.k.values": np.zeros(3)}), "array 9.k.values .* none of the manifest's")


@pytest.fixture(scope="module")
def whole() -> tuple[kv.Cache, kv.Export]:
    return small()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_one_changed_bit_of_any_array_is_found(whole, data):
    cache, export = whole
    for name, array in export.arrays.items():
        damaged = array.copy()
        at = data.draw(st.integers(0, damaged.nbytes - 1))
        damaged.reshape(-1).view(np.uint8)[at] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(UserError, match=f"array {name} of the export is damaged, CRC-32 [0-9]+ instead of [0-9]+: transfer"):
            kv.import_row(cache, 1, export.replace(arrays=export.arrays | {name: damaged}))


def test_a_row_needs_pages_of_its_own():
    _, export = small()
    cache = filled(WINDOWED, format_of("pages of 4", "int8"))
    everywhere = cache.stores[1].layout.group

    def with_entry(row, index, page):
        tables = [table.at[row, index].set(page) if group == everywhere else table for group, table in enumerate(cache.tables)]
        return cache.replace(tables=tuple(tables))

    none, other = cache.stores[1].num_pages, int(cache.tables[everywhere][1, 2])
    refused(with_entry(0, 7, none), export, r"row 0 has no page for positions from 28 on, the import is of 0\.\.29: reserve", row=0)
    refused(with_entry(0, 0, none), export, "row 0 has no page for positions from 0 on", row=0)
    refused(with_entry(0, 2, other), export, f"page {other} of row 0 stands 2 times in the page tables", row=0)
    kv.import_row(with_entry(0, 8, none), 0, export)  # of positions 32..35


def test_rows_that_there_are_not_are_refused():
    cache, export = small()
    for row in (-1, BATCH):
        with pytest.raises(ValueError, match=f"row {row} is outside the cache's 0..2"):
            kv.export_row(cache, row)
        with pytest.raises(ValueError, match=f"row {row} is outside the cache's 0..2"):
            kv.import_row(cache, row, export)
    nothing = kv.fresh(WINDOWED, BATCH)
    with pytest.raises(UserError, match="stores nothing"):
        kv.export_row(nothing, 0)
    with pytest.raises(UserError, match="stores nothing"):
        kv.import_row(nothing, 0, export)


@pytest.mark.parametrize("layout", ["ring", "pages of 4"])
def test_an_import_writes_in_place_and_compiles_nothing_new(layout):
    cache = filled(WINDOWED, format_of(layout, "int8"), lengths=(30, 27, 13))
    longest = kv.export_row(cache, 0)
    cache = kv.import_row(cache, 0, longest)
    before = addresses(cache)
    with LEDGER.sealed():
        cache = kv.import_row(cache, 2, kv.export_row(cache, 1))
        assert int(np.asarray(cache.lengths)[2]) == 27
    assert addresses(cache) == before
    assert {"fetch_tokens", "store_tokens", "set_length"} <= {entry.name for entry in LEDGER.entries if entry.program}


def test_an_import_uses_up_the_cache():
    cache, export = small()
    after = kv.import_row(cache, 1, export)
    assert all(array.is_deleted() for array in jax.tree.leaves((cache.stores, cache.lengths)))
    assert not any(array.is_deleted() for array in jax.tree.leaves(after))


def test_an_export_survives_a_file(tmp_path):
    cache, export = small()
    path = tmp_path / "row.npz"
    kv.save_export(export, str(path))
    again = kv.load_export(str(path))
    assert again.manifest == export.manifest
    assert again.arrays.keys() == export.arrays.keys()
    same_bits(again.arrays, export.arrays)
    check_import(cache, 2, again)
    assert [file.name for file in tmp_path.iterdir()] == ["row.npz"]


def test_a_file_that_is_no_export_is_refused(tmp_path):
    _, export = small()
    path = tmp_path / "row.npz"
    with pytest.raises(UserError, match="can't be read"):
        kv.load_export(str(path))
    with pytest.raises(UserError, match="can't be written"):
        kv.save_export(export, str(tmp_path / "nowhere" / "row.npz"))
    kv.save_export(export, str(path))
    whole = path.read_bytes()
    for cut in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match="is no export, or a damaged one"):
            kv.load_export(str(path))
    at = whole.index(export.arrays["1.k.values"].tobytes())
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(UserError, match="is no export, or a damaged one"):
        kv.load_export(str(path))
    np.savez(path, other=np.zeros(3))
    with pytest.raises(UserError, match="is no export"):
        kv.load_export(str(path))
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(UserError, match="is no export"):
        kv.load_export(str(path))
