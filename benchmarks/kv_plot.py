"""`kv_decode_cost.png`: a step's time against the tokens held, the line through it, and the line that reading alone would take."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime import UserError


def check_installed() -> None:
    """Raises: UserError, if matplotlib is not there: better before the measurements than after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError('the plot needs matplotlib: pip install -e ".[test]", or leave `held` out of --parts') from error


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draws what `kv_cost.held` measured.

    Args:
      report: with `held`, `ceilings`, `weight_bytes`, `model` and `machine`.
      path: of the PNG file.
    """
    from matplotlib.figure import Figure

    ceiling = max(report["ceilings"]["read_bytes_per_s"]["all"])
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, part) in enumerate(report["held"].items()):
        color, x = f"C{number}", part["held"]
        line = [part["intercept_s"] + part["slope_s_per_token"] * at for at in x]
        limit = [(report["weight_bytes"] + at * part["bytes_per_token"]) / ceiling for at in x]
        label = f"{name}: {part['slope_s_per_token'] * 1e9:.0f} ns/token, {part['bytes_per_s'] / 1e9:.1f} GB/s, R² {part['r_squared']:.4f}"
        axes.plot(x, [seconds * 1e3 for seconds in part["step_s"]], "o", color=color)
        axes.plot(x, [seconds * 1e3 for seconds in line], color=color, label=label)
        axes.plot(x, [seconds * 1e3 for seconds in limit], "--", color=color, linewidth=1)
    axes.plot([], [], "--", color="gray", linewidth=1, label=f"limit: weights and cache at {ceiling / 1e9:.0f} GB/s")
    axes.set(xlabel="tokens held", ylabel="decode step, ms", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"{report['model']}, one row: what a held token costs ({report['machine']['cpu']})", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
