"""Learns which endpoints send the headers of a streamed answer together with its first piece.

There the time of the headers is that of the first token, and a report of the first piece, which
costs a call for each request, would say nothing new. This project's workers are such; vLLM sends
headers as soon as it has accepted a request.
"""

TOGETHER_SECONDS = 0.005
MAX_ADDRESSES = 4096  # an address that is dropped is learned again with its next answer


class PromptHeads:
    """Owns the addresses (`ip:port`) of these endpoints."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()

    def learn(self, address: str, first_after_seconds: float) -> None:
        """Take the time between the headers and the first piece of a streamed answer."""
        if first_after_seconds > TOGETHER_SECONDS:
            self.addresses.discard(address)
            return
        if len(self.addresses) >= MAX_ADDRESSES:
            self.addresses.clear()
        self.addresses.add(address)
