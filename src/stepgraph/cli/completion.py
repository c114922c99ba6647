"""`stepgraph completion SHELL`: a script that completes the command line, generated from the parser."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from shlex import quote
from string import Template

from stepgraph.cli import device_argument

HELP = "print the completion script for bash, zsh or fish"

EXAMPLES = """
to use it:
  bash   echo 'source <(stepgraph completion bash)' >> ~/.bashrc
  zsh    stepgraph completion zsh > ~/.zfunc/_stepgraph
         with fpath=(~/.zfunc $fpath) before compinit in ~/.zshrc
  fish   stepgraph completion fish > ~/.config/fish/completions/stepgraph.fish
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `completion`."""
    parser.epilog = EXAMPLES
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SHELLS), help=", ".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    from stepgraph.cli.main import parser

    print(SHELLS[arguments.shell](described(parser())), end="")
    return 0


@dataclass(frozen=True)
class Argument:
    """An option, or a positional argument (without flags)."""

    flags: tuple[str, ...]
    help: str
    value: str  # its value: "" for none, "file", "devices", "other", or words to choose from

    @property
    def words(self) -> str:
        """The values to choose from."""
        return "" if self.value in ("", "file", "devices", "other") else self.value


@dataclass(frozen=True)
class Command:
    """A subcommand; the command itself has no name."""

    name: str
    help: str
    arguments: tuple[Argument, ...]

    @property
    def flags(self) -> str:
        """All flags."""
        return " ".join(flag for one in self.arguments for flag in one.flags)

    @property
    def positional(self) -> Argument | None:
        """The positional argument."""
        return next((one for one in self.arguments if not one.flags), None)


def described(parser: argparse.ArgumentParser) -> list[Command]:
    """The command and its subcommands, as a shell needs them."""
    found = [_command("", "", parser)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help or "" for one in action._choices_actions}
            found += [_command(name, helps[name], one) for name, one in action.choices.items()]
    return found


def _command(name: str, text: str, parser: argparse.ArgumentParser) -> Command:
    actions = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    return Command(
        name,
        text,
        tuple(Argument(tuple(one.option_strings), (one.help or "").replace("%%", "%"), _value(one)) for one in actions),
    )


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    metavar = str(action.metavar)
    if metavar.startswith("DEVICE"):
        return "devices"
    return "file" if metavar.startswith(("FILE", "FOLDER", "RUN", "CODE")) else "other"


# The scripts

_BASH = Template("""\
# Lets bash complete `stepgraph`: source <(stepgraph completion bash)

_stepgraph_devices() {  # names; settings after a colon; names again after a comma
    local done="" word=$$1
    if [[ $$word == *,* ]]; then
        done="$${word%,*}," word=$${word##*,}
        COMPREPLY=($$(compgen -P "$$done" -W "$names" -- "$$word"))
    elif [[ $$word == : || $${COMP_WORDS[COMP_CWORD-1]} == : ]]; then
        COMPREPLY=($$(compgen -W "$settings" -- "$${word#:}"))
    else
        COMPREPLY=($$(compgen -W "$names" -- "$$word"))
    fi
}

_stepgraph_files() {
    COMPREPLY=($$(compgen -f -- "$$1"))
    compopt -o filenames 2>/dev/null
}

_stepgraph() {
    local current=$${COMP_WORDS[COMP_CWORD]} command="" word index=$$((COMP_CWORD - 1))
    COMPREPLY=()
    for word in "$${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case $$word in
            $choice) command=$$word; break ;;
        esac
    done
    # bash splits a:b at the colon: what matters is the word before all of it.
    while [[ $$index -gt 1 && ($${COMP_WORDS[index]} == : || $${COMP_WORDS[index+1]} == :) ]]; do
        index=$$((index - 1))
    done
    case $$command,$${COMP_WORDS[index]} in
$values
    esac
    case $$command in
$commands
    esac
}

