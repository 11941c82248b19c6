"""`graphpilot`, and `python -m executor` for torchrun, which wants the name of a module."""

import signal

# Loading the rest takes most of a second; a Ctrl-C meanwhile ends the command as it should, not with a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)
# Threads of libraries that start meanwhile must not take these signals later: `executor/launch.py` waits for them.
_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})

from executor.cli import main  # noqa: E402

signal.pthread_sigmask(signal.SIG_SETMASK, _mask)

__all__ = ["main"]

if __name__ == "__main__":
    main()
