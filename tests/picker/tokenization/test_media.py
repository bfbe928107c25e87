"""The number of tokens of images, videos and sounds is estimated."""

import base64
from struct import pack
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.tokenization.media import EstimateParameters, MediaTokens

LINK = "https://example.org/i.png"
DURATION = "x-llm-d-video-duration-seconds"
RESOLUTION = "x-llm-d-video-resolution"
FPS = "x-llm-d-video-fps"


def tokens(**parameters: Any) -> MediaTokens:
    decoded = msgspec.convert(parameters, EstimateParameters)
    decoded.check()
    return MediaTokens(decoded)


def image(width: int, height: int) -> str:
    data = b"\x89PNG\r\n\x1a\n" + pack(">I4sII", 13, b"IHDR", width, height) + bytes(16)
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("parameters", "link", "large", "tiny"),
    [
        ({}, 225, 1200, 1),
        ({"dynamic": {"factor": 100}}, 2304, 12288, 1),
        ({"defaultResolution": {"width": 32, "height": 64}}, 2, 1200, 1),
        ({"mode": "static", "static": {"staticToken": 77}}, 77, 77, 77),
    ],
)
def test_an_image_takes_tokens_by_its_size(
    parameters: dict[str, Any], link: int, large: int, tiny: int
) -> None:
    media = tokens(image=parameters)
    assert media.of_image_url(LINK) == link
    assert media.of_image_url("data:image/png;base64," + image(1280, 960)) == large
    assert media.of_image_base64(image(1280, 960)) == large
    assert media.of_image_base64(image(3, 3)) == tiny
    assert media.of_image_base64("") == link


@pytest.mark.parametrize(
    ("parameters", "headers", "expected"),
    [
        ({}, {}, 4500),
        ({}, {DURATION: "2.5"}, 5 * 225),
        ({}, {DURATION: "2.5", RESOLUTION: "64x32"}, 5 * 2),
        ({}, {DURATION: "0.1"}, 1),
        ({"defaultDuration": 1.5}, {}, 3 * 225),
        ({"defaultResolution": {"width": 64, "height": 64}}, {}, 20 * 4),
        ({"tokensPerFrame": {"dynamic": {"factor": 2048}}}, {}, 20 * 112),
        ({"tokensPerFrame": {"mode": "static", "static": {"numTokensPerFrame": 3}}}, {}, 60),
        ({"maxVideoTokens": 100}, {}, 100),
        ({"frames": {"sampled": {"sampleFPS": 0.5}}}, {}, 5 * 225),
        ({"frames": {"sampled": {"sampleFPS": 0.5, "temporalPatchSize": 2}}}, {}, 3 * 225),
        ({"frames": {"minFrames": 30}}, {}, 30 * 225),
        ({"frames": {"maxFrames": 8}}, {}, 8 * 225),
        ({"frames": {"mode": "strided"}}, {}, 240 * 225),
        ({"frames": {"mode": "strided", "strided": {"frameStride": 7}}}, {}, 34 * 225),
        ({"frames": {"mode": "strided", "strided": {"defaultSourceFPS": 1}}}, {}, 10 * 225),
        ({"frames": {"mode": "strided", "maxFrames": 9}}, {FPS: "30"}, 9 * 225),
        ({"frames": {"mode": "strided"}}, {FPS: "0.5"}, 5 * 225),
        ({}, {FPS: "60"}, 4500),
    ],
)
def test_a_video_takes_tokens_by_its_frames(
    parameters: dict[str, Any], headers: dict[str, str], expected: int
) -> None:
    assert tokens(video=parameters).of_video(headers) == expected


@pytest.mark.parametrize(
    "value", ["", "x", "-1", "nan", "inf", "0", "1e999", "0x0", "5x", "ax5", "1x1x1"]
)
def test_invalid_headers_are_ignored(value: str) -> None:
    assert tokens().of_video({DURATION: value, RESOLUTION: value, FPS: value}) == 4500


@given(st.text(max_size=12), st.floats())
def test_headers_never_raise(text: str, number: float) -> None:
    for value in (text, str(number)):
        headers = {DURATION: value, RESOLUTION: f"{value}x{value}", FPS: value}
        for mode in ("sampled", "strided"):
            assert tokens(video={"frames": {"mode": mode}}).of_video(headers) >= 1


@pytest.mark.parametrize(("characters", "expected"), [(0, 1), (1, 1), (4, 1), (5, 2), (400, 100)])
def test_a_sound_takes_a_quarter_of_its_characters(characters: int, expected: int) -> None:
    assert tokens().of_sound(characters) == expected


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"image": {"dynamic": {"factor": 0}}}, "image.dynamic.factor"),
        ({"image": {"mode": "static"}}, "image.static.staticToken"),
        ({"image": {"defaultResolution": {"width": -1}}}, "image.defaultResolution.width"),
        ({"video": {"defaultDuration": 0}}, "video.defaultDuration"),
        ({"video": {"tokensPerFrame": {"mode": "static"}}}, "static.numTokensPerFrame"),
        ({"video": {"frames": {"strided": {"frameStride": 0}}}}, "strided.frameStride"),
        ({"video": {"frames": {"sampled": {"sampleFPS": 0}}}}, "sampled.sampleFPS"),
        ({"video": {"frames": {"maxFrames": -1}}}, "frames.maxFrames"),
        ({"video": {"maxVideoTokens": -1}}, "maxVideoTokens"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(parameters: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        tokens(**parameters)


@pytest.mark.parametrize(
    "parameters", [{"image": {"mode": "odd"}}, {"video": {"fps": 1}}, {"audio": {}}]
)
def test_unknown_names_and_modes_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        tokens(**parameters)
