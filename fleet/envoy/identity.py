"""Tenants in a bootstrap: Envoy authenticates each request and sets its identity, so that no client
can choose one.

In front of the picker's filter stand

1. `api_key_auth` and `jwt_authn`: 401 without a valid key or token. A credential of the form of a
   token goes to the one, any other to the other.
2. a Lua filter, which knows the tenants: it sets the tenant (fairness id), its objective and its
   limits of tokens, which the picker enforces. 403 for a token that names no tenant.
3. `local_ratelimit`: 429 for a tenant over its requests a minute.

What clients send under these names is removed before any filter runs.
"""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from types import MappingProxyType

from envoy.config.route.v3 import route_components_pb2
from envoy.extensions.common.matching.v3 import extension_matcher_pb2
from envoy.extensions.filters.common.matcher.action.v3 import skip_action_pb2
from envoy.extensions.filters.http.api_key_auth.v3 import api_key_auth_pb2
from envoy.extensions.filters.http.jwt_authn.v3 import config_pb2 as jwt_authn_pb2
from envoy.extensions.filters.http.local_ratelimit.v3 import local_rate_limit_pb2
from envoy.extensions.transport_sockets.tls.v3 import tls_pb2
from envoy.type.matcher.v3 import http_inputs_pb2

from fleet.envoy.proto import Json, extension, packed
from fleet.envoy.settings import CONTROL_PREFIXES
from fleet.envoy.tenants import JWT_SHAPE, AllowedTenant, RemoteKeys, Tenants, Tokens

# Types of extensions that the documents name; protobuf knows those that are imported.
EXTENSIONS = (
    *(route_components_pb2, extension_matcher_pb2, skip_action_pb2, api_key_auth_pb2),
    *(jwt_authn_pb2, local_rate_limit_pb2, tls_pb2, http_inputs_pb2),
)
TENANT = "x-gateway-inference-fairness-id"
OBJECTIVE = "x-gateway-inference-objective"
TOKEN_LIMIT = "x-pointsman-token-limit"
# Between two filters only.
_CLAIM = "x-gateway-token-claim"
_COUNTED = "x-gateway-requests-counted"
_JWKS = "jwks"
_FILTERS = "envoy.extensions.filters.http"
_MATCHING = "envoy.extensions.common.matching.v3.ExtensionWithMatcher"
_KEYS_FILTER, _TOKENS_FILTER = "api-keys", "tokens"
_TENANTS_FILTER, _REQUESTS_FILTER = "tenants", "requests-per-minute"
_ALL: Mapping[str, object] = MappingProxyType(
    {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}
)
_NO_LIMIT = {"max_tokens": 2**31, "tokens_per_fill": 2**31, "fill_interval": "1s"}
_PROCESSOR = "ExternalProcessor"
_LUA = """\
local tenants = {
%s}
local claims = {
%s}

function envoy_on_request(handle)
  local headers = handle:headers()
  local claim, name = headers:get("%s"), headers:get("%s")
  if claim then
    headers:remove("%s")
    name = claims[claim]
  end
  local tenant = name and tenants[name]
  if not tenant then
    handle:respond({[":status"] = "403"}, "The credential names no tenant of this gateway")
    return
  end
  headers:replace("%s", name)
  for header, value in pairs(tenant) do
    headers:replace(header, value)
  end
end
"""
# The filter that counts requests does not send it.
_LUA_RETRY_AFTER = """
function envoy_on_response(handle)
  local headers = handle:headers()
  local reset = headers:get("x-ratelimit-reset")
  if reset and headers:get(":status") == "429" and not headers:get("retry-after") then
    headers:add("retry-after", reset == "0" and "1" or reset)
  end
end
"""


def with_tenants(document: Json, tenants: Tenants) -> Json:
    """Return the bootstrap `document` with authentication in front of each of the picker's filters.

    Raises `ValueError` if it has none.
    """
    document = deepcopy(document)
    managers = list(_managers(document))
    if not managers:
        raise ValueError("no listener asks a picker: there is no ext_proc filter")
    for manager in managers:
        _guard(manager, tenants)
    keys = None if tenants.tokens is None else tenants.tokens.keys
    if isinstance(keys, RemoteKeys):
        document["static_resources"]["clusters"].append(_key_server(keys))
    return document


