"""Starts so many ranks of a script on one GPU, with NCCL between them.

    python benchmarks/shared_gpu.py RANKS SCRIPT [ARGUMENT …]

NCCL refuses two ranks of one host that have the same GPU. Here each rank says that it is a host of its own
(NCCL_HOSTID), so NCCL sends by sockets. That is slow, and shows everything else: communicators, the order of messages,
streams, numbers. The exit code is that of the first rank that fails; the others are ended then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    ranks, command = int(sys.argv[1]), [sys.executable, *sys.argv[2:]]
    free_port = Path(__file__).resolve().parent.parent / "examples" / "free_port.py"
    port = subprocess.run([sys.executable, str(free_port)], capture_output=True, text=True, check=True).stdout.strip()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "NCCL_HOSTID": f"rank{rank}"},
        )
        for rank in range(ranks)
    ]
    try:
        while True:
            codes = [process.poll() for process in processes]
            if any(codes):
                time.sleep(5)  # the others say why they end, too
                return next(code for code in codes if code)
            if all(code == 0 for code in codes):
                return 0
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
