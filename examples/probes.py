"""A service that Kubernetes watches: it warms up, answers probes from its own process, and ends on SIGTERM.

examples/kubernetes.yaml runs it. In an engine with an ASGI server, mount ``layerzero.serving.probes.Probes`` instead.
"""

from __future__ import annotations

import argparse
import queue
import signal

import torch

import layerzero as lz


def main(host: str, port: int) -> None:
    """Serve probes until a signal ends it."""
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    for each in (signal.SIGTERM, signal.SIGINT):  # a mask would not do: numpy's threads began with its import
        signal.signal(each, lambda number, _: received.put(number))
    server = lz.serve_health(port, host=host, sets=["decoder"])  # first: a slow start is alive, and not yet ready
    print(f"probes on {server.url}", flush=True)
    lz.warmup("rms_norm", [(8, 4096)])
    lz.rms_norm(torch.randn(8, 4096), torch.ones(4096))  # here a model would serve, on other threads
    print(f"ended by {signal.Signals(received.get()).name}")
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A service with probes")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9400)
    main(**vars(parser.parse_args()))
