"""Floor 7: the command line: flags, what is wrong with them, and one function per task."""
