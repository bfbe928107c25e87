"""The simulator's part of the worker's command line (`--engine sim`)."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace

from worker.errors import ConfigError
from worker.sim import tokenizer as sim
from worker.sim.config import FaultConfig, SimConfig
from worker.sim.settings import MODES, PRESETS, SETTINGS, Kind, Setting, apply
from worker.tokenizer.checkpoint import Checkpoint

# These flags take milliseconds and have the suffix -ms.
_MILLISECONDS = {"step-overhead", "decode-base", "decode-per-seq"}
_defaults = SimConfig()


def add_sim_flags(group: argparse._ArgumentGroup) -> None:
    """Add the simulator's flags, without defaults: the real ones depend on the preset."""
    group.add_argument(
        "--sim-preset",
        choices=tuple(PRESETS),
        help="settings of a published profile, for the flags that are not given",
    )
    for setting in SETTINGS:
        group.add_argument(
            _flag(setting),
            dest=_dest(setting),
            type=_parser(setting),
            choices=setting.choices or None,
            metavar=None if setting.choices else setting.kind.value.upper(),
            help=f"{setting.text} (default {setting.show(_defaults)})",
        )
    group.add_argument(
        "--sim-seed", type=int, default=_defaults.seed, help="seed of tokens, noise and faults"
    )
    group.add_argument(
        "--sim-mode",
        choices=MODES,
        default=_defaults.mode,
        help="random answers with words, echo with the prompt (default %(default)s)",
    )
    group.add_argument(
        "--sim-startup-duration",
        type=_startup,
        default=0.0,
        metavar="DURATION",
        help="time after the start during which /health/ready answers 503",
    )
    group.add_argument(
        "--enable-fault-injection",
        action="store_true",
        help="accept faults over /admin/config with a real model too; the simulator always accepts"
        " them",
    )


def _flag(setting: Setting) -> str:
    return f"--sim-{setting.name}" + ("-ms" if setting.name in _MILLISECONDS else "")


def _dest(setting: Setting) -> str:
    return f"sim_{setting.field}"


def _parser(setting: Setting) -> Callable[[str], object]:
    def parse(text: str) -> object:
        try:
            return setting.parse(float(text) if setting.kind is Kind.NUMBER else text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parse.__name__ = setting.kind.value  # argparse names it in "invalid … value"
    return parse


def _startup(text: str) -> float:
    seconds = Setting("sim-startup-duration", "", "").parse(text)
    return float(seconds)


def sim_config(
    options: argparse.Namespace, checkpoint: Checkpoint | None, eos_token_ids: tuple[int, ...]
) -> SimConfig:
    """Build the simulator's configuration: defaults, preset, flags. Raise `ConfigError`."""
    first, count, vocab_size = sim.FIRST_WORD_ID, sim.NUM_WORDS, sim.VOCAB_SIZE
    turn_token_id: int | None = sim.IM_START_ID
    if checkpoint is not None:
        # Real vocabularies begin with control tokens and bytes; ordinary text follows.
        vocab_size = checkpoint.vocab_size
        first = min(512, vocab_size // 2)
        count = max(1, min(16_384, vocab_size - first))
        begins_turns = checkpoint.bos_token == sim.IM_START
        turn_token_id = checkpoint.bos_token_id if begins_turns else None
    base = SimConfig(
        seed=options.sim_seed,
        mode=options.sim_mode,
        first_word_id=first,
        num_words=count,
        vocab_size=vocab_size,
        end_token_id=eos_token_ids[0] if eos_token_ids else None,
        turn_token_id=turn_token_id,
    )
    base = apply(base, PRESETS.get(options.sim_preset or "", {}))
    fields = {s.field: getattr(options, _dest(s)) for s in SETTINGS}
    given = {field: value for field, value in fields.items() if value is not None}
    return apply(replace(base, **given), {})


def fault_config(options: argparse.Namespace, environment: Mapping[str, str]) -> FaultConfig | None:
    """Return the configuration of fault injection; None: off. Headers name a simulator in a pod."""
    if options.engine != "sim":
        return FaultConfig() if options.enable_fault_injection else None
    headers: tuple[tuple[str, str], ...] = ()
    pod = environment.get("POD_NAME")
    if pod:
        headers = (
            ("x-inference-pod", pod),
            ("x-inference-port", str(options.port)),
            ("x-inference-namespace", environment.get("POD_NAMESPACE", "")),
        )
    return FaultConfig(options.sim_startup_duration, headers)
