"""`--pd-proxy`: a decode worker runs the prefill leg of its requests itself."""

import uuid

from base.forwarding import forwarded_headers, new_session
from base.tracing import call_of
from worker.api.http.exchange import Exchange
from worker.api.routes.prefill_leg import (
    PATHS,
    PREFILL_SPAN,
    PREFILLER_HEADER,
    REQUEST_ID_HEADER,
    PrefillLeg,
    without_source,
)
from worker.config import ApiConfig


class PdProxy:
    def __init__(self, config: ApiConfig) -> None:
        self._leg = PrefillLeg(config.prefiller_networks, config.prefill_timeout_seconds)

    async def second_body(self, exchange: Exchange, body: bytes) -> bytes:
        """Run the first leg; return the second's body, for this worker. Raises `RequestError`."""
        body = without_source(body)
        named = exchange.header(PREFILLER_HEADER.encode())
        if not named or exchange.path not in PATHS:
            return body
        url = f"http://{self._leg.prefiller(named)}{exchange.path}"
        headers = forwarded_headers(exchange.headers(), PREFILLER_HEADER)
        if exchange.header(REQUEST_ID_HEADER.encode()) is None:
            headers.append((REQUEST_ID_HEADER, exchange.request_id or str(uuid.uuid1())))
        with call_of(exchange.trace, PREFILL_SPAN, headers, url=url) as within:
            async with new_session() as session:
                return await self._leg.second_body(session, url, within, exchange.path, body)
