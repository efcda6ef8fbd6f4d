"""A parameter tree with packed weights as nested dictionaries of arrays, which any checkpoint format can hold, and back.

What is static in a packed weight (its code, the axis of joined parts) is its form, a dictionary that JSON can hold.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.traverse_util

from kernels import JoinedArray, QuantArray
from kernels.quant_array import PLANES
from runtime import UserError

ARRAYS = ("scales", "zeros", "offsets", "super_scales", "super_offsets", "input_scales", "order")
Place = tuple[str, ...]


def forms(params: Any) -> dict[str, Any]:
    """The form of every packed weight, by place, such as `layer_0.mlp.w_down`."""
    return {".".join(place): form for place, w in flax.traverse_util.flatten_dict(params).items() if (form := _form(w)) is not None}


def as_dicts(params: Any) -> Any:
    """The tree, with a dictionary in each packed weight's place."""
    return flax.traverse_util.unflatten_dict({place: _dict(w) for place, w in flax.traverse_util.flatten_dict(params).items()})


def from_dicts(tree: Any, found: Mapping[str, Any], source: str) -> Any:
    """What `as_dicts` and `forms` made.

    Raises:
      UserError: they don't go together; begins with `source`.
    """
    tree = dict(flax.traverse_util.flatten_dict(tree))
    for name, form in found.items():
        place = tuple(name.split("."))
        own = {path[len(place) :]: tree.pop(path) for path in list(tree) if path[: len(place)] == place}
        try:
            tree[place] = _packed(flax.traverse_util.unflatten_dict(own), form)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{source}: weight {name} is not packed as it says ({type(error).__name__} {error}); convert it again"
            ) from None
    return flax.traverse_util.unflatten_dict(tree)


def _form(w: Any) -> Any:
    if isinstance(w, JoinedArray):
        return {"axis": w.axis, "parts": [_form(part) for part in w.parts]}
    return {"code": w.code, "zero": w.zero, "activations": w.activations} if isinstance(w, QuantArray) else None


def _dict(w: Any) -> Any:
    if isinstance(w, JoinedArray):
        return {"parts": {str(i): _dict(part) for i, part in enumerate(w.parts)}}
    if not isinstance(w, QuantArray):
        return w
    planes = {str(i): plane for i, plane in enumerate(w.planes)}
    return {"planes": planes} | {name: array for name in ARRAYS if (array := getattr(w, name)) is not None}


def _packed(tree: Any, form: Any) -> Any:
    if form is None:
        return tree
    if "axis" in form:
        parts = tuple(_packed(tree["parts"][str(i)], each) for i, each in enumerate(form["parts"]))
        if len(parts) != len(tree["parts"]) or not isinstance(form["axis"], int):
            raise ValueError("parts")
        return JoinedArray(parts, form["axis"])
    tree = dict(tree)
    planes, code = tree.pop("planes"), form["code"]
    if len(planes) != len(PLANES[code]) or tree.keys() - set(ARRAYS) or form["activations"] not in (None, "int8"):
        raise ValueError(code)
    planes = tuple(planes[str(i)] for i in range(len(planes)))
    return QuantArray(planes, **tree, code=code, zero=int(form["zero"]), activations=form["activations"])


def spread(params: Any, over_devices: bool) -> Any:
    """The tree, with `QuantArray.spread` set."""

    def one(w: Any) -> Any:
        if isinstance(w, JoinedArray):
            return dataclasses.replace(w, parts=tuple(one(part) for part in w.parts))
        return w.replace(spread=over_devices) if isinstance(w, QuantArray) else w

    return flax.traverse_util.unflatten_dict({place: one(w) for place, w in flax.traverse_util.flatten_dict(params).items()})
