"""The scheduler, and the arithmetic of bursts and latencies that plugins share. No I/O."""
