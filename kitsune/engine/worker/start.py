"""Started by `client`: a Python program of its own. What it needs of `kitsune` is imported once it is told where."""

import importlib
import os
import signal
import sys
from multiprocessing.connection import Connection

if __name__ == "__main__":
    connection = Connection(int(sys.argv[1]))
    try:
        sys.path[:], modules = connection.recv()
        from kitsune.kernels.compile_server import end_with

        end_with(int(sys.argv[2]))
        from kitsune.engine.worker.server import Server

        for name in modules:
            importlib.import_module(name)

        Server(connection).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):  # whom it served has ended, so all it began does
        os.killpg(0, signal.SIGKILL)
    os._exit(0)  # no destructor of a compiler or driver is to hold it up
