"""The verifiable log over all streams, without I/O: signed heads, and bundles of it."""