complete -F _stepgraph stepgraph
""")


def bash(commands: list[Command]) -> str:
    """A function for bash's `complete`."""
    main, *others = commands
    values, cases = [], []
    for command in commands:
        for one in command.arguments:
            if one.flags and one.value:
                labels = "|".join(f"{command.name},{flag}" for flag in one.flags)
                values.append(f"        {labels}) {_bash_value(one)}return ;;")
    names = " ".join(one.name for one in others)
    cases.append(f'        "") COMPREPLY=($(compgen -W "{names} {main.flags}" -- "$current")) ;;')
    for command in others:
        value = "" if command.positional is None else _bash_value(command.positional)
        rest = f" else {value}" if value else ""
        flags = f'if [[ $current == -* ]]; then COMPREPLY=($(compgen -W "{command.flags}" -- "$current"));'
        cases.append(f"        {command.name}) {flags}{rest} fi ;;")
    return _BASH.substitute(
        names=" ".join(device_argument.NAMES),
        settings=" ".join(device_argument.SETTINGS),
        choice="|".join(one.name for one in others),
        values="\n".join(values),
        commands="\n".join(cases),
    )


def _bash_value(one: Argument) -> str:
    if one.value == "other":
        return ""
    if one.words:
        return f'COMPREPLY=($(compgen -W "{one.words}" -- "$current")); '
    return f'_stepgraph_{"files" if one.value == "file" else "devices"} "$current"; '


def zsh(commands: list[Command]) -> str:
    """A function for zsh's `compinit`."""
    main, *others = commands
    listed = "\n".join(f"    {quote(f'{one.name}:{one.help}')}" for one in others)
    cases = "\n".join(f"      {one.name}) _arguments {_zsh_arguments(one)} ;;" for one in others)
    return f"""\
#compdef stepgraph
# Lets zsh complete `stepgraph`: a file called _stepgraph in a folder of $fpath.

_stepgraph() {{
  local -a commands line
  local state
  commands=(
{listed}
  )
  _arguments -C {_zsh_arguments(main)} '1: :->command' '*:: :->rest'
  case $state in
    command) _describe command commands ;;
    rest) case $line[1] in
{cases}
    esac ;;
  esac
}}

if [[ $funcstack[1] == _stepgraph ]]; then _stepgraph "$@"; else compdef _stepgraph stepgraph; fi
"""


def _zsh_arguments(command: Command) -> str:
    found = []
    for one in command.arguments:
        text = "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in one.help)
        devices = f"_values -s , device {' '.join(device_argument.NAMES)}"
        action = {"file": "_files", "devices": devices, "other": " "}.get(one.value, f"({one.words})")
        if not one.flags:
            found.append(quote(f"1:{text}:{action}"))
        others, value = " ".join(one.flags), f":value:{action}" if one.value else ""
        found += [quote(f"({others}){flag}[{text}]{value}") for flag in one.flags]
    return " ".join(found)


def fish(commands: list[Command]) -> str:
    """Lines for fish's `complete`."""
    main, *others = commands
    outside = "not __fish_seen_subcommand_from " + " ".join(one.name for one in others)
    lines = ["# Lets fish complete `stepgraph`: ~/.config/fish/completions/stepgraph.fish", "complete -c stepgraph -f"]
    lines += [_fish_line(outside, f" -a {one.name}", one.help) for one in others]
    lines += [_fish_argument(outside, one) for one in main.arguments]
    for command in others:
        lines += [_fish_argument(f"__fish_seen_subcommand_from {command.name}", one) for one in command.arguments]
    return "\n".join(lines) + "\n"


def _fish_argument(condition: str, one: Argument) -> str:
    words = " ".join(device_argument.NAMES) if one.value == "devices" else one.words
    flags = "".join(f" {'-l' if flag.startswith('--') else '-s'} {flag.lstrip('-')}" for flag in one.flags)
    choice = f" -a '{words}'" if words else ""
    takes = "" if not one.value else " -F" if one.value == "file" else " -x"  # files, or only the choices
    return _fish_line(condition, flags + choice + (" -r" if one.flags and takes == " -F" else "") + takes, one.help)


def _fish_line(condition: str, what: str, text: str) -> str:
    described = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"complete -c stepgraph -n '{condition}'{what} -d '{described}'"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
