"""What this package runs in its own tests: each of its kernels against the references of LayerZero."""

from __future__ import annotations

import sys

from layerzero.testing import conformance

if __name__ == "__main__":
    report = conformance.run(kernels=["example.*"])
    print(report)
    sys.exit(0 if report.ok and report.passed else 1)
