"""Envoy's reports on responses to the picker (`response_bodies` USAGE), in place of the bodies.

A Lua filter reads each response that the picker gave an id: the number of pieces, the time of the
first one, and the bytes that may hold the usage. It writes them as metadata at the end, and the
access log, whose gRPC stream leads to the picker, sends them with the id. A call for each response
would cost more than this stream.

Calls from Lua to C are what costs, about a microsecond each. So a piece of an event stream is
copied as a whole, and one of another kind of body is only measured.
"""

from fleet.envoy.clusters import PICKER
from fleet.envoy.proto import Json, extension, packed, seconds
from fleet.envoy.settings import DESTINATION_NAMESPACE

REPORT_ID = "x-pointsman-report"
# Below a timeout that an answer could notice; Lua does not wait for it.
_CALL_MILLISECONDS = 1000
# A body of one JSON document is read whole, up to this; of a longer one, the end.
MAX_DOCUMENT_BYTES = 64 * 1024
MAX_PIECE_BYTES = 16 * 1024

# An id begins with `f` if the picker also asks for the time of the first piece, when it arrives.
# The usage of an event stream is in its last events, which the last three pieces hold, or
# (Anthropic's prompt tokens) in its first one. Text beyond ASCII is of no use to the picker, and
# metadata must be valid UTF-8, which a piece need not be.
LUA = f"""\
local function now(handle)
  return tonumber(handle:timestampString(EnvoyTimestampResolution.MICROSECOND))
end

local function report_first(handle, id, size)
  local said = id .. " " .. size
  handle:httpCall("{PICKER}", {{
    [":method"] = "POST",
    [":path"] = "/pointsman.picker.v1.Responses/FirstPiece",
    [":authority"] = "{PICKER}",
    ["content-type"] = "application/grpc",
  }}, "\\0\\0\\0\\0" .. string.char(#said) .. said, {_CALL_MILLISECONDS}, true)
end

local function piece_of(chunk, size)
  if size > {MAX_PIECE_BYTES} then
    return chunk:getBytes(size - {MAX_PIECE_BYTES}, {MAX_PIECE_BYTES})
  end
  return chunk:getBytes(0, size)
end

local function ascii(text)
  if string.find(text, "[\\128-\\255]") then
    return (string.gsub(text, "[\\128-\\255]", "?"))
  end
  return text
end

function envoy_on_response(handle)
  local known = handle:streamInfo():dynamicMetadata():get("{DESTINATION_NAMESPACE}")
  local id = known and known["{REPORT_ID}"]
  if not id then return end
  local kind = handle:headers():get("content-type") or ""
  local is_stream = string.find(kind, "text/event-stream", 1, true)
  local is_document = not is_stream and string.find(kind, "json", 1, true)
  local began, after, pieces = now(handle), 0, 0
  local first, third, second, last = "", "", "", ""
  local document, held = {{}}, 0
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    if size > 0 then
      pieces = pieces + 1
      if pieces == 1 then
        after = now(handle) - began
        if string.byte(id) == 102 then report_first(handle, id, size) end
      end
      if is_stream then
        third, second, last = second, last, piece_of(chunk, size)
        if pieces == 1 and string.find(last, '"usage"', 1, true) then first = last end
      elseif is_document then
        document[#document + 1] = piece_of(chunk, size)
        held = held + #document[#document]
        if held > {MAX_DOCUMENT_BYTES} then
          document = {{string.sub(table.concat(document), -{MAX_PIECE_BYTES})}}
          held = #document[1]
        end
      end
    end
  end
  if pieces <= 3 then first = "" end
  local text = is_document and table.concat(document) or first .. third .. second .. last
  local said = pieces .. " " .. after .. "\\n" .. ascii(text)
  -- Not the object from above, which is of no use after the wait for pieces.
  handle:streamInfo():dynamicMetadata():set("pointsman", "report", said)
end
"""


def lua_filter() -> Json:
    return extension(
        "envoy.filters.http.lua",
        "envoy.extensions.filters.http.lua.v3.Lua",
        default_source_code={"inline_string": LUA},
    )


def access_log() -> Json:
    """Build the access log that sends reports; it writes only responses with an id."""
    present = {
        "filter": DESTINATION_NAMESPACE,
        "path": [{"key": REPORT_ID}],
        "value": {"present_match": True},
    }
    config = {
        "log_name": "pointsman",
        "transport_api_version": "V3",
        "grpc_service": {"envoy_grpc": {"cluster_name": PICKER}},
        "buffer_size_bytes": 0,  # every entry leaves at once
        "buffer_flush_interval": seconds(1),
    }
    kind = "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig"
    return {
        "filter": {"metadata_filter": {"matcher": present, "match_if_key_not_found": False}},
        "name": "envoy.access_loggers.http_grpc",
        "typed_config": packed(kind, common_config=config),
    }
