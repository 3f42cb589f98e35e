"""The program: until a command handles signals itself, Ctrl-C ends it without a traceback."""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .cli import main  # noqa: E402 - the import takes longest

if __name__ == "__main__":
    sys.exit(main())
