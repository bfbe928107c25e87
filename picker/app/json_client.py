"""The HTTP client of plugins: JSON to and from other servers, over persistent connections."""

import json
from collections.abc import Mapping
from typing import Any

from base import http
from picker.framework.services import HttpError


class JsonClient(http.HttpClient):
    async def post_json(
        self,
        url: str,
        body: Any,
        *,
        timeout_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        try:
            answer = await self.request(
                "POST", url, json=body, timeout_seconds=timeout_seconds, headers=headers
            )
            if not 200 <= answer.status <= 299:
                raise HttpError(f"{url}: status {answer.status}")
            return json.loads(answer.body) if answer.body.strip() else None
        except http.HttpError as error:
            raise HttpError(f"{url}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise HttpError(f"{url}: the answer is no JSON: {error}") from error
