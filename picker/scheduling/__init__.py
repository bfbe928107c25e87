"""The scheduler, and the arithmetic of loads and latencies that plugins share. No I/O."""
