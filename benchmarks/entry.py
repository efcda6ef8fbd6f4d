"""What the benchmarks' command lines have in common."""

import sys
from collections.abc import Callable, Sequence

from runtime import UserError


def print_page(argv: Sequence[str], page: Callable[[], str]) -> int:
    """Prints a benchmark's page, or in one line what is wrong with its flags.

    Args:
      argv: as `app.run` gives it; what follows the program's name is an error.
      page: measures, and gives the page in Markdown.

    Returns:
      The exit code: 0, or 2 after an error of the user's.
    """
    try:
        if len(argv) > 1:
            raise UserError(f"argument {argv[1]!r} is not understood: all settings are flags, see --help")
        print(page(), end="")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
