"""`pointsman completion`: scripts that complete commands, their flags and the values of flags."""

import argparse
from collections.abc import Iterator, Mapping, Sequence

_BASH = """\
_pointsman() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}} $before" in
{values}
        *)
            case "${{COMP_WORDS[1]}}" in
{flags}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _pointsman pointsman
"""
_ZSH = "#compdef pointsman\nautoload -U +X bashcompinit && bashcompinit\n"  # zsh runs bash's script


def script(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    return "".join(_fish(parsers)) if shell == "fish" else _bash(parsers, is_zsh=shell == "zsh")


def _bash(parsers: Mapping[str, argparse.ArgumentParser], *, is_zsh: bool) -> str:
    values, flags = [], []
    for name, parser in parsers.items():
        words: list[str] = []
        for action in _actions(parser):
            choices = _choices(action)
            words += action.option_strings or choices
            if action.option_strings and choices:
                cases = "|".join(f'"{name} {one}"' for one in action.option_strings)
                values.append(f'        {cases}) words="{" ".join(choices)}" ;;')
        flags.append(f'            {name}) words="{" ".join(words)}" ;;')
    return (_ZSH if is_zsh else "") + _BASH.format(
        commands=" ".join(parsers), values="\n".join(values), flags="\n".join(flags)
    )


def _fish(parsers: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    for name, parser in parsers.items():
        about = _quoted(parser.description or "")
        yield f"complete -c pointsman -n __fish_use_subcommand -f -a {name} -d {about}\n"
        for action in _actions(parser):
            where = f"complete -c pointsman -n '__fish_seen_subcommand_from {name}'"
            choices = _choices(action)
            words = f" -f -a {_quoted(' '.join(choices))}" if choices else ""
            for option in action.option_strings:
                kind = f"-l {option[2:]}" if option.startswith("--") else f"-o {option[1:]}"
                takes = "" if action.nargs == 0 else " -r"
                yield f"{where} {kind}{takes}{words}\n"
            if choices and not action.option_strings:
                yield f"{where}{words}\n"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield action


def _choices(action: argparse.Action) -> Sequence[str]:
    return [str(one) for one in action.choices or ()]


def _quoted(text: str) -> str:
    # argparse has percent signs doubled in help.
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("%%", "%") + "'"
