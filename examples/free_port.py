"""Prints a free port on this machine, for `deepspeed --master_port`."""

import socket

with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1])