def _managers(document: Json) -> Iterator[Json]:
    for listener in document["static_resources"].get("listeners", ()):
        for chain in listener.get("filter_chains", ()):
            for one in chain.get("filters", ()):
                manager = one.get("typed_config", {})
                if any(map(_asks_a_picker, manager.get("http_filters", ()))):
                    yield manager


def _asks_a_picker(one: Json) -> bool:
    return str(one.get("typed_config", {}).get("@type", "")).endswith(_PROCESSOR)


def _guard(manager: Json, tenants: Tenants) -> None:
    filters = manager["http_filters"]
    added = _filters(tenants)
    at = next(index for index, one in enumerate(filters) if _asks_a_picker(one))
    filters[at:at] = added
    manager.setdefault("early_header_mutation_extensions", []).append(_stripping())
    # For the picker and for filters alone.
    removed = manager["route_config"].setdefault("request_headers_to_remove", [])
    removed.extend((TOKEN_LIMIT, _COUNTED))
    for host in manager["route_config"]["virtual_hosts"]:
        for route in host["routes"]:
            if "direct_response" in route and "path" in route["match"]:
                _open(route, added)


def _open(route: Json, filters: list[Json]) -> None:
    """Let everyone read the page at `/`, which Envoy has by itself."""
    off = packed("envoy.config.route.v3.FilterConfig", disabled=True)
    settings = route.setdefault("typed_per_filter_config", {})
    settings.update({one["name"]: off for one in filters})


def _stripping() -> Json:
    matchers = [{"prefix": prefix, "ignore_case": True} for prefix in CONTROL_PREFIXES]
    return extension(
        "envoy.http.early_header_mutation.header_mutation",
        "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
        mutations=[
            *({"remove_on_match": {"key_matcher": matcher}} for matcher in matchers),
            {"remove": TOKEN_LIMIT},
        ],
    )


def _filters(tenants: Tenants) -> list[Json]:
    has_keys = any(one.keys for one in tenants.tenants)
    found: list[Json] = []
    if has_keys:
        found.append(_api_keys(tenants, beside_tokens=tenants.tokens is not None))
    if tenants.tokens is not None:
        found.append(_jwt(tenants.tokens, beside_keys=has_keys))
    found.append(_naming(tenants.tenants))
    if any(one.requests_per_minute for one in tenants.tenants):
        found.append(_requests(tenants.tenants))
    return found


def _api_keys(tenants: Tenants, *, beside_tokens: bool) -> Json:
    checked = extension(
        "envoy.filters.http.api_key_auth",
        f"{_FILTERS}.api_key_auth.v3.ApiKeyAuth",
        credentials=[
            {"key": key, "client": one.name} for one in tenants.tenants for key in one.keys
        ],
        key_sources=[{"header": "authorization"}, {"header": "x-api-key"}],
        forwarding={"header": TENANT, "hide_credentials": True},
    )
    if not beside_tokens:
        return {**checked, "name": _KEYS_FILTER}
    return _unless(_KEYS_FILTER, _is_token(), checked)


def _jwt(tokens: Tokens, *, beside_keys: bool) -> Json:
    keys = tokens.keys
    if isinstance(keys, RemoteKeys):
        uri = {"uri": keys.url, "cluster": _JWKS, "timeout": "5s"}
        source: Json = {
            "remote_jwks": {
                "http_uri": uri,
                "cache_duration": "300s",
                "async_fetch": {"fast_listener": True},
            }
        }
    else:
        source = {"local_jwks": {"inline_string": keys}}
    provider = {
        "issuer": tokens.issuer,
        **({"audiences": list(tokens.audiences)} if tokens.audiences else {}),
        "require_expiration": True,
        "claim_to_headers": [{"header_name": _CLAIM, "claim_name": tokens.claim}],
        **source,
    }
    checked = extension(
        "envoy.filters.http.jwt_authn",
        f"{_FILTERS}.jwt_authn.v3.JwtAuthentication",
        providers={"tenants": provider},
        rules=[{"match": {"prefix": "/"}, "requires": {"provider_name": "tenants"}}],
    )
    if not beside_keys:
        return {**checked, "name": _TOKENS_FILTER}
    return _unless(_TOKENS_FILTER, {"not_matcher": _is_token()}, checked)


