"""Bounds of the histograms, as the reference picker has them."""

from __future__ import annotations

SECONDS = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30),
    *(45, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600),
)
TTFT_SECONDS = SECONDS[:24]  # to two minutes
FAST_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
PROCESSING_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
RESPONSE_PROCESSING_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5),
)
NTPOT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
TPOT_SECONDS = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08),
    *(0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 2),
)
ITL_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2)
REQUEST_BYTES = tuple(64 * 2**k for k in range(25))
# 32778 is the reference's; another bound would be another series to who adds them up.
RESPONSE_BYTES = (1, *(8 * 2**k for k in range(12)), 32778, 65536)
INPUT_TOKENS = (*RESPONSE_BYTES, 131072, 262144, 524288, 1048576)
OUTPUT_TOKENS = (1, *(8 * 2**k for k in range(11)))
RATIOS = tuple(k / 10 for k in range(11))
HIT_BYTES = (0, *(16 * 2**k for k in range(13)))
PREDICTED_TPOT_SECONDS = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.6, 0.8, 1, 1.5, 2, 3, 4.5, 6, 12, 18, 24, 30, 36, 48, 60, 90, 120, 180, 270, 360),
)
PREDICTION_SECONDS = (0.0001, 0.0005, *FAST_SECONDS[3:], 0.2, 0.5, 1, 2, 5)
STREAM_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)
