"""GPTQ and the choice of a group's range, written the plain way in NumPy: f64, one weight after the other. And inputs that correlate."""

import numpy as np

from quantization import Scheme

SHRINKS = [1 - 0.5 * number / 20 for number in range(20)]


def correlated(tokens, width, seed=0):
    """Activations [tokens, width]: a few directions, noise, and inputs that are larger than others."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, 4)) @ rng.normal(size=(4, width)) + 0.3 * rng.normal(size=(tokens, width))
    return x * np.exp(rng.normal(size=width))


def grid(group, importance, scheme: Scheme):
    """Scale and zero of some weights: of 20 ranges, the one with the least error."""
    highest, best = 2**scheme.bits - 1, (np.inf, None, None)
    stored = np.float32 if scheme.group is None else np.float16
    for shrink in SHRINKS:
        least, most = min(group.min(), 0) * shrink, max(group.max(), 0) * shrink
        if scheme.symmetric:
            top = group[np.argmax(np.abs(group))] * shrink
            scale, zero = float(stored(-top / 2 ** (scheme.bits - 1))), 2 ** (scheme.bits - 1)
        else:
            scale = float(stored((most - least) / highest))
            zero = float(np.clip(np.round(-least / (scale or 1)), 0, highest))
        error = np.sum(importance * (group - value(nearest(group, scale, zero, scheme), scale, zero)) ** 2)
        best = min(best, (error, scale, zero), key=lambda each: each[0])
    return best[1:]


def nearest(w, scale, zero, scheme: Scheme):
    return np.clip(np.round(w / (scale or 1)) + zero, 0, 2**scheme.bits - 1)


def value(code, scale, zero):
    return (code - zero) * scale


def optimal_brain(w, hessian, scheme: Scheme, damping=0.01):
    """GPTQ's weights [O, I], by the rule that it comes from (Frantar and Alistarh 2022, arXiv 2208.11580): after each column, the inverse
    Hessian of those that are left is found anew."""
    w, hessian = np.array(w, np.float64), np.array(hessian, np.float64)
    size = w.shape[1] if scheme.group is None else scheme.group
    dead = np.diag(hessian) == 0
    importance = np.diag(hessian).copy()
    w[:, dead] = 0
    hessian = hessian + np.diag(np.where(dead, 1, 0) + damping * np.mean(importance))
    grids = None
    for column in range(w.shape[1]):
        if column % size == 0:
            here = slice(column, column + size)
            grids = [grid(row[here], importance[here], scheme) for row in w]
        inverse = np.linalg.inv(hessian[column:, column:])
        rounded = np.array([value(nearest(x, *g, scheme), *g) for x, g in zip(w[:, column], grids, strict=True)])
        error = (w[:, column] - rounded) / inverse[0, 0]
        w[:, column:] -= error[:, None] * inverse[0]
        w[:, column] = rounded
    return w
