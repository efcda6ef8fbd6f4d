"""The one exception that a user may cause."""


class UserError(Exception):
    """Bad input: one line that states the value, the limit and the remedy.

    The command line prints it after `error: ` and exits with code 2; a program may catch it.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(str(message).split()))
