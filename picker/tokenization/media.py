"""Estimates the tokens that an image, a video or a sound takes in a prompt, at least one.

- image: width · height / 1024, with the real size if a `data:` URL contains it, else 640 × 360
  (225 tokens); or a fixed number (`static`).
- video: frames · tokens per frame, at most `maxVideoTokens`. A frame counts as an image of the
  default size. Frames: duration · 2 per second (`sampled`), merged by `temporalPatchSize`; or every
  `frameStride`-th frame of duration · source rate (`strided`). Defaults: 10 s, 24 frames/s.
  The headers `x-llm-d-video-duration-seconds`, `-resolution` (`WxH`) and `-fps` override them.
- sound: the characters of its data and format / 4, rounded up.
"""

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
    width: int = 640  # pixels
    height: int = 360


class DynamicTokens(Parameters, frozen=True):
    factor: int = 1024  # pixels per token


class StaticImageTokens(Parameters, frozen=True):
    static_token: int = 0  # tokens of every image


class ImageParameters(Parameters, frozen=True):
    mode: Literal["dynamic", "static"] = "dynamic"
    default_resolution: Resolution = Resolution()
    static: StaticImageTokens = StaticImageTokens()
    dynamic: DynamicTokens = DynamicTokens()


class StaticFrameTokens(Parameters, frozen=True):
    num_tokens_per_frame: int = 0


class FrameTokens(Parameters, frozen=True):
    mode: Literal["dynamic", "static"] = "dynamic"
    static: StaticFrameTokens = StaticFrameTokens()
    dynamic: DynamicTokens = DynamicTokens()


class SampledFrames(Parameters, frozen=True):
    """Samples frames at a rate, then merges them in groups of `temporal_patch_size`."""

    sample_fps: float = msgspec.field(default=2.0, name="sampleFPS")
    temporal_patch_size: int = 0


class StridedFrames(Parameters, frozen=True):
    """Takes every `frame_stride`-th frame of the source."""

    default_source_fps: float = msgspec.field(default=24.0, name="defaultSourceFPS")
    frame_stride: int = 1


class Frames(Parameters, frozen=True):
    """`estimate.video.frames`; a bound of 0 means no bound."""

    mode: Literal["sampled", "strided"] = "sampled"
    min_frames: int = 0
    max_frames: int = 0
    sampled: SampledFrames = SampledFrames()
    strided: StridedFrames = StridedFrames()


class VideoParameters(Parameters, frozen=True):
    """`estimate.video`; `defaultDuration` is in seconds, `maxVideoTokens` 0 means no bound."""

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
    parameters: EstimateParameters

    def of_image_url(self, url: str) -> int:
        return self._of_image(data_url_image_size(url) if self._needs_size else None)

    def of_image_base64(self, data: str) -> int:
        return self._of_image(base64_image_size(data) if self._needs_size else None)

    def of_video(self, headers: Mapping[str, str]) -> int:
        """Count the tokens of a video; the request's `headers` override the defaults."""
        video = self.parameters.video
        tokens = self._frames(headers) * self._tokens_per_frame(headers)
        if video.max_video_tokens:
            tokens = min(tokens, video.max_video_tokens)
        return max(1, tokens)

    def of_sound(self, num_characters: int) -> int:
        """Count the tokens of a sound; `num_characters` are those of its data and format."""
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
    # The product of two finite numbers may be infinite.
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
