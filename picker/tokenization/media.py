"""How many tokens an image, a video or a sound is estimated to take in a prompt.

- image: width · height / 1024, of its real size where a `data:` URL tells it, else of 640 × 360
  (225 tokens); or a fixed number (`static`).
- video: frames · tokens of a frame, `maxVideoTokens` at most. A frame is counted as an image of the
  default size. Frames: duration · 2 a second (`sampled`), merged by `temporalPatchSize`; or every
  `frameStride`-th of duration · source rate (`strided`). 10 s and 24 frames a second by default.
  The headers `x-llm-d-video-duration-seconds`, `-resolution` (`WxH`) and `-fps` say better.
- sound: a quarter of the characters of its data and format, rounded up.

Always at least one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from picker.framework.registry import Parameters
from picker.tokenization.image_size import Size, base64_image_size, data_url_image_size
from picker.types import BYTES_PER_TOKEN

VIDEO_DURATION = "x-llm-d-video-duration-seconds"
VIDEO_RESOLUTION = "x-llm-d-video-resolution"
VIDEO_FPS = "x-llm-d-video-fps"


class Resolution(Parameters, frozen=True):
    """Pixels."""

    width: int = 640
    height: int = 360


class DynamicTokens(Parameters, frozen=True):
    """Tokens by size: pixels to a token."""

    factor: int = 1024


class StaticImageTokens(Parameters, frozen=True):
    """Tokens of every image."""

    static_token: int = 0


class ImageParameters(Parameters, frozen=True):
    """`estimate.image`."""

    mode: Literal["dynamic", "static"] = "dynamic"
    default_resolution: Resolution = Resolution()
    static: StaticImageTokens = StaticImageTokens()
    dynamic: DynamicTokens = DynamicTokens()


class StaticFrameTokens(Parameters, frozen=True):
    """Tokens of every frame."""

    num_tokens_per_frame: int = 0


class FrameTokens(Parameters, frozen=True):
    """`estimate.video.tokensPerFrame`."""

    mode: Literal["dynamic", "static"] = "dynamic"
    static: StaticFrameTokens = StaticFrameTokens()
    dynamic: DynamicTokens = DynamicTokens()


class SampledFrames(Parameters, frozen=True):
    """Frames taken at a rate, then merged."""

    sample_fps: float = msgspec.field(default=2.0, name="sampleFPS")
    temporal_patch_size: int = 0


class StridedFrames(Parameters, frozen=True):
    """Every so many frames of the source."""

    default_source_fps: float = msgspec.field(default=24.0, name="defaultSourceFPS")
    frame_stride: int = 1


class Frames(Parameters, frozen=True):
    """`estimate.video.frames`; of the bounds 0 is none."""

    mode: Literal["sampled", "strided"] = "sampled"
    min_frames: int = 0
    max_frames: int = 0
    sampled: SampledFrames = SampledFrames()
    strided: StridedFrames = StridedFrames()


class VideoParameters(Parameters, frozen=True):
    """`estimate.video`; `defaultDuration` in seconds, `maxVideoTokens` 0 is no bound."""

    default_resolution: Resolution = Resolution()
    default_duration: float = 10.0
    tokens_per_frame: FrameTokens = FrameTokens()
    frames: Frames = Frames()
    max_video_tokens: int = 0


class EstimateParameters(Parameters, frozen=True):
    """`estimate` of a token-producer."""

    image: ImageParameters = ImageParameters()
    video: VideoParameters = VideoParameters()

    def check(self) -> None:
        """Raises `ValueError` for numbers that make no sense."""
        image, video = self.image, self.video
        static, per_frame = image.static.static_token, video.tokens_per_frame
        _positive(
            {
                "image.defaultResolution.width": image.default_resolution.width,
                "image.defaultResolution.height": image.default_resolution.height,
                "image.dynamic.factor": image.dynamic.factor,
                "video.defaultResolution.width": video.default_resolution.width,
                "video.defaultResolution.height": video.default_resolution.height,
                "video.defaultDuration": video.default_duration,
                "video.tokensPerFrame.dynamic.factor": per_frame.dynamic.factor,
                "video.frames.sampled.sampleFPS": video.frames.sampled.sample_fps,
                "video.frames.strided.defaultSourceFPS": video.frames.strided.default_source_fps,
                "video.frames.strided.frameStride": video.frames.strided.frame_stride,
                "image.static.staticToken": 1 if image.mode == "dynamic" else static,
                "video.tokensPerFrame.static.numTokensPerFrame": (
                    1 if per_frame.mode == "dynamic" else per_frame.static.num_tokens_per_frame
                ),
            }
        )
        for name, value in (
            ("frames.minFrames", video.frames.min_frames),
            ("frames.maxFrames", video.frames.max_frames),
            ("frames.sampled.temporalPatchSize", video.frames.sampled.temporal_patch_size),
            ("maxVideoTokens", video.max_video_tokens),
        ):
            if value < 0:
                raise ValueError(f"estimate.video.{name} must not be negative, got {value}")


def _positive(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not value > 0 or math.isinf(value):
            raise ValueError(f"estimate.{name} must be positive, got {value}")


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Counts the tokens of media items. A value."""

    parameters: EstimateParameters

    def of_image_url(self, url: str) -> int:
        """Tokens of the image at `url`."""
        return self._of_image(data_url_image_size(url) if self._needs_size else None)

    def of_image_base64(self, data: str) -> int:
        """Tokens of the image that `data` is."""
        return self._of_image(base64_image_size(data) if self._needs_size else None)

    def of_video(self, headers: Mapping[str, str]) -> int:
        """Tokens of a video of which the request's `headers` may tell more."""
        video = self.parameters.video
        tokens = self._frames(headers) * self._tokens_per_frame(headers)
        if video.max_video_tokens:
            tokens = min(tokens, video.max_video_tokens)
        return max(1, tokens)

    def of_sound(self, num_characters: int) -> int:
        """Tokens of a sound whose data and format have so many characters."""
        return max(1, -(-num_characters // BYTES_PER_TOKEN))

    @property
    def _needs_size(self) -> bool:
        return self.parameters.image.mode == "dynamic"

    def _of_image(self, size: Size | None) -> int:
        image = self.parameters.image
        if image.mode == "static":
            return image.static.static_token
        width, height = size or (image.default_resolution.width, image.default_resolution.height)
        return max(1, width * height // image.dynamic.factor)

    def _tokens_per_frame(self, headers: Mapping[str, str]) -> int:
        video = self.parameters.video
        if video.tokens_per_frame.mode == "static":
            return video.tokens_per_frame.static.num_tokens_per_frame
        default = (video.default_resolution.width, video.default_resolution.height)
        width, height = _resolution(headers.get(VIDEO_RESOLUTION)) or default
        return max(1, width * height // video.tokens_per_frame.dynamic.factor)

    def _frames(self, headers: Mapping[str, str]) -> int:
        video = self.parameters.video
        frames, sampled, strided = video.frames, video.frames.sampled, video.frames.strided
        duration = _positive_number(headers.get(VIDEO_DURATION)) or video.default_duration
        if frames.mode == "sampled":
            number = _within(_whole(duration * sampled.sample_fps), frames)
            return -(-number // max(1, sampled.temporal_patch_size))
        fps = _positive_number(headers.get(VIDEO_FPS)) or strided.default_source_fps
        return _within(_whole(duration * fps) // strided.frame_stride, frames)


def _within(number: int, frames: Frames) -> int:
    number = max(number, frames.min_frames)
    return min(number, frames.max_frames) if frames.max_frames else number


def _whole(value: float) -> int:
    # The product of two finite numbers need not be finite.
    return int(min(value, 2.0**63))


def _positive_number(text: str | None) -> float | None:
    try:
        value = float(text or "0")
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def _resolution(text: str | None) -> Size | None:
    width, _, height = (text or "").lower().partition("x")
    size = (_positive_int(width), _positive_int(height))
    return size if min(size) > 0 else None


def _positive_int(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
