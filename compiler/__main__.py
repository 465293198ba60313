"""`python -m parcompile`, and the console script."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Loads and runs the command: whoever ends it meanwhile, by Ctrl-C, reads what they read later."""
    try:
        from .cli import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("parcompile: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