def _is_token() -> Json:
    form = {"google_re2": {}, "regex": f"(?i:bearer) +{JWT_SHAPE}"}
    return _has_header("authorization", {"safe_regex": form})


def _has_header(name: str, value: Json) -> Json:
    kind = "envoy.type.matcher.v3.HttpRequestHeaderMatchInput"
    header = extension("header", kind, header_name=name)
    return {"single_predicate": {"input": header, "value_match": value}}


def _unless(name: str, predicate: Json, checked: Json) -> Json:
    """Build a filter that is skipped where the request matches."""
    skip = extension("skip", "envoy.extensions.filters.common.matcher.action.v3.SkipFilter")
    match = {"predicate": predicate, "on_match": {"action": skip}}
    return extension(
        name,
        _MATCHING,
        xds_matcher={"matcher_list": {"matchers": [match]}},
        extension_config=checked,
    )


def _naming(tenants: tuple[AllowedTenant, ...]) -> Json:
    def headers(one: AllowedTenant) -> str:
        counted = "yes" if one.requests_per_minute else ""
        given = {OBJECTIVE: one.objective, TOKEN_LIMIT: one.token_limit, _COUNTED: counted}
        pairs = (f"[{_quoted(name)}] = {_quoted(text)}" for name, text in given.items() if text)
        return f"{{{', '.join(pairs)}}}"

    rows = "".join(f"  [{_quoted(one.name)}] = {headers(one)},\n" for one in tenants)
    claims = "".join(
        f"  [{_quoted(one.claim)}] = {_quoted(one.name)},\n" for one in tenants if one.claim
    )
    code = _LUA % (rows, claims, _CLAIM, TENANT, _CLAIM, TENANT)
    if any(one.requests_per_minute for one in tenants):
        code += _LUA_RETRY_AFTER
    return extension(
        _TENANTS_FILTER,
        "envoy.extensions.filters.http.lua.v3.Lua",
        default_source_code={"inline_string": code},
    )


def _quoted(text: str) -> str:
    """Quote printable ASCII for Lua, whose escapes of quotation marks and backslashes JSON has."""
    return json.dumps(text)


def _requests(tenants: tuple[AllowedTenant, ...]) -> Json:
    limits = {one.name: one.requests_per_minute for one in tenants if one.requests_per_minute}
    counting = extension(
        "envoy.filters.http.local_ratelimit",
        f"{_FILTERS}.local_ratelimit.v3.LocalRateLimit",
        stat_prefix="tenants",
        filter_enabled=dict(_ALL),
        filter_enforced=dict(_ALL),
        token_bucket=_NO_LIMIT,
        always_consume_default_token_bucket=False,
        enable_x_ratelimit_headers="DRAFT_VERSION_03",
        rate_limits=[
            {"actions": [{"request_headers": {"header_name": TENANT, "descriptor_key": "tenant"}}]}
        ],
        descriptors=[
            {
                "entries": [{"key": "tenant", "value": name}],
                "token_bucket": {
                    "max_tokens": limit,
                    "tokens_per_fill": limit,
                    "fill_interval": "60s",
                },
            }
            for name, limit in limits.items()
        ],
    )
    # Others would be shown a limit that they do not have.
    return _unless(
        _REQUESTS_FILTER, {"not_matcher": _has_header(_COUNTED, {"exact": "yes"})}, counting
    )


def _key_server(keys: RemoteKeys) -> Json:
    place = {"socket_address": {"address": keys.host, "port_value": keys.port}}
    members = [{"lb_endpoints": [{"endpoint": {"address": place}}]}]
    cluster: Json = {
        "name": _JWKS,
        "type": "STRICT_DNS",
        "dns_lookup_family": "V4_PREFERRED",  # many machines have no way to the other
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": _JWKS, "endpoints": members},
    }
    if keys.ca is None:
        return cluster
    names = [{"san_type": "DNS", "matcher": {"exact": keys.host}}]
    trusted = {"trusted_ca": {"filename": keys.ca}, "match_typed_subject_alt_names": names}
    context = packed(
        "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        sni=keys.host,
        common_tls_context={"validation_context": trusted},
    )
    return {**cluster, "transport_socket": {"name": "tls", "typed_config": context}}
