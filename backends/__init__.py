"""Models that run: each backend is the same synchronous ``step`` over other kernels."""

import os

# Threads of torch's OpenMP library spin for milliseconds at the end of each operation. Beside any
# other busy thread (the server's own, say) that starves the one still working: on two cores a step
# took ten times as long. A short spin costs nothing measurable alone. Read when torch loads.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
