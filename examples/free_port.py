"""Prints a free port on this machine, for `deepspeed --master_port`.

It is below the ports that systems give to connections (from 32768 on Linux), one of which could take it meanwhile.
"""

import contextlib
import random
import socket

port = 0
while not port:
    candidate = random.randrange(20000, 32000)
    with socket.socket() as listener, contextlib.suppress(OSError):
        listener.bind(("127.0.0.1", candidate))
        port = candidate
print(port)
